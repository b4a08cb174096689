"""Steps of the feature, against the real service on a real PostgreSQL."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from pytest_bdd import given, parsers, scenarios, then, when

from onceward.sign_in.jwt_auth import mint_token
from onceward_services.app import create_app
from onceward_services.settings import load_settings
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.reset_db import empty_postgres
from packages.onceward.tests.support.shared_validators import shared_validators
from packages.services.tests.support.services_database import migrate

scenarios("route_submission_idempotency.feature")

SECRET = "a secret for tests, long enough for HS256"
PATH = "/api/v1/routes"
WALK: dict[str, Any] = {
    "start": {"lat": 55.9533, "lon": -3.1883},
    "minutes": 90,
    "interests": ["history", "coffee"],
}
OTHER_WALK = WALK | {"minutes": 30}


class World:
    """One service and its users."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._runner = asyncio.Runner()
        self.clock = HeldClock()
        self.key = str(uuid4())
        self.first: httpx.Response | None = None
        self.response: httpx.Response
        self.responses: list[httpx.Response] = []
        self._start()

    def _start(self) -> None:
        settings = load_settings(
            database_url=self._database,
            jwt_secret=SECRET,
            routes_success_ttl_hours=24.0,
            breaker_open_seconds=0.1,
        )
        self._app = create_app(settings, clock=self.clock, only=["routes", "walk"])
        self._runner.run(self._app.state.onceward.open())

    def _stop(self) -> None:
        self._runner.run(self._app.state.onceward.close())

    def restart(self) -> None:
        self._stop()
        self._start()

    def close(self) -> None:
        self._stop()
        self._runner.close()

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def sweep(self) -> int:
        return int(self.run(self._app.state.onceward.runtime.sweeper.sweep()))

    def headers(self, who: str | None, key: str | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if who is not None:
            token = mint_token(SECRET, sub=who, lifetime=timedelta(hours=1), now=self.clock.now())
            headers["Authorization"] = f"Bearer {token}"
        return headers if key is None else headers | {"Idempotency-Key": key}

    async def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://routes") as client:
            return await client.request(method, path, **more)

    def submit(
        self,
        walk: Any = None,
        *,
        key: str | None,
        who: str | None = "ada",
        raw: bytes | None = None,
    ) -> None:
        body = json.dumps(WALK if walk is None else walk).encode() if raw is None else raw
        headers = self.headers(who, key)
        self.response = self.run(self._ask("POST", PATH, content=body, headers=headers))

    def submit_at_once(self, times: int) -> None:
        async def all_at_once() -> list[httpx.Response]:
            headers = self.headers("ada", self.key)
            return await asyncio.gather(
                *(self._ask("POST", PATH, json=WALK, headers=headers) for _ in range(times))
            )

        self.responses = self.run(all_at_once())

    def look(self, path: str, who: str) -> httpx.Response:
        response: httpx.Response = self.run(self._ask("GET", path, headers=self.headers(who, None)))
        return response

    def kept(self) -> int:
        store = self._app.state.onceward.store
        rows = self.run(store.read("SELECT count(*) AS n FROM route_requests"))
        return int(rows[0]["n"])


@pytest.fixture(scope="module")
def routes_database(postgres: RealPostgres) -> Iterator[str]:
    postgres.start()
    url = postgres.create_database("features")
    asyncio.run(migrate(url))
    with shared_validators():
        yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
def world(
    postgres: RealPostgres, routes_database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    postgres.start()  # a scenario before this one may have stopped it
    asyncio.run(empty_postgres(routes_database))
    for name in list(os.environ):
        if name.startswith("ONCEWARD_") or name == "ROUTES_IDEMPOTENCY_TTL_HOURS":
            monkeypatch.delenv(name)
    world = World(routes_database)
    yield world
    world.close()


# -- given ------------------------------------------------------------------------------------


@given("a route service on PostgreSQL")
def _(world: World) -> None:
    assert world.kept() == 0


@given("Ada is signed in")
def _(world: World) -> None:
    assert "Authorization" in world.headers("ada", None)


@given("she has submitted a route with a key")
def _(world: World) -> None:
    world.submit(key=world.key)
    assert world.response.status_code == 202
    world.first = world.response


# -- when -------------------------------------------------------------------------------------


@when("she submits a route with a new key")
def _(world: World) -> None:
    world.key = str(uuid4())
    world.submit(key=world.key)


@when("she submits a route with that key")
@when("she submits the same route with the same key")
def _(world: World) -> None:
    world.submit(key=world.key)


@when("she submits another route with the same key")
def _(world: World) -> None:
    world.submit(OTHER_WALK, key=world.key)


@when("she submits the same route, its fields in another order, with the same key")
def _(world: World) -> None:
    world.submit(raw=json.dumps(dict(reversed(WALK.items())), indent=3).encode(), key=world.key)


@when("she submits a route without a key")
def _(world: World) -> None:
    if hasattr(world, "response"):
        world.first = world.response
    world.submit(key=None)


@when(parsers.parse('she submits a route with the key "{key}"'))
def _(world: World, key: str) -> None:
    world.submit(key=key)


@when(parsers.parse("she submits the body {body} with a new key"))
def _(world: World, body: str) -> None:
    world.submit(raw=body.encode(), key=world.key)


@when("she submits a route of 0 minutes with a new key")
def _(world: World) -> None:
    world.submit(WALK | {"minutes": 0}, key=world.key)


@when(parsers.parse("she submits a route {times:d} times at once with a new key"))
def _(world: World, times: int) -> None:
    world.submit_at_once(times)


@when("Eve submits the same route with the same key")
def _(world: World) -> None:
    world.submit(key=world.key, who="eve")


@when("somebody unknown submits the same route with the same key")
def _(world: World) -> None:
    world.submit(key=world.key, who=None)


@when(parsers.parse("{hours:g} hours pass"))
def _(world: World, hours: float) -> None:
    world.clock.pass_by(hours=hours)


@when("the expired records are swept")
def _(world: World) -> None:
    assert world.sweep() == 1


@when("the service is restarted")
def _(world: World) -> None:
    world.restart()


@when("PostgreSQL is stopped")
def _(postgres: RealPostgres) -> None:
    postgres.stop("immediate")


@when("PostgreSQL is started again")
def _(postgres: RealPostgres) -> None:
    postgres.start()
    time.sleep(0.15)  # the breaker's time


@when("PostgreSQL is killed and started again")
def _(postgres: RealPostgres, world: World) -> None:
    postgres.kill()
    postgres.start()
    world.restart()  # clears the service's memory


# -- then -------------------------------------------------------------------------------------


def request_id(response: httpx.Response | None) -> str:
    assert response is not None
    return str(UUID(response.json()["request_id"]))


@then("it is accepted with a request id")
def _(world: World) -> None:
    response = world.response
    assert response.status_code == 202, response.text
    assert response.json() == {"request_id": request_id(response), "status": "accepted"}
    assert response.headers["location"] == f"{PATH}/{request_id(response)}"
    assert world.look(response.headers["location"], "ada").json()["status"] == "queued"


@then("it is accepted with the same request id")
def _(world: World) -> None:
    assert world.first is not None
    assert (world.response.status_code, world.response.content) == (202, world.first.content)
    assert world.response.headers["location"] == world.first.headers["location"]


@then("it is accepted with another request id")
def _(world: World) -> None:
    assert world.response.status_code == 202, world.response.text
    assert request_id(world.response) != request_id(world.first)


@then("it is a replay")
def _(world: World) -> None:
    assert world.first is not None
    assert world.response.headers["idempotency-replayed"] == "true"
    original = world.response.headers["x-original-request-id"]
    assert original == world.first.headers["x-request-id"]


@then("it is no replay")
def _(world: World) -> None:
    assert "idempotency-replayed" not in world.response.headers


@then(parsers.parse('it is refused with {status:d} and "{code}"'))
def _(world: World, status: int, code: str) -> None:
    assert world.response.status_code == status, world.response.text
    problem = world.response.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["detail"]
    assert world.response.headers["content-type"] == "application/problem+json"


@then("the refusal shows both hashes")
def _(world: World) -> None:
    details = world.response.json()["details"]
    assert details["expectedHash"] != details["receivedHash"]


@then("the response says when to retry")
def _(world: World) -> None:
    assert int(world.response.headers["retry-after"]) >= 1


@then(parsers.parse("{number:d} route request is kept"))
@then(parsers.parse("{number:d} route requests are kept"))
def _(world: World, number: int) -> None:
    assert world.kept() == number


@then("Eve cannot look at Ada's request")
def _(world: World) -> None:
    assert world.first is not None
    assert world.look(world.first.headers["location"], "eve").status_code == 404
    assert world.look(world.first.headers["location"], "ada").status_code == 200


@then("all of them are accepted with one request id")
def _(world: World) -> None:
    assert {response.status_code for response in world.responses} == {202}
    assert len({response.content for response in world.responses}) == 1
