"""Attacks with forged, foreign and outdated tokens."""

import asyncio
import base64
import hmac
import time
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

import msgspec

from onceward_lab.attack.target import Attack, Target, expect_refusal
from onceward_lab.conformance.harness import (
    ANONYMOUS,
    CheckFailedError,
    CheckSkippedError,
    Credentials,
)

__all__ = ["ATTACKS"]

_GROUP: Final = "tokens"
_REFUSED: Final = (401, 403)
_PARTS: Final = 3
_WELL_KNOWN: Final = (
    "",
    "secret",
    "your-256-bit-secret",
    "changeme",
    "a-string-secret-at-least-256-bits-long",
    "09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",
)
_VERIFY: Final = (
    "Choose algorithm and key in the server, verify the signature first, and respond 401 to every "
    "token that fails."
)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _signed(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None) -> str:
    text = f"{_encode(msgspec.json.encode(header))}.{_encode(msgspec.json.encode(claims))}"
    if secret is None:
        return f"{text}."
    return f"{text}.{_encode(hmac.new(secret, text.encode(), sha256).digest())}"


def _token(credentials: Credentials) -> str:
    for name, value in credentials.headers.items():
        if name.lower() == "authorization" and value.lower().startswith("bearer "):
            return value.split(" ", 1)[1].strip()
    raise CheckSkippedError("needs a bearer token: --token or --secret")


def _claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    claims: Any = None
    if len(parts) == _PARTS:
        with suppress(ValueError):  # of base64 or JSON
            claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * 3))
    if not isinstance(claims, dict):
        raise CheckSkippedError("the token is not a JWT")
    return claims


def _secret(target: Target) -> bytes:
    if target.sign_in.secret is None:
        raise CheckSkippedError("needs --secret, to sign such tokens")
    return target.sign_in.secret.encode()


async def _refuses(target: Target, tokens: dict[str, str]) -> str:
    harness = target.harness
    for what, token in tokens.items():
        credentials = Credentials({"Authorization": f"Bearer {token}"})
        request, key = await harness.new_request(), harness.new_key()
        response = await harness.send(request, key, credentials=credentials)
        expect_refusal(what, response.status, response.summary(), _REFUSED)
    return f"{len(tokens)} tokens refused"


async def _anonymous(target: Target) -> str:
    harness = target.harness
    if not harness.credentials.headers:
        raise CheckSkippedError("this server has no sign-in")
    request, key = await harness.new_request(), harness.new_key()
    first = await harness.send(request, key)
    response = await harness.send(request, key, credentials=ANONYMOUS)
    expect_refusal("a used key", response.status, response.summary(), _REFUSED)
    if first.body and first.body in response.body:
        raise CheckFailedError(f"{response.summary()}: contains the stored response")
    other = await harness.send(
        msgspec.structs.replace(request, body=request.other_body), key, credentials=ANONYMOUS
    )
    expect_refusal("a used key and another body", other.status, other.summary(), _REFUSED)
    if b"Hash" in other.body:
        raise CheckFailedError(f"{other.summary()}: contains a hash of the stored request")
    return response.summary()


async def _no_signature(target: Target) -> str:
    token = _token(target.harness.credentials)
    claims = _claims(token)
    start = token.rpartition(".")[0]
    tokens = {
        f"alg {name}": _signed({"alg": name, "typ": "JWT"}, claims, None)
        for name in ("none", "None", "NONE", "")
    }
    tokens |= {"no signature": f"{start}.", "two parts": start}
    return await _refuses(target, tokens)


async def _other_keys(target: Target) -> str:
    claims = _claims(_token(target.harness.credentials))
    header = {"alg": "HS256", "typ": "JWT"}
    tokens = {
        f"signed with {secret!r}": _signed(header, claims, secret.encode())
        for secret in _WELL_KNOWN
    }
    tokens["signed with another secret"] = _signed(header, claims, b"attack" * 8)
    for kid in ("../../../../dev/null", "' UNION SELECT '' --", "\x00"):
        tokens[f"kid {kid!r}"] = _signed(header | {"kid": kid}, claims, b"")
    own_key = {"kty": "oct", "k": _encode(b"attack" * 8)}
    tokens["a key in the header"] = _signed(header | {"jwk": own_key}, claims, b"attack" * 8)
    return await _refuses(target, tokens)


async def _edited_claims(target: Target) -> str:
    token = _token(target.harness.credentials)
    claims = _claims(token)
    header, _, signature = token.split(".")
    edited = {"another subject": claims | {"sub": "attack"}, "all roles": {**claims, "roles": "*"}}
    try:
        other = _claims(_token(target.harness.other_credentials))
    except CheckSkippedError:
        pass
    else:
        edited["the claims of another tenant"] = other | {"iat": 1}
    return await _refuses(
        target,
        {
            what: f"{header}.{_encode(msgspec.json.encode(changed))}.{signature}"
            for what, changed in edited.items()
        },
    )


