"""The core satisfies every case in `conformance/`, and the generated files are up to date."""

import base64
import hashlib
import json
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward import SINGLE_TENANT, Onceward, Policy
from onceward.errors import (
    BatchSkippedError,
    BatchTooLargeError,
    BodyInvalidError,
    KeyInvalidError,
    SequenceInvalidError,
    StaleActionError,
)
from onceward.guard.error_formats import render_error
from onceward.guard.idempotency import (
    Expired,
    Fresh,
    InProgress,
    Mismatched,
    Replayed,
    decide,
)
from onceward.guard.policy import ErrorFormat
from onceward.ports import HELD
from onceward.records import Record, RecordId, RequestFingerprint
from onceward_lab.vectors import GENERATED, VERSION, as_json, entry_of, generate, main
from onceward_outbox import Event, EventKind, OutboxQueue, Profile
from onceward_outbox.drain import Drain
from onceward_outbox.entry import NewEntry, Status, Transition, after
from onceward_outbox.errors import EntryInvalidError, TransitionError
from onceward_outbox.transport import Request, Response
from onceward_protocol.batch import Results, check_headers, parse_batch, parse_item
from onceward_protocol.effect import is_conclusive
from onceward_protocol.endpoint_validation import check_endpoint
from onceward_protocol.error_codes import CODES
from onceward_protocol.fingerprint import body_hash, canonical_json
from onceward_protocol.keys import KeyFormat, parse_key
from onceward_protocol.local_ids import (
    references,
    replace_in_body,
    replace_in_headers,
    replace_in_path,
)
from onceward_protocol.response_classification import BY_CODE, TryLater, classify
from onceward_protocol.retry import CLIENT, DEVICE, QUEUE, WORKER, is_transient, parse_retry_after
from onceward_protocol.sequence import parse_sequence
from onceward_protocol.staleness import (
    check_not_stale,
    check_submitted_after_generated,
    parse_instant,
)
from onceward_services.field.policy import POLICY as FIELD
from onceward_services.planning.policy import POLICY as PLANNING
from onceward_services.routes.policy import POLICY as ROUTES
from onceward_services.walk.outbox_profile import PROFILE as WALK_OUTBOX
from onceward_services.walk.policy import POLICY as WALK

CONFORMANCE = Path(__file__).parents[3] / "conformance"
FILES = sorted(path.name for path in CONFORMANCE.glob("*.json"))
MANUAL = {
    "batch.json",
    "canonical.json",
    "decisions.json",
    "endpoints.json",
    "keys.json",
    "local_ids.json",
    "sequences.json",
    "staleness.json",
}
PRESETS = {"device": DEVICE, "queue": QUEUE, "client": CLIENT, "worker": WORKER}
POLICIES = {"walk": WALK, "planning": PLANNING, "routes": ROUTES, "field": FIELD}
# Part of our error message for each reason; clients see the code only.
REASONS = {
    "byte_order_mark": "byte order mark",
    "duplicate_key": "same key twice",
    "empty": "empty",
    "integer_too_long": "4300",
    "invalid_utf8": "UTF-8",
    "lone_surrogate": "surrogate",
    "not_json": "not JSON",
    "number_too_large": "too large for a double",
    "too_deep": "deeper than 128",
}


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CONFORMANCE / name).read_text(encoding="utf-8"))
    return content


# -- the cases -------------------------------------------------------------------------------------


def canonical_holds(case: dict[str, Any]) -> None:
    raw = (
        base64.b64decode(case["input_base64"]) if "input_base64" in case else case["input"].encode()
    )
    volatile = frozenset(case.get("volatile", ()))
    if case["about"] == "body":
        assert body_hash(raw, case["content_type"]) == case["sha256"]
    elif "refused" in case:
        with pytest.raises(BodyInvalidError, match=REASONS[case["reason"]]) as caught:
            canonical_json(raw, volatile=volatile)
        assert caught.value.kind == case["refused"]
    else:
        out = canonical_json(raw, volatile=volatile)
        assert out == case["canonical"].encode()
        assert hashlib.sha256(out).hexdigest() == case["sha256"]


