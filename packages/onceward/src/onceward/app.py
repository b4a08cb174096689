"""``Onceward``: one object that connects store, idempotency, routes, jobs and sweep of an app.

``Onceward`` is what an app writes; ``Runtime`` has the parts that it connects.
"""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, Unpack, cast, overload

from onceward.audit.chain import AuditKeys
from onceward.audit.seals import AuditSealer
from onceward.batch.endpoint import BatchEndpoint
from onceward.batch.options import BatchOptions
from onceward.config import GuardConfig
from onceward.errors import ConfigurationError
from onceward.frameworks.asgi import BatchMiddleware, GuardMiddleware, LifespanMiddleware
from onceward.frameworks.views import (
    check_endpoint,
    check_policy,
    no_caller,
    refuse_unguarded,
    refuse_wsgi_app,
)
from onceward.guard.error_formats import check_error_format
from onceward.guard.execution import Execution, current_execution
from onceward.guard.idempotency import Idempotency, IdempotencyOptions
from onceward.guard.limits import RateLimiter
from onceward.guard.pipeline import Pipeline
from onceward.guard.policy import Policy
from onceward.guard.request import SHARED_PRINCIPAL, Identify, Principal, RequestHead
from onceward.guard.request_body import RequestBodies
from onceward.guard.request_log import RequestLog
from onceward.guard.route_table import (
    Guard,
    GuardedRoute,
    GuardTable,
    OpenRoute,
    disabled_check,
    guard_of,
    mark_guarded,
)
from onceward.jobs.depth_reporter import DepthReporter
from onceward.jobs.enqueue import Cause, log_duplicate, new_job
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import Worker, WorkerOptions
from onceward.maintenance.sweeper import Sweeper
from onceward.observability.noop import NullJobMetrics, NullMetrics
from onceward.observability.traces import continued_traceparent
from onceward.ports import (
    JobMetrics,
    Store,
    StoreMetrics,
    Transaction,
    TransactionT_co,
)
from onceward.stores.clock import WARN_SECONDS, StoreClock
from onceward.stores.factory import store_of
from onceward.stores.parts import AUDIT_SEALS, JOBS, SEQUENCES, create_within
from onceward.stores.tenant_tables import TenantTable
from onceward.tenants import SINGLE_TENANT, SingleTenant
from onceward_protocol.error_codes import ErrorFormat

__all__ = ["Onceward"]

Ready = Callable[[], Awaitable[Idempotency]]
Handler = TypeVar("Handler", bound=Callable[..., Any])

_log = logging.getLogger("onceward.request")


class _Options(TypedDict, total=False):
    """Keyword arguments of ``Onceward``, for both overloads. A test compares them with it."""

    principal: Callable[..., Any] | None
    identify: Identify | None
    tenants: SingleTenant | None
    policy: Policy | None
    config: GuardConfig | None


