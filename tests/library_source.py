"""The source of the library and of the protocol, parsed: for tests that count in it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "packages" / "onceward" / "src" / "onceward"
PROTOCOL = ROOT / "packages" / "protocol" / "src" / "onceward_protocol"


@dataclass(frozen=True)
class Module:
    """One file."""

    # Relative to the folder of its package, such as ``guard/idempotency.py``.
    name: str
    text: str
    tree: ast.Module


@cache
def modules(folder: Path) -> tuple[Module, ...]:
    """Return all modules of a package, sorted by name."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(folder).as_posix(), text, ast.parse(text)))
    return tuple(found)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Return all functions with their qualified names."""
    yield from _functions(tree, "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Return all classes."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
