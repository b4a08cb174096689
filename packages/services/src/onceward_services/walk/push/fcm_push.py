"""Push by Firebase Cloud Messaging, HTTP v1.

An access token is fetched with the key of a service account and kept until shortly before it
expires. FCM has no idempotency keys: a message that is sent twice replaces the first one on the
device, because both have the same collapse key, and the app sees the same ``eventId``.
"""

import asyncio
import json
from datetime import datetime, timedelta
from math import ceil, floor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import jwt
import msgspec

from onceward.errors import ConfigurationError
from onceward_services.walk.push.port import PushMessage
from onceward_services.webhooks.addresses import AddressRefusedError, Network
from onceward_services.webhooks.http_post import (
    HttpResult,
    InvalidUrlError,
    NoResponseError,
    post,
)
from onceward_services.webhooks.sender import (
    Delivered,
    Gone,
    Outcome,
    Refused,
    Unavailable,
    outcome_of,
)

__all__ = ["FcmPush", "ServiceAccount", "load_service_account"]

_SCOPE: Final = "https://www.googleapis.com/auth/firebase.messaging"
_GRANT: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_ASSERTION_LIFETIME: Final = timedelta(hours=1)
# A token is renewed this long before it expires: it has to last for one request.
_MARGIN: Final = timedelta(minutes=2)
_OK: Final = 200
_UNAUTHORIZED: Final = 401
# Error codes of FCM that say that the token of the device is not valid any more.
_GONE_CODES: Final = frozenset({"UNREGISTERED"})


class ServiceAccount(msgspec.Struct, frozen=True):
    """Required members of the key file of a service account."""

    project_id: str
    client_email: str
    private_key: str
    token_uri: str


def load_service_account(path: Path) -> ServiceAccount:
    """Read the key file of a service account. Raises ``ConfigurationError``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServiceAccount)
    except OSError as error:
        raise ConfigurationError(
            f"ONCEWARD_WALK_FCM_CREDENTIALS_FILE: cannot read {path}: {error.strerror}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"ONCEWARD_WALK_FCM_CREDENTIALS_FILE: {path} is not the key file of a service account: "
            f"{error}"
        ) from error


class _TokenError(Exception):
    """No access token; the outcome says whether another attempt may succeed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class FcmPush:
    """Sends messages to devices by their registration tokens."""

    def __init__(
        self,
        account: ServiceAccount,
        *,
        url: str,
        timeout_seconds: float = 10.0,
        allowed: tuple[Network, ...] = (),
    ) -> None:
        self._account = account
        self._url = f"{url.rstrip('/')}/v1/projects/{account.project_id}/messages:send"
        self._timeout_seconds = timeout_seconds
        self._allowed = allowed
        self._token: tuple[str, datetime] | None = None
        self._fetching = asyncio.Lock()

    async def send(self, message: PushMessage, now: datetime) -> Outcome:
        """Send one message. 404 and the code ``UNREGISTERED`` mean that the device is gone."""
        try:
            token = await self._access_token(now)
            result = await self._post(
                self._url,
                json.dumps({"message": _body(message)}).encode(),
                {"content-type": "application/json", "authorization": f"Bearer {token}"},
            )
        except _TokenError as error:
            return error.outcome
        except (InvalidUrlError, AddressRefusedError) as error:
            return Refused(str(error))
        except NoResponseError as error:
            return Unavailable(str(error))
        if result.status == _UNAUTHORIZED:
            self._token = None  # withdrawn; the next attempt gets another one
            return Unavailable("the response was 401: the access token was refused")
        return _outcome(result, now)

    async def _access_token(self, now: datetime) -> str:
        async with self._fetching:
            if self._token is None or now >= self._token[1]:
                self._token = await self._fetch_token(now)
            return self._token[0]

    async def _fetch_token(self, now: datetime) -> tuple[str, datetime]:
        account = self._account
        claims = {
            "iss": account.client_email,
            "scope": _SCOPE,
            "aud": account.token_uri,
            "iat": floor(now.timestamp()),
            "exp": ceil((now + _ASSERTION_LIFETIME).timestamp()),
        }
        try:
            assertion = jwt.encode(claims, account.private_key, algorithm="RS256")
        except (ValueError, TypeError, jwt.PyJWTError) as error:
            raise _TokenError(
                Refused("the private key of the service account is not valid")
            ) from error
        form = urlencode({"grant_type": _GRANT, "assertion": assertion}).encode()
        result = await self._post(
            account.token_uri, form, {"content-type": "application/x-www-form-urlencoded"}
        )
        if result.status != _OK:
            outcome = outcome_of(result, now)
            reason = f"no access token: the response was {result.status}"
            transient = isinstance(outcome, Unavailable)
            raise _TokenError(Unavailable(reason) if transient else Refused(reason))
        try:
            found = msgspec.json.decode(result.body, type=_AccessToken)
        except msgspec.DecodeError as error:
            raise _TokenError(Unavailable(f"no access token: {error}")) from error
        return found.access_token, now + timedelta(seconds=found.expires_in) - _MARGIN

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> HttpResult:
        return await post(
            url, body, headers, timeout_seconds=self._timeout_seconds, allowed=self._allowed
        )


class _AccessToken(msgspec.Struct):
    access_token: str
    expires_in: float


def _body(message: PushMessage) -> dict[str, Any]:
    """Return the message of FCM. Values of ``data`` have to be strings."""
    event, collapse = message.event, message.id
    return {
        "token": message.token,
        "data": {
            "type": event.type,
            "eventId": str(event.seq),
            "data": json.dumps(event.data, separators=(",", ":")),
            "createdAt": event.created_at.isoformat(),
        },
        "android": {"collapse_key": collapse, "priority": "high"},
        "apns": {
            "headers": {
                "apns-collapse-id": collapse,
                "apns-priority": "5",
                "apns-push-type": "background",
            },
            "payload": {"aps": {"content-available": 1}},
        },
        "webpush": {"headers": {"Topic": collapse.replace("-", "")}},
    }


def _outcome(result: HttpResult, now: datetime) -> Outcome:
    found = outcome_of(result, now)
    if isinstance(found, Delivered | Unavailable):
        return found
    code = _error_code(result.body)
    if code in _GONE_CODES:
        return Gone(f"the device is not registered any more ({code})")
    # 404 without that code is about the project or the URL, not about the device.
    return Refused(f"the response was {result.status}{f' {code}' if code else ''}")


def _error_code(body: bytes) -> str | None:
    """Return FCM's error code in a response such as ``{"error": {"details": [{"errorCode"}]}}``."""
    try:
        error = json.loads(body)["error"]
        for detail in error.get("details", ()):
            if "errorCode" in detail:
                return str(detail["errorCode"])
        return str(error["status"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
