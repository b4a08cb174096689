"""Who a token says is calling, and that nothing but a good token says anything."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import isawaitable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError, NotAuthenticatedError, StoreUnavailableError
from holdfast.server import jwt_auth, jwt_keys
from holdfast.server.call import Principal
from holdfast.server.head import RequestHead
from holdfast.server.jwt_auth import JwtIdentify, mint_token

SECRET = "a secret that is long enough for HS256"
NOW = datetime(2025, 6, 1, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)


class HeldClock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()

    def pass_time(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def identify(clock: HeldClock) -> JwtIdentify:
    return JwtIdentify(secret=SECRET, clock=clock)


def head_with(authorization: str | bytes | None) -> RequestHead:
    if authorization is None:
        return RequestHead("POST", "/", b"", [])
    raw = authorization if isinstance(authorization, bytes) else authorization.encode("latin-1")
    return RequestHead("POST", "/", b"", [(b"authorization", raw)])


def ask(identify: JwtIdentify, token: str) -> Principal:
    """Ask where no key has to be fetched."""
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
    """A token with a good signature over whatever bytes."""
    text = f"{b64(header)}.{b64(payload)}"
    return f"{text}.{b64(hmac.digest(SECRET.encode(), text.encode(), hashlib.sha256))}"


# -- what a good token says --------------------------------------------------------------------


def test_a_minted_token_says_who_is_calling(identify):
    token = mint_token(
        SECRET, sub="ana", org="acme", roles=["admin", "walker"], lifetime=HOUR, now=NOW
    )
    principal = ask(identify, token)
    assert principal.tenant == "ana"
    assert principal.actor == "ana"
    assert principal.roles == {"admin", "walker"}
    assert principal.claims["org"] == "acme"


def test_a_minted_token_lives_as_long_as_it_was_given(identify, clock):
    token = mint_token(SECRET, sub="ana", lifetime=timedelta(minutes=5), now=NOW)
    clock.pass_time(299)
    assert ask(identify, token).actor == "ana"
    clock.pass_time(1)
    with pytest.raises(NotAuthenticatedError, match="the token has expired"):
        ask(identify, token)


def test_the_tenant_is_read_from_the_claim_one_names(identify):
    token = mint_token(SECRET, sub="ana", org="acme", lifetime=HOUR, now=NOW)
    by_org = identify.with_tenant("org")
    assert ask(by_org, token).tenant == "acme"
    assert ask(by_org, token).actor == "ana"
    assert ask(identify, token).tenant == "ana", "the first one is as it was"


def test_a_missing_tenant_claim_is_named(identify):
    token = mint_token(SECRET, sub="ana", lifetime=HOUR, now=NOW)
    assert ask(identify, token).tenant == "ana"
    with pytest.raises(NotAuthenticatedError, match='no claim "org"'):
        ask(identify.with_tenant("org"), token)


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  ", "  bEaReR "])
def test_the_scheme_may_be_written_in_any_case(identify, scheme):
    found = identify(head_with(f"{scheme}{token_of()} "))
    assert isinstance(found, Principal)


def test_one_role_may_be_a_plain_text(identify):
    assert ask(identify, token_of(roles="admin")).roles == {"admin"}
    assert ask(identify, token_of(roles=None)).roles == frozenset()


def test_nobody_can_change_the_claims_of_a_remembered_token(identify):
    token = token_of(org="acme")
    with pytest.raises(TypeError):
        ask(identify, token).claims["org"] = "other"  # type: ignore[index]
    assert ask(identify, token).claims["org"] == "acme"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization", [None, "", " ", "Bearer", "Bearer ", "Basic YTpi", "Bearerx y", "\x00"]
)
def test_without_a_bearer_token_nobody_is_signed_in(identify, authorization):
    with pytest.raises(NotAuthenticatedError, match="sign in"):
        identify(head_with(authorization))


def test_a_token_past_its_time_is_refused_even_if_it_was_good_before(identify, clock):
    token = token_of()
    ask(identify, token)
    clock.pass_time(3600)
    with pytest.raises(NotAuthenticatedError, match="the token has expired"):
        ask(identify, token)


@pytest.mark.parametrize("claim", ["nbf", "iat"])
def test_a_token_from_the_future_is_refused_beyond_the_leeway(identify, clock, claim):
    at = int(NOW.timestamp()) + 60
    token = token_of(**{claim: at})
    with pytest.raises(NotAuthenticatedError, match="not valid yet"):
        ask(identify, token)
    clock.pass_time(29)
    with pytest.raises(NotAuthenticatedError, match="not valid yet"):
        ask(identify, token)
    clock.pass_time(1)
    assert ask(identify, token).actor == "ana"


@pytest.mark.parametrize("algorithm", ["HS384", "HS512"])
def test_another_algorithm_is_refused_though_the_secret_is_right(identify, algorithm):
    token = jwt.encode(claims_of(), SECRET * 2, algorithm=algorithm)
    with pytest.raises(NotAuthenticatedError, match="must be signed with HS256"):
        ask(identify, token)


@pytest.mark.parametrize("name", ["none", "None", "NONE", "", None, 0, ["HS256"], {"a": 1}])
def test_a_token_that_names_no_algorithm_is_refused(identify, name):
    header = b64(json.dumps({"alg": name}).encode())
    payload = b64(json.dumps(claims_of()).encode())
    signature = sign_raw(b"x").rpartition(".")[2]
    for token in (f"{header}.{payload}.", f"{header}.{payload}.{signature}"):
        with pytest.raises(NotAuthenticatedError, match="must be signed with HS256"):
            ask(identify, token)


def test_another_secret_is_refused(identify):
    token = jwt.encode(claims_of(), SECRET + "!", algorithm="HS256")
    with pytest.raises(NotAuthenticatedError, match="signature does not hold"):
        ask(identify, token)


def test_a_changed_claim_breaks_the_signature(identify):
    header, _, signature = token_of().split(".")
    payload = b64(json.dumps(claims_of(sub="eve")).encode())
    with pytest.raises(NotAuthenticatedError, match="signature does not hold"):
        ask(identify, f"{header}.{payload}.{signature}")


@pytest.mark.parametrize("claim", ["sub", "exp"])
def test_a_token_without_subject_or_end_is_refused(identify, claim):
    with pytest.raises(NotAuthenticatedError, match=f'no claim "{claim}"'):
        ask(identify, token_of(**{claim: ...}))


@pytest.mark.parametrize("tenant", ["", "a" * 257, "a\x00b", "a\nb", "\x7f", "\x85", 7, ["a"], {}])
@pytest.mark.parametrize("claim", ["sub", "org"])
def test_a_name_that_no_database_could_keep_is_refused(identify, claim, tenant):
    payload = json.dumps(claims_of(**{"org": "acme", claim: tenant})).encode()
    with pytest.raises(NotAuthenticatedError, match=f'claim "{claim}" must be 1 to 256'):
        ask(identify.with_tenant("org"), sign_raw(payload))


def test_a_name_of_256_characters_of_any_script_is_taken(identify):
    assert ask(identify, token_of(sub="é" * 256)).actor == "é" * 256


@pytest.mark.parametrize("roles", [7, [1], ["a", None], {"admin": True}, True])
def test_roles_that_are_no_list_of_texts_are_refused(identify, roles):
    with pytest.raises(NotAuthenticatedError, match='claim "roles"'):
        ask(identify, token_of(roles=roles))


@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", [b'"4102444800"', b"true", b"[]", b"{}"])
def test_a_time_that_is_no_number_is_refused(identify, claim, value):
    other = b"" if claim == "exp" else b'"exp":4102444800,'
    payload = b'{"sub":"ana",' + other + b'"' + claim.encode() + b'":' + value + b"}"
    with pytest.raises(NotAuthenticatedError, match=f'claim "{claim}" is not a time'):
        ask(identify, sign_raw(payload))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b'"ana"',
        b"{",
        b"\xff\xfe",
        b'{"sub":"ana","exp":NaN}',
        b'{"sub":"ana","exp":Infinity}',
        b'{"sub":"ana","exp":1e999}',
        b'{"sub":"\\ud800","exp":4102444800}',
        b"[" * 5000,
        b'{"exp":1' + b"0" * 5000 + b"}",
    ],
)
def test_well_signed_nonsense_is_refused(identify, payload):
    with pytest.raises(NotAuthenticatedError, match="claims are not"):
        ask(identify, sign_raw(payload))


def test_a_time_beyond_all_times_is_still_a_time(identify):
    payload = b'{"sub":"ana","exp":1' + b"0" * 300 + b"}"
    assert ask(identify, sign_raw(payload)).actor == "ana"


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 5000,
        b'{"alg":"HS256","kid":7}',
        b'{"alg":"HS256","crit":["x"]}',
        b'{"alg":"HS256","b64":false,"crit":["b64"]}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused(identify, header):
    with pytest.raises(NotAuthenticatedError, match="the token"):
        ask(identify, sign_raw(json.dumps(claims_of()).encode(), header))


def test_a_token_longer_than_any_reasonable_one_is_not_even_read(identify):
    with pytest.raises(NotAuthenticatedError, match="too long"):
        ask(identify, token_of(sub="ana", more="x" * 20_000))
    with pytest.raises(NotAuthenticatedError, match="too long"):
        ask(identify, "." * 10_000_000)


GOOD = token_of()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    raw = bytearray(b"Bearer " + GOOD.encode())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(7, len(raw) - 1))
        raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(raw)


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        damaged(),
        st.binary(max_size=200),
        st.binary(max_size=200).map(lambda raw: b"Bearer " + raw),
        st.from_regex(rb"\ABearer [A-Za-z0-9_=-]{0,40}(\.[A-Za-z0-9_=-]{0,40}){0,4}\Z"),
    )
)
@example(b"Bearer ..")
@example(b"Bearer " + GOOD.encode() + b"\x85")
@example(b"Bearer " + GOOD.encode() + b".")
@example(b"Bearer " + b"." * 100)
def test_garbage_is_never_anything_but_not_signed_in(authorization):
    identify = JwtIdentify(secret=SECRET, clock=HeldClock())
    if authorization[7:].strip(b" \t").rstrip(b"=") == GOOD.encode():
        return  # damage that left the token what it was: white space around it, or padding
    with pytest.raises(NotAuthenticatedError) as caught:
        identify(head_with(authorization))
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 100


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "sub": st.just("ana") | json_values,
            "org": st.just("acme") | json_values,
            "exp": st.just(4_102_444_800) | json_values,
            **dict.fromkeys(("nbf", "iat", "roles"), json_values),
        },
    )
)
def test_any_signed_claims_are_a_good_principal_or_not_signed_in(claims):
    identify = JwtIdentify(secret=SECRET, clock=HeldClock(), tenant_claim="org")
    try:
        principal = identify(head_with(f"Bearer {sign_raw(json.dumps(claims).encode())}"))
    except NotAuthenticatedError:
        return
    assert isinstance(principal, Principal)
    assert principal.tenant == claims["org"]
    assert principal.actor == claims["sub"]
    assert claims["exp"] > NOW.timestamp()


@pytest.mark.parametrize("spoil", [lambda token: token[:-4] + "AAAA", lambda token: token + "é"])
def test_no_message_repeats_the_token(identify, spoil, caplog):
    caplog.set_level(logging.DEBUG)
    token = spoil(token_of())
    with pytest.raises(NotAuthenticatedError) as caught:
        ask(identify, token)
    for part in token.split("."):
        assert part not in str(caught.value)
        assert part not in caplog.text


def test_issuer_and_audience_are_checked_where_they_are_set(clock):
    identify = JwtIdentify(secret=SECRET, clock=clock, issuer="https://id", audience="holdfast")
    assert ask(identify, token_of(iss="https://id", aud="holdfast")).actor == "ana"
    assert ask(identify, token_of(iss="https://id", aud=["x", "holdfast"])).actor == "ana"
    with pytest.raises(NotAuthenticatedError, match="another issuer"):
        ask(identify, token_of(aud="holdfast"))
    for audience in ("other", ["other"], None, {"holdfast": 1}):
        with pytest.raises(NotAuthenticatedError, match="another audience"):
            ask(identify, token_of(iss="https://id", aud=audience))


# -- the cache of verified tokens --------------------------------------------------------------


def test_a_token_is_verified_once_for_all_tenant_claims(identify, monkeypatch):
    token = token_of(org="acme")
    first = ask(identify, token)

    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("verified twice")

    monkeypatch.setattr(identify._jws, "decode", never)
    assert ask(identify, token) is first
    assert ask(identify.with_tenant("org"), token).tenant == "acme"


def test_the_cache_forgets_the_token_not_used_for_longest(identify, monkeypatch):
    monkeypatch.setattr(jwt_auth, "_REMEMBERED_TOKENS", 2)
    one, two, three = (token_of(sub=name) for name in ("one", "two", "three"))
    first, second = ask(identify, one), ask(identify, two)
    assert ask(identify, one) is first
    ask(identify, three)
    assert len(identify._verified._tokens) == 2
    assert ask(identify, one) is first
    assert ask(identify, two) is not second


def test_the_cache_keeps_no_token_in_clear(identify):
    token = token_of()
    ask(identify, token)
    assert list(identify._verified._tokens) == [hashlib.sha256(token.encode()).digest()]


# -- configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", "short", "x" * 31])
def test_a_weak_secret_is_refused_at_start_up(secret):
    with pytest.raises(ConfigurationError, match=f"has {len(secret)} bytes; HS256 needs") as caught:
        JwtIdentify(secret=secret)
    assert secret == "" or secret not in str(caught.value)
    with pytest.raises(ConfigurationError):
        mint_token(secret, sub="ana", lifetime=HOUR, now=NOW)


def test_a_secret_of_32_bytes_will_do():
    assert callable(JwtIdentify(secret="é" * 16))


def test_a_public_key_is_no_secret():
    secret = "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n"
    with pytest.raises(ConfigurationError, match="a public key, which is no secret"):
        JwtIdentify(secret=secret)


def test_a_secret_of_any_bytes_can_come_from_the_environment(clock):
    secret = os.fsdecode(b"\xff\xfe" * 16)
    token = mint_token(secret, sub="ana", lifetime=HOUR, now=NOW)
    assert ask(JwtIdentify(secret=secret, clock=clock), token).actor == "ana"


def test_exactly_one_source_of_keys_is_needed():
    with pytest.raises(ConfigurationError, match="0 are set"):
        JwtIdentify()
    with pytest.raises(ConfigurationError, match="2 are set"):
        JwtIdentify(secret=SECRET, jwks_url="https://id/keys")


@pytest.mark.parametrize("algorithm", ["none", "RS256", "HS384", "rs256"])
def test_an_algorithm_that_does_not_go_with_a_secret_is_refused_at_start_up(algorithm):
    with pytest.raises(ConfigurationError, match="a secret checks HS256"):
        JwtIdentify(secret=SECRET, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["HS256", "none", "RS1"])
def test_an_algorithm_that_does_not_go_with_public_keys_is_refused_at_start_up(algorithm):
    with pytest.raises(ConfigurationError, match="a JWKS checks RS256 or ES256"):
        JwtIdentify(jwks_url="https://id/keys", algorithm=algorithm)


@pytest.mark.parametrize(
    "url", ["http://id.example/keys", "file:///etc/passwd", "keys", "", "https://", "https://[x"]
)
def test_keys_from_a_place_others_can_write_to_are_refused_at_start_up(url):
    with pytest.raises(ConfigurationError, match="must be https"):
        JwtIdentify(jwks_url=url, algorithm="RS256")


def test_a_jwks_file_that_is_not_there_or_has_no_key_is_refused_at_start_up(tmp_path):
    path = tmp_path / "keys.json"
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        JwtIdentify(jwks_file=path, algorithm="RS256")
    for content in ("", "[]", "nonsense", "\x00"):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match="is not a JSON object"):
            JwtIdentify(jwks_file=path, algorithm="RS256")
    none: list[Any] = [None, [], {}, [7], [{"kty": "RSA"}], [{"kty": "RSA", "n": 1, "e": []}]]
    for keys in none:
        path.write_text(json.dumps({"keys": keys}))
        with pytest.raises(ConfigurationError, match="has no key for RS256"):
            JwtIdentify(jwks_file=path, algorithm="RS256")


# -- public keys -------------------------------------------------------------------------------


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
        return jwt.encode(claims_of(**changes), self.key, self.algorithm, headers=headers)


def jwks(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def replace(path: Path, content: bytes) -> None:
    """Write as rotation tools do, with an mtime that differs on coarse file systems too."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(content)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))


