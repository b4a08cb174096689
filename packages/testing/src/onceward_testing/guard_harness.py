"""Fixtures of ``GuardContract``: an app per class and policy, a tenant per test."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import pytest

from onceward import GuardConfig, Policy, open_store
from onceward.stores.parts import JOBS
from onceward_testing.guard_shop import BATCH_PATH, CREATE_ORDERS, GuardedApp, Shop, Visits
from onceward_testing.in_process_client import Request, Response

__all__ = [
    "Caller",
    "Counts",
    "GuardHarness",
    "LimiterOf",
    "NewCaller",
    "Rows",
    "code_of",
    "new_tenant",
]

Rows = Callable[..., list[dict[str, Any]]]
"""Runs a query with named parameters, and ``onceward_`` before Onceward's tables."""


class Counts(NamedTuple):
    """Committed rows of a tenant."""

    # Of the app.
    orders: int
    # Of Onceward.
    records: int
    # Audit events.
    audits: int


@dataclass(slots=True)
class Caller:
    """One tenant of an app: sends its requests, and reads what was stored for it."""

    # Where its requests go.
    app: GuardedApp
    # What the handlers of the app do.
    shop: Shop
    # Reads the database.
    rows: Rows
    # Sends requests at the same time.
    pool: ThreadPoolExecutor
    # Its name, in the header ``X-Tenant``.
    tenant: str

    @property
    def visits(self) -> Visits:
        """Effects of handlers for this tenant."""
        return self.shop.visits[self.tenant]

    @property
    def runs(self) -> int:
        """How often a handler ran."""
        return len(self.visits.runs)

    def send(
        self,
        key: str | Sequence[str] | None = "key-1",
        *,
        do: str = "",
        method: str = "POST",
        path: str = "/orders",
        body: Any = None,
        content: bytes | None = None,
        chunks: Sequence[bytes] | None = None,
        content_type: str | None = "application/json",
        headers: Mapping[str, str] | None = None,
        tenant: str | None = None,
        **more: Any,
    ) -> Response:
        """Send a request: a JSON ``body``, raw ``content``, or ``chunks`` without their length."""
        given = [("X-Tenant", self.tenant if tenant is None else tenant), ("X-Do", do)]
        keys = [key] if isinstance(key, str) else key or ()
        given += [("Idempotency-Key", one) for one in keys]
        if content is None:
            content = json.dumps({"item": "boots"} if body is None else body).encode()
        if content_type is not None:
            given.append(("Content-Type", content_type))
        given += (headers or {}).items()
        pieces = (content,) if chunks is None else tuple(chunks)
        more.setdefault("declared", len(content) if chunks is None else None)
        return self.app.send(Request(method, path, tuple(given), pieces, **more))

    def soon(self, *args: Any, **more: Any) -> "Future[Response]":
        """Send a request in another thread."""
        return self.pool.submit(self.send, *args, **more)

    def batch(self, *items: dict[str, Any], tenant: str | None = None) -> Response:
        """Send a batch."""
        return self.send(None, path=BATCH_PATH, body={"items": items}, tenant=tenant)

    def begin(self, *args: Any, do: str = "wait", **more: Any) -> "Future[Response]":
        """Send a request whose handler waits, and return when it does."""
        first = self.soon(*args, do=do, **more)
        assert self.visits.started.wait(20)
        return first

    def counts(self) -> Counts:
        """Count the committed rows."""
        tables = ("orders", "onceward_idempotency_records", "onceward_audit_events")
        return Counts(*map(self._count, tables))

    def jobs(self) -> int:
        """Count the committed jobs."""
        return self._count("onceward_jobs")

    def records(self) -> list[dict[str, Any]]:
        """Return the records."""
        return self.rows(
            "SELECT * FROM onceward_idempotency_records WHERE tenant = :tenant", tenant=self.tenant
        )

    def audits(self) -> list[dict[str, Any]]:
        """Return the audit events."""
        return self.rows(
            "SELECT * FROM onceward_audit_events WHERE tenant = :tenant", tenant=self.tenant
        )

    def _count(self, table: str) -> int:
        sql = f"SELECT count(*) AS n FROM {table} WHERE tenant = :tenant"  # noqa: S608
        return int(self.rows(sql, tenant=self.tenant)[0]["n"])


