"""The clients against a server that fails as scripted, and against a guarded app."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.client import Action, AsyncClient, BatchRefusedError, Client, GaveUpError
from onceward.errors import UsageError
from onceward.frameworks.starlette import Tx

CUT = "cut"


class Service:
    """Sends scripted responses (status, headers, body), or closes the connection."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                service.bodies.append(self.rfile.read(length))
                service.seen.append({name.lower(): value for name, value in self.headers.items()})
                step = service.script.pop(0)
                if step == CUT:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, headers, body = step
                content = json.dumps(body).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815 - named by the library

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def client(service: Service, slept: list[float]) -> Iterator[Client]:
    with Client(service.url, token="t-1", sleep=slept.append, jitter=lambda: 0.5) as made:
        yield made


OK: tuple[int, dict[str, str], Any] = (201, {}, {"id": 1})


def failing(status: int, **headers: str) -> tuple[int, dict[str, str], Any]:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {}


def test_retries_of_an_action_have_the_same_key(
    client: Client, service: Service, slept: list[float]
) -> None:
    service.script = [CUT, failing(503), failing(429), OK]
    response = client.post("/things", json={"a": 1})
    assert response.status == 201
    assert response.json() == {"id": 1}
    assert response.attempts == 4
    keys = {seen["idempotency-key"] for seen in service.seen}
    assert keys == {response.key}
    assert UUID(response.key).version == 4
    assert all(0.2 <= pause <= 5 for pause in slept)
    assert slept == sorted(slept)


def test_two_actions_have_two_keys(client: Client, service: Service) -> None:
    service.script = [OK, OK]
    first, second = client.post("/things", json={}), client.post("/things", json={})
    assert first.key != second.key


def test_an_action_has_one_correlation_id_for_all_attempts(
    client: Client, service: Service
) -> None:
    service.script = [CUT, failing(503), OK, OK, OK, OK, *[CUT] * 5]
    first, second = client.post("/things", json={}), client.post("/things", json={})
    again = client.post("/things", json={}, key=first.key)
    own = client.post("/things", json={}, headers={"X-Correlation-ID": "checkout-7"})
    with pytest.raises(GaveUpError) as gave_up:
        client.post("/things", json={}, key=second.key)
    ids = [seen["x-correlation-id"] for seen in service.seen]
    one, two = first.correlation_id, second.correlation_id
    assert ids == [one, one, one, two, one, "checkout-7", *[two] * 5]
    assert (again.correlation_id, own.correlation_id) == (one, "checkout-7")
    assert gave_up.value.correlation_id == two
    assert first.key not in (one, two)  # keys are not logged, correlation ids are


def test_given_key_is_sent(client: Client, service: Service) -> None:
    service.script = [OK]
    key = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
    assert client.post("/things", json={}, key=key).key == key
    assert service.seen[0]["idempotency-key"] == key


def test_key_is_sent_in_the_header_that_the_server_names(service: Service) -> None:
    service.script = [OK]
    with Client(service.url, key_header="X-Shop-Key") as client:
        client.post("/things", json={}, key="my-key")
    assert service.seen[0]["x-shop-key"] == "my-key"
    assert "idempotency-key" not in service.seen[0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 428])
def test_client_error_is_not_retried(client: Client, service: Service, status: int) -> None:
    service.script = [(status, {}, {"code": "some.code"})]
    response = client.post("/things", json={})
    assert (response.status, response.code, response.attempts, response.ok) == (
        status,
        "some.code",
        1,
        False,
    )
    with pytest.raises(httpx.HTTPStatusError):
        response.raise_for_status()


@pytest.mark.parametrize(
    "body", [{"code": "idempotency.in_progress"}, {"error": "IDEMPOTENCY_IN_PROGRESS"}]
)
def test_conflict_with_a_running_request_is_retried(
    client: Client, service: Service, body: dict[str, str]
) -> None:
    service.script = [(409, {"Retry-After": "1"}, body), OK]
    assert client.post("/things", json={}).status == 201
    assert len(service.seen) == 2


def test_retry_after_is_the_shortest_delay(
    client: Client, service: Service, slept: list[float]
) -> None:
    service.script = [failing(503, retry_after="7"), OK]
    client.post("/things", json={})
    assert slept == [7.0]