ALGORITHMS = pytest.mark.parametrize("algorithm", ["RS256", "ES256"])


@ALGORITHMS
def test_keys_of_a_file_check_tokens(algorithm, tmp_path, clock):
    one, two, stranger = (Signer(algorithm, kid) for kid in ("one", "two", "one"))
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(one.jwk(), two.jwk()))
    identify = JwtIdentify(jwks_file=path, algorithm=algorithm, clock=clock)
    assert ask(identify, one.token()).actor == "ana"
    assert ask(identify, two.token(sub="bo")).actor == "bo"
    with pytest.raises(NotAuthenticatedError, match="signature does not hold"):
        ask(identify, stranger.token())
    with pytest.raises(NotAuthenticatedError, match="a key that is not known"):
        ask(identify, Signer(algorithm, "three").token())


@ALGORITHMS
def test_a_token_without_a_key_id_may_be_signed_by_any_of_the_keys(algorithm, tmp_path, clock):
    path = tmp_path / "keys.json"
    nameless = Signer(algorithm, None)
    path.write_bytes(jwks(Signer(algorithm, "other").jwk(), nameless.jwk()))
    identify = JwtIdentify(jwks_file=path, algorithm=algorithm, clock=clock)
    assert ask(identify, nameless.token()).actor == "ana"
    with pytest.raises(NotAuthenticatedError, match="signature does not hold"):
        ask(identify, Signer(algorithm, None).token())


