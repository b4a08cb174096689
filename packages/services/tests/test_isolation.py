"""No route of the server reveals anything about the ids of another tenant.

The requests are made from the OpenAPI document, so that a new route cannot be forgotten: one whose
ids this test cannot create is a failure.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from onceward.sign_in.jwt_auth import mint_token
from onceward_protocol.ids import new_id
from onceward_services.app import create_app
from onceward_services.planning.inbox import Inbox, add_notification
from onceward_services.routes.repository import save_route
from onceward_services.settings import load_settings
from onceward_services.walk.catalogue import bundled_catalogue
from onceward_services.walk.steps.reviews import list_reviews, open_review

from .conftest import SECRET, Serve

NOWHERE = "01970000-0000-4000-8000-000000000000"
QUEST = next(iter(bundled_catalogue().quests))


def _document() -> dict[str, Any]:
    settings = load_settings(database_url="sqlite:///nowhere.db", jwt_secret=SECRET)
    document: dict[str, Any] = create_app(settings).openapi()
    return document


def _operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for choice in schema.get("anyOf", ()):
        if "$ref" in choice:
            return _resolved(document, choice)
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _example(field: dict[str, Any]) -> Any:
    return next(iter((*field.get("examples", ()), *field.get("enum", ()))), None)


def _body(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI example of a body, with current times."""
    if "requestBody" not in operation:
        return {}
    content = operation["requestBody"]["content"]["application/json"]
    examples = [each["value"] for each in content.get("examples", {}).values()]
    schema = _resolved(document, content["schema"])
    fields = schema.get("properties", {})
    needed = {name: _example(fields[name]) for name in schema.get("required", ())}
    body = dict((examples or schema.get("examples") or [needed])[0])
    if "clientGeneratedAt" in fields:
        body["clientGeneratedAt"] = datetime.now(UTC).isoformat()
    return body


