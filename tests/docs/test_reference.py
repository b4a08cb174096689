"""The reference is complete: everything in the code has its line on a page."""

import json
import re
import shlex
import sqlite3
from collections import Counter
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from onceward import Policy, errors
from onceward.guard.idempotency import FAULT_POINTS
from onceward.jobs.executor import FAULT_POINTS as JOB_FAULT_POINTS
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import JobOutcome, Outcome
from onceward.stores.factory import open_store
from onceward_protocol.cli.commands import create_app
from onceward_protocol.cli.plugins import add_plugins
from onceward_protocol.error_codes import CODES
from onceward_protocol.retry import CLIENT, DEVICE, QUEUE, WORKER
from onceward_services.field.policy import POLICY as FIELD
from onceward_services.planning.policy import POLICY as PLANNING
from onceward_services.registry import migration_packages
from onceward_services.routes.policy import POLICY as ROUTES
from onceward_services.settings import Settings, variable_of
from onceward_services.walk.policy import POLICY as WALK
from tests.docs.pages import DOCS, PAGES, REFERENCE, ROOT, blocks, name_of


def rows(page: Path) -> list[list[str]]:
    """Return the cells of every row of every table, without back quotes."""
    lines = page.read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in tables
    ]


def row(page: Path, first: str) -> list[str]:
    """Return the first row that begins with this cell."""
    found = [cells for cells in rows(page) if cells[0] == first]
    assert found, f"{page.name} should have a row for {first}"
    return found[0]


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Settings.model_fields)
def test_settings_page_has_every_variable_with_its_default(name: str) -> None:
    shown = row(REFERENCE / "settings.md", variable_of(name))[1]
    default: Any = Settings.model_fields[name].default
    if default is None or name == "log_json":
        assert shown == "off" if name.endswith("rate_limit") else not shown.isdigit()
    elif isinstance(default, bool):
        assert shown == str(default).lower()
    elif isinstance(default, float):
        assert float(shown) == default
    else:
        assert shown == str(default)


def test_settings_page_has_one_row_for_each_variable() -> None:
    shown = [cells[0] for cells in rows(REFERENCE / "settings.md") if "_" in cells[0]]
    assert [name for name, count in Counter(shown).items() if count > 1] == []


def test_settings_page_has_no_unknown_variable() -> None:
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    known = {variable_of(name) for name in Settings.model_fields}
    assert set(re.findall(r"ONCEWARD_[A-Z_]+\b", text)) - {"ONCEWARD_"} <= known


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODES)
def test_errors_page_has_every_error_in_both_formats(kind: str) -> None:
    code = CODES[kind]
    cells = row(REFERENCE / "errors.md", kind)
    assert cells[1].startswith(str(code.status))
    assert cells[2:4] == [code.envelope, code.problem]


def test_errors_page_names_the_class_of_every_kind() -> None:
    for name in errors.__all__:
        kind = getattr(getattr(errors, name), "kind", None)
        if kind is not None and kind != "service":
            assert name in row(REFERENCE / "errors.md", kind)[4].split(", ")


def test_client_page_names_only_existing_codes() -> None:
    text = (DOCS / "how-to/write-a-client.md").read_text(encoding="utf-8")
    named = set(re.findall(r"((?:idempotency|concurrency)\.[a-z_]*[a-z])\b(?!_)", text))
    assert named
    assert named <= {code.problem for code in CODES.values()}


# -- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [field.name for field in fields(Policy)])
def test_policies_page_has_every_setting(field: str) -> None:
    assert row(REFERENCE / "policies.md", field)


def in_words(span: timedelta) -> str:
    days = span / timedelta(days=1)
    return f"{days:g} days" if days > 1 else f"{span / timedelta(hours=1):g} hours"


@pytest.mark.parametrize(
    ("column", "preset"),
    list(enumerate((WALK, PLANNING, ROUTES, FIELD), 1)),
    ids=["walk", "planning", "routes", "field"],
)
def test_policies_page_shows_the_policies_of_the_services(column: int, preset: Policy) -> None:
    page = REFERENCE / "policies.md"
    assert row(page, "key")[column] == ("required" if preset.key_required else "optional")
    assert row(page, "key format")[column] == preset.key_format
    assert row(page, "TTL of a success")[column] == in_words(preset.success_ttl)
    assert row(page, "TTL of an error")[column] in (in_words(preset.error_ttl), "—")
    assert row(page, "error body")[column] == preset.error_format
    assert (row(page, "staleness cap")[column] == "none") == (preset.staleness is None)


def test_client_page_shows_the_retry_presets() -> None:
    page = DOCS / "how-to/write-a-client.md"
    for name, policy in ("CLIENT", CLIENT), ("DEVICE", DEVICE), ("WORKER", WORKER):
        assert row(page, name)[4].startswith(str(policy.attempts))
    assert row(page, "QUEUE")[2] == f"{QUEUE.first_seconds:g} s"