def test_the_public_key_is_no_secret_to_sign_with(tmp_path, clock):
    signer = Signer("RS256", "one")
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(signer.jwk(), {"kty": "oct", "k": b64(SECRET.encode()), "kid": "oct"}))
    identify = JwtIdentify(jwks_file=path, algorithm="RS256", clock=clock)
    forged = jwt.encode(claims_of(), SECRET, algorithm="HS256", headers={"kid": "oct"})
    for token in (forged, Signer("ES256", "one").token()):
        with pytest.raises(NotAuthenticatedError, match="must be signed with RS256"):
            ask(identify, token)


def test_keys_that_do_not_fit_are_passed_over(tmp_path, clock, caplog):
    weak, good = Signer("RS256", "weak", bits=1024), Signer("RS256", "good")
    curved = Signer("ES256", "curved")
    path = tmp_path / "keys.json"
    path.write_bytes(
        jwks(
            weak.jwk(),
            good.jwk(private=True),
            curved.jwk(),
            {**good.jwk(), "kid": "sealing", "use": "enc"},
            {**good.jwk(), "kid": "other", "alg": "RS512"},
            {"kty": "RSA", "kid": "broken", "n": "!", "e": "!"},
        )
    )
    identify = JwtIdentify(jwks_file=path, algorithm="RS256", clock=clock)
    assert [name for name, _ in identify._keys._keys] == ["good"]  # type: ignore[attr-defined]
    assert "only 1024 bits" in caplog.text
    assert ask(identify, good.token()).actor == "ana"


