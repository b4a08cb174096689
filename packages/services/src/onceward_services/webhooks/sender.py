"""Send a signed message to a URL and say what became of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlsplit

from onceward.jobs.enqueue import encode_json
from onceward_protocol.retry import is_transient, parse_retry_after
from onceward_services.webhooks.addresses import AddressRefusedError, Network
from onceward_services.webhooks.http_post import (
    HttpResult,
    InvalidUrlError,
    NoResponseError,
    check_url,
    post,
)
from onceward_services.webhooks.signature import sign

__all__ = ["Delivered", "Gone", "Outcome", "Refused", "Unavailable", "WebhookSender", "outcome_of"]

_OK: Final = range(200, 300)
_REDIRECTS: Final = range(300, 400)
_GONE: Final = (404, 410)
# After so many messages without a response, a host gets none for so many seconds: each would take
# a slot of the worker until its timeout.
_MOST_SILENT: Final = 3
_PAUSE_SECONDS: Final = 60.0
_MAX_SILENT_HOSTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has it."""

    status: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The receiver does not exist any more (404, 410): send nothing more to it."""

    reason: str
    status: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """Another attempt would fail in the same way."""

    reason: str
    status: int | None = field(default=None, compare=False)
    # True if the address is internal; then the reason names it, for operators only.
    is_internal: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Try again, not before ``after_seconds``. The receiver may have it already."""

    reason: str
    after_seconds: float = 0.0
    status: int | None = field(default=None, compare=False)


Outcome = Delivered | Gone | Refused | Unavailable


class WebhookSender:
    """Sends messages as JSON. The same id is sent with every attempt at a message."""

    def __init__(self, *, timeout_seconds: float = 10.0, allowed: Sequence[Network] = ()) -> None:
        self._timeout_seconds = timeout_seconds
        # Of each host and port without a response: how often in a row, and until when (monotonic)
        # nothing is sent to it.
        self._silent: dict[str, tuple[int, float]] = {}
        self._allowed = tuple(allowed)

    def check_url(self, url: str) -> None:
        """Refuse a URL that cannot be sent to, as far as that is known without a look-up.

        Raises ``InvalidUrlError`` or ``AddressRefusedError``. ``send`` checks the addresses of a
        name each time.
        """
        check_url(url, self._allowed)

    async def send(
        self,
        url: str,
        secrets: Sequence[str],
        message: Mapping[str, Any],
        *,
        message_id: str,
        now: datetime,
    ) -> Outcome:
        """Send one message. Never raises for what the receiver does."""
        host = urlsplit(url).netloc.rpartition("@")[2].lower()
        count, until = self._silent.get(host, (0, 0.0))
        if (wait := until - time.monotonic()) > 0:
            return Unavailable(f"not sent: no response to the last {count} messages", wait)
        body = encode_json(message)
        headers = {
            "content-type": "application/json",
            "user-agent": "onceward",
            # A receiver that honours keys handles a repeated message once.
            "idempotency-key": message_id,
            **sign(secrets, message_id, now, body),
        }
        try:
            result = await post(
                url,
                body,
                headers,
                timeout_seconds=self._timeout_seconds,
                allowed=self._allowed,
            )
        except InvalidUrlError as error:
            return Refused(str(error))
        except AddressRefusedError as error:
            return Refused(str(error), is_internal=True)
        except NoResponseError as error:
            self._note_silence(host)
            return Unavailable(str(error))
        self._silent.pop(host, None)
        return outcome_of(result, now)

    def _note_silence(self, host: str) -> None:
        """Count a message without a response; after some, the host gets none for a while."""
        count = self._silent.get(host, (0, 0.0))[0] + 1
        if len(self._silent) > _MAX_SILENT_HOSTS:
            self._silent.clear()
        pause = _PAUSE_SECONDS if count >= _MOST_SILENT else 0.0
        self._silent[host] = count, time.monotonic() + pause


def outcome_of(result: HttpResult, now: datetime) -> Outcome:
    """Return the meaning of a response."""
    status = result.status
    if status in _OK:
        return Delivered(status)
    if status in _GONE:
        return Gone(f"the response was {status}", status)
    if status in _REDIRECTS:
        return Refused(f"the response was {status}: redirects are not followed", status)
    if is_transient(status):
        after = parse_retry_after(result.headers.get("retry-after"), now=now)
        return Unavailable(f"the response was {status}", after or 0.0, status)
    return Refused(f"the response was {status}", status)
