"""``onceward outbox`` with the profile ``walk`` against a server that demands numbers."""

import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from packages.onceward.tests.support.citus import ON_CITUS
from packages.services.tests.cli.conftest import Cli, Here, Server, token


class Walker:
    """Queues and sends the actions of ada with the command line."""

    def __init__(self, here: Here, server: Server) -> None:
        self._here = here
        self._server = server
        self._token = token(Cli(server.directory))

    def run(self, *arguments: str) -> Any:
        done = self._here("outbox", "--db", "outbox.db", *arguments, "--json")
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)

    def add(self, endpoint: str, **payload: Any) -> str:
        options = ("--user", "ada", "--op", "create", "--entity", "action", "--profile", "walk")
        body = json.dumps(payload)
        added = self.run("add", *options, "--endpoint", endpoint, "--payload", body)
        return str(added["id"])

    def drain(self, server: str = "") -> Any:
        place = ("--server", server or self._server.url, "--token", self._token)
        return self.run("drain", "--user", "ada", *place)

    def statuses(self) -> list[str]:
        return [entry["status"] for entry in self.run("ls", "--user", "ada")]

    def codes(self, entry_id: str) -> list[Any]:
        return [attempt["status"] for attempt in self.run("show", entry_id)["attempts"]]

    def quest(self) -> dict[str, Any]:
        with self._server.client(self._token) as client:
            quests = client.get("/quest/available").json()["quests"]
        return {quest["questId"]: quest["status"] for quest in quests}


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def walker(
    request: pytest.FixtureRequest, here: Here, tmp_path: Path, serve: Callable[..., Server]
) -> Walker:
    database = f"sqlite:///{tmp_path}/server.db"
    if request.param != "sqlite":
        database = request.getfixturevalue(f"{request.param}_url")
    options = ("--database", database, "--no-jobs")
    server = serve(*options, ONCEWARD_WALK_ORDERING="strict", ONCEWARD_LOG_LEVEL="ERROR")
    assert server.url, server.stderr()
    return Walker(here, server)


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that reads requests and closes their connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65_536)

        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)


def test_command_line_numbers_on_demand_and_heals_after_abandoned_entries(walker: Walker) -> None:
    walker.add("/quest/start", questId="quest.001")
    first = walker.add("/quest/quest.001/step/1/advance")
    walker.add("/quest/quest.001/step/2/advance")
    walker.add("/quest/complete", questId="quest.001")
    report = walker.drain()
    assert (report["ended"], report["succeeded"], report["failed"]) == ("empty", 4, 0)
    # One request in vain: it has told the device that the server demands numbers.
    assert walker.codes(first) == [400, 200]
    assert numbers() == [1, 2, 3]
    assert walker.quest()["quest.001"] == "completed"
    # An entry that was sent, had no response and was given up leaves a gap.
    walker.add("/quest/start", questId="quest.002")
    assert walker.drain()["succeeded"] == 1
    lost = walker.add("/quest/quest.002/step/1/advance")
    with silent_server() as nowhere:
        assert walker.drain(nowhere)["retrying"] == 1
    assert numbers() == [1, 2, 3, 4]
    walker.run("discard", lost, "--force")
    healed = walker.add("/quest/quest.002/step/1/advance")
    walker.add("/quest/quest.002/step/2/advance")
    report = walker.drain()
    assert (report["ended"], report["succeeded"], report["failed"]) == ("empty", 2, 0)
    assert walker.codes(healed) == [422, 200]
    assert walker.statuses().count("discarded") == 1
    assert set(walker.statuses()) == {"succeeded", "discarded"}
    assert numbers() == [1, 2, 3, 4, 4, 5]


def numbers() -> list[int]:
    """Return the numbers that entries have, that of the abandoned one included."""
    with closing(sqlite3.connect("outbox.db")) as connection:
        rows = connection.execute("SELECT number FROM sequence_numbers ORDER BY number")
        return [number for (number,) in rows]
