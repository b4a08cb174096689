"""The transport: one request out, one answer back, and nothing that could leak or run away."""

import gzip
import http.server
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from holdfast.device.transport import Answer, HttpTransport, NoAnswer, Request
from holdfast.errors import ConfigurationError

GET = Request("GET", "/x", {})


def mocked(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> HttpTransport:
    return HttpTransport("https://api.example", transport=httpx.MockTransport(handler), **options)


def test_what_is_sent_is_what_was_asked_for_and_nothing_else() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, json={"id": 1}, headers={"X-Request-ID": "r"})

    with mocked(handler) as transport:
        got = transport.send(Request("POST", "/a/b?c=d", {"Idempotency-Key": "k"}, b"{}"))
    assert isinstance(got, Answer)
    assert (got.status, got.json(), got.request_id, got.code) == (201, {"id": 1}, "r", None)
    assert str(seen[0].url) == "https://api.example/a/b?c=d"
    assert seen[0].headers["accept-encoding"] == "identity"
    assert set(seen[0].headers) == {
        "host",
        "accept",
        "accept-encoding",
        "connection",
        "user-agent",
        "idempotency-key",
        "content-length",
    }


def test_a_path_of_the_server_is_kept_in_front() -> None:
    with HttpTransport(
        "https://api.example/mobile/",
        transport=httpx.MockTransport(lambda r: httpx.Response(200, text=r.url.path)),
    ) as transport:
        got = transport.send(GET)
    assert isinstance(got, Answer)
    assert got.body == b"/mobile/x"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_answer_and_is_not_followed(status: int) -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(status, headers={"Location": "https://evil.example/"})

    with mocked(handler) as transport:
        got = transport.send(Request("POST", "/x", {"Authorization": "Bearer t"}, b"{}"))
    assert isinstance(got, Answer)
    assert (got.status, asked) == (status, ["https://api.example/x"])


def test_an_answer_without_end_is_read_up_to_a_limit() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        for _ in range(10_000):
            read += 1000
            yield b"x" * 1000

    with mocked(
        lambda _: httpx.Response(200, content=endless()), max_answer_bytes=5000
    ) as transport:
        got = transport.send(GET)
    assert isinstance(got, Answer)
    assert (got.cut_short, len(got.body)) == (True, 5000)
    assert read <= 7000


def test_a_compressed_answer_is_not_blown_up() -> None:
    bomb = gzip.compress(b"0" * 10_000_000)
    headers = {"Content-Encoding": "gzip"}
    with mocked(lambda _: httpx.Response(200, content=iter([bomb]), headers=headers)) as transport:
        got = transport.send(GET)
    assert isinstance(got, Answer)
    assert (len(got.body), got.json()) == (len(bomb), None)


def test_cookies_are_not_kept() -> None:
    seen: list[httpx.Headers] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, headers={"Set-Cookie": "session=ada"})

    with mocked(handler) as transport:
        transport.send(GET)
        transport.send(GET)
    assert all("cookie" not in headers for headers in seen)


def test_neither_bodies_nor_tokens_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with mocked(lambda _: httpx.Response(500, text="the-answer")) as transport:
        transport.send(Request("POST", "/x", {"Authorization": "Bearer the-token"}, b"the-body"))
    assert "the-token" not in caplog.text
    assert "the-body" not in caplog.text
    assert "the-answer" not in caplog.text


def test_a_header_that_cannot_be_sent_is_not_repeated_in_the_error() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with HttpTransport(f"http://127.0.0.1:{listener.getsockname()[1]}") as transport:
            got = transport.send(Request("GET", "/x", {"X": "secret\r\nInjected: 1"}))
    assert isinstance(got, NoAnswer)
    assert not got.left
    assert "secret" not in got.why


def test_a_server_that_is_not_there_has_certainly_not_heard_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with HttpTransport(f"http://127.0.0.1:{taken.getsockname()[1]}") as transport:
            got = transport.send(GET)
    assert isinstance(got, NoAnswer)
    assert not got.left


def answering(reply: Callable[[socket.socket], None]) -> tuple[str, threading.Thread]:
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


def test_a_connection_that_breaks_after_the_request_leaves_the_outcome_unknown() -> None:
    url, thread = answering(lambda _: None)
    with HttpTransport(url) as transport:
        got = transport.send(Request("POST", "/x", {}, b"{}"))
    thread.join()
    assert isinstance(got, NoAnswer)
    assert got.left


def test_a_server_that_takes_too_long_is_left() -> None:
    ended = threading.Event()

    def wait(_: socket.socket) -> None:
        ended.wait(5)

    url, thread = answering(wait)
    with HttpTransport(url, timeout_seconds=0.2) as transport:
        got = transport.send(GET)
    ended.set()
    thread.join()
    assert got == NoAnswer("no answer: the server took too long")


def test_an_answer_that_trickles_in_is_left_as_well() -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        for _ in range(100):
            try:
                connection.sendall(b"x")
            except OSError:
                return
            threading.Event().wait(0.05)

    url, thread = answering(trickle)
    with HttpTransport(url, timeout_seconds=0.3) as transport:
        got = transport.send(GET)
    thread.join()
    assert got == NoAnswer("no answer: it came too slowly")


def test_a_certificate_that_does_not_hold_ends_it_before_anything_is_sent() -> None:
    # A server that speaks no TLS at all stands for every certificate that cannot be verified.
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread.start()
    with HttpTransport(f"https://127.0.0.1:{server.server_port}") as transport:
        got = transport.send(Request("POST", "/x", {"Authorization": "Bearer t"}, b"{}"))
        context = transport._http._transport._pool._ssl_context  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()
    assert isinstance(got, NoAnswer)
    assert not got.left
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


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
    ],
)
def test_an_address_that_is_none_is_refused(server: str) -> None:
    with pytest.raises(ConfigurationError, match="address"):
        HttpTransport(server)


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
def test_a_code_is_read_in_either_dialect(body: bytes, code: str | None) -> None:
    assert Answer(409, {}, body).code == code
