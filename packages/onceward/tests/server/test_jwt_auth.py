"""Identifying the caller by a token, and refusing everything that is not a valid one."""

import hashlib
import json
import logging
import os
from datetime import timedelta
from typing import Any

import jwt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onceward.errors import ConfigurationError, NotAuthenticatedError
from onceward.guard.request import Principal, RequestHead
from onceward.sign_in import jwt_auth
from onceward.sign_in.jwt_auth import JwtIdentify, mint_token
from packages.onceward.tests.server.jwt_harness import (
    HOUR,
    NOW,
    SECRET,
    HeldClock,
    Signer,
    ask,
    ask_async,
    b64,
    claims_of,
    head_with,
    jwks,
    sign_raw,
    token_of,
)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def identify(clock: HeldClock) -> JwtIdentify:
    return JwtIdentify(secret=SECRET, clock=clock)


# -- valid tokens -----------------------------------------------------------------


def test_a_minted_token_identifies_the_caller(identify):
    token = mint_token(
        SECRET, sub="ana", org="acme", roles=["admin", "walker"], lifetime=HOUR, now=NOW
    )
    principal = ask(identify, token)
    assert principal.tenant == "ana"
    assert principal.actor == "ana"
    assert principal.roles == {"admin", "walker"}
    assert principal.claims["org"] == "acme"


def test_a_minted_token_expires_after_its_lifetime(identify, clock):
    token = mint_token(SECRET, sub="ana", lifetime=timedelta(minutes=5), now=NOW)
    clock.pass_time(299)
    assert ask(identify, token).actor == "ana"
    clock.pass_time(1)
    with pytest.raises(NotAuthenticatedError, match="the token has expired"):
        ask(identify, token)


def test_the_tenant_is_read_from_the_configured_claim(identify):
    token = mint_token(SECRET, sub="ana", org="acme", lifetime=HOUR, now=NOW)
    by_org = identify.with_tenant("org")
    assert ask(by_org, token).tenant == "acme"
    assert ask(by_org, token).actor == "ana"
    assert ask(identify, token).tenant == "ana", "the original is unchanged"


def test_a_missing_tenant_claim_is_named_in_the_error(identify):
    token = mint_token(SECRET, sub="ana", lifetime=HOUR, now=NOW)
    assert ask(identify, token).tenant == "ana"
    with pytest.raises(NotAuthenticatedError, match='no claim "org"'):
        ask(identify.with_tenant("org"), token)


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  ", "  bEaReR "])
def test_the_scheme_is_case_insensitive(identify, scheme):
    found = identify(head_with(f"{scheme}{token_of()} "))
    assert isinstance(found, Principal)


def test_a_single_role_may_be_a_string(identify):
    assert ask(identify, token_of(roles="admin")).roles == {"admin"}
    assert ask(identify, token_of(roles=None)).roles == frozenset()


def test_the_claims_of_a_cached_token_are_read_only(identify):
    token = token_of(org="acme")
    with pytest.raises(TypeError):
        ask(identify, token).claims["org"] = "other"  # type: ignore[index]
    assert ask(identify, token).claims["org"] == "acme"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization", [None, "", " ", "Bearer", "Bearer ", "Basic YTpi", "Bearerx y", "\x00"]
)
def test_a_request_without_a_bearer_token_is_refused(identify, authorization):
    with pytest.raises(NotAuthenticatedError, match="sign in"):
        identify(head_with(authorization))


def test_an_expired_token_is_refused_even_if_it_is_cached(identify, clock):
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
def test_another_algorithm_is_refused_even_with_the_right_secret(identify, algorithm):
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
    with pytest.raises(NotAuthenticatedError, match="signature is invalid"):
        ask(identify, token)


def test_a_changed_claim_breaks_the_signature(identify):
    header, _, signature = token_of().split(".")
    payload = b64(json.dumps(claims_of(sub="eve")).encode())
    with pytest.raises(NotAuthenticatedError, match="signature is invalid"):
        ask(identify, f"{header}.{payload}.{signature}")


@pytest.mark.parametrize("claim", ["sub", "exp"])
def test_a_token_without_sub_or_exp_is_refused(identify, claim):
    with pytest.raises(NotAuthenticatedError, match=f'no claim "{claim}"'):
        ask(identify, token_of(**{claim: ...}))


@pytest.mark.parametrize(
    "tenant", ["", " \u2003", "a" * 257, "a\x00b", "a\nb", "\x7f", "\x85", 7, ["a"], {}]
)
@pytest.mark.parametrize("claim", ["sub", "org"])
def test_a_name_with_control_characters_or_a_wrong_length_is_refused(identify, claim, tenant):
    payload = json.dumps(claims_of(**{"org": "acme", claim: tenant})).encode()
    with pytest.raises(NotAuthenticatedError, match=f'claim "{claim}" must be 1 to 256'):
        ask(identify.with_tenant("org"), sign_raw(payload))


