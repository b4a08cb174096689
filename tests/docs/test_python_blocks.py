"""Python blocks of the README, the quickstart and the how-to pages run."""

import logging
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, RUNNABLE, Block, blocks, name_of, python_blocks

# Blocks that cannot run as they are; more than this is a defect.
MAX_NOT_RUN = 1

# Pages whose blocks are files, and the command that runs their tests.
FILE_PAGES = {
    "docs/how-to/guard-a-flask-app.md": [
        *("-m", "pytest", "-q", "test_shop.py", "test_concurrency.py", "tenants.py"),
        *("test_factory.py", "test_shipping.py"),
    ],
    "docs/how-to/guard-a-django-app.md": ["-m", "django", "test", "--settings", "settings"],
}
WITH_PYTHON = [page for page in RUNNABLE if python_blocks(page) and name_of(page) not in FILE_PAGES]


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the root logger that a page about logging changes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def is_for_a_file(block: Block) -> bool:
    """Recognize the content of a test file by its first line."""
    return block.text.startswith(("# test_", "# conftest"))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "documentation"}
    for block in python_blocks(page):
        if block.runs:
            # The empty lines make a traceback show the line of the page.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, name_of(page), "exec"), names)
    assert set(names) - {"__name__", "__builtins__"}, "the page defined nothing"


def run_in_project(page: str, directory: Path, *commands: list[str], **env: str) -> str:
    """Write the files that a page shows, run Python there, and return the output."""
    for block in python_blocks(ROOT / page):
        name = block.text.partition("\n")[0].removeprefix("# ")
        assert name.endswith(".py"), f"line {block.line} does not say which file it is"
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(block.text, encoding="utf-8")
    (directory / "__init__.py").unlink()
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    output = ""
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": f"{directory}{os.pathsep}{sources}",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                **env,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        output += done.stdout + done.stderr
        assert done.returncode == 0, output
    return output


@pytest.mark.parametrize("page", FILE_PAGES)
def test_files_of_a_page_are_a_project_whose_tests_pass(page: str, tmp_path: Path) -> None:
    output = run_in_project(page, tmp_path, FILE_PAGES[page])
    assert re.search(r"Ran 8 tests|8 passed", output), output


SHIP_AN_ORDER = """
import django
django.setup()
from django.core.management import call_command
from django.contrib.auth.models import User
from django.test import Client, override_settings
from shop.models import Order

call_command("migrate", run_syncdb=True, verbosity=0)
client = Client()
client.force_login(User.objects.create_user("ann"))
with override_settings(ROOT_URLCONF="shop.shipping", ALLOWED_HOSTS=["*"]):
    body = {"item": "boots"}
    client.post("/orders", body, "application/json", headers={"Idempotency-Key": "1"})
    for _ in range(2):
        sent = client.post("/orders/1/ship", headers={"Idempotency-Key": "2"})
        assert sent.status_code == 202, sent.content
assert not Order.objects.get().shipped
"""


def test_worker_runs_the_job_of_the_django_page(tmp_path: Path) -> None:
    page = ROOT / "docs/how-to/guard-a-django-app.md"
    (command,) = [
        line.partition("onceward ")[2].split()
        for block in blocks(page)
        for line in block.text.splitlines()
        if " onceward worker " in line
    ]
    run_in_project(
        name_of(page),
        tmp_path,
        ["-c", SHIP_AN_ORDER],
        ["-m", "onceward.cli", *command, "--once"],
        DJANGO_SETTINGS_MODULE="settings",
    )
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT shipped FROM shop_order").fetchall() == [(1,)]


@pytest.mark.parametrize(
    "name",
    [
        "guard-a-fastapi-app",
        "guard-a-starlette-app",
        "guard-any-asgi-app",
        "guard-any-wsgi-app",
        "guard-a-flask-app",
        "guard-a-django-app",
        "jobs",
        "offline-app",
    ],
)
def test_page_of_each_framework_begins_with_a_complete_example(name: str) -> None:
    found = python_blocks(ROOT / f"docs/how-to/{name}.md")
    assert found[0].runs
    # The first runs with nothing before it, so it imports what it uses.
    assert re.search(r"^(from|import) |^# settings.py", found[0].text, re.MULTILINE)
    assert any(re.search(r"^from onceward", block.text, re.MULTILINE) for block in found)


def test_test_files_shown_on_the_testing_page_pass(tmp_path: Path) -> None:
    page = ROOT / "docs/how-to/test-your-app.md"
    files: dict[str, str] = {}
    for block in python_blocks(page):
        assert is_for_a_file(block), f"line {block.line} does not say which file it is"
        name = block.text.partition("\n")[0].removeprefix("# ")
        files[name] = files.get(name, "") + block.text
    assert {"conftest.py", "test_shop.py", "test_orders.py", "test_my_store.py"} <= set(files)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    # The store contract is slow and has its own tests, so it is only collected here.
    for more, passed in (
        (["test_shop.py", "test_orders.py"], "7 passed"),
        (["--collect-only"], "TestMyStore"),
    ):
        done = subprocess.run(
            [*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert passed in done.stdout


def test_at_most_one_block_is_not_run() -> None:
    skipped = [block for page in WITH_PYTHON for block in python_blocks(page) if not block.runs]
    assert len(skipped) <= MAX_NOT_RUN


def test_readme_diff_adds_six_lines_and_results_in_the_tested_example() -> None:
    (diff,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "diff"]
    lines = diff.splitlines()
    assert len([line for line in lines if line.startswith("+")]) == 6
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    example = (ROOT / "examples/shop.py").read_text(encoding="utf-8")
    assert example.partition('"""\n\n')[2].strip() == after.strip()
