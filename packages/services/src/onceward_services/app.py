"""Build the FastAPI app of the server from its settings."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from onceward import GuardConfig, Onceward, Principal
from onceward.errors import ConfigurationError
from onceward.guard.rate_limits import LimitsRateLimiter
from onceward.guard.request import Identify, RequestHead
from onceward.guard.route_table import unknown_names
from onceward.observability.metrics import PrometheusMetrics
from onceward.observability.noop import NullJobMetrics
from onceward.ports import Clock, FaultPoints, JobMetrics, Metrics, RecordCache, Store
from onceward.sign_in.jwt_auth import JwtIdentify
from onceward.stores.breaker import Breaker
from onceward.stores.clock import StoreClock
from onceward_operator.console import TokenAccess, console
from onceward_operator.console.app import ConsoleApp
from onceward_services import health, pages
from onceward_services.bootstrap import create_onceward, create_store
from onceward_services.dev_secrets import development_secret
from onceward_services.effective_settings import effective_settings
from onceward_services.error_handlers import ErrorMiddleware, install_error_handlers, log_item
from onceward_services.jobs import make_worker, register_jobs
from onceward_services.ops_port import OpsPort, OpsPortMiddleware
from onceward_services.registry import (
    SERVICES,
    Service,
    prefix_of,
    service_for_path,
    tenant_tables,
)
from onceward_services.routing import extend_router
from onceward_services.security_headers import SecurityHeadersMiddleware
from onceward_services.settings import Settings
from onceward_services.walk.review_gauge import OpenReviews

__all__ = ["create_app", "create_onceward", "create_store"]


_DESCRIPTION: Final = """
Exactly-once effects: every write takes an `Idempotency-Key`. A second request with the same key and
the same content gets the stored response, byte for byte.
"""


def create_app(
    settings: Settings,
    *,
    clock: Clock | None = None,
    faults: FaultPoints | None = None,
    metrics: Metrics | None = None,
    only: Collection[str] = (),
    rate_limit_file: Path | None = None,
    is_revoked: Callable[[str], bool | Awaitable[bool]] | None = None,
    ops_port: int | None = None,
) -> FastAPI:
    """Build the app with all services, or with ``only`` those named.

    Several processes on one machine share their rate limits through ``rate_limit_file``. The store
    is opened by the app's lifespan, not here. ``is_revoked`` is that of ``JwtIdentify``.
    ``ops_port`` is the actual port if the settings have 0 for it.
    """
    settings.check_production()
    clock = clock or StoreClock()
    metrics = metrics or PrometheusMetrics()
    store = create_store(settings)
    cache = _create_cache(settings, store)
    limiter = LimitsRateLimiter(_rate_limit_storage(settings, rate_limit_file), clock=clock)
    by_token = _create_jwt_identify(settings, clock, is_revoked)
    onceward = Onceward(
        store,
        identify=_identify_by_service(by_token),
        config=GuardConfig(
            cache=cache,
            limiter=limiter,
            memory_bytes=settings.memory_bytes,
            sweep_every_seconds=None if settings.run_jobs else settings.sweep_every_seconds,
            retention=settings.retention(),
            audit_seal_seconds=settings.audit_seal_seconds or None,
            audit_keys=settings.audit_keys(),
            max_payload_bytes=settings.jobs_payload_bytes,
            limits=settings.limits(),
            breaker=Breaker(
                failure_limit=settings.breaker_failure_limit,
                open_seconds=settings.breaker_open_seconds,
            ),
            metrics=metrics,
            clock=clock,
            faults=faults,
            disabled=settings.disabled,
            request_log_seconds=settings.request_log_seconds,
            error_format=settings.problem_format,
        ),
        # Where jobs run, the sweep is a job, and only one process runs it.
    )

    # Migrations of all services run in every database.
    for tables in tenant_tables().values():
        onceward.runtime.tenant_tables += tables
    register_jobs(onceward, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        worker = (
            make_worker(onceward, settings, _job_metrics(metrics)) if settings.run_jobs else None
        )
        if worker is not None:
            await worker.start()
        by_token.start_refresh()
        try:
            yield
        finally:
            if worker is not None:
                await worker.stop()
            await limiter.close()

    app = FastAPI(
        title="Onceward",
        version=version("onceward"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        # A redirect would send a write, its key and its token to whatever the Host header names.
        redirect_slashes=False,
        # FastAPI's own pages load scripts from a CDN; `pages` serves the same from here.
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.openapi_enabled else None,
        **_telemetry_options(),
    )
    app.state.onceward = onceward
    app.state.large_body_slot = asyncio.Semaphore(1)
    install_error_handlers(app)
    services = [service for service in SERVICES if not only or service.name in only]
    for service in services:
        extend_router(app.router, _service_router(service.package, onceward, settings))
    ports = OpsPort(settings.ops_port if ops_port is None else ops_port)
    extend_router(
        app.router,
        health.router(
            onceward,
            metrics if settings.metrics_enabled else None,
            _reporters(onceward, metrics, [service.name for service in services]),
        ),
        pages.router(
            services,
            app.version,
            has_docs=settings.docs_enabled and settings.openapi_enabled,
            ports=ports,
        ),
    )
    if settings.console_enabled:
        app.add_route("/console", _to_console, include_in_schema=False)
        app.mount("/console", _console(onceward, settings, by_token, services))
    onceward.install(app, batch=settings.batch(log_item), direct=settings.direct_routes)
    if not only:
        _refuse_unknown_endpoints(onceward, settings)
    if ports.is_set:
        app.add_middleware(OpsPortMiddleware, ports=ports)
    app.add_middleware(ErrorMiddleware, problem_format=settings.problem_format)
    app.add_middleware(SecurityHeadersMiddleware)
    return app


async def _to_console(request: Request) -> Response:
    """Lead from the path without a slash to the console, on the same host."""
    return RedirectResponse(f"{request.scope['root_path']}/console/", status_code=308)


def _console(
    onceward: Onceward, settings: Settings, by_token: JwtIdentify, services: Sequence[Service]
) -> ConsoleApp:
    """Return the console with the pages of the services.

    The roles of a token count for its own tenants: the claims that services take theirs from.
    """
    claims = sorted({service.tenant_claim for service in services})

    def tenants_of(principal: Principal) -> list[str]:
        found = ((claim, principal.claims.get(claim)) for claim in claims)
        return [prefix_of(claim) + name for claim, name in found if isinstance(name, str)]

    pages = []
    for service in services:
        if find_spec(f"{service.package}.console") is not None:
            pages += import_module(f"{service.package}.console").pages(onceward, settings)
    access = TokenAccess(by_token, operators=settings.operators_of_console, tenants_of=tenants_of)
    return console(
        onceward, access=access, pages=pages, settings=lambda: effective_settings(settings)
    )


def _telemetry_options() -> dict[str, Any]:
    """Switch FastAPI's own telemetry off, unless OpenTelemetry is configured already.

    FastAPI would ask for its three providers with every request, which takes nine microseconds.
    """
    telemetry = getattr(FastAPI(openapi_url=None), "_native_telemetry", None)
    if telemetry is None or telemetry.enabled():
        return {}
    return {"telemetry": {"tracing": False, "metrics": False, "logs": False}}


def _refuse_unknown_endpoints(onceward: Onceward, settings: Settings) -> None:
    """Raise ``ConfigurationError`` for a switched-off endpoint that does not exist."""
    endpoints = [route.endpoint for route in onceward.runtime.routes.table().routes]
    unknown = unknown_names(settings.disabled, endpoints)
    if unknown:
        raise ConfigurationError(
            f"ONCEWARD_DISABLED_ENDPOINTS: there is no endpoint {unknown[0]!r}; there are "
            f"{', '.join(sorted(endpoints))}"
        )


def _job_metrics(metrics: Metrics) -> JobMetrics:
    return metrics if isinstance(metrics, PrometheusMetrics) else NullJobMetrics()


def _reporters(
    onceward: Onceward, metrics: Metrics, services: Collection[str]
) -> list[health.Reporter]:
    if not isinstance(metrics, PrometheusMetrics) or "walk" not in services:
        return []
    return [OpenReviews(onceward.store, metrics.registry)]


def _service_router(package: str, onceward: Onceward, settings: Settings) -> APIRouter:
    build: Any = import_module(f"{package}.api").router
    router: APIRouter = build(onceward, settings)
    return router


def _create_jwt_identify(
    settings: Settings,
    clock: Clock,
    is_revoked: Callable[[str], bool | Awaitable[bool]] | None,
) -> JwtIdentify:
    secrets = settings.jwt_secrets
    if settings.needs_development_secret:
        secrets = (development_secret(settings.home),)
    return JwtIdentify(
        secret=secrets or None,
        jwks_file=settings.jwks_file,
        jwks_url=settings.jwks_url,
        algorithm=settings.algorithm,
        issuer=settings.jwt_issuers or None,
        audience=settings.jwt_audiences or None,
        is_revoked=is_revoked,
        clock=clock,
    )


def _identify_by_service(by_token: JwtIdentify) -> Identify:
    """Return ``identify``; the service of the path decides which claim is the tenant."""
    by_claim = {
        claim: by_token.with_tenant(claim, prefix=prefix_of(claim))
        for claim in {service.tenant_claim for service in SERVICES}
    }

    def identify(head: RequestHead) -> Any:
        service = service_for_path(head.path)
        return (by_token if service is None else by_claim[service.tenant_claim])(head)

    return identify


def _rate_limit_storage(settings: Settings, rate_limit_file: Path | None) -> str:
    """Return the storage URL of the rate limiter; several processes need a shared one."""
    if settings.redis_url is not None:
        return settings.redis_url
    return "async+memory://" if rate_limit_file is None else f"file://{rate_limit_file}"


def _create_cache(settings: Settings, store: Store) -> RecordCache | None:
    if settings.redis_url is None:
        return None
    try:
        from onceward.stores.redis import RedisRecords  # noqa: PLC0415 - adapters are optional
    except ImportError as error:
        raise ConfigurationError('Redis needs its driver: pip install "onceward[redis]"') from error
    return RedisRecords(settings.redis_url, environment=settings.environment, secret=store.secret)