def test_retry_after_beyond_max_seconds_ends_the_retries(
    service: Service, slept: list[float]
) -> None:
    with Client(service.url, sleep=slept.append, max_seconds=5) as client:
        service.script = [failing(503, retry_after="600")]
        assert client.post("/things", json={}).status == 503
    assert slept == []


def test_fifth_server_error_is_returned(client: Client, service: Service) -> None:
    service.script = [failing(500)] * 5
    response = client.post("/things", json={})
    assert (response.status, response.attempts) == (500, 5)


def test_gave_up_error_has_the_key(client: Client, service: Service) -> None:
    service.script = [CUT] * 5
    with pytest.raises(GaveUpError) as gave_up:
        client.post("/things", json={})
    assert gave_up.value.attempts == 5
    assert {seen["idempotency-key"] for seen in service.seen} == {gave_up.value.key}


def test_get_has_no_key(client: Client, service: Service) -> None:
    service.script = [failing(502), OK]
    response = client.get("/things")
    assert response.key is None
    assert all("idempotency-key" not in seen for seen in service.seen)
    with pytest.raises(UsageError):
        client.request("GET", "/things", key="k")


def test_token_function_is_called_for_each_attempt(service: Service) -> None:
    tokens = iter(["old", "new"])
    with Client(service.url, token=lambda: next(tokens), sleep=lambda _: None) as client:
        service.script = [failing(503), OK]
        client.post("/things", json={})
    assert [seen["authorization"] for seen in service.seen] == ["Bearer old", "Bearer new"]


def test_redirects_are_not_followed(client: Client, service: Service) -> None:
    service.script = [failing(307, location="http://127.0.0.1:1/elsewhere")]
    assert client.post("/things", json={}).status == 307
    with pytest.raises(UsageError):
        Client(service.url, follow_redirects=True)


def test_client_rejects_an_async_token(service: Service) -> None:
    async def token() -> str:
        return "t"

    made: list[Any] = []

    def keep() -> Any:
        made.append(token())
        return made[-1]

    with Client(service.url, token=keep) as client, pytest.raises(UsageError):
        client.post("/things", json={})
    made[0].close()


@pytest.fixture
def app(tmp_path: Path) -> tuple[Onceward, FastAPI]:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/client.db",
        tenants=SINGLE_TENANT,
        config=GuardConfig(sweep_every_seconds=None),
    )
    made = FastAPI()

    @made.post("/things", status_code=201)
    @onceward.guard()
    async def create(tx: Tx) -> dict[str, int]:
        await tx.execute("CREATE TABLE IF NOT EXISTS things (id INTEGER PRIMARY KEY)")
        await tx.execute("INSERT INTO things DEFAULT VALUES")
        row = await tx.fetch_one("SELECT count(*) AS n FROM things")
        assert row is not None
        return {"n": row["n"]}

    onceward.install(made)
    return onceward, made


