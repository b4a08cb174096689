"""Development tokens, signed with the secret the server of this directory uses."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from holdfast.cli.output import Failure

__all__ = ["make_token"]

_MOST_HOURS: Final = 876_000


def make_token(
    *, sub: str, org: str | None, roles: Sequence[str], app_check: bool, hours: float
) -> str:
    """Return a token; ends the command where this server's tokens are not ours to make."""
    if app_check:
        raise Failure("--app-check comes with the walk service, which is not in this version", 2)
    if not sub:
        raise Failure("--sub should say who signs in", 2)
    if not 0 < hours <= _MOST_HOURS:
        raise Failure(f"--hours should be a number above 0, at most {_MOST_HOURS}", 2)

    from holdfast.server.jwt_auth import mint_token
    from holdfast.services.dev_secrets import development_secret
    from holdfast.services.settings import load_settings

    settings = load_settings()
    if settings.jwt_secret is not None:
        secret = settings.jwt_secret.get_secret_value()
    elif settings.needs_development_secret:
        secret = development_secret(settings.home)
    else:
        raise Failure("this server checks tokens by a JWKS: ask whoever holds the private key", 2)
    return mint_token(
        secret,
        sub=sub,
        org=org,
        roles=roles,
        lifetime=timedelta(hours=hours),
        now=datetime.now(UTC),
    )
