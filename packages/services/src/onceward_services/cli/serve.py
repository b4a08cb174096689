"""``onceward serve``: bind the port, check the configuration, serve, shut down."""

import asyncio
import gc
import ipaddress
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import uvicorn

from onceward.errors import OncewardError
from onceward.jobs.engines import broker_engine
from onceward_protocol.cli.gc import resume_gc
from onceward_protocol.cli.output import CommandError, print_warning, redact_password
from onceward_services.app import create_app
from onceward_services.bootstrap import create_store
from onceward_services.cli.connection_limits import ConnectionLimits, raise_file_limit
from onceward_services.cli.logs import configure_logging_from_settings
from onceward_services.dev_secrets import development_secret
from onceward_services.settings import Settings, load_settings, unknown_variables

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["port_of", "run_in_process", "run_server"]

_BACKLOG = 2048
_VERBOSE = ("DEBUG", "INFO", "WARNING")


def run_server(
    *,
    host: str,
    port: int,
    workers: int,
    database: str | None,
    redis: str | None,
    nats: str | None,
    no_jobs: bool = False,
    require_durability: str | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    signal.signal(signal.SIGTERM, _exit)  # until the server installs its own handlers
    signal.signal(signal.SIGINT, _exit)
    overrides = {
        "database_url": database,
        "redis_url": redis,
        "nats_url": nats,
        "run_jobs": "false" if no_jobs else None,
        "require_durability": require_durability,
    }
    settings = load_settings(**overrides)
    settings.check_production()
    if settings.nats_url is not None:
        broker_engine("nats", settings.nats_url)  # refuses a malformed URL before the start
    for line in (*unknown_variables(), *settings.warnings()):
        print_warning(line)
    with ExitStack() as stack:
        listener = stack.enter_context(_bind(host, port, settings))
        ops = _bind_ops(settings, listener)
        if ops is not None:
            stack.enter_context(ops)
        listeners = [listener] if ops is None else [listener, ops]
        asyncio.run(_check_store(settings))
        if settings.needs_development_secret:
            development_secret(settings.home)
            print_warning(
                "no ONCEWARD_JWT_SECRET is set: anyone who can read "
                f"{settings.home} can sign in as any user. For development only."
            )
        line = (
            f"Onceward is ready on {_address(listener)} ({redact_password(settings.database_url)})"
        )
        if ops is not None:
            line += f", metrics and docs on {_address(ops)}"
        if sys.stdout.isatty():
            line += _first_steps(settings, _address(listener), _address(ops or listener))

        def announce_ready() -> None:
            resume_gc()
            print(line, flush=True)

        configure_logging_from_settings(settings)
        # With several workers too, so that an error is reported once.
        app = create_app(settings, ops_port=port_of(ops))
        if workers == 1:
            run_in_process(app, settings, listeners, announce_ready)
            return 0
        from onceward_services.cli.supervisor import Supervisor

        return Supervisor(listeners, workers, overrides, settings.shutdown_seconds).run(
            announce_ready
        )


# How long the guard has to respond to a body that is late before its connection is closed.
_BODY_GRACE_SECONDS: Final = 2.0
# Chunks of a few bytes have more bytes on the wire than in the body.
_LARGEST_FRAMING: Final = 8


def run_in_process(
    app: "FastAPI",
    settings: Settings,
    listeners: list[socket.socket],
    on_ready: Callable[[], None],
    *,
    on_start: Callable[[uvicorn.Server], None] = lambda _server: None,
) -> None:
    """Serve in this process until SIGTERM or Ctrl-C."""
    raise_file_limit(settings.max_connections)
    # A large body is many objects at once; with the usual thresholds, collecting them again and
    # again takes most of the time that decoding does.
    gc.set_threshold(20_000, 100, 50)
    limited = ConnectionLimits(
        app,
        max_connections=settings.max_connections,
        head_seconds=settings.head_seconds,
        # Later than the guard, which says more, and above all limits of its own.
        body_seconds=settings.body_seconds + _BODY_GRACE_SECONDS,
        max_body_bytes=_LARGEST_FRAMING * max(settings.max_body_bytes, settings.batch_bytes),
        max_per_address=settings.max_connections_per_address,
    )
    config = uvicorn.Config(
        limited,
        http=limited.protocol(),
        ws="none",
        lifespan="on",
        log_config=None,
        # One warning per malformed request.
        log_level="warning" if settings.log_level in _VERBOSE else settings.log_level.lower(),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )
    server = _Server(config, on_ready)
    on_start(server)
    try:
        server.run(sockets=listeners)
    except SystemExit:
        raise CommandError("the server could not start; see the log") from None


class _Server(uvicorn.Server):
    """A Uvicorn server that reports when it is ready and does not re-raise a signal at the end."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's version raises the signal again at the end, so the exit code would not be 0.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


def _exit(_number: int, _frame: Any) -> NoReturn:
    raise SystemExit(0)


def port_of(ops: socket.socket | None) -> int | None:
    """Return the port of the listener for metrics and docs; None if they have none."""
    if ops is None:
        return None
    port: int = ops.getsockname()[1]
    return port


def _bind(host: str, port: int, settings: Settings) -> socket.socket:
    """Bind the port first, so that a port in use fails before anything else has happened."""
    family, address = _resolve(host, port)
    if not ipaddress.ip_address(address[0]).is_loopback and (found := settings.public_secret):
        raise CommandError(
            f"refusing to listen on {host} with {found}: set ONCEWARD_JWT_SECRET "
            "(32 random bytes or more), ONCEWARD_JWKS_FILE or ONCEWARD_JWKS_URL, or use "
            "--host 127.0.0.1",
            2,
        )
    return _listen(host, port, family, address, "choose another --port (0 chooses a free port)")


def _bind_ops(settings: Settings, listener: socket.socket) -> socket.socket | None:
    """Bind the port of metrics and docs, if they have one."""
    host, port = settings.ops_host, settings.ops_port
    if port is None:
        return None
    if port != 0 and port == port_of(listener):
        raise CommandError(f"ONCEWARD_OPS_PORT={port} is the port of the API: choose another", 2)
    return _listen(host, port, *_resolve(host, port), "choose another ONCEWARD_OPS_PORT")


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except OSError as error:
        raise CommandError(f"cannot listen on {host}: {error.strerror}", 2) from error
    # "localhost" often has an address of both families. Clients expect IPv4.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _listen(
    host: str, port: int, family: int, address: tuple[str, int], advice: str
) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host} port {port}: {error.strerror}; {advice}"
        ) from error


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _first_steps(settings: Settings, server: str, ops: str) -> str:
    """Return where a person goes first: lines with the console, the docs and the token command."""
    steps = []
    if settings.console_enabled:
        steps.append(("console", f"{server}/console/"))
    if settings.docs_enabled and settings.openapi_enabled:
        steps.append(("docs", f"{ops}/docs"))
    if settings.needs_development_secret:
        steps.append(("token", "onceward token --sub ada --role admin"))
    return "".join(f"\n  {name:<7}  {what}" for name, what in steps)


async def _check_store(settings: Settings) -> None:
    """Open the database and apply migrations once, so that an error is reported in one line."""
    store = create_store(settings)
    try:
        logging.disable(logging.WARNING)  # the server logs the same when it opens the store
        await store.open()
    except OncewardError as error:
        raise CommandError(f"{redact_password(settings.database_url)}: {error}") from error
    finally:
        logging.disable(logging.NOTSET)
    await store.close()