async def _outdated(target: Target) -> str:
    secret, now = _secret(target), int(time.time())
    claims = _claims(_token(target.harness.credentials))
    header = {"alg": "HS256", "typ": "JWT"}
    without = {name: value for name, value in claims.items() if name != "exp"}
    texts = {
        "expired": claims | {"exp": now - 5},
        "without exp": without,
        "not valid yet": claims | {"nbf": now + 3600},
        "exp as a text": claims | {"exp": "9999999999"},
        "without a subject": {name: v for name, v in claims.items() if name not in ("sub", "org")},
        "an empty subject": claims | {"sub": "", "org": ""},
    }
    return await _refuses(
        target, {what: _signed(header, changed, secret) for what, changed in texts.items()}
    )


async def _other_parties(target: Target) -> str:
    secret = _secret(target)
    claims = _claims(_token(target.harness.credentials))
    wrong: dict[str, dict[str, Any]] = {}
    if "iss" in claims:
        wrong["another issuer"] = claims | {"iss": "https://attack.example"}
        wrong["no issuer"] = {name: v for name, v in claims.items() if name != "iss"}
    if "aud" in claims:
        wrong["another audience"] = claims | {"aud": "attack"}
        wrong["no audience"] = {name: v for name, v in claims.items() if name != "aud"}
    if not wrong:
        raise CheckSkippedError("the token has no issuer and no audience")
    header = {"alg": "HS256", "typ": "JWT"}
    return await _refuses(
        target, {what: _signed(header, changed, secret) for what, changed in wrong.items()}
    )


async def _key_addresses(target: Target) -> str:
    claims = _claims(_token(target.harness.credentials))
    connections = 0

    def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
        header = {"alg": "HS256", "typ": "JWT", "kid": "attack"}
        refused = await _refuses(
            target,
            {
                f"{name} in the header": _signed(header | {name: url}, claims, b"attack" * 8)
                for name in ("jku", "x5u")
            },
        )
    if connections:
        raise CheckFailedError("the server fetched keys from an address in the token")
    return f"{refused}, no key was fetched"


async def _foreign_key_use(target: Target) -> str:
    harness = target.harness
    other = harness.other_credentials
    request, key = await harness.new_request(), harness.new_key()
    first = await harness.send(request, key)
    for what, body in (("the same body", request.body), ("another body", request.other_body)):
        response = await harness.send(
            msgspec.structs.replace(request, body=body), key, credentials=other
        )
        learned = response.is_replay or "x-original-request-id" in response.headers
        if learned or (first.body and response.body == first.body and response.is_success):
            raise CheckFailedError(f"{what}: {response.summary()}, of another tenant")
        if what == "the same body" and response.status == 409:  # noqa: PLR2004
            raise CheckFailedError(f"{what}: {response.summary()}, reveals that the key was used")
        if b"expectedHash" in response.body and what == "the same body":
            raise CheckFailedError(f"{what}: {response.summary()}, with a hash of another tenant")
    return "as if the key were new"


ATTACKS: Final = (
    Attack(
        "a used key without a token",
        _GROUP,
        "401 or 403, nothing of the stored response",
        _anonymous,
        why="A key is not a password: it is in logs, and others can guess or see it.",
        change="Sign the caller in before the record is looked up, replays included.",
    ),
    Attack(
        "tokens without a signature",
        _GROUP,
        "401 or 403",
        _no_signature,
        why='A token with "alg": "none" lets anyone sign in as anyone.',
        change=_VERIFY,
    ),
    Attack(
        "tokens signed with other keys",
        _GROUP,
        "401 or 403",
        _other_keys,
        why="Attackers know the secrets of examples, and the key that a token brings along.",
        change="Use a random secret of 32 bytes or more; ignore jwk and paths in the token.",
    ),
    Attack(
        "tokens with edited claims",
        _GROUP,
        "401 or 403",
        _edited_claims,
        why="The tenant and the roles come from the claims.",
        change=_VERIFY,
    ),
    Attack(
        "tokens that are outdated or incomplete",
        _GROUP,
        "401 or 403",
        _outdated,
        why="A token that was stolen once would be valid for ever; one without a subject has no "
        "tenant.",
        change="Require exp and the claims that name tenant and actor; check exp, nbf and types.",
    ),
    Attack(
        "tokens of another issuer or audience",
        _GROUP,
        "401 or 403",
        _other_parties,
        why="The same keys may sign tokens for other apps; their users are not yours.",
        change="Configure issuer and audience, and compare both (ONCEWARD_JWT_ISSUER, "
        "ONCEWARD_JWT_AUDIENCE).",
    ),
    Attack(
        "tokens that name the address of their keys",
        _GROUP,
        "401 or 403, and no connection to the address",
        _key_addresses,
        why="A token would choose the key that verifies it, and the server would fetch any URL.",
        change="Ignore jku and x5u; fetch keys from the configured address only.",
    ),
    Attack(
        "another tenant's key",
        _GROUP,
        "executed as a new request",
        _foreign_key_use,
        why="One tenant would read the stored response of another, or learn that a key exists.",
        change="Make the tenant the first part of the record's primary key and of every look-up.",
    ),
)
