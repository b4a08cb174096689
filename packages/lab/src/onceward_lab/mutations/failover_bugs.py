"""Bugs of the server about commits of unknown outcome, and about a standby that is promoted."""

from typing import Any

from onceward.errors import CommitUnknownError, ServiceError, StoreUnavailableError
from onceward.guard.chunk import RequestChunk
from onceward.guard.idempotency import Idempotency
from onceward.guard.pipeline import Pipeline
from onceward.stores.replication import ReplicationBarrier
from onceward_lab.mutations.planting import Replacement, bug
from onceward_protocol.effect import Effect


@bug
def unknown_commit_taken_for_success() -> list[Replacement]:
    right = Idempotency._commit

    async def commit(self: Any, execution: Any, record: Any, audit: Any) -> None:
        try:
            await right(self, execution, record, audit)
        except CommitUnknownError:
            return

    return [(Idempotency, "_commit", commit)]


@bug
def unknown_commit_reported_as_a_refusal() -> list[Replacement]:
    right = Idempotency._commit

    async def commit(self: Any, execution: Any, record: Any, audit: Any) -> None:
        try:
            await right(self, execution, record, audit)
        except CommitUnknownError:
            raise ServiceError(422, "INSUFFICIENT_POINTS", "the commit failed") from None

    return [(Idempotency, "_commit", commit)]


@bug
def unknown_commit_said_to_have_no_effect() -> list[Replacement]:
    right = Pipeline._refuse

    def refuse(self: Any, error: Any, exchange: Any, **options: Any) -> Any:
        if isinstance(error, StoreUnavailableError):
            exchange.effect = Effect.NONE
        return right(self, error, exchange, **options)

    return [(Pipeline, "_refuse", refuse)]


@bug
def unstored_error_said_to_be_stored() -> list[Replacement]:
    right = Idempotency._conclude_error

    async def conclude_error(self: Any, execution: Any, *args: Any) -> Any:
        outcome = await right(self, execution, *args)
        execution.effect = Effect.STORED
        return outcome

    return [(Idempotency, "_conclude_error", conclude_error)]


@bug
def record_of_an_unknown_commit_remembered() -> list[Replacement]:
    # It is replayed from memory, and the server that is promoted does not have it.
    right = Idempotency._commit

    async def commit(self: Any, execution: Any, record: Any, audit: Any) -> None:
        try:
            await right(self, execution, record, audit)
        except CommitUnknownError:
            if record is not None:
                self.remember(record, execution.epoch)
            raise

    return [(Idempotency, "_commit", commit)]


@bug
def unknown_commit_of_a_chunk_taken_for_success() -> list[Replacement]:
    async def was_committed(_self: Any, _unknown: Any) -> bool:
        return True

    return [(RequestChunk, "_was_committed", was_committed)]


@bug
def record_replayed_before_it_is_on_the_standby() -> list[Replacement]:
    async def wait(_self: Any) -> None:
        return

    return [(ReplicationBarrier, "wait", wait)]
