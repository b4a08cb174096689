"""``onceward token``: development tokens, signed with the secret or key of the local server."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import uuid4

from onceward_protocol.cli.output import CommandError

__all__ = ["make_token"]

_MAX_HOURS: Final = 876_000
_HOURS: Final = 24.0
# The lifetime of real App Check tokens. A report accepts one only while it is fresh.
_APP_CHECK_HOURS: Final = 1.0


def make_token(
    *, sub: str | None, org: str | None, roles: Sequence[str], app_check: bool, hours: float | None
) -> str:
    """Return a token; raises ``CommandError`` if this server verifies tokens of another issuer."""
    if hours is None:
        hours = _APP_CHECK_HOURS if app_check else _HOURS
    if not 0 < hours <= _MAX_HOURS:
        raise CommandError(f"--hours should be a number above 0, at most {_MAX_HOURS}", 2)
    if app_check:  # names an app, so it has no organization and no roles
        return _app_check(sub, timedelta(hours=hours))
    if not sub:
        raise CommandError(
            "--sub is required: the subject of the token (try: onceward token --help)", 2
        )

    from onceward.sign_in.jwt_auth import mint_token
    from onceward_services.dev_secrets import development_secret
    from onceward_services.settings import load_settings

    settings = load_settings()
    settings.check_production()
    if settings.jwt_secrets:
        secret = settings.jwt_secrets[0]
    elif settings.needs_development_secret:
        secret = development_secret(settings.home)
    else:
        raise CommandError(
            "this server verifies tokens with a JWKS: get a token from their issuer", 2
        )
    audiences = settings.jwt_audiences
    return mint_token(
        secret,
        sub=sub,
        org=org,
        roles=roles,
        iss=settings.jwt_issuers[0] if settings.jwt_issuers else None,
        aud=audiences[0] if len(audiences) == 1 else audiences,
        jti=str(uuid4()),
        lifetime=timedelta(hours=hours),
        now=datetime.now(UTC),
    )


def _app_check(sub: str | None, lifetime: timedelta) -> str:
    from onceward.sign_in.jwt_keys import UNREADABLE
    from onceward_services.dev_secrets import development_app_check_key
    from onceward_services.settings import load_settings
    from onceward_services.walk.steps.attestation import DEVELOPMENT_APP, mint_app_check

    settings = load_settings()
    if settings.is_production and settings.app_check_is_development:
        raise CommandError(
            f"ONCEWARD_ENVIRONMENT={settings.environment} never runs on a development key: get an "
            "App Check token from its issuer",
            2,
        )
    if not settings.app_check_is_development:
        raise CommandError(
            "this server verifies App Check tokens with a JWKS: get one from their issuer", 2
        )
    audience, issuer = settings.app_check_party
    path = development_app_check_key(settings.home)
    try:
        return mint_app_check(
            path,
            sub=sub or DEVELOPMENT_APP,
            audience=audience,
            issuer=issuer,
            lifetime=lifetime,
            now=datetime.now(UTC),
        )
    except (OSError, LookupError, *UNREADABLE) as error:
        raise CommandError(
            f"{path} is not a key pair: delete it, and a new one will be created", 2
        ) from error
