"""``WsgiGuard``: any WSGI app, guarded by method and path."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client
from werkzeug.wrappers import Request
from werkzeug.wsgi import wrap_file

from onceward import SINGLE_TENANT, Onceward, Policy, Principal, ServiceError
from onceward.errors import NotAuthenticatedError
from onceward.server.rate_limits import LimitsRateLimiter
from onceward.server.request_head import RequestHead
from onceward.server.wsgi import WsgiGuard

KEY = {"Idempotency-Key": "key-1"}


async def by_token(head: RequestHead) -> Principal:
    if head.authorization is None:
        raise NotAuthenticatedError("no token")
    return Principal(head.authorization, head.authorization)


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[WsgiGuard]:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/shop.db",
        identify=by_token,
        policy=Policy(key_required=False),
        sweep_every_seconds=None,
    )
    onceward.guard_path("POST", "/orders/{name}")

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        request = Request(environ)
        if request.path.endswith("refuse"):
            raise ServiceError(409, "order.closed", "closed")
        if request.method == "POST":
            tx = wrapped.transaction
            tx.execute("CREATE TABLE IF NOT EXISTS orders (item BLOB)")
            values = {"item": request.get_data()}
            tx.execute("INSERT INTO orders VALUES (:item)", values)
        cookies = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]
        start_response("201 CREATED", [("Content-Type", "text/plain"), *cookies])
        return [b"made ", request.get_data()]

    wrapped = WsgiGuard(app, onceward)
    yield wrapped
    wrapped.close()


def test_request_is_run_once_and_replayed(guard: WsgiGuard) -> None:
    client = Client(guard)
    signed_in = KEY | {"Authorization": "ann"}
    first = client.post("/orders/a", data=b"boots", headers=signed_in)
    assert (first.status_code, first.data) == (201, b"made boots")
    assert first.headers.getlist("Set-Cookie") == ["a=1", "b=2"]
    again = client.post("/orders/a", data=b"boots", headers=signed_in)
    assert (again.data, again.headers["Idempotency-Replayed"]) == (b"made boots", "true")
    assert client.post("/orders/a", data=b"shoes", headers=signed_in).status_code == 409
    assert client.post("/orders/a", data=b"boots", headers=KEY).status_code == 401
    other = client.post("/orders/a", data=b"boots", headers=KEY | {"Authorization": "bob"})
    assert "Idempotency-Replayed" not in other.headers


def test_error_raised_by_the_app_is_rendered(guard: WsgiGuard) -> None:
    refused = Client(guard).post("/orders/refuse", headers=KEY | {"Authorization": "ann"})
    assert (refused.status_code, refused.json["code"]) == (409, "order.closed")  # type: ignore[index]


@pytest.mark.parametrize("key", ["", " ", "a,b", ","])
def test_empty_or_ambiguous_key_is_refused_where_keys_are_optional(
    guard: WsgiGuard, key: str
) -> None:
    headers = {"Authorization": "ann", "Idempotency-Key": key}
    refused = Client(guard).post("/orders/a", headers=headers)
    assert refused.json["code"] == "idempotency.key_invalid"  # type: ignore[index]


def test_method_in_lower_case_is_guarded(guard: WsgiGuard) -> None:
    options: Any = {"data": b"boots", "headers": KEY | {"Authorization": "ann"}}
    method = {"REQUEST_METHOD": "post"}
    for replayed in (None, "true"):
        response = Client(guard).open("/orders/a", environ_overrides=method, **options)
        assert (response.status_code, response.data) == (201, b"made boots")
        assert response.headers.get("Idempotency-Replayed") == replayed


class Unreadable:
    """A file as a server sends it by itself: not readable by anyone else, as uWSGI's."""

    def __init__(self, file: Any) -> None:
        self.file = file


def test_file_is_read_where_the_server_would_send_it(tmp_path: Path) -> None:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/shop.db", tenants=SINGLE_TENANT, sweep_every_seconds=None
    )
    onceward.guard_path("POST", "/file")

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return wrap_file(environ, Path(__file__).open("rb"))

    guard = WsgiGuard(app, onceward)
    server = {"wsgi.file_wrapper": Unreadable}
    for _ in range(2):
        response = Client(guard).post("/file", headers=KEY, environ_overrides=server)
        assert (response.status_code, response.data) == (200, Path(__file__).read_bytes())
    assert response.headers["Idempotency-Replayed"] == "true"
    guard.close()


def test_other_operations_pass_through(guard: WsgiGuard) -> None:
    assert Client(guard).get("/orders/a").data == b"made "


def test_redirects_own_key_header_and_limits(tmp_path: Path) -> None:
    policy = Policy(key_header="X-Key", rate_limit="9/hour")
    onceward = Onceward(
        f"sqlite:///{tmp_path}/forms.db",
        tenants=SINGLE_TENANT,
        policy=policy,
        limiter=LimitsRateLimiter(),
        sweep_every_seconds=None,
    )
    onceward.guard_path("POST", "/forms")
    onceward.guard_path("POST", "/stored", policy=policy.replace(redirects_stored={303}))
    runs: list[str] = []

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        runs.append(environ["PATH_INFO"])
        start_response("303 See Other", [("Location", environ["HTTP_X_TO"])])
        return [b""]

    guard = WsgiGuard(app, onceward)
    try:
        client = Client(guard)
        for path, to, times in (
            ("/forms", "/done", 2),
            ("/stored", "/login/", 2),  # nothing was written, so it asks to sign in
            ("/stored", "/done", 1),
        ):
            runs.clear()
            for _ in range(2):
                response = client.post(path, headers={"X-Key": "k", "X-To": to})
                assert (response.status_code, response.headers["Location"]) == (303, to)
                assert response.headers["RateLimit-Policy"] == '"9-per-hour";q=9;w=3600'
            assert runs == [path] * times
        refused = client.post("/forms", headers={"X-Key": "one, two", "X-To": "/done"})
        assert refused.status_code == 400
    finally:
        guard.close()
