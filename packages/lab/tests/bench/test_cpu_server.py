"""The apps of the CPU table respond; PostgreSQL's are started by the table itself."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from onceward_lab.bench.cpu_server import APPS


@pytest.mark.parametrize("name", ["fastapi", "guard", "guarded_sqlite"])
def test_app_responds_to_a_guarded_request(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_DATABASE", f"sqlite:///{tmp_path}/cpu.db")
    with TestClient(APPS[name]()) as client:
        response = client.post(
            "/orders", json={"item": "boots", "quantity": 1}, headers={"Idempotency-Key": "key-1"}
        )
    assert response.status_code == 201
