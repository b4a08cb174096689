"""Public keys from a file or a server: rotation, withdrawal, defects, outages."""

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from onceward.errors import NotAuthenticatedError, StoreUnavailableError
from onceward.guard.request import Principal
from onceward.sign_in import jwt_keys
from onceward.sign_in.jwt_keys import MAX_BYTES, download
from packages.onceward.tests.server.jwt_harness import (
    HOUR,
    NOW,
    SECRET,
    HeldClock,
    Signer,
    ask,
    ask_async,
    b64,
    by_jwks,
    claims_of,
    jwks,
    token_of,
)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


def replace(path: Path, content: bytes) -> None:
    """Write the file with an mtime that differs on coarse file systems too."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(content)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


ALGORITHMS = pytest.mark.parametrize("algorithm", ["RS256", "ES256"])


@ALGORITHMS
def test_keys_of_a_file_verify_tokens(algorithm, tmp_path, clock):
    one, two, stranger = (Signer(algorithm, kid) for kid in ("one", "two", "one"))
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(one.jwk(), two.jwk()))
    identify = by_jwks(jwks_file=path, algorithm=algorithm, clock=clock)
    assert ask(identify, one.token()).actor == "ana"
    assert ask(identify, two.token(sub="bo")).actor == "bo"
    with pytest.raises(NotAuthenticatedError, match="signature is invalid"):
        ask(identify, stranger.token())
    with pytest.raises(NotAuthenticatedError, match="an unknown key"):
        ask(identify, Signer(algorithm, "three").token())


@ALGORITHMS
def test_a_token_without_a_key_id_may_be_signed_by_any_of_the_keys(algorithm, tmp_path, clock):
    path = tmp_path / "keys.json"
    nameless = Signer(algorithm, None)
    path.write_bytes(jwks(Signer(algorithm, "other").jwk(), nameless.jwk()))
    identify = by_jwks(jwks_file=path, algorithm=algorithm, clock=clock)
    assert ask(identify, nameless.token()).actor == "ana"
    with pytest.raises(NotAuthenticatedError, match="signature is invalid"):
        ask(identify, Signer(algorithm, None).token())


def test_a_token_signed_with_the_public_key_as_a_secret_is_refused(tmp_path, clock):
    signer = Signer("RS256", "one")
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(signer.jwk(), {"kty": "oct", "k": b64(SECRET.encode()), "kid": "oct"}))
    identify = by_jwks(jwks_file=path, algorithm="RS256", clock=clock)
    forged = jwt.encode(claims_of(), SECRET, algorithm="HS256", headers={"kid": "oct"})
    for token in (forged, Signer("ES256", "one").token()):
        with pytest.raises(NotAuthenticatedError, match="must be signed with RS256"):
            ask(identify, token)


def test_keys_that_do_not_fit_the_algorithm_are_ignored(tmp_path, clock, caplog):
    weak, good = Signer("RS256", "weak", bits=1024), Signer("RS256", "good")
    curved = Signer("ES256", "curved")
    path = tmp_path / "keys.json"
    path.write_bytes(
        jwks(
            weak.jwk(),
            good.jwk(private=True),
            curved.jwk(),
            {**good.jwk(), "kid": "sealing", "use": "enc"},
            {**good.jwk(), "kid": "other", "alg": "RS512"},
            {"kty": "RSA", "kid": "broken", "n": "!", "e": "!"},
        )
    )
    identify = by_jwks(jwks_file=path, algorithm="RS256", clock=clock)
    assert [name for name, _ in identify._keys._keys] == ["good"]
    assert "only 1024 bits" in caplog.text
    assert ask(identify, good.token()).actor == "ana"


def test_a_rotated_file_is_read_again_and_old_tokens_are_refused(tmp_path, clock):
    old, new = Signer("ES256", "old"), Signer("ES256", "new")
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(old.jwk()))
    identify = by_jwks(jwks_file=path, algorithm="ES256", clock=clock)
    assert ask(identify, old.token()).actor == "ana"
    token = old.token(sub="bo")
    ask(identify, token)
    replace(path, jwks(new.jwk()))
    assert ask(identify, new.token()).actor == "ana"
    with pytest.raises(NotAuthenticatedError, match="an unknown key"):
        ask(identify, token)


def test_a_broken_rotation_is_logged_and_the_old_keys_stay(tmp_path, clock, caplog):
    signer = Signer("ES256", "one")
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(signer.jwk()))
    identify = by_jwks(jwks_file=path, algorithm="ES256", clock=clock)
    replace(path, b'{"keys": [')
    assert ask(identify, signer.token()).actor == "ana"
    path.unlink()
    assert ask(identify, signer.token(sub="bo")).actor == "bo"
    ask(identify, signer.token(sub="cy"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


# -- keys from a server ------------------------------------------------------------------------


class KeyServer:
    """A real HTTP server for keys that counts its requests."""

    def __init__(self) -> None:
        self.content = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.garbage: bytes | None = None
        self.dripping = ""
        self.requests = 0
        self.wait = threading.Event()
        self.wait.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.requests += 1
                owner.wait.wait(10)
                if owner.garbage is not None:
                    self.wfile.write(owner.garbage)
                    return
                if owner.dripping:
                    self.drip()
                    return
                self.send_response(owner.status)
                for name, value in owner.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(owner.content)))
                self.end_headers()
                self.wfile.write(owner.content)

            def drip(self) -> None:
                """Send a byte now and then: of a header, or of the body."""
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                if owner.dripping == "body":
                    self.wfile.write(b"content-length: 1000000\r\n\r\n")
                with suppress(OSError):  # the client has closed the connection
                    while owner.dripping:
                        self.wfile.write(b"x")
                        time.sleep(0.01)

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.dripping = ""
        self.wait.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def key_server() -> Iterator[KeyServer]:
    until(lambda: not refreshing())  # a download of an earlier test may still be ending
    server = KeyServer()
    yield server
    server.close()


@ALGORITHMS
async def test_keys_of_a_url_are_fetched_once_when_first_needed(algorithm, key_server, clock):
    signer = Signer(algorithm, "one")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm=algorithm, clock=clock)
    assert key_server.requests == 0
    assert (await ask_async(identify, signer.token())).actor == "ana"
    assert ask(identify, signer.token(sub="bo")).actor == "bo", "no fetch from now on"
    assert ask(identify.with_tenant("org"), signer.token(org="acme")).tenant == "acme"
    assert key_server.requests == 1


async def test_keys_are_fetched_once_for_a_hundred_waiting_callers(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    key_server.wait.clear()
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token()
    callers = [asyncio.create_task(ask_async(identify, token)) for _ in range(100)]
    while not key_server.requests:
        await asyncio.sleep(0.001)
    callers[0].cancel()
    await asyncio.sleep(0)
    key_server.wait.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(one, Principal) for one in found[1:])
    assert key_server.requests == 1


def refreshing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "onceward-jwks"]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


async def test_keys_of_five_minutes_are_used_while_newer_ones_are_fetched(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token()
    await ask_async(identify, token)
    clock.pass_time(299)
    ask(identify, token)
    assert key_server.requests == 1
    clock.pass_time(1)
    key_server.wait.clear()
    for _ in range(50):
        assert ask(identify, token).actor == "ana", "no request waits"
    until(lambda: key_server.requests == 2)
    assert len(refreshing()) == 1
    key_server.wait.set()
    until(lambda: not refreshing())
    clock.pass_time(299)
    ask(identify, token)
    assert key_server.requests == 2


async def test_tokens_of_a_withdrawn_key_are_refused_after_the_next_refresh(key_server, clock):
    old, new = Signer("RS256", "old"), Signer("RS256", "new")
    key_server.content = jwks(old.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="RS256", clock=clock)
    token = old.token()
    await ask_async(identify, token)
    key_server.content = jwks(new.jwk())
    key_server.wait.clear()
    clock.pass_time(300)
    assert ask(identify, token).actor == "ana"
    key_server.wait.set()
    until(lambda: not refreshing())
    with pytest.raises(NotAuthenticatedError, match="an unknown key"):
        await ask_async(identify, token)


async def test_after_ten_minutes_without_requests_the_first_one_waits_for_new_keys(
    key_server, clock
):
    old, new = Signer("ES256", "old"), Signer("ES256", "new")
    key_server.content = jwks(old.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = old.token()
    await ask_async(identify, token)
    key_server.content = jwks(new.jwk())
    clock.pass_time(600)
    with pytest.raises(NotAuthenticatedError, match="an unknown key"):
        await ask_async(identify, token)


@pytest.mark.parametrize("part", ["headers", "body"])
async def test_a_key_server_that_drips_bytes_holds_no_request_and_one_thread(
    key_server, clock, monkeypatch, caplog, part
):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token()
    await ask_async(identify, token)
    until(lambda: not refreshing())
    monkeypatch.setattr(jwt_keys, "_JWKS_TIMEOUT_SECONDS", 1)
    key_server.dripping = part
    clock.pass_time(300)
    threads = set()
    for _ in range(50):
        assert ask(identify, token).actor == "ana"
        threads.add(len(refreshing()))
    assert max(threads) == 1
    until(lambda: not refreshing())
    assert "takes too long" in caplog.text or "timed out" in caplog.text
    ask(identify, token)
    assert (key_server.requests, refreshing()) == (2, []), "after a failure there is a pause"
    clock.pass_time(5)
    ask(identify, token)
    until(lambda: key_server.requests == 3)


async def test_a_request_without_any_key_waits_only_briefly(key_server, clock, monkeypatch):
    monkeypatch.setattr(jwt_keys, "_JWKS_WAIT_SECONDS", 0.05)
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    key_server.wait.clear()
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    callers = [ask_async(identify, signer.token()) for _ in range(20)]
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(one) for one in found] == [StoreUnavailableError] * 20
    until(lambda: key_server.requests)
    assert len(refreshing()) == key_server.requests == 1
    key_server.wait.set()
    until(lambda: not refreshing())
    assert ask(identify, signer.token()).actor == "ana", "the download went on"


async def test_forged_key_ids_start_one_download_in_thirty_seconds(key_server, clock, monkeypatch):
    signer, forged = Signer("ES256", "one"), Signer("ES256", "forged")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, signer.token())
    until(lambda: not refreshing())
    monkeypatch.setattr(jwt_keys, "_JWKS_WAIT_SECONDS", 0.05)
    clock.pass_time(30)
    key_server.wait.clear()
    tokens = [forged.token(sub=f"u{number}") for number in range(20)]
    found = await asyncio.gather(
        *(ask_async(identify, token) for token in tokens), return_exceptions=True
    )
    assert [type(one) for one in found] == [StoreUnavailableError] * 20, "the key may be new"
    assert ask(identify, signer.token()).actor == "ana"
    assert len(refreshing()) == 1
    key_server.wait.set()
    until(lambda: not refreshing())
    for token in tokens:
        with pytest.raises(NotAuthenticatedError, match="an unknown key"):
            await ask_async(identify, token)
    assert key_server.requests == 2


async def test_an_unknown_key_id_refetches_at_most_every_30_seconds(key_server, clock):
    old, new = Signer("ES256", "old"), Signer("ES256", "new")
    key_server.content = jwks(old.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, old.token())
    key_server.content = jwks(old.jwk(), new.jwk())
    with pytest.raises(NotAuthenticatedError, match="an unknown key"):
        await ask_async(identify, new.token())
    assert key_server.requests == 1, "it was fetched just now"
    clock.pass_time(30)
    assert (await ask_async(identify, new.token())).actor == "ana"
    assert key_server.requests == 2
    for number in range(20):
        with pytest.raises(NotAuthenticatedError):
            await ask_async(identify, Signer("ES256", f"guess {number}").token())
    assert key_server.requests == 2
    assert ask(identify, old.token()).actor == "ana"


async def test_a_rotation_without_key_ids_is_found_too(key_server, clock):
    old, new = Signer("ES256", None), Signer("ES256", None)
    key_server.content = jwks(old.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, old.token())
    key_server.content = jwks(new.jwk())
    clock.pass_time(30)
    assert (await ask_async(identify, new.token())).actor == "ana"


async def test_no_keys_are_fetched_for_a_token_that_is_refused_anyway(key_server, clock):
    identify = by_jwks(jwks_url=key_server.url, algorithm="RS256", clock=clock)
    for token in ("garbage", token_of(), Signer("ES256", "one").token()):
        with pytest.raises(NotAuthenticatedError):
            await ask_async(identify, token)
    assert key_server.requests == 0


async def test_an_unreachable_key_server_is_503(clock):
    server = KeyServer()
    server.close()
    identify = by_jwks(jwks_url=server.url, algorithm="ES256", clock=clock)
    token = Signer("ES256", "one").token()
    with pytest.raises(StoreUnavailableError, match="keys for verifying tokens cannot be fetched"):
        await ask_async(identify, token)


@pytest.mark.parametrize(
    "response",
    [
        {"status": 500},
        {"status": 404},
        {"content": b"nonsense"},
        {"content": b'{"keys":[]}'},
        {"content": b" " * (MAX_BYTES + 1)},
        {"status": 302, "headers": {"location": "/elsewhere"}},
        {"garbage": b"this is not HTTP\r\n\r\n"},
        {"garbage": b""},
    ],
    ids=["500", "404", "no JSON", "no keys", "too large", "redirect", "no HTTP", "nothing"],
)
async def test_a_key_server_with_an_unusable_response_is_503(key_server, clock, response):
    for name, value in response.items():
        setattr(key_server, name, value)
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    signer = Signer("ES256", "one")
    for _ in range(5):
        with pytest.raises(StoreUnavailableError):
            await ask_async(identify, signer.token())
    assert key_server.requests == 1, "after a failure there is a pause"
    key_server.status, key_server.content = 200, jwks(signer.jwk())
    key_server.headers, key_server.garbage = {}, None
    clock.pass_time(5)
    assert (await ask_async(identify, signer.token())).actor == "ana"


async def test_known_keys_are_used_for_an_hour_while_the_key_server_fails(key_server, clock):
    signer, other = Signer("ES256", "one"), Signer("ES256", "two")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token(exp=int((NOW + 3 * HOUR).timestamp()))
    await ask_async(identify, token)
    key_server.status = 503
    for _ in range(11):
        clock.pass_time(300)
        assert (await ask_async(identify, token)).actor == "ana"
        until(lambda: not refreshing())
    with pytest.raises(StoreUnavailableError):  # it may be signed with a new key
        await ask_async(identify, other.token())
    clock.pass_time(300)
    with pytest.raises(StoreUnavailableError):
        await ask_async(identify, token)


async def test_an_unknown_key_is_503_while_the_key_server_fails(key_server, clock):
    signer, other = Signer("ES256", "one"), Signer("ES256", "two")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, signer.token())
    key_server.status = 503
    clock.pass_time(30)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await ask_async(identify, other.token())
    assert key_server.requests == 2
    assert ask(identify, signer.token()).actor == "ana"


async def test_the_event_loop_is_free_while_keys_are_fetched(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    key_server.wait.clear()
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    caller = asyncio.create_task(ask_async(identify, signer.token()))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not caller.done()
    key_server.wait.set()
    assert (await caller).actor == "ana"


async def test_keys_can_be_fetched_before_the_first_request(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    identify = by_jwks(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    identify.start_refresh()
    until(lambda: not refreshing())
    assert ask(identify, signer.token()).actor == "ana"


def certificate(directory: Path) -> Path:
    """Write a certificate for localhost and its key into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - HOUR)
        .not_valid_after(datetime.now(UTC) + HOUR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = directory / "localhost.pem"
    path.write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_download_by_https_needs_a_trusted_certificate_and_ends_in_time(
    key_server, tmp_path, monkeypatch
):
    path = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    key_server.server.socket = context.wrap_socket(key_server.server.socket, server_side=True)
    key_server.content = b"{}"
    url = key_server.url.replace("http://127.0.0.1", "https://localhost")
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        download(url, 5)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    assert download(url, 5) == b"{}"
    for part in ("headers", "body"):
        key_server.dripping = part
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            download(url, 0.1)
        assert time.monotonic() - started < 30  # it drips until the test ends
