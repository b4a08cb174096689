"""Runs the items of one batch in order, in chunks that share a transaction.

::

    items ──▶ chunk: claim all keys ──▶ item · item · item ──▶ commit ──▶ results
      ▲          │ a key is held              │ 5xx, stalled, cannot share
      └──────────┴── the rest goes on ────────┴── commit what is before it, run it alone

Each item is a request to the app, served by an ``ItemServer``. What an item responds in a chunk
counts after the commit only; if the commit fails, its items run again, each alone. If an item has
to be undone in a chunk without savepoints, its items run again in one with savepoints.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

from onceward.batch.alone_endpoints import AloneEndpoints, UndoneEndpoints
from onceward.batch.options import BatchOptions, ItemReport
from onceward.errors import BatchSkippedError, BodyInvalidError, RequestError, StoreUnavailableError
from onceward.guard.chunk import RequestChunk
from onceward.guard.error_formats import INTERNAL, ErrorFormatter, render_error
from onceward.guard.execution import Exchange, ItemContext
from onceward.guard.idempotency import Idempotency
from onceward.guard.pipeline import Reply
from onceward.guard.policy import Policy
from onceward.guard.request import Identify, Principal, RequestHead
from onceward.guard.request_body import LARGE_BODY_BYTES
from onceward.guard.route_table import SAFE_METHODS, Match
from onceward.records import RecordId, Response
from onceward_protocol.batch import ITEM_HEADERS, BatchItem, Results, check_headers, parse_item
from onceward_protocol.error_codes import CODES, ErrorFormat
from onceward_protocol.ids import new_request_id
from onceward_protocol.keys import parse_key

FindRoute = Callable[[str, str], Match | None]

# Headers of the batch that are about its own body, or that an item has instead.
_OWN_HEADERS: Final = frozenset(
    {
        *(name.encode() for name in ITEM_HEADERS),
        *(b"accept-encoding", b"connection", b"content-digest", b"content-encoding"),
        *(b"content-length", b"content-md5", b"digest", b"expect", b"idempotency-key"),
        *(b"if-modified-since", b"if-none-match", b"if-unmodified-since", b"keep-alive", b"range"),
        *(b"repr-digest", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"x-client-id"),
        *(b"x-request-id", b"x-sequence"),
    }
)
_STORE_DOWN: Final = frozenset(
    {
        CODES[StoreUnavailableError.kind].problem.encode(),
        CODES[StoreUnavailableError.kind].envelope.encode(),
    }
)
# When to send the rest, after a key that another request holds.
_HELD_SECONDS: Final = 1.0
# What the framing of a result takes, about.
_RESULT_BYTES: Final = 256
_CANCEL_SECONDS: Final = 5.0
_FIRST_SUCCESS, _FIRST_REDIRECT, _FIRST_SERVER_ERROR = 200, 300, 500

_UNKNOWN: Final = Match("", Policy(), {})
_NO_RESPONSE: Final = Response(0, (), b"")

_log = logging.getLogger("onceward.request")


class _Entry:
    """One item, what is known about it before it runs, and its result."""

    __slots__ = ("context", "error", "headers", "is_alone", "item", "match", "record_id")

    def __init__(self, raw: bytes) -> None:
        self.context = ItemContext()
        self.item: BatchItem | None = None
        # Why the item cannot be read.
        self.error: RequestError | None = None
        self.match: Match | None = None
        # None if it is not known before the request runs.
        self.record_id: RecordId | None = None
        # It has failed in a chunk.
        self.is_alone = False
        # Those of its request, if they are known before it runs.
        self.headers: list[tuple[bytes, bytes]] | None = None
        try:
            self.item = parse_item(raw)
        except RequestError as error:
            self.error = error


class ItemRequest(NamedTuple):
    """The request of an item."""

    method: str
    # Decoded, without the query.
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ItemCall:
    """One attempt to serve an item, and its response."""

    __slots__ = (
        *("_entry", "_loop", "_on_response", "ended_at", "exchange", "is_postponed", "is_stalled"),
        *("request", "sent", "started_at", "task"),
    )

    def __init__(
        self,
        entry: _Entry,
        request: ItemRequest,
        loop: asyncio.AbstractEventLoop,
        on_response: "Callable[[_Done], None]",
    ) -> None:
        """``on_response`` is called once, when the response is known; it may wait for a commit."""
        self.request = request
        # Set by what serves it, if that is the guard.
        self.exchange: Exchange | None = None
        self.started_at = self.ended_at = loop.time()
        self._entry = entry
        self._on_response: Callable[[_Done], None] | None = on_response
        # The response was sent.
        self.sent: asyncio.Future[Response] = loop.create_future()
        self.task: asyncio.Task[None] | None = None
        self.is_stalled = False
        self.is_postponed = False
        self._loop = loop

    @property
    def context(self) -> ItemContext:
        return self._entry.context

    @property
    def match(self) -> Match:
        assert self._entry.match is not None  # noqa: S101 - or the item is refused
        return self._entry.match

    def take(self, reply: Reply) -> None:
        self.complete(Response(reply.status, tuple(reply.headers), reply.body))

    def complete(self, response: Response) -> None:
        """Note that the response was sent; the first one counts."""
        if self.sent.done():
            return
        self.sent.set_result(response)
        match = self._entry.match
        # Dependencies of a request that was not claimed may still hold a savepoint: then the end of
        # the task counts.
        if match is None or not match.is_claimed_late:
            self.respond(response)

    def respond(self, response: Response) -> None:
        """Note the response; the first one counts."""
        on_response, self._on_response = self._on_response, None
        if on_response is not None:
            self.ended_at = self._loop.time()
            on_response(_Done(self._entry, response, self))

    def stall(self) -> None:
        """Note that the request has taken too long; its response does not count any more."""
        if self._on_response is not None:
            self.is_stalled = True
            self.respond(_NO_RESPONSE)

    def end(self, internal: Callable[[], Response]) -> None:
        """Note the end of the task; without a response it was an internal error."""
        assert self.task is not None  # noqa: S101 - this is its callback
        error = None if self.task.cancelled() else self.task.exception()
        if error is not None and not self.is_postponed:
            _log.error("unhandled error in an item of a batch", exc_info=error)
        if not self.sent.done():
            self.sent.set_result(internal())
        self.respond(self.sent.result())


class ItemServer(Protocol):
    """Serves requests of items: the app, or the guard in it."""

    def __call__(self, call: ItemCall) -> Coroutine[Any, Any, None]:
        """Serve a request; pass its response to ``call``. May go on with background tasks."""


@dataclass(slots=True)
class _Done:
    """An item with a response, which its call may not have sent yet."""

    entry: _Entry
    response: Response
    call: ItemCall | None


class _InTurn:
    """Runs the calls of a chunk one after the other.

    Each response starts the next call at once: to wake a task that does it would take a turn of the
    event loop, which costs as much as the rest of this module.
    """

    def __init__(
        self,
        start: Callable[[Callable[[_Done], None]], ItemCall | None],
        keep: Callable[[_Done], bool],
        look_ahead: Callable[[], None],
        stall_seconds: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``start`` starts the next call, ``keep`` returns whether to go on after a response.

        ``look_ahead`` is called while a call waits for the first time.
        """
        self._start = start
        self._keep = keep
        self._look_ahead = look_ahead
        self._stall_seconds = stall_seconds
        self._loop = loop
        self._ended: asyncio.Future[_Done | None] = loop.create_future()
        self._call: ItemCall | None = None
        self._since = loop.time()

    async def run(self) -> _Done | None:
        """Return None after the last call, or the one after which it did not go on."""
        timer = self._loop.call_later(self._stall_seconds, self._watch)
        try:
            self._next()
            return await self._ended
        finally:
            timer.cancel()
            self._call = None

    def _next(self) -> None:
        self._since = self._loop.time()
        try:
            self._call = self._start(self._respond)
            if self._call is None:
                self._ended.set_result(None)
            else:
                self._loop.call_soon(self._look_ahead)
        except Exception as error:  # noqa: BLE001 - raised by run(), not in the app of the last item
            self._ended.set_exception(error)

    def _respond(self, done: _Done) -> None:
        if self._ended.done():
            return
        if done.response is _NO_RESPONSE or not self._keep(done):
            self._ended.set_result(done)
        else:
            self._next()

    def _watch(self) -> None:
        """Stop a call that takes too long; look again later if it does not."""
        left = self._since + self._stall_seconds - self._loop.time()
        if self._call is None or self._ended.done():
            return
        if left <= 0:
            self._call.stall()
        else:
            self._loop.call_later(left, self._watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The settings shared by the batches of an app, and the server of this one's items."""

    options: BatchOptions
    idempotency: Idempotency
    find: FindRoute
    # Returns the caller from a head; None if only the app's own dependencies know the caller.
    identify: Identify | None
    alone: AloneEndpoints
    undone: UndoneEndpoints
    slots: asyncio.Semaphore
    error_format: ErrorFormat | ErrorFormatter
    items: ItemServer
    # Serves the requests that share a transaction; None: as the others.
    shared_items: ItemServer | None


class BatchRun:
    """One batch being run. ``tasks`` are the calls; they may go on with background tasks."""

    def __init__(
        self,
        texts: Sequence[bytes],
        head: RequestHead,
        settings: BatchSettings,
        *,
        root: str,
        has_prefix: bool,
    ) -> None:
        """``root`` is the prefix at which the app is mounted, without a slash at its end.

        Servers differ in whether paths begin with it: ``has_prefix`` says so.
        """
        self._settings = settings
        self._shared_items = settings.shared_items
        self._entries = [_Entry(text) for text in texts]
        self._idempotency = settings.idempotency
        self._options = options = settings.options
        # An item of this batch had to be undone.
        self._has_undone = False
        self._headers = [pair for pair in head.headers if pair[0].lower() not in _OWN_HEADERS]
        self._correlation_id = head.correlation_id.encode("latin-1")
        self._root = root
        self._has_prefix = has_prefix
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + options.max_seconds
        self._results: list[_Done] = []
        self._size = 0
        # By method and path: most items of a batch have the same.
        self._routes: dict[tuple[str, str], Match | None] = {}
        self._references = Results()
        self._failed_lanes: set[tuple[str, str]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        # Seconds after which to send the rest; None if every item has a result.
        self.retry_after: float | None = None
        store = settings.idempotency.store
        self._chunk_store = store if store.chunk_items else None
        self._chunk_items = options.chunk_items or (
            1 if self._chunk_store is None else self._chunk_store.chunk_items
        )

    async def run(self) -> list[Response]:
        """Return the responses of the items, from the first on; maybe not of all."""
        try:
            while len(self._results) < len(self._entries) and self.retry_after is None:
                if self._results and self._is_full(self._size):
                    self.retry_after = 0.0
                    break
                entries = await self._plan()
                if len(entries) > 1:
                    await self._run_chunk(entries)
                else:
                    await self._run_alone(entries[0])
        except BaseException:
            for task in self.tasks:
                task.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=_CANCEL_SECONDS)
            raise
        return [done.response for done in self._results]

    def _is_full(self, size: int) -> bool:
        return size >= self._options.max_response_bytes or self._loop.time() >= self._until

    # -- what to run together ------------------------------------------------------------------

    async def _plan(self) -> list[_Entry]:
        """Return the next items that may share a transaction; a single one runs alone."""
        at = len(self._results)
        first = self._entries[at]
        if self._chunk_store is None or self._chunk_items == 1:
            return [first]
        planned: list[_Entry] = []
        tenant: str | None = None
        shared = 0
        for entry in self._entries[at : at + self._chunk_items]:
            if entry.item is not None:
                if not await self._may_share(entry, entry.item):
                    break
                if entry.record_id is not None:
                    if tenant not in {None, entry.record_id.tenant}:
                        break
                    tenant = entry.record_id.tenant
                shared += 1
            planned.append(entry)
        return planned if shared > 1 else [first]

    async def _may_share(self, entry: _Entry, item: BatchItem) -> bool:
        """Find route, caller and key of an item; return whether it may share a transaction."""
        if entry.is_alone:
            return False
        match = entry.match
        if match is None:
            match = entry.match = self._route(item.method, item.path)
        if match is None:
            return True  # refused, or found when its placeholders are replaced
        if match.policy.batch_alone or match.endpoint in self._settings.alone:
            return False
        if item.key is None:
            return match.policy.key_field is not None
        if match.is_claimed_late or self._settings.identify is None or entry.record_id is not None:
            return True
        with suppress(Exception):  # the request itself fails for it, with its own response
            if entry.context.principal is None:
                path, _, query = item.path.partition("?")
                entry.headers = self._item_headers(item, item.headers, item.body, match.policy)
                head = entry.context.head = RequestHead(
                    item.method,
                    self._path_in_app(unquote(path)) or "",
                    query.encode("ascii", "replace"),
                    entry.headers,
                )
                found = self._settings.identify(head)
                principal = await found if inspect.isawaitable(found) else found
                if isinstance(principal, Principal):
                    entry.context.principal = principal
                    entry.context.seen_headers = tuple(entry.headers)
            principal = entry.context.principal
            key = parse_key([item.key.encode()], match.policy.key_format)
            if principal is not None and key is not None and match.policy.key_field is None:
                entry.record_id = RecordId(principal.tenant, match.endpoint, key)
        return True

    def _route(self, method: str, path: str) -> Match | None:
        if method in SAFE_METHODS:
            return None
        found = self._routes.get((method, path), _UNKNOWN)
        if found is _UNKNOWN:
            in_app = self._path_in_app(unquote(path.partition("?")[0]))
            # A batch in a batch is refused, even where a template of the app has the same path.
            is_refused = in_app is None or in_app == self._options.path
            found = None if is_refused else self._settings.find(method, in_app or "")
            self._routes[method, path] = found
        return found

    def _path_in_app(self, path: str) -> str | None:
        """Return the path of an item without the prefix of the app; None if it is not below it.

        Without the prefix, a request could not have reached the app: middleware that looks at paths
        does not expect it.
        """
        if self._root and path.startswith(f"{self._root}/"):
            return path.removeprefix(self._root)
        return None if self._has_prefix else path

    # -- chunks --------------------------------------------------------------------------------

    async def _run_chunk(self, entries: list[_Entry]) -> None:
        assert self._chunk_store is not None  # noqa: S101 - or entries is one
        async with self._settings.slots:
            chunk = RequestChunk(
                self._idempotency,
                self._chunk_store,
                is_direct=self._shared_items is not None,
                has_savepoints=self._has_undone or any(map(self._may_be_undone, entries)),
            )
            try:
                entries = await self._claim(chunk, entries)
                done, postponed = await self._run_in(chunk, entries)
                is_committed = await chunk.commit()
            except StoreUnavailableError as unknown:
                await chunk.discard()
                self._forget_chunk()
                self._finish_unknown(unknown, entries)
                return
            except BaseException:
                await asyncio.shield(chunk.discard())
                raise
        await self._end_calls([] if is_committed else done, postponed)
        if is_committed:
            await self._finish_chunk(entries, done, postponed)
            return
        self._forget_chunk()
        if chunk.needs_savepoints and postponed is not None:
            self._has_undone = True
            if postponed.entry.match is not None:
                self._settings.undone.add(postponed.entry.match.endpoint)
            return
        for each in done:
            await self._run_alone(each.entry)
            if self.retry_after is not None:
                return

    def _finish_unknown(self, unknown: StoreUnavailableError, entries: list[_Entry]) -> None:
        """Add the results of a chunk whose commit is unknown, up to the first item that has run."""
        for entry in entries:
            refused = self._prepare(entry)
            response = refused if isinstance(refused, Response) else self._render(unknown, entry)
            self._note(entry, response)
            self._finish(_Done(entry, response, None))
            if response is not refused:
                return

    def _may_be_undone(self, entry: _Entry) -> bool:
        """Return whether an item needs a savepoint, by what is known before it runs."""
        match = entry.match
        # What its dependencies do before the claim is rolled back.
        return match is not None and (
            match.is_claimed_late or match.endpoint in self._settings.undone
        )

    async def _finish_chunk(
        self, entries: list[_Entry], done: list[_Done], postponed: _Done | None
    ) -> None:
        """Add the results of a chunk that was committed; run alone what could not be in it."""
        for each in done:
            if each.call is not None:
                sent = each.call.sent
                each.response = sent.result() if sent.done() else await sent
                if self._shared_items is not None and self._options.on_item is not None:
                    self._report(each.call, each.response.status, self._options.on_item)
            self._finish(each)
        if self.retry_after is not None:
            return
        if not done:
            await self._run_alone(entries[0])
        elif postponed is not None and postponed.entry.is_alone:
            await self._run_postponed(postponed.entry)

    async def _claim(self, chunk: RequestChunk, entries: list[_Entry]) -> list[_Entry]:
        """Claim the keys that are known; return the items before the first that is held."""
        wanted = [entry for entry in entries if entry.record_id is not None]
        ids = [entry.record_id for entry in wanted if entry.record_id is not None]
        try:
            count = await chunk.claim(ids)
        except (StoreUnavailableError, RequestError):
            await chunk.discard()  # each item alone finds out what is wrong with it
            return entries[:1]
        if count == len(ids):
            return entries
        before = entries[: entries.index(wanted[count])]
        if not before and self._results:
            self.retry_after = _HELD_SECONDS
        return before or entries[:1]

    async def _run_in(  # noqa: C901 - two functions that share what is done
        self, chunk: RequestChunk, entries: list[_Entry]
    ) -> tuple[list[_Done], _Done | None]:
        """Run items in a chunk; return those that have responded, and one that has to run again."""
        done: list[_Done] = []
        waiting, ahead = iter(entries), iter(entries[1:])
        size = self._size
        is_forgotten = self._shared_items is not None and self._options.on_item is None

        def start(respond: Callable[[_Done], None]) -> ItemCall | None:
            """Start the next item that is an operation of the app; return None if none is left."""
            for entry in waiting:
                if self.retry_after is not None or (
                    done and (self._is_full(size) or chunk.must_end)
                ):
                    return None
                prepared = self._prepare(entry)
                if not isinstance(prepared, Response):
                    entry.context.processor = chunk
                    call = self._start(prepared, entry, respond)
                    chunk.begin_request(call.respond)
                    return call
                self._note(entry, prepared)
                done.append(_Done(entry, prepared, None))
            return None

        def keep(each: _Done) -> bool:
            """Note a response; return False if its item has to run again."""
            nonlocal size
            if chunk.is_postponed:
                return False
            size += len(each.response.body) + _RESULT_BYTES
            self._note(each.entry, each.response)
            if is_forgotten and each.call is not None and each.call.sent.done():
                each.call = None  # nothing is left to do; the fewer objects, the less to collect
            done.append(each)
            return True

        def look_ahead() -> None:
            """Parse the item after the one that runs."""
            entry = next(ahead, None)
            if self._shared_items is None or entry is None or entry.record_id is None:
                return
            item, match = entry.item, entry.match
            if item is not None and match is not None and len(item.body) <= LARGE_BODY_BYTES:
                entry.context.parse_ahead(match, item.body)

        stopped = await _InTurn(
            start, keep, look_ahead, self._options.stall_seconds, self._loop
        ).run()
        if stopped is None:
            return done, None
        call = stopped.call
        assert call is not None  # noqa: S101 - only calls stop it
        if call.is_stalled:
            await self._abandon(chunk, call)
            if stopped.entry.match is not None:
                self._settings.alone.add(stopped.entry.match.endpoint)
        call.is_postponed = True
        stopped.entry.is_alone = not chunk.needs_savepoints and (chunk.is_alone or not done)
        return done, stopped

    async def _abandon(self, chunk: RequestChunk, call: ItemCall) -> None:
        assert call.task is not None  # noqa: S101 - it was started
        call.is_postponed = True
        call.task.cancel()
        await asyncio.wait({call.task}, timeout=_CANCEL_SECONDS)
        await chunk.abandon_current()

    @staticmethod
    async def _end_calls(done: list[_Done], postponed: _Done | None) -> None:
        """Wait until no attempt of these items runs any more."""
        tasks = set()
        for each in (*done, postponed):
            if each is not None and each.call is not None and each.call.task is not None:
                each.call.is_postponed = True
                tasks.add(each.call.task)
        if tasks:
            await asyncio.wait(tasks)

    def _forget_chunk(self) -> None:
        """Drop what was noted of items whose transaction was rolled back."""
        self._references = Results()
        self._failed_lanes = set()
        for each in self._results:
            self._note(each.entry, each.response)

    # -- one item --------------------------------------------------------------------------------

    async def _run_postponed(self, entry: _Entry) -> None:
        """Run alone what has failed in a chunk; if it succeeds, the next ones run alone at once."""
        await self._run_alone(entry)
        if entry.match is not None and self._results[-1].response.status < _FIRST_SERVER_ERROR:
            self._settings.alone.add(entry.match.endpoint)

    async def _run_alone(self, entry: _Entry) -> None:
        prepared = self._prepare(entry)
        if isinstance(prepared, Response):
            response = prepared
        else:
            entry.context.processor = None
            response = await self._start(prepared, entry, _ignore).sent
        self._note(entry, response)
        self._finish(_Done(entry, response, None))

    def _prepare(self, entry: _Entry) -> ItemRequest | Response:
        """Return the request of an item, or the response if it is not run."""
        try:
            item = entry.item
            if item is None:
                raise entry.error or BodyInvalidError("the item cannot be read")
            if not self._failed_lanes.isdisjoint(_lanes(item)):
                raise BatchSkippedError(
                    "an earlier item of the same lane did not succeed; this one was not run"
                )
            resolved = self._references.resolve(item)
            match = entry.match = self._route(item.method, resolved.path)
            if match is None:
                raise BodyInvalidError(
                    f"{item.method} of this path is not an operation that may be in a batch"
                )
            check_headers(item, match.policy.batch_headers)
        except RequestError as error:
            return self._render(error, entry)
        path, _, query = resolved.path.partition("?")
        if not self._has_prefix:  # as the server, or a proxy, has removed it from single requests
            path = path.removeprefix(self._root) if path.startswith(f"{self._root}/") else path
        # The list that was made for the look at the caller, the first time.
        headers, entry.headers = entry.headers, None
        if headers is None or resolved.headers is not item.headers or resolved.body != item.body:
            headers = self._item_headers(item, resolved.headers, resolved.body, match.policy)
        return ItemRequest(
            item.method,
            unquote(path),
            path.encode("ascii"),
            query.encode("ascii"),
            headers,
            resolved.body,
        )

    def _item_headers(
        self, item: BatchItem, headers: dict[str, str], body: bytes, policy: Policy
    ) -> list[tuple[bytes, bytes]]:
        """Return the caller's own headers, with those of the item."""
        key_header = policy.key_header.lower().encode("latin-1")
        own = {key_header, *(name.encode("latin-1") for name in policy.batch_headers)}
        found = [pair for pair in self._headers if pair[0] not in own]
        found += [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()]
        if "x-correlation-id" not in headers:
            found.append((b"x-correlation-id", self._correlation_id))
        if item.key is not None:
            found.append((key_header, item.key.encode("latin-1")))
        if item.client_id is not None:
            found.append((b"x-client-id", item.client_id.encode("latin-1")))
        if item.sequence is not None:
            found.append((b"x-sequence", b"%d" % item.sequence))
        if body:
            found.append((b"content-length", b"%d" % len(body)))
        return found

    def _start(
        self, request: ItemRequest, entry: _Entry, on_response: Callable[[_Done], None]
    ) -> ItemCall:
        call = ItemCall(entry, request, self._loop, on_response)
        is_shared = entry.context.processor is not None and entry.match is not None
        serve = (self._shared_items if is_shared else None) or self._settings.items
        serving = serve(call)
        task = call.task = self._loop.create_task(serving)
        self.tasks.add(task)

        def end(_task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            call.end(lambda: self._render(INTERNAL, entry))

        task.add_done_callback(end)
        return call

    def _render(self, error: RequestError | StoreUnavailableError | str, entry: _Entry) -> Response:
        match = entry.match
        if match is None and entry.item is not None:
            match = self._route(entry.item.method, entry.item.path)
        request_id = new_request_id()
        if match is None:
            response = render_error(error, self._settings.error_format, request_id)
        else:
            response = render_error(
                error,
                match.policy.error_format,
                request_id,
                ietf_statuses=match.policy.ietf_statuses,
            )
        headers = (*response.headers, (b"x-request-id", request_id.encode()))
        return Response(response.status, headers, response.body)

    @staticmethod
    def _report(call: ItemCall, status: int, on_item: Callable[[ItemReport], None]) -> None:
        request, seconds = call.request, call.ended_at - call.started_at
        on_item(ItemReport(call.exchange, request.method, request.path, status, seconds))

    def _note(self, entry: _Entry, response: Response) -> None:
        item = entry.item
        if item is None:
            return
        if not _FIRST_SUCCESS <= response.status < _FIRST_REDIRECT:
            self._failed_lanes.update(_lanes(item))
        if item.local_id is not None:
            self._references.note(item.local_id, response.status, response.headers, response.body)

    def _finish(self, done: _Done) -> None:
        """Add a result; after an outage of the store, the rest is left to another batch."""
        self._results.append(done)
        response = done.response
        self._size += len(response.body) + _RESULT_BYTES
        headers = dict(response.headers)
        if headers.get(b"onceward-error") in _STORE_DOWN and len(self._results) < len(
            self._entries
        ):
            wait = headers.get(b"retry-after", b"1")
            self.retry_after = float(wait) if wait.isdigit() else 1.0


def _ignore(_done: _Done) -> None:
    return


def _lanes(item: BatchItem) -> list[tuple[str, str]]:
    """Return the lanes of an item: its own, and that of its client's sequence."""
    found = [] if item.lane is None else [("lane", item.lane)]
    if item.client_id is not None:
        found.append(("client", item.client_id))
    return found
