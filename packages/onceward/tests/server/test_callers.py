"""An app says who its callers are, or does not start; callers never share a tenant by accident."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from onceward import SINGLE_TENANT, GuardConfig, Onceward, OncewardError, Principal
from onceward.errors import ConfigurationError, PrincipalInvalidError
from onceward.frameworks.wsgi import WsgiGuard
from onceward.tenants import ALL_TENANTS

NO_CHOICE = r"nothing says who the caller is.*identify=….*tenants=SINGLE_TENANT"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


async def create(_request: Any = None) -> Any:
    return JSONResponse({"done": True})


def of_ada() -> Principal:
    return Principal(tenant="ada", actor="ada")


def fastapi_app(onceward: Onceward) -> Any:
    app = FastAPI()
    onceward.install(app)
    app.post("/orders")(onceward.guard()(create))
    return app


def starlette_app(onceward: Onceward) -> Any:
    app = Starlette(routes=[Route("/orders", onceward.guard()(create), methods=["POST"])])
    onceward.install(app)
    return app


def asgi_app(onceward: Onceward) -> Any:
    onceward.guard_path("POST", "/orders")
    return onceward.wrap(Starlette(routes=[Route("/orders", create, methods=["POST"])]))


def test_config_none_is_the_default_like_policy_none(url: str) -> None:
    onceward = Onceward(url, tenants=SINGLE_TENANT, policy=None, config=None)
    assert onceward.runtime.config == GuardConfig()


@pytest.mark.parametrize("make", [fastapi_app, starlette_app, asgi_app])
def test_app_that_does_not_say_who_calls_refuses_to_start(url: str, make: Any) -> None:
    app = make(Onceward(url, config=GuardConfig(sweep_every_seconds=None)))
    with pytest.raises(ConfigurationError, match=f"POST /orders .*{NO_CHOICE}"), TestClient(app):
        raise AssertionError("the app has started")
    with pytest.raises(ConfigurationError, match=NO_CHOICE):  # without a lifespan, too
        TestClient(app).post("/orders", headers={"Idempotency-Key": "a"})
    chosen = make(
        Onceward(url, config=GuardConfig(sweep_every_seconds=None), identify=lambda _head: of_ada())
    )
    with TestClient(chosen) as client:
        assert client.post("/orders", headers={"Idempotency-Key": "a"}).status_code == 200


def test_wsgi_app_that_does_not_say_who_calls_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=NO_CHOICE):
        WsgiGuard(lambda _environ, _start: [], Onceward(url))


def test_guards_with_their_own_principal_and_apps_without_guards_need_no_choice(url: str) -> None:
    onceward = Onceward(url, config=GuardConfig(sweep_every_seconds=None))
    app = FastAPI()
    onceward.install(app)
    with TestClient(app):
        pass
    app.post("/orders")(onceward.guard(principal=of_ada)(create))
    with TestClient(app) as client:
        assert client.post("/orders", headers={"Idempotency-Key": "a"}).status_code == 200


def test_tenants_takes_only_single_tenant(url: str) -> None:
    for wrong in (ALL_TENANTS, "", "single"):
        with pytest.raises(ConfigurationError, match="must be SINGLE_TENANT"):
            Onceward(url, tenants=wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", ["", " ", None, 7])
def test_principal_without_tenant_or_actor_is_refused(wrong: Any) -> None:
    for tenant, actor, name in ((wrong, "ada", "tenant"), ("ada", wrong, "actor")):
        with pytest.raises(PrincipalInvalidError, match=f"the {name} of a Principal") as caught:
            Principal(tenant=tenant, actor=actor)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, OncewardError)


def test_hash_of_a_stored_request_is_only_for_its_own_tenant(url: str) -> None:
    details = []
    for options in ({"tenants": SINGLE_TENANT}, {"identify": lambda _head: of_ada()}):
        app = fastapi_app(Onceward(url, config=GuardConfig(sweep_every_seconds=None), **options))
        with TestClient(app) as client:
            for body in ({"pin": 1}, {"pin": 2}):
                response = client.post("/orders", json=body, headers={"Idempotency-Key": "a"})
        assert response.status_code == 409
        details.append(set(response.json()["details"]))
    assert details == [{"receivedHash"}, {"expectedHash", "receivedHash"}]