def keys_hold(case: dict[str, Any]) -> None:
    values = (
        [base64.b64decode(value) for value in case["values_base64"]]
        if "values_base64" in case
        else [value.encode("ascii") for value in case["values"]]
    )
    if "refused" in case:
        with pytest.raises(KeyInvalidError) as caught:
            parse_key(values, KeyFormat(case["format"]))
        assert caught.value.kind == case["refused"]
    else:
        assert parse_key(values, KeyFormat(case["format"])) == case["key"]


def decisions_hold(case: dict[str, Any]) -> None:
    if case["about"] == "storing":
        ttl = POLICIES[case["policy"]].ttl_for(case["status"])
        assert (None if ttl is None else ttl.total_seconds()) == case["ttl_seconds"]
        return
    known = case["known"]
    decision = decide(
        HELD if known == "held" else known and record_of(known),
        RequestFingerprint(case["request"]["body_hash"], case["request"]["fingerprint"]),
        datetime.fromisoformat(case["now"]),
    )
    kinds = {
        "fresh": Fresh,
        "replay": Replayed,
        "mismatch": Mismatched,
        "in_progress": InProgress,
        "expired": Expired,
    }
    assert isinstance(decision, kinds[case["decision"]])
    if isinstance(decision, Mismatched):
        assert decision.expected_hash == case["expected_hash"]
        assert decision.received_hash == case["received_hash"]


def record_of(known: dict[str, str]) -> Record:
    expires_at = datetime.fromisoformat(known["expires_at"])
    return Record(
        id=RecordId("tenant", "endpoint", "key"),
        fingerprint=RequestFingerprint(known["body_hash"], known["fingerprint"]),
        status=201,
        headers={},
        body=b"",
        created_at=expires_at - timedelta(days=1),
        expires_at=expires_at,
        request_id="request",
        correlation_id="correlation",
    )


def staleness_holds(case: dict[str, Any]) -> None:
    grace = timedelta(hours=case["grace_hours"])
    outcome, age_days = "passes", None
    try:
        generated_at = parse_instant(case["client_generated_at"], "clientGeneratedAt")
        if case["about"] == "age":
            check_not_stale(
                generated_at,
                datetime.fromisoformat(case["now"]),
                cap=timedelta(days=case["cap_days"]),
                grace=grace,
            )
        else:
            submitted_at = parse_instant(case["client_submitted_at"], "clientSubmittedAt")
            check_submitted_after_generated(submitted_at, generated_at, grace=grace)
    except (StaleActionError, BodyInvalidError) as error:
        outcome, age_days = error.kind, error.details.get("ageDays")
    assert outcome == case["outcome"]
    assert age_days == case.get("age_days")


def endpoints_hold(case: dict[str, Any]) -> None:
    if case.get("accepted"):
        assert check_endpoint(case["endpoint"]) == case["endpoint"]
        return
    with pytest.raises(EntryInvalidError) as caught:
        check_endpoint(case["endpoint"])
    assert caught.value.rule == case["refused"]


def local_ids_hold(case: dict[str, Any]) -> None:
    path, headers, body = (case["request"][part] for part in ("path", "headers", "body"))
    ids = case["ids"]
    sent, rule = None, None
    try:
        found = references(body, headers, path)
        unresolved = sorted(found.placeholders - set(ids))
        assert unresolved == case.get("blocked", [])
        if unresolved:
            return
        sent = {
            "path": replace_in_path(path, ids),
            "headers": replace_in_headers(headers, ids),
            "body": replace_in_body(body, ids),
        }
    except EntryInvalidError as error:
        rule = error.rule
    assert rule == case.get("refused")
    assert sent == case.get("result")