def test_a_name_of_256_characters_of_any_script_is_accepted(identify):
    assert ask(identify, token_of(sub="é" * 256)).actor == "é" * 256


@pytest.mark.parametrize("roles", [7, [1], ["a", None], {"admin": True}, True])
def test_roles_that_are_not_a_list_of_strings_are_refused(identify, roles):
    with pytest.raises(NotAuthenticatedError, match='claim "roles"'):
        ask(identify, token_of(roles=roles))


@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", [b'"4102444800"', b"true", b"[]", b"{}"])
def test_a_time_that_is_not_a_number_is_refused(identify, claim, value):
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
def test_signed_claims_that_are_not_a_json_object_are_refused(identify, payload):
    with pytest.raises(NotAuthenticatedError, match="claims are not"):
        ask(identify, sign_raw(payload))


def test_a_time_of_300_digits_is_accepted(identify):
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
def test_a_malformed_header_is_refused(identify, header):
    with pytest.raises(NotAuthenticatedError, match="the token"):
        ask(identify, sign_raw(json.dumps(claims_of()).encode(), header))


def test_a_token_over_16_kib_is_refused(identify):
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
def test_any_damaged_token_is_not_authenticated(authorization):
    identify = JwtIdentify(secret=SECRET, clock=HeldClock())
    if authorization[7:].strip(b" \t").rstrip(b"=") == GOOD.encode():
        return  # the damage left the token intact: white space around it, or padding
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
def test_any_signed_claims_are_a_principal_or_not_authenticated(claims):
    identify = JwtIdentify(secret=SECRET, clock=HeldClock()).with_tenant("org")
    try:
        principal = identify(head_with(f"Bearer {sign_raw(json.dumps(claims).encode())}"))
    except NotAuthenticatedError:
        return
    assert isinstance(principal, Principal)
    assert principal.tenant == claims["org"]
    assert principal.actor == claims["sub"]
    assert claims["exp"] > NOW.timestamp()


@pytest.mark.parametrize("spoil", [lambda token: token[:-4] + "AAAA", lambda token: token + "é"])
def test_no_message_contains_the_token(identify, spoil, caplog):
    caplog.set_level(logging.DEBUG)
    token = spoil(token_of())
    with pytest.raises(NotAuthenticatedError) as caught:
        ask(identify, token)
    for part in token.split("."):
        assert part not in str(caught.value)
        assert part not in caplog.text


def test_issuer_and_audience_are_checked_where_they_are_set(clock):
    identify = JwtIdentify(secret=SECRET, clock=clock, issuer="https://id", audience="onceward")
    assert ask(identify, token_of(iss="https://id", aud="onceward")).actor == "ana"
    assert ask(identify, token_of(iss="https://id", aud=["x", "onceward"])).actor == "ana"
    with pytest.raises(NotAuthenticatedError, match="another issuer"):
        ask(identify, token_of(aud="onceward"))
    for audience in ("other", ["other"], None, {"onceward": 1}):
        with pytest.raises(NotAuthenticatedError, match="another audience"):
            ask(identify, token_of(iss="https://id", aud=audience))


def test_several_issuers_and_audiences_are_accepted(clock):
    identify = JwtIdentify(
        secret=SECRET, clock=clock, issuer=["https://a", "https://b"], audience=("x", "y")
    )
    for issuer, audience in (("https://a", "y"), ("https://b", ["z", "x"])):
        assert ask(identify, token_of(iss=issuer, aud=audience)).actor == "ana"
    for other in (b'"https://c"', b'"https://a,https://b"', b'["https://a"]', b'""', b"null"):
        with pytest.raises(NotAuthenticatedError, match="another issuer"):
            ask(identify, sign_raw(b'{"sub":"ana","exp":9e9,"aud":"x","iss":%s}' % other))
    for other in (b'"x,y"', b"[]", b'[["x"]]', b"[null]", b'""', b'{"x":1}'):
        with pytest.raises(NotAuthenticatedError, match="another audience"):
            ask(identify, sign_raw(b'{"sub":"ana","exp":9e9,"iss":"https://a","aud":%s}' % other))


def test_a_jwks_without_issuer_and_audience_is_refused_at_start_up(tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(Signer("ES256", "one").jwk()))
    parties: list[dict[str, Any]] = [{}, {"issuer": "https://a"}, {"audience": "x"}]
    sources: list[dict[str, Any]] = [{"jwks_file": path}, {"jwks_url": "https://id/keys"}]
    for source in sources:
        for party in parties:
            with pytest.raises(ConfigurationError, match="needs issuer= and audience="):
                JwtIdentify(**source, **party, algorithm="ES256")


@pytest.mark.parametrize("empty", ["", [], ["x", ""]])
def test_an_empty_issuer_or_audience_is_refused_at_start_up(empty):
    with pytest.raises(ConfigurationError, match="issuer should be a text"):
        JwtIdentify(secret=SECRET, issuer=empty)
    with pytest.raises(ConfigurationError, match="audience should be a text"):
        JwtIdentify(secret=SECRET, audience=empty)


