"""The HTTP transports: one request, one response, limits, no leaks."""

import gzip
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from onceward.errors import ConfigurationError
from onceward_outbox.transport import (
    HttpTransport,
    HttpxTransport,
    NoResponse,
    Request,
    Response,
    ServerUrl,
)

GET = Request("GET", "/x", {})

Maker = Callable[..., Any]
Reply = Callable[["Heard"], bytes]


@pytest.fixture(params=[HttpTransport, HttpxTransport])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Each of the two transports in turn: they promise the same."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return request.param  # type: ignore[no-any-return]


class Heard(NamedTuple):
    line: str
    headers: dict[str, str]
    body: bytes
    peer: int


class Listening:
    """A server of raw bytes: what it hears is kept, what it says is given to it."""

    def __init__(self, reply: Reply) -> None:
        self.heard: list[Heard] = []
        self._reply = reply
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline().decode().strip():
                    headers = {}
                    while field := self.rfile.readline().decode().strip():
                        name, _, value = field.partition(": ")
                        headers[name.lower()] = value
                    body = self.rfile.read(int(headers.get("content-length", "0")))
                    heard = Heard(line, headers, body, self.client_address[1])
                    outer.heard.append(heard)
                    try:
                        self.wfile.write(outer._reply(heard))
                    except OSError:
                        return
                    if "Connection: close" in line:
                        return

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # A client that leaves is no error here.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def said(status: str, body: bytes = b"", *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def test_the_request_is_sent_unchanged(make: Maker) -> None:
    with (
        Listening(lambda _: said("201 Created", b'{"id":1}', "X-Request-ID: r")) as server,
        make(server.url) as transport,
    ):
        got = transport.send(Request("POST", "/a/b?c=d", {"Idempotency-Key": "k"}, b"{}"))
    assert isinstance(got, Response)
    assert (got.status, got.json(), got.request_id, got.code) == (201, {"id": 1}, "r", None)
    (heard,) = server.heard
    assert (heard.line, heard.body) == ("POST /a/b?c=d HTTP/1.1", b"{}")
    assert heard.headers["accept-encoding"] == "identity"
    assert heard.headers["host"] == server.url.removeprefix("http://")
    assert set(heard.headers) - {"connection"} == {
        "host",
        "accept",
        "accept-encoding",
        "user-agent",
        "idempotency-key",
        "content-length",
    }


def test_a_path_of_the_server_is_kept_in_front(make: Maker) -> None:
    with (
        Listening(lambda heard: said("200 OK", heard.line.encode())) as server,
        make(f"{server.url}/mobile/") as transport,
    ):
        got = transport.send(GET)
    assert got.body == b"GET /mobile/x HTTP/1.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_request_without_a_body_is_a_whole_request(make: Maker, method: str) -> None:
    with Listening(lambda _: said("200 OK")) as server, make(server.url) as transport:
        assert transport.send(Request(method, "/x", {})).status == 200
        assert transport.send(Request(method, "/y", {})).status == 200
    assert [heard.body for heard in server.heard] == [b"", b""]


def test_one_connection_serves_one_request_after_another(make: Maker) -> None:
    with Listening(lambda _: said("200 OK", b"{}")) as server, make(server.url) as transport:
        for _ in range(5):
            assert transport.send(GET).status == 200
    assert len({heard.peer for heard in server.heard}) == 1


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again(make: Maker) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    closed = threading.Event()

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(said("200 OK", b"{}"))
            connection.close()
            closed.set()

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, make(f"http://127.0.0.1:{listener.getsockname()[1]}") as transport:
        assert transport.send(GET).status == 200
        closed.wait(5)
        assert transport.send(Request("POST", "/x", {}, b"{}")).status == 200
        thread.join()


def test_unexpected_data_is_not_used_as_the_next_response() -> None:
    told = iter([said("200 OK", b"1") + said("200 OK", b"evil"), said("200 OK", b"2")])
    with Listening(lambda _: next(told)) as server, HttpTransport(server.url) as transport:
        got = [transport.send(GET), transport.send(GET)]
    assert [response.body for response in got if isinstance(response, Response)] == [b"1", b"2"]