class Onceward(Generic[TransactionT_co]):
    """Exactly-once effects for the guarded operations of one app.

    ::

        onceward = Onceward("sqlite:///shop.db", principal=signed_in_user)
        app = FastAPI()
        onceward.install(app)

    Its type says what ``transaction`` is: ``Onceward[Transaction]`` for a URL, else what the
    store gives to handlers, such as ``Onceward[AsyncSession]``.
    """

    @overload
    def __init__(
        self: "Onceward[Transaction]", store: str, **options: Unpack[_Options]
    ) -> None: ...

    @overload
    def __init__(self, store: Store[TransactionT_co], **options: Unpack[_Options]) -> None: ...

    def __init__(
        self,
        store: Store | str,
        *,
        principal: Callable[..., Any] | None = None,
        identify: Identify | None = None,
        tenants: SingleTenant | None = None,
        policy: Policy | None = None,
        config: GuardConfig | None = None,
    ) -> None:
        """Take a store or its URL. Nothing is opened before ``open`` or the first request.

        An app with guarded routes says who their callers are, by one of ``principal``,
        ``identify`` and ``tenants``; else it refuses to start. An app that only has jobs need not.
        ``principal`` is a FastAPI dependency that returns the ``Principal`` of the caller. With it,
        guarded handlers claim their key after the app's own dependencies have run. ``identify``
        gets only the head of the request, and needs no framework. ``tenants=SINGLE_TENANT`` says
        that callers are not kept apart: all share one tenant.
        ``policy`` is that of operations that are guarded without one.
        """
        callers = _callers(principal, identify, tenants)
        # What this connects, for the packages of this repository; it may change in any release.
        self.runtime = runtime = Runtime(
            store_of(store), callers, policy or Policy(), config or GuardConfig()
        )
        # Where records, jobs and the app's rows are.
        self.store: Store[TransactionT_co] = runtime.store
        # The time, which tests may replace.
        self.clock = runtime.clock
        # The job handlers of the app.
        self.jobs = runtime.jobs
        # The app that ``install`` was called for: requests of a batch pass through it.
        self._app: Any = None
        self._is_direct = True

    # -- inside a handler -------------------------------------------------------------------

    @property
    def transaction(self) -> TransactionT_co:
        """The transaction the guarded handler must write in. It commits with the response."""
        transaction: TransactionT_co = current_execution().transaction
        return transaction

    @property
    def execution(self) -> Execution:
        """The guarded request being served: caller, ids, audit fields."""
        return current_execution()

    async def enqueue(
        self,
        job_type: str,
        payload: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction of the guarded request being served.

        It commits if and only if the request's writes do. Raises ``UsageError`` for options of
        other types or values.
        """
        return await self.runtime.enqueue(current_execution(), job_type, payload, **options)

    # -- declaring ------------------------------------------------------------------------

    def guard(
        self,
        endpoint: str | None = None,
        *,
        policy: Policy | None = None,
        principal: Callable[..., Any] | None = None,
    ) -> Callable[[Handler], Handler]:
        """Guard a handler. Goes below the framework's route decorator.

        The endpoint is part of every stored key: name it if the path may change. ``principal`` is
        a FastAPI dependency that returns the caller, in place of the one given to ``Onceward``.
        """
        check_endpoint(endpoint)
        chosen = self.runtime.policy_or_default(policy)
        dependency = principal or self.runtime.callers.principal

        def mark(handler: Handler) -> Handler:
            guarded: Any
            if dependency is None:
                guarded = refuse_unguarded(handler)
            else:
                from onceward.frameworks.fastapi import (  # noqa: PLC0415 - FastAPI only
                    claim_after_dependencies,
                )

                guarded = claim_after_dependencies(handler, dependency)
            is_late = dependency is not None
            mark_guarded(guarded, Guard(chosen, endpoint, is_late))
            self.runtime.routes.add_handler(guarded)
            return cast("Handler", guarded)

        return mark

    def guard_path(
        self, method: str, path: str, *, endpoint: str | None = None, policy: Policy | None = None
    ) -> None:
        """Guard an operation by method and path template, in any ASGI app."""
        guard = Guard(self.runtime.policy_or_default(policy), endpoint)
        self.runtime.routes.add_path(GuardedRoute(method.upper(), path, guard))

    def add_tenant_table(self, name: str, *, column: str = "tenant") -> None:
        """Include a table of the app in ``onceward tenant export`` and ``onceward tenant erase``.

        ``column`` holds the tenant of a row. Rows are deleted in the order of these calls: add a
        table before those that its foreign keys refer to. Raises ``ConfigurationError``.
        """
        self.runtime.tenant_tables.append(TenantTable(name, column))

    def install(
        self, app: Any, *, batch: str | BatchOptions | None = None, direct: bool = True
    ) -> None:
        """Guard a FastAPI or Starlette app. Call it once; routes may be added afterwards.

        ``batch`` is the path of an endpoint that takes many guarded requests in one, such as
        ``/batch``, or its options. With ``direct``, the handlers of simple routes of FastAPI are
        called without its request handler: the responses are the same, and come sooner.
        """
        refuse_wsgi_app(app)
        from onceward.frameworks.starlette import install  # noqa: PLC0415 - an optional dependency

        runtime = self.runtime
        runtime.routes.batch = _batch_options(batch)
        self._app = app
        self._is_direct = direct
        runtime.routes.of_app = install(
            app,
            # A bound method, by which ``onceward worker --app`` finds the Onceward of an app.
            wrap=self._wrap_installed,
            table=runtime.routes.table,
            optional_kinds=runtime.idempotency.optional_kinds,
            batch=runtime.routes.batch,
            error_format=runtime.config.error_format,
        )

    def _wrap_installed(self, app: Any) -> Any:
        middleware = self.runtime.middleware(
            app,
            items_to=self._app,
            direct=self._find_direct(app),
            is_batch_direct=self._is_batch_direct(),
        )
        return LifespanMiddleware(middleware, self.open, self.close)

    def _is_batch_direct(self) -> bool:
        """Return whether requests of a batch may pass by the middleware around the guard."""
        batch = self.runtime.routes.batch
        if batch is None or self.runtime.config.spans is not None or batch.direct is False:
            return False
        middleware: Sequence[Any] = getattr(self._app, "user_middleware", ())
        is_outermost = bool(middleware) and middleware[0].cls == self._wrap_installed
        return is_outermost or batch.direct is True

    def _find_direct(self, inner: Any) -> Any:
        """Return the lookup from route to direct caller, or None."""
        if not self._is_direct or not hasattr(self._app, "openapi"):
            return None
        try:
            from onceward.frameworks.fastapi_direct import find_direct_routes  # noqa: PLC0415
        except ImportError as error:  # of a name that this version of FastAPI does not have
            _log.warning("routes are called by FastAPI: %s", error)
            return None
        return find_direct_routes(self._app, inner)

    def wrap(
        self, app: Any, *, batch: str | BatchOptions | None = None, lifespan: bool = True
    ) -> Any:
        """Guard the operations of any ASGI app that were registered with ``guard_path``.

        ``batch`` is that of ``install``. Requests in a batch pass through ``app``, not through
        middleware around what this returns. Without ``lifespan``, the app opens and closes this.
        """
        refuse_wsgi_app(app)
        self.runtime.routes.batch = _batch_options(batch)
        middleware = self.runtime.middleware(app)
        return LifespanMiddleware(middleware, self.open, self.close) if lifespan else middleware

    # -- running --------------------------------------------------------------------------

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker for the jobs of this app. Takes the options of ``Worker``."""
        runtime = self.runtime
        options.setdefault("notifier", runtime.notifier)
        options.setdefault("metrics", runtime.job_metrics)
        options.setdefault("clock", runtime.clock)
        options.setdefault("spans", runtime.config.spans)
        options.setdefault("max_payload_bytes", runtime.config.max_payload_bytes)
        return Worker(self.store, self.jobs, **options)

    async def open(self) -> None:
        """Open the store with the tables that are used, and start the sweep. Idempotent.

        It is closed with ``close``, or when ``asyncio.run`` ends its event loop. Then it can be
        opened again, in another loop.
        """
        await self.runtime.open()

    async def close(self) -> None:
        """Stop the sweep, finish writes to the cache, close the store. Idempotent."""
        await self.runtime.close()


@dataclass(frozen=True, slots=True)
class Callers:
    """How the caller of a request is found."""

    # From the head of a request.
    identify: Identify
    # Whether ``identify`` can do that.
    has_identify: bool = False
    # After the app's own sign-in: a dependency of FastAPI.
    principal: Callable[..., Any] | None = None
    # All callers share one tenant.
    is_single_tenant: bool = False


def _callers(
    principal: Callable[..., Any] | None, identify: Identify | None, tenants: SingleTenant | None
) -> Callers:
    """Return the ``Callers`` of the options. Raises ``ConfigurationError`` if two are given."""
    if tenants is not None and tenants is not SINGLE_TENANT:
        raise ConfigurationError(f"tenants must be SINGLE_TENANT of onceward, not {tenants!r}")
    if sum(given is not None for given in (principal, identify, tenants)) > 1:
        raise ConfigurationError(
            "principal=… and identify=… say who callers are, and tenants=SINGLE_TENANT that they "
            "are not kept apart: give one of them. Where handlers differ, give identify=… here and "
            "principal=… to each guard"
        )
    if tenants is not None:
        return Callers(_share_tenant, has_identify=True, is_single_tenant=True)
    if identify is not None:
        return Callers(identify, has_identify=True)
    if principal is not None:
        return Callers(_refuse_caller, principal=principal)
    return Callers(_refuse_to_identify)


class Runtime:
    """The parts of an ``Onceward``, and what they do together.

    For the packages of this repository: it may change in any release.
    """

    def __init__(self, store: Store, callers: Callers, policy: Policy, config: GuardConfig) -> None:
        check_error_format(config.error_format)
        self.store = store
        self.callers = callers
        self.config = config
        # The policy of operations that are guarded without one.
        self.policy = self.policy_or_default(policy)
        self.metrics = config.metrics or NullMetrics()
        # A clock of the app is taken as it is.
        self.clock = config.clock or StoreClock()
        if isinstance(self.clock, StoreClock):
            store.report_epochs(self.clock.learn)
        # The bodies that this process holds.
        self.bodies = RequestBodies(config.limits.body_memory_bytes)
        # Requests that did not run, for operators; written after ``log_requests``.
        self.request_log = RequestLog(store, self.clock, keep_seconds=config.request_log_seconds)
        self.idempotency = Idempotency(
            store,
            clock=self.clock,
            metrics=self.metrics,
            options=IdempotencyOptions(
                cache=config.cache,
                memory_bytes=config.memory_bytes,
                breaker=config.breaker,
                faults=config.faults,
                limits=config.limits,
                is_disabled=disabled_check(config.disabled),
            ),
        )
        if config.request_log_seconds is not None:
            self.log_requests()
        # Tables of the app with rows of tenants, beside the library's own.
        self.tenant_tables: list[TenantTable] = []
        self.audit_keys = AuditKeys(config.audit_keys)
        self.sweeper = Sweeper(
            store,
            self.clock,
            self.metrics,
            every_seconds=config.sweep_every_seconds,
            retention=tuple(config.retention),
            audit_keys=self.audit_keys,
        )
        store.schema.want(*(part for rule in config.retention for part in rule.parts))
        if config.audit_seal_seconds is not None:
            store.schema.want(AUDIT_SEALS)
        self.audit_sealer = AuditSealer(
            store, self.clock, every_seconds=config.audit_seal_seconds, keys=self.audit_keys
        )
        self.jobs = JobRegistry()
        self.job_store = JobStore(store)
        # Wakes workers after a commit with jobs.
        self.notifier = store.notifier()
        if isinstance(self.metrics, StoreMetrics):
            store.report_to(self.metrics)
        self.job_metrics = self.metrics if isinstance(self.metrics, JobMetrics) else None
        self.depths = DepthReporter(store, self.jobs, self.job_metrics or NullJobMetrics())
        self.routes = Routes(callers, config.limiter)
        self._opening = asyncio.Lock()
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing_with_loop: asyncio.Task[None] | None = None

    async def enqueue(
        self,
        execution: Execution,
        job_type: str,
        payload: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction of the given execution."""
        request = execution.request
        defaults = self.jobs.defaults_for(job_type)
        defaults["version"] = execution.version
        job = new_job(
            job_type,
            payload,
            cause=Cause(
                request.principal.tenant,
                request.principal.actor,
                request.request_id,
                request.correlation_id,
                continued_traceparent(request.traceparent),
            ),
            defaults=defaults,
            max_payload_bytes=self.config.max_payload_bytes,
            **options,
        )
        schema = self.store.schema
        if not schema.has(JOBS):
            created = await create_within(execution.statements, schema, JOBS)
            execution.after_commit(lambda: schema.committed(created))
        outcome = await self.job_store.enqueue(execution.statements, job)
        self.jobs.warn_of_queue(job_type, job.queue)
        log_duplicate(job, outcome)
        execution.after_commit(self.notifier.notify)
        return outcome

    def policy_or_default(self, policy: Policy | None) -> Policy:
        """Return the policy of a guard, with the app's error format in place of problems."""
        if policy is None:
            return self.policy
        check_policy(policy)
        if policy.ordering == "strict":
            self.store.schema.want(SEQUENCES)
        if policy.error_format is ErrorFormat.PROBLEM:
            return policy.replace(error_format=self.config.error_format)
        return policy

    def middleware(
        self, app: Any, *, items_to: Any = None, direct: Any = None, is_batch_direct: bool = False
    ) -> GuardMiddleware | BatchMiddleware:
        """Return the middleware around an app, without handling of the lifespan.

        With a batch endpoint, the requests of items go to ``items_to``, or to the guard.
        """
        batch = self.routes.batch
        guard = GuardMiddleware(
            app,
            self.pipeline(),
            routes=self.routes,
            error_format=self.config.error_format,
            batch=batch,
            direct=direct,
        )
        if batch is None:
            return guard
        endpoint = BatchEndpoint(
            batch,
            ready=self.ready,
            find=lambda method, path: self.routes.table().find(method, path),
            identify=self.callers.identify if self.callers.has_identify else None,
            clock=self.clock,
            bodies=self.bodies,
        )
        return BatchMiddleware(guard, endpoint, items_to=items_to, is_direct=is_batch_direct)

    def pipeline(self, *, ready: Ready | None = None, identify: Identify | None = None) -> Pipeline:
        """Return a new pipeline; fronts may open the store and find callers themselves."""
        return Pipeline(
            ready=ready or self.ready,
            idempotency=self.idempotency if ready is None else None,
            identify=identify or self.callers.identify,
            metrics=self.metrics,
            bodies=self.bodies,
            limiter=self.config.limiter,
            spans=self.config.spans,
            request_log=self.request_log,
        )

    def log_requests(self) -> None:
        """Log replays, mismatches and refusals for operators, as ``request_log_seconds`` says.

        Called by the console. Idempotent. If the store is open already, the log is written from
        the next request to the console on.
        """
        if self.request_log.keep_seconds > 0:
            self.request_log.enable()
            self.idempotency.reports.log_requests(self.request_log)

    async def open(self) -> None:
        self._use_running_loop()
        async with self._opening:
            if self.jobs.queues:
                self.store.schema.want(JOBS)
            if self._is_open:
                await self.store.open()  # adds what is used since
            else:
                self.routes.table()
                await self.store.open()
                self.sweeper.start()
                self.audit_sealer.start()
                self.request_log.start()
                if self.job_metrics is not None:
                    self.depths.start()
                self._is_open = True
                self.idempotency.opened_in = self._loop
                # Not in the context of the request that has opened it: that will have ended.
                self._closing_with_loop = asyncio.create_task(
                    self._close_with_loop(), context=contextvars.Context()
                )

    async def close(self) -> None:
        async with self._opening:
            if self._is_open:
                self._is_open = False
                self.idempotency.opened_in = None
                waiting, self._closing_with_loop = self._closing_with_loop, None
                if waiting is not None and waiting is not asyncio.current_task():
                    waiting.cancel()
                await self.sweeper.stop()
                await self.audit_sealer.stop()
                await self.request_log.stop()
                await self.depths.stop()
                await self.notifier.close()
                await self.idempotency.close()
                self.bodies.close()
                if self.idempotency.cache is not None:
                    with suppress(Exception):
                        await self.idempotency.cache.close()
                await self.store.close()

    async def check_clock(self) -> None:
        """Raise ``StoreUnavailableError`` if the clock of this process is not the database's."""
        if isinstance(self.clock, StoreClock):
            self.clock.learn(await self.store.read_epoch())
            self.clock.check(WARN_SECONDS)

    async def ready(self) -> Idempotency:
        """Return the opened ``Idempotency``; opens the store if no lifespan has done so."""
        is_open = self._is_open and self.store.schema.is_complete
        if not is_open or self._loop is not asyncio.get_running_loop():
            await self.open()
        return self.idempotency

    def _use_running_loop(self) -> None:
        """Raise ``ConfigurationError`` if this is open in another event loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._is_open or self._opening.locked():
            raise ConfigurationError(
                "this Onceward is open in another event loop: close it there first. In tests, use "
                "`with TestClient(app)`, and one client at a time"
            )
        self._loop = loop
        self._opening = asyncio.Lock()  # a lock belongs to one event loop

    async def _close_with_loop(self) -> None:
        """Close when all tasks of the loop are cancelled, as ``asyncio.run`` does at its end.

        ``TestClient(app)`` without ``with`` runs each request in a new loop, and no lifespan.
        """
        try:
            # A timer keeps the task alive: the loop itself refers to tasks only weakly.
            while True:  # noqa: ASYNC110
                await asyncio.sleep(3600)
        except asyncio.CancelledError:  # not if the loop was abandoned and the task is freed
            if self._closing_with_loop is asyncio.current_task():
                await self.close()
            raise


class Routes:
    """The guarded routes of an app, and its batch endpoint."""

    def __init__(self, callers: Callers, limiter: RateLimiter | None) -> None:
        self._callers = callers
        self._limiter = limiter
        self._handlers: list[Callable[..., Any]] = []
        self._paths: list[GuardedRoute] = []
        # None until the first request, and after a route was added.
        self.known: GuardTable | None = None
        # Returns the routes of the framework.
        self.of_app: Callable[[], Sequence[GuardedRoute | OpenRoute]] = tuple
        # The batch endpoint, if there is one.
        self.batch: BatchOptions | None = None

    def add_handler(self, handler: Callable[..., Any]) -> None:
        """Add a guarded handler, to which a route of the app leads."""
        self._handlers.append(handler)
        self.known = None  # a route added after the first request is guarded too

    def add_path(self, route: GuardedRoute) -> None:
        """Add a route that is guarded by its path."""
        self._paths.append(route)
        self.known = None

    def table(self) -> GuardTable:
        """Return all guarded routes. Raises ``ConfigurationError`` if one cannot be guarded."""
        if self.known is None:
            if self._paths and self._callers.principal is not None:
                raise ConfigurationError(
                    f"{self._paths[0].path} is guarded with guard_path, which has no "
                    "dependencies: give Onceward identify=…, and principal=… to each guard"
                )
            routes = [*self._paths, *self.of_app()]
            placed = {id(route.guard) for route in routes if isinstance(route, GuardedRoute)}
            for handler in self._handlers:
                if id(guard_of(handler)) not in placed:
                    raise ConfigurationError(
                        f"{handler.__module__}.{handler.__qualname__} is guarded but no route of "
                        "the app leads to it: put @guard below the route decorator, and install "
                        "Onceward on the app that has the route"
                    )
            for route in routes:
                self._check(route)
            self.known = GuardTable(routes)
        return self.known

    def _check(self, route: GuardedRoute | OpenRoute) -> None:
        """Raise ``ConfigurationError`` if the route cannot be guarded, or hides the batch."""
        if self.batch is not None and (route.method, route.path) == ("POST", self.batch.path):
            raise ConfigurationError(
                f"the app has a route POST {route.path}, which is the path of the batch "
                'endpoint: give another one, such as batch="/v1/batch"'
            )
        if isinstance(route, OpenRoute):
            return
        if not (self._callers.has_identify or route.guard.is_claimed_late):
            raise _no_choice(f"{route.method} {route.path} is guarded")
        limit = route.guard.policy.rate_limit
        if limit is None:
            return
        if self._limiter is None:
            raise ConfigurationError(
                f"{route.path} has a rate limit but no limiter is configured: give Onceward "
                "config=GuardConfig(limiter=…) with one, e.g. LimitsRateLimiter() of "
                "onceward.guard.rate_limits"
            )
        self._limiter.check(limit)


def _no_choice(what: str) -> ConfigurationError:
    return no_caller(
        what,
        "Onceward(…, principal=…) with a FastAPI dependency or Onceward(…, identify=…) with a "
        "function of the request's head, that returns Principal(tenant=…, actor=…)",
        "Onceward(…, tenants=SINGLE_TENANT)",
    )


def _batch_options(batch: str | BatchOptions | None) -> BatchOptions | None:
    return BatchOptions(batch) if isinstance(batch, str) else batch


def _share_tenant(_head: RequestHead) -> Principal:
    return SHARED_PRINCIPAL


def _refuse_to_identify(head: RequestHead) -> Principal:
    raise _no_choice(f"{head.method} {head.path} needs the caller")


def _refuse_caller(head: RequestHead) -> Principal:
    raise ConfigurationError(
        f"{head.method} {head.path} uses Caller, which reads what identify=… returns, but this "
        "Onceward was given principal=…: use that function as the dependency, "
        "Annotated[Principal, Depends(…)]"
    )
