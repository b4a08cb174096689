"""One event, one line; no line has a secret; no event is lost for being odd."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.observability.logs import (
    HumanFormatter,
    JsonFormatter,
    _StderrHandler,
    configure_logging,
    is_secret,
)

log = logging.getLogger("holdfast.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    # Only ours: pytest puts its own on and takes them off for each phase of a test.
    root.handlers[:] = [one for one in root.handlers if not isinstance(one, _StderrHandler)]
    root.setLevel(level)


class Stderr:
    """All that was written to stderr so far."""

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


def test_an_event_is_one_line_of_json_with_all_its_fields(stderr):
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
        "logger": "holdfast.test",
        "event": "hello ana",
        "tenant": "acme",
        "status": 201,
        "at": "2025-01-02T00:00:00Z",
    }


def test_an_exception_is_text_in_the_same_line(stderr):
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
def test_what_must_not_be_logged_is_blanked_at_any_depth(stderr, as_json, name):
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
    assert deep["request"][0]["headers"][name] == "hunter2", "the caller's own is left alone"


def test_names_that_only_look_like_secrets_are_shown():
    for name in ("key_hash", "payload_hash", "token_count", "event", "tenant", "status", ""):
        assert not is_secret(name)


def test_a_loop_and_a_deep_nest_are_cut_off(stderr):
    configure_logging()
    loop: dict[str, Any] = {}
    loop["again"] = loop
    log.info("round", extra={"loop": loop})
    (line,) = lines(stderr)
    assert "[redacted]" in json.dumps(line["loop"])


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "odd",
    [
        "\ud800",
        object(),
        Shy(),
        {1: 2, (3, 4): 5, None: 6},
        float("nan"),
        {1, 2},
        b"\xff",
        Path("/x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_odd_field_does_not_lose_the_event(stderr, as_json, odd):
    logging.getLogger().handlers.clear()  # pytest's own cannot report half a surrogate pair
    configure_logging(json=as_json)
    log.warning("odd %s", "\udcff", extra={"odd": odd, "even": 2})
    assert "--- Logging error ---" not in stderr.getvalue()
    (text,) = stderr.getvalue().splitlines()
    assert "odd" in text
    if as_json:
        assert json.loads(text)["event"].startswith("odd ")
        assert str(json.loads(text)["even"]) == "2"


def test_a_field_may_not_pose_as_the_event(stderr):
    configure_logging()
    log.info("true", extra={"event": "false", "level": "low", "time": "never"})
    (line,) = lines(stderr)
    assert (line["event"], line["event_"]) == ("true", "false")
    assert (line["level"], line["level_"]) == ("INFO", "low")


def test_a_stranger_cannot_forge_a_second_line(stderr):
    configure_logging()
    log.info("name: %s", 'x\n{"level":"CRITICAL"}\u2028', extra={"field": "a\nb"})
    assert stderr.getvalue().count("\n") == 1


def test_a_person_gets_a_short_line_without_colours_where_there_is_no_terminal(stderr):
    configure_logging(json=False)
    log.warning("low on %s", "disk", extra={"free": 3, "path": "/a b"})
    line = stderr.getvalue()
    assert "\x1b" not in line
    assert line.rstrip().endswith("WARNING holdfast.test: low on disk  free=3  path='/a b'")


def test_a_terminal_gets_colours_unless_it_says_no(monkeypatch):
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


def test_no_escape_sequence_of_a_stranger_reaches_the_terminal(stderr):
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


def test_the_handlers_of_others_stay(stderr):
    root = logging.getLogger()
    theirs = logging.NullHandler()
    root.addHandler(theirs)
    configure_logging()
    configure_logging()
    assert theirs in root.handlers
    root.removeHandler(theirs)


def test_uvicorn_speaks_through_the_same_lines(stderr):
    # Another test of this process may have let uvicorn set its loggers up.
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


def test_a_level_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match='"LOUD" is not a log level'):
        configure_logging(level="LOUD")


def test_formatters_work_without_our_handler():
    record = logging.makeLogRecord({"name": "n", "msg": "m", "levelname": "INFO", "levelno": 20})
    assert json.loads(JsonFormatter().format(record))["event"] == "m"
    assert HumanFormatter(colours=True).format(record).endswith("INFO    n: m")
