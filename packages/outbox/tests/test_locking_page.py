"""The outbox against the server of docs/how-to/lock-optimistically.md, over HTTP."""

import json
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from onceward_outbox import OutboxQueue
from onceward_outbox.entry import NewEntry, Status
from onceward_outbox.transport import HttpTransport
from packages.onceward.tests.support.outbox_harness import drain
from tests.docs.pages import ROOT, blocks, python_blocks

PAGE = ROOT / "docs/how-to/lock-optimistically.md"
SIGNED_IN = {"X-API-Key": "k-ada"}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the first two blocks of the page and return the URL."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notes"}
    for block in python_blocks(PAGE)[:2]:
        exec(compile(block.text, str(PAGE), "exec"), names)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(names["app"], port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


Run = Callable[[str], str]


@pytest.fixture
def shell(notes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a line of the page: ``onceward …`` or ``curl …``."""

    def run(line: str) -> str:
        program, *arguments = shlex.split(line.replace("http://127.0.0.1:8000", notes))
        if program == "curl":
            return _curl(arguments)
        from onceward_protocol.cli.main import _run, report_errors

        monkeypatch.setattr("sys.argv", [program, *arguments])
        capsys.readouterr()
        assert report_errors(_run) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def _curl(arguments: list[str]) -> str:
    given = iter(arguments)
    method, url, headers, body = "POST", "", {}, ""
    for argument in given:
        if argument == "-X":
            method = next(given)
        elif argument == "-H":
            name, _, value = next(given).partition(": ")
            headers[name] = value
        elif argument == "--json":
            body = next(given)
        else:
            url = argument
    headers["content-type"] = "application/json"
    response = httpx.request(method, url, headers=headers, content=body)
    assert response.is_success, response.text
    return response.text


def lines_of_the_page() -> list[str]:
    shown = [block.text for block in blocks(PAGE) if block.language == "sh"]
    return [line for text in shown for line in text.replace("\\\n", " ").splitlines()]


def test_commands_of_the_page_resolve_the_conflict(notes: str, shell: Run) -> None:
    entry_id = ""
    for line in lines_of_the_page():
        output = shell(line.replace(" ID", f" {entry_id}"))
        if " ls " in line:
            entry_id = output.splitlines()[1].split("\t")[0]
    assert httpx.get(f"{notes}/notes/1", headers=SIGNED_IN).json() == {
        "id": "1",
        "text": "mine",
        "version": 3,
    }
    shown = json.loads(shell(f"onceward outbox --db device.db show {entry_id} --json"))
    assert (shown["status"], shown["headers"]) == ("succeeded", {"If-Match": '"2"'})
    assert shown["idempotency_key"] != "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"


@pytest.mark.parametrize("headers", [{}, {"If-Match": '"1"'}, {"If-Match": "*"}])
def test_client_wins_reads_the_version_and_sends_it(
    notes: str, tmp_path: Path, headers: dict[str, str]
) -> None:
    """Also without a version, and with a star, for which the server responds 428."""
    key = SIGNED_IN | {"Idempotency-Key": "a"}
    httpx.post(f"{notes}/notes", json={"id": "1", "text": "draft"}, headers=key)
    key = SIGNED_IN | {"Idempotency-Key": "b", "If-Match": '"1"'}
    httpx.patch(f"{notes}/notes/1", json={"text": "theirs"}, headers=key)
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        entry = queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="patch",
                entity_type="note",
                endpoint="/notes/1",
                payload={"text": "mine"},
                headers=headers,
                conflict_resolution="client_wins",
            )
        )
        with HttpTransport(notes) as transport:
            drain(queue, "ada", transport, at_send=lambda _: SIGNED_IN)
        after = queue.get(entry.id)
        assert (after.status, after.headers) == (Status.SUCCEEDED, {"If-Match": '"2"'})
    assert httpx.get(f"{notes}/notes/1", headers=SIGNED_IN).json()["text"] == "mine"


@pytest.mark.parametrize(
    ("versions", "coalesce", "statuses", "text"),
    [
        # Merged into one request.
        ([1, 1, 1], True, ["succeeded"], "three"),
        # Each is sent with the version that the one before has produced.
        ([1, 1, 1], False, ["succeeded", "succeeded", "succeeded"], "three"),
        # Merged only with entries that name the same version.
        ([1, 2, 3], True, ["succeeded", "succeeded", "succeeded"], "three"),
    ],
)
def test_several_offline_edits_of_one_note(  # noqa: PLR0917 - the columns of the table
    notes: str, tmp_path: Path, versions: list[int], coalesce: bool, statuses: list[str], text: str
) -> None:
    key = SIGNED_IN | {"Idempotency-Key": "a"}
    httpx.post(f"{notes}/notes", json={"id": "1", "text": "draft"}, headers=key)
    with OutboxQueue.open(tmp_path / "outbox.db") as queue, HttpTransport(notes) as transport:
        queue.add_user("ada")
        edits = [
            NewEntry(
                user_id="ada",
                operation="patch",
                entity_type="note",
                endpoint="/notes/1",
                payload={"text": name},
                headers={"If-Match": f'"{version}"'},
                conflict_resolution="manual",
            )
            for name, version in zip(("one", "two", "three"), versions, strict=True)
        ]
        queue.enqueue_many(edits, coalesce=coalesce)
        drain(queue, "ada", transport, at_send=lambda _: SIGNED_IN)
        assert [entry.status for entry in queue.entries("ada")] == statuses
    assert httpx.get(f"{notes}/notes/1", headers=SIGNED_IN).json()["text"] == text
