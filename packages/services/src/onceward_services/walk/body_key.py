"""The key that a body may repeat, so that a queued payload is complete by itself."""

from onceward import Execution
from onceward.errors import KeyInvalidError

__all__ = ["check_key_in_body"]


def check_key_in_body(run: Execution, in_body: str | None) -> None:
    """Refuse a key in the body that contradicts the header."""
    record_id = run.request.record_id
    if in_body is not None and record_id is not None and in_body != record_id.key:
        raise KeyInvalidError("idempotencyKey and Idempotency-Key are different keys")
