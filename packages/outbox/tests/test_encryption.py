"""Encryption at rest: no plaintext on the disk, clear errors for a wrong passphrase."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from onceward.errors import ConfigurationError, UsageError
from onceward_outbox import NewEntry, Outbox, OutboxQueue, Status
from onceward_outbox.errors import FileBusyError, OutboxFileError, WrongPassphraseError
from packages.outbox.tests.outcomes import fail
from packages.outbox.tests.queue_harness import KEY, Lab, local, new
from packages.outbox.tests.queue_processes import fork_server

MARK = "xyzzy-plugh-payload"
PLAIN = b"SQLite format 3\x00"
OTHER = bytes(reversed(KEY))


@pytest.fixture
def secret(quick_path: Path) -> Iterator[Lab]:
    made = Lab(quick_path / "outbox.db", passphrase=KEY)
    yield made
    made.close()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}


def test_no_plaintext_reaches_the_file_its_log_or_a_temporary_file(
    secret: Lab, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = quick_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("SQLITE_TMPDIR", str(temporary))
    ref = local()
    secret.queue.enqueue_many(
        [
            new(payload={"note": f"{MARK} {n} " + "x" * 500}, headers={"X-H": MARK}, lane=MARK)
            for n in range(2000)
        ]
    )
    secret.add(local_id=ref, payload={"note": MARK}, entity_type=MARK)
    fail(secret.queue, secret.claim(), error=MARK)
    # Sorting all of it, and undoing a large change, is where temporary files would come from.
    with secret.queue.transaction() as connection:
        rows = connection.execute(
            "SELECT payload FROM offline_sync_queue ORDER BY payload || id DESC"
        ).fetchall()
        assert len(rows) == 2001
    with suppress(ZeroDivisionError), secret.queue.transaction() as connection:
        connection.execute(
            "UPDATE offline_sync_queue SET payload = payload || ?", (MARK,)
        ).fetchall()
        raise ZeroDivisionError
    found = contents(secret.path)
    assert {"outbox.db", "outbox.db-wal"} <= set(found)
    assert len(found["outbox.db-wal"]) > 100_000
    assert list(temporary.iterdir()) == []
    secret.queue.close()
    found |= {f"closed {name}": data for name, data in contents(secret.path).items()}
    for data in found.values():
        assert MARK.encode() not in data
        assert b"/api/v1/activities" not in data
        assert ref.encode() not in data
        assert PLAIN not in data
        assert b"offline_sync_queue" not in data


def test_a_plain_file_is_readable_without_a_key(lab: Lab) -> None:
    lab.add(payload={"note": MARK})
    lab.queue.close()
    data = lab.path.read_bytes()
    assert data.startswith(PLAIN)
    assert MARK.encode() in data


def test_the_file_is_readable_by_its_owner_only(secret: Lab) -> None:
    secret.add()
    for file in secret.path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0


def test_the_file_opens_with_its_passphrase_and_no_other(quick_path: Path) -> None:
    path = quick_path / "q.db"
    with OutboxQueue.open(path, passphrase='it\'s a "secret" \u00e9') as queue:
        queue.add_user("ada")
        entry = queue.enqueue(new())
    before = path.read_bytes()
    for wrong in ("it's a secret", "", KEY):
        expected = ConfigurationError if wrong == "" else WrongPassphraseError
        with pytest.raises(expected):
            OutboxQueue.open(path, passphrase=wrong)
    with pytest.raises(WrongPassphraseError, match="is encrypted"):
        OutboxQueue.open(path)
    assert path.read_bytes() == before
    with OutboxQueue.open(path, passphrase='it\'s a "secret" \u00e9') as queue:
        assert queue.get(entry.id).decoded() == entry.decoded()


def test_a_wrong_passphrase_does_not_change_the_log(secret: Lab) -> None:
    entry = secret.add()
    before = contents(secret.path)
    del before["outbox.db-shm"]  # who reads what; not data
    assert len(before["outbox.db-wal"]) > 0
    with pytest.raises(WrongPassphraseError, match="does not open"):
        OutboxQueue.open(secret.path, passphrase=OTHER)
    assert contents(secret.path) | before == contents(secret.path)
    assert secret.queue.get(entry.id).status is Status.PENDING


def test_a_log_left_by_a_crash_survives_wrong_passphrases(secret: Lab, quick_path: Path) -> None:
    entry = secret.add()
    crashed = quick_path / "crashed"
    crashed.mkdir()
    for name in ("outbox.db", "outbox.db-wal"):
        (crashed / name).write_bytes((quick_path / name).read_bytes())
    before = contents(crashed / "outbox.db")
    for passphrase in (OTHER, "wrong", None):
        with pytest.raises(WrongPassphraseError):
            OutboxQueue.open(crashed / "outbox.db", passphrase=passphrase)
        assert before.items() <= contents(crashed / "outbox.db").items()
    with OutboxQueue.open(crashed / "outbox.db", passphrase=KEY) as queue:
        assert queue.get(entry.id).payload == entry.payload


def test_without_a_passphrase_both_drivers_report_an_encrypted_file(secret: Lab) -> None:
    secret.queue.close()
    for driver in ("sqlite3", "apsw"):
        with pytest.raises(WrongPassphraseError, match="is encrypted"):
            OutboxQueue.open(secret.path, driver=driver)


def test_a_plain_file_opened_with_a_passphrase_is_reported_as_plain(lab: Lab) -> None:
    entry = lab.add()
    lab.queue.close()
    before = lab.path.read_bytes()
    with pytest.raises(WrongPassphraseError, match="not encrypted"):
        OutboxQueue.open(lab.path, passphrase=KEY)
    assert lab.path.read_bytes() == before
    assert lab.open().get(entry.id).id == entry.id


@pytest.mark.parametrize("passphrase", [b"too short", b"", "", "nul\0inside"])
def test_an_invalid_key_is_refused(quick_path: Path, passphrase: str | bytes) -> None:
    path = quick_path / "q.db"
    with pytest.raises(ConfigurationError):
        OutboxQueue.open(path, passphrase=passphrase)
    assert not path.exists()


def test_the_format_is_sqlciphers(quick_path: Path) -> None:
    path = quick_path / "q.db"
    with OutboxQueue.open(path, passphrase="open sesame, please") as queue:
        queue.add_user("ada")
    # As any tool that knows SQLCipher 4 would open it: its page size, key derivation and HMAC.
    connection = apsw.Connection(str(path))
    for name, value in (
        ("cipher", "'sqlcipher'"),
        ("kdf_iter", 256000),
        ("hmac_use", 1),
        ("kdf_algorithm", 2),
        ("hmac_algorithm", 2),
        ("legacy_page_size", 4096),
        ("legacy", 4),
        ("key", "'open sesame, please'"),
    ):
        connection.execute(f"PRAGMA {name} = {value}").fetchall()
    assert connection.execute("SELECT id FROM users").fetchall() == [("ada",)]
    connection.close()


def test_the_key_can_be_changed(secret: Lab) -> None:
    entries = secret.queue.enqueue_many([new() for _ in range(300)])
    secret.queue.change_passphrase(OTHER)
    more = secret.add()  # it goes on at once
    secret.queue.close()
    with pytest.raises(WrongPassphraseError):
        secret.open()
    secret.options["passphrase"] = OTHER
    assert secret.reopen().entries(limit=1000) == [*entries, more]
    with secret.queue.transaction() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
        assert connection.execute("PRAGMA synchronous").fetchall() == [(2,)]


def test_the_key_is_not_changed_while_another_process_has_the_file_open(secret: Lab) -> None:
    entry = secret.add()
    with secret.open() as other:
        with pytest.raises(FileBusyError, match="open elsewhere"):
            secret.queue.change_passphrase(OTHER)
        assert other.get(entry.id) == entry
    assert secret.reopen().get(entry.id) == entry


def test_the_key_is_not_changed_inside_a_transaction(secret: Lab) -> None:
    with pytest.raises(UsageError), secret.queue.transaction():
        secret.queue.change_passphrase(OTHER)


def test_a_plain_file_can_be_encrypted(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db", driver="apsw")
    entry = lab.add(payload={"note": MARK})
    lab.queue.change_passphrase(KEY)
    assert lab.queue.get(entry.id) == entry
    lab.reopen(passphrase=KEY)
    assert lab.queue.get(entry.id) == entry
    for data in contents(lab.path).values():
        assert MARK.encode() not in data
    lab.queue.close()


def test_a_plain_file_of_the_standard_library_is_not_encrypted_in_place(lab: Lab) -> None:
    with pytest.raises(UsageError, match="apsw"):
        lab.queue.change_passphrase(KEY)


def test_a_kill_while_the_key_is_changed_leaves_the_old_key_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "q.db"
    lab = Lab(path, passphrase=KEY)
    count = 1500
    lab.queue.enqueue_many([new(payload={"n": n, "x": "y" * 300}) for n in range(count)])
    lab.queue.close()
    whole = path.read_bytes()
    outcomes = []
    with fork_server() as processes:
        for wait in (0.0, 0.03, 0.05, 0.07, 0.09, 0.12, 0.15, 0.2, 0.25, None):
            path.write_bytes(whole)
            processes.run(("change_key", {"path": str(path)}), kill_after=wait)
            opened = []
            for key in (KEY, OTHER):
                with suppress(OutboxFileError), OutboxQueue.open(path, passphrase=key) as queue:
                    queue.check_integrity()
                    assert queue.stats().counts[Status.PENDING] == count
                    opened.append(key)
            assert len(opened) == 1
            outcomes += opened
            for leftover in path.parent.glob("q.db-*"):
                leftover.unlink()
    assert outcomes[0] == KEY
    assert outcomes[-1] == OTHER


def test_a_kill_while_a_plain_file_is_encrypted_leaves_no_clear_text_for_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.db"
    lab = Lab(path, driver="apsw")
    entries = lab.queue.enqueue_many([new(payload={"note": MARK}) for _ in range(50)])
    lab.queue.close()
    with fork_server() as processes:
        for step in ("before the key", "after the key"):
            processes.run(("encrypt", {"path": str(path), "kill": step}))
            copy = tmp_path / "q.db-rekey"
            assert (MARK.encode() in copy.read_bytes()) is (step == "before the key")
            for file in tmp_path.iterdir():
                assert file.stat().st_mode & 0o777 == 0o600, file.name
            with OutboxQueue.open(path, driver="apsw") as queue:
                assert not list(tmp_path.glob("q.db-rekey*"))
                assert queue.entries(limit=100) == entries


def test_encrypted_and_plain_queues_behave_alike(secret: Lab) -> None:
    ref = local()
    secret.add(local_id=ref)
    child = secret.add(payload={"a": ref})
    secret.send(server_id=5)
    assert secret.claim().entry.id == child.id
    assert secret.queue.mappings("ada", [ref]) == {ref: 5}
    with pytest.raises(Exception, match="already"):
        secret.queue.enqueue(
            NewEntry(
                user_id="ada",
                operation="create",
                entity_type="activity",
                endpoint="/x",
                id=child.id,
            )
        )


RAW = "00112233445566778899aabbccddeeff" * 2
WEAK = ["11 letters.", f"x'{RAW}'", f"X'{RAW}'", f"raw:{RAW}", f"RAW:{RAW}", f"x'{RAW}{RAW[:32]}'"]


@pytest.mark.parametrize("passphrase", WEAK)
def test_a_weak_passphrase_of_a_new_file_is_refused(quick_path: Path, passphrase: str) -> None:
    path = quick_path / "q.db"
    with pytest.raises(ConfigurationError, match="allow_weak_passphrase") as caught:
        OutboxQueue.open(path, passphrase=passphrase)
    assert passphrase not in str(caught.value)
    assert not path.exists()
    with pytest.raises(ConfigurationError, match="allow_weak_passphrase"):
        Outbox.open(path, server="https://shop.example", passphrase=passphrase)
    assert not path.exists()


def test_a_file_may_not_be_changed_to_a_weak_passphrase(secret: Lab) -> None:
    entry = secret.add()
    with pytest.raises(ConfigurationError, match="fewer than 12 characters"):
        secret.queue.change_passphrase("short")
    assert secret.queue.get(entry.id).id == entry.id
    secret.reopen()
    secret.queue.change_passphrase(f"x'{RAW}'", allow_weak_passphrase=True)
    secret.reopen(passphrase=bytes.fromhex(RAW))  # SQLCipher has taken the text as the key
    assert secret.queue.get(entry.id).id == entry.id


def test_an_existing_file_with_a_weak_passphrase_opens_with_a_warning_and_can_be_changed(
    quick_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, weak, strong = quick_path / "q.db", f"raw:{RAW}", KEY
    with OutboxQueue.open(path, passphrase=weak, allow_weak_passphrase=True) as queue:
        queue.add_user("ada")
        entry = queue.enqueue(new())
    with OutboxQueue.open(path, passphrase=weak, allow_weak_passphrase=True):
        assert caplog.text == ""
    with OutboxQueue.open(path, passphrase=weak) as queue:
        assert queue.get(entry.id).id == entry.id
        assert "change_passphrase" in caplog.text
        assert RAW not in caplog.text
        queue.change_passphrase(strong)
    caplog.clear()
    with OutboxQueue.open(path, passphrase=strong) as queue:
        assert queue.get(entry.id).id == entry.id
    assert caplog.text == ""