def test_a_rotated_file_is_read_again_and_old_tokens_fall(tmp_path, clock):
    old, new = Signer("ES256", "old"), Signer("ES256", "new")
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(old.jwk()))
    identify = JwtIdentify(jwks_file=path, algorithm="ES256", clock=clock)
    assert ask(identify, old.token()).actor == "ana"
    token = old.token(sub="bo")
    ask(identify, token)
    replace(path, jwks(new.jwk()))
    assert ask(identify, new.token()).actor == "ana"
    with pytest.raises(NotAuthenticatedError, match="a key that is not known"):
        ask(identify, token)


def test_a_broken_rotation_is_logged_and_the_old_keys_stay(tmp_path, clock, caplog):
    signer = Signer("ES256", "one")
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(signer.jwk()))
    identify = JwtIdentify(jwks_file=path, algorithm="ES256", clock=clock)
    replace(path, b'{"keys": [')
    assert ask(identify, signer.token()).actor == "ana"
    path.unlink()
    assert ask(identify, signer.token(sub="bo")).actor == "bo"
    ask(identify, signer.token(sub="cy"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


# -- keys from a server ------------------------------------------------------------------------


class KeyServer:
    """A real HTTP server that gives out keys, and counts how often it was asked."""

    def __init__(self) -> None:
        self.content = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        self.garbage: bytes | None = None
        self.asked = 0
        self.wait = threading.Event()
        self.wait.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked += 1
                owner.wait.wait(10)
                if owner.garbage is not None:
                    self.wfile.write(owner.garbage)
                    return
                self.send_response(owner.status)
                for name, value in owner.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(owner.content)))
                self.end_headers()
                self.wfile.write(owner.content)

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.wait.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def key_server() -> Iterator[KeyServer]:
    server = KeyServer()
    yield server
    server.close()


