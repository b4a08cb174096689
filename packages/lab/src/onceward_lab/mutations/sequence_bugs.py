"""Bugs of strict sequences, on the server and in the outbox."""

from typing import Any

from onceward.guard import sequences
from onceward.guard.chunk import RequestChunk
from onceward.guard.idempotency import Idempotency
from onceward.guard.sequences import ChunkSequences
from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_outbox import enqueue

ENQUEUE, SEQUENCES = untyped(enqueue), untyped(sequences)
_SERVER_ERROR = 500


@bug
def number_used_by_a_server_error() -> list[Replacement]:
    right = Idempotency.abort

    async def abort(self: Any, execution: Any) -> None:
        is_open = not execution.ended
        await right(self, execution)
        if is_open and execution.request.sequence is not None:
            another = await self.store.begin()
            now = self.clock.now()
            await self.sequences.use(execution.request, now, another.statements)
            await another.commit(None, None)

    return [(Idempotency, "abort", abort)]


@bug
def number_used_by_a_failed_item() -> list[Replacement]:
    right = RequestChunk._conclude

    async def conclude(self: Any, execution: Any, response: Any) -> None:
        if response.status >= _SERVER_ERROR and execution.request.sequence is not None:
            self._sequences.use(execution.request)
            self._has_writes = True
        await right(self, execution, response)

    return [(RequestChunk, "_conclude", conclude)]


@bug
def numbers_of_a_chunk_in_another_transaction() -> list[Replacement]:
    right_commit, right_save = RequestChunk.commit, ChunkSequences.save

    async def save(_self: Any, _now: Any, _on: Any) -> bool:
        return True

    async def commit(self: Any) -> bool:
        is_committed = await right_commit(self)
        if is_committed and self._sequences.has_numbers:
            another = await self.store.begin()
            await right_save(self._sequences, self._idempotency.clock.now(), another.statements)
            await another.commit(None, None)
        return is_committed

    return [(ChunkSequences, "save", save), (RequestChunk, "commit", commit)]


@bug
def key_of_a_number_not_distinguished() -> list[Replacement]:
    # What has taken the number of an abandoned request is taken for it.
    return [(SEQUENCES, "key_hash", lambda _key: "0" * 32)]


@bug
def stream_goes_on_over_an_unknown_outcome() -> list[Replacement]:
    # Each entry has a lane of its own, so none waits for the one before it.
    right = ENQUEUE._explicit_lane

    def explicit_lane(draft: Any) -> Any:
        lane = right(draft)
        return None if lane == draft.profile.stream_name else lane

    return [(ENQUEUE, "_explicit_lane", explicit_lane)]
