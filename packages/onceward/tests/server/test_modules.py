"""The modules of the server import each other without cycles, hidden ones included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import onceward.guard

LIBRARY = Path(onceward.guard.__file__).parents[1]
FOLDERS = ("guard", "batch", "frameworks", "maintenance", "audit")
FILES = sorted(file for folder in FOLDERS for file in (LIBRARY / folder).glob("*.py"))
FILES.append(LIBRARY / "app.py")


def module_of(file: Path) -> str:
    """Return the dotted name of a file, e.g. ``guard.idempotency``."""
    return ".".join(file.relative_to(LIBRARY).with_suffix("").parts)


def imports_of(file: Path) -> set[str]:
    """Return the modules a file imports: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onceward."):
            found.add((node.module or "").removeprefix("onceward."))
    return found


def test_the_modules_have_no_import_cycle() -> None:
    graph = {module_of(file): imports_of(file) for file in FILES}
    assert {"frameworks.asgi", "guard.idempotency", "app"} <= set(graph)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("guard.idempotency") < order.index("frameworks.asgi") < order.index("app")


def test_no_exception_class_of_the_server_derives_from_base_exception() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert "BaseException" not in bases, f"{file.name}: {node.name}"
