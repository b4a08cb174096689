"""App Check tokens of actions: demanded if the operator says so, as for reports of steps."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Header

from onceward import Onceward, ServiceError
from onceward_services.settings import Settings
from onceward_services.walk.steps.attestation import AppCheck, AttestationError

__all__ = ["AppCheckTokens", "Attest", "attest_actions"]

AppCheckTokens = Annotated[list[str] | None, Header(alias="X-Firebase-AppCheck")]
Attest = Callable[[Sequence[str] | None], Awaitable[None]]

_UNAUTHORIZED = 401


def attest_actions(onceward: Onceward, settings: Settings) -> Attest:
    """Return the check of an action's tokens; it accepts all if the setting is off."""
    if settings.walk_app_check == "reports":
        return _accept

    app_check = AppCheck(
        settings,
        settings.home,
        onceward.clock,
        allow_development_key=not settings.is_production,
    )

    async def attest(tokens: Sequence[str] | None) -> None:
        """Raise ``ATTESTATION_INVALID`` unless there is one valid token."""
        try:
            await app_check.verify(tokens or (), None)
        except AttestationError as error:
            message = f"App Check: {error.reason}"
            raise ServiceError(_UNAUTHORIZED, "ATTESTATION_INVALID", message) from None

    return attest


async def _accept(_tokens: Sequence[str] | None) -> None:
    """Accept actions without a token."""