def errors_hold(case: dict[str, Any]) -> None:
    if case["about"] == "effect":
        assert is_conclusive(case["headers"]) is case["conclusive"]
        return
    if case["about"] == "answer":
        entry = entry_of(
            case["operation"], attempt=case["attempt"], previous_status=case["previous_status"]
        )
        verdict = classify(
            case["status"],
            case["code"],
            entry,
            WALK_OUTBOX.codes,
            has_retry_after=case.get("retry_after", False),
            recognised=case.get("recognised", True),
        )
        fields = as_json(verdict)
        assert fields == {
            name: case[name] for name in ("device", "outcome_unknown") if name in case
        }
        return
    for error_format, member in (ErrorFormat.ENVELOPE, "error"), (ErrorFormat.PROBLEM, "code"):
        for ietf, status in (False, case["status"]), (True, case["ietf_status"]):
            reply = render_error(case["name"], error_format, "request", ietf_statuses=ietf)
            assert reply.status == status
            assert json.loads(reply.body)[member] == case[error_format]
            assert (b"onceward-error", case[error_format].encode()) in reply.headers
    again = is_transient(case["status"]) or isinstance(BY_CODE.get(case["problem"]), TryLater)
    assert again == case["retryable"]


def retries_hold(case: dict[str, Any]) -> None:
    match case["about"]:
        case "transient":
            assert is_transient(case["status"]) == case["transient"]
        case "retry_after_header":
            now = datetime.fromisoformat(case["now"])
            assert parse_retry_after(case["value"], now) == case["seconds"]
        case _:
            policy, attempt = PRESETS[case["preset"]], case["attempt"]
            floor = case.get("retry_after_seconds")
            for jitter in (0.0, 0.25, 0.5, 0.999):
                delay = policy.delay_seconds(attempt, random=jitter, retry_after_seconds=floor)
                assert case["min_seconds"] <= delay <= case["max_seconds"]
                assert floor is None or delay >= floor
            if "gives_up" in case:
                limit = case["max_attempts"]
                assert policy.gives_up_after(attempt, max_attempts=limit) == case["gives_up"]
                assert policy.attempts in (None, limit)


def transitions_hold(case: dict[str, Any]) -> None:
    action, status = Transition(case["action"]), Status(case["from"])
    if "to" in case:
        assert after(action, status) == case["to"]
        return
    with pytest.raises(TransitionError):
        after(action, status)


def batch_holds(case: dict[str, Any]) -> None:
    outcome: Any = None
    try:
        match case["about"]:
            case "envelope":
                limit = case.get("max_items", 200)
                outcome = len(parse_batch(case["body"].encode(), max_items=limit))
                assert outcome == case.get("items")
            case "item":
                outcome = item_as_json(case["item"])
                assert outcome == case.get("result")
            case "headers":
                check_headers(item_with(headers=case["headers"]), case.get("policy", ()))
                assert case.get("accepted")
            case "resolve":
                outcome = resolved(case)
                assert outcome == case.get("result")
            case "run":  # by a server: see below
                return
            case other:
                pytest.fail(f"unknown case: {other}")
    except (BodyInvalidError, BatchTooLargeError, BatchSkippedError, KeyInvalidError) as error:
        outcome = error.kind
        assert outcome == case.get("refused")


def item_with(path: str = "/a", headers: Any = None, body: str | None = None) -> Any:
    members: dict[str, Any] = {"method": "POST", "path": path, "headers": headers or {}}
    text = json.dumps(members)[:-1]
    return parse_item((text + "}" if body is None else f'{text},"body":{body}}}').encode())


def item_as_json(raw: str) -> dict[str, Any]:
    item = parse_item(raw.encode())
    found = {name: getattr(item, name) for name in item.__struct_fields__}
    found["body"] = item.body.decode()
    return {name: value for name, value in found.items() if value not in (None, "", {})}


