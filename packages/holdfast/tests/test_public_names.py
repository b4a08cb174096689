"""The public names: all there, opened only when asked for, and a misspelt one is refused."""

import subprocess
import sys
from importlib import import_module

import pytest

import holdfast


def test_every_public_name_is_the_one_of_its_room() -> None:
    rooms = holdfast._MODULE_OF_NAME
    assert set(rooms) == {n for n in holdfast.__all__ if not hasattr(holdfast.errors, n)}
    for name, room in rooms.items():
        assert getattr(holdfast, name) is getattr(import_module(f"holdfast.{room}"), name)
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Holdfest'"):
        _ = getattr(holdfast, "Holdfest")  # noqa: B009 - mypy knows it is not there
    with pytest.raises(ImportError):
        exec("from holdfast import Holdfest")


def test_all_names_come_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from holdfast import *", names)
    assert set(holdfast.__all__) <= set(names)


def test_nothing_heavy_is_opened_before_it_is_asked_for() -> None:
    code = (
        "import sys, holdfast\n"
        "rooms = ('asyncio', 'msgspec', 'sqlite3', 'holdfast.server', 'holdfast.jobs')\n"
        "assert not set(rooms) & set(sys.modules), set(rooms) & set(sys.modules)\n"
        "holdfast.Holdfast\n"
        "assert 'holdfast.server' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
