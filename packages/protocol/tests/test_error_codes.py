"""The code of an error response, by its header and the shape of its body."""

import json
from typing import Any

import pytest

from onceward_protocol.error_codes import error_code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"code": "a"}, "a"),
        ({"error": "a"}, "a"),
        ({"error": {"code": "a"}}, "a"),
        ({"code": 409, "error": {"code": "a"}}, "a"),
        ({"code": "a", "error": "b"}, "a"),
        ({"error": {"type": "a"}}, None),
        ({"error": ["a"]}, None),
        (["a"], None),
        ("a", None),
    ],
)
def test_code_in_the_body(body: Any, code: str | None) -> None:
    assert error_code(None, json.dumps(body).encode()) == code
    assert error_code("", json.dumps(body).encode()) == code


def test_header_takes_precedence_over_the_body() -> None:
    assert error_code("idempotency.in_progress ", b'{"code": "b"}') == "idempotency.in_progress"


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b"[" * 100_000])
def test_body_that_is_not_json_has_no_code(body: bytes) -> None:
    assert error_code(None, body) is None
