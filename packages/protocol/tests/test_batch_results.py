"""Results of a batch as a client reads them."""

import pytest

from onceward_protocol.batch import ItemResult, parse_results


def results(*items: str, retry_after: str = "null") -> bytes:
    return f'{{"results": [{", ".join(items)}], "retry_after": {retry_after}}}'.encode()


def item(body: str, content_type: str = "application/json", status: int = 201) -> str:
    return (
        f'{{"status": {status}, "headers": {{"Content-Type": "{content_type}"}}, "body": {body}}}'
    )


@pytest.mark.parametrize(
    ("body", "content_type", "expected"),
    [
        ('{"a": 1}', "application/json", b'{"a": 1}'),
        ('{"base64": "aGk="}', "application/problem+json", b'{"base64": "aGk="}'),
        ('{"base64": "aGk="}', "text/plain", b"hi"),
        ('{"other": 1}', "text/plain", b'{"other": 1}'),
        ("null", "application/json", b""),
        ("null", "text/plain", b""),
    ],
)
def test_body_is_json_or_the_bytes_of_another_type(
    body: str, content_type: str, expected: bytes
) -> None:
    assert parse_results(results(item(body, content_type)), 1) == (
        [ItemResult(201, {"content-type": content_type}, expected)],
        None,
    )


def test_prefix_says_when_to_send_the_rest() -> None:
    found = parse_results(results(item("1"), retry_after="2"), 3)
    assert found is not None
    assert (len(found[0]), found[1]) == (1, 2.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff",
        results(),
        results(item("1"), item("1")),
        results(item("1", status=199)),
        results(item("1", status=600)),
        results(item('{"base64": "a"}', "text/plain")),
    ],
)
def test_other_responses_are_not_results(raw: bytes) -> None:
    assert parse_results(raw, 1) is None
