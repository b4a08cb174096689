"""``/`` and ``/docs`` in Chromium, under the Content-Security-Policy that the server sends."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .conftest import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
LIMIT_SECONDS = 120
# What a page reports about what it could not load or run.
BLOCKED = re.compile(r"Refused to|violates|Content Security|Failed to load|Uncaught", re.IGNORECASE)

PAGES = {
    "/docs": ("opblock-tag", "/api/v1/contacts", "operations-field-create_contact"),
    "/": ("<h1", "/api/v1/contacts"),
}


def rendered(url: str, directory: Path) -> tuple[str, list[str]]:
    """Return the document after its scripts have run, and the lines of the browser's console."""
    assert CHROMIUM is not None
    for attempt in range(3):  # the browser itself may fail on a busy machine
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                f"--user-data-dir={directory / f'profile-{attempt}'}",
                "--enable-logging=stderr",
                # Of the page's clock, which stops while something is loaded.
                "--virtual-time-budget=20000",
                "--dump-dom",
                url,
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if done.returncode == 0 and "</html>" in done.stdout:
            break
    lines = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, lines


# Without Chromium there is nothing to run: test_pages.py reads the same pages and headers.
if CHROMIUM is not None:

    def test_pages_render_and_nothing_is_blocked(
        serve: Callable[..., Server], tmp_path: Path
    ) -> None:
        server = serve("--no-jobs")
        for path, expected in PAGES.items():
            document, console = rendered(server.url + path, tmp_path / f"browser{len(path)}")
            blocked = [line for line in console if BLOCKED.search(line)]
            assert blocked == [], (path, blocked)
            assert [text for text in expected if text not in document] == [], path