class Person:
    """An authenticated caller of one tenant."""

    def __init__(self, client: httpx.AsyncClient, sub: str, org: str, store: Any) -> None:
        now = datetime.now(UTC)
        token = mint_token(SECRET, sub=sub, org=org, lifetime=timedelta(hours=1), now=now)
        self.signed_in = {"Authorization": f"Bearer {token}"}
        self._client = client
        self.sub, self.org = sub, org
        self.store = store

    async def send(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = self.signed_in | {"Idempotency-Key": str(uuid4()), "If-Match": '"1"'}
        given: Any = {} if method in ("GET", "DELETE") else {"json": body}
        return await self._client.request(method, path, headers=headers, **given)

    async def make(self, path: str, body: dict[str, Any]) -> str:
        """Create something and return its id, which a create's location ends with."""
        response = await self.send("POST", path, body)
        assert response.status_code in (200, 201, 202), response.text
        return str(response.headers["location"].rpartition("/")[2])


# -- how to make what an id names ----------------------------------------------------------------

Make = Callable[[Person], Awaitable[dict[str, str]]]


async def _route(who: Person) -> dict[str, str]:
    body = {"start": {"lat": 1, "lon": 2}, "minutes": 5}
    return {"request_id": await who.make("/api/v1/routes", body)}


async def _finished_route(who: Person) -> dict[str, str]:
    made = await _route(who)
    unit = await who.store.begin()
    route = {"places": [], "distance_m": 0, "duration_minutes": 0}
    now = datetime.now(UTC)
    await save_route(unit.transaction, tenant=who.sub, **made, route=route, now=now)
    await unit.commit(None, None)
    return made


def _item(kind: str) -> Make:
    async def make(who: Person) -> dict[str, str]:
        return {"item_id": await who.make(f"/api/v1/{kind}", {"title": "Visit"})}

    return make


async def _project(who: Person) -> dict[str, str]:
    return {"project_id": await who.make("/v1/projects", {"name": "Harbour"})}


async def _mission(who: Person) -> dict[str, str]:
    project_id = (await _project(who))["project_id"]
    path = f"/v1/projects/{project_id}/missions"
    return {"mission_id": await who.make(path, {"title": "Survey"})}


async def _assignment(who: Person) -> dict[str, str]:
    mission_id = (await _mission(who))["mission_id"]
    path = f"/v1/missions/{mission_id}/assignments"
    return {"assignment_id": await who.make(path, {"assignee": "bob"})}


async def _notification(who: Person) -> dict[str, str]:
    now = datetime.now(UTC)
    notification_id, unit = new_id(now), await who.store.begin()
    about = {"assignment_id": notification_id, "version": 1, "kind": "moved", "mission_id": "m"}
    inbox = Inbox(f"org:{who.org}", who.sub)
    await add_notification(unit.transaction, inbox, about, notification_id=notification_id, now=now)
    await unit.commit(None, None)
    return {"notification_id": notification_id}


async def _webhook(_who: Person) -> dict[str, str]:
    return {"webhook_id": NOWHERE, "delivery_id": NOWHERE}


async def _started_quest(who: Person) -> dict[str, str]:
    response = await who.send("POST", "/quest/start", {"questId": QUEST})
    assert response.status_code == 200, response.text
    return {"quest_id": QUEST, "step": "1"}


async def _device(who: Person) -> dict[str, str]:
    body = {"platform": "web", "token": f"token-{uuid4()}"}
    return {"device_id": await who.make("/walker/devices", body)}


async def _walker(who: Person) -> dict[str, str]:
    response = await who.send("GET", "/walker/me", {})
    assert response.status_code == 200, response.text
    return {"walker_id": who.sub}


async def _review(who: Person) -> dict[str, str]:
    unit = await who.store.begin()
    now = datetime.now(UTC)
    await open_review(unit.transaction, who.sub, "anti_cheat", day=None, reasons=[], now=now)
    await unit.commit(None, None)
    found = await list_reviews(who.store, status="open", after="", limit=10)
    return {"review_id": found.items[-1].id}


@dataclass(frozen=True)
class Named:
    """How to create the resource of a path, and the response to another tenant."""

    make: Make
    status: int = 404
    # A well-formed id of nothing.
    nobodys: str = NOWHERE
    # The owner's status; without it the test would pass if nothing worked.
    owner: frozenset[int] = frozenset({200, 201, 204})


# By the part of the path that ends with the id; the longest match counts.
NAMED: dict[str, Named] = {
    "/api/v1/routes/{request_id}": Named(_route),
    "/api/v1/routes/{request_id}/geojson": Named(_finished_route),
    "/api/v1/routes/{request_id}/gpx": Named(_finished_route),
    "/api/v1/activities/{item_id}": Named(_item("activities")),
    "/api/v1/contacts/{item_id}": Named(_item("contacts")),
    "/api/v1/expenses/{item_id}": Named(_item("expenses")),
    "/v1/projects/{project_id}": Named(_project),
    "/v1/missions/{mission_id}": Named(_mission),
    "/v1/assignments/{assignment_id}": Named(_assignment),
    "/v1/notifications/{notification_id}": Named(_notification),
    # Webhooks are for admins. Their own tests have admins of two organizations.
    "/v1/webhooks/{webhook_id}": Named(_webhook, 403, owner=frozenset({403})),
    # Quests are shared, but their progress is not. 422: not in progress.
    "/quest/{quest_id}/step/{step}": Named(_started_quest, 422, nobodys=QUEST),
    # Reviews are for admins. Other callers get 403 for any id.
    "/admin/review-queue/{review_id}": Named(_review, 403, owner=frozenset({403})),
    "/walker/devices/{device_id}": Named(_device),
    "/admin/walkers/{walker_id}": Named(_walker, 403, owner=frozenset({403})),
}

# The fields of a body that refer to a resource. Here the caller owns the path but not the resource.
IN_BODIES: dict[tuple[str, str, str], str] = {
    ("POST", "/v1/assignments/{assignment_id}/move", "mission_id"): "/v1/missions/{mission_id}",
    **{
        (method, path, f"{one}_id"): f"/api/v1/{many}/{{item_id}}"
        for method, path in (
            ("POST", "/api/v1/expenses"),
            ("PUT", "/api/v1/expenses/{item_id}"),
            ("PATCH", "/api/v1/expenses/{item_id}"),
        )
        for one, many in (("activity", "activities"), ("contact", "contacts"))
    },
}


def _named(path: str) -> tuple[str, Named]:
    fitting = [prefix for prefix in NAMED if path == prefix or path.startswith(f"{prefix}/")]
    assert fitting, f"{path} has an id: say in NAMED how to make what it names"
    prefix = max(fitting, key=len)
    return prefix, NAMED[prefix]


def _filled(path: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        path = path.replace(f"{{{name}}}", value)
    assert "{" not in path
    return path


def _told(response: httpx.Response) -> tuple[Any, ...]:
    """Return the parts of a response that do not depend on the request."""
    own = {"x-request-id", "x-correlation-id", "ratelimit"}
    headers = {name: value for name, value in response.headers.items() if name not in own}
    return response.status_code, headers, response.json() | {"requestId": ""}


@pytest.fixture
async def people(serve: Serve, database_url: str) -> Any:
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append) as client:
        store = apps[0].state.onceward.store
        yield Person(client, "ada", "acme", store), Person(client, "eve", "globex", store)


async def test_id_of_another_tenant_in_a_path_is_like_an_unknown_id(people: Any) -> None:
    ada, eve = people
    document = _document()
    asked = [each for each in _operations(document) if "{" in each[1]]
    assert {_named(path)[0] for _, path, _ in asked} == set(NAMED)
    for method, template, operation in asked:
        named, body = _named(template)[1], _body(document, operation)
        names = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
        nobodys = {name: "1" if name == "step" else named.nobodys for name in names}
        nothing = await eve.send(method, _filled(template, nobodys), body)
        adas = _filled(template, await named.make(ada))
        something = await eve.send(method, adas, body)
        assert something.status_code == named.status, (method, template, something.text)
        assert _told(something) == _told(nothing), (method, template)
        # References in bodies are checked by the next test.
        for field in body:
            target = IN_BODIES.get((method, template, field))
            if target is not None:
                body[field] = next(iter((await NAMED[target].make(ada)).values()))
        owners = await ada.send(method, adas, body)
        assert owners.status_code in named.owner, (method, template, owners.text)


async def test_id_of_another_tenant_in_a_body_is_like_an_unknown_id(people: Any) -> None:
    ada, eve = people
    document = _document()
    schemas = {
        (method, path): _resolved(
            document, operation["requestBody"]["content"]["application/json"]["schema"]
        )
        for method, path, operation in _operations(document)
        if "requestBody" in operation
    }
    documented = {
        (method, path, field)
        for (method, path), schema in schemas.items()
        for field in schema.get("properties", {})
        if field.endswith("_id")
    }
    assert documented <= set(IN_BODIES), "say in IN_BODIES what these fields name"
    operations = {(method, path): each for method, path, each in _operations(document)}
    for (method, template, field), target in IN_BODIES.items():
        body = _body(document, operations[method, template])
        adas = next(iter((await NAMED[target].make(ada)).values()))
        responses = []
        for who, named in (eve, NOWHERE), (eve, adas), (ada, adas):
            ids = await _named(template)[1].make(who) if "{" in template else {}
            path = _filled(template, ids)
            responses.append(await who.send(method, path, body | {field: named}))
        nothing, something, owners = responses
        assert something.status_code == 404, (method, template, field, something.text)
        assert _told(something) == _told(nothing), (method, template, field)
        assert owners.status_code in (200, 201), (method, template, field, owners.text)


async def test_list_has_nothing_of_another_tenant(people: Any) -> None:
    ada, eve = people
    document = _document()
    for named in NAMED.values():
        await named.make(ada)
    lists = [
        path
        for method, path, operation in _operations(document)
        if method == "GET" and "{" not in path and operation["tags"] != ["ops"]
    ]
    assert len(lists) >= 8
    seen = 0
    for path in lists:
        theirs = await eve.send("GET", path, {})
        if theirs.status_code == 403:  # for admins
            continue
        ours = await ada.send("GET", path, {})
        assert theirs.status_code == ours.status_code == 200, (path, theirs.text)
        assert "ada" not in theirs.text, path
        assert theirs.json().get("items", []) == [], path
        seen += bool(ours.json().get("items"))
    assert seen >= 5
