"""Bodies that break off, or are too large, run nothing on any server: each is cut at every byte."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from packages.onceward.tests.support.serving import ROOT, free_port

APPS = "packages.onceward.tests.support.body_apps"
FORM, JSON = "application/x-www-form-urlencoded", "application/json"
MULTIPART = "multipart/form-data; boundary=b"
BODIES = {
    FORM: b"token=t&amount=1000",
    JSON: b'{"amount": 1000}      ',
    "text/plain": b"amount=1000",
    MULTIPART: b'--b\r\nContent-Disposition: form-data; name="amount"\r\n\r\n1000\r\n--b--\r\n',
}
MAX_BODY_BYTES = 1_000

_GUNICORN = ("gunicorn", "--bind=127.0.0.1:{port}", "--no-control-socket", "--keep-alive=1")
SERVERS = {
    "gunicorn sync": (*_GUNICORN, f"{APPS}:wsgi"),
    "gunicorn gthread": (*_GUNICORN, "--threads=4", f"{APPS}:wsgi"),
    "granian wsgi": ("granian", "--interface=wsgi", "--port={port}", f"{APPS}:wsgi"),
    "gunicorn uvicorn": (*_GUNICORN, "-k=uvicorn.workers.UvicornWorker", f"{APPS}:asgi"),
    "gunicorn asgi": (*_GUNICORN, "-k=asgi", f"{APPS}:asgi"),
    "uvicorn h11": ("uvicorn", "--port={port}", "--http=h11", f"{APPS}:asgi"),
    "uvicorn httptools": ("uvicorn", "--port={port}", "--http=httptools", f"{APPS}:asgi"),
    "hypercorn": ("hypercorn", "--bind=127.0.0.1:{port}", "--workers=0", f"{APPS}:asgi"),
    "granian asgi": ("granian", "--interface=asgi", "--port={port}", f"{APPS}:asgi"),
}
WSGI_PATHS = (
    *("/wsgi/orders", "/flask/orders", "/flask/read"),
    *("/django/orders", "/django/read", "/django/rest"),
)
ASGI_PATHS = ("/early/orders", "/late/orders", "/django/orders", "/django/read", "/django/rest")


@dataclass
class Served:
    """A server, and what its handlers have noted."""

    name: str
    port: int
    folder: Path
    cuts: int = 0
    wrong: list[str] = field(default_factory=list)

    def executed(self) -> list[bytes]:
        noted = self.folder / "executed"
        return noted.read_bytes().splitlines() if noted.exists() else []

    def send(self, data: bytes, *, is_cut: bool) -> bytes:
        """Send a request, or a part of it, and return the response."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            received = b""
            try:
                connection.sendall(data)
                if is_cut:
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(65536):
                    received += part
            except (ConnectionResetError, BrokenPipeError):
                pass
            return received


def request(path: str, content_type: str, body: bytes, *, is_chunked: bool) -> tuple[bytes, bytes]:
    """Return the head and the framed body of a request with a key of its own."""
    framing = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n{framing}\r\n"
        f"Content-Type: {content_type}\r\nIdempotency-Key: {uuid4()}\r\n\r\n"
    )
    if not is_chunked:
        return head.encode(), body
    half = len(body) // 2
    parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:])]
    return head.encode(), b"".join(parts) + b"0\r\n\r\n"


def status_of(response: bytes) -> int:
    return int(response[9:12] or b"0")


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Served]:
    port = free_port()
    command = [part.format(port=port) for part in SERVERS[name]]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, "BODY_APPS_FOLDER": str(folder)},
            stdout=log,
            stderr=log,
        )
    served = Served(name, port, folder)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                served.send(b"GET / HTTP/1.0\r\n\r\n", is_cut=False)
                break
            except OSError:
                assert process.poll() is None, (folder / "log.txt").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield served
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cut_everywhere(
    served: Served, path: str, content_type: str, *, is_chunked: bool, step: int
) -> None:
    """Cut a request at every byte of its body; then send it whole, with the same key."""
    head, framed = request(path, content_type, BODIES[content_type], is_chunked=is_chunked)
    where = f"{path} {content_type} {'chunked' if is_chunked else 'length'}"
    before, statuses = served.executed(), dict[int, list[int]]()
    # "0\r\n" at the end is the last chunk.
    end = len(framed) - (4 if is_chunked else 1)
    for at in range(0, end + 1, step):
        status = status_of(served.send(head + framed[:at], is_cut=True))
        served.cuts += 1
        statuses.setdefault(status, []).append(at)
    # 411: Django under WSGI drops such a body. Granian responds with 500 to a client that has left.
    if statuses.keys() - ({0, 500} if served.name == "granian asgi" else {0, 400, 411}):
        counts = {status: f"{len(found)} from {found[0]}" for status, found in statuses.items()}
        served.wrong.append(f"{where} cut: {counts}")
    whole = status_of(served.send(head + framed, is_cut=False))
    now = served.executed()
    expected = 0 if whole == 411 and is_chunked else 1
    if whole not in (201, 411) or len(now) - len(before) != expected:
        served.wrong.append(f"{where} whole: {whole}, executed {now[len(before) :]}")


def send_too_much(served: Served, path: str, content_type: str, *, is_chunked: bool) -> None:
    """Send a body above the limit of the policy."""
    size = MAX_BODY_BYTES + 1
    for factor in (1, 5, 500):
        body = b"amount=1&x=".ljust(factor * size, b"y")
        head, framed = request(path, content_type, body, is_chunked=is_chunked)
        before = served.executed()
        status = status_of(served.send(head + framed, is_cut=False))
        served.cuts += 1
        if status not in (0, 413, 411) or served.executed() != before:
            served.wrong.append(
                f"{path} {content_type} of {len(body)}, chunked {is_chunked}: {status}"
            )


def paths_of(server: str) -> tuple[str, ...]:
    return WSGI_PATHS if SERVERS[server][-1].endswith(":wsgi") else ASGI_PATHS


def check(
    served: Served, paths: tuple[str, ...], content_types: tuple[str, ...], *, step: int = 1
) -> None:
    for path in paths:
        for content_type in content_types:
            if path.endswith("/rest") and content_type == "text/plain":
                continue
            for is_chunked in (False, True):
                cut_everywhere(served, path, content_type, is_chunked=is_chunked, step=step)
                if content_type in (FORM, "text/plain"):
                    send_too_much(served, path, content_type, is_chunked=is_chunked)


@pytest.mark.long
@pytest.mark.parametrize("server", SERVERS)
def test_body_cut_at_every_byte_runs_nothing(server: str, tmp_path: Path) -> None:
    with serving(server, tmp_path) as served:
        check(served, paths_of(server), tuple(BODIES))
    assert not served.wrong, "\n".join(served.wrong)
    assert served.cuts >= 500


def test_cut_forms_run_nothing_under_wsgi(tmp_path: Path) -> None:
    with serving("gunicorn gthread", tmp_path) as served:
        check(served, WSGI_PATHS, (FORM,), step=5)
    assert not served.wrong, "\n".join(served.wrong)
