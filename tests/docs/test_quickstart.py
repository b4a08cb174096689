"""The commands of the quickstart, run as a reader runs them: one server is killed with SIGKILL."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from packages.onceward.tests.support.serving import free_port
from tests.docs.pages import DOCS, ROOT, blocks

PAGE = DOCS / "quickstart.md"
SOURCES = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))


def test_quickstart_is_shorter_than_500_words() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) < 500


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_quickstart_commands_end_with_two_orders(tmp_path: Path) -> None:
    (app,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    (tmp_path / "shop.py").write_text(app, encoding="utf-8")
    # The first block makes a virtual environment; the tests have one.
    _setup, *steps = [block.text for block in blocks(PAGE) if block.language == "sh"]
    url = f"127.0.0.1:{free_port()}"
    script = "\n".join(steps).replace("8000", url.rpartition(":")[2]).replace("curl ", "curl -sS ")
    # The page waits two seconds for the server; a busy machine may need longer.
    script = script.replace("sleep 2", f"until curl -so /dev/null {url}/orders; do sleep 0.1; done")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": SOURCES,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = done.stdout
    assert "idempotency-replayed: true" in output, done.stdout + done.stderr
    before, _, after = output.partition('["boots"]')
    assert '"ordered":"boots"' in before
    assert after.count('{"ordered":"laces"}') == 2
    assert after.rstrip().endswith('["boots","laces"]')
