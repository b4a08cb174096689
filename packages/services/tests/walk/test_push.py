"""Devices, and pushes to them: by signed webhook and by a double of FCM's HTTP interface."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from onceward.errors import ConfigurationError
from onceward.jobs.context import JobContext
from onceward_services.settings import load_settings
from onceward_services.walk.events import WalkerEvent
from onceward_services.walk.push.fcm_push import FcmPush, load_service_account
from onceward_services.walk.push.port import PushMessage
from onceward_services.webhooks.addresses import parse_networks
from onceward_services.webhooks.sender import Delivered, Gone, Refused, Unavailable
from onceward_services.webhooks.signature import is_signed, new_secret
from packages.services.tests.conftest import Serve
from packages.services.tests.support.receiver import Received, Receiver, receiving

from .fixtures import NOON, Device, Game, OpenGame, new_key, ok, opener, refused
from .settlement_fixtures import NODE, backwards, take
from .step_fixtures import Stepping, signing_key, stepping
from .test_reconcile_crashes import Killed, KilledOnce

SECRET = new_secret()


async def register(
    device: Device, token: str = "token-1", platform: str = "android"
) -> httpx.Response:
    body = {"platform": platform, "token": token}
    return await device.post("/walker/devices", body, key=new_key())


def created(response: httpx.Response) -> Any:
    assert response.status_code == 201, response.text
    return response.json()


async def devices(device: Device) -> list[Any]:
    return list(ok(await device.get("/walker/devices"))["items"])


# -- devices --------------------------------------------------------------------------------------


async def test_a_device_is_registered_once_and_removed(game: Game) -> None:
    response = await register(game.ada)
    found = created(response)
    assert response.headers["location"] == f"/walker/devices/{found['id']}"
    assert created(await register(game.ada, platform="ios"))["id"] == found["id"]
    assert await devices(game.ada) == [found | {"platform": "ios"}]
    assert "token" not in json.dumps(await devices(game.ada))
    eve = game.device("eve")
    path, headers = f"/walker/devices/{found['id']}", {"Idempotency-Key": new_key()}
    refused(await game.client.delete(path, headers=eve.headers() | headers), 404, "NOT_FOUND")
    removed = await game.client.delete(path, headers=game.ada.headers() | headers)
    assert (removed.status_code, await devices(game.ada)) == (204, [])


async def test_a_device_belongs_to_the_walker_who_registered_it_last(game: Game) -> None:
    walkers = [game.device(name) for name in ("ada", "eve", "bob")]
    responses = await asyncio.gather(*(register(w) for w in walkers for _ in range(3)))
    assert {created(response)["id"] for response in responses} == {responses[0].json()["id"]}
    assert sum([len(await devices(walker)) for walker in walkers]) == 1
    created(await register(game.ada))
    assert [len(await devices(walker)) for walker in walkers] == [1, 0, 0]


async def test_a_registration_may_repeat_its_key_and_its_times(game: Game) -> None:
    key, times = new_key(), {"clientGeneratedAt": NOON.isoformat()}
    body = {"platform": "android", "token": "token-1", "idempotencyKey": key} | times
    found = created(await game.ada.post("/walker/devices", body, key=key))
    again = await game.ada.post(
        "/walker/devices", body | {"clientSubmittedAt": NOON.isoformat()}, key=key
    )
    assert (again.headers["idempotency-replayed"], created(again)) == ("true", found)
    other = await game.ada.post("/walker/devices", body, key=new_key())
    refused(other, 400, "IDEMPOTENCY_KEY_INVALID")
    assert await devices(game.ada) == [found]


async def test_devices_are_limited_and_checked(game: Game) -> None:
    results = await asyncio.gather(*(register(game.ada, f"token-{n}") for n in range(22)))
    assert sorted(r.status_code for r in results) == [201] * 20 + [422] * 2
    details = refused(await register(game.ada, "one-more"), 422, "TOO_MANY_DEVICES")
    assert details == {"limit": 20}
    for token in ("", "a b", "ü", "x" * 4097):
        refused(await register(game.ada, token), 422, "BAD_REQUEST")
    refused(await register(game.ada, "t", "pager"), 422, "BAD_REQUEST")


# -- events ---------------------------------------------------------------------------------------


async def reject_a_day(steps: Stepping) -> str:
    """Make an allocation provisional and reject its day; returns when it is refunded."""
    await backwards(steps)
    await take(steps)
    await steps.work()
    (review,) = await steps.reviews()
    ok(await steps.resolve(review["id"], "reject"))
    (allocation,) = (await steps.game.device().tree())["allocations"]
    return str(allocation["refundDueAt"])


async def test_a_scheduled_refund_is_announced_with_its_nodes_and_time(steps: Stepping) -> None:
    due = await reject_a_day(steps)
    assert due == "2026-05-23T12:00:00Z"
    events = await steps.game.device().events()
    (event,) = [e for e in events if e["type"] == "allocation.refund_scheduled"]
    assert event["data"] == {"nodeIds": [NODE], "refundDueAt": "2026-05-23T12:00:00+00:00"}
    synced = ok(await steps.game.device().get("/sync"))
    assert synced["tree"]["allocations"][0]["refundDueAt"] == due


# -- the webhook adapter --------------------------------------------------------------------------


def hooked(open_game: OpenGame, receiver: Receiver, **settings: Any) -> Any:
    return stepping(
        open_game,
        walk_push="webhook",
        walk_push_webhook_url=receiver.url,
        walk_push_webhook_secret=SECRET,
        webhook_allowed_networks="127.0.0.1",
        **settings,
    )


async def revert(steps: Stepping) -> None:
    """Schedule a refund and let it become due before a worker runs."""
    await reject_a_day(steps)
    steps.clock.move(timedelta(hours=24))
    await steps.work()
    assert (await steps.game.device().tree())["allocations"] == []


async def test_reverts_are_pushed_to_every_device_once_and_in_order(open_game: OpenGame) -> None:
    async with receiving() as receiver, hooked(open_game, receiver) as steps:
        ada = steps.game.device()
        created(await register(ada, "phone"))
        created(await register(ada, "tablet", "ios"))
        await revert(steps)
        for token, platform in (("phone", "android"), ("tablet", "ios")):
            device = {"platform": platform, "token": token}
            got = [r for r in receiver.received if r.json["data"]["device"] == device]
            assert [r.json["type"] for r in got] == [
                "steps.reread_requested",
                "allocation.refund_scheduled",
                "allocation.reverted",
            ]
            events = {event["id"]: event for event in await ada.events()}
            for request in got:
                event = request.json["data"]["event"]
                assert event["data"] == events[event["id"]]["data"]
                sent_at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
                assert is_signed(SECRET, request.headers, request.body, sent_at)
        assert len({r.headers["webhook-id"] for r in receiver.received}) == 6
        assert len(receiver.received) == 6
        await steps.work()
        assert len(receiver.received) == 6


async def test_a_device_that_is_gone_is_removed_and_others_get_theirs(
    open_game: OpenGame,
) -> None:
    async with receiving() as receiver, hooked(open_game, receiver) as steps:
        ada = steps.game.device()
        created(await register(ada, "sold"))
        created(await register(ada, "phone"))

        def respond(request: Received) -> tuple[int, Any]:
            is_sold = request.json["data"]["device"]["token"] == "sold"
            return (410, {}) if is_sold else (200, {})

        receiver.respond = respond
        await revert(steps)
        tokens = [r.json["data"]["device"]["token"] for r in receiver.received]
        assert (tokens.count("sold"), tokens.count("phone")) == (1, 3)
        assert [each["platform"] for each in await devices(ada)] == ["android"]


async def test_a_refused_push_is_dead_lettered_and_what_was_delivered_is_not_sent_again(
    serve: Serve, sqlite_url: str
) -> None:
    async with receiving() as receiver, hooked(opener(serve, sqlite_url), receiver) as steps:
        created(await register(steps.game.device()))
        await reject_a_day(steps)
        receiver.received.clear()  # the request to read the day again
        steps.clock.move(timedelta(hours=24))
        # The first event gets through, the second one meets a server that redirects.
        receiver.responses, receiver.headers = [204, 302], [("location", "http://127.0.0.1/x")]
        await steps.work()
        types = [r.json["type"] for r in receiver.received]
        assert types == ["allocation.refund_scheduled", "allocation.reverted"]
        (dead,) = await steps.game.rows("SELECT error FROM onceward_dead_letters")
        assert "redirects are not followed" in dead["error"]
        (row,) = await steps.game.rows("SELECT pushed_seq FROM walker_devices")
        assert row["pushed_seq"] == receiver.received[0].json["data"]["event"]["id"]


async def test_a_killed_push_is_sent_again_with_the_same_id(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as receiver, hooked(opener(serve, sqlite_url), receiver) as steps:
        created(await register(steps.game.device()))
        await reject_a_day(steps)
        receiver.received.clear()  # the request to read the day again
        original = JobContext.record_step
        killed: list[bool] = []

        async def once(self: JobContext, *args: Any) -> None:
            if not killed:
                killed.append(True)
                raise Killed
            await original(self, *args)

        monkeypatch.setattr(JobContext, "record_step", once)
        faults = KilledOnce("job_before_commit")
        await steps.work(faults=faults, lease_seconds=1)
        assert (killed, faults.has_killed) == ([True], True)
        ids = [request.headers["webhook-id"] for request in receiver.received]
        assert (len(ids), len(set(ids))) == (2, 1)
        (row,) = await steps.game.rows("SELECT pushed_seq FROM walker_devices")
        assert row["pushed_seq"] == receiver.received[0].json["data"]["event"]["id"]


async def test_without_push_nothing_is_enqueued(steps: Stepping) -> None:
    created(await register(steps.game.device()))
    await reject_a_day(steps)
    jobs = await steps.game.rows("SELECT type FROM onceward_jobs WHERE type = 'walker.push'")
    assert jobs == []


# -- FCM ------------------------------------------------------------------------------------------


class Fcm:
    """A double of FCM's HTTP v1 interface and of the token endpoint."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.base = receiver.url.removesuffix("/hook")
        self.tokens = 0
        self.messages: list[Any] = []
        self.next: list[tuple[int, Any]] = []
        receiver.respond = self.respond

    def respond(self, request: Received) -> tuple[int, Any]:
        if request.path == "/token":
            return self.grant(request)
        assert request.path == "/v1/projects/walkers/messages:send"
        if request.headers["authorization"] != f"Bearer access-{self.tokens}":
            return 401, {"error": {"status": "UNAUTHENTICATED"}}
        if self.next:
            return self.next.pop(0)
        message = request.json["message"]
        assert all(isinstance(value, str) for value in message["data"].values())
        self.messages.append(message)
        return 200, {"name": f"projects/walkers/messages/{len(self.messages)}"}

    def grant(self, request: Received) -> tuple[int, Any]:
        form = parse_qs(request.body.decode())
        assert form["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
        claims = jwt.decode(
            form["assertion"][0],
            signing_key("fcm").public_key(),
            algorithms=["RS256"],
            audience=f"{self.base}/token",
            options={"verify_exp": False, "verify_iat": False},
        )
        assert claims["iss"] == "push@walkers.example"
        assert claims["scope"] == "https://www.googleapis.com/auth/firebase.messaging"
        self.tokens += 1
        return 200, {"access_token": f"access-{self.tokens}", "expires_in": 3600}

    def credentials(self, directory: Path) -> Path:
        key = signing_key("fcm").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path = directory / "account.json"
        path.write_text(
            json.dumps(
                {
                    "type": "service_account",
                    "project_id": "walkers",
                    "client_email": "push@walkers.example",
                    "private_key": key.decode(),
                    "token_uri": f"{self.base}/token",
                }
            )
        )
        return path


@asynccontextmanager
async def fcm() -> AsyncIterator[Fcm]:
    async with receiving() as receiver:
        yield Fcm(receiver)


def adapter(double: Fcm, directory: Path) -> FcmPush:
    return FcmPush(
        load_service_account(double.credentials(directory)),
        url=double.base,
        timeout_seconds=30,
        allowed=parse_networks("127.0.0.1"),
    )


EVENT = WalkerEvent(7, "allocation.reverted", {"nodeId": NODE, "pointsReturned": 1}, NOON)
MESSAGE = PushMessage("0e1a", "ada", "android", "device-token", EVENT)


async def test_fcm_gets_a_message_and_its_token_is_fetched_once(tmp_path: Path) -> None:
    async with fcm() as double:
        push = adapter(double, tmp_path)
        assert await push.send(MESSAGE, NOON) == Delivered(200)
        assert await push.send(MESSAGE, NOON + timedelta(minutes=57)) == Delivered(200)
        assert double.tokens == 1
        assert await push.send(MESSAGE, NOON + timedelta(minutes=59)) == Delivered(200)
        assert double.tokens == 2
        message = double.messages[0]
        assert message["token"] == "device-token"
        assert message["data"]["type"] == "allocation.reverted"
        assert message["data"]["eventId"] == "7"
        assert json.loads(message["data"]["data"]) == EVENT.data
        assert message["android"]["collapse_key"] == "0e1a"
        assert message["apns"]["headers"]["apns-collapse-id"] == "0e1a"


def fcm_error(code: str) -> Any:
    kind = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
    return {"error": {"status": "X", "details": [{"@type": kind, "errorCode": code}]}}


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, "UNREGISTERED", Gone),
        (404, "NOT_FOUND", Refused),
        (400, "INVALID_ARGUMENT", Refused),
        (403, "SENDER_ID_MISMATCH", Refused),
        (429, "QUOTA_EXCEEDED", Unavailable),
        (503, "UNAVAILABLE", Unavailable),
        (401, "THIRD_PARTY_AUTH_ERROR", Unavailable),
    ],
)
async def test_what_an_error_of_fcm_means(
    tmp_path: Path, status: int, code: str, expected: type
) -> None:
    async with fcm() as double:
        push = adapter(double, tmp_path)
        double.next = [(status, fcm_error(code))]
        assert isinstance(await push.send(MESSAGE, NOON), expected)
        assert await push.send(MESSAGE, NOON) == Delivered(200)
        assert double.tokens == (2 if status == 401 else 1)


