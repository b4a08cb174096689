"""Documents at the limits of their size."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import httpx
import pytest

from onceward_protocol.clock import SystemClock
from onceward_services.field.model import (
    SERVER_FIELDS_BYTES,
    encode,
    merge_patch,
    response_text,
    server_fields,
)
from onceward_services.field.repository import add_next, next_change
from onceward_services.large_bodies import decode_document
from packages.services.tests.conftest import Serve

ACTIVITIES = "/api/v1/activities"
LIMIT = 1_048_576


def key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4()), "Content-Type": "application/json"}


def of_bytes(size: int) -> bytes:
    body = b'{"note":"' + b"x" * (size - 11) + b'"}'
    assert len(body) == size
    return body


@pytest.fixture
async def client(serve: Serve, database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(database_url) as made:
        yield made


async def listed(client: httpx.AsyncClient) -> list[Any]:
    items: list[Any] = (await client.get(ACTIVITIES)).json()["items"]
    return items


async def refused(client: httpx.AsyncClient, method: str, path: str, body: bytes) -> None:
    """Check that retries get the same response."""
    before, again = await listed(client), key()
    for _ in range(2):
        response = await client.request(method, path, content=body, headers=again)
        assert (response.status_code, response.json()["code"]) == (413, "request.too_large")
    assert response.headers["idempotency-replayed"] == "true"
    assert await listed(client) == before


async def test_the_largest_body_is_kept_and_replayed(client: httpx.AsyncClient) -> None:
    again = key()
    made = await client.post(ACTIVITIES, content=of_bytes(LIMIT), headers=again)
    assert made.status_code == 201, made.text[:300]
    replay = await client.post(ACTIVITIES, content=of_bytes(LIMIT), headers=again)
    assert (replay.status_code, replay.content) == (201, made.content)
    one = made.headers["location"]
    put = await client.put(one, content=of_bytes(LIMIT), headers=key())
    assert (put.status_code, put.json()["version"]) == (200, 2)
    assert len((await client.get(one)).json()["note"]) == LIMIT - 11


async def test_a_document_that_outgrows_the_limit_by_a_merge_is_refused(
    client: httpx.AsyncClient,
) -> None:
    made = await client.post(ACTIVITIES, json={"a": "x" * 700_000}, headers=key())
    assert made.status_code == 201
    more = json.dumps({"b": "y" * 400_000}).encode()
    await refused(client, "PATCH", made.headers["location"], more)
    less = await client.patch(made.headers["location"], json={"b": "y" * 300_000}, headers=key())
    assert less.status_code == 200


async def test_document_size_is_that_of_the_stored_encoding(
    client: httpx.AsyncClient,
) -> None:
    body = b'{"a":[' + b",".join([b"1e9"] * 100_000) + b"]}"
    await refused(client, "POST", ACTIVITIES, body)
    made = await client.post(ACTIVITIES, json={"a": 1}, headers=key())
    await refused(client, "PUT", made.headers["location"], body)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_response_bytes": 1000},
        {"max_body_bytes": 1000, "max_response_bytes": 1000},
        {"max_body_bytes": 4 * LIMIT},
    ],
)
async def test_whatever_the_limits_are_nothing_is_an_internal_error(
    serve: Serve, sqlite_url: str, limits: dict[str, int]
) -> None:
    async with serve(sqlite_url, **limits) as client:
        for size in (500, 700, 744, 745, 900, 1000, 1001, 2 * LIMIT - 100, 2 * LIMIT, 3 * LIMIT):
            response = await client.post(ACTIVITIES, content=of_bytes(size), headers=key())
            assert response.status_code in (201, 413), (size, response.text[:300])


async def test_large_documents_are_decoded_and_encoded_in_the_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def recording(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(value)

        return run

    monkeypatch.setattr(
        "onceward_services.large_bodies.decode_document", recording(decode_document)
    )
    monkeypatch.setattr("onceward_services.field.document_writer.encode", recording(encode))
    body = {"a": [1.0, 12345678901234567890123, 5e-324, "é"] * 5000}
    made = await client.post(ACTIVITIES, json=body, headers=key())
    assert made.status_code == 201
    assert made.json()["a"] == body["a"]
    patched = await client.patch(made.headers["location"], json={"b": 1}, headers=key())
    assert patched.json()["a"] == body["a"]
    assert len(threads) == 3, "the small body of the patch is decoded by FastAPI"
    assert all(name.startswith("onceward-bodies") for name in threads), threads


async def test_one_large_document_is_decoded_at_a_time(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0

    def counted(write: Any) -> Any:
        async def counting(*arguments: Any, **named: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return await write(*arguments, **named)

        return counting

    for write in (next_change, add_next):  # of SQLite and of PostgreSQL
        name = f"onceward_services.field.document_writer.{write.__name__}"
        monkeypatch.setattr(name, counted(write))
    body = of_bytes(100_000)
    made = await asyncio.gather(
        *(client.post(ACTIVITIES, content=body, headers=key()) for _ in range(3))
    )
    assert [response.status_code for response in made] == [201] * 3
    assert most == 1


def test_server_fields_fit_their_size_limit() -> None:
    now = SystemClock().now()
    largest = server_fields(
        document_id=str(uuid4()),
        version=2**63 - 1,
        occurred_at=now,
        created_at=now,
        updated_at=now,
    )
    assert len(encode(largest)) < SERVER_FIELDS_BYTES


@pytest.mark.parametrize("fields", [{}, {"a": [1.0, "é}"]}, {"b": {}, "c": None}])
def test_response_is_the_document_with_the_fields_of_the_server(fields: dict[str, Any]) -> None:
    assert response_text(encode(fields), {"id": "x"}) == encode(fields | {"id": "x"})


async def test_a_page_of_a_list_has_at_most_so_many_bytes_as_a_response(
    serve: Serve, sqlite_url: str
) -> None:
    async with serve(sqlite_url, max_response_bytes=4000) as client:
        for number in range(40):
            # Every tenth is large; the others are small.
            note = "x" * (3000 if number % 10 == 9 else 10)
            body = {"number": number, "note": note}
            assert (await client.post(ACTIVITIES, json=body, headers=key())).is_success
        for limit in (1, 7, 20, 39, 40, 500):
            found: list[int] = []
            after: str | None = "0"
            while after is not None:
                query = f"?limit={limit}&after={after}"
                response = await client.get(ACTIVITIES + query)
                page = response.json()
                assert 1 <= len(page["items"]) <= limit
                assert len(response.content) <= 4000 + 100
                found += [item["number"] for item in page["items"]]
                after = page["next"]
            assert found == list(range(40)), limit


@pytest.mark.parametrize(
    ("old", "patch"),
    [
        ({"a": {"b": 1, "c": [None, {"d": None}]}}, {"a": {"b": None, "e": {"f": None, "g": []}}}),
        ({"a": [1]}, {"a": {"b": {"c": None, "d": {}}}}),
        ({"a": {"b": 1}, "z": 1.0}, {"a": None, "z": [{"a": None}]}),
        ({}, {"a": "{", "b": {"c": "null"}}),
    ],
)
def test_members_that_stay_encoded_are_merged_like_others(
    old: dict[str, Any], patch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = merge_patch(old, patch)
    monkeypatch.setattr("onceward_services.large_bodies._SMALL_MEMBER_BYTES", 4)
    merged = merge_patch(
        decode_document(json.dumps(old).encode()), decode_document(json.dumps(patch).encode())
    )
    assert json.loads(encode(merged)) == expected
