"""``holdfast token``: what it makes is what the server of the same directory takes."""

import base64
import json
from pathlib import Path

import jwt
import pytest

from .conftest import Done, Here, one_line


def claims(done: Done, secret: str) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    return dict(jwt.decode(done.stdout.decode().strip(), secret, algorithms=["HS256"]))


def test_it_carries_the_claims_and_the_configured_signature(here: Here, tmp_path: Path) -> None:
    secret = "x" * 32
    done = here(
        *("token", "--sub", "ada", "--org", "acme", "--role", "admin", "--role", "walker"),
        HOLDFAST_JWT_SECRET=secret,
    )
    found = claims(done, secret)
    assert found["sub"] == "ada"
    assert found["org"] == "acme"
    assert found["roles"] == ["admin", "walker"]
    assert not (tmp_path / ".holdfast").exists()


def test_without_a_secret_it_is_signed_with_the_one_kept_at_home(
    here: Here, tmp_path: Path
) -> None:
    done = here("token", "--sub", "ada", HOLDFAST_HOME="secrets")
    secret = (tmp_path / "secrets" / "jwt-secret").read_text().strip()
    assert claims(done, secret)["sub"] == "ada"


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--app-check"], {}),
        (["--hours", "0"], {}),
        ([], {"HOLDFAST_JWKS_URL": "https://id.example/keys"}),
        ([], {"HOLDFAST_JWT_SECRET": "short"}),
        ([], {"HOLDFAST_HOME": "/dev/null"}),
    ],
)
def test_what_it_cannot_make_is_told_in_one_line(
    here: Here, arguments: list[str], variables: dict[str, str]
) -> None:
    done = here("token", "--sub", "ada", *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, b"")
    one_line(done.stderr)


def test_it_is_one_line_a_shell_can_use(here: Here) -> None:
    token = here("token", "--sub", "ada").stdout.decode()
    assert token.count("\n") == 1
    middle = token.split(".")[1]
    assert json.loads(base64.urlsafe_b64decode(middle + "=="))["sub"] == "ada"
