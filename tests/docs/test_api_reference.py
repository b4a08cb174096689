"""The API reference has every public name, and every public name is documented in the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import griffe
import pytest

from tests.docs.pages import DOCS, PAGES, REFERENCE, ROOT, python_blocks

SOURCES = sorted(ROOT.glob("packages/*/src"))
LIBRARY = ("protocol", "onceward", "outbox", "operator", "testing", "nats")
API = sorted((REFERENCE / "api").glob("*.md"))
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
MODULES = [name for page in API for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))]
# The command line is documented by its commands, in reference/cli.md. ``Onceward`` and its options
# are names of the package itself.
NOT_IMPORTED_BY_APPS = {"app", "audit", "cli", "config", "records", "tenants"}


@cache
def library() -> Any:
    """Return the packages of the library, each with the others to resolve names from."""
    extension = griffe.load_extensions(str(DOCS / "griffe_docstrings.py"))
    loader = griffe.GriffeLoader(search_paths=SOURCES, extensions=extension)
    for package in LIBRARY:
        loader.load("onceward" if package == "onceward" else f"onceward_{package}")
    return loader.modules_collection


def module(name: str) -> Any:
    return library()[name]


def exports(name: str) -> list[str]:
    return [str(getattr(name, "name", name)) for name in module(name).exports or ()]


def public_objects(name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a page shows of a module: its names and the members of its classes, with paths."""
    for exported in exports(name):
        found = module(name)[exported]
        found = found.final_target if found.is_alias else found
        yield f"{name}.{exported}", found
        if found.is_class:
            for member in found.members.values():
                if not member.is_alias and not re.match("_|test_|pytestmark", member.name):
                    yield f"{name}.{exported}.{member.name}", member


def is_documented(found: Any) -> bool:
    """A member that a base class documents needs no second docstring."""
    if found.has_docstring or not found.parent.is_class:
        return bool(found.has_docstring)
    bases = [base for base in found.parent.mro() if found.name in base.members]
    return any(base.members[found.name].has_docstring for base in bases)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented_in_the_code(name: str) -> None:
    assert module(name).docstring is not None
    assert exports(name), f"{name} has no __all__"
    missing = [path for path, found in public_objects(name) if not is_documented(found)]
    assert missing == [], "write a docstring, or a comment above a field"


def test_every_module_of_the_top_level_is_in_the_reference() -> None:
    source = ROOT / "packages/onceward/src/onceward"
    found = {path.stem for path in source.iterdir() if "__" not in path.name}
    named = {name.split(".")[1] for name in MODULES if name.startswith("onceward.")}
    assert found - {"py"} - NOT_IMPORTED_BY_APPS == named


def imported_on_pages() -> set[tuple[str, str]]:
    """Return every module and name that the documentation imports from the library."""
    found = set()
    for page in [*PAGES, *(ROOT / f"packages/{package}/README.md" for package in LIBRARY)]:
        if "decisions" in page.parts or "CHANGELOG" in page.name:
            continue
        for block in python_blocks(page):
            for node in ast.walk(ast.parse(block.text)):
                if (
                    isinstance(node, ast.ImportFrom)
                    and (node.module or "").split(".")[0] in library().members
                ):
                    found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_every_name_that_a_page_imports_is_in_the_reference() -> None:
    found = imported_on_pages()
    modules = set(MODULES)
    missing = {
        f"{name}.{imported}"
        for name, imported in found
        if f"{name}.{imported}" not in modules
        and (name not in modules or imported not in exports(name))
    }
    assert ("onceward_outbox", "Outbox") in found
    assert missing == set(), "name the module with ::: on a page of reference/api"


def test_every_page_of_the_reference_has_an_example() -> None:
    assert [page.name for page in API if not python_blocks(page)] == ["index.md"]


def test_literal_blocks_become_fenced_code() -> None:
    text = (
        "Reads.\n\nUse it so::\n\n    with x:\n        y()\n\nThen stop.\n\n::\n\n    A\n     └ B"
    )
    extension: Any = griffe.load_extensions(str(DOCS / "griffe_docstrings.py"))
    read = next(iter(extension._extensions)).on_instance
    found = griffe.Module("m", docstring=griffe.Docstring(text))
    read(obj=found)
    assert found.docstring is not None
    assert found.docstring.value == (
        "Reads.\n\nUse it so:\n\n```python\nwith x:\n    y()\n```\n\nThen stop.\n\n"
        "```text\nA\n └ B\n```\n\n"
    )
