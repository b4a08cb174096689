"""Renders templates of the console. Everything from the database is escaped."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urlencode

from onceward_protocol.extras import needs_extra

with needs_extra("", "onceward-operator"):
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

__all__ = ["SHOWN_CHARS", "capped", "elapsed", "render", "visible_text"]

SHOWN_CHARS: Final = 64 * 1024
"""How much of a payload a page shows; the rest is counted."""

# Control characters, and those that change the direction or hide other characters.
_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_NONE: Final = "\u2013"
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# Why an attempt failed, or a job was dead-lettered; docs/reference/errors.md has the codes.
_REASONS: Final = {
    "error": "the handler failed",
    "time_limit": "it took too long",
    "retry_later": "the handler asked for a later attempt",
    "non_retryable": "a retry cannot help",
    "unknown_type": "the worker has no handler for this type",
    "payload_too_large": "the payload is too large",
    "worker_lost": "the worker died or hung",
    "cancelled": "an operator cancelled it",
}


def render(
    template: str, values: Mapping[str, Any], *, package: str = "onceward_operator.console"
) -> str:
    """Render a template of a package; layout and macros come from the console."""
    return _environment(package).get_template(template).render(values)


def visible_text(text: str) -> str:
    """Show characters that cannot be seen as their code point in hexadecimal digits."""
    if text.isascii() and text.isprintable():  # almost every text of a table
        return text
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@cache
def _environment(package: str) -> Environment:
    loaders = [
        PackageLoader(name) for name in dict.fromkeys((package, "onceward_operator.console"))
    ]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # templates are files of packages: they do not change
    )
    environment.filters |= {
        "ago": _ago,
        "count": capped,
        "duration": _duration,
        "elapsed": elapsed,
        "instant": _instant,
        "only_set": lambda values: {name: value for name, value in values.items() if value},
        "payload": _payload,
        "reason": lambda code: _REASONS.get(code, code),
        "segment": lambda text: quote(str(text), safe=""),
        "query": lambda values: urlencode({k: v for k, v in values.items() if v not in (None, "")}),
        "visible": lambda text: visible_text(str(text)),
    }
    return environment


def _instant(at: datetime | None) -> Markup | str:
    if at is None:
        return _NONE
    utc = at.astimezone(UTC)
    exact = utc.isoformat(timespec="milliseconds")
    text = exact.removesuffix("+00:00").replace("T", " ")
    return Markup(f'<time datetime="{exact}">{text} UTC</time>')  # noqa: S704 - no text of others


def _ago(at: datetime | None, now: datetime) -> str:
    if at is None:
        return _NONE
    text = elapsed(at, now)
    return f"in {text}" if at > now else f"{text} ago"


def elapsed(at: datetime, now: datetime) -> str:
    """Return how far two instants are from each other, such as ``5 min``."""
    seconds = abs((now - at).total_seconds())
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.0f} h"
    return f"{seconds / _DAY:.0f} d"


def _duration(length: timedelta | None) -> str:
    """Return a time to live in the largest unit in which it is a whole number."""
    if length is None:
        return _NONE
    seconds = length.total_seconds()
    for unit, size in (("day", _DAY), ("hour", _HOUR), ("minute", _MINUTE)):
        if seconds >= size and seconds % size == 0:
            number = int(seconds // size)
            return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
    return f"{seconds:g} seconds"


def capped(number: int, most: int | None = None) -> str:
    """Format a count; one that has reached the limit of counting gets a plus sign."""
    return f"{number:,}+" if most is not None and number >= most else f"{number:,}"


def _payload(text: str) -> str:
    """Return the visible part of a payload."""
    shown = visible_text(text[:SHOWN_CHARS])
    left = len(text) - SHOWN_CHARS
    return shown if left <= 0 else f"{shown}\n… and {left:,} characters more"
