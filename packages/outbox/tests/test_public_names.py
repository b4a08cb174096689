"""Public names of ``onceward_outbox``: listed, documented, typed, light to import."""

import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

import onceward_outbox as device
from onceward_outbox import AsyncOutbox, Drain, HttpTransport, Outbox, OutboxQueue

OPERATIONS = {
    "enqueue",
    "enqueue_many",
    "transaction",
    "announce",
    "get",
    "by_key",
    "by_local_id",
    "entries",
    "next_eligible",
    "dependents",
    "attempts",
    "claim",
    "claim_some",
    "record",
    "resolve",
    "edit_payload",
    "retry",
    "cancel",
    "discard",
    "watchdog",
    "prune",
    "purge_user",
    "stats",
}


def test_the_public_names_are_listed_and_no_others() -> None:
    modules = {name for name in vars(device) if inspect.ismodule(getattr(device, name))}
    public = {name for name in vars(device) if not name.startswith("_")} - modules
    assert public == set(device.__all__)
    assert device.__all__ == sorted(device.__all__)


def test_every_public_class_has_a_docstring() -> None:
    for name in device.__all__:
        offered = getattr(device, name)
        if inspect.isclass(offered):
            assert inspect.getdoc(offered), name


def test_the_queue_has_every_operation() -> None:
    assert set(dir(OutboxQueue)) >= OPERATIONS


@pytest.mark.parametrize("kind", [AsyncOutbox, Drain, HttpTransport, Outbox, OutboxQueue])
def test_everything_that_can_be_called_is_documented_and_typed(kind: type) -> None:
    for name, method in inspect.getmembers(kind, callable):
        if name.startswith("_"):
            continue
        assert inspect.getdoc(method), f"{kind.__name__}.{name}"
        function = inspect.unwrap(getattr(method, "__func__", method))
        assert "return" in get_type_hints(function), f"{kind.__name__}.{name}"


def test_no_http_library_is_loaded_before_it_is_needed() -> None:
    code = "import sys, onceward_outbox; sys.exit('httpx' in sys.modules or 'apsw' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
