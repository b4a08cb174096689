"""A Django store for callers on an event loop: each transaction has a thread, as each request has.

Django's connections belong to threads, and a thread has one transaction at a time. What is outside
a transaction runs in one more thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from onceward.ports import Claimed
from packages.onceward.tests.support import django_project

assert django_project

from django.db import connections  # noqa: E402

from onceward.stores.sessions.django import DjangoStore  # noqa: E402

_thread: ContextVar[ThreadPoolExecutor] = ContextVar("thread")


class ThreadedDjangoStore:
    """Has the methods of ``DjangoStore``."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._outside = ThreadPoolExecutor(1)
        self._threads = {self._outside}
        self._store = DjangoStore(self._run, using=alias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _run(self, work: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(_thread.get(self._outside), work)

    async def claim(self, *args: Any) -> Any:
        claim, thread = await self._begin(self._store.claim(*args))
        if not isinstance(claim, Claimed):
            self._end(thread)
            return claim
        return Claimed(self._unit(claim.unit, thread), after_expiry=claim.after_expiry)

    async def begin(self, **options: Any) -> Any:
        return self._unit(*await self._begin(self._store.begin(**options)))

    async def _begin(self, work: Awaitable[Any]) -> tuple[Any, ThreadPoolExecutor]:
        """Run this in a new thread."""
        thread = ThreadPoolExecutor(1)
        self._threads.add(thread)
        try:
            return await _in(thread, work), thread
        except BaseException:
            self._end(thread)
            raise

    def _unit(self, unit: Any, thread: ThreadPoolExecutor) -> "_Unit":
        return _Unit(unit, thread, lambda: self._end(thread))

    def _end(self, thread: ThreadPoolExecutor) -> None:
        """Close the connection of a thread, and end it when it has done so."""
        if thread in self._threads:
            self._threads.remove(thread)
            thread.submit(lambda: connections[self._alias].close())  # noqa: PLW0108 - in there
            thread.shutdown(wait=False)

    def end_threads(self) -> None:
        """End the threads that are left."""
        for thread in set(self._threads):
            self._end(thread)
            thread.shutdown()


async def _in(thread: ThreadPoolExecutor, work: Awaitable[Any]) -> Any:
    token = _thread.set(thread)
    try:
        return await work
    finally:
        _thread.reset(token)


class _Unit:
    """A unit of work in its thread."""

    def __init__(self, unit: Any, thread: ThreadPoolExecutor, end: Callable[[], None]) -> None:
        self._unit = unit
        self._of_thread = thread
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    @property
    def statements(self) -> Any:
        return _Statements(self._unit.statements, self._of_thread)

    async def commit(self, *args: Any) -> None:
        try:
            await _in(self._of_thread, self._unit.commit(*args))
        finally:
            self._end()

    async def rollback(self) -> None:
        try:
            await _in(self._of_thread, self._unit.rollback())
        finally:
            self._end()

    async def has_written(self) -> bool:
        return bool(await _in(self._of_thread, self._unit.has_written()))

    async def execute(self, sql: str, params: Mapping[str, str] | None) -> None:
        """Run a statement as a view does, with Django's own cursor."""

        def run() -> None:
            with self._unit.transaction.cursor() as cursor:
                cursor.execute(sql.replace(":value", "%(value)s"), params)

        await asyncio.get_running_loop().run_in_executor(self._of_thread, run)


class _Statements:
    def __init__(self, statements: Any, thread: ThreadPoolExecutor) -> None:
        self._statements = statements
        self._of_thread = thread

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._statements, name)
        return lambda *args: _in(self._of_thread, method(*args))
