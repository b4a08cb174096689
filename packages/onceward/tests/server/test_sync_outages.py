"""Statements of sync handlers that PostgreSQL does not respond to, or refuses as read-only."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, override_settings
from flask import Flask, request
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from werkzeug.test import Client

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Principal
from onceward.errors import ConfigurationError
from onceward.flask import FlaskGuard
from onceward.frameworks.django import django_onceward, guard
from onceward.frameworks.wsgi import WsgiGuard
from onceward.stores.psycopg import PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore
from packages.onceward.tests.support.django_project import add_django_database

# Of a guarded request: sends a statement, and returns the status and the body.
Post = Callable[[str], tuple[int, Any]]

SLEEP = "SELECT pg_sleep(60)"
WRITE = "INSERT INTO orders VALUES ('boots')"
# As a server does that was made a standby: for the session, not only for the transaction.
DEMOTED = "SET default_transaction_read_only = on"
WRONG = "SELECT 1 / 0"
ELSEWHERE = "a timeout of another server"


def new_key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4())}


def run_or_fail(sql: str, run: Callable[[str], Any]) -> str:
    if sql == ELSEWHERE:
        raise TimeoutError(ELSEWHERE)
    run(sql)
    return "done"


@contextmanager
def flask_on_sqlalchemy(url: str) -> Iterator[Post]:
    with _sqlalchemy(url) as store:
        app = Flask(__name__)
        own = FlaskGuard(
            Onceward(store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None)),
            app,
        )

        @app.post("/run")
        @own()
        def run() -> str:
            return _run_in_session(own.transaction)

        yield _post_to(app.test_client().post)
        own.close()


@contextmanager
def flask_on_psycopg(url: str) -> Iterator[Post]:
    store = PsycopgSyncStore(url, statement_seconds=1)
    app = Flask(__name__)
    own = FlaskGuard(
        Onceward(store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None)), app
    )

    @app.post("/run")
    @own()
    def run() -> str:
        return run_or_fail(_sql(), own.transaction.connection.execute)

    yield _post_to(app.test_client().post)
    own.close()


@contextmanager
def flask_inside_wsgi(url: str) -> Iterator[Post]:
    """The app turns errors into a response with status 500, before the guard sees them."""
    with _sqlalchemy(url) as store:
        app = Flask(__name__)

        @app.post("/run")
        def run() -> str:
            return _run_in_session(own.transaction)

        with _wsgi(app, store) as own:
            yield _post_to(Client(own).post)


@contextmanager
def plain_wsgi(url: str) -> Iterator[Post]:
    with _sqlalchemy(url) as store:

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
            sql = environ["wsgi.input"].read().decode()
            body = run_or_fail(sql, lambda sql: own.transaction.execute(text(sql)))
            start_response("200 OK", [])
            return [body.encode()]

        with _wsgi(app, store) as own:
            client = Client(own)

            def post(sql: str) -> tuple[int, Any]:
                try:
                    response = client.post("/run", data=sql, headers=new_key())
                except Exception as error:  # noqa: BLE001 - as a server would
                    return 500, str(error)
                return response.status_code, response.get_json(silent=True)

            yield post


@contextmanager
def django(url: str) -> Iterator[Post]:
    alias = add_django_database(url)
    connections.databases[alias]["CONN_MAX_AGE"] = None

    def view(received: HttpRequest) -> HttpResponse:
        def run(sql: str) -> None:
            with connections[alias].cursor() as cursor:
                cursor.execute(sql)

        return HttpResponse(run_or_fail(received.body.decode(), run))

    with override_settings(ONCEWARD={"USING": alias, "STATEMENT_SECONDS": 1}):
        guarded = guard("run", principal=lambda _request: Principal("ada", "ada"))(view)

        def post(sql: str) -> tuple[int, Any]:
            made = RequestFactory().post("/run", sql, content_type="text/plain", headers=new_key())
            try:
                response = guarded(made)
            except Exception as error:  # noqa: BLE001 - as Django does
                return 500, str(error)
            found = response.status_code, response.content
            return found if found[0] == 200 else (found[0], _json(response))

        yield post
    connections[alias].close()
    del connections[alias], connections.databases[alias]


APPS = [flask_on_sqlalchemy, flask_on_psycopg, flask_inside_wsgi, plain_wsgi, django]


@pytest.mark.parametrize("app", APPS)
def test_statement_of_a_handler_that_fails_in_an_outage_ends_in_503(
    app: Callable[[str], Any], postgres_url: str
) -> None:
    with app(postgres_url) as post:
        assert post("CREATE TABLE orders (item text)")[0] == 200
        status, body = post(SLEEP)
        assert (status, body and body["details"]) == (503, {"reason": "unreachable"})
        # What is no outage of this database stays an error of the handler.
        assert post(WRONG)[0] == 500
        assert post(ELSEWHERE)[0] == 500
        assert post(WRITE)[0] == 200


@pytest.mark.parametrize("app", [flask_on_sqlalchemy, plain_wsgi, django])
def test_connection_to_a_read_only_server_is_replaced(
    app: Callable[[str], Any], postgres_url: str
) -> None:
    with app(postgres_url) as post:
        assert post("CREATE TABLE orders (item text)")[0] == 200
        assert post(DEMOTED)[0] == 200
        status, body = post(WRITE)
        assert (status, body and body["details"]) == (503, {"reason": "unreachable"})
        # The setting was that of the connection: another one is used.
        assert post(WRITE)[0] == 200


def test_record_that_a_read_only_server_refuses_is_an_outage(postgres_url: str) -> None:
    with django(postgres_url) as post:
        assert post(DEMOTED)[0] == 200
        status, body = post("SELECT 1")  # the view only reads
        assert (status, body and body["details"]) == (503, {"reason": "unreachable"})
        assert post("SELECT 1")[0] == 200


@pytest.mark.parametrize("seconds", [0, -1, "5", None])
def test_limit_of_django_s_settings_must_be_a_positive_number(seconds: object) -> None:
    with (
        override_settings(ONCEWARD={"COMMIT_SECONDS": seconds}),
        pytest.raises(ConfigurationError, match=r"settings\.ONCEWARD: commit_seconds=.*positive"),
    ):
        django_onceward()


def test_limits_of_django_s_settings_are_those_of_the_store() -> None:
    given = {"CLAIM_SECONDS": 1, "STATEMENT_SECONDS": 2.5, "COMMIT_SECONDS": 3}
    with override_settings(ONCEWARD=given):
        limits = django_onceward().store.limits
    assert (limits.claim_seconds, limits.statement_seconds, limits.commit_seconds) == (1, 2.5, 3)


# -- apps ---------------------------------------------------------------------------------------


@contextmanager
def _sqlalchemy(url: str) -> Iterator[SqlAlchemySyncStore]:
    engine = create_engine(url.replace("postgresql", "postgresql+psycopg", 1), pool_size=2)
    yield SqlAlchemySyncStore(engine, statement_seconds=1)
    engine.dispose()


@contextmanager
def _wsgi(app: Any, store: Any) -> Iterator[WsgiGuard]:
    onceward = Onceward(store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None))
    onceward.guard_path("POST", "/run")
    guarded = WsgiGuard(app, onceward)
    yield guarded
    guarded.close()


def _sql() -> str:
    return str(request.get_data(as_text=True))


def _run_in_session(session: Session) -> str:
    return run_or_fail(_sql(), lambda sql: session.execute(text(sql)))


def _post_to(send: Callable[..., Any]) -> Post:
    def post(sql: str) -> tuple[int, Any]:
        response = send("/run", data=sql, headers=new_key())
        return response.status_code, response.get_json(silent=True)

    return post


def _json(response: HttpResponse) -> Any:
    return json.loads(response.content)
