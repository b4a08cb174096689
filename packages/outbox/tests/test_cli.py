"""``onceward outbox`` as a process: options, output, JSON and exit codes."""

import json
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest

from onceward_outbox import NewEntry, OutboxQueue, Profile
from onceward_outbox.settings import VARIABLES
from packages.onceward.tests.support.outbox_harness import CuttingProxy, reader, titles_of, token_of
from packages.services.tests.cli.conftest import (
    ONCEWARD,
    Done,
    Here,
    Server,
    environment,
    here,
    one_line,
)

__all__ = ["here"]

DB = ("outbox", "--db", "outbox.db")


@pytest.fixture
def user() -> str:
    return f"user-{uuid4()}"


class Outbox:
    """Runs commands on one file and reads their JSON."""

    def __init__(self, here: Here, user: str, server: Server) -> None:
        self.here, self.user, self.server = here, user, server

    def __call__(self, *arguments: str, **variables: str) -> Any:
        done = self.run(*arguments, "--json", **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *arguments: str, **variables: str) -> Done:
        return self.here(*DB, *arguments, **variables)

    def add(self, title: str, *more: str, op: str = "create", path: str = "") -> Any:
        return self(
            "add",
            *("--user", self.user, "--op", op, "--entity", "activity", "--profile", "field"),
            *("--endpoint", f"/api/v1/activities{path}", "--payload", json.dumps({"title": title})),
            *more,
        )

    def drain(self, *more: str, url: str | None = None, **variables: str) -> Any:
        return self(
            "drain",
            *("--user", self.user, "--server", url or self.server.url),
            *("--token", token_of(self.user), *more),
            **variables,
        )


@pytest.fixture
def outbox(here: Here, user: str, server: Server) -> Outbox:
    return Outbox(here, user, server)


def test_what_is_added_is_listed_sent_and_counted(outbox: Outbox, user: str) -> None:
    local = str(uuid4())
    first = outbox.add("Visit", "--local-id", local)
    second = outbox.add("Long visit", op="update", path=f"/{{local:{local}}}")
    third = outbox.add("Other", "--depends-on", first["id"], "--priority", "99")
    assert (first["status"], first["priority"], third["dependency_ids"]) == (
        "pending",
        10,
        [first["id"]],
    )
    assert [entry["id"] for entry in outbox("ls")] == [first["id"], second["id"], third["id"]]
    report = outbox.drain()
    assert (report["ended"], report["succeeded"], report["unsent"]) == ("empty", 3, 0)
    shown = outbox("show", second["id"])
    assert shown["status"] == "succeeded"
    assert [attempt["status"] for attempt in shown["attempts"]] == [200]
    assert outbox("stats", "--user", user)["succeeded"] == 3
    assert sorted(titles_of(outbox.server.url, user)) == ["Long visit", "Other"]


def test_lost_responses_are_retried_within_max_seconds(outbox: Outbox, user: str) -> None:
    for number in range(4):
        outbox.add(f"visit {number}")
    with CuttingProxy(outbox.server.url) as proxy:
        singly = {"ONCEWARD_OUTBOX_BATCH_ITEMS": "1"}
        report = outbox.drain("--max-seconds", "20", url=proxy.url, **singly)
    assert (report["ended"], report["succeeded"], proxy.lost) == ("empty", 4, 1)
    assert len(titles_of(outbox.server.url, user)) == 4


def test_a_walk_entry_that_is_a_month_old_expires(outbox: Outbox, user: str) -> None:
    old = {"questId": "quest.001", "clientGeneratedAt": "2026-01-01T00:00:00Z"}
    entry = outbox(
        "add",
        *("--user", user, "--op", "create", "--entity", "quest", "--profile", "walk"),
        *("--endpoint", "/quest/complete", "--payload", json.dumps(old)),
    )
    assert outbox.drain()["expired"] == 1
    assert outbox("show", entry["id"])["attempts"][0]["code"] == "STALE_ACTION"


