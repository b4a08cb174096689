"""Guarded operations in every framework, as one WSGI and one ASGI app for real servers.

Each handler appends the body that it has seen to the file ``BODY_APPS_FOLDER/executed``.
"""

import os
from pathlib import Path
from typing import Any

import django
import flask
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from fastapi import Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from onceward import SINGLE_TENANT, Onceward, Policy, Principal
from onceward.flask import FlaskGuard
from onceward.frameworks.wsgi import WsgiGuard

FOLDER = Path(os.environ["BODY_APPS_FOLDER"])
MAX_BODY_BYTES = 1_000
VIEWS = "packages.onceward.tests.support.body_views"
POLICY = Policy(max_body_bytes=MAX_BODY_BYTES)


def execute(body: bytes) -> None:
    """Note an execution. One write to a file opened for appending is one line."""
    file = os.open(FOLDER / "executed", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, body.replace(b"\r\n", b" ") + b"\n")
    os.close(file)


def _onceward(name: str, **options: Any) -> Onceward[Any]:
    return Onceward(f"sqlite:///{FOLDER}/{name}.db", policy=POLICY, **options)


# -- WSGI ------------------------------------------------------------------------------------------


def _plain(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    if environ["REQUEST_METHOD"] == "POST":
        execute(environ["wsgi.input"].read())
    start_response("201 Created", [("Content-Length", "2")])
    return [b"ok"]


_wsgi = _onceward("wsgi", tenants=SINGLE_TENANT)
_wsgi.guard_path("POST", "/orders")

_flask = flask.Flask("body_apps")
_guard = FlaskGuard(_onceward("flask", tenants=SINGLE_TENANT), _flask)


@_flask.before_request
def _read_form() -> None:
    if flask.request.path == "/read":
        flask.request.form.get("token")


@_flask.post("/orders")
@_flask.post("/read", endpoint="read")
@_guard("orders")
def _order() -> Any:
    shown = flask.request.get_data() or repr(flask.request.form.to_dict()).encode()
    execute(shown)
    return "ok", 201


# -- Django ----------------------------------------------------------------------------------------


settings.configure(
    SECRET_KEY="for tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=VIEWS,
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(FOLDER / "django.db")}
    },
    INSTALLED_APPS=["onceward.django"],
    MIDDLEWARE=[f"{VIEWS}.read_post", "onceward.django.OncewardMiddleware"],
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
    ONCEWARD={"PRINCIPAL": lambda _request: Principal("t", "a"), "POLICY": POLICY},
)
django.setup()
call_command("migrate", verbosity=0)

wsgi = DispatcherMiddleware(
    _plain,
    {"/wsgi": WsgiGuard(_plain, _wsgi), "/flask": _flask, "/django": get_wsgi_application()},
)

# -- ASGI ------------------------------------------------------------------------------------------


async def _handle(request: Request) -> PlainTextResponse:
    execute(await request.body())
    return PlainTextResponse("ok", 201)


def _principal() -> Principal:
    return Principal("t", "a")


def _fastapi(name: str, *, is_late: bool) -> FastAPI:
    app = FastAPI(dependencies=[Depends(_principal)] if is_late else [])
    caller: Any = {"principal": _principal} if is_late else {"tenants": SINGLE_TENANT}
    onceward = _onceward(name, **caller)
    onceward.install(app)
    app.add_api_route("/orders", onceward.guard("orders")(_handle), methods=["POST"])
    return app


asgi = Starlette(
    routes=[
        Mount("/early", _fastapi("early", is_late=False)),
        Mount("/late", _fastapi("late", is_late=True)),
        Mount("/django", get_asgi_application()),
        Mount("/", PlainTextResponse("ok")),
    ]
)