def test_informational_responses_are_skipped(make: Maker) -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    with (
        Listening(lambda _: hints + said("200 OK", b"yes")) as server,
        make(server.url) as transport,
    ):
        got = transport.send(GET)
    assert (got.status, got.body) == (200, b"yes")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_answer_and_is_not_followed(make: Maker, status: int) -> None:
    with (
        Listening(lambda _: said(f"{status} Elsewhere", b"", "Location: /evil")) as server,
        make(server.url) as transport,
    ):
        got = transport.send(Request("POST", "/x", {"Authorization": "Bearer t"}, b"{}"))
    assert isinstance(got, Response)
    assert (got.status, len(server.heard)) == (status, 1)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_endless_response_is_read_up_to_a_limit(make: Maker, chunked: bool) -> None:
    kind = "Transfer-Encoding: chunked" if chunked else "Connection: close"
    part = b"3e8\r\n" + b"x" * 1000 + b"\r\n" if chunked else b"x" * 1000
    head = f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode()
    with (
        Listening(lambda _: head + part * 10_000) as server,
        make(server.url, max_response_bytes=5000) as transport,
    ):
        got = transport.send(GET)
    assert isinstance(got, Response)
    assert (got.cut_short, len(got.body)) == (True, 5000)


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 201 Created\r\nContent-Length: 10\r\n\r\n{",
        b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"HTTP/1.1 201 Crea",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
def test_a_truncated_or_invalid_response_leaves_the_outcome_unknown(
    make: Maker, cut: bytes
) -> None:
    url, thread = responding(lambda connection: connection.sendall(cut))
    with make(url) as transport:
        got = transport.send(Request("POST", "/x", {}, b"{}"))
    thread.join()
    assert isinstance(got, NoResponse)
    assert got.may_have_been_sent


def test_a_compressed_response_is_not_decompressed(make: Maker) -> None:
    bomb = gzip.compress(b"0" * 10_000_000)
    with (
        Listening(lambda _: said("200 OK", bomb, "Content-Encoding: gzip")) as server,
        make(server.url) as transport,
    ):
        got = transport.send(GET)
    assert isinstance(got, Response)
    assert (len(got.body), got.json()) == (len(bomb), None)


def test_cookies_are_not_kept(make: Maker) -> None:
    with (
        Listening(lambda _: said("200 OK", b"", "Set-Cookie: session=ada")) as server,
        make(server.url) as transport,
    ):
        transport.send(GET)
        transport.send(GET)
    assert all("cookie" not in heard.headers for heard in server.heard)


def test_neither_bodies_nor_tokens_are_logged(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        Listening(lambda _: said("500 Oh", b"the-answer")) as server,
        make(server.url) as transport,
    ):
        headers = {"Authorization": "Bearer the-token"}
        transport.send(Request("POST", "/x", headers, b"the-body"))
    assert "the-token" not in caplog.text
    assert "the-body" not in caplog.text
    assert "the-answer" not in caplog.text


def test_several_threads_send_at_once(make: Maker) -> None:
    with (
        Listening(lambda heard: said("200 OK", heard.body)) as server,
        make(server.url) as transport,
        ThreadPoolExecutor(4) as threads,
    ):
        bodies = [str(number).encode() for number in range(80)]
        responses = list(
            threads.map(lambda body: transport.send(Request("POST", "/x", {}, body)), bodies)
        )
    assert [response.body for response in responses] == bodies


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listening(lambda heard: said("200 OK", heard.line.encode())) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with HttpTransport("http://api.example", allow_http=True) as transport:
            got = transport.send(GET)
    assert isinstance(got, Response)
    assert got.body == b"GET http://api.example/x HTTP/1.1"


def test_http_is_for_this_machine_only_unless_it_is_allowed() -> None:
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "[::1]", "app.localhost", "LOCALHOST"):
        assert ServerUrl.parse(f"http://{host}:8000").scheme == "http"
    for host in ("api.example", "10.0.0.1", "127.0.0.1.evil.example", "localhost.evil", "[::2]"):
        for make in (HttpTransport, HttpxTransport, ServerUrl.parse):
            with pytest.raises(ConfigurationError, match="unencrypted: use https://"):
                make(f"http://{host}")
    assert ServerUrl.parse("http://api.example", allow_http=True).host == "api.example"


def test_any_transport_of_httpx_can_carry_the_requests() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(201, json={"path": request.url.path})

    with HttpxTransport("https://api.example", transport=httpx.MockTransport(handler)) as transport:
        got = transport.send(GET)
    assert isinstance(got, Response)
    assert got.json() == {"path": "/x"}


def test_a_header_that_cannot_be_sent_is_not_repeated_in_the_error(make: Maker) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with make(f"http://127.0.0.1:{listener.getsockname()[1]}") as transport:
            got = transport.send(Request("GET", "/x", {"X": "secret\r\nInjected: 1"}))
    assert isinstance(got, NoResponse)
    assert not got.may_have_been_sent
    assert "secret" not in got.reason


