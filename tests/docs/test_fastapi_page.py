"""The app on the FastAPI page starts, and conforms to the protocol as the page says."""

import subprocess
import sys
import time
from pathlib import Path

import httpx

from packages.onceward.tests.support.serving import free_port
from tests.docs.pages import DOCS, blocks


def test_the_app_of_the_fastapi_page_conforms(tmp_path: Path) -> None:
    found = blocks(DOCS / "how-to/guard-a-fastapi-app.md")
    (tmp_path / "shop.py").write_text(next(b.text for b in found if b.language == "python"))
    (tmp_path / "orders.json").write_text(next(b.text for b in found if b.language == "json"))
    port = free_port()
    serve = [sys.executable, "-m", "uvicorn", "shop:app", "--port", str(port)]
    check = [
        "from onceward_protocol.cli.main import main; main()",
        "conform",
        f"http://127.0.0.1:{port}",
    ]
    with (tmp_path / "log.txt").open("wb") as log:
        server = subprocess.Popen(serve, cwd=tmp_path, stdout=log, stderr=log)
        try:
            _wait_until_up(port, server)
            done = subprocess.run(
                [sys.executable, "-c", *check, "--profile", "orders.json"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            server.terminate()
            server.wait(20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed, 1 skipped" in done.stdout + done.stderr
    assert "responses have no header Onceward-Batch" in done.stdout  # the page adds it later


def _wait_until_up(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the app ended"
        try:
            httpx.get(f"http://127.0.0.1:{port}/orders/1", timeout=2)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the app did not start")
