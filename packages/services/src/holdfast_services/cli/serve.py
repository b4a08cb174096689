"""Running the server: bind, check, serve, and end well."""

import asyncio
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn

from holdfast.cli.gc import resume_gc
from holdfast.cli.output import CommandError, print_warning, redact_password
from holdfast.errors import HoldfastError
from holdfast.jobs.engines.nats_url import servers_of
from holdfast_services.app import create_app
from holdfast_services.bootstrap import create_store
from holdfast_services.cli.logs import configure_logging_from_settings
from holdfast_services.dev_secrets import development_secret
from holdfast_services.settings import Settings, load_settings, unknown_variables

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["configure_logging_from_settings", "run_in_process", "run_server"]

_BACKLOG = 2048


def run_server(
    *,
    host: str,
    port: int,
    workers: int,
    database: str | None,
    redis: str | None,
    nats: str | None,
    no_jobs: bool = False,
) -> int:
    """Serve until told to stop; returns the exit code."""
    signal.signal(signal.SIGTERM, _leave)  # until the server takes over
    signal.signal(signal.SIGINT, _leave)
    given = {
        "database_url": database,
        "redis_url": redis,
        "nats_url": nats,
        "run_jobs": "false" if no_jobs else None,
    }
    settings = load_settings(**given)
    if settings.nats_url is not None:
        servers_of(settings.nats_url)
    for line in (*unknown_variables(), *settings.warnings()):
        print_warning(line)
    listener = _bind(host, port, settings)
    with listener:
        asyncio.run(_check_store(settings))
        if settings.needs_development_secret:
            development_secret(settings.home)
            print_warning(
                "no HOLDFAST_JWT_SECRET is set: anyone who can read "
                f"{settings.home} can sign in as anybody. For development only."
            )
        line = (
            f"Holdfast is ready on {_address(listener)} ({redact_password(settings.database_url)})"
        )

        def say_ready() -> None:
            resume_gc()
            print(line, flush=True)

        configure_logging_from_settings(settings)
        app = create_app(settings)  # for several workers too: what is wrong is told once
        if workers == 1:
            run_in_process(app, settings, listener, say_ready)
            return 0
        from holdfast_services.cli.supervisor import Supervisor

        return Supervisor(listener, workers, given, settings.shutdown_seconds).run(say_ready)


def run_in_process(
    app: "FastAPI",
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[], None],
    *,
    started: Callable[[uvicorn.Server], None] = lambda _server: None,
) -> None:
    """Serve in this process until SIGTERM or Ctrl-C."""
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )
    server = _Server(config, ready)
    started(server)
    try:
        server.run(sockets=[listener])
    except SystemExit:
        raise CommandError("the server could not start; the log says why") from None


class _Server(uvicorn.Server):
    """Uvicorn that says when it is ready, and takes a signal as a wish, not as its death."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own raises the signal again at the end, and the exit code would not be 0.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


def _leave(_number: int, _frame: Any) -> NoReturn:
    raise SystemExit(0)


def _bind(host: str, port: int, settings: Settings) -> socket.socket:
    """Take the port before anything else; who is refused it has changed nothing."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as error:
        raise CommandError(f"cannot listen on {host}: {error.strerror}", 2) from error
    # "localhost" is often both: the older family is what clients try without being asked.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if settings.needs_development_secret and not ipaddress.ip_address(address[0]).is_loopback:
        raise CommandError(
            f"refusing to listen on {host} with a development secret: set HOLDFAST_JWT_SECRET "
            "(32 bytes or more), HOLDFAST_JWKS_FILE or HOLDFAST_JWKS_URL, or use --host 127.0.0.1",
            2,
        )
    try:
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port "
            "(0 takes a free one)"
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _check_store(settings: Settings) -> None:
    """Open the database once, migrations included, so that trouble is told in one line."""
    store = create_store(settings)
    try:
        await store.open()
    except HoldfastError as error:
        raise CommandError(f"{redact_password(settings.database_url)}: {error}") from error
    await store.close()
