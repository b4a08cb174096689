"""Validate arguments and build a ``NewJob``; log one that is a duplicate."""

import logging
import math
import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Unpack

import msgspec

from onceward.errors import BodyInvalidError, JobPayloadTooLargeError, UsageError
from onceward.jobs.job import (
    Enqueued,
    EnqueueOptions,
    EnqueueOutcome,
    JobName,
    Merged,
    NewJob,
    check_name,
    job_id,
    job_key,
)
from onceward_protocol.fingerprint import canonical_json
from onceward_protocol.ids import new_request_id

# Put larger data in a table and pass its id as the payload.
MAX_PAYLOAD_BYTES: Final = 256 * 1024
MAX_ATTEMPTS: Final = 1000
"""With the delays between them, more than three days of retries: more is a mistake."""

_MAX_NAME_CHARACTERS: Final = 500
# What a column of 64 bits stores.
_MAX_VERSION: Final = 2**63 - 1
# 68 years: more is a mistake, and adding it to a date must not overflow.
MAX_SECONDS: Final = float(2**31 - 1)

# NUL and lone surrogates.
_NOT_STORABLE: Final = re.compile("[\x00\ud800-\udfff]")

_encode = msgspec.json.Encoder().encode

_log = logging.getLogger("onceward.jobs")


class Cause(msgspec.Struct, frozen=True):
    """Who enqueued a job, and the ids that connect it with the request."""

    # The tenant that the job belongs to.
    tenant: str
    # Who caused it.
    actor: str
    # The request that enqueues it.
    request_id: str
    # The chain of requests it belongs to.
    correlation_id: str
    # The W3C trace context, if there is one.
    traceparent: str | None = None


