"""Making a job out of a wish: checks, key, identity. The table decides what becomes of it."""

import math
import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final

import msgspec

from holdfast.core.canonical_json import canonical_json
from holdfast.core.job import NewJob, check_name, job_id, job_key
from holdfast.errors import BodyInvalidError, JobPayloadTooLargeError, UsageError
from holdfast.ids import new_request_id

__all__ = [
    "LONGEST_SECONDS",
    "MAX_PAYLOAD_BYTES",
    "MOST_ATTEMPTS",
    "Cause",
    "encode_json",
    "new_job",
]

# A job says what to do, not everything it takes: larger things belong into tables of their own.
MAX_PAYLOAD_BYTES: Final = 256 * 1024
MOST_ATTEMPTS: Final = 1000
"""With the delays between them that is more than three days of trying: above it is a mistake."""

_MOST_TEXT: Final = 500
# 68 years: what is longer is a mistake, and adding it to a date must not overflow.
LONGEST_SECONDS: Final = float(2**31 - 1)

# NUL, and half a surrogate pair.
_UNSPEAKABLE: Final = re.compile("[\x00\ud800-\udfff]")

_encode = msgspec.json.Encoder().encode


class Cause(msgspec.Struct, frozen=True):
    """Who caused a job, and the ids that go along with it from the request to the last effect."""

    tenant: str
    actor: str
    request_id: str
    correlation_id: str


def encode_json(value: Any) -> bytes:
    """Write a value as JSON. Raises ``ValueError`` or ``TypeError`` for what is none."""
    try:
        text = _encode(value)
    except RecursionError as error:
        raise ValueError("it is nested too deep, or contains itself") from error
    if b"null" in text and _has_no_number(value):  # what msgspec writes for it
        raise ValueError("NaN and Infinity are no numbers there")
    return text


def _check_instant(run_at: datetime, delay_seconds: float) -> None:
    if run_at.tzinfo is None:
        raise UsageError("run_at should have a time zone")
    try:
        (run_at + timedelta(seconds=delay_seconds)).astimezone(UTC)
    except OverflowError as error:
        raise UsageError("run_at should be an instant that a calendar has") from error


def _has_no_number(value: Any) -> bool:
    match value:
        case float():
            return not math.isfinite(value)
        case dict():
            return any(_has_no_number(item) for item in value.values())
        case list() | tuple():
            return any(_has_no_number(item) for item in value)
        case _:
            return False


def new_job(
    job_type: str,
    payload: Any,
    *,
    cause: Cause,
    queue: str = "default",
    resource_id: str | None = None,
    run_at: datetime | None = None,
    delay_seconds: float = 0.0,
    coalesce: str | None = None,
    order: str | None = None,
    max_attempts: int = 5,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> NewJob:
    """Check a wish and give it its key.

    ``resource_id`` says what the job is about; without one the payload's hash does. ``coalesce``
    merges it into one that waits under the same name; ``order`` runs one at a time per name.
    """
    check_name(queue, "queue")
    check_name(job_type, "type")
    names = {"resource_id": resource_id, "coalesce": coalesce, "order": order}
    for what, name in (names | {"tenant": cause.tenant}).items():
        if name is not None and not 0 < len(name) <= _MOST_TEXT:
            raise UsageError(f"{what} should be 1 to {_MOST_TEXT} characters")
        if name is not None and _UNSPEAKABLE.search(name) is not None:
            raise UsageError(f"{what} {name!r} has a character that databases do not take")
    if not 1 <= max_attempts <= MOST_ATTEMPTS:
        raise UsageError(f"max_attempts should be a number from 1 to {MOST_ATTEMPTS}")
    if not 0 <= delay_seconds <= LONGEST_SECONDS:
        raise UsageError(f"delay_seconds should be a number from 0 to {LONGEST_SECONDS:.0f}")
    if run_at is not None:
        _check_instant(run_at, delay_seconds)
    try:
        text = encode_json(payload)
        if len(text) > max_payload_bytes:
            raise JobPayloadTooLargeError(
                f"the payload of {job_type} has {len(text)} bytes, at most {max_payload_bytes} are "
                "taken: keep it in a table and enqueue its id"
            )
        digest = sha256(canonical_json(text)).hexdigest()
    except (TypeError, ValueError, BodyInvalidError) as error:
        raise UsageError(f"the payload of {job_type} is not JSON: {error}") from error
    about = resource_id or coalesce or digest
    if coalesce is not None:
        about = f"{about}#{new_request_id()}"
    key = job_key(cause.tenant, queue, job_type, about)
    return NewJob(
        id=job_id(key),
        key=key,
        tenant=cause.tenant,
        queue=queue,
        type=job_type,
        payload=text.decode(),
        payload_hash=digest,
        request_id=cause.request_id,
        correlation_id=cause.correlation_id,
        actor=cause.actor,
        resource_id=resource_id,
        run_at=run_at,
        delay_seconds=delay_seconds,
        coalesce_key=coalesce,
        order_key=order,
        max_attempts=max_attempts,
    )
