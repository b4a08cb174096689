"""Signed webhooks: signatures, outcomes, and addresses that are refused."""

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward_services.webhooks.addresses import is_allowed, parse_networks
from onceward_services.webhooks.sender import (
    Delivered,
    Gone,
    Outcome,
    Refused,
    Unavailable,
    WebhookSender,
)
from onceward_services.webhooks.signature import check_secret, is_signed, new_secret
from packages.services.tests.support.receiver import Receiver, receiving

NOW = datetime(2026, 5, 22, 12, 0, tzinfo=UTC)
HERE = parse_networks("127.0.0.0/8")
SECRET = new_secret()


async def send(receiver: Receiver, *, timeout_seconds: float = 30, url: str = "") -> Outcome:
    sender = WebhookSender(timeout_seconds=timeout_seconds, allowed=HERE)
    return await sender.send(
        url or receiver.url, [new_secret(), SECRET], {"a": 1}, message_id="m-1", now=NOW
    )


async def test_a_message_is_signed_with_every_secret_and_its_time() -> None:
    async with receiving() as receiver:
        assert await send(receiver) == Delivered(204)
    (request,) = receiver.received
    assert (request.path, request.json) == ("/hook", {"a": 1})
    assert request.headers["webhook-id"] == request.headers["idempotency-key"] == "m-1"
    assert request.headers["content-type"] == "application/json"
    assert is_signed(SECRET, request.headers, request.body, NOW + timedelta(minutes=4))
    assert not is_signed(SECRET, request.headers, request.body, NOW + timedelta(minutes=6))
    assert not is_signed(SECRET, request.headers, request.body + b" ", NOW)
    assert not is_signed(new_secret(), request.headers, request.body, NOW)
    assert not is_signed(SECRET, request.headers | {"webhook-id": "m-2"}, request.body, NOW)
    assert not is_signed(SECRET, {}, request.body, NOW)


@pytest.mark.parametrize("secret", ["", "secret", "whsec_", "whsec_!!", "whsec_AAAA"])
def test_weak_and_malformed_secrets_are_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="secret of webhooks"):
        check_secret(secret)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, Delivered(200)),
        (404, Gone("the response was 404")),
        (410, Gone("the response was 410")),
        (401, Refused("the response was 401")),
        (500, Unavailable("the response was 500", 0)),
        (429, Unavailable("the response was 429", 0)),
    ],
)
async def test_what_a_status_means(status: int, expected: Outcome) -> None:
    async with receiving() as receiver:
        receiver.responses = [status]
        assert await send(receiver) == expected


async def test_the_delay_that_a_receiver_names_is_returned() -> None:
    async with receiving() as receiver:
        receiver.responses, receiver.headers = [503], [("retry-after", "77")]
        assert await send(receiver) == Unavailable("the response was 503", 77)


async def test_a_redirect_is_not_followed() -> None:
    async with receiving() as inside, receiving() as receiver:
        receiver.responses, receiver.headers = [307], [("location", inside.url)]
        outcome = await send(receiver)
        assert outcome == Refused("the response was 307: redirects are not followed")
        assert inside.received == []


@pytest.mark.parametrize(
    "response", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"]
)
async def test_what_is_not_a_whole_response_is_no_response(response: bytes) -> None:
    async with receiving() as receiver:
        receiver.responses = [response]
        assert isinstance(await send(receiver), Unavailable)


async def test_a_server_that_hangs_is_no_response() -> None:
    async with receiving() as receiver:
        receiver.responses = [None]
        outcome = await send(receiver, timeout_seconds=0.2)
        assert outcome == Unavailable("no response within 0.2 seconds")


async def test_an_endless_body_is_cut_off() -> None:
    async with receiving() as receiver:
        receiver.responses = [b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000]
        assert await send(receiver) == Delivered(200)


async def test_a_port_without_a_server_is_no_response() -> None:
    async with receiving() as receiver:
        pass
    assert isinstance(await send(receiver), Unavailable)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "https://localhost/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://0.0.0.0/",
        "https://2130706433/",
    ],
)
async def test_internal_addresses_are_refused(url: str) -> None:
    outcome = await WebhookSender().send(url, [SECRET], {}, message_id="m", now=NOW)
    assert isinstance(outcome, Refused)
    assert "internal address" in outcome.reason


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "100.64.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "fe80::1%eth0",
        "fd00::1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "::",
        "ff02::1",
    ],
)
def test_an_address_is_internal(address: str) -> None:
    assert not is_allowed(address)


def test_public_and_named_networks_are_allowed() -> None:
    assert is_allowed("8.8.8.8")
    assert is_allowed("2606:4700::1111")
    assert is_allowed("10.1.2.3", parse_networks("10.1.0.0/16"))
    assert not is_allowed("10.2.2.3", parse_networks("10.1.0.0/16"))


@pytest.mark.parametrize(
    "url",
    ["", "hook", "ftp://x/", "https://", "https://a b/", "https://u:p@x/", "https://x:99999/"],
)
async def test_what_is_not_a_url_is_refused(url: str) -> None:
    outcome = await WebhookSender().send(url, [SECRET], {}, message_id="m", now=NOW)
    assert isinstance(outcome, Refused)
    assert "should" in outcome.reason


def lookups(monkeypatch: pytest.MonkeyPatch, *addresses: list[str]) -> list[str]:
    """Make look-ups return these addresses, one list per look-up; returns what was looked up."""
    asked: list[str] = []

    async def getaddrinfo(_loop: Any, host: str, port: int, **_: Any) -> Any:
        asked.append(host)
        found = addresses[min(len(asked), len(addresses)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_with_one_internal_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups(monkeypatch, ["8.8.8.8", "10.0.0.5"])
    outcome = await WebhookSender().send("https://e.test/", [SECRET], {}, message_id="m", now=NOW)
    assert outcome == Refused("e.test has the internal address 10.0.0.5")


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[tuple[str, Any]] = []

    async def connect(host: str, _port: int, **options: Any) -> Any:
        connected.append((host, options["server_hostname"]))
        raise OSError("refused")

    # A second look-up would return an internal address.
    asked = lookups(monkeypatch, ["8.8.8.8"], ["127.0.0.1"])
    monkeypatch.setattr(asyncio, "open_connection", connect)
    outcome = await WebhookSender().send("https://e.test/", [SECRET], {}, message_id="m", now=NOW)
    assert isinstance(outcome, Unavailable)
    assert (asked, connected) == (["e.test"], [("8.8.8.8", "e.test")])


async def test_plain_http_is_refused_for_public_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups(monkeypatch, ["8.8.8.8"])
    outcome = await WebhookSender().send("http://e.test/", [SECRET], {}, message_id="m", now=NOW)
    assert outcome == Refused("should begin with https://")


async def test_a_silent_host_is_not_waited_for_again_and_again() -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # connects, and says nothing
    url = f"http://127.0.0.1:{silent.getsockname()[1]}/hook"
    sender = WebhookSender(timeout_seconds=0.05, allowed=HERE)

    async def attempt(url: str) -> Outcome:
        return await sender.send(url, [SECRET], {}, message_id="m", now=NOW)

    for _ in range(3):
        assert await attempt(url) == Unavailable("no response within 0.05 seconds")
    started = asyncio.get_running_loop().time()
    for path in ("/hook", "/another"):
        outcome = await attempt(url.replace("/hook", path))
        assert isinstance(outcome, Unavailable)
        assert 50 < outcome.after_seconds <= 60
    assert asyncio.get_running_loop().time() - started < 0.04
    async with receiving() as receiver:  # another port is another host
        assert await attempt(receiver.url) == Delivered(204)
    silent.close()
