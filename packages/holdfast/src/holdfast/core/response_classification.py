"""Classification of responses: what a status and a code mean for the entry that was sent. Pure.

======================================  =====================================
2xx                                     ``Done``
404, 410 to a delete                    ``Done``: it no longer exists
409, 422                                by code: the profile's, or ``BY_CODE`` below
... with another code: 409              ``TryLater`` with ``Retry-After``, else ``Conflicting``
... with another code: 422              ``TryLater`` once, then ``Refused``
412, 428                                ``Conflicting``
401                                     ``SignInNeeded``
408, 425, 429, 5xx                      ``TryLater``
3xx                                     ``Misdirected``: never followed
everything else                         ``Refused``
no response                             ``TryLater``, and the outcome is unknown
======================================  =====================================
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from holdfast.core.outbox_entry import Entry, Operation
from holdfast.core.retry import is_transient

__all__ = [
    "BY_CODE",
    "Conflicting",
    "Done",
    "Misdirected",
    "OutOfOrder",
    "Refused",
    "SignInNeeded",
    "TooOld",
    "TryLater",
    "Verdict",
    "classify",
]


class Done(msgspec.Struct, frozen=True):
    """It happened, now or earlier."""


class TryLater(msgspec.Struct, frozen=True):
    """Send the same key and body again later."""

    # It may have happened.
    outcome_unknown: bool = False


class Refused(msgspec.Struct, frozen=True):
    """The server refuses the request as it is."""


class Conflicting(msgspec.Struct, frozen=True):
    """The entity was changed on the server: the entry's strategy decides."""


class TooOld(msgspec.Struct, frozen=True):
    """The action is older than the server accepts."""


class OutOfOrder(msgspec.Struct, frozen=True):
    """The server expects another entry first: the profile's recovery decides."""


class SignInNeeded(msgspec.Struct, frozen=True):
    """The token is not accepted. The entry does not fail."""


class Misdirected(msgspec.Struct, frozen=True):
    """A redirect, for example to a captive portal. The entry does not fail."""


# What a response means: one of the classes above.
Verdict = Done | TryLater | Refused | Conflicting | TooOld | OutOfOrder | SignInNeeded | Misdirected

BY_CODE: Final[Mapping[str, Verdict]] = MappingProxyType(
    {
        # The key was used for another request: a bug, so sending it again cannot succeed.
        "IDEMPOTENCY_CONFLICT": Refused(),
        "idempotency.payload_mismatch": Refused(),
        # The first request is still running.
        "IDEMPOTENCY_IN_PROGRESS": TryLater(outcome_unknown=True),
        "idempotency.in_progress": TryLater(outcome_unknown=True),
        # Another client has changed the entity.
        "concurrency.version_mismatch": Conflicting(),
        # Older than the cap.
        "STALE_ACTION": TooOld(),
        "action.stale": TooOld(),
    }
)
"""409 and 422, by the code of the protocol. A profile adds the codes of its API."""

_GONE: Final = frozenset({404, 410})
_NO_CODES: Final[Mapping[str, Verdict]] = MappingProxyType({})


def classify(  # noqa: PLR0911 - the table
    status: int | None,
    code: str | None,
    entry: Entry,
    codes: Mapping[str, Verdict] = _NO_CODES,
    *,
    has_retry_after: bool = False,
) -> Verdict:
    """Return the meaning of a response; a status of None means no response.

    ``entry`` is as it was claimed: its ``attempt_count`` counts this send, its
    ``last_error_code`` is of the one before. ``codes`` are those of the entry's profile.
    ``has_retry_after`` is whether the response has a ``Retry-After`` header.
    """
    if status is None:
        return TryLater(outcome_unknown=True)
    if is_transient(status):
        # Also for 425 and 429, which reject this copy of the request before it runs. They are not
        # recorded under the key, so a copy that a proxy has sent may still happen.
        return TryLater(outcome_unknown=True)
    match status:
        case _ if 200 <= status < 300:  # noqa: PLR2004
            return Done()
        case _ if 300 <= status < 400:  # noqa: PLR2004
            return Misdirected()
        case 401:
            return SignInNeeded()
        case 409 | 422:
            known = codes.get(code or "") or BY_CODE.get(code or "")
            return known or _unknown(status, entry, has_retry_after=has_retry_after)
        case 412 | 428:  # another version, or none was named: it has to be read first
            return Conflicting()
        case _ if status in _GONE and entry.operation is Operation.DELETE:
            return Done()
        case _:
            return Refused()


def _unknown(status: int, entry: Entry, *, has_retry_after: bool) -> Verdict:
    if status == 409:  # noqa: PLR2004
        # A conflict does not pass by waiting, but a first request that still runs does. As a
        # conflict it could be sent with a new key, and happen twice.
        return TryLater(outcome_unknown=True) if has_retry_after else Conflicting()
    tried_before = entry.attempt_count > 1 and entry.last_error_code == status
    return Refused() if tried_before else TryLater()
