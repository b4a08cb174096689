"""The idempotency policy of the walk service."""

from datetime import timedelta
from typing import Final

from onceward import ErrorFormat, ErrorsStored, KeyFormat, Policy, Staleness

__all__ = ["POLICY", "VOLATILE_FIELDS"]

# New on every send of the same action.
VOLATILE_FIELDS: Final = frozenset({"clientSubmittedAt", "attestationToken"})

# Actions are made offline and may arrive days later. Errors are not stored: a walker who lacked
# points may have them at the retry. Only "too old" is final.
POLICY: Final = Policy(
    name="walk",
    key_format=KeyFormat.UUID4,
    success_ttl=timedelta(days=7),
    error_ttl=timedelta(days=7),
    errors_stored=ErrorsStored.STALE_ONLY,
    staleness=Staleness(),
    error_format=ErrorFormat.ENVELOPE,
    # Apps repeat the key and the number of the step in the body; header and path decide.
    volatile_fields=VOLATILE_FIELDS | {"idempotencyKey", "stepIndex"},
    # Attestations are made for one action.
    batch_headers=("x-firebase-appcheck",),
)
