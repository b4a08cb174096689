"""``Onceward``: one object that connects store, idempotency, routes, jobs and sweep of an app."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Generic, TypeVar, Unpack, cast, overload

from onceward.audit.chain import AuditKeys
from onceward.audit.sealer import AuditSealer
from onceward.batch.endpoint import BatchEndpoint
from onceward.batch.options import BatchOptions
from onceward.core.breaker import Breaker
from onceward.core.error_formats import ErrorFormatter, check_error_format
from onceward.core.job import EnqueueOutcome
from onceward.core.policy import Policy
from onceward.core.tenants import SINGLE_TENANT, SingleTenant
from onceward.errors import ConfigurationError, OncewardError
from onceward.frameworks.asgi import BatchMiddleware, GuardMiddleware
from onceward.frameworks.views import (
    check_endpoint,
    check_policy,
    no_caller,
    refuse_unguarded,
    refuse_wsgi_app,
)
from onceward.guard.disabled_endpoints import Disabled, disabled_check
from onceward.guard.execution import Execution, current_execution
from onceward.guard.idempotency import Idempotency, IdempotencyOptions
from onceward.guard.limits import Limits, RateLimiter
from onceward.guard.pipeline import Pipeline
from onceward.guard.request import SHARED_PRINCIPAL, Identify, Principal, RequestHead
from onceward.guard.request_body import RequestBodies
from onceward.guard.request_log import RequestLog
from onceward.guard.route_table import (
    Guard,
    GuardedRoute,
    GuardTable,
    OpenRoute,
    RouteTable,
    guard_of,
    mark_guarded,
)
from onceward.jobs.depth_reporter import DepthReporter
from onceward.jobs.enqueue import (
    MAX_PAYLOAD_BYTES,
    Cause,
    JobName,
    JobOptions,
    log_duplicate,
    new_job,
)
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import Worker, WorkerOptions
from onceward.maintenance.retention import Retention
from onceward.maintenance.sweeper import Sweeper
from onceward.observability.noop import NullJobMetrics, NullMetrics
from onceward.observability.traces import Spans, continued_traceparent
from onceward.options import OncewardOptions
from onceward.ports import (
    Clock,
    FaultPoints,
    JobMetrics,
    Metrics,
    RecordCache,
    Store,
    StoreMetrics,
    Transaction,
    TransactionT_co,
)
from onceward.stores.factory import store_of
from onceward.stores.parts import AUDIT_SEALS, JOBS, SEQUENCES, create_within
from onceward.stores.tenant_tables import TenantTable
from onceward_protocol.clock import SystemClock
from onceward_protocol.error_codes import ErrorFormat

__all__ = ["Onceward"]

Handler = TypeVar("Handler", bound=Callable[..., Any])

# After one of these, the app serves no more requests.
_LAST_MESSAGES: Final = frozenset(
    {"lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed"}
)


_log = logging.getLogger("onceward.request")


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
        self: "Onceward[Transaction]", store: str, **options: Unpack[OncewardOptions]
    ) -> None: ...

    @overload
    def __init__(
        self, store: Store[TransactionT_co], **options: Unpack[OncewardOptions]
    ) -> None: ...

    def __init__(  # noqa: PLR0915 - one line per part
        self,
        store: Store | str,
        *,
        policy: Policy | None = None,
        error_format: ErrorFormat | ErrorFormatter = ErrorFormat.PROBLEM,
        identify: Identify | None = None,
        principal: Callable[..., Any] | None = None,
        tenants: SingleTenant | None = None,
        cache: RecordCache | None = None,
        limiter: RateLimiter | None = None,
        memory_bytes: int = 32 * 1024 * 1024,
        sweep_every_seconds: float | None = 3600.0,
        retention: Sequence[Retention] = (),
        audit_seal_seconds: float | None = 60.0,
        audit_keys: Sequence[str] = (),
        breaker: Breaker | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        spans: Spans | None = None,
        faults: FaultPoints | None = None,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        disabled: Disabled = (),
        request_log_seconds: float | None = None,
    ) -> None:
        """Take a store or its URL. Nothing is opened before ``open`` or the first request.

        An app with guarded routes says who their callers are, by one of ``principal``,
        ``identify`` and ``tenants``; else it refuses to start. An app that only has jobs need not.
        ``error_format`` formats all errors, except those of policies that have the envelope format
        or their own function. ``principal`` is a FastAPI dependency that returns the ``Principal``
        of the caller. With it, guarded handlers claim their key after the app's own dependencies
        have run. ``identify`` gets only the head of the request, and needs no framework.
        ``disabled`` are names of endpoints that are switched off, or a function that gets a name.
        ``tenants=SINGLE_TENANT`` says that callers are not kept apart: all share one tenant.
        ``retention`` says how long audit events, dead letters or rows of the app are kept; the
        sweep deletes older ones once a day.
        Audit events are sealed every ``audit_seal_seconds``, in the background; None does not seal
        them. ``audit_keys`` sign the seals: the first one signs, all verify. Each has at least 32
        bytes.
        ``limits`` keep one tenant from using up the process.
        Replays, mismatches and refusals are logged in a table for ``request_log_seconds``, without
        payloads, so that operators can find them; 0 never logs them. Without it, an app with a
        console logs them for 7 days, and others do not.
        """
        if tenants is not None and tenants is not SINGLE_TENANT:
            raise ConfigurationError(f"tenants must be SINGLE_TENANT of onceward, not {tenants!r}")
        if tenants is not None and not (principal is None and identify is None):
            raise ConfigurationError(
                "tenants=SINGLE_TENANT means that callers are not kept apart, but principal=… or "
                "identify=… says who they are: give one of the three"
            )
        if principal is not None and identify is not None:
            raise ConfigurationError(
                "principal=… and identify=… both say who the caller is: give one of them. Where "
                "handlers differ, give identify=… here and principal=… to each guard"
            )
        # Where records, jobs and the app's rows are.
        self.store = store_of(store)
        check_error_format(error_format)
        # The format of errors, unless a policy has its own.
        self.error_format = error_format
        # The policy of operations that are guarded without one.
        self.policy = self.policy_or_default(policy or Policy())
        # Whether all callers share one tenant.
        self.is_single_tenant = tenants is not None
        # Whether the caller is found in the head of a request.
        self.has_identify = identify is not None or tenants is not None
        # Returns the caller of a request from its head.
        self.identify: Identify = identify or _refuse_to_identify
        if tenants is not None:
            self.identify = _share_tenant
        elif principal is not None:
            self.identify = _refuse_caller
        # Returns the caller of a request after the app's own sign-in.
        self.principal = principal
        # Counts requests.
        self.metrics = metrics or NullMetrics()
        # The time, which tests may replace.
        self.clock = clock or SystemClock()
        # Counts requests against ``Policy.rate_limit``.
        self.limiter = limiter
        # The bodies that this process holds.
        self.bodies = RequestBodies(limits.body_memory_bytes)
        # OpenTelemetry spans; None without.
        self.spans = spans
        # Requests that did not run, for operators; written after ``log_requests``.
        self.request_log = RequestLog(self.store, self.clock, keep_seconds=request_log_seconds)
        # Claims keys, stores and replays responses.
        self.idempotency = Idempotency(
            self.store,
            clock=self.clock,
            metrics=self.metrics,
            options=IdempotencyOptions(
                cache=cache,
                memory_bytes=memory_bytes,
                breaker=breaker,
                faults=faults,
                limits=limits,
                is_disabled=disabled_check(disabled),
            ),
        )
        if request_log_seconds is not None:
            self.log_requests()
        # Tables of the app with rows of tenants, beside the library's own.
        self.tenant_tables: list[TenantTable] = []
        # How long rows are kept.
        self.retention = tuple(retention)
        # The keys that sign audit seals.
        self.audit_keys = AuditKeys(audit_keys)
        self._sweeper = Sweeper(
            self.store,
            self.clock,
            self.metrics,
            every_seconds=sweep_every_seconds,
            retention=self.retention,
            audit_keys=self.audit_keys,
        )
        self.store.schema.want(*(part for rule in self.retention for part in rule.parts))
        if audit_seal_seconds is not None:
            self.store.schema.want(AUDIT_SEALS)
        # Adds audit events to the chains of their tenants.
        self.audit_sealer = AuditSealer(
            self.store,
            self.clock,
            every_seconds=audit_seal_seconds,
            keys=self.audit_keys,
        )
        # The job handlers of the app.
        self.jobs = JobRegistry()
        # Jobs in the database.
        self.job_store = JobStore(self.store)
        # Wakes workers after a commit with jobs.
        self.notifier = self.store.notifier()
        if isinstance(self.metrics, StoreMetrics) and hasattr(self.store, "report_to"):
            self.store.report_to(self.metrics)
        # Counts jobs.
        self.job_metrics = self.metrics if isinstance(self.metrics, JobMetrics) else None
        # Reports the queue depths to the metrics.
        self.depths = DepthReporter(self.store, self.jobs, self.job_metrics or NullJobMetrics())
        # The largest payload of a job.
        self.max_payload_bytes = max_payload_bytes
        self._guarded: list[Callable[..., Any]] = []
        self._explicit: list[GuardedRoute] = []
        self._routes_of_app: Callable[[], Sequence[GuardedRoute | OpenRoute]] = tuple
        self._table: GuardTable | None = None
        self._own_table: RouteTable | None = None
        self._batch: BatchOptions | None = None
        # The app that ``install`` was called for: requests of a batch pass through it.
        self._items_to: Any = None
        self._is_direct = True
        self._opening = asyncio.Lock()
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing_with_loop: asyncio.Task[None] | None = None

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
        *,
        queue: str | None = None,
        tenant: str | None = None,
        resource_id: JobName | None = None,
        run_at: datetime | None = None,
        delay_seconds: float = 0.0,
        coalesce: JobName | None = None,
        order: JobName | None = None,
        version: int | None = None,
        max_attempts: int | None = None,
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction of the guarded request being served.

        It commits if and only if the request's writes do. Two jobs of the same type and
        ``resource_id`` are the same job, which runs once. ``coalesce`` is for work that follows a
        changing state: an equal job that still waits is merged with this one; one that has
        started is followed by a new job. Jobs of the same ``order`` run one at a time, in the
        order of their commits. ``version`` is that of the aggregate, for the job's audit events; by
        default the one given to ``describe`` before. Raises ``UsageError`` for arguments of other
        types or values.
        """
        return await self.enqueue_in(
            current_execution(),
            job_type,
            payload,
            queue=queue,
            tenant=tenant,
            resource_id=resource_id,
            run_at=run_at,
            delay_seconds=delay_seconds,
            coalesce=coalesce,
            order=order,
            version=version,
            max_attempts=max_attempts,
        )

    async def enqueue_in(
        self,
        execution: Execution,
        job_type: str,
        payload: Any = None,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        max_attempts: int | None = None,
        **options: Unpack[JobOptions],
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction of the given execution. Same options as ``enqueue``."""
        request = execution.request
        found = self.jobs.find(job_type)
        if options.get("version") is None:
            options["version"] = execution.version
        job = new_job(
            job_type,
            payload,
            cause=Cause(
                request.principal.tenant if tenant is None else tenant,
                request.principal.actor,
                request.request_id,
                request.correlation_id,
                continued_traceparent(request.traceparent),
            ),
            queue=self.jobs.queue_of(job_type) if queue is None else queue,
            max_attempts=(found.max_attempts if found else 5)
            if max_attempts is None
            else max_attempts,
            max_payload_bytes=self.max_payload_bytes,
            **options,
        )
        schema = self.store.schema
        if not schema.has(JOBS):
            created = await create_within(execution.statements, schema, JOBS)
            execution.after_commit(lambda: schema.committed(created))
        outcome = await self.job_store.enqueue(execution.statements, job)
        log_duplicate(job, outcome)
        execution.after_commit(self.notifier.notify)
        return outcome

    def worker(self, **options: Unpack[WorkerOptions]) -> Worker:
        """Return a worker for the jobs of this app. Takes the options of ``Worker``."""
        options.setdefault("notifier", self.notifier)
        options.setdefault("metrics", self.job_metrics)
        options.setdefault("clock", self.clock)
        options.setdefault("spans", self.spans)
        options.setdefault("max_payload_bytes", self.max_payload_bytes)
        return Worker(self.store, self.jobs, **options)

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
        chosen = self.policy_or_default(policy)
        dependency = principal or self.principal

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
            self._guarded.append(guarded)
            self._table = None  # a route added after the first request is guarded too
            return cast("Handler", guarded)

        return mark

    def guard_path(
        self, method: str, path: str, *, endpoint: str | None = None, policy: Policy | None = None
    ) -> None:
        """Guard an operation by method and path template, in any ASGI app."""
        self._explicit.append(
            GuardedRoute(method.upper(), path, Guard(self.policy_or_default(policy), endpoint))
        )
        self._table = None

    def policy_or_default(self, policy: Policy | None) -> Policy:
        """Return the policy of a guard, with the app's error format in place of problems."""
        if policy is None:
            return self.policy
        check_policy(policy)
        if policy.ordering == "strict":
            self.store.schema.want(SEQUENCES)
        if policy.error_format is ErrorFormat.PROBLEM:
            return policy.replace(error_format=self.error_format)
        return policy

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

        self._batch = _batch_options(batch)
        self._items_to = app
        self._is_direct = direct
        self._routes_of_app = install(
            app,
            # A bound method, by which ``onceward worker --app`` finds the Onceward of an app.
            wrap=self._wrap_installed,
            table=self.table,
            optional_kinds=self.idempotency.optional_kinds,
            batch=self._batch,
            error_format=self.error_format,
        )

    def _wrap_installed(self, app: Any) -> Any:
        installed = self._items_to
        guard = self._guard_middleware(app, self._batch, self._find_direct(installed, app))
        batch = self._with_batch(guard, self._batch, installed, direct=self._is_batch_direct())
        return _WithLifespan(self, batch)

    def _is_batch_direct(self) -> bool:
        """Return whether requests of a batch may pass by the middleware around the guard."""
        if self._batch is None or self.spans is not None or self._batch.direct is False:
            return False
        middleware: Sequence[Any] = getattr(self._items_to, "user_middleware", ())
        is_outermost = bool(middleware) and middleware[0].cls == self._wrap_installed
        return is_outermost or self._batch.direct is True

    def _find_direct(self, app: Any, inner: Any) -> Any:
        """Return what finds the callers of routes; None if none can be called directly."""
        if not self._is_direct or not hasattr(app, "openapi"):
            return None
        try:
            from onceward.frameworks.fastapi_direct import find_direct_routes  # noqa: PLC0415
        except ImportError as error:  # of a name that this version of FastAPI does not have
            _log.debug("routes are called by FastAPI: %s", error)
            return None
        return find_direct_routes(app, inner)

    def wrap(self, app: Any, *, batch: str | BatchOptions | None = None) -> Any:
        """Guard the operations of any ASGI app that were registered with ``guard_path``.

        ``batch`` is that of ``install``. Requests in a batch pass through ``app``, not through
        middleware around what this returns.
        """
        refuse_wsgi_app(app)
        options = _batch_options(batch)
        self._batch = options
        return _WithLifespan(self, self.middleware(app, batch=options))

    def middleware(
        self, app: Any, *, batch: BatchOptions | None = None, items_to: Any = None
    ) -> GuardMiddleware | BatchMiddleware:
        """Return the middleware around an app, without handling of the lifespan.

        With ``batch``, the requests of items go to ``items_to``, or to the guard.
        """
        return self._with_batch(self._guard_middleware(app, batch), batch, items_to)

    def _with_batch(
        self,
        guard: GuardMiddleware,
        batch: BatchOptions | None,
        items_to: Any,
        *,
        direct: bool = False,
    ) -> GuardMiddleware | BatchMiddleware:
        if batch is None:
            return guard
        endpoint = BatchEndpoint(
            batch,
            ready=self.ready,
            find=lambda method, path: self.route_table().find(method, path),
            identify=self.identify if self.has_identify else None,
            clock=self.clock,
            bodies=self.bodies,
        )
        return BatchMiddleware(guard, endpoint, items_to=items_to, is_direct=direct)

    def _guard_middleware(
        self, app: Any, batch: BatchOptions | None, direct: Any = None
    ) -> GuardMiddleware:
        pipeline = Pipeline(
            ready=self.ready,
            identify=self.identify,
            metrics=self.metrics,
            bodies=self.bodies,
            limiter=self.limiter,
            spans=self.spans,
            request_log=self.request_log,
        )
        return GuardMiddleware(
            app,
            pipeline,
            table=self.route_table,
            error_format=self.error_format,
            batch=batch,
            direct=direct,
        )

    def log_requests(self) -> None:
        """Log replays, mismatches and refusals for operators, as ``request_log_seconds`` says.

        Called by the console. Idempotent. If the store is open already, the log is written from
        the next request to the console on.
        """
        if self.request_log.keep_seconds > 0:
            self.request_log.enable()
            self.idempotency.reports.log_requests(self.request_log)

    def use_table(self, table: RouteTable) -> None:
        """Look guarded routes up in a framework's own table, in place of the one made here."""
        self._own_table = table

    def table(self) -> GuardTable:
        """Return all guarded routes. Raises ``ConfigurationError`` if one cannot be guarded."""
        if self._table is None:
            if self._explicit and self.identify is _refuse_caller:
                raise ConfigurationError(
                    f"{self._explicit[0].path} is guarded with guard_path, which has no "
                    "dependencies: give Onceward identify=…, and principal=… to each guard"
                )
            routes = [*self._explicit, *self._routes_of_app()]
            placed = {id(route.guard) for route in routes if isinstance(route, GuardedRoute)}
            for handler in self._guarded:
                if id(guard_of(handler)) not in placed:
                    raise ConfigurationError(
                        f"{handler.__module__}.{handler.__qualname__} is guarded but no route of "
                        "the app leads to it: put @guard below the route decorator, and install "
                        "Onceward on the app that has the route"
                    )
            self._check_callers(routes)
            self._check_limits(routes)
            self._check_batch(routes)
            self._table = GuardTable(routes)
        return self._table

    def route_table(self) -> RouteTable:
        """Return where requests are looked up: ``table``, or the framework's own."""
        return self._own_table or self._table or self.table()

    def _check_callers(self, routes: Sequence[GuardedRoute | OpenRoute]) -> None:
        """Raise ``ConfigurationError`` for a guarded route whose caller nothing identifies."""
        if self.has_identify:
            return
        for route in routes:
            if isinstance(route, GuardedRoute) and not route.guard.is_claimed_late:
                raise _no_choice(f"{route.method} {route.path} is guarded")

    def _check_limits(self, routes: Sequence[GuardedRoute | OpenRoute]) -> None:
        for route in routes:
            limit = route.guard.policy.rate_limit if isinstance(route, GuardedRoute) else None
            if limit is None:
                continue
            if self.limiter is None:
                raise ConfigurationError(
                    f"{route.path} has a rate limit but no limiter is configured: give Onceward "
                    "one, e.g. limiter=LimitsRateLimiter() of onceward.guard.rate_limits"
                )
            self.limiter.check(limit)

    def _check_batch(self, routes: Sequence[GuardedRoute | OpenRoute]) -> None:
        batch = self._batch
        for route in routes:
            if batch is not None and (route.method, route.path) == ("POST", batch.path):
                raise ConfigurationError(
                    f"the app has a route POST {route.path}, which is the path of the batch "
                    'endpoint: give another one, such as batch="/v1/batch"'
                )

    # -- running --------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the store with the tables that are used, and start the sweep. Idempotent.

        It is closed with ``close``, or when ``asyncio.run`` ends its event loop. Then it can be
        opened again, in another loop.
        """
        self._use_running_loop()
        async with self._opening:
            if self.jobs.queues:
                self.store.schema.want(JOBS)
            if self._is_open:
                await self.store.open()  # adds what is used since
            else:
                self.route_table()
                await self.store.open()
                self._sweeper.start()
                self.audit_sealer.start()
                self.request_log.start()
                if self.job_metrics is not None:
                    self.depths.start()
                self._is_open = True
                # Not in the context of the request that has opened it: that will have ended.
                self._closing_with_loop = asyncio.create_task(
                    self._close_with_loop(), context=contextvars.Context()
                )

    async def close(self) -> None:
        """Stop the sweep, finish writes to the cache, close the store. Idempotent."""
        async with self._opening:
            if self._is_open:
                self._is_open = False
                waiting, self._closing_with_loop = self._closing_with_loop, None
                if waiting is not None and waiting is not asyncio.current_task():
                    waiting.cancel()
                await self._sweeper.stop()
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

    async def sweep(self) -> int:
        """Delete all expired records now; return how many."""
        return await self._sweeper.sweep()

    async def delete_old_rows(self) -> dict[str, int]:
        """Delete rows older than ``retention`` now; return how many of each table."""
        return await self._sweeper.delete_old_rows()

    def add_tenant_table(self, name: str, *, column: str = "tenant") -> None:
        """Include a table of the app in ``onceward tenant export`` and ``onceward tenant erase``.

        ``column`` holds the tenant of a row. Rows are deleted in the order of these calls: add a
        table before those that its foreign keys refer to. Raises ``ConfigurationError``.
        """
        self.tenant_tables.append(TenantTable(name, column))


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


class _WithLifespan:
    """Opens and closes Onceward with the ASGI lifespan of the app."""

    def __init__(self, onceward: Onceward, app: Any) -> None:
        self._onceward = onceward
        self._app = app

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        refusal: Exception | None = None

        async def receive_and_open() -> Any:
            nonlocal refusal
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self._onceward.open()
                except Exception as error:
                    refusal = error
                    raise
            return message

        async def close_and_send(message: Any) -> None:
            if message["type"] in _LAST_MESSAGES:
                await self._onceward.close()
            await send(message)

        try:
            await self._app(scope, receive_and_open, close_and_send)
        except Exception as error:
            # The message makes servers exit: without it they take the app for one without a
            # lifespan. The exception ends a test client, which waits for it.
            if error is refusal:
                await send({"type": "lifespan.startup.failed", "message": _one_line(error)})
            raise


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, OncewardError) else f"{type(error).__name__}: {error}"
    return f"Onceward did not start: {' '.join(text.split())}"
