"""Assertions on responses; each raises ``CheckFailedError`` with the actual response."""

from typing import Any, Final

from onceward.guard.policy import ErrorFormat
from onceward_lab.conformance.harness import JSON, CheckFailedError, Harness, Response
from onceward_protocol.effect import EFFECT_HEADER, Effect
from onceward_protocol.error_codes import CODES

__all__ = ["expect", "expect_error", "expect_first", "expect_replay"]

_REPEATED: Final = ("content-type", "etag", "location")
_ENVELOPE: Final[dict[str, type]] = {
    "error": str,
    "message": str,
    "details": dict,
    "requestId": str,
}
_PROBLEM: Final[dict[str, type]] = {
    "type": str,
    "title": str,
    "status": int,
    "detail": str,
    "code": str,
    "details": dict,
    "requestId": str,
}
_REQUEST_IDS: Final = (
    "Store the X-Request-ID of the first request. Send it as X-Original-Request-ID with each "
    "replay, and the request's own id as X-Request-ID."
)
_FORMAT: Final = (
    "The profile's error_format says which format is expected: problem (RFC 9457) or envelope. For "
    "an app with its own format, give --code-at error.code or --statuses-only."
)
_UNAUTHORIZED: Final = (401, 403)
# Something has happened under the key, and this is not its response.
_UNDECIDED: Final = ("payload_mismatch", "in_progress")
# Errors of the app, not of the guard.
_OWN_KINDS: Final = ("not_authenticated", "not_found")
_CLIENT_ERROR: Final = 400
# How the codes of the guard begin, in both formats.
_GUARD: Final = ("idempotency", "sequence", "ordering")
_SERVER_ERROR: Final = 500


def expect(holds: bool, actual: str, *, change: str | None = None) -> None:
    """Raise ``CheckFailedError(actual)`` unless ``holds``.

    ``change`` says what to change in the server, if it is more specific than the check's own.
    """
    if not holds:
        raise CheckFailedError(actual, change=change)


def expect_first(response: Response) -> Response:
    """Expect a success that is not a replay."""
    expect(
        response.is_success,
        f"{response.summary()}, expected a success",
        change=_refused_by_handler(response),
    )
    expect(
        "idempotency-replayed" not in response.headers,
        f"{response.summary()}, marked as a replay",
        change="Send Idempotency-Replayed only with a stored response, never with an execution.",
    )
    expect(
        "x-original-request-id" not in response.headers,
        f"{response.summary()}, with the X-Original-Request-ID of a replay",
        change="Send X-Original-Request-ID only with a stored response, never with an execution.",
    )
    _expect_effect(response, Effect.STORED)
    return response


def expect_replay(response: Response, first: Response) -> Response:
    """Expect the first response byte for byte, with the headers of a replay."""
    expect(
        response.status == first.status,
        f"{response.summary()}, the first response was {first.summary()}",
    )
    expect(
        response.body == first.body,
        f"{response.summary()}, with another body than the first response",
    )
    for name in _REPEATED:
        original, replayed = first.headers.get(name), response.headers.get(name)
        expect(
            original == replayed,
            f"{name} is {replayed!r}, was {original!r}",
            change=f"Store the header {name} with the response, and send it with each replay.",
        )
    expect(
        response.is_replay,
        f"{response.summary()} without Idempotency-Replayed: true",
        change="If it is the stored response, add the header Idempotency-Replayed: true. If the "
        "handler ran again, look the key up before the handler and store the response with it.",
    )
    own, original = (
        response.headers.get("x-request-id"),
        response.headers.get("x-original-request-id"),
    )
    expect(own is not None, "a replay without X-Request-ID", change=_REQUEST_IDS)
    expect(original is not None, "a replay without X-Original-Request-ID", change=_REQUEST_IDS)
    expect(
        original == first.headers.get("x-request-id"),
        "X-Original-Request-ID is not the X-Request-ID of the first response",
        change=_REQUEST_IDS,
    )
    expect(own != original, "X-Request-ID is that of the first request", change=_REQUEST_IDS)
    _expect_effect(response, Effect.STORED)
    return response


