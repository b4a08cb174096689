"""Our own server holds against every attack, and a weak one against none."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onceward import open_store
from onceward_lab.attack.lost_commits import lose_commit
from onceward_lab.attack.run import ATTACKS, attack
from onceward_lab.attack.target import Attack, Limits, Target
from onceward_lab.conformance import BUILT_IN, Profile, Result, SignIn, Verdict, read_profile
from onceward_lab.conformance.harness import CheckFailedError
from packages.lab.tests.command import Command, command_in
from packages.lab.tests.weak_server import weak_server
from packages.services.tests.cli.conftest import Server

# All tests share one server, so they run in one worker.
pytestmark = pytest.mark.xdist_group("attack")

SECRET = "a secret for this test, long enough for HS256"
ISSUER, AUDIENCE = "https://id.example", "shop"
SIGN_IN = SignIn(secret=SECRET, issuer=ISSUER, audience=(AUDIENCE,))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any
) -> Iterator[tuple[Server, str]]:
    directory = tmp_path_factory.mktemp("attack")
    redis_server.start()
    server = Server(
        directory,
        "--database",
        f"sqlite:///{directory}/server.db",
        "--no-jobs",
        ONCEWARD_JWT_SECRET=SECRET,
        ONCEWARD_JWT_ISSUER=ISSUER,
        ONCEWARD_JWT_AUDIENCE=AUDIENCE,
        ONCEWARD_REDIS_URL=redis_server.url(),
        ONCEWARD_LOG_LEVEL="ERROR",
        # Shorter than the usual ones, and longer than the tests' process is stopped when others
        # use the machine.
        ONCEWARD_HEAD_SECONDS="3",
        ONCEWARD_BODY_SECONDS="3",
    )
    assert server.url, server.line
    yield server, redis_server.url()
    server.stop()
    server.close()


async def attacked(
    url: str,
    profile: Profile,
    redis_url: str,
    lose_commit: Callable[[str], Awaitable[None]],
    attacks: Sequence[Attack] = ATTACKS,
    **limits: Any,
) -> list[Result]:
    running = attack(
        url,
        profile,
        SIGN_IN,
        limits=Limits(**limits),
        redis_url=redis_url,
        lose_commit=lose_commit,
        attacks=attacks,
    )
    return [result async for result in running]


def expect_all(results: list[Result], verdict: Verdict) -> None:
    """Fail with one short line per attack, so that the first lines of a log are enough."""
    others = [f"{r.check}: {r.verdict}: {r.actual}" for r in results if r.verdict is not verdict]
    if others:
        pytest.fail("\n".join(others), pytrace=False)


async def test_own_server_holds_against_every_attack(server: tuple[Server, str]) -> None:
    running, redis_url = server
    slow = [each for each in ATTACKS if each.group == "slow"]
    others = [each for each in ATTACKS if each.group != "slow"]
    store = open_store(f"sqlite:///{running.directory}/server.db")
    await store.open()
    # Those that wait for deadlines run at the same time as the others.
    found = await asyncio.gather(
        *(
            attacked(
                running.url,
                BUILT_IN["field"],
                redis_url,
                partial(lose_commit, store),
                attacks,
                connections=60,
                patience_seconds=60,
                body_bytes=150_000,
                # Other tests run meanwhile: only a server that is blocked is too slow.
                health_ms=5_000,
            )
            for attacks in (others, slow)
        )
    )
    await store.close()
    results = [result for each in found for result in each]
    expect_all(results, Verdict.PASS)
    assert len(results) == len(ATTACKS) >= 30
    assert "Traceback" not in running.stderr()


async def test_weak_server_holds_against_no_attack(redis_url: str) -> None:
    document = {"version": 1, "request": {"path": "/orders", "body": {"item": "{unique}"}}}
    async with weak_server(redis_url) as weak:
        results = await attacked(
            weak.url,
            read_profile(json.dumps(document).encode()),
            redis_url,
            weak.forget,
            connections=30,
            patience_seconds=0.5,
            body_bytes=150_000,
            health_ms=20,
        )
    expect_all(results, Verdict.FAIL)
    assert len(results) == len(ATTACKS)
    assert all(result.why and result.change for result in results)


def test_every_attack_explains_in_sentences() -> None:
    for each in ATTACKS:
        assert each.why.endswith("."), each.name
        assert each.change.endswith("."), each.name
    assert len({each.name for each in ATTACKS}) == len(ATTACKS)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    return command_in(tmp_path, "attack", monkeypatch, capsys)


OPTIONS = ("--secret", SECRET, "--issuer", ISSUER, "--audience", AUDIENCE)


def test_command_prints_what_held_and_exits_with_0(
    server: tuple[Server, str], command: Command
) -> None:
    done = command(server[0].url, *OPTIONS, "--group", "tokens")
    lines = done.out.splitlines()
    assert (done.code, lines[-1]) == (0, "8 held, 0 broken, 0 skipped: the server held")
    assert lines[0].startswith("held\ttokens\ta used key without a token\texpected 401 or 403")


def test_command_exits_with_1_and_prints_what_to_change(
    server: tuple[Server, str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def succeed(target: Target) -> str:
        assert await target.write() == 201
        raise CheckFailedError("201, expected 401")

    one = Attack("an attack", "tokens", "401", succeed, why="It matters.", change="Refuse it.")
    monkeypatch.setattr("onceward_lab.cli.attack.ATTACKS", (one,))
    done = command(server[0].url, *OPTIONS)
    assert done.code == 1
    assert done.out.splitlines() == [
        "BROKEN\ttokens\tan attack\texpected 401; actual 201, expected 401",
        "why\ttokens\tan attack\tIt matters.",
        "change\ttokens\tan attack\tRefuse it.",
        "0 held, 1 broken, 0 skipped: THE SERVER DID NOT HOLD",
    ]
    found = json.loads(command(server[0].url, *OPTIONS, "--json").out)
    assert (found["held"], found["broken"], found["skipped"]) == (0, 1, 0)
    assert found["results"][0]["change"] == "Refuse it."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("http://shop.example",), "--yes-i-own-this-server"),
        (("http://192.0.2.1:8000", "--token", "x"), "--yes-i-own-this-server"),
        (("http://127.0.0.1:1", "--group", "nukes"), "--group should be one of tokens"),
        (("http://127.0.0.1:1", "--path", "/x"), "give both --path and --body"),
        (("http://127.0.0.1:1",), "no credentials"),
        (("http://127.0.0.1:1", "--token", "x"), "no server responds"),
        (("ftp://127.0.0.1",), "the URL should be like"),
    ],
)
def test_bad_input_is_refused_with_one_line(
    command: Command, arguments: tuple[str, ...], expected: str
) -> None:
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err
    assert len(done.err.splitlines()) == 1


def test_operation_that_refuses_its_own_request_is_reported(
    server: tuple[Server, str], command: Command
) -> None:
    body = ("--body", '{"a": "{unique}"}')
    done = command(server[0].url, *OPTIONS, "--path", "/nope", *body)
    assert (done.code, "POST /nope returns 404: check --path" in done.err) == (2, True), done
    done = command(server[0].url, "--token", "x", "--path", "/api/v1/contacts", *body)
    assert (done.code, "returns 401: check --token" in done.err) == (2, True), done
