"""``--app MODULE:NAME``: which Onceward is found, and what is printed where there is none."""

import json
from pathlib import Path
from uuid import uuid4

import pytest

from onceward.cli.app_loader import load_onceward
from packages.protocol.tests.cli.harness import Here, one_line

APP = """
from functools import cache
from onceward import Onceward

onceward = Onceward("sqlite:///app.db")
number = 3

@onceward.jobs.handler("greet", queue="greetings")
async def greet(job):
    return {"hello": job.payload}

def make():
    return onceward

@cache
def make_once():
    return onceward

async def make_later():
    return onceward

def takes(argument):
    return onceward

def raises():
    raise LookupError("no settings")

class Settings:
    nested = onceward
"""
FASTAPI = """
from fastapi import FastAPI
from onceward import Onceward

def make():
    app = FastAPI()
    Onceward("sqlite:///app.db").install(app)
    return app

bare = FastAPI()
"""
FLASK = """
from flask import Flask
from onceward import SINGLE_TENANT, Onceward
from onceward.flask import FlaskGuard
from onceward.frameworks.wsgi import WsgiGuard

app = Flask(__name__)
guard = FlaskGuard(Onceward("sqlite:///app.db"), app)

wrapped = Flask(__name__)
wsgi_guard = WsgiGuard(wrapped.wsgi_app, Onceward("sqlite:///app.db", tenants=SINGLE_TENANT))
wrapped.wsgi_app = wsgi_guard
"""


def write_module(directory: Path, code: str) -> str:
    """Write a module and return its name, which no other test uses."""
    name = f"app_{uuid4().hex}"
    (directory / f"{name}.py").write_text(code)
    return name


@pytest.mark.parametrize("name", ["onceward", "make", "make_once", "Settings.nested"])
def test_app_is_found_by_name(here: Here, tmp_path: Path, name: str) -> None:
    assert load_onceward(f"{write_module(tmp_path, APP)}:{name}").jobs.queues == ("greetings",)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (FASTAPI, "make"),
        (FLASK, "app"),
        (FLASK, "guard"),
        (FLASK, "wrapped"),
        (FLASK, "wsgi_guard"),
    ],
)
def test_app_is_found_on_the_framework_it_is_installed_on(
    here: Here, tmp_path: Path, code: str, name: str
) -> None:
    assert load_onceward(f"{write_module(tmp_path, code)}:{name}").store.name == "sqlite"


@pytest.mark.parametrize(
    ("code", "name", "line"),
    [
        ("", "THIS", "--app THIS is not of the form MODULE:NAME"),
        ("", "absent.module:x", "there is no module absent in "),
        ("", "THIS.inner:x", "there is no module THIS.inner in "),
        ("import absent_package", "THIS:x", "THIS cannot be imported: ModuleNotFoundError: "),
        ("import os\n1 / 0\n", "THIS:x", "ZeroDivisionError: division by zero (PATH, line 2)"),
        ("x = (\n", "THIS:x", "SyntaxError: '(' was never closed (PATH, line 1)"),
        (APP, "THIS:holdfats", "THIS has no holdfats; it has onceward"),
        (
            "from flask import current_app\nfrom sqlalchemy import func\n" + APP,
            "THIS:holdfas",
            "THIS has no holdfas; it has onceward",
        ),
        ("from sqlalchemy import func\n", "THIS:func", "THIS:func is of type _FunctionGenerator"),
        ("first = 1\n", "THIS:x", "THIS has no x; it has first"),
        ("", "THIS:x", "THIS has no x; it has no names of its own"),
        (APP, "THIS:number", "THIS:number is of type int: expected a Onceward"),
        (APP, "THIS:Settings", "THIS:Settings is a class: expected a Onceward"),
        (APP, "THIS:takes", "THIS:takes cannot be called without arguments"),
        (APP, "THIS:make_later", "THIS:make_later is a coroutine function"),
        (APP, "THIS:raises", "THIS:raises failed: LookupError: no settings (PATH, line 26)"),
        (FASTAPI, "THIS:bare", "THIS:bare is of type FastAPI: expected a Onceward"),
    ],
)
def test_app_that_cannot_be_used_is_an_error_in_one_line(
    here: Here, tmp_path: Path, code: str, name: str, line: str
) -> None:
    module = write_module(tmp_path, code)
    done = here("worker", "--app", name.replace("THIS", module))
    assert done.returncode in (1, 2)
    path = str(tmp_path / f"{module}.py")
    assert line.replace("THIS", module).replace("PATH", path) in one_line(done.stderr)


def test_commands_use_the_database_of_the_app(here: Here, tmp_path: Path) -> None:
    app = f"{write_module(tmp_path, APP)}:onceward"
    applied = json.loads(here("migrate", "--app", app, "--json").stdout)
    assert len(applied["applied"]) == applied["present"] > 0
    again = here("migrate", ONCEWARD_APP=app)
    assert again.stdout.decode() == f"{app} is up to date ({applied['present']} migrations)\n"
    for command in (["keys", "ls"], ["jobs", "ls"], ["jobs", "dead"]):
        assert here(*command, "--app", app, "--json").stdout == b"[]\n"
    assert here("sweep", "--app", app).stdout == b"0 expired records deleted\n"
    assert [path.name for path in tmp_path.glob("*.db")] == ["app.db"]


def test_database_on_the_command_line_precedes_the_app_of_the_environment(
    here: Here, tmp_path: Path
) -> None:
    app = f"{write_module(tmp_path, APP)}:onceward"
    done = here("migrate", "--database", "sqlite:///other.db", ONCEWARD_APP=app)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "other.db").exists()
    both = here("keys", "ls", "--app", app, "--database", "sqlite:///other.db")
    assert "give --app or --database, not both" in one_line(both.stderr)
    assert not (tmp_path / "app.db").exists()
