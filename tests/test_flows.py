"""The flows page lists the files of real runs, and a guarded request enters few of them."""

import re

import pytest

from tests.flows import COMMAND, PACKAGES, PAGE, Trace, prose, sections, trace_all, write

TEXT = PAGE.read_text(encoding="utf-8")
LIBRARY = PACKAGES / "onceward" / "src" / "onceward"

# Files, and changes of file, at most.
LIMITS = {
    "A guarded POST": (18, 60),
    "A replay": (12, 28),
}


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return trace_all()


def test_page_lists_what_was_traced(traces: dict[str, Trace]) -> None:
    assert write(TEXT, traces) == TEXT, f"docs/concepts/flows.md: run {COMMAND}"


def test_every_trace_has_its_section(traces: dict[str, Trace]) -> None:
    assert sorted(sections(TEXT)) == sorted(traces)


@pytest.mark.parametrize("flow", LIMITS)
def test_flow_enters_few_files(flow: str, traces: dict[str, Trace]) -> None:
    files, changes = LIMITS[flow]
    assert len(traces[flow].files) <= files
    assert traces[flow].changes <= changes


def test_second_run_is_the_same(traces: dict[str, Trace]) -> None:
    again = trace_all()
    assert {flow: trace.files for flow, trace in again.items()} == {
        flow: trace.files for flow, trace in traces.items()
    }
    assert {flow: again[flow].changes for flow in LIMITS} == {
        flow: traces[flow].changes for flow in LIMITS
    }


@pytest.mark.parametrize("path", re.findall(r"`([a-z_/]+\.(?:py|sql))`", prose(TEXT)))
def test_file_that_the_page_names_exists(path: str) -> None:
    package = path.partition("/")[0]
    if package.startswith("onceward_"):
        assert (PACKAGES / package.removeprefix("onceward_") / "src" / path).is_file()
    else:
        assert (LIBRARY / path).is_file()
