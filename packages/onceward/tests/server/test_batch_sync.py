"""Batches of Flask, Django and WSGI apps: items run one by one, through the whole app."""

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.onceward.tests.support import django_project  # first: it configures Django

assert django_project

from django.contrib.auth.models import Group, Permission, User  # noqa: E402
from django.db import connections  # noqa: E402
from django.test import Client as DjangoClient  # noqa: E402
from django.test import override_settings  # noqa: E402
from flask import Flask, g, jsonify, request  # noqa: E402
from flask.views import MethodView  # noqa: E402
from sqlalchemy import create_engine, text  # noqa: E402
from werkzeug.middleware.dispatcher import DispatcherMiddleware  # noqa: E402
from werkzeug.test import Client  # noqa: E402
from werkzeug.wrappers import Request  # noqa: E402

from onceward import Onceward, Policy, Principal  # noqa: E402
from onceward.errors import ConfigurationError, NotAuthenticatedError  # noqa: E402
from onceward.flask import FlaskGuard  # noqa: E402
from onceward.server.batch_options import BatchOptions  # noqa: E402
from onceward.server.django_views import django_onceward  # noqa: E402
from onceward.server.rate_limits import LimitsRateLimiter  # noqa: E402
from onceward.server.wsgi import WsgiGuard  # noqa: E402
from onceward.stores.sqlalchemy_sync import SqlAlchemySyncStore  # noqa: E402
from packages.onceward.tests.support.harness import by_header  # noqa: E402

LOCAL = str(uuid.uuid4())
CREATE = "CREATE TABLE IF NOT EXISTS things (id TEXT, name TEXT, parent TEXT)"


def item(key: str, do: str = "", **fields: Any) -> dict[str, Any]:
    body = {"name": key, "do": do}
    return {"method": "POST", "path": "/things", "key": key, "body": body, **fields}


