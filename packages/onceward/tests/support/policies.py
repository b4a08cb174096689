"""Policies that differ in what tests of the server depend on."""

from datetime import timedelta

from onceward import ErrorFormat, ErrorsStored, KeyFormat, Policy, Staleness

__all__ = ["ENVELOPE_WITH_STALENESS", "OPTIONAL_KEY", "STORES_HANDLER_ERRORS", "UUID4_FOR_A_WEEK"]

_WEEK = timedelta(days=7)

ENVELOPE_WITH_STALENESS = Policy(
    name="envelope-with-staleness",
    key_format=KeyFormat.UUID4,
    success_ttl=_WEEK,
    error_ttl=_WEEK,
    errors_stored=ErrorsStored.STALE_ONLY,
    staleness=Staleness(),
    error_format=ErrorFormat.ENVELOPE,
)
# The defaults: a required, opaque key, and the handler's 4xx responses are stored.
STORES_HANDLER_ERRORS = Policy(name="stores-handler-errors")
OPTIONAL_KEY = Policy(
    name="optional-key",
    key_required=False,
    key_format=KeyFormat.UUID4,
    errors_stored=ErrorsStored.NONE,
)
UUID4_FOR_A_WEEK = Policy(name="uuid4-for-a-week", key_format=KeyFormat.UUID4, success_ttl=_WEEK)
