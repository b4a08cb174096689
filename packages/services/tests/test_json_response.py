"""The response of encoded JSON is the same as that of Starlette."""

from fastapi import Response

from onceward_services.json_response import EncodedJsonResponse


def test_body_and_headers_are_those_of_a_plain_response():
    headers = {"etag": '"7"', "location": "/api/v1/activities/1"}
    plain = Response(b'{"a":"\xc3\xa9"}', 201, headers, "application/json")
    made = EncodedJsonResponse(b'{"a":"\xc3\xa9"}', 201, headers.items())
    assert made.raw_headers == plain.raw_headers
    assert (made.status_code, made.body) == (plain.status_code, plain.body)
    assert made.background is None


def test_headers_may_be_set_afterwards():
    made = EncodedJsonResponse(b"{}")
    made.headers["x-more"] = "1"
    assert made.raw_headers[-1] == (b"x-more", b"1")