NewCaller = Callable[..., Caller]
"""Returns a tenant of a new app, by its policy and keyword arguments of ``Onceward``."""


class LimiterOf:
    """A rate limiter that allows so many requests."""

    def __init__(self, left: int) -> None:
        # How many requests may pass.
        self.left = left
        # The limit, tenant and endpoint of each request.
        self.calls: list[tuple[str, str, str]] = []

    def check(self, limit: str) -> None:
        """Accept any limit."""

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count a request."""
        return (await self.count(limit, tenant, endpoint)).wait_seconds

    async def count(self, limit: str, tenant: str, endpoint: str) -> "Counted":
        """Count a request and say what is left."""
        self.calls.append((limit, tenant, endpoint))
        self.left -= 1
        headers = ((b"ratelimit-policy", b'"x";q=2'), (b"ratelimit", b'"x";r=%d' % self.left))
        return Counted(None if self.left >= 0 else 7.2, headers)


class Counted(NamedTuple):
    """Result of ``LimiterOf.count``."""

    wait_seconds: float | None
    headers: tuple[tuple[bytes, bytes], ...]


class GuardHarness:
    """Fixtures of the contract suite."""

    collects_streams: ClassVar[bool] = False
    """Whether the front reads a response of unknown length to its end, in place of refusing it."""

    @classmethod
    def new_app(cls, shop: Shop) -> GuardedApp:
        """Return an app with the routes of a ``Shop``."""
        raise NotImplementedError("override new_app in your test class")

    @pytest.fixture(scope="class")
    @classmethod
    def new_url(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """Return the URL of a new database."""
        return f"sqlite:///{tmp_path_factory.mktemp('guard')}/shop.db"

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, new_url: str) -> str:
        """Return the URL of that database, with Onceward's tables and the table ``orders``."""

        async def create() -> None:
            store = open_store(new_url)
            store.schema.want(JOBS)
            await store.open()
            await store.write(CREATE_ORDERS)
            await store.close()

        asyncio.run(create())
        return new_url

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls, url: str) -> Rows:
        """Return a function that reads the database."""

        def read(sql: str, **params: Any) -> list[dict[str, Any]]:
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=20)) as db:
                db.row_factory = sqlite3.Row
                return [dict(row) for row in db.execute(sql, params)]

        return read

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[ThreadPoolExecutor]:
        """Threads that send requests."""
        with ThreadPoolExecutor(16) as pool:
            yield pool

    @pytest.fixture(scope="class")
    @classmethod
    def shop(cls, url: str) -> Iterator[tuple[Shop, GuardedApp]]:
        """Serve an app with the default policy, for all tests of the class."""
        shop = Shop(url, Policy(batch_headers=("x-do",)), GuardConfig(sweep_every_seconds=None))
        app = cls.new_app(shop)
        yield shop, app
        app.close()

    @pytest.fixture
    def caller(
        self, shop: tuple[Shop, GuardedApp], rows: Rows, pool: ThreadPoolExecutor
    ) -> Iterator[Caller]:
        """Return a new tenant of that app."""
        caller = Caller(shop[1], shop[0], rows, pool, new_tenant())
        yield caller
        caller.visits.gate.set()

    @pytest.fixture
    def new_caller(self, url: str, rows: Rows, pool: ThreadPoolExecutor) -> Iterator[NewCaller]:
        """Return a function that makes a tenant of a new app, by policy and config."""
        opened: list[Caller] = []

        def new(policy: Policy | None = None, *, tenant: str = "", **options: Any) -> Caller:
            config = GuardConfig(**{"sweep_every_seconds": None, **options})
            shop = Shop(url, policy or Policy(), config)
            opened.append(Caller(self.new_app(shop), shop, rows, pool, tenant or new_tenant()))
            return opened[-1]

        yield new
        for caller in opened:
            caller.visits.gate.set()
        for caller in opened:
            caller.app.close()


_numbers = count()


def new_tenant() -> str:
    """Return the name of a tenant that no other test has."""
    return f"tenant-{next(_numbers)}-{uuid4().hex[:8]}"


def code_of(response: Response) -> tuple[int, str]:
    """Return the status and the code of an error."""
    found = response.json()
    return response.status, found.get("code") or found.get("error")