def test_overlapping_secrets_are_all_accepted(clock):
    old, new = "the old secret, of 32 bytes or more", "the new secret, of 32 bytes or more"
    tokens = [mint_token(one, sub="ana", lifetime=HOUR, now=NOW) for one in (old, new)]
    both, after = (JwtIdentify(secret=given, clock=clock) for given in ([new, old], [new]))
    for token in tokens:
        assert ask(both, token).actor == "ana"
    assert ask(after, tokens[1]).actor == "ana"
    for identify, token in ((after, tokens[0]), (both, token_of())):
        with pytest.raises(NotAuthenticatedError, match="signature is invalid"):
            ask(identify, token)
    with pytest.raises(ConfigurationError, match="has 5 bytes"):
        JwtIdentify(secret=[new, "short"])


# -- revoked tokens ----------------------------------------------------------------------------


async def test_a_revoked_token_is_refused_from_the_next_request_on(clock):
    denied: set[str] = set()

    async def is_denied(jti: str) -> bool:
        return jti in denied

    for hook in (denied.__contains__, is_denied):
        denied.clear()
        identify = JwtIdentify(secret=SECRET, clock=clock, is_revoked=hook)
        tokens = [token_of(jti="one"), token_of(jti="two")]
        for token in tokens:
            assert (await ask_async(identify, token)).actor == "ana"
        denied.add("one")
        for same in (identify, identify.with_tenant("jti")):
            with pytest.raises(NotAuthenticatedError, match="was revoked"):
                await ask_async(same, tokens[0])
        assert (await ask_async(identify, tokens[1])).actor == "ana"
        for jti in (..., "", 7, None):
            with pytest.raises(NotAuthenticatedError, match='claim "jti"'):
                await ask_async(identify, token_of(jti=jti))


def test_a_deny_list_that_fails_lets_no_token_through(clock):
    def fail(_jti: str) -> bool:
        raise OSError("the list is away")

    with pytest.raises(OSError, match="the list is away"):
        ask(JwtIdentify(secret=SECRET, clock=clock, is_revoked=fail), token_of(jti="one"))


# -- the cache of verified tokens --------------------------------------------------------------


def test_a_token_is_verified_once_for_all_tenant_claims(identify, monkeypatch):
    token = token_of(org="acme")
    first = ask(identify, token)

    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("verified twice")

    monkeypatch.setattr(identify._jws, "decode", never)
    assert ask(identify, token) is first
    assert ask(identify.with_tenant("org"), token).tenant == "acme"


def test_the_cache_evicts_the_least_recently_used_token(identify, monkeypatch):
    monkeypatch.setattr(jwt_auth, "_CACHED_TOKENS", 2)
    one, two, three = (token_of(sub=name) for name in ("one", "two", "three"))
    first, second = ask(identify, one), ask(identify, two)
    assert ask(identify, one) is first
    ask(identify, three)
    assert len(identify._verified._tokens) == 2
    assert ask(identify, one) is first
    assert ask(identify, two) is not second


def test_the_cache_keeps_hashes_of_tokens_only(identify):
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


def test_a_secret_of_32_bytes_is_accepted():
    assert callable(JwtIdentify(secret="é" * 16))


def test_a_public_key_as_the_secret_is_refused():
    secret = "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----\n"
    with pytest.raises(ConfigurationError, match="a public key; use a random secret"):
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
def test_an_asymmetric_algorithm_with_a_secret_is_refused_at_start_up(algorithm):
    with pytest.raises(ConfigurationError, match="a secret verifies HS256"):
        JwtIdentify(secret=SECRET, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["HS256", "none", "RS1"])
def test_a_symmetric_algorithm_with_a_jwks_is_refused_at_start_up(algorithm):
    with pytest.raises(ConfigurationError, match="a JWKS verifies RS256 or ES256"):
        JwtIdentify(jwks_url="https://id/keys", algorithm=algorithm)


@pytest.mark.parametrize(
    "url", ["http://id.example/keys", "file:///etc/passwd", "keys", "", "https://", "https://[x"]
)
def test_a_jwks_url_without_https_is_refused_at_start_up(url):
    with pytest.raises(ConfigurationError, match="must be https"):
        JwtIdentify(jwks_url=url, algorithm="RS256")


def test_a_missing_or_unusable_jwks_file_is_refused_at_start_up(tmp_path):
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


def test_two_different_authorization_headers_identify_no_caller() -> None:
    first, second = (b"authorization", b"Bearer one"), (b"authorization", b"Bearer two")
    assert RequestHead("POST", "/", b"", [first, second]).authorization is None
    assert RequestHead("POST", "/", b"", [first, first]).authorization == "Bearer one"
