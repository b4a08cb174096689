"""Callers by API key, and by the sign-in of a FastAPI app."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Header
from fastapi.testclient import TestClient

from onceward import GuardConfig, Onceward, Principal
from onceward.errors import ConfigurationError, NotAuthenticatedError, UsageError
from onceward.fastapi import principal_from
from onceward.guard.request import RequestHead
from onceward.sign_in.identify import ApiKeyIdentify, hash_api_key

TILL = Principal(tenant="mill", actor="till-1")
KEY = "a-random-key"


def head(*headers: tuple[bytes, bytes]) -> RequestHead:
    return RequestHead("POST", "/orders", b"", headers)


async def result(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


async def find_later(digest: str) -> Principal | None:
    return TILL if digest == hash_api_key(KEY) else None


@pytest.mark.parametrize(
    "keys",
    [
        {hash_api_key("another"): Principal("farm", "bob"), hash_api_key(KEY): TILL},
        {hash_api_key(KEY): TILL}.get,
        find_later,
    ],
    ids=["mapping", "function", "coroutine"],
)
async def test_api_key_identifies_its_caller_and_nothing_else_does(keys: Any) -> None:
    identify = ApiKeyIdentify(keys)
    sent = (b"x-api-key", KEY.encode())
    assert await result(identify(head(sent))) is TILL
    assert await result(identify(head(sent, sent))) is TILL
    for refused in (
        [],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"wrong")],
        [(b"x-api-key", hash_api_key(KEY).encode())],  # who has read the hashes has no key
        [(b"x-api-key", b"x" * 5000)],
        [(b"x-api-key", b"\xff\x00")],
        [sent, (b"x-api-key", b"wrong")],
        [(b"authorization", KEY.encode())],
    ):
        with pytest.raises(NotAuthenticatedError, match="X-API-Key"):
            await result(identify(head(*refused)))
    bearer = ApiKeyIdentify(keys, header="Authorization")
    for value in (KEY, f"Bearer {KEY}", f"bearer  {KEY}"):
        assert await result(bearer(head((b"authorization", value.encode())))) is TILL


def test_wrong_api_keys_are_refused_at_start_and_wrong_callers_at_use() -> None:
    for wrong in ({KEY: TILL}, {hash_api_key(KEY): "mill"}, {b"a": TILL}):
        with pytest.raises(ConfigurationError, match=r"hash_api_key|Principal\("):
            ApiKeyIdentify(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a Principal"):
        ApiKeyIdentify(lambda _digest: "mill")(head((b"x-api-key", b"a")))  # type: ignore[arg-type, return-value]


def test_principal_of_a_fastapi_dependency_is_its_user(tmp_path: Path) -> None:
    users: dict[str, Any] = {
        "text": "ada",
        "number": 7,
        "object": SimpleNamespace(id=8, org="mill"),
        "none": None,
        "without id": SimpleNamespace(),
        "empty": "",
    }

    def current_user(x_user: Annotated[str, Header()]) -> Any:
        return users[x_user]

    principal = principal_from(current_user)
    member = principal_from(current_user, tenant=lambda user: user.org)
    app = FastAPI()
    url = f"sqlite:///{tmp_path}/shop.db"
    onceward = Onceward(url, principal=principal, config=GuardConfig(sweep_every_seconds=None))
    onceward.install(app)

    @app.post("/orders")
    @onceward.guard()
    def order(caller: Annotated[Principal, Depends(principal)]) -> list[str]:
        return [caller.tenant, caller.actor]

    @app.post("/stock")
    @onceward.guard(principal=member)
    def stock(caller: Annotated[Principal, Depends(member)]) -> list[str]:
        return [caller.tenant, caller.actor]

    with TestClient(app, raise_server_exceptions=False) as client:

        def send(path: str, user: str) -> tuple[int, Any]:
            response = client.post(path, headers={"Idempotency-Key": user, "X-User": user})
            is_json = response.headers["content-type"] == "application/json"
            return response.status_code, response.json() if is_json else None

        assert send("/orders", "text") == (200, ["ada", "ada"])
        assert send("/orders", "number") == (200, ["7", "7"])
        assert send("/orders", "object") == (200, ["8", "8"])
        assert send("/stock", "object") == (200, ["mill", "8"])
        assert send("/orders", "none")[0] == 401
        assert send("/orders", "without id")[0] == 500
        assert send("/orders", "empty")[0] == 500