def expect_error(harness: Harness, response: Response, kind: str) -> dict[str, Any]:
    """Expect a complete error of this kind in the operation's error format; returns its details."""
    code, profile = CODES[kind], harness.profile
    error_format = profile.error_format
    status = profile.mismatch_status if kind == "payload_mismatch" else code.status
    wanted = str(status) if profile.statuses_only else f"{status} {code.name(error_format)}"
    expect(
        response.status == status,
        f"{response.summary()}, expected {wanted}",
        change=_other_status(response, kind, wanted),
    )
    expect(
        not response.is_replay,
        f"{response.summary()}: marked as a replay",
        change="Do not store this error: the next request with the key decides again.",
    )
    _expect_effect(response, *(() if kind in _UNDECIDED else Effect))
    if profile.statuses_only or (profile.own_errors and kind in _OWN_KINDS):
        return {}
    document = response.document()
    default = "error" if error_format is ErrorFormat.ENVELOPE else "code"
    where, found = profile.code_at or default, harness.code_of(response)
    sent = f"the code {found!r}" if found else "no code"
    expect(
        found == code.name(error_format),
        f"{response.status} with {sent} at {where}, expected the code {code.name(error_format)}",
        change=f'Send the code {code.name(error_format)} as the member "{where}" of the body. '
        f"{_FORMAT}",
    )
    if profile.has_own_format:
        return {}
    is_envelope = error_format is ErrorFormat.ENVELOPE
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    wanted_type = JSON if is_envelope else "application/problem+json"
    expect(
        media_type == wanted_type,
        f"{response.summary()} as {media_type or 'no type'}",
        change=f"Send errors as {wanted_type}. {_FORMAT}",
    )
    for name, of_type in (_ENVELOPE if is_envelope else _PROBLEM).items():
        expect(
            isinstance(document.get(name), of_type),
            f"{response.summary()}: {name} is missing or has the wrong type",
            change=f"Add the member {name} to error bodies. {_FORMAT}",
        )
    if not is_envelope:
        expect(
            document["status"] == response.status,
            f"{response.summary()}: status is {document['status']}",
        )
    expect(
        document["requestId"] == response.headers.get("x-request-id"),
        f"{response.summary()}: requestId is not the X-Request-ID of the response",
        change="Send the same id in the header X-Request-ID and in the error body.",
    )
    details: dict[str, Any] = document["details"]
    return details


def _expect_effect(response: Response, *allowed: Effect) -> None:
    """Expect one of these values of ``Onceward-Effect``, or no such header: it is optional."""
    found = response.headers.get(EFFECT_HEADER)
    expect(
        found is None or found in set(allowed),
        f"{response.summary()} with Onceward-Effect: {found}",
        change="Send Onceward-Effect: stored only with the response that is stored under the key, "
        "none only if nothing has happened under it, and no such header on a mismatch or while "
        "the first request runs: clients send again, or give up, by it.",
    )


def _refused_by_handler(response: Response) -> str | None:
    """Return the advice for when the handler, not the check of the key, refused a valid request."""
    code = response.code(ErrorFormat.PROBLEM) or response.code(ErrorFormat.ENVELOPE) or ""
    if response.status in _UNAUTHORIZED:
        return "Check the credentials: --token, --secret, or sign_in in the profile."
    if response.status >= _SERVER_ERROR:
        return "The handler failed: read the log of the server."
    if response.status >= _CLIENT_ERROR and not code.lower().startswith(_GUARD):
        return (
            "The server does not accept the profile's request: correct its path and body, or the "
            "validation in the server."
        )
    return None


def _other_status(response: Response, kind: str, wanted: str) -> str | None:
    """Return the advice for when another status than the expected one was sent."""
    if response.status >= _SERVER_ERROR:
        return f"Catch the error and respond {wanted}: the log of the server has the traceback."
    if kind == "payload_mismatch" and response.status == CODES["field_not_allowed"].status:
        return (
            'If the server follows the IETF draft, set "mismatch_status": 422 in the profile; '
            f"otherwise respond {wanted}."
        )
    return None
