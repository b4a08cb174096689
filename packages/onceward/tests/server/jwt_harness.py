"""Valid and forged tokens, and a clock that tests set."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from inspect import isawaitable
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from onceward.guard.request import Principal, RequestHead
from onceward.sign_in.jwt_auth import JwtIdentify

SECRET = "a secret that is long enough for HS256"
NOW = datetime(2025, 6, 1, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
ISSUER = "https://id.example"
AUDIENCE = "onceward"


class HeldClock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()

    def pass_time(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


def head_with(authorization: str | bytes | None) -> RequestHead:
    if authorization is None:
        return RequestHead("POST", "/", b"", [])
    raw = authorization if isinstance(authorization, bytes) else authorization.encode("latin-1")
    return RequestHead("POST", "/", b"", [(b"authorization", raw)])


def ask(identify: JwtIdentify, token: str) -> Principal:
    """Identify the caller where no key has to be fetched."""
    found = identify(head_with(f"Bearer {token}"))
    assert isinstance(found, Principal)
    return found


async def ask_async(identify: JwtIdentify, token: str) -> Principal:
    found = identify(head_with(f"Bearer {token}"))
    return await found if isawaitable(found) else found


def claims_of(**changes: Any) -> dict[str, Any]:
    claims = {"sub": "ana", "exp": int((NOW + HOUR).timestamp()), **changes}
    return {name: value for name, value in claims.items() if value is not ...}


def token_of(**changes: Any) -> str:
    return jwt.encode(claims_of(**changes), SECRET, algorithm="HS256")


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def sign_raw(payload: bytes, header: bytes = b'{"alg":"HS256"}') -> str:
    """Return a token with a valid signature over any bytes."""
    text = f"{b64(header)}.{b64(payload)}"
    return f"{text}.{b64(hmac.digest(SECRET.encode(), text.encode(), hashlib.sha256))}"


class Signer:
    """An issuer with one key pair."""

    def __init__(self, algorithm: str, kid: str | None, *, bits: int = 2048) -> None:
        self.algorithm = algorithm
        self.kid = kid
        self.key: Any = (
            rsa.generate_private_key(65537, bits)
            if algorithm == "RS256"
            else ec.generate_private_key(ec.SECP256R1())
        )

    def jwk(self, *, private: bool = False, **changes: Any) -> dict[str, Any]:
        algorithm = jwt.get_algorithm_by_name(self.algorithm)
        key = self.key if private else self.key.public_key()
        jwk = {**algorithm.to_jwk(key, as_dict=True), "kid": self.kid, **changes}
        jwk.pop("key_ops", None)
        return {name: value for name, value in jwk.items() if value is not None}

    def token(self, **changes: Any) -> str:
        headers = None if self.kid is None else {"kid": self.kid}
        claims = claims_of(**{"iss": ISSUER, "aud": AUDIENCE} | changes)
        return jwt.encode(claims, self.key, self.algorithm, headers=headers)


def by_jwks(**options: Any) -> JwtIdentify:
    return JwtIdentify(issuer=ISSUER, audience=AUDIENCE, **options)


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()
