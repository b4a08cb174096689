"""Classification of responses: what a status and a code mean for the entry that was sent. Pure.

======================================  =====================================
2xx                                     ``Done``
404, 410 to a delete                    ``Done``: it no longer exists
409, 422                                by code: the profile's, or ``BY_CODE`` below
... with another code: 409              ``TryLater`` with ``Retry-After``, else ``Conflicting``
... with another code: 422              ``TryLater`` once, then ``Refused``
412, 428                                ``Conflicting``
401                                     ``AttestationNeeded`` if the profile has its code as
                                        that, else ``SignInNeeded``
408, 425, 429, 5xx                      ``TryLater``
any other status below, of another      ``NotTheService``: a captive portal, a proxy, a gateway
3xx                                     ``Misdirected``: never followed
everything else                         ``Refused``
no response                             ``TryLater``, and the outcome is unknown
======================================  =====================================

Whether a response is the service's own is decided by the profile's recogniser, by default
``is_service_response``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from onceward_protocol.operation import Operation
from onceward_protocol.retry import is_transient

__all__ = [
    "BY_CODE",
    "SILENT",
    "UNREACHABLE",
    "UNRECOGNISED",
    "AttestationNeeded",
    "Conflicting",
    "Done",
    "Misdirected",
    "NotTheService",
    "OutOfOrder",
    "Recogniser",
    "Refused",
    "SentEntry",
    "SignInNeeded",
    "TooOld",
    "TryLater",
    "Verdict",
    "classify",
    "counts_as_attempt",
    "is_service_response",
]


class SentEntry(Protocol):
    """Context of a response: an entry of the outbox as it was claimed."""

    @property
    def operation(self) -> Operation:
        """Operation of the entry on its entity."""

    @property
    def attempt_count(self) -> int:
        """How often it was sent, this time included."""

    @property
    def last_error_code(self) -> int | None:
        """The status of the send before this one."""


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


class AttestationNeeded(msgspec.Struct, frozen=True):
    """The attestation sent with this entry is not accepted. The entry does not fail."""


class Misdirected(msgspec.Struct, frozen=True):
    """A redirect, for example to a captive portal. The entry does not fail."""


class NotTheService(msgspec.Struct, frozen=True):
    """The page of a captive portal, a proxy or a gateway: the outcome is unknown.

    The entry does not fail. It is sent again with the same key.
    """


# What a response means: one of the classes above.
Verdict = (
    Done
    | TryLater
    | Refused
    | Conflicting
    | TooOld
    | OutOfOrder
    | SignInNeeded
    | AttestationNeeded
    | Misdirected
    | NotTheService
)

Recogniser = Callable[[int, Mapping[str, str], bytes], bool]
"""Returns whether a response is the service's, from status, headers (lower case) and body."""

UNREACHABLE: Final = "unreachable"
"""In the history, the code of a send that never reached the server."""

UNRECOGNISED: Final = "unrecognised"
"""In the history, the code of a send whose response is not the service's."""

SILENT: Final = "silent"
"""In the history, the code of a send without a response while the server responded to no other. It
may have happened."""

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
_OUTAGES: Final = frozenset({429, 502, 503, 504})
_NOT_ABOUT_THE_ENTRY: Final = frozenset({UNREACHABLE, UNRECOGNISED, SILENT})
_UNAUTHORIZED: Final = 401
_NO_CODES: Final[Mapping[str, Verdict]] = MappingProxyType({})


def classify(  # noqa: PLR0911 - the table
    status: int | None,
    code: str | None,
    entry: SentEntry,
    codes: Mapping[str, Verdict] = _NO_CODES,
    *,
    has_retry_after: bool = False,
    recognised: bool = True,
) -> Verdict:
    """Return the meaning of a response; a status of None means no response.

    ``entry`` is as it was claimed: its ``attempt_count`` counts this send, its
    ``last_error_code`` is of the one before. ``codes`` are those of the entry's profile.
    ``has_retry_after`` is whether the response has a ``Retry-After`` header, ``recognised``
    whether the profile recognises it as the service's.
    """
    if status is None:
        return TryLater(outcome_unknown=True)
    if is_transient(status):
        # Also for 425 and 429, which reject this copy of the request before it runs. They are not
        # recorded under the key, so a copy that a proxy has sent may still happen.
        return TryLater(outcome_unknown=True)
    match status:
        case _ if 300 <= status < 400:  # noqa: PLR2004
            return Misdirected()
        case _ if not recognised and status != _UNAUTHORIZED:  # which fails no entry
            return NotTheService()
        case _ if 200 <= status < 300:  # noqa: PLR2004
            return Done()
        case 401:
            known = codes.get(code or "")
            return known if isinstance(known, AttestationNeeded) else SignInNeeded()
        case 409 | 422:
            known = codes.get(code or "") or BY_CODE.get(code or "")
            return known or _unknown(status, entry, has_retry_after=has_retry_after)
        case 412 | 428:  # another version, or none was named: it has to be read first
            return Conflicting()
        case _ if status in _GONE and entry.operation is Operation.DELETE:
            return Done()
        case _:
            return Refused()


def is_service_response(status: int, headers: Mapping[str, str], body: bytes) -> bool:  # noqa: ARG001 - a ``Recogniser``
    """Return whether a response has a sign of the service: JSON, no body, or one of its headers.

    A profile can accept more: ``recognise=lambda *said: is_service_response(*said) or …``.
    """
    if not body or "x-request-id" in headers or "idempotency-replayed" in headers:
        return True
    if "json" in headers.get("content-type", "").lower():
        return True
    return body.lstrip()[:1] in (b"{", b"[") and _is_json(body)


def counts_as_attempt(status: int | None, code: str | None) -> bool:
    """Return whether a send with this result counts against ``max_attempts``.

    Outages, responses that are not the service's, a silent server, and a refused token or
    attestation do not: none of them is about the entry.
    """
    return not (status in _OUTAGES or status == _UNAUTHORIZED or code in _NOT_ABOUT_THE_ENTRY)


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _unknown(status: int, entry: SentEntry, *, has_retry_after: bool) -> Verdict:
    if status == 409:  # noqa: PLR2004
        # A conflict does not pass by waiting, but a first request that still runs does. As a
        # conflict it could be sent with a new key, and happen twice.
        return TryLater(outcome_unknown=True) if has_retry_after else Conflicting()
    tried_before = entry.attempt_count > 1 and entry.last_error_code == status
    return Refused() if tried_before else TryLater()
