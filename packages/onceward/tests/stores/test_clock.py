"""Processes whose clock is not the database's: expiry, sweep, and when they refuse."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from onceward import SINGLE_TENANT, Onceward
from onceward.cli.sweep import app as sweep_command
from onceward_protocol.clock import SystemClock

DAYS = [timedelta(days=8), timedelta(days=-8)]
KEY = {"idempotency-key": "9f9d1ae0-31d4-4c2f-8bb0-000000000001"}
true_now = SystemClock.now


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets how far ahead the clock of this process is from now on."""

    def shift(span: timedelta) -> None:
        monkeypatch.setattr(SystemClock, "now", staticmethod(lambda: true_now() + span))

    return shift


def send(url: str, count: int = 1) -> list[httpx.Response]:
    """Send requests with the same key to a new process."""
    onceward = Onceward(url, tenants=SINGLE_TENANT)
    app = FastAPI()

    @app.post("/things")
    @onceward.guard()
    async def make() -> dict[str, str]:
        return {"made": true_now().isoformat()}

    onceward.install(app)
    with TestClient(app) as client:
        return [client.post("/things", headers=KEY, json={}) for _ in range(count)]


def swept(url: str) -> Any:
    return CliRunner().invoke(sweep_command, ["--database", url])


@pytest.mark.parametrize("span", DAYS)
def test_process_whose_clock_is_days_off_executes_no_used_key_again(
    postgres_url: str, shift: Any, span: timedelta
) -> None:
    (first,) = send(postgres_url)
    shift(span)
    for response in send(postgres_url, 2):
        assert response.status_code == 503
        assert response.json()["details"]["reason"] == "wrong_clock"
    shift(timedelta())
    assert send(postgres_url)[0].json() == first.json()


def test_sweep_by_a_clock_that_is_days_off_deletes_nothing(postgres_url: str, shift: Any) -> None:
    (first,) = send(postgres_url)
    shift(timedelta(days=8))
    found = swept(postgres_url)
    assert found.exit_code != 0
    assert "691200 seconds ahead of the database's: correct it" in str(found.exception)
    shift(timedelta())
    assert send(postgres_url)[0].json() == first.json()


@pytest.mark.parametrize("minutes", [-4, 4])
def test_records_expire_by_the_clock_of_the_database(
    postgres_url: str, shift: Any, minutes: int, caplog: pytest.LogCaptureFixture
) -> None:
    shift(timedelta(minutes=minutes))
    (first,) = send(postgres_url)
    assert "240 seconds" in caplog.text
    at = datetime.fromisoformat(first.json()["made"])
    connection = psycopg.connect(postgres_url)
    with connection:
        row = connection.execute("SELECT created_at FROM onceward.idempotency_records").fetchone()
    assert row is not None
    assert abs(row[0] - at) < timedelta(seconds=5)
    assert swept(postgres_url).exit_code == 0


def test_sqlite_refuses_a_clock_behind_its_newest_record(tmp_path: Path, shift: Any) -> None:
    url = f"sqlite:///{tmp_path}/behind.db"
    (first,) = send(url)
    shift(timedelta(days=-8))
    (refused,) = send(url)
    assert refused.json()["details"]["reason"] == "wrong_clock"
    assert "behind the time of the newest record" in str(swept(url).exception)
    shift(timedelta())
    assert send(url)[0].json() == first.json()
