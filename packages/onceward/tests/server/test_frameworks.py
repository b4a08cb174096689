"""The same behaviour with FastAPI, Flask and Django: real processes, on both databases."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from packages.onceward.tests.support.serving import ROOT, free_port

FRAMEWORKS = [
    pytest.param(
        (framework, database), marks=pytest.mark.xdist_group(f"framework-{framework}-{database}")
    )
    for framework in ("fastapi", "flask", "django")
    for database in ("sqlite", "postgres")
]


@pytest.fixture(scope="module", params=FRAMEWORKS, ids="-".join)
def app(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    framework, database = request.param
    folder: Path = tmp_path_factory.mktemp("framework")
    url = f"sqlite:///{folder}/framework.db"
    if database == "postgres":
        server: Any = request.getfixturevalue("postgres")
        server.start()
        url = server.create_database("framework")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        f"packages.onceward.tests.support.frameworks.{framework}_app",
        url,
        str(port),
    ]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                _wait_until_up(client, process, folder / "log.txt")
                yield client
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_up(client: httpx.Client, process: Any, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            client.get("/nothing")
        except httpx.TransportError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        else:
            # The tables of Onceward come with the first guarded request.
            client.post("/orders", json={"item": "first"}, headers=key())
            return


def key(do: str = "", **more: str) -> dict[str, str]:
    return {"Idempotency-Key": uuid4().hex, "X-Do": do} | more


def counted(app: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = app.get("/orders").json()
    return found


def test_a_replay_is_the_first_response_byte_for_byte(app: httpx.Client) -> None:
    before, again = counted(app), key()
    first = app.post("/orders", json={"item": "a"}, headers=again)
    second = app.post("/orders", content=b'{ "item" : "a" }', headers=again | _JSON)
    assert (first.status_code, first.json()["item"]) == (201, "a")
    assert (second.status_code, second.content) == (201, first.content)
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["location"] == first.headers["location"] == "/orders/a"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert second.headers["x-original-request-id"] == first.headers["x-request-id"]
    assert second.headers["x-request-id"] != first.headers["x-request-id"]
    after = counted(app)
    assert after["orders"] == before["orders"] + 1
    assert after["records"] == before["records"] + 1


_JSON = {"Content-Type": "application/json"}


def test_another_body_under_the_same_key_is_a_conflict(app: httpx.Client) -> None:
    again = key()
    app.post("/orders", json={"item": "a"}, headers=again)
    before = counted(app)
    other = app.post("/orders", json={"item": "b"}, headers=again)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency.payload_mismatch")
    assert counted(app) == before


@pytest.mark.parametrize("do", ["raise", "fail"])
def test_an_exception_rolls_everything_back_and_frees_the_key(app: httpx.Client, do: str) -> None:
    before, again = counted(app), key(do)
    # Some servers close the connection shortly after a response to an exception.
    failed = app.post("/orders", json={"item": "f"}, headers=again | {"Connection": "close"})
    assert failed.status_code == 500
    assert counted(app) == before
    retried = app.post("/orders", json={"item": "f"}, headers=again | {"X-Do": ""})
    assert retried.status_code == 201
    assert "idempotency-replayed" not in retried.headers
    assert counted(app)["orders"] == before["orders"] + 1


def test_an_error_response_rolls_the_writes_back(app: httpx.Client) -> None:
    before = counted(app)["orders"]
    refused = app.post("/orders", json={"item": "r"}, headers=key("refuse"))
    assert (refused.status_code, refused.json()["code"]) == (422, "order.refused")
    assert refused.headers["content-type"] == "application/problem+json"
    assert counted(app)["orders"] == before


def test_redirects_are_not_stored_and_never_undo_a_success_in_silence(app: httpx.Client) -> None:
    before, again = counted(app), key("sign-in")
    signed_out = app.post("/orders", json={"item": "s"}, headers=again)
    assert (signed_out.status_code, signed_out.headers["location"]) == (302, "/login")
    undone = app.post("/orders", json={"item": "s"}, headers=again | {"X-Do": "see-other"})
    assert (undone.status_code, undone.json()["code"]) == (500, "server.internal")
    assert counted(app) == before
    done = app.post("/orders", json={"item": "s"}, headers=again | {"X-Do": ""})
    assert (done.status_code, "idempotency-replayed" in done.headers) == (201, False)
    assert counted(app)["orders"] == before["orders"] + 1


def test_simultaneous_duplicates_have_one_effect_and_equal_responses(app: httpx.Client) -> None:
    before = counted(app)["orders"]
    for _ in range(5):
        again = key("slow")
        with ThreadPoolExecutor(12) as pool:
            responses = list(
                pool.map(
                    lambda _, again=again: app.post("/orders", json={"item": "d"}, headers=again),
                    range(12),
                )
            )
        assert {response.status_code for response in responses} == {201}
        assert len({response.content for response in responses}) == 1
        assert sum("idempotency-replayed" not in a.headers for a in responses) == 1
    assert counted(app)["orders"] == before + 5


def test_simultaneous_requests_with_different_keys_are_all_executed(app: httpx.Client) -> None:
    before = counted(app)["orders"]
    with ThreadPoolExecutor(12) as pool:
        responses = list(
            pool.map(
                lambda n: app.post("/orders", json={"item": f"n{n}"}, headers=key()), range(60)
            )
        )
    assert {response.status_code for response in responses} == {201}
    assert counted(app)["orders"] == before + 60


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "idempotency.key_required"),
        ({"Idempotency-Key": "a b"}, "idempotency.key_invalid"),
        ({"Idempotency-Key": ""}, "idempotency.key_invalid"),
        ({"Idempotency-Key": "k" * 129}, "idempotency.key_invalid"),
    ],
)
def test_a_bad_key_is_refused(app: httpx.Client, headers: dict[str, str], code: str) -> None:
    before = counted(app)
    response = app.post("/orders", json={"item": "k"}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, code)
    assert counted(app) == before


def test_two_keys_are_refused(app: httpx.Client) -> None:
    response = app.post(
        "/orders",
        json={"item": "k"},
        headers=[("Idempotency-Key", "one"), ("Idempotency-Key", "two")],
    )
    assert (response.status_code, response.json()["code"]) == (400, "idempotency.key_invalid")


def test_a_quoted_key_is_the_same_key(app: httpx.Client) -> None:
    bare = uuid4().hex
    first = app.post("/orders", json={"item": "q"}, headers={"Idempotency-Key": bare})
    quoted = app.post("/orders", json={"item": "q"}, headers={"Idempotency-Key": f'"{bare}"'})
    assert first.status_code == 201
    assert quoted.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("body", [b"{", b'{"item":1,"item":2}', b'{"item":NaN}', b"\xff"])
def test_a_body_that_cannot_be_read_is_refused(app: httpx.Client, body: bytes) -> None:
    before = counted(app)
    response = app.post("/orders", content=body, headers=key() | _JSON)
    assert (response.status_code, response.json()["code"]) == (400, "request.invalid")
    assert counted(app) == before


def test_a_body_that_is_too_large_is_refused(app: httpx.Client) -> None:
    before = counted(app)
    response = app.post("/orders", json={"item": "x" * 30_000}, headers=key())
    assert (response.status_code, response.json()["code"]) == (413, "request.too_large")
    assert counted(app) == before


def test_a_job_is_enqueued_with_the_write_or_not_at_all(app: httpx.Client) -> None:
    before = counted(app)["jobs"]
    item, again = uuid4().hex, key("enqueue")
    for _ in range(2):
        assert app.post("/orders", json={"item": item}, headers=again).status_code == 201
    assert counted(app)["jobs"] == before + 1


def test_unguarded_operations_are_unchanged(app: httpx.Client) -> None:
    assert app.get("/orders").status_code == 200
    assert app.get("/nothing").status_code == 404
    assert app.options("/orders").status_code in (200, 204, 405, 500)


def test_strict_sequences_run_in_order(app: httpx.Client) -> None:
    client = uuid4().hex

    def send(number: int, do: str = "", name: str = "") -> httpx.Response:
        headers = {
            "Idempotency-Key": f"{client}-{name or number}",
            "X-Client-ID": client,
            "X-Sequence": str(number),
            "X-Do": do,
        }
        return app.post("/numbered", json={"item": "n"}, headers=headers)

    before = counted(app)["orders"]
    first = send(1)
    assert first.status_code == 201, first.text
    gap, other = send(3), send(1, name="other")
    assert gap.status_code == other.status_code == 422
    assert gap.json()["details"] == {"expected": 2}
    assert other.json()["details"] == {"expected": 2, "used_by": "other_key"}
    assert send(1).headers["idempotency-replayed"] == "true"
    # Different keys with one number at the same time: one of them runs, the others wait for it.
    with ThreadPoolExecutor(4) as pool:
        raced = list(pool.map(lambda name: send(2, "slow", name), "abcd"))
    assert sorted(each.status_code for each in raced) == [201, 422, 422, 422]
    assert send(3).status_code == 201
    assert counted(app)["orders"] == before + 3