@ALGORITHMS
async def test_keys_of_a_url_are_fetched_once_when_first_needed(algorithm, key_server, clock):
    signer = Signer(algorithm, "one")
    key_server.content = jwks(signer.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm=algorithm, clock=clock)
    assert key_server.asked == 0
    assert (await ask_async(identify, signer.token())).actor == "ana"
    assert ask(identify, signer.token(sub="bo")).actor == "bo", "no waiting from now on"
    assert ask(identify.with_tenant("org"), signer.token(org="acme")).tenant == "acme"
    assert key_server.asked == 1


async def test_a_hundred_callers_who_wait_for_keys_ask_for_them_once(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    key_server.wait.clear()
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token()
    callers = [asyncio.create_task(ask_async(identify, token)) for _ in range(100)]
    while not key_server.asked:
        await asyncio.sleep(0.001)
    callers[0].cancel()
    await asyncio.sleep(0)
    key_server.wait.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(one, Principal) for one in found[1:])
    assert key_server.asked == 1


async def test_keys_are_fetched_again_after_five_minutes(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token()
    await ask_async(identify, token)
    clock.pass_time(299)
    ask(identify, token)
    clock.pass_time(1)
    assert (await ask_async(identify, token)).actor == "ana"
    assert key_server.asked == 2


async def test_a_withdrawn_key_ends_the_tokens_it_signed(key_server, clock):
    old, new = Signer("RS256", "old"), Signer("RS256", "new")
    key_server.content = jwks(old.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="RS256", clock=clock)
    token = old.token()
    await ask_async(identify, token)
    key_server.content = jwks(new.jwk())
    clock.pass_time(300)
    with pytest.raises(NotAuthenticatedError, match="a key that is not known"):
        await ask_async(identify, token)


async def test_an_unknown_key_id_is_looked_up_at_most_every_30_seconds(key_server, clock):
    old, new = Signer("ES256", "old"), Signer("ES256", "new")
    key_server.content = jwks(old.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, old.token())
    key_server.content = jwks(old.jwk(), new.jwk())
    with pytest.raises(NotAuthenticatedError, match="a key that is not known"):
        await ask_async(identify, new.token())
    assert key_server.asked == 1, "it was asked just now"
    clock.pass_time(30)
    assert (await ask_async(identify, new.token())).actor == "ana"
    assert key_server.asked == 2
    for number in range(20):
        with pytest.raises(NotAuthenticatedError):
            await ask_async(identify, Signer("ES256", f"guess {number}").token())
    assert key_server.asked == 2
    assert ask(identify, old.token()).actor == "ana"


async def test_a_rotation_without_key_ids_is_found_too(key_server, clock):
    old, new = Signer("ES256", None), Signer("ES256", None)
    key_server.content = jwks(old.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, old.token())
    key_server.content = jwks(new.jwk())
    clock.pass_time(30)
    assert (await ask_async(identify, new.token())).actor == "ana"


async def test_no_key_server_is_asked_about_a_token_that_cannot_hold(key_server, clock):
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="RS256", clock=clock)
    for token in ("garbage", token_of(), Signer("ES256", "one").token()):
        with pytest.raises(NotAuthenticatedError):
            await ask_async(identify, token)
    assert key_server.asked == 0


