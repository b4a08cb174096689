"""Validation of endpoints: paths on the server, and nothing that leads elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward_outbox.errors import EntryInvalidError
from onceward_protocol.endpoint_validation import MAX_LENGTH, check_endpoint

UUID = "0b9f8c1e-4d5a-4b7c-8d9e-0f1a2b3c4d5e"


@pytest.mark.parametrize(
    "endpoint",
    [
        "/",
        "/api/v1/activities",
        "/api/v1/activities/42",
        f"/api/v1/activities/{{local:{UUID}}}",
        f"/api/v1/activities/{{local:{UUID}}}/notes?expand={{local:{UUID}}}",
        "/quest/7/step/3/advance",
        "/search?next=http://example.org//x&path=../up",
        "/files/report.2026.pdf",
        "/files/...",
        "/files/..a/b..",
        "/caf%C3%A9/a%20b",
        "/~ada/!$&'()*+,;=:@-._",
    ],
)
def test_relative_path_is_accepted_unchanged(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "api/v1/activities",
        "http://evil.example/x",
        "https:evil.example",
        "//evil.example/x",
        "///evil.example",
        "/api//evil",
        "/\\evil.example",
        "\\\\evil.example",
        "/..",
        "/../admin",
        "/api/../admin",
        "/api/..",
        "/api/./admin",
        "/api/..;/admin",
        "/api/..;a=b/admin",
        "/a\r\nHost: evil",
        "/a\nX: y",
        "/a\tb",
        "/a\x00b",
        "/a\x7fb",
        "/a b",
        "/a#fragment",
        "/caf\u00e9",
        "/\u2024\u2024/admin",
        "/{id}",
        "/{local:42}",
        f"/{{local:{UUID.upper()}}}",
        "/a%",
        "/a%2",
        "/a%zz",
        "@evil.example/",
        " /a",
        "?a=b",
    ],
)
def test_anything_but_a_relative_path_is_rejected(endpoint: str) -> None:
    with pytest.raises(EntryInvalidError) as caught:
        check_endpoint(endpoint)
    assert caught.value.rule == "endpoint_must_be_relative_path"


@pytest.mark.parametrize(
    "endpoint",
    [
        "/%2e%2e/admin",
        "/%2E%2e/admin",
        "/.%2e/admin",
        "/%2e./admin",
        "/api/%2e%2e%2fadmin",
        "/api/..%2fadmin",
        "/api%2f..%2fadmin",
        "/%2f%2fevil.example",
        "/%2fevil.example",
        "/api/%2f/x",
        "/%5cevil.example",
        "/%5c%5cevil.example",
        "/a%0d%0aHost:%20evil",
        "/a%00",
        "/a%7f",
        "/%252e%252e/admin",
        "/%25252e%25252e/admin",
        "/%252f%252fevil",
        "/%2525252525252e",
        "/%c0%ae%c0%ae/admin",
        "/%ff",
        "/%ef%bc%8e%ef%bc%8e/admin",
        "/%e2%80%a5/admin",
        "/%ef%bc%8f%ef%bc%8fevil",
        "/..%3b/admin",
    ],
)
def test_percent_encoded_traversal_is_rejected(endpoint: str) -> None:
    with pytest.raises(EntryInvalidError):
        check_endpoint(endpoint)


def test_error_message_does_not_repeat_the_endpoint() -> None:
    with pytest.raises(EntryInvalidError) as caught:
        check_endpoint("/my secret")
    assert "secret" not in str(caught.value)


def test_endpoint_has_a_maximum_length() -> None:
    assert check_endpoint("/" + "a" * (MAX_LENGTH - 1))
    with pytest.raises(EntryInvalidError):
        check_endpoint("/" + "a" * MAX_LENGTH)


def test_endpoint_that_is_not_text_is_rejected() -> None:
    with pytest.raises(EntryInvalidError):
        check_endpoint(None)  # type: ignore[arg-type]


@given(st.text(alphabet="/.%25ecf2\\;:@?#{} \r\n\u2024\uff0ea", max_size=30))
def test_accepted_endpoint_stays_below_the_root_in_any_decoding(text: str) -> None:
    from posixpath import normpath
    from urllib.parse import unquote, urljoin, urlsplit

    try:
        endpoint = check_endpoint("/" + text)
    except EntryInvalidError:
        return
    origin = "https://device.example"
    assert urlsplit(urljoin(origin, endpoint)).netloc == "device.example"
    path = endpoint.partition("?")[0]
    for _ in range(5):
        assert not path.startswith("//")
        assert ".." not in path.split("/")
        # No ".." anywhere: normalizing removes at most a slash at the end.
        assert normpath(path) == (path.rstrip("/") or "/")
        path = unquote(path)