def resolved(case: dict[str, Any]) -> dict[str, Any]:
    earlier, sent = Results(), case["item"]
    for result in case["earlier"]:
        pairs = [(n.encode(), v.encode()) for n, v in result["headers"].items()]
        content = json.dumps(result["body"]).encode()
        earlier.note(result["local_id"], result["status"], pairs, content)
    body = sent.get("body_text") or json.dumps(sent["body"])
    item = item_with(sent["path"], sent["headers"], None if body == "null" else body)
    found = earlier.resolve(item)
    headers = {n: v for n, v in found.headers.items() if n != "content-type"}
    return {
        "path": found.path,
        "headers": headers,
        "body": json.loads(found.body) if found.body else None,
    }


def sequences_hold(case: dict[str, Any]) -> None:
    match case["about"]:
        case "headers":
            client_ids, numbers = (
                [v.encode() for v in case[n]] for n in ("client_ids", "sequences")
            )
            if "refused" in case:
                with pytest.raises(SequenceInvalidError) as caught:
                    parse_sequence(client_ids, numbers)
                assert caught.value.kind == case["refused"]
            else:
                found = parse_sequence(client_ids, numbers)
                assert {"client_id": found.client_id, "sequence": found.number} == case["result"]
        case "device":
            assert device_result(case) == case["result"]
        case "run":  # by a server: see below
            return
        case other:
            pytest.fail(f"unknown case: {other}")


class RefusingServer:
    """Refuses the first request as a case says, and accepts the next one."""

    def __init__(self, details: dict[str, Any]) -> None:
        self._details = details
        self.numbers: list[int] = []

    def send(self, request: Request) -> Response:
        self.numbers.append(int(request.headers["X-Sequence"]))
        headers = {"content-type": "application/json", "x-request-id": "r"}
        if len(self.numbers) > 1:
            return Response(201, headers, b"{}")
        body = {"code": "sequence.violation", "details": self._details, "requestId": "r"}
        return Response(422, headers, json.dumps(body).encode())


def device_result(case: dict[str, Any]) -> dict[str, Any]:
    """Send one entry of a device whose stream is as the case says."""
    profile = Profile(name="strict", strict_endpoints=("/things",))
    server, events = RefusingServer(case["details"]), list[Event]()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "outbox.db"
        with OutboxQueue.open(file, profiles=[profile]) as queue:
            queue.subscribe(events.append)
            queue.add_user("ada")
            entry = queue.enqueue(
                NewEntry(
                    user_id="ada",
                    operation="create",
                    entity_type="thing",
                    endpoint="/things",
                    payload={},
                    profile="strict",
                )
            )
            with closing(sqlite3.connect(file)) as connection, connection:
                connection.execute(
                    "INSERT INTO sequence_streams"
                    " (user_id, stream, client_id, next_number, acknowledged)"
                    " VALUES ('ada', ?, 'phone', ?, ?)",
                    (profile.stream_name, case["sent"], case["acknowledged"]),
                )
            Drain(queue, server).run("ada")
            found = queue.get(entry.id)
    assert server.numbers[0] == case["sent"]
    sent = server.numbers[1] if len(server.numbers) > 1 else None
    failed = (found.status, found.last_error) == ("failed", "outcome_unknown")
    assert failed == (sent is None)
    rewound = any(event.kind is EventKind.SERVER_REWOUND for event in events)
    return {"send": sent, "rewound": rewound}


HOLDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "batch.json": batch_holds,
    "canonical.json": canonical_holds,
    "decisions.json": decisions_hold,
    "endpoints.json": endpoints_hold,
    "errors.json": errors_hold,
    "keys.json": keys_hold,
    "local_ids.json": local_ids_hold,
    "retries.json": retries_hold,
    "sequences.json": sequences_hold,
    "staleness.json": staleness_holds,
    "transitions.json": transitions_hold,
}


# -- tests -----------------------------------------------------------------------------------------


