"""Every operation is in the OpenAPI document, every code on the page for mobile developers."""

import re
from typing import Any

import pytest

from onceward_services.app import create_app
from onceward_services.settings import load_settings
from onceward_services.walk.error_examples import EXAMPLES
from onceward_services.walk.errors import STATUSES, walk_error
from packages.services.tests.conftest import SECRET
from tests.docs.pages import DOCS

GUARDED = {
    "/tree/allocate": (
        "ALREADY_ALLOCATED",
        "UNKNOWN_NODE",
        "PREREQUISITES_NOT_MET",
        "INSUFFICIENT_POINTS",
        "INSUFFICIENT_ENERGY",
    ),
    "/quest/start": (
        "QUEST_ALREADY_IN_PROGRESS",
        "QUEST_ALREADY_COMPLETED",
        "PREREQUISITES_NOT_MET",
    ),
    "/quest/{quest_id}/step/{step}/advance": (
        "STEP_OUT_OF_ORDER",
        "QUEST_NOT_IN_PROGRESS",
        "QUEST_ALREADY_COMPLETED",
        "PREREQUISITES_NOT_MET",
    ),
    "/quest/complete": (
        "QUEST_INCOMPLETE",
        "QUEST_NOT_IN_PROGRESS",
        "QUEST_ALREADY_COMPLETED",
        "PREREQUISITES_NOT_MET",
    ),
    "/energy/spend": ("INSUFFICIENT_ENERGY", "UNKNOWN_SINK", "WALKER_BEING_DELETED"),
}
READ = (
    "/tree/state",
    "/quest/available",
    "/walker/me",
    "/walker/events",
    "/walker/energy",
    "/sync",
)


@pytest.fixture
def document(sqlite_url: str) -> Any:
    return create_app(load_settings(database_url=sqlite_url, jwt_secret=SECRET)).openapi()


@pytest.mark.parametrize("path", GUARDED)
def test_a_guarded_operation_documents_its_key_and_every_code(document: Any, path: str) -> None:
    operation = document["paths"][path]["post"]
    assert {"200", "400", "401", "409", "413", "422", "429", "503"} <= set(operation["responses"])
    for code in GUARDED[path]:
        assert f"`{code}` ({STATUSES[code]})" in operation["description"]
    is_optional = path == "/quest/start"
    [key] = [p for p in operation["parameters"] if p["name"] == "Idempotency-Key"]
    assert key["required"] is not is_optional
    assert ("STALE_ACTION" in operation["responses"]["422"]["description"]) is not is_optional


def test_every_code_is_documented_with_an_example_under_its_status(document: Any) -> None:
    assert {code: STATUSES[code] for code in STATUSES} == {
        code: EXAMPLES[code].status for code in STATUSES
    }
    seen: set[str] = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"] != ["walk"] or method == "get":
                continue
            described = set(re.findall(r"`([A-Z_]+)` \(\d+\)", operation.get("description", "")))
            shown = {
                code: (status, example["value"])
                for status, response in operation["responses"].items()
                for media in response.get("content", {}).values()
                for code, example in media.get("examples", {}).items()
            }
            assert set(shown) == described, (method, path)
            for code, (status, value) in shown.items():
                assert (status, value["error"]) == (str(EXAMPLES[code].status), code)
                assert set(value) == {"error", "message", "details", "requestId"}
                assert f"`{code}`" in operation["responses"][status]["description"]
            seen |= described
    assert seen == set(EXAMPLES)


@pytest.mark.parametrize("path", READ)
def test_reading_documents_its_errors_in_the_envelope(document: Any, path: str) -> None:
    responses = document["paths"][path]["get"]["responses"]
    assert {"200", "401", "503", "default"} <= set(responses)
    for status, response in responses.items():
        if status != "200":
            [content] = response["content"].values()
            assert content["schema"]["$ref"].endswith("/OncewardEnvelope")


def test_events_are_documented_as_a_page_and_as_a_stream(document: Any) -> None:
    operation = document["paths"]["/walker/events"]["get"]
    kinds = set(operation["responses"]["200"]["content"])
    assert kinds == {"application/json", "text/event-stream"}
    names = {parameter["name"] for parameter in operation["parameters"]}
    assert names == {"after", "limit", "last-event-id"}


def test_bodies_are_documented_by_their_names_on_the_wire(document: Any) -> None:
    schema = document["components"]["schemas"]["TreeAllocation"]
    assert set(schema["required"]) == {"allocations", "clientGeneratedAt"}
    assert schema["properties"]["clientGeneratedAt"]["format"] == "date-time"


def test_every_error_code_is_documented_with_its_status() -> None:
    page = (DOCS / "services/walk.md").read_text(encoding="utf-8")
    expected = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d{3}) \|", page, re.MULTILINE))
    assert {code: str(status) for code, status in STATUSES.items()}.items() <= expected.items()


@pytest.mark.parametrize("code", STATUSES)
def test_walk_error_has_its_status_and_details(code: str) -> None:
    error = walk_error(code, "because", nodeId="n")
    assert (error.status, error.code, error.message) == (STATUSES[code], code, "because")
    assert error.details == {"nodeId": "n"}
