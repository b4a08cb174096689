"""Compares each response with the server's records when it leaves the server."""

import sqlite3
from collections import Counter
from typing import Final

from onceward_lab.history import ResponseSeen
from onceward_lab.simulation.batches import header_of, parts_of
from onceward_outbox.transport import Request
from onceward_protocol.effect import Effect

__all__ = ["RecordCheck"]

_ERROR: Final = 400
_UNPROCESSABLE: Final = 422
_SKIPPED: Final = 424
_SERVER_ERROR: Final = 500
_SELECT: Final = (
    "SELECT response_status, response_body FROM onceward_idempotency_records"
    " WHERE tenant = ? AND endpoint = ? AND idempotency_key = ?"
)


class RecordCheck:
    """Collects responses that are no records, and records of what was not run."""

    def __init__(self, reader: sqlite3.Connection) -> None:
        self._reader = reader
        # How often a key has reached a server.
        self._deliveries: Counter[tuple[str, str]] = Counter()
        self.differences: list[str] = []
        self.left_behind: list[str] = []

    def on_delivery(self, request: Request) -> None:
        """Note that a request has reached a server."""
        caller = (header_of(request, "Authorization") or "").removeprefix("Bearer ")
        for part in parts_of(request):
            self._deliveries[caller, header_of(part, "Idempotency-Key") or ""] += 1

    def on_response(self, seen: ResponseSeen, request: Request, *, is_certain: bool) -> None:
        """Compare a response with what is committed now.

        ``is_certain`` is False if a server error may be about a commit that was applied.
        """
        key = request.headers.get("Idempotency-Key", "")
        endpoint = _endpoint(request)
        record = self._reader.execute(_SELECT, (seen.tenant, endpoint, key)).fetchone()
        name = seen.action or key
        must_be_stored = (
            seen.status < _ERROR
            or (seen.status == _UNPROCESSABLE and seen.stored)
            or seen.effect == Effect.STORED
        )
        if must_be_stored and record != (seen.status, seen.body):
            what = "there is no record" if record is None else f"the record is {record[0]}"
            self.differences.append(f"{name} got {seen.status}, and {what}")
        # Otherwise another request may have run it.
        is_only_one = self._deliveries[seen.tenant, key] == 1
        is_failure = is_certain and (seen.status == _SKIPPED or seen.status >= _SERVER_ERROR)
        if not is_failure and not (seen.effect == Effect.NONE and is_only_one):
            return
        if record is not None and (is_only_one or record[0] == seen.status):
            self.left_behind.append(f"{name} got {seen.status}, and has a record")
        elif is_only_one and seen.action is not None and self._has_effect(seen):
            self.left_behind.append(f"{name} got {seen.status}, and has an effect")

    def _has_effect(self, seen: ResponseSeen) -> bool:
        found = self._reader.execute(
            "SELECT 1 FROM effects WHERE tenant = ? AND action_id = ?", (seen.tenant, seen.action)
        )
        return found.fetchone() is not None


def _endpoint(request: Request) -> str:
    path = request.target.partition("?")[0]
    if path in {"/steps", "/moves"}:
        return path[1:]
    return "notes.create" if request.method == "POST" else "notes.change"
