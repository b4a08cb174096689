"""Assertions on responses; each raises ``CheckFailedError`` with the actual response."""

from typing import Any, Final

from holdfast.core.error_formats import CODES
from holdfast.core.policy import ErrorFormat
from holdfast_lab.conformance.harness import JSON, CheckFailedError, Harness, Response

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


def expect(holds: bool, actual: str) -> None:
    """Raise ``CheckFailedError(actual)`` unless ``holds``."""
    if not holds:
        raise CheckFailedError(actual)


def expect_first(response: Response) -> Response:
    """Expect a success that is not a replay."""
    expect(response.is_success, f"{response.summary()}, expected a success")
    expect(
        "idempotency-replayed" not in response.headers, f"{response.summary()}, marked as a replay"
    )
    expect(
        "x-original-request-id" not in response.headers,
        f"{response.summary()}, with the X-Original-Request-ID of a replay",
    )
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
        expect(original == replayed, f"{name} is {replayed!r}, was {original!r}")
    expect(
        response.is_replay,
        f"{response.summary()} without Idempotency-Replayed: true",
    )
    own, original = (
        response.headers.get("x-request-id"),
        response.headers.get("x-original-request-id"),
    )
    expect(own is not None, "a replay without X-Request-ID")
    expect(original is not None, "a replay without X-Original-Request-ID")
    expect(
        original == first.headers.get("x-request-id"),
        "X-Original-Request-ID is not the X-Request-ID of the first response",
    )
    expect(own != original, "X-Request-ID is that of the first request")
    return response


def expect_error(harness: Harness, response: Response, kind: str) -> dict[str, Any]:
    """Expect a complete error of this kind in the operation's error format; returns its details."""
    code = CODES[kind]
    error_format = harness.profile.error_format
    status = harness.profile.mismatch_status if kind == "payload_mismatch" else code.status
    wanted = f"{status} {code.name(error_format)}"
    expect(response.status == status, f"{response.summary()}, expected {wanted}")
    document = response.document()
    expect(
        response.code(error_format) == code.name(error_format),
        f"{response.summary()}, expected {wanted}",
    )
    is_envelope = error_format is ErrorFormat.ENVELOPE
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    wanted_type = JSON if is_envelope else "application/problem+json"
    expect(media_type == wanted_type, f"{response.summary()} as {media_type or 'no type'}")
    for name, of_type in (_ENVELOPE if is_envelope else _PROBLEM).items():
        expect(
            isinstance(document.get(name), of_type),
            f"{response.summary()}: {name} is missing or has the wrong type",
        )
    if not is_envelope:
        expect(
            document["status"] == response.status,
            f"{response.summary()}: status is {document['status']}",
        )
    expect(
        document["requestId"] == response.headers.get("x-request-id"),
        f"{response.summary()}: requestId is not the X-Request-ID of the response",
    )
    expect(not response.is_replay, f"{response.summary()}: marked as a replay")
    details: dict[str, Any] = document["details"]
    return details