class App:
    """A Flask app, or a plain WSGI app, with the same operation."""

    def __init__(self, wsgi: Any, path: str = "/batch", prefix: str = "") -> None:
        self.wsgi = wsgi
        self.client = Client(wsgi)
        self.path = path
        self.prefix = prefix
        self.runs: list[str] = []

    def post(self, items: Any, **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        content = json.dumps({"items": items})
        return self.client.post(
            self.path, data=content, content_type="application/json", headers=names
        )

    def results(self, items: Any, **headers: str) -> list[dict[str, Any]]:
        response = self.post(items, **headers)
        assert response.status_code == 200, response.data
        found: list[dict[str, Any]] = json.loads(response.data)["results"]
        return found

    def statuses(self, items: Any, **headers: str) -> list[int]:
        return [result["status"] for result in self.results(items, **headers)]

    def single(self, one: dict[str, Any]) -> Any:
        return self.client.open(
            one["path"],
            method=one["method"],
            json=one["body"],
            headers={"Idempotency-Key": one["key"]},
        )


def run(app: App, transaction: Any, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    app.runs.append(body["name"])
    if "raise" in body.get("do", ""):
        raise ZeroDivisionError
    new = str(uuid.uuid4())
    values = {"id": new, "name": body["name"], "parent": body.get("parent")}
    for statement in (CREATE, "INSERT INTO things VALUES (:id, :name, :parent)"):
        given = values if "INSERT" in statement else {}
        if hasattr(transaction, "flush"):  # a session of SQLAlchemy
            transaction.execute(text(statement), given)
        else:
            transaction.execute(statement, given)
    status = next((int(word) for word in body.get("do", "").split() if word.isdigit()), 201)
    return {"id": new, "version": 1, "parent": body.get("parent")}, status


def flask_app(onceward: Any, **options: Any) -> App:
    flask = Flask(__name__)
    guard = FlaskGuard(onceward, flask, **options)
    app = App(flask)

    @flask.before_request
    def sign_in() -> Any:
        g.user = request.headers.get("X-Tenant", "ada")
        return ("sign in", 401) if g.user == "not-signed-in" else None

    @flask.post("/things")
    @guard("things.create")
    def things() -> Any:
        body, status = run(app, guard.transaction, request.get_json())
        return jsonify(body), status, {"ETag": '"1"'}

    @flask.post("/open")
    def not_guarded() -> str:
        app.runs.append("open")
        return ""

    class Half(MethodView):
        @guard("half")
        def post(self, thing: str) -> Any:
            return {"thing": thing, "match": request.headers.get("If-Match")}

        def put(self, thing: str) -> str:
            app.runs.append("open")
            return thing

    flask.add_url_rule("/half/<thing>", view_func=Half.as_view("half"))
    flask.teardown_appcontext(lambda _: None)
    app.close = guard.close  # type: ignore[attr-defined]
    return app


def wsgi_app(onceward: Any) -> App:
    def plain(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        sent = Request(environ)
        if sent.path.startswith("/half"):
            fields: Any = {"thing": sent.path[6:], "match": sent.headers.get("If-Match")}
            status = 200
        elif sent.path == "/things":
            fields, status = run(app, guard.transaction, json.loads(sent.get_data()))
        else:
            app.runs.append("open")
            fields, status = {}, 200
        headers = [("Content-Type", "application/json"), ("ETag", '"1"')]
        start_response(f"{status} X", headers)
        return [json.dumps(fields).encode()]

    onceward.guard_path("POST", "/things", endpoint="things.create")
    onceward.guard_path("POST", "/half/{thing}", endpoint="half")
    guard = WsgiGuard(plain, onceward, batch="/batch")
    app = App(guard)
    app.close = guard.close  # type: ignore[attr-defined]
    return app


@pytest.fixture(params=["flask", "flask, SQLAlchemy", "wsgi"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = f"sqlite:///{tmp_path}/lab.db"
    limiter = LimitsRateLimiter()
    policy = Policy(rate_limit="100/hour")
    engine = create_engine(url)
    store: Any = SqlAlchemySyncStore(engine) if "SQLAlchemy" in request.param else url
    options: dict[str, Any] = {"sweep_every_seconds": None, "limiter": limiter, "policy": policy}
    if request.param == "wsgi":
        made = wsgi_app(Onceward(store, identify=by_header, **options))
    else:
        made = flask_app(
            Onceward(store, **options),
            batch="/batch",
            principal=lambda: Principal(g.user, g.user),
        )
    yield made
    made.close()  # type: ignore[attr-defined]
    engine.dispose()


def test_items_and_single_requests_replay_each_other(app: App) -> None:
    alone = app.single(item("k1"))
    assert alone.headers["Onceward-Batch"] == "/batch; items=200"
    batch = [item("k0"), item("k1"), item("k2", "422"), item("k0"), item("k1", "other")]
    first = app.results(batch)
    assert [result["status"] for result in first] == [201, 201, 422, 201, 409]
    assert [result["replayed"] for result in first] == [False, True, False, True, False]
    assert first[1]["body"] == json.loads(alone.data)
    assert first[0]["headers"]["etag"] == '"1"'
    assert "onceward-batch" not in first[0]["headers"]
    assert first[0]["headers"]["ratelimit"]
    again = app.results(batch[:3])
    assert [result["replayed"] for result in again] == [True] * 3
    assert [result["body"] for result in again] == [result["body"] for result in first[:3]]
    assert app.runs == ["k1", "k0", "k2"]
    bob = app.results(batch[:2], X_Tenant="bob")
    assert [result["replayed"] for result in bob] == [False, False]


def test_lanes_failures_and_placeholders(app: App) -> None:
    child = {"name": "child", "parent": f"{{local:{LOCAL}}}"}
    edit: dict[str, Any] = {
        "path": f"/half/{{local:{LOCAL}}}",
        "headers": {"If-Match": f"{{version:{LOCAL}}}"},
    }
    results = app.results(
        [
            item("k0", local_id=LOCAL, lane="a"),
            item("k1", body=child),
            item("k2", **edit),
            item("k3", "raise", lane="a"),
            item("k4", lane="a"),
            item("k5"),
        ]
    )
    assert [result["status"] for result in results] == [201, 201, 200, 500, 424, 201]
    new = results[0]["body"]["id"]
    assert results[1]["body"]["parent"] == new
    assert results[2]["body"] == {"thing": new, "match": '"1"'}
    assert app.statuses([item("k4", lane="a")]) == [201]


def test_items_that_are_not_guarded_are_refused(app: App) -> None:
    hostile: list[dict[str, Any]] = [
        {"path": "/open"},
        {"path": "/batch"},
        {"path": "/%62atch"},
        {"path": "/nowhere"},
        {"path": "/half/x", "method": "PUT"},
        {"path": "/things", "method": "GET"},
        {"path": "/things/../open"},
        {"path": "http://evil.example/things"},
        {"headers": {"X-Tenant": "bob"}},
        {"headers": {"If-Match": "x\r\nX-Tenant: bob"}},
    ]
    batch = [{**item(f"h{at}"), **wrong} for at, wrong in enumerate(hostile)]
    assert app.statuses([*batch, item("k0")]) == [400] * len(hostile) + [201]
    assert app.runs == ["k0"]


def test_malformed_batch_and_sign_in(app: App) -> None:
    assert app.post([item(f"k{at}") for at in range(201)]).status_code == 413
    assert app.client.post("/batch", json=[]).status_code == 400
    assert app.client.post("/batch", data=b'{"items": []}').status_code == 400
    large = app.client.post("/batch", json={"items": ["x" * 2**20]})
    assert (large.status_code, json.loads(large.data)["code"]) == (413, "batch.too_large")
    refused = app.post([item("k0"), item("k1")], X_Tenant="not-signed-in")
    if refused.status_code == 200:  # Flask: the app signs each item in
        assert [result["status"] for result in json.loads(refused.data)["results"]] == [401] * 2
    else:
        assert refused.status_code == 401
    assert app.client.get("/batch").status_code in (200, 404)
    assert "k0" not in app.runs


def test_batch_of_an_app_below_a_prefix(tmp_path: Path) -> None:
    onceward: Any = Onceward(f"sqlite:///{tmp_path}/lab.db", identify=by_header)
    app = flask_app(onceward, batch=BatchOptions("/sync", max_items=9))
    mounted = App(DispatcherMiddleware(app.wsgi, {"/v1": app.wsgi}), path="/v1/sync")
    batch = [item("k0", path="/v1/things"), item("k1", path="/things"), item("k2", path="/v1/sync")]
    assert mounted.statuses(batch) == [201, 400, 400]
    alone = mounted.single(batch[0])
    assert alone.headers["Idempotency-Replayed"] == "true"
    assert alone.headers["Onceward-Batch"] == "/v1/sync; items=9"
    app.close()  # type: ignore[attr-defined]


def test_batch_option_of_another_type_is_refused(tmp_path: Path) -> None:
    onceward: Any = Onceward(f"sqlite:///{tmp_path}/lab.db", identify=by_header)
    with pytest.raises(ConfigurationError, match="batch"):
        FlaskGuard(onceward, Flask(__name__), batch=True)  # type: ignore[arg-type]


# -- Django ------------------------------------------------------------------------------------


@pytest.fixture
def client() -> Iterator[DjangoClient]:
    Group.objects.all().delete()
    User.objects.all().delete()
    user = User.objects.create_user("ada")
    user.user_permissions.add(Permission.objects.get(codename="add_group"))
    signed_in = DjangoClient(raise_request_exception=False)
    signed_in.force_login(user)
    yield signed_in
    django_onceward().bridge.close()
    connections.close_all()


def order(key: str, path: str = "/rest/orders/", **fields: Any) -> dict[str, Any]:
    return {"method": "POST", "path": path, "key": key, "body": {"name": key}, **fields}


def send(client: DjangoClient, items: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/batch", {"items": items}, content_type="application/json")
    assert response.status_code == 200, response.content
    found: list[dict[str, Any]] = response.json()["results"]
    return found


def test_batch_of_a_django_project(client: DjangoClient) -> None:
    unique = uuid.uuid4().hex
    batch = [
        order(f"{unique}-0", local_id=LOCAL, lane="a"),
        order(f"{unique}-1", f"/rest/orders/{{local:{LOCAL}}}/pay/"),
        order(f"{unique}-0", local_id=LOCAL),
        order(f"{unique}-2", "/function/crash", lane="a"),
        order(f"{unique}-3", lane="a"),
        order(f"{unique}-4", "/rest/function", body={"item": "boots"}),
        *(order(f"{unique}-5", path) for path in ("/whole-class", "/on-dispatch", "/function")),
    ]
    first = send(client, batch)
    assert [result["status"] for result in first] == [201, 200, 201, 500, 424, 201, 201, 201, 201]
    assert [result["replayed"] for result in first[:3]] == [False, False, True]
    assert first[1]["body"]["paid"] == f"{unique}-0"
    # The first one, what pay() and the other views have written; nothing of the crash.
    assert Group.objects.count() == 6
    again = send(client, batch[:3])
    assert [result["replayed"] for result in again] == [True] * 3
    alone = client.post(
        "/rest/orders/",
        {"name": f"{unique}-0"},
        content_type="application/json",
        headers={"Idempotency-Key": f"{unique}-0"},
    )
    assert alone.headers["Idempotency-Replayed"] == "true"
    assert alone.headers["Onceward-Batch"] == "/v1/batch; items=200"


def test_django_items_have_their_own_transactions_with_atomic_requests(
    client: DjangoClient,
) -> None:
    unique = uuid.uuid4().hex
    connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        batch = [order(f"{unique}-{at}", "/function") for at in range(2)]
        results = send(client, [*batch, order(f"{unique}-2", "/function/crash")])
    finally:
        connections["default"].settings_dict["ATOMIC_REQUESTS"] = False
    assert [result["status"] for result in results] == [201, 201, 500]
    assert Group.objects.count() == 2


def test_django_items_are_guarded_signed_in_and_checked_for_csrf(client: DjangoClient) -> None:
    unique = uuid.uuid4().hex
    hostile = [
        order("h0", "/open"),
        order("h1", "/v1/batch"),
        order("h2", "/by-method", method="PUT"),
        order("h3", "/nowhere"),
        order("h4", headers={"Cookie": "sessionid=another"}),
        order("h5", "/function", method="GET"),
    ]
    assert [result["status"] for result in send(client, hostile)] == [400] * 6
    assert Group.objects.count() == 0
    one = order(unique)
    assert send(client, [one])[0]["status"] == 201
    assert send(DjangoClient(), [one])[0]["status"] == 403
    assert not send(DjangoClient(), [one])[0]["replayed"]
    checked = DjangoClient(enforce_csrf_checks=True)
    checked.cookies = client.cookies
    # The view "public" is exempt, "upload" is not.
    statuses = [
        result["status"]
        for result in send(checked, [order(f"{unique}-p", "/public"), order("u", "/upload")])
    ]
    assert statuses == [201, 403]
    # Django's test client says that it is not to be checked, which counts for items.
    assert send(client, [order("u", "/upload")])[0]["status"] != 403
    assert client.get("/v1/batch").status_code == 405
    with override_settings(ONCEWARD={"BATCH": BatchOptions(max_items=1)}):
        more = client.post("/v1/batch", {"items": [one, one]}, content_type="application/json")
        assert (more.status_code, more.json()["code"]) == (413, "batch.too_large")


def test_flask_app_without_a_caller_is_refused(tmp_path: Path) -> None:
    def nobody(_head: Any) -> Principal:
        raise NotAuthenticatedError("sign in first")

    onceward: Any = Onceward(f"sqlite:///{tmp_path}/lab.db", identify=nobody)
    app = flask_app(onceward, batch="/batch")
    assert app.statuses([item("k0")]) == [401]
    app.close()  # type: ignore[attr-defined]
