"""Traces requests, an outbox entry and a job through our files, and writes them to the flows page.

``python -m tests.flows`` prints what was traced; ``--write`` (``make flows``) writes the page.
"""

import asyncio
import dis
import re
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
from fastapi import FastAPI

from onceward import GuardConfig, JobContext, Onceward, Principal, Transaction
from onceward_outbox import NewEntry, Outbox, OutboxQueue, Profile
from onceward_outbox.transport import Request, Response

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "flows.md"
PACKAGES = ROOT / "packages"
COMMAND = "make flows"

_SOURCES = f"{PACKAGES}/"
# Functions of their own before Python 3.12, and part of the function around them since.
_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
_GENERATOR_FLAGS = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
# A connection, a cache, a statement: all is made by the first requests.
_WARM_UPS = 3


@dataclass
class Trace:
    """Which of our functions were entered, by thread, in order."""

    # The code that was entered, by the name of the thread.
    entries: dict[str, list[CodeType]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files in order of their first entry; those of other threads at the end."""
        return list(dict.fromkeys(file for thread in self._threads for file in thread))

    @property
    def changes(self) -> int:
        """How often a function that was entered is in another file than the one before."""
        return sum(
            before != after for thread in self._threads for before, after in pairwise(thread)
        )

    @property
    def _threads(self) -> list[list[str]]:
        main = threading.main_thread().name
        names = sorted(self.entries, key=lambda name: (name != main, name))
        return [
            [code.co_filename.removeprefix(_SOURCES) for code in self.entries[name]]
            for name in names
        ]


class Tracer:
    """Records calls of functions in ``packages/*/src``, in threads that begin after it."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Be called for each call, in this thread and in new ones."""
        before = sys.getprofile()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record what is called meanwhile."""
        trace = self._trace = Trace()
        try:
            yield trace
        finally:
            self._trace = None

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        trace, code = self._trace, frame.f_code
        if trace is None or event != "call" or not code.co_filename.startswith(_SOURCES):
            return
        if code.co_name in _COMPREHENSIONS or "/src/" not in code.co_filename:
            return
        # Also called when a coroutine goes on: how often it waits depends on the machine.
        if code.co_flags & _GENERATOR_FLAGS and frame.f_lasti > _first_resume(code):
            return
        trace.entries.setdefault(threading.current_thread().name, []).append(code)


@cache
def _first_resume(code: CodeType) -> int:
    """Return the offset at which a coroutine or generator is when its body begins."""
    return next(at.offset for at in dis.get_instructions(code) if at.opname == "RESUME")


# -- what is traced -----------------------------------------------------------------------------


def _signed_in() -> Principal:
    return Principal(tenant="acme", actor="ada")


class _Shop:
    """An app on SQLite with two guarded routes and a job, whose caches are warm."""

    def __init__(self, database: Path, tracer: Tracer) -> None:
        self._tracer = tracer
        self.enqueued = Trace()
        self.onceward = Onceward(
            f"sqlite:///{database}",
            principal=_signed_in,
            config=GuardConfig(sweep_every_seconds=None, audit_seal_seconds=None),
        )
        self.app = FastAPI()
        self.done = asyncio.Event()

        @self.onceward.jobs.handler("receipt.send")
        async def send_receipt(job: JobContext) -> None:
            await job.transaction.execute("INSERT INTO receipts VALUES (:id)", {"id": job.id})

        @self.app.post("/orders", status_code=201)
        @self.onceward.guard()
        async def create_order(order: dict[str, Any]) -> dict[str, Any]:
            await _insert(self.onceward.transaction, order)
            return order

        @self.app.post("/receipts", status_code=202)
        @self.onceward.guard()
        async def create_receipt(order: dict[str, Any]) -> dict[str, Any]:
            await _insert(self.onceward.transaction, order)
            with self._tracer.record() as self.enqueued:
                await self.onceward.enqueue("receipt.send", order, resource_id=order["id"])
            return order

        self.onceward.install(self.app)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[httpx.AsyncClient]:
        """Serve requests in this process."""
        await self.onceward.open()
        try:
            await self.onceward.store.write("CREATE TABLE orders (id TEXT)")
            await self.onceward.store.write("CREATE TABLE receipts (id TEXT)")
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                yield client
        finally:
            await self.onceward.close()


async def _insert(transaction: Transaction, order: dict[str, Any]) -> None:
    await transaction.execute("INSERT INTO orders VALUES (:id)", {"id": order["id"]})


async def _post(client: httpx.AsyncClient, path: str, number: int) -> httpx.Response:
    key = f"00000000-0000-4000-8000-{number:012}"
    response = await client.post(path, json={"id": str(number)}, headers={"Idempotency-Key": key})
    assert response.is_success, response.text
    return response


async def _trace_requests(directory: Path, tracer: Tracer) -> dict[str, Trace]:
    shop = _Shop(directory / "shop.db", tracer)
    async with shop.open() as client:
        for number in range(_WARM_UPS):
            await _post(client, "/orders", number)
            await _post(client, "/orders", number)
        with tracer.record() as request:
            await _post(client, "/orders", _WARM_UPS)
        with tracer.record() as replay:
            replayed = await _post(client, "/orders", _WARM_UPS)
        assert replayed.headers["Idempotency-Replayed"] == "true"
        for number in range(_WARM_UPS):
            await _post(client, "/receipts", 100 + number)
            await _run_jobs(shop.onceward)
        await _post(client, "/receipts", 200)
        with tracer.record() as job:
            await _run_jobs(shop.onceward)
        counted = await shop.onceward.store.read("SELECT count(*) AS n FROM receipts")
        assert counted[0]["n"] == _WARM_UPS + 1
    return {
        "A guarded POST": request,
        "A replay": replay,
        "A job is enqueued": shop.enqueued,
        "A job runs": job,
    }


async def _run_jobs(onceward: Onceward[Transaction]) -> None:
    worker = onceward.worker()
    await worker.start()
    await worker.until_idle()
    await worker.stop()


class _Server:
    """A transport whose server creates all."""

    def send(self, request: Request) -> Response:
        return Response(201, {"content-type": "application/json"}, b'{"id": "1"}')


def _trace_outbox(directory: Path, tracer: Tracer) -> dict[str, Trace]:
    queue = OutboxQueue.open(directory / "outbox.db", profiles=[Profile(name="shop")])
    with Outbox(queue, _Server(), "token") as outbox:
        queue.add_user("ada")
        for number in range(_WARM_UPS):
            outbox.enqueue(_entry(number))
            outbox.drain("ada")
        with tracer.record() as enqueued:
            entry = outbox.enqueue(_entry(_WARM_UPS))
        with tracer.record() as drained:
            outbox.drain("ada")
        assert queue.get(entry.id).status == "succeeded"
    return {"An outbox entry is enqueued": enqueued, "An outbox entry is sent": drained}


def _entry(number: int) -> NewEntry:
    return NewEntry(
        user_id="ada",
        operation="create",
        entity_type="order",
        endpoint="/orders",
        payload={"id": str(number)},
        profile="shop",
    )


def trace_all() -> dict[str, Trace]:
    """Return the trace of each section of the page, by its heading."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as name, tracer.installed():
        directory = Path(name)
        traces = asyncio.run(_trace_requests(directory, tracer))
        return _trace_outbox(directory, tracer) | traces


# -- the page -----------------------------------------------------------------------------------


# A mark, and all up to the mark of the end.
_SECTION = re.compile(r"(<!-- flow: ([^>]+) -->\n).*?(<!-- end of flow -->)", re.DOTALL)


def short_name(file: str) -> str:
    """Return a file as the page names it, such as ``guard/idempotency.py``."""
    return file.partition("/src/")[2].removeprefix("onceward/")


def listed(trace: Trace) -> str:
    """Return the section of one trace: its files, in order."""
    return "\n" + "".join(f"1. `{short_name(file)}`\n" for file in trace.files) + "\n"


def write(text: str, traces: dict[str, Trace]) -> str:
    """Return the page with its sections as traced. Raises ``KeyError`` for one without a trace."""
    return _SECTION.sub(lambda found: found[1] + listed(traces[found[2]]) + found[3], text)


def prose(text: str) -> str:
    """Return the page without what is generated."""
    return _SECTION.sub("", text)


def sections(text: str) -> list[str]:
    """Return the names of the sections of the page."""
    return [found[2] for found in _SECTION.finditer(text)]


def main() -> None:
    """Print the traces, or write them to the page."""
    traces = trace_all()
    if "--write" in sys.argv:
        PAGE.write_text(write(PAGE.read_text(encoding="utf-8"), traces), encoding="utf-8")
        return
    for heading, trace in traces.items():
        print(f"{heading}: {len(trace.files)} files, {trace.changes} changes")
        for file in trace.files:
            print(f"    {short_name(file)}")


if __name__ == "__main__":
    main()