def test_an_unreachable_server_has_certainly_not_got_the_request(make: Maker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with make(f"http://127.0.0.1:{taken.getsockname()[1]}") as transport:
            got = transport.send(GET)
    assert isinstance(got, NoResponse)
    assert not got.may_have_been_sent


def responding(reply: Callable[[socket.socket], None]) -> tuple[str, threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                reply(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


def test_a_connection_that_breaks_after_the_request_leaves_the_outcome_unknown(
    make: Maker,
) -> None:
    url, thread = responding(lambda _: None)
    with make(url) as transport:
        got = transport.send(Request("POST", "/x", {}, b"{}"))
    thread.join()
    assert isinstance(got, NoResponse)
    assert got.may_have_been_sent


def test_a_server_that_takes_too_long_times_out(make: Maker) -> None:
    ended = threading.Event()

    def wait(_: socket.socket) -> None:
        ended.wait(5)

    url, thread = responding(wait)
    with make(url, timeout_seconds=0.2) as transport:
        got = transport.send(GET)
    ended.set()
    thread.join()
    assert got == NoResponse("no response: the server took too long")


def test_a_body_that_comes_too_slowly_times_out(make: Maker) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        for _ in range(100):
            try:
                connection.sendall(b"x")
            except OSError:
                return
            threading.Event().wait(0.05)

    url, thread = responding(trickle)
    with make(url, timeout_seconds=1) as transport:
        got = transport.send(GET)
    thread.join()
    assert got == NoResponse("no response: it was not complete in time")


def test_headers_that_come_too_slowly_time_out() -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for number in range(100):
            try:
                connection.sendall(f"X-{number}: 1\r\n".encode())
            except OSError:
                return
            threading.Event().wait(0.05)

    url, thread = responding(trickle)
    with HttpTransport(url, timeout_seconds=1) as transport:
        got = transport.send(GET)
    thread.join()
    assert got == NoResponse("no response: it was not complete in time")


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that only its own maker vouches for, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    pem = serialization.Encoding.PEM
    (folder / "c.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "k.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "c.pem", folder / "k.pem"


@contextmanager
def secure_server(certified: tuple[Path, Path]) -> Iterator[tuple[int, list[bytes]]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certified)
    listener = socket.create_server(("localhost", 0))
    heard: list[bytes] = []

    def serve() -> None:
        with listener, suppress(OSError):
            connection, _ = listener.accept()
            with context.wrap_socket(connection, server_side=True) as secure:
                heard.append(secure.recv(65536))
                secure.sendall(said("200 OK", b"secret"))

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1], heard
    thread.join()


def test_an_untrusted_certificate_prevents_the_send(
    make: Maker, certified: tuple[Path, Path]
) -> None:
    with secure_server(certified) as (port, heard), make(f"https://localhost:{port}") as transport:
        got = transport.send(Request("POST", "/x", {"Authorization": "Bearer t"}, b"{}"))
    assert isinstance(got, NoResponse)
    assert not got.may_have_been_sent
    assert "certificate" in got.reason.lower()
    assert heard == []


def test_a_certificate_for_another_name_is_refused(
    make: Maker, certified: tuple[Path, Path]
) -> None:
    trusting = ssl.create_default_context(cafile=str(certified[0]))
    with (
        secure_server(certified) as (port, heard),
        make(f"https://127.0.0.1:{port}", tls=trusting) as transport,
    ):
        got = transport.send(GET)
    assert isinstance(got, NoResponse)
    assert not got.may_have_been_sent
    assert heard == []


def test_a_private_authority_can_be_trusted(make: Maker, certified: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(certified[0]))
    with (
        secure_server(certified) as (port, _),
        make(f"https://localhost:{port}", tls=trusting) as transport,
    ):
        got = transport.send(GET)
    assert isinstance(got, Response)
    assert got.body == b"secret"


@pytest.mark.parametrize(
    "server",
    [
        "",
        "api.example",
        "ftp://api.example",
        "https://",
        "https://me:secret@api.example",
        "https://api.example/?x=1",
        "https://api.example/#x",
        "https://api.example/#",
        "https://api.example:port",
        "https://api example",
        "https://api.example\r\nX: y",
        "https://[::1",
    ],
)
def test_an_invalid_server_url_is_refused(make: Maker, server: str) -> None:
    with pytest.raises(ConfigurationError, match="server URL"):
        make(server)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"code": "a.b"}', "a.b"),
        (b'{"error": "A_B"}', "A_B"),
        (b'{"error": {"nested": 1}}', None),
        (b"[]", None),
        (b"\xff", None),
        (b"<html>", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_code_is_read_in_both_error_formats(body: bytes, code: str | None) -> None:
    assert Response(409, {}, body).code == code
