"""Bad input against ``onceward serve`` itself: never a 500, never an effect, always a code."""

import base64
import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import jwt
import pytest

from onceward.sign_in.jwt_auth import mint_token
from packages.services.tests.cli.conftest import Server

PATH = "/api/v1/routes"
SECRET = "a secret for tests, long enough for HS256"
UUID4 = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
WALK = json.dumps({"start": {"lat": 55.95, "lon": -3.19}, "minutes": 90}).encode()
NOW = datetime.now(UTC)
TOKEN = mint_token(SECRET, sub="ada", lifetime=timedelta(hours=1), now=NOW)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve"), ONCEWARD_JWT_SECRET=SECRET)
    yield server
    errors = server.stderr()
    server.close()
    assert "Traceback" not in errors


def ask(
    server: Server,
    *headers: tuple[str, bytes],
    body: bytes = WALK,
    token: str = TOKEN,
    content_type: bytes | None = b"application/json",
) -> tuple[int, dict[str, Any]]:
    """Send requests that no client library would send."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
    try:
        connection.putrequest("POST", PATH)
        connection.putheader("Authorization", f"Bearer {token}")
        connection.putheader("Content-Length", str(len(body)))
        if content_type is not None:
            connection.putheader("Content-Type", content_type)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was all read
            connection.send(body)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    is_ours = response.headers["content-type"] in ("application/json", "application/problem+json")
    return response.status, json.loads(content) if is_ours else {}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "request.invalid"),
        (WALK[:-1] + b',"minutes":5}', 400, "request.invalid"),
        (b" " * 10_000_000, 413, "request.too_large"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, 400, "request.invalid"),
        (WALK.replace(b"90", b'"\xff\xfe"'), 400, "request.invalid"),
        (WALK.replace(b"90", b"1" + b"0" * 5000), 400, "request.invalid"),
        (b"", 400, "request.invalid"),
        (b"null", 400, "request.invalid"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("keys", [(), (("Idempotency-Key", UUID4.encode()),)], ids=["bare", "key"])
def test_bodies(server: Server, body: bytes, status: int, code: str, keys: Any) -> None:
    response = ask(server, *keys, body=body)
    assert (response[0], response[1]["code"]) == (status, code)
    assert response[1]["requestId"]


@pytest.mark.parametrize("content_type", [None, b"", b"text/plain", b"\xff", b"application/json;x"])
def test_content_types(server: Server, content_type: bytes | None) -> None:
    status, body = ask(server, content_type=content_type)
    if content_type == b"application/json;x":
        assert status == 202
    else:
        assert (status, body["code"]) == (400, "request.invalid")


@pytest.mark.parametrize(
    "keys",
    [
        [b""],
        [b"a\x7fb"],
        [b"a\x01b"],
        [b"a\x00b"],
        [b"a\x1fb"],
        [b"\xc3\xa4"],
        [UUID4.encode(), UUID4.replace("7f", "8f").encode()],
        [f"{UUID4},{UUID4}".encode()],
        [UUID4.upper().encode()],
        [b"00000000-0000-0000-0000-000000000000"],
    ],
)
def test_keys(server: Server, keys: list[bytes]) -> None:
    status, body = ask(server, *(("Idempotency-Key", key) for key in keys))
    # A request that is not valid HTTP is refused by the HTTP server, with its own body.
    assert status == 400
    assert body.get("code", "idempotency.key_invalid") == "idempotency.key_invalid"


def encoded(claims: dict[str, Any], algorithm: str = "HS256", secret: str = SECRET) -> str:
    return jwt.encode(claims, secret * 2 if algorithm == "HS512" else secret, algorithm=algorithm)


def unsigned() -> str:
    parts = ({"alg": "none", "typ": "JWT"}, {"sub": "ada", "exp": NOW.timestamp() + 3600})
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts
    )


END = int(NOW.timestamp()) + 3600


@pytest.mark.parametrize(
    "token",
    [
        "",
        "a.b.c",
        "x" * 20_000,
        encoded({"sub": "ada", "exp": END - 7200}),
        encoded({"sub": "ada", "exp": END}, "HS512"),
        encoded({"sub": "ada", "exp": END}, secret=SECRET + "!"),
        encoded({"exp": END}),
        encoded({"sub": "", "exp": END}),
        encoded({"sub": "ada"}),
        f"{unsigned()}.",
        unsigned(),
        TOKEN[:-2],
        f"{TOKEN} {TOKEN}",
    ],
    ids=range(13),
)
def test_tokens(server: Server, token: str) -> None:
    status, body = ask(server, ("Idempotency-Key", UUID4.encode()), token=token)
    assert (status, body["code"]) == (401, "auth.required")


def test_refused_requests_leave_the_key_free(server: Server) -> None:
    """Run after the tests above: the key that they all used is still free."""
    status, body = ask(server, ("Idempotency-Key", UUID4.encode()))
    assert (status, body["status"]) == (202, "accepted")