# -- the command line -----------------------------------------------------------------------------


def commands(group: Any, prefix: str = "onceward") -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found += commands(command, f"{prefix} {name}") if inner else [(f"{prefix} {name}", command)]
    return found


def all_commands() -> list[tuple[str, Any]]:
    app = create_app()
    add_plugins(app, [])
    return [(name, command) for name, command in commands(get_command(app)) if not command.hidden]


COMMANDS = all_commands()


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_commands_page_has_every_command_and_option(name: str, command: Any) -> None:
    row(REFERENCE / "cli.md", name)
    text = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    for parameter in command.params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert option == "--help" or option in text, option


def test_commands_in_shell_blocks_exist_with_their_options() -> None:
    app = create_app()
    add_plugins(app, [])
    root = get_command(app)
    checked = 0
    for page in PAGES:
        for block in blocks(page):
            if block.language not in ("sh", "console", "yaml", "dockerfile"):
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                for arguments in _onceward_calls(line):
                    _check_call(root, arguments, f"{name_of(page)}: {line.strip()}")
                    checked += 1
    assert checked > 50


_CALL = re.compile(r"(?:^|[\s/;&|(])onceward\s+(?=[a-z-])")


def _onceward_calls(line: str) -> list[list[str]]:
    """Return the arguments of every call of ``onceward`` in a line of shell."""
    calls = []
    for match in _CALL.finditer("" if "pip install" in line and "&&" not in line else line):
        lexer = shlex.shlex(line[match.end() :], posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        arguments: list[str] = []
        for word in lexer:
            if set(word) <= set("();<>|&"):
                break
            arguments.append(word)
        calls.append(arguments)
    return calls


def _check_call(group: Any, arguments: list[str], where: str) -> None:
    options = {
        option: parameter
        for parameter in group.params
        if parameter.param_type_name == "option"
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name.startswith("--"):
            assert name in options or name == "--help", f"{where}: no option {name}"
            if name in options and not options[name].is_flag and not equals:
                assert rest, f"{where}: {name} has no value"
                rest.pop(0)
        elif hasattr(group, "commands"):
            assert word in group.commands, f"{where}: no command {word}"
            assert not group.commands[word].hidden, f"{where}: {word} is hidden"
            _check_call(group.commands[word], rest, where)
            return


# -- the schema -----------------------------------------------------------------------------------


async def test_schema_page_has_every_table_and_column(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/schema.db", migration_packages=migration_packages())
    await store.open()
    await store.close()
    pages = (REFERENCE / "schema.md", DOCS / "services/tables.md")
    page = "".join(page.read_text(encoding="utf-8") for page in pages)
    with sqlite3.connect(tmp_path / "schema.db") as database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            section = page.partition(f"\n## {table}\n")[2].partition("\n## ")[0]
            assert section, f"schema.md has no section {table}"
            for column in database.execute(f"PRAGMA table_info({table})"):
                assert f"`{column[1]}`" in section, f"{table}.{column[1]}"
    database.close()


# -- metrics and logs ------------------------------------------------------------------------------


def test_metrics_page_has_every_metric_and_outcome() -> None:
    page = REFERENCE / "metrics-and-logs.md"
    body, _ = PrometheusMetrics().exposition()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", body.decode(), re.MULTILINE):
        if not name.endswith("_created"):
            assert row(page, name)[1] == kind
    for outcome in (*get_args(Outcome), *get_args(JobOutcome)):
        row(page, outcome)


def test_metrics_page_has_every_logger() -> None:
    text = (REFERENCE / "metrics-and-logs.md").read_text(encoding="utf-8")
    for source in ROOT.glob("packages/*/src/**/*.py"):
        for name in re.findall(r'getLogger\("(onceward\.[\w.]+)"\)', source.read_text()):
            # Start-up messages of the server are not documented events.
            assert name == "onceward.server" or f"`{name}`" in text, name


def test_testing_page_explains_every_fault_point() -> None:
    for point in (*FAULT_POINTS, *JOB_FAULT_POINTS):
        assert row(DOCS / "how-to/test-your-app.md", point)


# -- canonical JSON -------------------------------------------------------------------------------


def test_golden_cases_have_the_documented_members() -> None:
    text = (ROOT / "packages/protocol/tests/fixtures/golden_hashes.json").read_text(
        encoding="utf-8"
    )
    golden = json.loads(text)
    assert set(golden) == {"cases", "refused"}
    assert all(set(case) == {"name", "json", "canonical", "sha256"} for case in golden["cases"])
    assert all(set(case) == {"name", "json"} for case in golden["refused"])
