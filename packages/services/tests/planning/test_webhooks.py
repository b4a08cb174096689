"""Webhooks of an organization: registration, signed deliveries, their log, failures and kills."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from onceward.errors import StoreUnavailableError
from onceward.jobs.context import JobContext
from onceward.jobs.executor import FAULT_POINTS
from onceward_services.planning.webhook_delivery import DELIVER, QUEUE, webhook_sql
from onceward_services.webhooks.signature import is_signed
from packages.services.tests.conftest import Serve
from packages.services.tests.support.receiver import Received, Receiver, receiving

from .fixtures import NOWHERE, Member, OpenPlanning, PlanningServer, made, ok, opener, refused, tag
from .test_effects import Dies

PATH = "/v1/webhooks"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


class Hooked:
    """A planning server with an admin and a receiver."""

    def __init__(self, planning: PlanningServer, receiver: Receiver) -> None:
        self.planning = planning
        self.receiver = receiver
        self.admin = planning.member("root", "acme", "admin")

    async def register(self, url: str = "", **fields: Any) -> Any:
        body = {"url": url or self.receiver.url} | fields
        response = await self.admin.post(PATH, body)
        assert response.status_code == 201, response.text
        return response.json()

    async def assign(self, *people: str) -> str:
        """Assign people to a mission and run the jobs that notify; deliveries wait."""
        mission = await self.planning.mission()
        for person in people or ("bob",):
            path = await self.planning.assignment(mission, person)
        await self.work(["planning"])
        return path

    async def work(self, queues: list[str] | None = None, **options: Any) -> None:
        """Run a worker until no job of these queues is left; retries do not wait."""
        onceward = self.planning.onceward
        chosen = queues or [QUEUE]
        worker = onceward.worker(queues=chosen, **options)
        await worker.start()
        names = ", ".join(f"'{name}'" for name in chosen)
        try:
            async with asyncio.timeout(60):
                while await self.planning.rows(
                    f"SELECT 1 FROM onceward_jobs WHERE queue IN ({names})"
                ):
                    hurried = await onceward.store.write(
                        onceward.store.table_names.render(
                            "UPDATE onceward_jobs SET visible_at = run_at"
                            " WHERE state = 'waiting' AND attempts > 0 AND visible_at > run_at"
                            " AND worker IS NULL RETURNING id"
                        )
                    )
                    if hurried:
                        onceward.runtime.notifier.notify()
                    await asyncio.sleep(0.01)
        finally:
            await worker.stop()

    async def attempt_once(self) -> None:
        """Run what is due or waits for a retry once."""
        onceward = self.planning.onceward
        await onceward.store.write(
            onceward.store.table_names.render(
                "UPDATE onceward_jobs SET visible_at = run_at WHERE state = 'waiting'"
                " AND attempts > 0 AND worker IS NULL RETURNING id"
            )
        )
        worker = onceward.worker(queues=[QUEUE])
        await worker.start()
        await worker.until_idle()
        await worker.stop()

    async def deliveries(self, webhook: Any, query: str = "") -> list[Any]:
        page = await self.admin.read(f"{PATH}/{webhook['id']}/deliveries{query}")
        return list(page["items"])

    async def detail(self, delivery: Any) -> Any:
        path = f"{PATH}/{delivery['webhook_id']}/deliveries/{delivery['id']}"
        return await self.admin.read(path)

    async def webhook(self, webhook: Any) -> Any:
        return await self.admin.read(f"{PATH}/{webhook['id']}")


@asynccontextmanager
async def hooked(open_planning: OpenPlanning, **settings: Any) -> AsyncIterator[Hooked]:
    local = {"planning_webhook_allowed_networks": "127.0.0.1"}
    async with receiving() as receiver, open_planning(**(local | settings)) as planning:
        yield Hooked(planning, receiver)


@pytest.fixture
async def hook(open_planning: OpenPlanning) -> AsyncIterator[Hooked]:
    async with hooked(open_planning) as opened:
        yield opened


@pytest.fixture
async def sqlite_hook(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Hooked]:
    async with hooked(opener(serve, sqlite_url, monkeypatch)) as opened:
        yield opened


def is_from(secret: str, request: Received) -> bool:
    sent_at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
    return is_signed(secret, request.headers, request.body, sent_at)


# -- registration ---------------------------------------------------------------------------------


async def test_a_secret_is_shown_once_and_signs_what_is_delivered(hook: Hooked) -> None:
    response = await hook.admin.post(PATH, {"url": hook.receiver.url, "description": "d"}, key="k")
    made(response)
    webhook = response.json()
    secret = webhook.pop("secret")
    assert secret.startswith("whsec_")
    assert response.headers["location"] == f"{PATH}/{webhook['id']}"
    assert (webhook["enabled"], webhook["events"], webhook["created_by"]) == (True, None, "root")
    # A lost response can be fetched again, by an admin only.
    again = await hook.admin.post(PATH, {"url": hook.receiver.url, "description": "d"}, key="k")
    assert (again.content, again.headers["idempotency-replayed"]) == (response.content, "true")
    planner = hook.planning.member("eve", "acme", "planner")
    body = {"url": hook.receiver.url, "description": "d"}
    refused(await planner.post(PATH, body, key="k"), 403, "auth.forbidden")
    assert await hook.webhook(webhook) == webhook
    assert await hook.admin.read(PATH) == {"items": [webhook], "next": None}

    path = await hook.assign("bob")
    assert hook.receiver.received == []
    (delivery,) = await hook.deliveries(webhook)
    assert (delivery["state"], delivery["attempts"]) == ("waiting", 0)
    await hook.work()
    (request,) = hook.receiver.received
    assert is_from(secret, request)
    assert request.headers["webhook-id"] == request.headers["idempotency-key"] == delivery["id"]
    (notification,) = (await hook.planning.member("bob", "acme").read("/v1/notifications"))["items"]
    data = request.json["data"]
    assert request.json["type"] == delivery["type"] == "assignment.assigned"
    assert data == {
        "organization": "acme",
        "notification_id": notification["id"],
        "recipient": "bob",
        "assignment_id": path.rpartition("/")[2],
        "version": 1,
        "mission_id": notification["mission_id"],
    }
    (delivered,) = await hook.deliveries(webhook)
    assert delivered == delivery | {
        "state": "delivered",
        "attempts": 1,
        "detail": "the response was 204",
        "finished_at": delivered["finished_at"],
    }
    detail = await hook.detail(delivery)
    assert detail["message"] == request.json
    (attempt,) = detail["attempt_log"]
    assert (attempt["outcome"], attempt["status"]) == ("delivered", 204)
    # No response but those two and their records has the secret.
    audit = await hook.admin.get("/v1/audit")
    assert secret not in audit.text + str(detail) + str(await hook.admin.read(PATH))


async def test_a_rotated_secret_overlaps_with_the_one_before(hook: Hooked) -> None:
    webhook = await hook.register()
    path = f"{PATH}/{webhook['id']}/rotate"
    rotated = ok(await hook.admin.post(path, None))
    old, new = webhook["secret"], rotated["secret"]
    assert old != new
    until = datetime.fromisoformat(rotated["previous_secret_until"])
    assert until - datetime.fromisoformat(rotated["secret_created_at"]) == timedelta(hours=24)
    await hook.assign("bob")
    await hook.work()
    newest = ok(await hook.admin.post(path, {"overlap_hours": 0}))["secret"]
    await hook.assign("bob")
    await hook.work()
    first, second = hook.receiver.received
    assert [is_from(secret, first) for secret in (old, new, newest)] == [True, True, False]
    assert [is_from(secret, second) for secret in (old, new, newest)] == [False, False, True]
    for body in ({"overlap_hours": -1}, {"overlap_hours": 721}, {"overlap_hours": "1"}, {"x": 1}):
        assert (await hook.admin.post(path, body)).status_code in (400, 422), body


async def test_registrations_at_the_same_time_do_not_exceed_the_limit(hook: Hooked) -> None:
    async def register(key: str) -> httpx.Response:
        return await hook.admin.post(PATH, {"url": hook.receiver.url}, key=key)

    responses = await asyncio.gather(*(register(f"k{n}") for n in range(9)))
    created = [r for r in responses if r.status_code == 201]
    assert len(created) == 5
    late = [f"k{n}" for n, response in enumerate(responses) if response.status_code != 201]
    assert refused(await register(late[0]), 409, "webhook.too_many") == {"limit": 5}
    removed = await asyncio.gather(
        *(hook.admin.delete(created[0].headers["location"]) for _ in range(3))
    )
    assert sorted(r.status_code for r in removed) == [204, 404, 404]
    # The refusal was not stored, and one place is free, not three.
    assert (await register(late[0])).status_code == 201
    refused(await register(late[1]), 409, "webhook.too_many")


REFUSED_URLS = [
    "http://example.com/hook",
    "https://localhost/",
    "https://metadata.localhost./",
    "https://169.254.169.254/latest",
    "https://[::1]/",
    "https://[::ffff:10.0.0.1]/",
    "https://2130706433/",
    "https://127.1/",
    "https://ada:secret@example.com/",
    "https://example.com/#x",
    "ftp://example.com/",
    "example.com",
    "https://exämple.com/",
    "https://example.com/" + "x" * 2000,
]


async def test_addresses_that_are_refused_are_refused_at_once(
    sqlite_planning: PlanningServer,
) -> None:
    admin = sqlite_planning.member("root", "acme", "admin")
    for url in REFUSED_URLS:
        details = refused(await admin.post(PATH, {"url": url}), 422, "request.invalid")
        assert details["fields"][0]["field"] == "url"
    assert await admin.read(PATH) == {"items": [], "next": None}


async def test_only_admins_of_the_organization_reach_its_webhooks(sqlite_hook: Hooked) -> None:
    hook = sqlite_hook
    webhook = await hook.register()
    await hook.assign("bob")
    (delivery,) = await hook.deliveries(webhook)
    one, log = f"{PATH}/{webhook['id']}", f"{PATH}/{webhook['id']}/deliveries"
    requests: list[tuple[str, str, Any]] = [
        ("GET", one, None),
        ("PATCH", one, {"enabled": False}),
        ("POST", f"{one}/rotate", None),
        ("POST", f"{one}/test", None),
        ("GET", log, None),
        ("GET", f"{log}/{delivery['id']}", None),
        ("POST", f"{log}/{delivery['id']}/resend", None),
        ("DELETE", one, None),
    ]
    other = hook.planning.member("root", "globex", "admin")
    for member in (hook.planning, hook.planning.member("ann", "acme", "planner", "auditor")):
        for method, path, body in (*requests, ("GET", PATH, None), ("POST", PATH, {"url": "x"})):
            refused(await member.send(method, path, body), 403, "auth.forbidden")
    assert await other.read(PATH) == {"items": [], "next": None}
    for method, path, body in requests:
        theirs = await other.send(method, path, body)
        refused(theirs, 404, "resource.not_found")
        nothing = await other.send(method, path.replace(webhook["id"], NOWHERE), body)
        assert nothing.json() | {"requestId": ""} == theirs.json() | {"requestId": ""}, path
        odd = await hook.admin.send(method, path.replace(webhook["id"], "%00"), body)
        refused(odd, 404, "resource.not_found")
    # A delivery is found under its own webhook only.
    second = await hook.register()
    wrong = f"{PATH}/{second['id']}/deliveries/{delivery['id']}"
    refused(await hook.admin.get(wrong), 404, "resource.not_found")
    refused(await hook.admin.post(f"{wrong}/resend", None), 404, "resource.not_found")
    assert (await hook.webhook(webhook))["enabled"] is True


async def test_a_webhook_is_changed_tested_and_deleted(hook: Hooked) -> None:
    webhook = await hook.register(events=["assignment.ended", "assignment.moved"])
    path = f"{PATH}/{webhook['id']}"
    assignment = await hook.assign("bob")
    assert await hook.deliveries(webhook) == []
    await hook.planning.delete(assignment, **tag(1))
    await hook.work(["planning"])
    (ended,) = await hook.deliveries(webhook)
    assert ended["type"] == "assignment.ended"
    changed = ok(await hook.admin.patch(path, {"events": None, "description": "all"}))
    assert (changed["events"], changed["description"]) == (None, "all")
    assert ok(await hook.admin.patch(path, {"events": ["assignment.moved"]}))["events"] == [
        "assignment.moved"
    ]
    bodies: list[dict[str, Any]] = [
        {"events": []},
        {"events": ["x"]},
        {"url": None},
        {"url": "https://10.0.0.1/"},
        {"enabled": None},
        {"secret": "x"},
    ]
    for body in bodies:
        assert (await hook.admin.patch(path, body)).status_code in (400, 422), body
    sent = await hook.admin.post(f"{path}/test", None)
    assert sent.status_code == 202
    test = sent.json()
    assert sent.headers["location"] == f"{path}/deliveries/{test['id']}"
    await hook.work()
    assert [r.json["type"] for r in hook.receiver.received] == ["assignment.ended", "webhook.test"]
    pages = await hook.admin.pages(f"{path}/deliveries", 1)
    assert [[each["id"] for each in page] for page in pages] == [[test["id"]], [ended["id"]]]
    assert len(await hook.deliveries(webhook, "?state=delivered")) == 2
    assert await hook.deliveries(webhook, "?state=failed") == []

    # What waits when it is deleted is not sent, and its secret is not kept.
    await hook.admin.post(f"{path}/test", None)
    assert (await hook.admin.delete(path)).status_code == 204
    await hook.work()
    assert len(hook.receiver.received) == 2
    for gone in (path, f"{path}/deliveries", f"{path}/deliveries/{test['id']}"):
        refused(await hook.admin.get(gone), 404, "resource.not_found")
    (row,) = await hook.planning.rows("SELECT secret, previous_secret FROM planning_webhooks")
    assert dict(row) == {"secret": "", "previous_secret": None}


# -- failures -------------------------------------------------------------------------------------


async def test_a_receiver_that_is_down_for_all_attempts_gets_it_when_it_is_sent_again(
    hook: Hooked,
) -> None:
    webhook = await hook.register()
    hook.receiver.responses = [503, b"", 429, 500, *[503] * 8]
    await hook.assign("bob")
    await hook.work()
    (delivery,) = await hook.deliveries(webhook)
    assert (delivery["state"], delivery["attempts"]) == ("failed", 12)
    assert delivery["detail"] == "the response was 503"
    detail = await hook.detail(delivery)
    assert [each["status"] for each in detail["attempt_log"]] == [503, None, 429, 500, *[503] * 8]
    assert {each["outcome"] for each in detail["attempt_log"]} == {"unavailable"}
    (dead,) = await hook.planning.rows("SELECT type, tenant FROM onceward_dead_letters")
    assert (dead["type"], dead["tenant"]) == (DELIVER, "org:acme")
    assert (await hook.webhook(webhook))["failing_since"] is not None
    path = f"{PATH}/{webhook['id']}/deliveries/{delivery['id']}/resend"
    # Admins who act at the same time send it once.
    responses = await asyncio.gather(*(hook.admin.post(path, None) for _ in range(4)))
    assert {r.status_code for r in responses} == {202}
    assert {(r.json()["state"], r.json()["attempts"]) for r in responses} == {("waiting", 12)}
    await hook.work()
    (sent,) = await hook.deliveries(webhook)
    assert (sent["id"], sent["state"], sent["attempts"]) == (delivery["id"], "delivered", 13)
    assert {r.headers["webhook-id"] for r in hook.receiver.received} == {delivery["id"]}
    assert len({r.body for r in hook.receiver.received}) == 1
    assert len(hook.receiver.received) == 13
    assert (await hook.webhook(webhook))["failing_since"] is None
    # One that was delivered can be sent again too.
    ok_again = await hook.admin.post(path, None)
    assert ok_again.status_code == 202
    await hook.work()
    assert len(hook.receiver.received) == 14


async def test_attempts_at_a_receiver_that_is_down_go_on_for_hours(hook: Hooked) -> None:
    webhook = await hook.register()
    hook.receiver.responses = [503] * 12
    await hook.assign("bob")
    waits = []
    for attempt in range(1, 12):
        started = datetime.now(UTC)
        await hook.attempt_once()
        (delivery,) = await hook.deliveries(webhook)
        assert (delivery["state"], delivery["attempts"]) == ("waiting", attempt)
        due = datetime.fromisoformat((await hook.detail(delivery))["next_attempt_at"])
        waits.append((due - started).total_seconds())
    assert 5 * 3600 < sum(waits) < 9 * 3600
    assert max(waits) < 3700
    await hook.attempt_once()
    (delivery,) = await hook.deliveries(webhook)
    assert (delivery["state"], delivery["attempts"]) == ("failed", 12)
    assert (await hook.detail(delivery))["next_attempt_at"] is None


async def test_a_webhook_that_is_gone_for_long_is_disabled_with_a_reason(hook: Hooked) -> None:
    webhook = await hook.register()
    path = f"{PATH}/{webhook['id']}"
    hook.receiver.responses = [404, 410, 204]
    await hook.assign("bob")
    await hook.work()
    (first,) = await hook.deliveries(webhook)
    assert (first["state"], first["attempts"]) == ("failed", 1), "it is not retried"
    assert (await hook.webhook(webhook))["enabled"] is True
    await hook.planning.onceward.store.write(
        "UPDATE planning_webhooks SET failing_since = :at", {"at": LONG_AGO}
    )
    await hook.assign("bob", "cleo")
    await hook.work()
    found = await hook.webhook(webhook)
    assert found["enabled"] is False
    reason = "no delivery has succeeded for 24 hours; the last time the response was 410"
    assert found["disabled_reason"] == reason
    states = [each["state"] for each in await hook.deliveries(webhook)]
    assert sorted(states) == ["cancelled", "failed", "failed"]
    assert len(hook.receiver.received) == 2
    await hook.assign("dora")
    assert len(await hook.deliveries(webhook)) == 3, "a disabled webhook gets nothing"
    cancelled = (await hook.deliveries(webhook, "?state=cancelled"))[0]
    again = f"{path}/deliveries/{cancelled['id']}/resend"
    for refusal in (
        await hook.admin.post(again, None),
        await hook.admin.post(f"{path}/test", None),
    ):
        refused(refusal, 409, "webhook.disabled")
        assert reason in refusal.json()["detail"]
    enabled = ok(await hook.admin.patch(path, {"enabled": True}))
    assert (enabled["enabled"], enabled["disabled_reason"]) == (True, None)
    assert enabled["failing_since"] is None
    assert (await hook.admin.post(again, None)).status_code == 202
    await hook.work()
    assert (await hook.detail(cancelled))["state"] == "delivered"
    disabled = ok(await hook.admin.patch(path, {"enabled": False}))
    assert disabled["disabled_reason"] == "disabled by root"


async def test_a_receiver_that_redirects_or_refuses_is_not_tried_again(
    sqlite_hook: Hooked,
) -> None:
    hook = sqlite_hook
    webhook = await hook.register()
    async with receiving() as inside:
        hook.receiver.headers = [("location", inside.url)]
        hook.receiver.responses = [302, 401]
        await hook.assign("bob")
        await hook.work()
        await hook.assign("bob")
        await hook.work()
        assert inside.received == []
    found = await hook.deliveries(webhook)
    assert [(each["state"], each["attempts"], each["detail"]) for each in found] == [
        ("failed", 1, "the response was 401"),
        ("failed", 1, "the response was 302: redirects are not followed"),
    ]


async def test_a_receiver_that_hangs_is_cut_off_and_tried_again(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opener(serve, sqlite_url, monkeypatch)
    async with hooked(opened, webhook_timeout_seconds=0.05) as hook:
        hook.receiver.responses = [None] * 12
        webhook = await hook.register()
        await hook.assign("bob")
        await hook.work()
        (delivery,) = await hook.deliveries(webhook)
        assert (delivery["state"], delivery["attempts"]) == ("failed", 12)
        # Then the host is left alone for a while, which counts as an attempt.
        assert delivery["detail"] == "not sent: no response to the last 3 messages"
        assert len(hook.receiver.received) == 3


async def test_a_name_with_an_internal_address_is_refused_and_not_named(
    sqlite_planning: PlanningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's own networks are not open to webhooks of organizations."""
    async with receiving() as receiver:
        hook = Hooked(sqlite_planning, receiver)
        loop = asyncio.get_running_loop()
        port = int(receiver.url.rpartition(":")[2].partition("/")[0])

        async def found(*_args: Any, **_options: Any) -> Any:
            return [(2, 1, 6, "", ("127.0.0.1", port))]

        webhook = await hook.register("https://hooks.example.com/")
        await hook.assign("bob")
        monkeypatch.setattr(loop, "getaddrinfo", found)
        await hook.work()
        (delivery,) = await hook.deliveries(webhook)
        assert (delivery["state"], delivery["attempts"]) == ("failed", 1)
        assert delivery["detail"] == "the address is internal"
        assert receiver.received == []


