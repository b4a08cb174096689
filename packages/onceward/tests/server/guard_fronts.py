"""The app of ``GuardContract`` in each framework, called in this process."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import flask
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import override_settings
from django.urls import path as django_path
from fastapi import FastAPI, HTTPException
from sqlalchemy import create_engine, text
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response as StarletteResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route
from werkzeug.wrappers import Request as WerkzeugRequest

from onceward import GuardConfig, Onceward, Principal
from onceward.django import batch as django_batch
from onceward.django import execution as django_execution
from onceward.django import guard as django_guard
from onceward.flask import FlaskGuard
from onceward.frameworks.django import django_onceward
from onceward.frameworks.wsgi import WsgiGuard
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore
from onceward_testing.guard_shop import (
    BATCH_PATH,
    INSERT_ORDER,
    Reply,
    Sent,
    Shop,
    Write,
    identify,
    principal_of,
    run_handler,
    run_sync_handler,
)
from onceward_testing.in_process_client import AsgiClient, Request, Response, WsgiClient
from packages.onceward.tests.support.django_project import add_django_database

# -- ASGI ----------------------------------------------------------------------------------------


class AsgiFront:
    def __init__(self, app: Any, onceward: Onceward[Any]) -> None:
        self.onceward = onceward
        self.app = app
        self._client = AsgiClient(app)
        self.send = self._client.send
        self.stop_client = self._client.close

    def close(self) -> None:
        self._client.wait(self.onceward.close())
        self.stop_client()


def _starlette_response(reply: Reply) -> StarletteResponse:
    response: StarletteResponse
    background = BackgroundTask(reply.background)
    if reply.is_stream:
        parts = _parts(reply)
        response = StreamingResponse(parts, reply.status, background=background)
    else:
        response = StarletteResponse(reply.body, reply.status, background=background)
    for name, value in reply.headers:
        response.headers.append(name, value)
    return response


async def _parts(reply: Reply) -> Any:
    for part in (reply.body[:5], reply.body[5:]):
        yield part


def _starlette_handler(onceward: Onceward[Any], shop: Shop) -> Callable[..., Any]:
    async def handle(request: StarletteRequest) -> StarletteResponse:
        sent = Sent(request.headers, await request.body())
        return _starlette_response(await run_handler(onceward, shop.handle(sent)))

    return handle


async def _open(request: StarletteRequest) -> StarletteResponse:
    return StarletteResponse(request.method)


async def _principal(request: StarletteRequest) -> Principal:
    found = principal_of(request.headers.get("x-tenant"))
    if found is None:
        raise HTTPException(401, "sign in first")
    return found


def _fastapi(shop: Shop, *, direct: bool, **caller: Any) -> AsgiFront:
    onceward: Onceward[Any] = Onceward(shop.url, policy=shop.policy, **caller, config=shop.config)
    app = FastAPI()
    onceward.install(app, batch=BATCH_PATH, direct=direct)
    for paths, endpoint, methods, policy in (
        ("/orders", "orders.create", ["POST"], None),
        ("/shelves/{name}", "shelves.fill", ["POST"], None),
        ("/numbered", "orders.number", ["POST"], shop.numbered_policy),
    ):
        handler = onceward.guard(endpoint, policy=policy)(_starlette_handler(onceward, shop))
        app.add_api_route(paths, handler, methods=methods)
    app.add_api_route("/open", _open, methods=["GET", "POST"])
    return AsgiFront(app, onceward)


def fastapi_early(shop: Shop) -> AsgiFront:
    """The caller is identified from the head; FastAPI calls the handlers."""
    return _fastapi(shop, direct=False, identify=identify)


def fastapi_direct(shop: Shop) -> AsgiFront:
    """The caller is identified from the head; the guard calls the handlers."""
    return _fastapi(shop, direct=True, identify=identify)


def fastapi_late(shop: Shop) -> AsgiFront:
    """A dependency returns the caller; the key is claimed after all dependencies have run."""
    return _fastapi(shop, direct=True, principal=_principal)


def starlette(shop: Shop) -> AsgiFront:
    onceward: Onceward[Any] = Onceward(
        shop.url, policy=shop.policy, identify=identify, config=shop.config
    )

    def guarded(endpoint: str, **options: Any) -> Any:
        return onceward.guard(endpoint, **options)(_starlette_handler(onceward, shop))

    app = Starlette(
        routes=[
            Route("/orders", guarded("orders.create"), methods=["POST"]),
            Route("/shelves/{name}", guarded("shelves.fill"), methods=["POST"]),
            Route(
                "/numbered", guarded("orders.number", policy=shop.numbered_policy), methods=["POST"]
            ),
            Route("/open", _open, methods=["GET", "POST"]),
        ]
    )
    onceward.install(app, batch=BATCH_PATH)
    return AsgiFront(app, onceward)


def _guard_paths(onceward: Onceward[Any], shop: Shop) -> None:
    onceward.guard_path("POST", "/orders", endpoint="orders.create")
    onceward.guard_path("POST", "/shelves/{name}", endpoint="shelves.fill")
    onceward.guard_path("POST", "/numbered", endpoint="orders.number", policy=shop.numbered_policy)


def plain_asgi(shop: Shop) -> AsgiFront:
    onceward: Onceward[Any] = Onceward(
        shop.url, policy=shop.policy, identify=identify, config=shop.config
    )
    _guard_paths(onceward, shop)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message.get("more_body", False)
        if "onceward" not in scope:
            status = 200 if scope["path"] == "/open" else 404
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"open"})
            return
        sent = Sent(Headers(scope=scope), message["body"])
        reply = await run_handler(onceward, shop.handle(sent))
        headers = [(name.encode(), value.encode()) for name, value in reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        if reply.is_stream:
            await send({"type": "http.response.body", "body": reply.body[:5], "more_body": True})
        await send(
            {"type": "http.response.body", "body": reply.body[5 if reply.is_stream else 0 :]}
        )
        reply.background()

    return AsgiFront(onceward.wrap(app, batch=BATCH_PATH), onceward)


# -- WSGI ----------------------------------------------------------------------------------------


class WsgiFront:
    def __init__(self, app: Any, onceward: Onceward[Any], close: Callable[[], None]) -> None:
        self.onceward = onceward
        self.app = app
        self.send = WsgiClient(app).send
        self.close = close


def plain_wsgi(shop: Shop) -> WsgiFront:
    onceward: Onceward[Any] = Onceward(
        shop.url, policy=shop.policy, identify=identify, config=shop.config
    )
    _guard_paths(onceward, shop)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = WerkzeugRequest(environ)
        if request.path not in ("/orders", "/numbered") and not request.path.startswith("/shelves"):
            start_response("200 OK" if request.path == "/open" else "404 Not Found", [])
            return [b"open"]
        if request.method != "POST":
            start_response("405 Method Not Allowed", [])
            return [b""]
        sent = Sent(request.headers, request.get_data())
        reply = run_sync_handler(guard.execution, shop.handle(sent))
        start_response(f"{reply.status} Something", list(reply.headers))
        return [reply.body]

    guard = WsgiGuard(app, onceward, batch=BATCH_PATH)
    return WsgiFront(guard, onceward, guard.close)


def flask_front(shop: Shop) -> WsgiFront:
    """The app signs the caller in before each request; the guard is around the view."""
    return _flask(shop, shop.url)


def flask_on_sqlalchemy(shop: Shop) -> WsgiFront:
    """The same, with a session of SQLAlchemy as the transaction."""
    engine = create_engine(shop.url)
    front = _flask(
        shop,
        SqlAlchemySyncStore(engine),
        lambda session, order: session.execute(text(INSERT_ORDER), order._asdict()),
    )
    close = front.close

    def close_both() -> None:
        close()
        engine.dispose()

    front.close = close_both
    return front


def _flask(
    shop: Shop, store: Any, write: Callable[[Any, Write], object] | None = None
) -> WsgiFront:
    onceward: Onceward[Any] = Onceward(store, policy=shop.policy, config=shop.config)
    app = flask.Flask(__name__)

    @app.before_request
    def sign_in() -> Any:
        flask.g.caller = principal_of(flask.request.headers.get("X-Tenant"))
        return ("sign in first", 401) if flask.g.caller is None else None

    guard = FlaskGuard(onceward, app, principal=lambda: flask.g.caller, batch=BATCH_PATH)

    def handle(**_params: str) -> flask.Response:
        request = flask.request
        sent = Sent(request.headers, request.get_data())
        own = None if write is None else partial(write, guard.transaction)
        reply = run_sync_handler(guard.execution, shop.handle(sent), own)
        body: Any = iter([reply.body[:5], reply.body[5:]]) if reply.is_stream else reply.body
        response = flask.Response(body, reply.status)
        del response.headers["Content-Type"]
        response.headers.extend(reply.headers)
        return response

    for path, endpoint, methods, policy in (
        ("/orders", "orders.create", ["POST"], None),
        ("/shelves/<name>", "shelves.fill", ["POST"], None),
        ("/numbered", "orders.number", ["POST"], shop.numbered_policy),
    ):

        def view(**params: str) -> flask.Response:
            return handle(**params)

        view.__qualname__ = endpoint
        app.add_url_rule(path, endpoint, guard(endpoint, policy=policy)(view), methods=methods)
    app.add_url_rule("/open", "open", lambda: "open", methods=["GET", "POST"])
    return WsgiFront(app, onceward, guard.close)


# -- Django --------------------------------------------------------------------------------------


class DjangoFront:
    """A project in settings of its own, which count as long as it is the one that was used last."""

    _active: "DjangoFront | None" = None
    _switching = threading.Lock()

    def __init__(self, shop: Shop) -> None:
        self._alias = add_django_database(shop.url)
        self._settings = {
            "ROOT_URLCONF": type("Routes", (), {"urlpatterns": _django_routes(shop, self._alias)}),
            "MIDDLEWARE": [f"{__name__}.DjangoSignIn", "onceward.django.OncewardMiddleware"],
            "ONCEWARD": {
                "USING": self._alias,
                "PRINCIPAL": lambda request: request.caller,
                "POLICY": shop.policy,
                **{
                    option.name.upper(): value
                    for option in fields(GuardConfig)
                    if (value := getattr(shop.config, option.name)) != option.default
                },
            },
        }
        self._override: Any = None
        self._handler: WSGIHandler | None = None

    @property
    def onceward(self) -> Onceward[Any]:
        self._activate()
        return django_onceward().onceward

    def app(self, environ: dict[str, Any], start_response: Any) -> Any:
        self._activate()
        assert self._handler is not None
        return self._handler(environ, start_response)

    def send(self, request: Request) -> Response:
        return WsgiClient(self.app).send(request)

    def close(self) -> None:
        with self._switching:
            if DjangoFront._active is self:
                self._leave()
        connections[self._alias].close()

    def _activate(self) -> None:
        with self._switching:
            if DjangoFront._active is self:
                return
            if DjangoFront._active is not None:
                DjangoFront._active._leave()
            self._override = override_settings(**self._settings)
            self._override.enable()
            if self._handler is None:
                self._handler = WSGIHandler()
            DjangoFront._active = self

    def _leave(self) -> None:
        django_onceward().bridge.close()
        self._override.disable()
        DjangoFront._active = None


class DjangoSignIn:
    """A middleware of the project: finds the caller, or refuses the request."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.caller = principal_of(request.headers.get("X-Tenant"))
        if request.caller is None and request.path != BATCH_PATH:
            return HttpResponse("sign in first", status=401)
        return self._get_response(request)


