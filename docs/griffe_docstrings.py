"""Griffe extension: reads our docstrings as Markdown, and comments of fields as docstrings.

A literal block (``::`` and indented text) becomes fenced code. A field, constant or enum member
without a docstring gets the comment above it or behind it. A method of ``AsyncOutbox`` that is made
of one of ``Outbox`` gets a reference to that.
"""  # noqa: INP001 - a script beside the pages

import ast
import re
import textwrap
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

# "::" at the end of a line, a blank line, then lines that are indented deeper or blank.
_BLOCK = re.compile(r"^(?P<before>.*)::\n\n(?P<code>(?:    .*\n?|\s*\n)+)", re.MULTILINE)
_COMMENT = re.compile(r"^\s*#:? (?!noqa|type:|fmt:|--)(.*)$")
_BEHIND = re.compile(r"\s#:? (?!noqa|type:|fmt:)(.*)$")
_MADE_OF = re.compile(r"^_on_thread\((\w+\.\w+)\)$")


def with_fences(text: str) -> str:
    """Return a docstring as Markdown."""
    return _BLOCK.sub(_fenced, text)


def _fenced(found: re.Match[str]) -> str:
    before = found["before"].rstrip()
    code = textwrap.dedent(found["code"]).strip("\n")
    opening = f"{before}:\n\n" if before else ""
    return f"{opening}```{_language(code)}\n{code}\n```\n\n"


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def comment_of(lines: list[str], first: int, last: int) -> str:
    """Return the comment above the lines ``first`` to ``last`` (from 1), or behind the last."""
    found: list[str] = []
    above = first - 2
    while above >= 0 and (comment := _COMMENT.match(lines[above])):
        found.insert(0, comment[1])
        above -= 1
    if found:
        return " ".join(found)
    behind = _BEHIND.search(lines[last - 1])
    return behind[1] if behind else ""


class Docstrings(Extension):
    """Completes docstrings while Griffe reads the sources."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take the comment of a field as its docstring."""
        if attr.docstring is None and attr.lineno is not None:
            lines = attr.lines_collection[attr.filepath]  # type: ignore[index]
            comment = comment_of(lines, attr.lineno, attr.endlineno or attr.lineno)
            if made_of := _MADE_OF.match(str(attr.value)):
                comment = f"`{made_of[1]}`, to be awaited."
            if comment:
                attr.docstring = Docstring(comment, lineno=attr.lineno, parent=attr)

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)
