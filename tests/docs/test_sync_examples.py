"""The Flask and Django examples, each as a separate process."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from packages.onceward.tests.support.serving import ROOT, free_port

KEY = {"Idempotency-Key": "one-key", "X-Token": "token-1"}
SOURCES = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))


@pytest.mark.parametrize(
    ("example", "database"),
    [
        ("flask_shop", "flask_shop.db"),
        ("django_shop", "django_shop.db"),
    ],
)
def test_order_sent_twice_is_placed_once(example: str, database: str, tmp_path: Path) -> None:
    port = free_port()
    # As a reader would start it, but on a free port.
    source = (ROOT / "examples" / f"{example}.py").read_text().replace("8000", str(port))
    (tmp_path / "shop.py").write_text(source)
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "shop.py"],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": SOURCES},
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                deadline = time.monotonic() + 30
                while True:
                    try:
                        client.get("/")
                        break
                    except httpx.TransportError:
                        assert time.monotonic() < deadline, (tmp_path / "log.txt").read_text()
                        time.sleep(0.05)
                first = client.post("/orders?item=boots", headers=KEY)
                second = client.post("/orders?item=boots", headers=KEY)
                stranger = client.post("/orders?item=boots", headers=KEY | {"X-Token": "guessed"})
                other = client.post("/orders?item=shoes", headers=KEY)
        finally:
            process.terminate()
            process.wait(20)
    assert (first.status_code, first.json()) == (201, {"item": "boots"})
    assert second.content == first.content
    assert second.headers["idempotency-replayed"] == "true"
    assert other.status_code == 409
    assert stranger.status_code == 401
    with closing(sqlite3.connect(tmp_path / database)) as db:
        assert db.execute("SELECT item FROM orders").fetchall() == [("boots",)]