def test_every_file_is_either_generated_or_listed_as_manual() -> None:
    assert set(FILES) == MANUAL | set(GENERATED) == set(HOLDS)
    readme = (CONFORMANCE / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in readme for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_file_has_a_version_and_cases_with_unique_names(name: str) -> None:
    content = load(name)
    assert content["version"] == VERSION
    assert content["what"].endswith(".")
    names = [case["name"] for case in content["cases"]]
    assert names
    assert len(set(names)) == len(names)


# One test per file: one per case would add six hundred lines to the report.
@pytest.mark.parametrize("name", FILES)
def test_core_satisfies_every_case(name: str) -> None:
    wrong = []
    for case in load(name)["cases"]:
        try:
            HOLDS[name](case)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - all are reported at once
            wrong.append(f"{case['name']}: {type(error).__name__} {error}")
    assert wrong == []


@pytest.mark.parametrize("name", sorted(MANUAL))
def test_case_with_an_inverted_expectation_fails(name: str) -> None:
    opposites = {
        "canonical": lambda case: case | {"canonical": "{}", "sha256": "0"},
        "decision": lambda case: (
            case | {"decision": "replay" if case["known"] is None else "fresh"}
        ),
        "key": lambda case: case | {"key": "another"},
        "outcome": lambda case: case | {"outcome": "stale_action"},
        "accepted": lambda case: {"endpoint": case["endpoint"], "refused": "x"},
        "result": lambda case: case | {"result": {}},
    }
    for case in load(name)["cases"]:
        for field, opposite in opposites.items():
            if field in case:
                inverted = opposite(case)
                if inverted == case or case.get("outcome") == "stale_action":
                    continue
                with pytest.raises((AssertionError, pytest.fail.Exception)):
                    HOLDS[name](inverted)
                return
    pytest.fail("no case was inverted")


@pytest.mark.parametrize("name", GENERATED)
def test_generated_file_matches_the_tables(name: str) -> None:
    assert (CONFORMANCE / name).read_text(encoding="utf-8") == generate(name), (
        "run: python -m onceward_lab.vectors --write"
    )


def test_script_lists_and_writes_outdated_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("differs") == len(GENERATED)
    assert main(["--write", str(tmp_path)]) == 0
    assert main([str(tmp_path)]) == 0


def test_every_error_code_has_cases() -> None:
    cases = load("errors.json")["cases"]
    assert {case["name"] for case in cases if case["about"] == "code"} == set(CODES)
    assert {*BY_CODE, *WALK_OUTBOX.codes} <= {case.get("code") for case in cases}


async def test_batches_are_run_as_the_vectors_say(tmp_path: Path) -> None:
    onceward = Onceward(f"sqlite:///{tmp_path}/app.db", tenants=SINGLE_TENANT)
    onceward.guard_path("POST", "/things/{thing}", endpoint="things")
    runs: list[str] = []
    batches: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        status = (batches[-1] == "again" and body["later"]) or body["single"]
        runs.append(body["name"])
        start = {"type": "http.response.start", "status": status}
        await send(start | {"headers": [(b"content-type", b"application/json")]})
        content = json.dumps({"id": body["name"], "run": len(runs)}).encode()
        await send({"type": "http.response.body", "body": content})

    guarded = onceward.wrap(app, batch="/batch")
    cases = [case for case in load("batch.json")["cases"] if case["about"] == "run"]
    assert len(cases) >= 10
    await onceward.open()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(guarded), base_url="http://v"
    ) as client:
        for number, case in enumerate(cases):
            items = [run_item(item, f"{number}-{at}") for at, item in enumerate(case["items"])]
            for which in ("results", "again"):
                if which in case:
                    batches.append(which)
                    found = (await client.post("/batch", json={"items": items})).json()
                    statuses = [result["status"] for result in found["results"]]
                    assert statuses == case[which], case["name"]
            if "replayed" in case:
                replayed = [result["replayed"] for result in found["results"]]
                assert replayed == case["replayed"], case["name"]
    await onceward.close()