@contextmanager
def failing() -> Iterator[str]:
    """Give the address of a server that always fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_shorter_delays_keep_each_profiles_limit_of_attempts(outbox: Outbox, user: str) -> None:
    field = outbox.add("Visit")
    walk = outbox(
        "add",
        *("--user", user, "--op", "create", "--entity", "quest", "--profile", "walk"),
        *("--endpoint", "/quest/complete", "--payload", '{"questId": "quest.001"}'),
    )
    with failing() as url:
        for _ in range(3):
            outbox(
                *("drain", "--user", user, "--server", url, "--token", "t", "--max-seconds", "10"),
                ONCEWARD_OUTBOX_RETRY_SECONDS="0.001",
            )
    shown = outbox("show", field["id"])
    assert (shown["status"], shown["attempt_count"]) == ("failed", shown["max_attempts"])
    shown = outbox("show", walk["id"])
    assert shown["status"] == "pending"
    assert shown["attempt_count"] > shown["max_attempts"]


def test_http_to_another_machine_exits_with_one_line(outbox: Outbox, user: str) -> None:
    outbox.add("Visit")
    drain = ("drain", "--user", user, "--server", "http://192.0.2.1", "--max-seconds", "0")
    done = outbox.run(*drain)
    assert done.returncode != 0
    assert "--allow-http" in one_line(done.stderr)
    assert outbox(*drain, "--allow-http")["ended"] == "time_up"


def test_retention_can_be_set_by_the_environment(outbox: Outbox, user: str) -> None:
    a_tenth_of_a_second = "0.0000012"
    outbox.add("Sent")
    outbox.drain()
    outbox.add("Too old")
    time.sleep(0.2)
    drain = ("drain", "--user", user, "--server", "http://127.0.0.1:9")
    report = outbox(*drain, ONCEWARD_OUTBOX_CAP_DAYS=a_tenth_of_a_second)
    assert (report["ended"], report["expired"]) == ("empty", 1)
    time.sleep(0.2)
    assert outbox("prune") == {"removed": 0}
    for variable in ("KEEP_SUCCEEDED_DAYS", "KEEP_SETTLED_DAYS"):
        set_to = {f"ONCEWARD_OUTBOX_{variable}": a_tenth_of_a_second}
        assert outbox("prune", **set_to) == {"removed": 1}


@pytest.mark.parametrize("variable", [*VARIABLES.values(), "ONCEWARD_OUTBOX_RETRY_SECONDS"])
def test_an_invalid_setting_exits_2_with_one_line(outbox: Outbox, user: str, variable: str) -> None:
    outbox.add("Visit")
    drain = ("drain", "--user", user, "--server", "http://127.0.0.1:9")
    done = outbox.run(*drain, **{variable: "soon"})
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"{variable} should be a number of" in one_line(done.stderr)


def test_a_failed_entry_is_retried_edited_or_discarded(outbox: Outbox, user: str) -> None:
    entries = [outbox.add(f"visit {n}", op="patch", path=f"/{uuid4()}") for n in range(3)]
    report = outbox.drain()
    assert report["failed"] == 3
    assert report["stuck"] == [{"id": entry["id"], "status": "failed"} for entry in entries]
    assert [entry["last_error_code"] for entry in outbox("ls", "--status", "failed")] == [404] * 3
    retried, edited, discarded = (entry["id"] for entry in entries)
    assert outbox("retry", retried)["status"] == "pending"
    new = outbox("edit", edited, "--payload", '{"title": "edited"}', "--endpoint", "/api/v1/x")
    assert new["idempotency_key"] != entries[1]["idempotency_key"]
    assert (new["payload"], new["endpoint"]) == ({"title": "edited"}, "/api/v1/x")
    assert outbox("discard", discarded)["status"] == "discarded"
    pending = outbox.add("not yet sent")
    assert outbox("discard", pending["id"])["status"] == "discarded"


def test_a_conflict_is_shown_side_by_side_and_resolved(outbox: Outbox, user: str) -> None:
    local = str(uuid4())
    outbox.add("Visit", "--local-id", local)
    outbox.drain()
    item = outbox("ls")[0]["server_id"]
    with reader(outbox.server.url, user) as client:
        key = {"Idempotency-Key": str(uuid4())}
        client.put(f"/api/v1/activities/{item}", json={"title": "Theirs"}, headers=key)
    entry = outbox.add(
        "Mine", "--header", 'If-Match: "1"', "--conflict", "manual", op="update", path=f"/{item}"
    )
    assert outbox.drain()["conflicts"] == 1
    sides = outbox("resolve", entry["id"])
    assert (sides["mine"], sides["theirs"]["title"]) == ({"title": "Mine"}, "Theirs")
    table = outbox.run("resolve", entry["id"]).stdout.decode().splitlines()
    assert table[0].split("\t") == ["field", "base", "mine", "theirs"]
    assert all(line.split("\t")[0] for line in table)
    advice = "resolve it with --strategy client_wins, server_wins, give_up, or merge --payload …"
    assert table[-1] == advice
    listed = outbox.run("ls", "--status", "conflict").stdout.decode()
    assert "\tthe resource has changed: its current version is 2\n" in listed
    assert "urn:onceward:problem" not in listed
    told = outbox.run("drain", "--user", user, "--server", outbox.server.url).stdout.decode()
    assert f"{entry['id']} is conflict and needs a decision (resolve or discard)" in told
    assert "title\tVisit\tMine\tTheirs" in table
    assert outbox("resolve", entry["id"], "--strategy", "client_wins")["forced"]
    assert outbox.drain()["succeeded"] == 1
    assert titles_of(outbox.server.url, user) == ["Mine"]


def test_a_refused_token_exits_1_and_fails_no_entry(outbox: Outbox, user: str) -> None:
    entry = outbox.add("Visit")
    done = outbox.run("drain", "--user", user, "--server", outbox.server.url, "--token", "x.y.z")
    assert done.returncode == 1
    assert "sign in" in one_line(done.stderr)
    done = outbox.run("drain", "--user", user, "--server", outbox.server.url)
    assert done.returncode == 1
    assert one_line(done.stderr) == (
        "onceward: the server needs a token: give --token or ONCEWARD_OUTBOX_TOKEN; "
        "nothing was lost"
    )
    shown = outbox("show", entry["id"])
    assert (shown["status"], shown["attempt_count"]) == ("pending", 0)


def test_an_unreachable_server_exits_1_and_fails_no_entry(outbox: Outbox, user: str) -> None:
    outbox.add("Visit")
    done = outbox.run("drain", "--user", user, "--server", "http://127.0.0.1:9", "--token", "t")
    assert done.returncode == 1
    assert "could not connect" in one_line(done.stderr)
    assert outbox("stats")["pending"] == 1


def test_entries_of_an_unknown_profile_exit_1_with_the_line_that_registers_it(
    outbox: Outbox, user: str, tmp_path: Path
) -> None:
    sent = outbox.add("Visit")
    with OutboxQueue.open(tmp_path / "outbox.db", profiles=[Profile(name="shop")]) as queue:
        queue.enqueue(
            NewEntry(
                user_id=user,
                operation="create",
                entity_type="order",
                endpoint="/orders",
                profile="shop",
            )
        )
    done = outbox.run(
        *("drain", "--user", user, "--server", outbox.server.url, "--token", token_of(user))
    )
    assert done.returncode == 1
    assert "no outbox profile 'shop' is registered" in one_line(done.stderr)
    assert outbox("show", sent["id"])["status"] == "succeeded"


def test_base_of_an_edit_is_queued_with_it(here: Here) -> None:
    more = ("--user", "ada", "--op", "patch", "--entity", "note", "--endpoint", "/notes/5")
    add = (*DB, "add", *more, "--payload", '{"a": 2}')
    done = here(*add, "--base", '{"a": 1}', "--json")
    assert json.loads(done.stdout)["base"] == {"a": 1}
    wrong = here(*add, "--base", "{a")
    assert wrong.returncode == 2
    one_line(wrong.stderr)


def test_profiles_of_an_app_are_named_by_module_and_name(here: Here, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from onceward_outbox import Profile\n"
        "SHOP = Profile(name='shop', priorities={'order': 7})\n"
        "PROFILES = [SHOP, Profile(name='other')]\n"
        "NUMBER = 5\n"
    )
    more = ("--user", "ada", "--op", "create", "--entity", "order", "--endpoint", "/orders")
    add = ("add", *more, "--profile", "shop")
    unknown = here(*DB, *add)
    assert unknown.returncode == 2
    assert "--profiles MODULE:NAME" in one_line(unknown.stderr)
    for name in ("shop:SHOP", "shop:PROFILES"):
        done = here(*DB, "--profiles", name, *add)
        assert done.returncode == 0, done.stderr
    listed = here(*DB, "--profiles", "shop:SHOP", "ls", "--json")
    assert [entry["priority"] for entry in json.loads(listed.stdout)] == [7, 7]
    for name, text in (
        ("shop:NUMBER", "is of type int: expected a Profile"),
        ("shop", "is not of the form MODULE:NAME"),
        ("shop:NONE", "shop has no NONE"),
    ):
        wrong = here(*DB, "--profiles", name, "ls")
        assert wrong.returncode == 2
        assert text in one_line(wrong.stderr)


def test_an_encrypted_queue_opens_with_its_passphrase_only(
    here: Here, user: str, tmp_path: Path
) -> None:
    base = ("outbox", "--db", "secret.db", "--passphrase-env", "PIN")
    more = ("--user", user, "--op", "create", "--entity", "note", "--endpoint", "/x")
    payload = ("--payload", '{"text": "very private"}')
    assert here(*base, "add", *more, *payload, PIN="a long passphrase").returncode == 0
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"very private" not in files
    assert user.encode() not in files
    assert here(*base, "ls", PIN="a long passphrase").returncode == 0
    wrong = here(*base, "ls", PIN="another passphrase")
    assert (wrong.returncode, wrong.stdout) == (1, b"")
    assert "passphrase" in one_line(wrong.stderr)
    missing = here(*base, "ls")
    assert missing.returncode == 2
    assert "PIN" in one_line(missing.stderr)


def test_a_weak_passphrase_needs_a_flag_for_a_new_file_only(here: Here, tmp_path: Path) -> None:
    base = ("outbox", "--db", "secret.db", "--passphrase-env", "PIN")
    add = ("add", "--user", "ada", "--op", "create", "--entity", "note", "--endpoint", "/x")
    refused = here(*base, *add, PIN="1234")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert "--allow-weak-passphrase" in one_line(refused.stderr)
    assert list(tmp_path.iterdir()) == []
    assert here(*base, "--allow-weak-passphrase", *add, PIN="1234").returncode == 0
    warned = here(*base, "ls", "--json", PIN="1234")
    assert warned.returncode == 0
    assert b"note" in warned.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--op", "upsert", "--endpoint", "/x"],
        ["--op", "create", "--endpoint", "https://evil.example/x"],
        ["--op", "create", "--endpoint", "//evil.example/x"],
        ["--op", "create", "--endpoint", "/a/../b"],
        ["--op", "create", "--endpoint", "/x", "--payload", "{not json"],
        ["--op", "create", "--endpoint", "/x", "--depends-on", str(uuid4())],
        ["--op", "create", "--endpoint", "/x", "--key", "NOT-A-UUID"],
        ["--op", "create", "--endpoint", "/x", "--conflict", "flip-a-coin"],
        ["--op", "create", "--endpoint", "/x", "--profile", "swim"],
        ["--op", "create", "--endpoint", "/x", "--header", "no colon"],
        ["--op", "create", "--endpoint", "/x", "--header", "Authorization: Bearer t"],
    ],
)
def test_an_invalid_entry_exits_2_with_one_line(here: Here, arguments: list[str]) -> None:
    done = here(*DB, "add", "--user", "ada", "--entity", "note", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    one_line(done.stderr)
    listed = here(*DB, "ls", "--json")
    assert listed.returncode != 0 or json.loads(listed.stdout) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["outbox"], 2),
        (["outbox", "ls"], 2),
        ([*DB, "ls"], 1),
        (["outbox", "--db", "no/such/directory/o.db", "ls"], 1),
        ([*DB, "dance"], 2),
    ],
)
def test_bad_usage_is_one_line(here: Here, arguments: list[str], code: int) -> None:
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    one_line(done.stderr)


@pytest.mark.parametrize("passphrase", [(), ("--passphrase-env", "PIN")])
def test_a_directory_as_db_is_named_in_the_error(
    here: Here, tmp_path: Path, passphrase: tuple[str, ...]
) -> None:
    (tmp_path / "queues").mkdir()
    new = ("--user", "ada", "--op", "create", "--entity", "note", "--endpoint", "/x")
    for command in (("ls",), ("add", *new)):
        done = here("outbox", "--db", "queues", *passphrase, *command, PIN="1234")
        assert (done.returncode, done.stdout) == (1, b"")
        assert "queues is a directory" in one_line(done.stderr)
    assert list((tmp_path / "queues").iterdir()) == []


@pytest.mark.parametrize("content", [b"", "a database"])
def test_a_file_without_an_outbox_is_refused_and_not_changed(
    here: Here, tmp_path: Path, content: bytes | str
) -> None:
    path = tmp_path / "app.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with closing(sqlite3.connect(path)) as app:
            app.execute("CREATE TABLE orders (id)")
    before = path.read_bytes()
    done = here("outbox", "--db", "app.db", "ls")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "outbox" in one_line(done.stderr)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("app.db*")} == {"app.db": before}


def test_an_unknown_entry_id_is_an_error_of_one_line(outbox: Outbox) -> None:
    outbox.add("Visit")
    for command in ("show", "retry", "discard", "resolve"):
        done = outbox.run(command, str(uuid4()))
        assert done.returncode == 1
        assert "there is no entry" in one_line(done.stderr)


def test_help_needs_no_file(here: Here) -> None:
    done = here("outbox", "drain", "--help")
    assert done.returncode == 0
    assert b"--max-seconds" in done.stdout


def test_prune_watchdog_ls_and_show_print_their_results(outbox: Outbox) -> None:
    entry = outbox.add("Visit")
    assert outbox("prune") == {"removed": 0}
    assert outbox("watchdog") == {"revived": []}
    assert outbox.run("prune").stdout == b"0 entries removed\n"
    assert outbox.run("watchdog").stdout == b"0 entries returned to the queue\n"
    assert outbox.run("ls").stdout.startswith(b"id\tuser\t#\twhat")
    assert b"idempotency_key" in outbox.run("show", entry["id"]).stdout
    assert b"pending\t1" in outbox.run("stats").stdout
    assert outbox.run("edit", entry["id"]).returncode == 2


def test_ctrl_c_finishes_the_current_entry_and_exits_0(
    outbox: Outbox, user: str, tmp_path: Path
) -> None:
    outbox.add("Visit")
    # No network and much time: the command waits for its next try.
    drain = ("drain", "--user", user, "--server", "http://127.0.0.1:9", "--max-seconds", "60")
    process = subprocess.Popen(
        [ONCEWARD, *DB, *drain, "--json"],
        cwd=tmp_path,
        env=environment(ONCEWARD_OUTBOX_TOKEN="t"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 20
    while not outbox("show", outbox("ls")[0]["id"])["attempts"] and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["ended"] == "stopped"
