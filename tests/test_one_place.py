"""A header of responses and an error code are written in one place of the library."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from onceward_protocol.error_codes import CODES
from tests.library_source import LIBRARY, PROTOCOL, Module, modules

# How many places write each. The target of all is 1; a number that has become too high fails.
HEADERS = {"Idempotency-Replayed": 1, "Onceward-Effect": 1, "Retry-After": 1}
KINDS = dict.fromkeys(CODES, 1) | {
    "in_progress": 3,  # its class; twice the outcome of that name in the metrics
    "method_not_allowed": 0,  # services raise it
}
# What describes the headers and errors of an API to its clients.
DESCRIPTIONS = ("frameworks/cors.py", "frameworks/openapi.py", "frameworks/openapi_batch.py")
SOURCES = [
    module
    for module in (*modules(LIBRARY), *modules(PROTOCOL))
    if module.name not in (*DESCRIPTIONS, "error_codes.py") and not module.name.startswith("cli/")
]


def text_of(node: ast.AST) -> str:
    """Return a constant text, or a name; an empty text for anything else."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.Constant(value=bytes(value)):
            return value.decode("latin-1")
        case ast.Name(id=name):
            return name
        case _:
            return ""


def constants(module: Module) -> dict[str, str]:
    """Return the texts that a module has given a name."""
    found = {}
    for node in module.tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as value):
                found[name] = text_of(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                found[name] = text_of(value)
            case _:
                pass
    return found


def written_headers(module: Module) -> Iterator[str]:
    """Return the names of headers that a module gives a value: pairs, items of a mapping."""
    named = constants(module)
    for node in ast.walk(module.tree):
        names: list[ast.AST] = []
        match node:
            case ast.Tuple(elts=[name, _], ctx=ast.Load()):
                names = [name]
            case ast.Dict(keys=keys):
                names = [key for key in keys if key is not None]
            case ast.Subscript(slice=name, ctx=ast.Store()):
                names = [name]
            case _:
                pass
        for node_of_name in names:
            text = text_of(node_of_name)
            yield named.get(text, text).lower()


def named_texts(module: Module) -> Iterator[str]:
    """Return the texts of a module, except those that are compared, and those in a type."""
    read = {
        id(part)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare)
        or (isinstance(node, ast.Subscript) and text_of(node.value) == "Literal")
        for part in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and id(node) not in read:
            yield text_of(node)


@cache
def places() -> dict[str, list[str]]:
    """Return the modules that name each kind of error."""
    found: dict[str, list[str]] = {kind: [] for kind in CODES}
    for module in SOURCES:
        for text in named_texts(module):
            if text in found:
                found[text].append(module.name)
    return found


@pytest.mark.parametrize("header", HEADERS)
def test_header_is_written_in_few_places(header: str) -> None:
    name = header.lower()
    found = [module.name for module in SOURCES for it in written_headers(module) if it == name]
    assert len(found) == HEADERS[header], found


def test_frameworks_name_no_header_of_the_protocol() -> None:
    """The guard writes and reads them; OpenAPI and the list for CORS tell clients of them."""
    names = (
        "idempotency-",
        "onceward-",
        "retry-after",
        "x-request-id",
        "x-correlation-id",
        "ratelimit",
    )
    found = {
        (module.name, text)
        for module in SOURCES
        if module.name.startswith("frameworks/")
        for text in named_texts(module)
        if text.lower().startswith(names)
    }
    assert found == {("frameworks/wsgi.py", "onceward-loop")}  # the name of a thread


@pytest.mark.parametrize("kind", CODES)
def test_kind_of_error_is_named_in_few_places(kind: str) -> None:
    assert len(places()[kind]) == KINDS[kind], places()[kind]


def test_codes_are_in_the_table_only() -> None:
    """Beside the table, only clients name codes: those that they react to."""
    codes = {name for code in CODES.values() for name in (code.envelope, code.problem)}
    found = {
        module.name
        for module in SOURCES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and text_of(node) in codes
    }
    assert found == {"client.py", "response_classification.py"}