async def test_an_unreachable_key_server_is_not_the_callers_fault(clock):
    server = KeyServer()
    server.close()
    identify = JwtIdentify(jwks_url=server.url, algorithm="ES256", clock=clock)
    token = Signer("ES256", "one").token()
    with pytest.raises(StoreUnavailableError, match="keys to check tokens with cannot be fetched"):
        await ask_async(identify, token)


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 500},
        {"status": 404},
        {"content": b"nonsense"},
        {"content": b'{"keys":[]}'},
        {"content": b" " * (jwt_keys._JWKS_MOST_BYTES + 1)},
        {"status": 302, "headers": {"location": "/elsewhere"}},
        {"garbage": b"this is not HTTP\r\n\r\n"},
        {"garbage": b""},
    ],
    ids=["500", "404", "no JSON", "no keys", "too large", "redirect", "no HTTP", "nothing"],
)
async def test_a_key_server_that_talks_nonsense_counts_as_unreachable(key_server, clock, answer):
    for name, value in answer.items():
        setattr(key_server, name, value)
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    signer = Signer("ES256", "one")
    for _ in range(5):
        with pytest.raises(StoreUnavailableError):
            await ask_async(identify, signer.token())
    assert key_server.asked == 1, "after a failure it is left alone for a while"
    key_server.status, key_server.content = 200, jwks(signer.jwk())
    key_server.headers, key_server.garbage = {}, None
    clock.pass_time(5)
    assert (await ask_async(identify, signer.token())).actor == "ana"


