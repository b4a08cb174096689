"""Signatures of webhooks, as in the Standard Webhooks specification.

The signature is an HMAC-SHA256 over id, timestamp and body. The timestamp is part of it, so that
a receiver can refuse a request that somebody has recorded and sends again later.
"""

import binascii
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Final

__all__ = ["ID", "SIGNATURE", "TIMESTAMP", "check_secret", "is_signed", "new_secret", "sign"]

ID: Final = "webhook-id"
TIMESTAMP: Final = "webhook-timestamp"
SIGNATURE: Final = "webhook-signature"
_PREFIX: Final = "whsec_"
_VERSION: Final = "v1,"
_MIN_BYTES: Final = 24
_MAX_BYTES: Final = 64
_TOLERANCE: Final = timedelta(minutes=5)


def new_secret() -> str:
    """Return a new random secret."""
    return _PREFIX + b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> str:
    """Return a secret that is well-formed. Raises ``ValueError``."""
    _key(secret)
    return secret


def sign(using: Sequence[str], message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the headers of a signed message. With two secrets, a receiver may check either."""
    timestamp = str(int(at.timestamp()))
    signatures = [_VERSION + _digest(secret, message_id, timestamp, body) for secret in using]
    return {ID: message_id, TIMESTAMP: timestamp, SIGNATURE: " ".join(signatures)}


def is_signed(secret: str, headers: Mapping[str, str], body: bytes, now: datetime) -> bool:
    """Return whether a received message has a valid signature that is not too old."""
    try:
        timestamp, signatures = headers[TIMESTAMP], headers[SIGNATURE].split(" ")
        age = abs(now.timestamp() - int(timestamp))
        expected = _VERSION + _digest(secret, headers[ID], timestamp, body)
    except (KeyError, ValueError):
        return False
    matches = [hmac.compare_digest(expected.encode(), each.encode()) for each in signatures]
    return age <= _TOLERANCE.total_seconds() and any(matches)


def _digest(secret: str, message_id: str, timestamp: str, body: bytes) -> str:
    signed = f"{message_id}.{timestamp}.".encode() + body
    return b64encode(hmac.new(_key(secret), signed, sha256).digest()).decode()


def _key(secret: str) -> bytes:
    if not secret.startswith(_PREFIX):
        raise ValueError(f"a secret of webhooks begins with {_PREFIX}")
    try:
        key = b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a secret of webhooks is {_PREFIX} and base64") from error
    if not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise ValueError(f"a secret of webhooks has {_MIN_BYTES} to {_MAX_BYTES} bytes in base64")
    return key
