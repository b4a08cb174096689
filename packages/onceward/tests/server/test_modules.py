"""The modules of the server import each other without cycles, hidden ones included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import onceward.server

PACKAGE = "onceward.server"
FILES = sorted(Path(onceward.server.__file__).parent.glob("*.py"))


def imports_of(file: Path) -> set[str]:
    """Return the sibling modules a file imports: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found.add((node.module or "").removeprefix(f"{PACKAGE}."))
    return found


def test_the_modules_have_no_import_cycle() -> None:
    graph = {file.stem: imports_of(file) for file in FILES}
    assert {"asgi", "idempotency", "response_buffer"} <= set(graph)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("idempotency") < order.index("asgi") < order.index("app")


def test_no_exception_class_of_the_server_derives_from_base_exception() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert "BaseException" not in bases, f"{file.name}: {node.name}"
