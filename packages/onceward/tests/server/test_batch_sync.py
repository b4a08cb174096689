"""Batches of Flask and Django apps: what ``GuardBatchContract`` does not have."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.onceward.tests.support import django_project  # first: it configures Django

assert django_project

from django.contrib.auth.models import Group, Permission, User  # noqa: E402
from django.db import connections  # noqa: E402
from django.test import Client as DjangoClient  # noqa: E402
from django.test import override_settings  # noqa: E402
from flask import Flask  # noqa: E402
from flask.views import MethodView  # noqa: E402
from werkzeug.middleware.dispatcher import DispatcherMiddleware  # noqa: E402
from werkzeug.test import Client  # noqa: E402

from onceward import Onceward, Principal  # noqa: E402
from onceward.batch.options import BatchOptions  # noqa: E402
from onceward.errors import ConfigurationError, NotAuthenticatedError  # noqa: E402
from onceward.flask import FlaskGuard  # noqa: E402
from onceward.frameworks.django import django_onceward  # noqa: E402
from packages.onceward.tests.support.harness import by_header  # noqa: E402

LOCAL = str(uuid.uuid4())


def item(key: str, **fields: Any) -> dict[str, Any]:
    return {"method": "POST", "path": "/things/a", "key": key, "body": {}, **fields}


def flask_app(onceward: Any, batch: str | BatchOptions) -> tuple[Flask, FlaskGuard]:
    app = Flask(__name__)
    guard = FlaskGuard(onceward, app, batch=batch)

    class Things(MethodView):
        @guard("things.create")
        def post(self, name: str) -> Any:
            return {"name": name}, 201

        def put(self, name: str) -> str:
            raise AssertionError(name)

    app.add_url_rule("/things/<name>", view_func=Things.as_view("things"))
    return app, guard


def statuses(app: Any, path: str, items: list[dict[str, Any]]) -> list[int]:
    response = Client(app).post(path, json={"items": items})
    assert response.status_code == 200, response.data
    return [result["status"] for result in json.loads(response.data)["results"]]


def test_item_for_a_method_of_a_view_that_is_not_guarded_is_refused(tmp_path: Path) -> None:
    onceward: Any = Onceward(f"sqlite:///{tmp_path}/lab.db", identify=by_header)
    app, guard = flask_app(onceward, "/batch")
    assert statuses(app, "/batch", [item("k0", method="PUT"), item("k0")]) == [400, 201]
    guard.close()


def test_batch_of_an_app_below_a_prefix(tmp_path: Path) -> None:
    onceward: Any = Onceward(f"sqlite:///{tmp_path}/lab.db", identify=by_header)
    app, guard = flask_app(onceward, BatchOptions("/sync", max_items=9))
    mounted = DispatcherMiddleware(app, {"/v1": app})
    paths = ("/v1/things/a", "/things/a", "/v1/sync")
    items = [item(f"k{number}", path=path) for number, path in enumerate(paths)]
    assert statuses(mounted, "/v1/sync", items) == [201, 400, 400]
    alone = Client(mounted).post("/v1/things/a", json={}, headers={"Idempotency-Key": "k0"})
    assert alone.headers["Idempotency-Replayed"] == "true"
    assert alone.headers["Onceward-Batch"] == "/v1/sync; items=9"
    guard.close()


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
        order(f"{unique}-0", local_id=LOCAL),
        order(f"{unique}-1", f"/rest/orders/{{local:{LOCAL}}}/pay/"),
        order(f"{unique}-4", "/rest/function", body={"item": "boots"}),
        *(order(f"{unique}-5", path) for path in ("/whole-class", "/on-dispatch", "/function")),
    ]
    first = send(client, batch)
    assert [result["status"] for result in first] == [201, 200, 201, 201, 201, 201]
    assert first[1]["body"]["paid"] == f"{unique}-0"
    assert Group.objects.count() == 6
    assert all(result["replayed"] for result in send(client, batch))
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
    assert send(client, [order("h2", "/by-method", method="PUT")])[0]["status"] == 400
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
    app, guard = flask_app(onceward, "/batch")
    assert statuses(app, "/batch", [item("k0")]) == [401]
    guard.close()