async def test_known_keys_outlive_an_outage_of_the_key_server_for_an_hour(key_server, clock):
    signer, other = Signer("ES256", "one"), Signer("ES256", "two")
    key_server.content = jwks(signer.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    token = signer.token(exp=int((NOW + 3 * HOUR).timestamp()))
    await ask_async(identify, token)
    key_server.status = 503
    for _ in range(11):
        clock.pass_time(300)
        assert (await ask_async(identify, token)).actor == "ana"
    with pytest.raises(StoreUnavailableError):  # it may be signed with a new key: nobody can tell
        await ask_async(identify, other.token())
    clock.pass_time(300)
    with pytest.raises(StoreUnavailableError):
        await ask_async(identify, token)


async def test_an_unknown_key_is_in_doubt_while_the_key_server_is_away(key_server, clock):
    signer, other = Signer("ES256", "one"), Signer("ES256", "two")
    key_server.content = jwks(signer.jwk())
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    await ask_async(identify, signer.token())
    key_server.status = 503
    clock.pass_time(30)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await ask_async(identify, other.token())
    assert key_server.asked == 2
    assert ask(identify, signer.token()).actor == "ana"


async def test_the_event_loop_is_free_while_keys_are_fetched(key_server, clock):
    signer = Signer("ES256", "one")
    key_server.content = jwks(signer.jwk())
    key_server.wait.clear()
    identify = JwtIdentify(jwks_url=key_server.url, algorithm="ES256", clock=clock)
    caller = asyncio.create_task(ask_async(identify, signer.token()))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not caller.done()
    key_server.wait.set()
    assert (await caller).actor == "ana"


def test_two_different_authorizations_are_nobody() -> None:
    first, second = (b"authorization", b"Bearer one"), (b"authorization", b"Bearer two")
    assert RequestHead("POST", "/", b"", [first, second]).authorization is None
    assert RequestHead("POST", "/", b"", [first, first]).authorization == "Bearer one"