async def test_a_long_retry_after_does_not_hold_a_webhook_for_ever(sqlite_hook: Hooked) -> None:
    hook = sqlite_hook
    await hook.register()
    hook.receiver.responses, hook.receiver.headers = [503], [("retry-after", "99999999")]
    await hook.assign("bob")
    onceward = hook.planning.onceward
    worker = onceward.worker(queues=[QUEUE])
    await worker.start()
    async with asyncio.timeout(30):
        while not await hook.planning.count("onceward_job_failures"):
            await asyncio.sleep(0.01)
    await worker.stop()
    due_in = await onceward.runtime.job_store.due_in([QUEUE])
    assert due_in is not None
    assert 60 < due_in <= 3600


# -- kills ----------------------------------------------------------------------------------------


class DyingStore:
    """Fails before or after the statements of an attempt, once each."""

    def __init__(self, store: Any) -> None:
        self._write = store.write
        texts = {name: webhook_sql(name) for name in ("add_attempt", "end_attempt")}
        self.left = [(name, when) for name in texts for when in ("before", "after")]
        self._texts = {text: name for name, text in texts.items()}

    async def write(self, sql: str, params: Any = None) -> Any:
        name = self._texts.get(sql, "")
        self._die(name, "before")
        found = await self._write(sql, params)
        self._die(name, "after")
        return found

    def _die(self, name: str, when: str) -> None:
        if (name, when) in self.left:
            self.left.remove((name, when))
            raise StoreUnavailableError(f"killed {when} {name}")