class LosesResponses(httpx.AsyncBaseTransport):
    """Delivers every request; loses every second response, beginning with the first."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._count = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        self._count += 1
        if self._count % 2:
            await response.aread()
            raise httpx.ReadError("the connection was cut after the commit")
        return response


async def test_lost_response_is_replayed_without_a_second_effect(
    app: tuple[Onceward, FastAPI],
) -> None:
    onceward, made = app
    await onceward.open()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def token() -> str:
        return "a-token"

    transport = LosesResponses(httpx.ASGITransport(made))
    async with AsyncClient("http://app", token=token, sleep=sleep, transport=transport) as client:
        responses = [await client.post("/things", json={"n": n}) for n in range(5)]
    await onceward.close()
    assert [response.json()["n"] for response in responses] == [1, 2, 3, 4, 5]
    assert all(response.replayed and response.attempts == 2 for response in responses)
    assert {response.effect for response in responses} == {"stored"}
    assert all(response.original_request_id != response.request_id for response in responses)
    assert len(pauses) == 5


# -- batches ---------------------------------------------------------------------------------------

LOCAL = "0d0e4a4e-55ac-4b3b-8c3f-5b1a9f5a7c11"


def actions(count: int) -> list[Action]:
    return [Action(method="POST", path="/notes", json={"n": n}, key=f"k{n}") for n in range(count)]


def results(*statuses: int, retry_after: float | None = None, **headers: str) -> Any:
    found = [
        {"status": status, "headers": headers, "body": {"status": status}} for status in statuses
    ]
    return 200, {}, {"results": found, "retry_after": retry_after}


def keys_of(service: Service) -> list[list[str]]:
    return [[item["key"] for item in json.loads(body)["items"]] for body in service.bodies]


def test_batch_sends_the_rest_after_a_prefix(
    client: Client, service: Service, slept: list[float]
) -> None:
    service.script = [results(201, retry_after=7), results(201, 422)]
    found = client.batch(actions(3))
    assert [response.status for response in found] == [201, 201, 422]
    assert keys_of(service) == [["k0", "k1", "k2"], ["k1", "k2"]]
    assert slept == [7]
    assert [response.attempts for response in found] == [1, 2, 2]
    assert [response.key for response in found] == ["k0", "k1", "k2"]
    assert found[2].json() == {"status": 422}
    UUID(found[0].correlation_id)


def test_batch_is_sent_again_when_there_is_no_response(client: Client, service: Service) -> None:
    service.script = [CUT, failing(503), results(201, 201)]
    assert [response.attempts for response in client.batch(actions(2))] == [3, 3]
    assert keys_of(service) == [["k0", "k1"]] * 3
    assert service.seen[0]["authorization"] == "Bearer t-1"


def test_items_that_failed_for_a_time_are_sent_again_with_those_behind_them(
    client: Client, service: Service
) -> None:
    skipped = {"status": 424, "headers": {"Onceward-Error": "batch.skipped"}, "body": None}
    first = {"status": 201, "headers": {}, "body": {"id": 7}}
    busy = {"status": 500, "headers": {}, "body": None}
    service.script = [
        (200, {}, {"results": [first, busy, skipped]}),
        (200, {}, {"results": [first, first, first]}),
    ]
    refer = f"{{local:{LOCAL}}}"
    found = client.batch(
        [
            Action(method="POST", path="/notes", json={}, key="k0", local_id=LOCAL),
            Action(method="PATCH", path=f"/notes/{refer}", json={}, key="k1", lane="x"),
            Action(method="PATCH", path="/notes/8", json={}, key="k2", lane="x"),
        ]
    )
    assert [response.status for response in found] == [201, 201, 201]
    # The first one is in both: the second refers to it, and it is a replay.
    assert keys_of(service) == [["k0", "k1", "k2"]] * 2


def test_skipped_item_behind_a_refused_one_is_final(client: Client, service: Service) -> None:
    headers = {"Onceward-Error": "batch.skipped"}
    refused = {"status": 422, "headers": {}, "body": None}
    skipped = {"status": 424, "headers": headers, "body": None}
    service.script = [(200, {}, {"results": [refused, skipped]})]
    assert [response.status for response in client.batch(actions(2))] == [422, 424]


def test_batch_that_is_too_large_is_halved(client: Client, service: Service) -> None:
    service.script = [failing(413), results(201, 201), results(201, 201)]
    assert len(client.batch(actions(4))) == 4
    assert [len(keys) for keys in keys_of(service)] == [4, 2, 2]


def test_batch_that_is_refused_raises_with_what_came_before(
    client: Client, service: Service
) -> None:
    service.script = [results(201), failing(404)]
    with pytest.raises(BatchRefusedError, match="404") as raised:
        client.batch(actions(2))
    assert [found and found.status for found in raised.value.responses] == [201, None]
    assert raised.value.response.status == 404


def test_batch_without_a_response_gives_up_with_what_came_before(
    client: Client, service: Service
) -> None:
    service.script = [results(201), *[CUT] * 5]
    with pytest.raises(GaveUpError, match="/notes in a batch") as raised:
        client.batch(actions(2))
    assert raised.value.key == "k1"
    assert [found and found.status for found in raised.value.responses] == [201, None]


def test_reads_cannot_be_in_a_batch(client: Client) -> None:
    with pytest.raises(UsageError, match="GET"):
        client.batch([Action(method="GET", path="/notes")])


def test_empty_batch_sends_nothing(client: Client, service: Service) -> None:
    assert client.batch([]) == []
    assert service.seen == []
