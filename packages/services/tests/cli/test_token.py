"""``onceward token``: claims, signatures, App Check tokens, errors."""

import base64
import json
from pathlib import Path

import jwt
import pytest

from .conftest import Done, Here, one_line


def claims(done: Done, secret: str) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    return dict(jwt.decode(done.stdout.decode().strip(), secret, algorithms=["HS256"]))


def test_token_has_the_claims_and_the_configured_signature(here: Here, tmp_path: Path) -> None:
    secret = "x" * 32
    done = here(
        *("token", "--sub", "ada", "--org", "acme", "--role", "admin", "--role", "walker"),
        ONCEWARD_JWT_SECRET=secret,
    )
    found = claims(done, secret)
    assert found["sub"] == "ada"
    assert found["org"] == "acme"
    assert found["roles"] == ["admin", "walker"]
    assert not (tmp_path / ".onceward").exists()


def test_token_has_the_configured_issuer_and_audiences_and_the_first_secret(here: Here) -> None:
    secrets = ("n" * 32, "o" * 32)
    done = here(
        *("token", "--sub", "ada"),
        ONCEWARD_JWT_SECRET=",".join(secrets),
        ONCEWARD_JWT_ISSUER="https://a,https://b",
        ONCEWARD_JWT_AUDIENCE="shop",
    )
    token = done.stdout.decode().strip()
    found = jwt.decode(token, secrets[0], algorithms=["HS256"], audience="shop")
    assert (found["iss"], found["aud"]) == ("https://a", "shop")
    assert len(found["jti"]) == 36
    for name in ("ONCEWARD_JWT_ISSUER", "ONCEWARD_JWT_AUDIENCE"):
        assert name not in done.stderr.decode()


def test_token_without_configured_secret_uses_the_one_in_onceward_home(
    here: Here, tmp_path: Path
) -> None:
    done = here("token", "--sub", "ada", ONCEWARD_HOME="secrets")
    secret = (tmp_path / "secrets" / "jwt-secret").read_text().strip()
    assert claims(done, secret)["sub"] == "ada"


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--hours", "0"], {}),
        (["--app-check", "--hours", "-1"], {}),
        (
            ["--app-check"],
            {
                "ONCEWARD_APP_CHECK_JWKS_URL": "https://id.example/keys",
                "ONCEWARD_APP_CHECK_AUDIENCE": "projects/1",
                "ONCEWARD_APP_CHECK_ISSUER": "https://id.example",
            },
        ),
        (["--app-check"], {"ONCEWARD_HOME": "/dev/null"}),
        (
            [],
            {
                "ONCEWARD_JWKS_URL": "https://id.example/keys",
                "ONCEWARD_JWT_ISSUER": "https://id.example",
                "ONCEWARD_JWT_AUDIENCE": "onceward",
            },
        ),
        ([], {"ONCEWARD_ENVIRONMENT": "production"}),
        (["--app-check"], {"ONCEWARD_ENVIRONMENT": "production"}),
        ([], {"ONCEWARD_JWT_SECRET": "short"}),
        ([], {"ONCEWARD_HOME": "/dev/null"}),
    ],
)
def test_invalid_token_options_are_reported_in_one_line(
    here: Here, arguments: list[str], variables: dict[str, str]
) -> None:
    done = here("token", "--sub", "ada", *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, b"")
    one_line(done.stderr)


def test_token_is_printed_as_one_line(here: Here) -> None:
    token = here("token", "--sub", "ada").stdout.decode()
    assert token.count("\n") == 1
    middle = token.split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(middle + "=="))["sub"] == "ada"


def test_token_without_sub_is_an_error(here: Here) -> None:
    done = here("token")
    assert (done.returncode, done.stdout) == (2, b"")
    assert "--sub" in one_line(done.stderr)


def app_check_claims(done: Done, home: Path, audience: str, issuer: str) -> dict[str, object]:
    """Check the signature as the server does, with the public key in ONCEWARD_HOME."""
    assert done.returncode == 0, done.stderr
    jwk = json.loads((home / "app-check-key.json").read_text())["keys"][0]
    public = {name: jwk[name] for name in ("kty", "n", "e")}
    key = jwt.PyJWK(public, algorithm="RS256")
    token = done.stdout.decode().strip()
    assert jwt.get_unverified_header(token)["kid"] == jwk["kid"]
    return dict(jwt.decode(token, key, algorithms=["RS256"], audience=audience, issuer=issuer))


def test_app_check_token_is_signed_with_the_key_in_onceward_home(
    here: Here, tmp_path: Path
) -> None:
    home = tmp_path / ".onceward"
    party = ("projects/onceward-development", "onceward-development")
    first = app_check_claims(here("token", "--app-check"), home, *party)
    second = app_check_claims(here("token", "--sub", "my-app", "--app-check"), home, *party)
    assert second["sub"] == "my-app"
    assert first["jti"] != second["jti"]
    assert int(str(first["exp"])) - int(str(first["iat"])) in (3600, 3601)
    assert not (home / "jwt-secret").exists()


def test_app_check_token_has_the_configured_audience_and_issuer(here: Here, tmp_path: Path) -> None:
    done = here(
        *("token", "--app-check", "--hours", "2"),
        ONCEWARD_HOME="keys",
        ONCEWARD_APP_CHECK_AUDIENCE="projects/7",
        ONCEWARD_APP_CHECK_ISSUER="me",
    )
    found = app_check_claims(done, tmp_path / "keys", "projects/7", "me")
    assert found["aud"] == ["projects/7"]


def test_broken_key_file_is_reported_and_not_replaced(here: Here, tmp_path: Path) -> None:
    (tmp_path / ".onceward").mkdir()
    path = tmp_path / ".onceward" / "app-check-key.json"
    path.write_text("{}")
    done = here("token", "--app-check")
    assert done.returncode == 2
    assert "delete it" in one_line(done.stderr)
    assert path.read_text() == "{}"