def _django_routes(shop: Shop, alias: str) -> list[Any]:
    def handle(request: HttpRequest, **_params: str) -> HttpResponse:
        def write(order: Write) -> None:
            with connections[alias].cursor() as cursor:
                sql = INSERT_ORDER.replace(":tenant", "%s").replace(":item", "%s")
                cursor.execute(sql, [order.tenant, order.item])

        if request.method != "POST":
            return HttpResponse(status=405)
        sent = Sent(request.headers, request.body)
        reply = run_sync_handler(django_execution(), shop.handle(sent), write)
        if reply.is_stream:
            return StreamingHttpResponse(iter([reply.body[:5], reply.body[5:]]))
        response = HttpResponse(reply.body, status=reply.status)
        del response["Content-Type"]
        for name, value in reply.headers:
            if name == "Set-Cookie":
                response.set_cookie(*value.split("="), path=None)
            else:
                response[name] = value
        return response

    def guarded(endpoint: str, **options: Any) -> Any:
        def view(request: HttpRequest, **params: str) -> HttpResponse:
            return handle(request, **params)

        view.__qualname__ = endpoint
        return django_guard(endpoint, principal=lambda request: request.caller, **options)(view)

    def not_guarded(request: HttpRequest) -> HttpResponse:
        return HttpResponse("open")

    return [
        django_path("orders", guarded("orders.create")),
        django_path("shelves/<str:name>", guarded("shelves.fill")),
        django_path("numbered", guarded("orders.number", policy=shop.numbered_policy)),
        django_path("open", not_guarded),
        django_path(BATCH_PATH[1:], django_batch),
    ]
