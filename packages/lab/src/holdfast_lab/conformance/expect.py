"""What has to come: successes, replays, errors in the right dialect. Raises what came instead."""

from typing import Any, Final

from holdfast.core.error_formats import CODES
from holdfast.core.policy import ErrorFormat
from holdfast_lab.conformance.harness import JSON, Answer, Kit, UnmetError

__all__ = ["expect", "expect_error", "expect_fresh", "expect_replay"]

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


def expect(holds: bool, came: str) -> None:
    """Raise what came unless it is as it should be."""
    if not holds:
        raise UnmetError(came)


def expect_fresh(answer: Answer) -> Answer:
    """Demand that the operation was done, and by this very request."""
    expect(answer.is_success, f"{answer.told()} where a success was due")
    expect("idempotency-replayed" not in answer.headers, f"{answer.told()}, marked as a replay")
    expect(
        "x-original-request-id" not in answer.headers,
        f"{answer.told()}, with the X-Original-Request-ID of a replay",
    )
    return answer


def expect_replay(answer: Answer, first: Answer) -> Answer:
    """Demand the first answer, byte for byte, and the marks of a replay."""
    expect(answer.status == first.status, f"{answer.told()}, the first was {first.told()}")
    expect(answer.body == first.body, f"{answer.told()}, with other bytes than the first")
    for name in _REPEATED:
        was, came = first.headers.get(name), answer.headers.get(name)
        expect(was == came, f"{name} is {came!r}, was {was!r}")
    expect(
        answer.is_replay,
        f"{answer.told()} without Idempotency-Replayed: true",
    )
    own, original = answer.headers.get("x-request-id"), answer.headers.get("x-original-request-id")
    expect(own is not None, "a replay without X-Request-ID")
    expect(original is not None, "a replay without X-Original-Request-ID")
    expect(
        original == first.headers.get("x-request-id"),
        "X-Original-Request-ID is not the X-Request-ID of the first answer",
    )
    expect(own != original, "X-Request-ID is the first request's, not this one's own")
    return answer


def expect_error(kit: Kit, answer: Answer, kind: str) -> dict[str, Any]:
    """Demand an error of this kind, whole and in the operation's dialect; returns its details."""
    code = CODES[kind]
    error_format = kit.profile.error_format
    status = kit.profile.mismatch_status if kind == "payload_mismatch" else code.status
    wanted = f"{status} {code.name(error_format)}"
    expect(answer.status == status, f"{answer.told()} where {wanted} was due")
    document = answer.document()
    expect(
        answer.code(error_format) == code.name(error_format),
        f"{answer.told()} where {wanted} was due",
    )
    is_envelope = error_format is ErrorFormat.ENVELOPE
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    wanted_type = JSON if is_envelope else "application/problem+json"
    expect(media_type == wanted_type, f"{answer.told()} as {media_type or 'no type'}")
    for name, of_type in (_ENVELOPE if is_envelope else _PROBLEM).items():
        expect(
            isinstance(document.get(name), of_type),
            f"{answer.told()}: {name} is not as it should be",
        )
    if not is_envelope:
        expect(
            document["status"] == answer.status, f"{answer.told()}: status is {document['status']}"
        )
    expect(
        document["requestId"] == answer.headers.get("x-request-id"),
        f"{answer.told()}: requestId is not the X-Request-ID of the answer",
    )
    expect(not answer.is_replay, f"{answer.told()}: marked as a replay")
    details: dict[str, Any] = document["details"]
    return details