class NumberedThings:
    """A server with strict sequences whose handler responds as a header says."""

    def __init__(self, database: str) -> None:
        self.onceward = Onceward(database, tenants=SINGLE_TENANT, policy=Policy(ordering="strict"))
        self.onceward.guard_path("POST", "/things", endpoint="things")
        app = self.onceward.wrap(self._respond, batch="/batch")
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://v")

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        start = {"type": "http.response.start", "status": body["handler"]}
        await send(start | {"headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def results(self, step: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
        """Return what a step of a case gets: one request, a batch, or a record that expires."""
        if "expire" in step:
            key = f"{prefix}-{step['expire']}"
            await self.onceward.store.write(
                self.onceward.store.table_names.render(
                    f"DELETE FROM onceward_idempotency_records WHERE idempotency_key = '{key}'"
                )
            )
            self.onceward.runtime.idempotency.memory.clear()
            return []
        items = [numbered_item(one, prefix) for one in step.get("batch", [step])]
        if "batch" in step:
            found = (await self._client.post("/batch", json={"items": items})).json()["results"]
            return [one | {"details": one["body"].get("details")} for one in found]
        (item,) = items
        headers = {"Idempotency-Key": item["key"]}
        if "client_id" in item:
            headers["X-Client-ID"] = item["client_id"]
        if "sequence" in item:
            headers["X-Sequence"] = str(item["sequence"])
        one = await self._client.post("/things", json=item["body"], headers=headers)
        replayed = one.headers.get("idempotency-replayed") == "true"
        details = one.json().get("details")
        return [{"status": one.status_code, "replayed": replayed, "details": details}]

    async def close(self) -> None:
        await self._client.aclose()
        await self.onceward.close()


def numbered_item(request: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a request of a case as an item. Clients and keys of cases are different ones."""
    body = {"handler": request.get("handler", 201), "other": request.get("other", False)}
    if request.get("replayed") and request["status"] >= 400:
        body["handler"] = request["status"]  # the request whose refusal is replayed
    item = {"method": "POST", "path": "/things", "key": f"{prefix}-{request['key']}", "body": body}
    client = request.get("client_id", "phone")
    members = {"client_id": client and f"{prefix}-{client}", "sequence": request["sequence"]}
    return item | {name: value for name, value in members.items() if value is not None}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_numbered_requests_are_run_as_the_vectors_say(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    is_sqlite = kind == "sqlite"
    url = f"sqlite:///{tmp_path}/v.db" if is_sqlite else request.getfixturevalue("postgres_url")
    things = NumberedThings(url)
    cases = [case for case in load("sequences.json")["cases"] if case["about"] == "run"]
    assert len(cases) >= 20
    await things.onceward.open()
    for number, case in enumerate(cases):
        for step in case["requests"]:
            wanted = [] if "expire" in step else step.get("batch", [step])
            found = await things.results(step, f"c{number}")
            for one, result in zip(wanted, found, strict=True):
                where = f"{case['name']}: {one}, got {result}"
                assert result["status"] == one["status"], where
                assert result["replayed"] is one.get("replayed", False), where
                if one["status"] == 422:
                    assert result["details"] == one["details"], where
    await things.close()


def run_item(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an item of a ``run`` case as it is sent."""
    members: dict[str, Any] = {n: item[n] for n in ("lane", "local_id", "client_id") if n in item}
    place = f"{{local:{item['refers']}}}" if "refers" in item else "1"
    body = {"name": name, "single": item.get("single"), "later": item.get("later")}
    if "key" in item:  # the same request, or another one
        body["name"] = item["key"] + ("-other" if "other" in item else "")
    key = f"{name.partition('-')[0]}-{item['key']}" if "key" in item else name
    path = "/nowhere" if item.get("malformed") else f"/things/{place}"
    return {"method": "POST", "path": path, "key": key, "body": body, **members}


def test_golden_hashes_are_in_the_vectors() -> None:
    golden = json.loads(
        (CONFORMANCE.parent / "packages/protocol/tests/fixtures/golden_hashes.json").read_text(
            encoding="utf-8"
        )
    )
    ours = {case["name"]: case for case in load("canonical.json")["cases"]}
    for case in golden["cases"]:
        assert ours[case["name"]]["sha256"] == case["sha256"]
    assert {case["name"] for case in golden["refused"]} <= set(ours)
