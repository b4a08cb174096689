"""``WsgiGuard``: what differs from other fronts. The rest is in ``GuardContract``."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client
from werkzeug.wsgi import wrap_file

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy
from onceward.frameworks.wsgi import WsgiGuard

KEY = {"Idempotency-Key": "key-1"}


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[WsgiGuard]:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/shop.db",
        tenants=SINGLE_TENANT,
        policy=Policy(key_required=False),
        config=GuardConfig(sweep_every_seconds=None),
    )
    onceward.guard_path("POST", "/file")

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return wrap_file(environ, Path(__file__).open("rb"))

    wrapped = WsgiGuard(app, onceward)
    yield wrapped
    wrapped.close()


@pytest.mark.parametrize("key", ["a,b", ","])
def test_keys_joined_with_a_comma_are_refused(guard: WsgiGuard, key: str) -> None:
    refused = Client(guard).post("/file", headers={"Idempotency-Key": key})
    assert refused.json["code"] == "idempotency.key_invalid"  # type: ignore[index]


class Unreadable:
    """A file as a server sends it by itself: not readable by anyone else, as uWSGI's."""

    def __init__(self, file: Any) -> None:
        self.file = file


@pytest.mark.parametrize("method", ["POST", "post"])
def test_file_is_read_where_the_server_would_send_it(guard: WsgiGuard, method: str) -> None:
    server = {"wsgi.file_wrapper": Unreadable, "REQUEST_METHOD": method}
    for replayed in (None, "true"):
        response = Client(guard).open("/file", headers=KEY, environ_overrides=server)
        assert (response.status_code, response.data) == (200, Path(__file__).read_bytes())
        assert response.headers.get("Idempotency-Replayed") == replayed
