"""Log formatters for the standard library: one JSON object per line, or a line for a terminal."""

import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from onceward.errors import ConfigurationError

__all__ = ["HumanFormatter", "JsonFormatter", "RedactKeys", "configure_logging", "is_secret"]

_REDACTED: Final = "[redacted]"
# In lower case, without "-" and "_": matches idempotencyKey and Idempotency-Key.
_SECRET_NAMES: Final = frozenset(
    {
        "accesstoken",
        "attestationtoken",
        "authorization",
        "body",
        "cookie",
        "idempotencykey",
        "key",
        "passphrase",
        "password",
        "payload",
        "refreshtoken",
        "secret",
        "setcookie",
        "token",
        "xfirebaseappcheck",
    }
)
# Values nested deeper are redacted, because they are not checked.
_MAX_DEPTH: Final = 8

# Attributes that every record has; all others come from ``extra``. ``color_message`` is uvicorn's
# second copy of the message.
_STANDARD: Final = frozenset(
    {*vars(logging.makeLogRecord({})), "asctime", "color_message", "message", "taskName"}
)
_UVICORN_LOGGERS: Final = ("uvicorn", "uvicorn.access", "uvicorn.asgi", "uvicorn.error")

_COLOURS: Final = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}
_PLAIN: Final = "\x1b[0m"
# Messages may contain input of clients: no control characters may reach the terminal.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NEEDS_QUOTES: Final = re.compile("[\\s\"'=\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def configure_logging(*, level: str = "INFO", json: bool = True) -> None:
    """Send all logs to stderr, including those of uvicorn. A second call replaces the first.

    Start uvicorn with ``log_config=None``, or it will add its own handlers again. Raises
    ``ConfigurationError`` for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigurationError(f'"{level}" is not a log level; use DEBUG, INFO, WARNING or ERROR')
    handler = _StderrHandler(sys.stderr)
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(JsonFormatter() if json else HumanFormatter(colours=colours))
    handler.addFilter(RedactKeys())
    root = logging.getLogger()
    for present in [old for old in root.handlers if isinstance(old, _StderrHandler)]:
        root.removeHandler(present)
    root.addHandler(handler)
    root.setLevel(number)
    for name in _UVICORN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def is_secret(name: str) -> bool:
    """Return whether fields with this name must not be logged."""
    return name.lower().replace("-", "").replace("_", "") in _SECRET_NAMES


class RedactKeys(logging.Filter):
    """Replaces by ``[redacted]`` all fields whose names indicate a key, a token or a body.

    A second line of defence: code should not log these at all. It checks names of fields, at any
    depth, but not the text of messages.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record in place and accept it."""
        fields = record.__dict__
        for name in [name for name in fields if name not in _STANDARD]:
            fields[name] = _REDACTED if is_secret(name) else _redacted(fields[name], _MAX_DEPTH)
        return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, event, then ``extra`` fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Never raises, whatever the record contains."""
        line: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        for name, value in _extra(record).items():
            line[f"{name}_" if name in line else name] = value
        exception = _exception_text(self, record)
        if exception:
            line["exception"] = exception
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except Exception:  # noqa: BLE001 - lone surrogates, cycles, objects whose str() raises
            return msgspec.json.encode(
                {name: _ascii(value) for name, value in line.items()}
            ).decode()


class HumanFormatter(logging.Formatter):
    """Formats a record for a terminal: ``12:34:56.789 INFO onceward: message  field=value``."""

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        clock = datetime.fromtimestamp(record.created, UTC).astimezone()
        level = f"{record.levelname:<7}"
        if self._colours and (colour := _COLOURS.get(record.levelno)):
            level = f"{colour}{level}{_PLAIN}"
        parts = [f"{clock:%H:%M:%S}.{int(record.msecs):03} {level} {record.name}: "]
        parts.append(_CONTROL.sub(_escaped, record.getMessage()))
        fields = _extra(record)
        if fields.get("correlation_id") == fields.get("request_id"):
            fields.pop("correlation_id", None)  # the client sent none
        parts += [f"  {name}={_field(value)}" for name, value in fields.items()]
        exception = _exception_text(self, record)
        if exception:
            parts.append(f"\n{_CONTROL.sub(_escaped, exception)}")
        return "".join(parts)


class _StderrHandler(logging.StreamHandler[Any]):
    """Marks the handler of ``configure_logging``, which a second call replaces."""


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _exception_text(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _redacted(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        if not depth:
            return _REDACTED
        return {
            name: _REDACTED
            if isinstance(name, str) and is_secret(name)
            else _redacted(inner, depth - 1)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(inner, depth - 1) for inner in value] if depth else _REDACTED
    return value


def _ascii(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
        return text.encode("ascii", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - an object whose repr() raises must not lose the log line
        return f"<{type(value).__name__} without repr>"


def _field(value: Any) -> str:
    text = value if isinstance(value, str) else _ascii(value)
    return ascii(text) if not text or _NEEDS_QUOTES.search(text) else text


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _iso(created: float) -> str:
    instant = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    return f"{instant.removesuffix('+00:00')}Z"
