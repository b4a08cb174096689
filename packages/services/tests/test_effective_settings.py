"""Settings as operators see them in the console."""

import re
from pathlib import Path

from pydantic import SecretStr

from onceward.guard.request_log import RequestLog
from onceward.stores.sqlite.store import SqliteStore
from onceward_protocol.clock import SystemClock
from onceward_services.effective_settings import effective_settings
from onceward_services.settings import load_settings

REFERENCE = Path(__file__).resolve().parents[3] / "docs/reference/settings.md"
SECRET = "a secret of the tests, long enough for HS256"


def shown(**values: object) -> dict[str, str]:
    groups = effective_settings(load_settings(**values))
    return {name: text for group in groups.values() for name, text in group.items()}


def test_value_that_counts_is_shown_with_whether_it_is_the_default() -> None:
    found = shown(wait_seconds=3, batch_enabled=False)
    assert found["ONCEWARD_WAIT_SECONDS"] == "3"
    assert found["ONCEWARD_BATCH_ENABLED"] == "false"
    assert found["ONCEWARD_HEAD_SECONDS"] == "10 (default)"
    assert found["ONCEWARD_METRICS_ENABLED"] == "true (default)"
    assert found["ONCEWARD_REDIS_URL"] == "not set"
    assert found["ONCEWARD_TABLE_PREFIX"] == "onceward_ (default)"
    assert found["ONCEWARD_JWT_ALGORITHM"] == "HS256 (default)"
    assert shown(walk_rate_limit="0")["ONCEWARD_WALK_RATE_LIMIT"] == "no limit"
    assert all(found.values())


def test_request_log_shows_the_days_that_the_console_keeps() -> None:
    days = RequestLog(SqliteStore("x.db"), SystemClock()).keep_seconds / 86_400
    assert shown()["ONCEWARD_REQUEST_LOG_DAYS"] == f"{days:g} (default)"
    assert shown(request_log_days=2)["ONCEWARD_REQUEST_LOG_DAYS"] == "2"
    assert shown(console_enabled=False)["ONCEWARD_REQUEST_LOG_DAYS"] == "not set"


def test_of_secrets_only_whether_they_are_set_is_shown() -> None:
    url = "postgresql://ada:hunter2@db/shop?password=hunter2"
    settings = load_settings(jwt_secret=SecretStr(SECRET), database_url=url)
    found = effective_settings(settings)
    assert found["Sign-in"]["ONCEWARD_JWT_SECRET"] == "set"
    assert found["Audit"]["ONCEWARD_AUDIT_KEY"] == "not set"
    assert found["Connections"]["ONCEWARD_DATABASE_URL"] == "postgresql://db/shop"
    assert "hunter2" not in str(found)
    assert SECRET not in str(found)
    assert shown()["ONCEWARD_JWT_SECRET"] == "not set: a development secret signs tokens"


def test_groups_are_those_of_the_reference() -> None:
    groups: dict[str, set[str]] = {}
    heading = ""
    for line in REFERENCE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
        elif found := re.match(r"\| `((?:ONCEWARD|ROUTES)_[A-Z_]+)` \|", line):
            groups.setdefault(heading, set()).add(found[1])
    settings = effective_settings(load_settings())
    assert {name: set(values) for name, values in settings.items()} == groups
    assert list(settings) == list(groups)
