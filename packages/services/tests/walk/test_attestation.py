"""App Check: only reports with a valid token are accepted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from onceward_services.dev_secrets import development_app_check_key
from onceward_services.walk.steps.attestation import mint_app_check
from onceward_services.walk.steps.settings import DEVELOPMENT_AUDIENCE, DEVELOPMENT_ISSUER
from packages.services.tests.conftest import Serve

from .fixtures import OpenGame, ok, opener, refused
from .step_fixtures import KID, PARTY, Stepping, jwks, signing_key, stepping


@pytest.fixture
async def sqlite_steps(serve: Serve, sqlite_url: str) -> AsyncIterator[Stepping]:
    async with stepping(opener(serve, sqlite_url)) as opened:
        yield opened


async def is_rejected(steps: Stepping, token: str | None, **fields: Any) -> str:
    """Check that a token is rejected and only logged; returns the logged token id."""
    response = await steps.send(steps.body(**fields), token=token)
    refused(response, 401, "ATTESTATION_INVALID")
    (row,) = await steps.attestations()
    assert (row["verdict"], row["code"], row["anti_cheat"]) == (
        "REJECTED",
        "ATTESTATION_INVALID",
        0,
    )
    assert await steps.game.count("step_logs") == 0
    assert await steps.game.count("step_reports") == 0
    assert await steps.game.count("onceward_jobs") == 0
    return str(row["token_id"])


# -- forged and worn out ---------------------------------------------------------------------------


def by_another_key(steps: Stepping) -> str:
    key = signing_key("somebody else's")
    return jwt.encode(steps.claims(), key, algorithm="RS256", headers={"kid": KID})


def by_an_unknown_key(steps: Stepping) -> str:
    key = signing_key("somebody else's")
    return jwt.encode(steps.claims(), key, algorithm="RS256", headers={"kid": "unknown"})


def unsigned(steps: Stepping) -> str:
    return jwt.encode(steps.claims(), "", algorithm="none", headers={"kid": KID})


def by_the_public_key_as_a_secret(steps: Stepping) -> str:
    pem = (
        signing_key(KID).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    signer = jwt.api_jws.PyJWS(algorithms=["HS256"])
    # PyJWT refuses to do this, so its check is bypassed.
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    monkey: Any = algorithm
    monkey.prepare_key = lambda key: key
    signer.unregister_algorithm("HS256")
    signer.register_algorithm("HS256", algorithm)
    payload = json.dumps(steps.claims()).encode()
    return signer.encode(payload, pem, algorithm="HS256", headers={"kid": KID})


def changed_after_signing(steps: Stepping) -> str:
    head, _, signature = steps.token().split(".")
    return ".".join((head, steps.token(sub="another app").split(".")[1], signature))


@pytest.mark.parametrize(
    "forge",
    [
        by_another_key,
        by_an_unknown_key,
        unsigned,
        by_the_public_key_as_a_secret,
        changed_after_signing,
        lambda steps: steps.token(aud=["projects/other"]),
        lambda steps: steps.token(aud=None),
        lambda steps: steps.token(iss="https://evil.example/42"),
        lambda steps: steps.token(iss=None),
        lambda steps: steps.token(exp=int(steps.clock.now().timestamp())),
        lambda steps: steps.token(exp=None),
        lambda steps: steps.token(iat=int(steps.clock.now().timestamp()) - 301),
        lambda steps: steps.token(iat=-(10**400)),
        lambda steps: steps.token(iat=None),
        lambda steps: steps.token(iat=int(steps.clock.now().timestamp()) + 60),
        lambda _: "not.a.token",
        lambda _: "ü" * 20,
        lambda _: "x" * 20_000,
    ],
    ids=[
        *("another key", "unknown key", "alg none", "HS256 with the public key", "changed"),
        *("other audience", "no audience", "other issuer", "no issuer", "expired", "no expiry"),
        *("too old", "as old as can be", "no issue time", "from the future", "nonsense"),
        *("no ASCII", "too long"),
    ],
)
async def test_invalid_token_is_rejected_and_logged(sqlite_steps: Stepping, forge: Any) -> None:
    token = forge(sqlite_steps)
    if token.isascii():
        token_id = await is_rejected(sqlite_steps, token)
    else:
        token_id = await is_rejected(sqlite_steps, None, attestationToken=token)
    # The id of an invalid token is a digest.
    assert token_id.startswith("sha256:")


async def test_on_either_database_a_rejection_is_kept_and_the_key_is_free(steps: Stepping) -> None:
    body = steps.body()
    refused(await steps.send(body, token=by_another_key(steps)), 401, "ATTESTATION_INVALID")
    ok(await steps.send(body))
    assert await steps.verdicts() == ["ACCEPTED", "REJECTED"]


async def test_token_is_accepted_for_five_minutes(steps: Stepping) -> None:
    token = steps.token()
    steps.clock.move(timedelta(minutes=5))
    ok(await steps.send(steps.body(), token=token))
    steps.clock.move(timedelta(seconds=1))
    refused(await steps.send(steps.body(), token=token), 401, "ATTESTATION_INVALID")


async def test_attestation_does_not_count_as_cheating(sqlite_steps: Stepping) -> None:
    for _ in range(6):
        await sqlite_steps.send(sqlite_steps.body(), token="nonsense")
    assert await sqlite_steps.reviews() == []


# -- header and body -------------------------------------------------------------------------------


async def test_no_token_at_all_is_rejected(sqlite_steps: Stepping) -> None:
    assert await is_rejected(sqlite_steps, None) == "none"


async def test_the_body_may_carry_it_alone_or_the_same_once_more(sqlite_steps: Stepping) -> None:
    token = sqlite_steps.token()
    ok(await sqlite_steps.send(sqlite_steps.body(attestationToken=token), token=None))
    ok(await sqlite_steps.send(sqlite_steps.body(attestationToken=token), token=token))
    assert len(await sqlite_steps.attestations()) == 2


async def test_two_different_valid_tokens_are_rejected(sqlite_steps: Stepping) -> None:
    other = sqlite_steps.token()
    assert (
        await is_rejected(sqlite_steps, sqlite_steps.token(), attestationToken=other) == "several"
    )


# -- keys behind a URL -----------------------------------------------------------------------------


class KeyServer(HTTPServer):
    """Serves a JWKS, or fails."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys: str | None = jwks()
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/keys"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, KeyServer)
        self.server.asked += 1
        keys = self.server.keys
        self.send_response(200 if keys else 503)
        self.end_headers()
        self.wfile.write((keys or "").encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def key_server() -> Iterator[KeyServer]:
    with KeyServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def by_url(url: str) -> dict[str, Any]:
    return PARTY | {"app_check_jwks_file": None, "app_check_jwks_url": url}


async def test_keys_of_a_url_are_fetched_once_for_many(
    open_game: OpenGame, key_server: KeyServer
) -> None:
    async with stepping(open_game, **by_url(key_server.url)) as steps:
        responses = await asyncio.gather(*(steps.report(count=n) for n in range(8)))
        assert {response.status_code for response in responses} == {200}
        assert key_server.asked == 1


async def test_unknown_key_id_refetches_the_jwks(
    open_game: OpenGame, key_server: KeyServer
) -> None:
    key_server.keys = None
    async with stepping(open_game, **by_url(key_server.url)) as steps:
        assert (await steps.report()).status_code == 503
    key_server.keys = jwks("another", KID)
    async with stepping(open_game, **by_url(key_server.url)) as steps:
        assert (await steps.report()).status_code == 200


async def test_unavailable_key_server_is_an_outage_and_not_a_rejection(open_game: OpenGame) -> None:
    """Port 9 is closed. The report is neither accepted nor rejected and can be retried."""
    async with stepping(open_game, **by_url("http://127.0.0.1:9/keys")) as steps:
        response = await steps.report()
        refused(response, 503, "STORE_UNAVAILABLE")
        assert int(response.headers["retry-after"]) >= 1
        assert await steps.game.count("step_logs") == 0
        (row,) = await steps.attestations()
        assert (row["verdict"], row["anti_cheat"]) == ("UNVERIFIED", 0)
        # A malformed token is rejected without the keys.
        unsigned_answer = await steps.send(steps.body(), token=unsigned(steps))
        refused(unsigned_answer, 401, "ATTESTATION_INVALID")


async def test_an_outage_under_load_does_not_use_up_the_connections(open_game: OpenGame) -> None:
    settings = by_url("http://127.0.0.1:9/keys") | {"pool_size": 2}
    async with stepping(open_game, **settings) as steps:
        responses = await asyncio.gather(*(steps.report(count=n) for n in range(20)))
        assert {response.status_code for response in responses} == {503}
        assert await steps.verdicts() == ["UNVERIFIED"] * 20


# -- development -----------------------------------------------------------------------------------


async def test_without_settings_the_key_of_the_home_directory_counts(
    serve: Serve, sqlite_url: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    bare = {"app_check_jwks_file": None, "app_check_audience": None, "app_check_issuer": None}
    async with stepping(opener(serve, sqlite_url), home=home, **bare) as steps:
        assert not home.exists()
        refused(await steps.report(), 401, "ATTESTATION_INVALID")
        token = mint_app_check(
            development_app_check_key(home),
            audience=DEVELOPMENT_AUDIENCE,
            issuer=DEVELOPMENT_ISSUER,
            now=steps.clock.now(),
        )
        ok(await steps.send(steps.body(), token=token))


async def test_unusable_home_is_an_outage_and_not_a_rejection(
    serve: Serve, sqlite_url: str, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("no directory")
    bare = {"app_check_jwks_file": None, "app_check_audience": None, "app_check_issuer": None}
    async with stepping(opener(serve, sqlite_url), home=tmp_path / "home", **bare) as steps:
        refused(await steps.report(), 503, "STORE_UNAVAILABLE")
        assert await steps.verdicts() == ["UNVERIFIED"]
