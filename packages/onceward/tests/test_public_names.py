"""The public names: this list, imported on first use."""

import subprocess
import sys
from importlib import import_module

import pytest

import onceward

# Every name is a promise: add one only with its documentation.
PUBLIC = {
    "CORS_HEADERS",
    "SINGLE_TENANT",
    "ErrorFormat",
    "ErrorsStored",
    "Execution",
    "GuardConfig",
    "Onceward",
    "OncewardError",
    "JobContext",
    "KeyFormat",
    "NonRetryableError",
    "Policy",
    "Principal",
    "RequestError",
    "RetryLaterError",
    "ServiceError",
    "Staleness",
    "Transaction",
    "Worker",
    "open_store",
    "update_with_version",
}

# What an app writes. All else is in ``runtime``, which may change in any release.
MEMBERS = {
    "add_tenant_table",
    "clock",
    "close",
    "enqueue",
    "execution",
    "guard",
    "guard_path",
    "install",
    "jobs",
    "open",
    "runtime",
    "store",
    "transaction",
    "worker",
    "wrap",
}

# Documented names that are imported from their module.
ELSEWHERE = {
    "client": ["AsyncClient", "Client"],
    "jobs.job": ["AlreadyDone", "Enqueued", "Merged"],
    "tenants": ["ALL_TENANTS"],
    "fastapi": ["Caller", "Run", "Session", "Tx", "principal_from"],
    "sign_in.identify": ["ApiKeyIdentify", "hash_api_key", "principal_from"],
    "jobs.sync_handler": ["SyncJobContext"],
    "sign_in.jwt_auth": ["JwtIdentify", "mint_token"],
    "guard.rate_limits": ["LimitsRateLimiter"],
    "guard.request": ["RequestHead"],
    "frameworks.starlette": ["Caller", "Run", "Tx", "the_transaction"],
    "frameworks.wsgi": ["WsgiGuard"],
}


def test_the_public_names_are_these_and_at_most_twenty_one() -> None:
    assert set(onceward.__all__) == PUBLIC
    assert len(onceward.__all__) == len(PUBLIC) <= 21


def test_members_of_onceward_are_these_and_at_most_fifteen() -> None:
    made = onceward.Onceward("sqlite:///x.db")
    found = {name for name in {*vars(made), *dir(type(made))} if not name.startswith("_")}
    assert found == MEMBERS
    assert len(MEMBERS) <= 15


def test_every_public_name_is_the_object_of_its_module() -> None:
    modules = onceward._MODULE_OF_NAME
    assert set(modules) == {n for n in onceward.__all__ if not hasattr(onceward.errors, n)}
    for name, module in modules.items():
        found = import_module(module)
        assert getattr(onceward, name) is getattr(found, name)
        assert name in found.__all__
    assert set(onceward.__all__) <= set(dir(onceward))


@pytest.mark.parametrize("module", ELSEWHERE)
def test_documented_names_are_in_the_all_of_their_module(module: str) -> None:
    found = import_module(f"onceward.{module}")
    assert set(ELSEWHERE[module]) <= set(found.__all__)
    assert all(hasattr(found, name) for name in ELSEWHERE[module])


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Oncewart'"):
        _ = getattr(onceward, "Oncewart")  # noqa: B009 - mypy knows it is not there
    with pytest.raises(ImportError):
        exec("from onceward import Oncewart")


def test_a_star_import_brings_all_names() -> None:
    names: dict[str, object] = {}
    exec("from onceward import *", names)
    assert set(onceward.__all__) <= set(names)


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, onceward\n"
        "heavy = ('asyncio', 'msgspec', 'sqlite3', 'onceward.guard', 'onceward.jobs')\n"
        "assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)\n"
        "onceward.Onceward\n"
        "assert 'onceward.guard' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
