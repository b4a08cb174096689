"""Our own server passes all conformance checks, and every broken server fails some."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import httpx
import msgspec
import pytest
from fastapi import Body, Depends, FastAPI, Header, HTTPException

from onceward import GuardConfig, Onceward, Principal
from onceward.guard.error_formats import ErrorInfo
from onceward_lab.conformance import (
    NoOperationError,
    Plan,
    Profile,
    ProfileError,
    RequestRefusedError,
    Result,
    SignIn,
    Verdict,
    batch,
    conform,
    plan_checks,
    read_profile,
    sequences,
)
from onceward_services.app import create_app
from onceward_services.settings import load_settings
from packages.lab.tests.command import Command, command_in
from packages.lab.tests.tiny_server import PROFILE, TinyServer
from packages.services.tests.cli.conftest import Server
from tests.docs.pages import ROOT, blocks

# All tests share one server, so they run in one worker.
pytestmark = pytest.mark.xdist_group("conform")

SECRET = "a secret for this test, long enough for HS256"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("conform")
    server = Server(
        directory,
        "--database",
        f"sqlite:///{directory}/server.db",
        "--no-jobs",
        ONCEWARD_JWT_SECRET=SECRET,
        ONCEWARD_LOG_LEVEL="ERROR",
    )
    assert server.url, server.line
    yield server
    server.stop()
    server.close()


async def checked(url: str, **options: Any) -> list[Result]:
    plans = plan_checks(options.pop("profile", None), options.pop("service", None))
    only = options.pop("only", None)
    if only is not None:
        plans = [Plan(p.profile, tuple(c for c in p.checks if c.name in only)) for p in plans]
    sign_in = options.pop("sign_in", SignIn(secret=SECRET))
    return [result async for result in conform(url, plans, sign_in, **options)]


async def checked_tiny(
    broken: str = "",
    *,
    only: set[str] | None = None,
    has_accounts: bool = False,
    is_strict: bool = False,
    **changes: Any,
) -> list[Result]:
    tiny = TinyServer(broken, has_accounts=has_accounts, is_strict=is_strict)
    return await checked(
        "http://tiny",
        profile=read_profile(json.dumps(PROFILE | changes).encode()),
        sign_in=SignIn(),
        only=only,
        transport=httpx.ASGITransport(tiny),
    )


def failures(results: list[Result]) -> dict[str, str]:
    return {r.check: r.actual for r in results if r.verdict is not Verdict.PASS}


async def test_own_server_passes_every_check_of_every_service(server: Server) -> None:
    results = await checked(server.url)
    assert failures(results) == {}
    assert {result.service for result in results} == {"walk", "planning", "routes", "field"}
    assert len(results) >= 150


async def test_checks_of_a_second_tenant_are_skipped_with_one_token(server: Server) -> None:
    token = SignIn(secret=SECRET).credentials(None)
    assert token is not None
    sign_in = SignIn(token=token.headers["Authorization"].removeprefix("Bearer "))
    needs_two = {
        "another tenant's key is not replayed",
        "another tenant's key is not revealed",
        "another tenant's resource",
        "a change of another tenant's resource",
    }
    results = await checked(
        server.url, service="field", sign_in=sign_in, only=needs_two | {"replay", "not signed in"}
    )
    assert {r.check for r in results if r.verdict is Verdict.SKIP} == needs_two
    assert set(failures(results)) == needs_two


async def test_pages_that_are_switched_off_are_skipped_and_tokens_have_issuer_and_audience(
    tmp_path: Path,
) -> None:
    app = create_app(
        load_settings(
            database_url=f"sqlite:///{tmp_path}/server.db",
            jwt_secret=SECRET,
            jwt_issuer="https://id.example",
            jwt_audience="shop,till",
            metrics_enabled=False,
            openapi_enabled=False,
        ),
        only=["routes"],
    )
    await app.state.onceward.open()
    results = await checked(
        "http://pages",
        service="routes",
        sign_in=SignIn(secret=SECRET, issuer="https://id.example", audience=("till",)),
        only={"replay", "health", "metrics", "OpenAPI"},
        transport=httpx.ASGITransport(app),
    )
    await app.state.onceward.close()
    off = "is switched off, or on another port"
    assert failures(results) == {"metrics": f"/metrics {off}", "OpenAPI": f"/openapi.json {off}"}
    assert {r.verdict for r in results} == {Verdict.PASS, Verdict.SKIP}
    assert len(results) == 4


async def test_another_server_passes_with_its_profile() -> None:
    results = await checked_tiny()
    assert failures(results) == {}
    assert len(results) >= 30


async def test_base_url_may_have_a_path() -> None:
    tiny = TinyServer(prefix="/shop")
    results = await checked(
        "http://tiny/shop",
        profile=read_profile(json.dumps(PROFILE).encode()),
        sign_in=SignIn(),
        only={"GET with a known key", "another tenant's resource", "replay"},
        transport=httpx.ASGITransport(tiny),
    )
    assert failures(results) == {}
    assert len(results) == 3


async def test_location_on_another_server_gets_no_token() -> None:
    tiny = TinyServer(prefix="http://elsewhere")
    failed = failures(
        await checked(
            "http://tiny",
            profile=read_profile(json.dumps(PROFILE).encode()),
            sign_in=SignIn(),
            only={"GET with a known key"},
            transport=httpx.ASGITransport(tiny),
        )
    )
    assert failed == {"GET with a known key": "Location is on another server"}


# Which checks each planted bug fails, and a part of what the first one says to change.
PLANTED: list[tuple[str, set[str], str]] = [
    ("does not mark replays", {"replay"}, "add the header Idempotency-Replayed: true"),
    ("replays with a new body", {"replay"}, "Store status, headers and bytes"),
    ("drops the stored headers", {"replay"}, "Store the header etag"),
    ("does not send the original request id", {"replay"}, "Send it as X-Original-Request-ID"),
    ("sends the first request's id as its own", {"replay"}, "own id as X-Request-ID"),
    ("denies effects of replays", {"replay"}, "Send Onceward-Effect: stored only with"),
    ("denies effects", {"same key, other body"}, "no such header on a mismatch"),
    ("makes its own request id", {"first request"}, "Return the X-Request-ID of the request"),
    (
        "fails on malformed JSON",
        {"malformed JSON", "invalid UTF-8", "NaN"},
        "Catch the error and respond 400",
    ),
    ("stores the key of a bad body", {"malformed JSON"}, "respond 400"),
    ("runs bodies that broke off", {"a body that breaks off"}, "Compare the bytes received"),
    ("accepts duplicate members", {"duplicate keys in JSON"}, "Parse the body strictly"),
    (
        "parses JSON leniently",
        {
            "a byte order mark",
            "nested deeper than 128",
            "a number too large for a double",
            "half a surrogate pair",
        },
        "Parse the body strictly before the key is claimed",
    ),
    ("replays any body", {"same key, other body"}, "Store the SHA-256 of the canonical body"),
    ("sends no hashes", {"same key, other body"}, "with expectedHash and receivedHash"),
    ("ignores the query", {"same key, other query"}, "Include method, path and query"),
    ("replays reads", {"GET with a known key"}, "do not look keys up for GET"),
    (
        "checks before it locks",
        {"concurrent identical requests", "concurrent requests with one key and two bodies"},
        "Claim the key before the handler runs",
    ),
    (
        "ignores the tenant",
        {"another tenant's key is not replayed", "another tenant's key is not revealed"},
        "Make the tenant the first part of the record's primary key",
    ),
    ("shows orders to all tenants", {"another tenant's resource"}, "Select by tenant and id"),
    (
        "replays to anonymous callers",
        {"a replay needs sign-in", "not signed in"},
        "Authenticate",
    ),
    ("accepts forged tokens", {"an invalid token"}, "Verify the signature"),
    (
        "sends errors as plain JSON",
        {"key missing", "same key, other body"},
        "Send errors as application/problem+json",
    ),
    ("generates missing keys", {"key missing"}, "if there is no Idempotency-Key"),
    ("treats an empty key as missing", {"key empty"}, "key_invalid"),
    ("accepts any text as a key", {"key malformed"}, "1 to 128 visible ASCII characters"),
    ("uses the first of two keys", {"two different keys in one request"}, "Read all values"),
    ("joins repeated headers", {"the same key twice in one request"}, "one by one"),
    ("does not parse quotes", {"bare and quoted key are equal"}, "Remove the quotes"),
    ("hashes volatile fields", {"volatile fields"}, "Leave these top-level fields out"),
    ("hashes the raw bytes", {"replay with other formatting"}, "canonical form"),
    ("hashes numbers as written", {"equal numbers and escapes are equal"}, "canonical form"),
    ("hashes the top level only", {"nested fields count"}, "Hash the whole body"),
    (
        "reads integers as doubles",
        {"integers beyond 2^53 keep their digits"},
        "Parse integers as integers",
    ),
    ("names no limit of batches", {"batch endpoint"}, "Send a path and a limit"),
    (
        "keeps records of batches apart",
        {"batch and single sends replay each other"},
        "Give each item its own record under its key",
    ),
    ("runs one key twice", {"one key twice in a batch"}, "in the items before it, too"),
    ("ends after a conflict", {"other body in a batch"}, "go on after a conflict"),
    ("runs lanes to their end", {"lane after a failure"}, "respond 424 batch_skipped"),
    ("stores what it skips", {"lane after a failure"}, "Store nothing for an item"),
    ("hashes placeholders", {"id of an earlier item"}, "before the fingerprint is made"),
    ("forgets failed items", {"id of a failed item"}, "Respond 424 batch_skipped if"),
    ("accepts any path in a batch", {"malformed items"}, "guarded paths of the own server"),
    ("reads any batch", {"malformed batch"}, "respond 400 to anything else"),
    ("counts no items", {"batch with too many items"}, "Count the items before"),
    ("runs batches without locks", {"overlapping batches at once"}, "Claim keys"),
    ("signs in no sender of batches", {"batch without sign-in"}, "Sign the caller in"),
    (
        "ignores the tenant",
        {"another tenant's key in a batch"},
        "Decide the tenant of each item",
    ),
]


@pytest.mark.parametrize(("broken", "checks", "change"), PLANTED)
async def test_broken_server_fails_the_checks_of_its_fault_and_gets_an_explanation(
    broken: str, checks: set[str], change: str
) -> None:
    # Only these: a report has to point to the fault.
    results = await checked_tiny(broken, only=checks | {"first request"})
    assert set(failures(results)) == checks
    failed = [result for result in results if result.verdict is Verdict.FAIL]
    assert all(result.why for result in failed)
    assert any(change in (result.change or "") for result in failed), failed
    passed = [result for result in results if result.verdict is Verdict.PASS]
    assert all(result.why is None and result.change is None for result in passed)


STRICT_PLANTED: list[tuple[str, set[str], str]] = [
    ("runs no second number", {"numbers in order"}, "execute the next one"),
    ("begins with any number", {"first number of a client"}, "Expect 1 from a client"),
    ("ignores gaps", {"gap in the numbers"}, "Refuse numbers above the next one"),
    ("forgets used numbers", {"known number with its key"}, "Keep a hash of the key"),
    ("reuses numbers", {"known number with another key"}, "used_by other_key"),
    ("replays with any number", {"stored key with another number"}, "before a replay"),
    ("numbers what has no number", {"missing and malformed numbers"}, "Respond 400 before"),
    ("names no required headers", {"missing and malformed numbers"}, "Add required_headers"),
    ("shares clients between tenants", {"another tenant's client id"}, "by tenant and client"),
    ("uses numbers without locks", {"concurrent requests with one number"}, "the transaction"),
    ("runs clients to their end", {"batch with a gap in the numbers"}, "as one lane"),
]


@pytest.mark.parametrize(("broken", "checks", "change"), STRICT_PLANTED)
async def test_server_with_broken_sequences_fails_the_check_of_its_fault(
    broken: str, checks: set[str], change: str
) -> None:
    options: dict[str, Any] = {"is_strict": True, "ordering": "strict"}
    results = await checked_tiny(broken, only=checks | {"first request"}, **options)
    assert set(failures(results)) == checks
    (failed,) = (result for result in results if result.verdict is Verdict.FAIL)
    assert failed.why
    assert change in (failed.change or ""), failed


async def test_strict_server_passes_every_check_and_another_has_none_of_sequences() -> None:
    results = await checked_tiny(is_strict=True)
    assert failures(results) == {}
    names = {check.name for check in sequences.CHECKS}
    assert names <= {result.check for result in results}
    assert not names & {result.check for result in await checked_tiny()}


async def test_own_server_with_numbered_actions_passes_every_check_of_walk(tmp_path: Path) -> None:
    server = Server(
        tmp_path,
        *("--database", f"sqlite:///{tmp_path}/server.db", "--no-jobs"),
        ONCEWARD_JWT_SECRET=SECRET,
        ONCEWARD_WALK_ORDERING="strict",
        ONCEWARD_LOG_LEVEL="ERROR",
    )
    try:
        results = await checked(server.url, service="walk")
    finally:
        server.stop()
        server.close()
    assert failures(results) == {}
    assert {check.name for check in sequences.CHECKS} <= {result.check for result in results}


async def test_every_check_of_a_profile_has_a_planted_bug() -> None:
    (plan,) = plan_checks(read_profile(json.dumps(PROFILE).encode()), None)
    planted = [*PLANTED, *STRICT_PLANTED]
    assert {check.name for check in plan.checks} == set().union(*(row[1] for row in planted))


def test_every_check_explains_in_sentences() -> None:
    for plan in plan_checks(None, None):
        for check in plan.checks:
            assert check.why.endswith("."), check.name
            assert check.change.endswith("."), check.name


NEEDS_TWO_TENANTS = {
    "another tenant's key is not replayed",
    "another tenant's key is not revealed",
    "another tenant's resource",
}
ACCOUNT = {"path": "/orders", "body": {"account": "one", "note": "{unique}"}}
OTHER_ACCOUNT = {"path": "/orders", "body": {"account": "two", "note": "{unique}"}}


async def test_second_tenant_sends_its_own_body() -> None:
    own: dict[str, Any] = {"has_accounts": True, "only": NEEDS_TWO_TENANTS, "request": ACCOUNT}
    failed = [r for r in await checked_tiny(**own) if r.verdict is Verdict.FAIL]
    assert [result.check for result in failed] == ["another tenant's key is not replayed"]
    assert "--other-body" in (failed[0].change or "")
    assert failures(await checked_tiny(**own, other_request=OTHER_ACCOUNT)) == {}
    leaks = await checked_tiny("ignores the tenant", **own, other_request=OTHER_ACCOUNT)
    assert set(failures(leaks)) == {
        "another tenant's key is not replayed",
        "another tenant's key is not revealed",
    }
    refused = await checked_tiny(**own, other_request=ACCOUNT)
    assert "other_request in the profile" in str(refused[0].change)


def payments_app(database: Path, *, batch: str | None = None) -> FastAPI:
    """Return an app with its own errors and sign-in, and without texts in its bodies."""

    def own_format(error: ErrorInfo) -> dict[str, Any]:
        return {"error": {"code": error.code, "message": error.message}}

    async def current_user(authorization: Annotated[str, Header()] = "") -> str:
        if authorization not in {"Bearer ada", "Bearer bob"}:
            raise HTTPException(401, "who are you?")
        return authorization

    async def principal(user: Annotated[str, Depends(current_user)]) -> Principal:
        return Principal(tenant=user, actor=user)

    app = FastAPI()
    onceward = Onceward(
        f"sqlite:///{database}", principal=principal, config=GuardConfig(error_format=own_format)
    )
    onceward.install(app, batch=batch)

    @app.post("/payments", status_code=201)
    @onceward.guard()
    async def pay(amount: Annotated[int, Body(embed=True)]) -> dict[str, Any]:
        return {"id": uuid4().hex, "amount": amount}

    return app


PAYMENTS = {
    "version": 1,
    "request": {"path": "/payments", "body": {"amount": "{unique_number}"}},
    "sign_in": {"Authorization": "Bearer ada"},
    "other_sign_in": {"Authorization": "Bearer bob"},
    "gives_location": False,
}


@pytest.mark.parametrize(
    ("settings", "failed"),
    [
        ({"code_at": "error.code"}, set()),
        ({"statuses_only": True}, set()),
        ({"code_at": "error.code", "own_errors": False}, {"not signed in"}),
        ({"code_at": "code"}, {"key missing"}),
    ],
)
async def test_app_with_its_own_errors_passes_if_the_profile_says_where_the_code_is(
    tmp_path: Path, settings: dict[str, Any], failed: set[str]
) -> None:
    results = await checked(
        "http://payments",
        profile=read_profile(json.dumps(PAYMENTS | settings).encode()),
        sign_in=SignIn(),
        only=failed or None,
        transport=httpx.ASGITransport(payments_app(tmp_path / "app.db")),
    )
    found = {r.check: r.actual for r in results if r.verdict is Verdict.FAIL}
    assert set(found) == failed
    assert results
    if failed:
        assert "with no code at" in found.popitem()[1]


async def test_server_without_a_batch_endpoint_gets_one_line_about_it(tmp_path: Path) -> None:
    results = await checked(
        "http://payments",
        profile=read_profile(json.dumps(PAYMENTS | {"statuses_only": True}).encode()),
        sign_in=SignIn(),
        only={"first request", "batch endpoint", "one key twice in a batch", "malformed batch"},
        transport=httpx.ASGITransport(payments_app(tmp_path / "app.db")),
    )
    assert [(result.check, result.verdict) for result in results] == [
        ("first request", Verdict.PASS),
        ("batch endpoint", Verdict.SKIP),
    ]
    assert results[1].actual == "not offered: responses have no header Onceward-Batch"


async def test_app_with_its_own_errors_and_sign_in_passes_the_checks_of_batches(
    tmp_path: Path,
) -> None:
    results = await checked(
        "http://payments",
        profile=read_profile(json.dumps(PAYMENTS | {"code_at": "error.code"}).encode()),
        sign_in=SignIn(),
        only={check.name for check in batch.CHECKS},
        transport=httpx.ASGITransport(payments_app(tmp_path / "app.db", batch="/all")),
    )
    assert failures(results) == {}
    assert len(results) >= 10


async def test_operation_that_does_not_exist_is_reported_before_the_checks(tmp_path: Path) -> None:
    app = payments_app(tmp_path / "app.db")
    wrong = PAYMENTS | {"request": {"path": "/nope", "body": {"amount": "{unique_number}"}}}
    with pytest.raises(NoOperationError, match="POST /nope returns 404: check --path"):
        await checked(
            "http://payments",
            profile=read_profile(json.dumps(wrong).encode()),
            sign_in=SignIn(),
            transport=httpx.ASGITransport(app),
        )
    with pytest.raises(NoOperationError, match="for your own app give --path and --body"):
        await checked("http://payments", transport=httpx.ASGITransport(app))


async def test_refused_request_is_reported_with_its_response_before_the_checks(
    tmp_path: Path,
) -> None:
    wrong = PAYMENTS | {"request": {"path": "/payments", "body": {"amount": "five {unique}"}}}
    with pytest.raises(RequestRefusedError) as refused:
        await checked(
            "http://payments",
            profile=read_profile(json.dumps(wrong).encode()),
            sign_in=SignIn(),
            transport=httpx.ASGITransport(payments_app(tmp_path / "app.db")),
        )
    line = str(refused.value)
    assert line.startswith("POST /payments should accept the request of the profile, but responds")
    assert 'responds 422 {"detail":[{"type":"int_parsing","loc":["body","amount"]' in line
    assert "correct --body or --path" in line
    assert "{unique_number}" in line


async def test_wrong_error_format_is_detected() -> None:
    failed = failures(await checked_tiny(error_format="envelope", own_errors=False))
    assert {"key missing", "same key, other body", "not signed in"} <= set(failed)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (b"{", "truncated"),
        (b"[]", "object"),
        (b'{"version":1}', "request"),
        (json.dumps(PROFILE | {"version": 2}).encode(), "version should be 1"),
        (json.dumps(PROFILE | {"surprise": 1}).encode(), "surprise"),
        (json.dumps(PROFILE | {"error_format": "polite"}).encode(), "polite"),
        (json.dumps(PROFILE | {"request": {"path": "x", "body": {}}}).encode(), "begin with"),
        (json.dumps(PROFILE | {"request": {"path": "/x", "body": {}}}).encode(), "{unique}"),
        (json.dumps(PROFILE | {"sign_in": {"A": "\n"}}).encode(), "visible ASCII"),
    ],
)
def test_invalid_profile_is_refused_with_one_line(profile: bytes, expected: str) -> None:
    with pytest.raises(ProfileError, match="cannot be used") as caught:
        read_profile(profile)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_docs_page_has_a_valid_profile_and_names_every_field() -> None:
    page = ROOT / "docs/how-to/conform.md"
    shown = [block.text for block in blocks(page) if block.language == "json"]
    assert [read_profile(text.encode()).name for text in shown] == ["orders"]
    text = page.read_text(encoding="utf-8")
    for field in msgspec.structs.fields(Profile):
        assert f"`{field.name}`" in text


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    return command_in(tmp_path, "conform", monkeypatch, capsys)


def test_command_prints_lines_over_a_pipe_and_exits_with_0(
    server: Server, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCEWARD_JWT_SECRET", SECRET)
    done = command(server.url, "--service", "routes")
    assert done.code == 0, done
    *lines, last = done.out.splitlines()
    assert all(line.split("\t")[:2] == ["pass", "routes"] for line in lines)
    assert last == f"{len(lines)} passed, 0 failed, 0 skipped: the server conforms"
    assert "\x1b" not in done.out


def test_command_prints_json_and_exits_with_1_if_a_check_fails(
    server: Server, command: Command, tmp_path: Path
) -> None:
    profile = {
        "version": 1,
        "error_format": "envelope",
        "key_format": "uuid4",
        "request": {"path": "/api/v1/contacts", "body": {"name": "{unique}"}},
    }
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    done = command(server.url, "--profile", "profile.json", "--secret", SECRET, "--json")
    assert done.code == 1, done
    report = json.loads(done.out)
    assert report["failed"] == sum(r["verdict"] == "fail" for r in report["results"]) > 0
    assert report["passed"] > 0
    assert set(report["results"][0]) == {
        "service",
        "check",
        "section",
        "expected",
        "actual",
        "verdict",
        "why",
        "change",
    }
    failed = [result for result in report["results"] if result["verdict"] == "fail"]
    assert all(result["why"] and result["change"] for result in failed)


def test_command_takes_the_operation_and_the_other_tenants_request_as_options(
    server: Server, command: Command, tmp_path: Path
) -> None:
    body = {"start": {"lat": 55.95, "lon": -3.19}, "minutes": 30, "interests": ["{unique}"]}
    (tmp_path / "other.json").write_text(json.dumps(body | {"minutes": 60}))
    options = ["--secret", SECRET, "--path", "/api/v1/routes", "--body", json.dumps(body)]
    done = command(server.url, *options, "--other-body", "@other.json")
    # Keys are optional in the routes service, which only a profile can say.
    assert done.code == 1, done
    lines = [line.split("\t") for line in done.out.splitlines()[:-1]]
    failed = {line[3] for line in lines if line[0] == "fail"}
    assert failed == {"key missing"}
    assert [line[0] for line in lines if line[3] == "key missing"] == ["fail", "why", "change"]
    assert [line[0] for line in lines if line[3] == "another tenant's resource"] == ["pass"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--token", "bad"],
        ["--secret", "another secret that is long enough to sign with"],
        ["--secret", SECRET, "--other-token", "bad"],
    ],
)
def test_refused_sign_in_is_one_line_and_exits_with_2(
    arguments: list[str], server: Server, command: Command
) -> None:
    done = command(server.url, *arguments)
    assert (done.code, done.out) == (2, "")
    assert "the server refuses the sign-in" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["http://127.0.0.1:9", "--secret", SECRET], "no server responds at http://127.0.0.1:9"),
        (["ftp://somewhere"], "the URL should be like"),
        (["http://127.0.0.1:99999"], "the URL should be like"),
        (["http://somewhere.example"], "no credentials: give --token"),
        (["http://127.0.0.1:9", "--service", "tea"], "--service should be one of"),
        (["http://127.0.0.1:9", "--service", "walk", "--profile", "x"], "give one of them"),
        (["http://127.0.0.1:9", "--profile", "nowhere.json"], "nowhere.json"),
        (["http://127.0.0.1:9", "--secret", "short"], "secret"),
        (["http://127.0.0.1:9", "--token", "é"], "visible ASCII"),
        (["http://127.0.0.1:9", "--path", "/x"], "give both --path and --body"),
        (["http://127.0.0.1:9", "--path", "/x", "--body", "{"], "--body is not JSON"),
        (["http://127.0.0.1:9", "--path", "/x", "--body", "@gone.json"], "gone.json"),
        (["http://127.0.0.1:9", "--path", "/x", "--body", "{}"], "{unique}"),
        (["http://127.0.0.1:9", "--service", "walk", "--path", "/x"], "leave out --path"),
        (
            [
                *("http://127.0.0.1:9", "--path", "/x", "--body", '{"a":"{unique}"}'),
                *("--other-body", '{"a":1}'),
            ],
            "other_request.body should have {unique}",
        ),
    ],
)
def test_bad_input_is_one_line_and_exits_with_2(
    arguments: list[str], expected: str, command: Command
) -> None:
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err
    assert done.err.count("\n") == 1
