"""Log formatters: one line per record, redaction, escaping, values that cannot be encoded."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward.observability.logs import (
    HumanFormatter,
    JsonFormatter,
    _StderrHandler,
    configure_logging,
    is_secret,
)

log = logging.getLogger("onceward.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    # Not all handlers: pytest adds and removes its own in each phase of a test.
    root.handlers[:] = [one for one in root.handlers if not isinstance(one, _StderrHandler)]
    root.setLevel(level)


class Stderr:
    """Everything written to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Stderr:
    return Stderr(capsys)


def lines(stream: Stderr) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_record_is_one_line_of_json_with_its_extra_fields(stderr):
    configure_logging()
    log.info(
        "hello %s",
        "ana",
        extra={"tenant": "acme", "status": 201, "at": datetime(2025, 1, 2, tzinfo=UTC)},
    )
    (line,) = lines(stderr)
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC
    assert line["time"].endswith("Z")
    assert line == {
        "time": line["time"],
        "level": "INFO",
        "logger": "onceward.test",
        "event": "hello ana",
        "tenant": "acme",
        "status": 201,
        "at": "2025-01-02T00:00:00Z",
    }


def test_exception_is_a_field_of_the_same_line(stderr):
    configure_logging()
    try:
        int("oh\nno", 99)
    except ValueError:
        log.exception("it broke", stack_info=True)
    (line,) = lines(stderr)
    assert line["level"] == "ERROR"
    assert "Traceback" in line["exception"]
    assert "\nValueError: int() base must be" in line["exception"]
    assert "Stack (most recent call last)" in line["exception"]


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "idempotency_key",
        "Idempotency-Key",
        "idempotencyKey",
        "authorization",
        "token",
        "attestationToken",
        "payload",
        "body",
        "key",
        "passphrase",
    ],
)
def test_secret_fields_are_redacted_at_any_depth(stderr, as_json, name):
    configure_logging(json=as_json)
    deep: dict[str, Any] = {
        "request": [{"headers": {name: "hunter2"}}],
        "pair": ({name: "hunter2"},),
    }
    log.info("sent", extra={name: "hunter2", "about": deep, "key_hash": "0123456789ab"})
    text = stderr.getvalue()
    assert "hunter2" not in text
    assert text.count("[redacted]") == 3
    assert "0123456789ab" in text
    assert deep["request"][0]["headers"][name] == "hunter2", (
        "the argument of the caller is not changed"
    )


def test_similar_names_are_not_redacted():
    for name in ("key_hash", "payload_hash", "token_count", "event", "tenant", "status", ""):
        assert not is_secret(name)


def test_cyclic_value_is_cut_off(stderr):
    configure_logging()
    loop: dict[str, Any] = {}
    loop["again"] = loop
    log.info("round", extra={"loop": loop})
    (line,) = lines(stderr)
    assert "[redacted]" in json.dumps(line["loop"])


class WithoutRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "odd",
    [
        "\ud800",
        object(),
        WithoutRepr(),
        {1: 2, (3, 4): 5, None: 6},
        float("nan"),
        {1, 2},
        b"\xff",
        Path("/x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_that_cannot_be_encoded_does_not_lose_the_record(stderr, as_json, odd):
    logging.getLogger().handlers.clear()  # pytest's handlers fail on lone surrogates
    configure_logging(json=as_json)
    log.warning("odd %s", "\udcff", extra={"odd": odd, "even": 2})
    assert "--- Logging error ---" not in stderr.getvalue()
    (text,) = stderr.getvalue().splitlines()
    assert "odd" in text
    if as_json:
        assert json.loads(text)["event"].startswith("odd ")
        assert str(json.loads(text)["even"]) == "2"


def test_extra_field_cannot_replace_a_standard_field(stderr):
    configure_logging()
    log.info("true", extra={"event": "false", "level": "low", "time": "never"})
    (line,) = lines(stderr)
    assert (line["event"], line["event_"]) == ("true", "false")
    assert (line["level"], line["level_"]) == ("INFO", "low")


def test_line_breaks_in_values_are_escaped(stderr):
    configure_logging()
    log.info("name: %s", 'x\n{"level":"CRITICAL"}\u2028', extra={"field": "a\nb"})
    assert stderr.getvalue().count("\n") == 1


def test_human_format_has_no_colours_without_a_terminal(stderr):
    configure_logging(json=False)
    log.warning("low on %s", "disk", extra={"free": 3, "path": "/a b"})
    line = stderr.getvalue()
    assert "\x1b" not in line
    assert line.rstrip().endswith("WARNING onceward.test: low on disk  free=3  path='/a b'")


def test_terminal_gets_colours_unless_no_color_is_set(monkeypatch):
    for no_colour, expected in ((None, True), ("1", False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        if no_colour:
            monkeypatch.setenv("NO_COLOR", no_colour)
        else:
            monkeypatch.delenv("NO_COLOR", raising=False)
        configure_logging(json=False)
        log.error("bad")
        assert ("\x1b[31m" in terminal.getvalue()) is expected


def test_human_format_escapes_control_characters(stderr):
    configure_logging(json=False)
    log.info("hello \x1b[2J\r%s", "\x9b", extra={"name_": "\x1b]0;x\x07", "odd": ["\x1b"]})
    log.info("said", exc_info=ValueError("\x1b[2J"))
    assert not {"\x1b", "\r", "\x9b", "\x07"} & set(stderr.getvalue())


def test_configuring_twice_logs_once(stderr, monkeypatch):
    configure_logging(level="debug")
    configure_logging(level="WARNING")
    log.info("not this")
    log.warning("this")
    assert [line["event"] for line in lines(stderr)] == ["this"]


def test_other_handlers_are_kept(stderr):
    root = logging.getLogger()
    theirs = logging.NullHandler()
    root.addHandler(theirs)
    configure_logging()
    configure_logging()
    assert theirs in root.handlers
    root.removeHandler(theirs)


def test_uvicorn_logs_in_the_same_format(stderr):
    # Another test in this process may have started uvicorn, which configures its loggers.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate, logger.disabled = True, False
    noisy = logging.getLogger("uvicorn")
    noisy.addHandler(logging.StreamHandler())
    noisy.propagate = False
    configure_logging()
    logging.getLogger("uvicorn.error").info("Started", extra={"color_message": "\x1b[32mStarted"})
    logging.getLogger("uvicorn.access").info('%s - "%s %s"', "127.0.0.1:1", "GET", "/healthz")
    started, access = lines(stderr)
    assert started["event"] == "Started"
    assert "color_message" not in started
    assert access["event"] == '127.0.0.1:1 - "GET /healthz"'


def test_unknown_level_is_rejected():
    with pytest.raises(ConfigurationError, match='"LOUD" is not a log level'):
        configure_logging(level="LOUD")


def test_formatters_work_without_configure_logging():
    record = logging.makeLogRecord({"name": "n", "msg": "m", "levelname": "INFO", "levelno": 20})
    assert json.loads(JsonFormatter().format(record))["event"] == "m"
    assert HumanFormatter(colours=True).format(record).endswith("INFO    n: m")


def test_line_on_a_terminal_has_one_id_if_both_are_equal() -> None:
    record = logging.LogRecord("n", logging.INFO, "p", 1, "request", (), None)
    record.__dict__.update(request_id="a", correlation_id="a")
    assert HumanFormatter().format(record).endswith("request  request_id=a")
    assert json.loads(JsonFormatter().format(record))["correlation_id"] == "a"
    record.__dict__.update(correlation_id="b")
    assert HumanFormatter().format(record).endswith("request  request_id=a  correlation_id=b")