async def test_an_internal_token_endpoint_is_refused(tmp_path: Path) -> None:
    async with fcm() as double:
        account = load_service_account(double.credentials(tmp_path))
        outcome = await FcmPush(account, url=double.base).send(MESSAGE, NOON)
        assert outcome == Refused("127.0.0.1 has the internal address 127.0.0.1")
        assert double.receiver.received == []


async def test_a_revert_reaches_fcm_and_an_unregistered_device_is_removed(
    serve: Serve, sqlite_url: str, tmp_path: Path
) -> None:
    async with (
        fcm() as double,
        stepping(
            opener(serve, sqlite_url),
            walk_push="fcm",
            walk_fcm_credentials_file=double.credentials(tmp_path),
            walk_fcm_url=double.base,
            webhook_allowed_networks="127.0.0.1",
        ) as steps,
    ):
        ada = steps.game.device()
        created(await register(ada, "phone"))
        await revert(steps)
        assert [m["data"]["type"] for m in double.messages] == [
            "steps.reread_requested",
            "allocation.refund_scheduled",
            "allocation.reverted",
        ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"walk_push": "webhook"}, "ONCEWARD_WALK_PUSH=webhook needs"),
        ({"walk_push": "fcm"}, "ONCEWARD_WALK_PUSH=fcm needs"),
        ({"walk_push": "apns"}, "ONCEWARD_WALK_PUSH should be off, webhook or fcm"),
    ],
)
def test_incomplete_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_settings(**settings)


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_file_that_is_no_service_account_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "account.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match="ONCEWARD_WALK_FCM_CREDENTIALS_FILE: "):
        load_settings(walk_push="fcm", walk_fcm_credentials_file=path).create_push()