_OPTIONS: Final = frozenset(EnqueueOptions.__annotations__)
_DEFAULTS: Final = EnqueueOptions(queue="default", delay_seconds=0.0, max_attempts=5)


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON. Raises ``ValueError`` or ``TypeError`` if it cannot be."""
    try:
        text = _encode(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply, or contains itself") from error
    if b"null" in text and _has_non_finite(value):  # msgspec encodes NaN as null
        raise ValueError("NaN and Infinity are not allowed in JSON")
    return text


def _text(name: JobName | None, what: str) -> str | None:
    """Return a name as it is stored. Raises ``UsageError``."""
    if name is None:
        return None
    # True would become "True", and is a mistake.
    if not isinstance(name, JobName) or isinstance(name, bool):
        raise UsageError(f"{what} must be text, an integer or a UUID, not {type(name).__name__}")
    return _storable(name if isinstance(name, str) else str(name), what)


def _storable(text: str, what: str) -> str:
    if not 0 < len(text) <= _MAX_NAME_CHARACTERS:
        raise UsageError(f"{what} must have 1 to {_MAX_NAME_CHARACTERS} characters")
    if _NOT_STORABLE.search(text) is not None:
        raise UsageError(
            f"{what} {text!r} contains NUL or a lone surrogate, which databases refuse"
        )
    return text


def _chosen(options: EnqueueOptions, defaults: EnqueueOptions) -> dict[str, Any]:
    """Return the options that are given, and the defaults of others."""
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"enqueue() got an unexpected keyword argument {min(unknown)!r}")
    given = {name: value for name, value in options.items() if value is not None}
    return {**_DEFAULTS, **defaults, **given}


def _check_number(value: object, what: str, most: float, *, least: int = 0) -> None:
    """Raise ``UsageError`` unless a value is in the range: an integer if ``most`` is one."""
    kinds = int if isinstance(most, int) else int | float
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = "an integer" if kinds is int else "a number"
        raise UsageError(f"{what} must be {expected}, not {type(value).__name__}")
    if not least <= value <= most:
        raise UsageError(f"{what} must be from {least} to {int(most)}")


def _check_start(run_at: datetime | None, delay_seconds: float) -> None:
    _check_number(delay_seconds, "delay_seconds", MAX_SECONDS)
    if run_at is None:
        return
    if not isinstance(run_at, datetime):
        raise UsageError(f"run_at must be a datetime, not {type(run_at).__name__}")
    if run_at.tzinfo is None:
        raise UsageError("run_at has no time zone: use an aware datetime")
    try:
        (run_at + timedelta(seconds=delay_seconds)).astimezone(UTC)
    except OverflowError as error:
        raise UsageError("run_at is out of range (years 1 to 9999)") from error


def _has_non_finite(value: Any) -> bool:
    match value:
        case float():
            return not math.isfinite(value)
        case dict():
            return any(_has_non_finite(item) for item in value.values())
        case list() | tuple():
            return any(_has_non_finite(item) for item in value)
        case _:
            return False


def new_job(
    job_type: str,
    payload: Any,
    *,
    cause: Cause,
    defaults: EnqueueOptions | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    **options: Unpack[EnqueueOptions],
) -> NewJob:
    """Validate the options and derive the job's key and id. Raises ``UsageError``.

    ``resource_id`` becomes part of the key; without one the hash of the payload does. ``defaults``
    are for options that are not given, or None.
    """
    chosen = _chosen(options, defaults or {})
    queue = check_name(chosen["queue"], "queue")
    check_name(job_type, "type")
    tenant = chosen.get("tenant", cause.tenant)
    if not isinstance(tenant, str):
        raise UsageError(f"tenant must be text, not {type(tenant).__name__}")
    _storable(tenant, "tenant")
    resource = _text(chosen.get("resource_id"), "resource_id")
    coalesce_key = _text(chosen.get("coalesce"), "coalesce")
    order_key = _text(chosen.get("order"), "order")
    run_at, delay_seconds = chosen.get("run_at"), chosen["delay_seconds"]
    _check_start(run_at, delay_seconds)
    max_attempts = chosen["max_attempts"]
    _check_number(max_attempts, "max_attempts", MAX_ATTEMPTS, least=1)
    version = chosen.get("version")
    if version is not None:
        _check_number(version, "version", _MAX_VERSION)
    try:
        text = encode_json(payload)
        if len(text) > max_payload_bytes:
            raise JobPayloadTooLargeError(
                f"the payload of {job_type} has {len(text)} bytes, at most {max_payload_bytes} are "
                "accepted: store it in a table and enqueue its id"
            )
        digest = sha256(canonical_json(text)).hexdigest()
    except (TypeError, ValueError, BodyInvalidError) as error:
        raise UsageError(f"the payload of {job_type} is not JSON: {error}") from error
    about = resource or coalesce_key or digest
    if coalesce_key is not None:
        about = f"{about}#{new_request_id()}"
    key = job_key(tenant, queue, job_type, about)
    return NewJob(
        id=job_id(key),
        key=key,
        tenant=tenant,
        queue=queue,
        type=job_type,
        payload=text.decode(),
        payload_hash=digest,
        request_id=cause.request_id,
        correlation_id=cause.correlation_id,
        actor=cause.actor,
        resource_id=resource,
        run_at=run_at,
        delay_seconds=delay_seconds,
        coalesce_key=coalesce_key,
        order_key=order_key,
        max_attempts=max_attempts,
        traceparent=cause.traceparent,
        version=version,
    )


def log_duplicate(job: NewJob, outcome: EnqueueOutcome) -> None:
    """Log that a job was not enqueued because one with its key exists.

    At INFO; at DEBUG for a job with ``coalesce``, which is meant to be merged.
    """
    if isinstance(outcome, Enqueued):
        return
    reason = "waits or runs" if isinstance(outcome, Merged) else "is done"
    key = (
        ""
        if job.resource_id or job.coalesce_key
        else "; without resource_id the payload is the key"
    )
    _log.log(
        logging.INFO if job.coalesce_key is None else logging.DEBUG,
        "job not enqueued, %s %s %s: tenant %s%s",
        job.type,
        outcome.job_id,
        reason,
        job.tenant,
        key,
        extra={
            "job_id": outcome.job_id,
            "queue": job.queue,
            "job_type": job.type,
            "tenant": job.tenant,
            "request_id": job.request_id,
            "correlation_id": job.correlation_id,
        },
    )