async def test_a_delivery_killed_at_any_step_has_one_effect_at_a_receiver_that_honours_its_id(
    open_planning: OpenPlanning, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hooked(open_planning, planning_webhooks=12) as hook:
        effects: dict[str, bytes] = {}

        def respond(request: Received) -> tuple[int, Any]:
            known = effects.setdefault(request.headers["idempotency-key"], request.body)
            assert known == request.body, "the same id has the same body"
            return 200, {}

        hook.receiver.respond = respond
        webhooks = [await hook.register() for _ in range(12)]
        await hook.assign("bob")
        original = JobContext.record_step
        killed: list[bool] = []

        async def once(self: JobContext, *args: Any) -> None:
            if len(killed) < 2:
                killed.append(True)
                raise StoreUnavailableError("killed between the response and its record")
            await original(self, *args)

        store = DyingStore(hook.planning.onceward.store)
        monkeypatch.setattr(JobContext, "record_step", once)
        monkeypatch.setattr(hook.planning.onceward.store, "write", store.write)
        faults = Dies(*(point for point in FAULT_POINTS if point != "job_before_retry"))
        await hook.work(faults=faults, lease_seconds=1, concurrency=12)
        assert (store.left, faults.left, len(killed)) == ([], [], 2)
        found = [each for w in webhooks for each in await hook.deliveries(w)]
        assert {each["state"] for each in found} == {"delivered"}
        assert len(found) == 12
        assert set(effects) == {each["id"] for each in found}
        # At least those between the request and its record were sent twice, with the same id.
        assert len(hook.receiver.received) >= 12 + 3
        assert await hook.planning.count("onceward_dead_letters") == 0


async def test_an_end_that_is_killed_is_recorded_once(sqlite_hook: Hooked) -> None:
    """Between the failure and the dead letter."""
    hook = sqlite_hook
    webhook = await hook.register()
    hook.receiver.respond = lambda _request: (410, {})
    await hook.assign("bob")
    await hook.work(faults=Dies("job_before_retry"), lease_seconds=1)
    (delivery,) = await hook.deliveries(webhook)
    assert delivery["state"] == "failed"
    assert await hook.planning.count("onceward_dead_letters") == 1
    assert len({r.headers["webhook-id"] for r in hook.receiver.received}) == 1


async def test_a_replayed_assignment_is_one_delivery_to_each_webhook(hook: Hooked) -> None:
    webhooks = [await hook.register() for _ in range(2)]
    mission = await hook.planning.mission()
    writers: list[Member] = [hook.planning.member(f"w{n}", "acme") for n in range(6)]
    body = {"assignee": "bob"}
    responses = await asyncio.gather(
        *(writer.post(f"{mission}/assignments", body, key="one") for writer in writers)
    )
    assert {response.status_code for response in responses} == {201}
    await hook.work(["planning", QUEUE])
    for webhook in webhooks:
        assert [each["state"] for each in await hook.deliveries(webhook)] == ["delivered"]
    assert len(hook.receiver.received) == 2
