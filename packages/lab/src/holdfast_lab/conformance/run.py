"""Puts the checks of a server together and makes them one after another."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import httpx
import msgspec

from holdfast.server.jwt_auth import mint_token
from holdfast_lab.conformance import bodies, keys, ops, races, replays, staleness, tenants, versions
from holdfast_lab.conformance import error_caching as storing
from holdfast_lab.conformance.harness import (
    Action,
    Actions,
    Check,
    Kit,
    NotCheckedError,
    Person,
    Result,
    UnmetError,
    Verdict,
    unique,
)
from holdfast_lab.conformance.profile import BUILT_IN, Profile
from holdfast_lab.conformance.request_factory import TemplateActions, WalkActions

__all__ = ["NotSignedInError", "Plan", "SignIn", "UnreachableError", "conform", "plan_checks"]

_INTAKE: Final = (
    *keys.CHECKS,
    *replays.CHECKS,
    *races.CHECKS,
    *bodies.CHECKS,
    *tenants.CHECKS,
)
_MORE: Final[dict[str, tuple[Check, ...]]] = {
    "walk": (*ops.PATH_CHECKS, *storing.WALK_CHECKS, *staleness.CHECKS),
    "planning": (*ops.PATH_CHECKS, *versions.PLANNING_CHECKS),
    "routes": (*ops.PATH_CHECKS, *storing.ROUTES_CHECKS),
    "field": (*ops.PATH_CHECKS, *versions.FIELD_CHECKS),
}
_HOUR: Final = timedelta(hours=1)
_UNAUTHORIZED: Final = 401
# A duplicate may wait for the first one, 10 seconds by default, before it is answered.
_TIMEOUT_SECONDS: Final = 30.0


class UnreachableError(Exception):
    """Nobody answers at that address."""


class NotSignedInError(Exception):
    """The server does not know who is asking: nothing it answers would tell of the contract."""


class SignIn(msgspec.Struct, frozen=True):
    """How the kit signs in: by tokens it was given, or by the secret that makes them."""

    token: str | None = None
    other_token: str | None = None
    secret: str | None = None

    def person(self, token: str | None) -> Person | None:
        """Return who has this token; a newcomer by the secret where there is none."""
        if token is not None:
            return Person({"Authorization": f"Bearer {token}"})
        if self.secret is None:
            return None
        name = f"conform-{unique()}"
        made = mint_token(
            self.secret, sub=name, org=f"{name}-org", lifetime=_HOUR, now=datetime.now(UTC)
        )
        return Person({"Authorization": f"Bearer {made}"})


class Plan(msgspec.Struct, frozen=True):
    """Whose checks are to be made, and which."""

    profile: Profile
    checks: tuple[Check, ...]


def plan_checks(profile: Profile | None, service: str | None) -> list[Plan]:
    """Return what is to be checked: one profile, one of our services, or all four."""
    if profile is not None:
        return [Plan(profile, _applying(profile, _INTAKE))]
    plans = []
    for name in [service] if service is not None else list(BUILT_IN):
        ours = BUILT_IN[name]
        plans.append(Plan(ours, _applying(ours, (*_INTAKE, *_MORE[name]))))
    # What the server says of itself is the same for all services.
    last = plans.pop()
    return [*plans, Plan(last.profile, (*last.checks, *ops.CHECKS))]


async def conform(
    url: str,
    plans: Sequence[Plan],
    sign_in: SignIn,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    watch: Callable[[str], None] = lambda _check: None,
) -> AsyncIterator[Result]:
    """Make the checks and give each result as it comes.

    Raises ``UnreachableError`` if nobody answers at all, and ``NotSignedInError`` if a token is not
    taken. ``watch`` is told what is checked next.
    """
    async with httpx.AsyncClient(
        base_url=url, transport=transport, timeout=_TIMEOUT_SECONDS, follow_redirects=False
    ) as client:
        # All of them at first: a token that cannot be sent is told before anything is done.
        kits = [_kit(client, plan.profile, sign_in) for plan in plans]
        try:
            await client.get("/healthz")
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
            raise UnreachableError(f"no server answers at {url} ({error})") from error
        for kit in kits:
            await _sign_in(kit)
        for plan, kit in zip(plans, kits, strict=True):
            for check in plan.checks:
                watch(f"{plan.profile.name}: {check.name}")
                yield await _made(kit, check)


def _kit(client: httpx.AsyncClient, profile: Profile, sign_in: SignIn) -> Kit:
    me = Person(profile.sign_in) if profile.sign_in else sign_in.person(sign_in.token)
    other = (
        Person(profile.other_sign_in)
        if profile.other_sign_in
        else sign_in.person(sign_in.other_token)
    )
    is_walk = profile is BUILT_IN["walk"]
    actions: Actions = WalkActions() if is_walk else TemplateActions(profile.request)
    return Kit(client, profile, actions, me=me or Person({}), other=other)


async def _sign_in(kit: Kit) -> None:
    """See that the guarded operation knows everyone; without a key and a body it does nothing."""
    wanted = kit.profile.request
    action = Action(method=wanted.method, path=wanted.path, body=None, other_body=None)
    people = [("--token or --secret", kit.me)]
    with suppress(NotCheckedError):
        people.append(("--other-token or --secret", kit.other))
    for option, person in people:
        with suppress(httpx.HTTPError):  # the checks will tell
            answer = await kit.send(action, person=person)
            if answer.status == _UNAUTHORIZED:
                raise NotSignedInError(
                    f"the server does not take the sign-in ({wanted.method} {wanted.path}: "
                    f"{answer.told()}): look at {option}, or at the profile's sign_in"
                )


async def _made(kit: Kit, check: Check) -> Result:
    try:
        came, verdict = await check.run(kit), Verdict.PASS
    except UnmetError as error:
        came, verdict = str(error), Verdict.FAIL
    except NotCheckedError as error:
        came, verdict = str(error), Verdict.SKIP
    except httpx.HTTPError as error:
        came, verdict = f"no answer ({type(error).__name__} {error})".rstrip(), Verdict.FAIL
    except (KeyError, TypeError, ValueError) as error:
        came, verdict = f"an answer that cannot be read ({error!r})", Verdict.FAIL
    return Result(
        service=kit.profile.name,
        check=check.name,
        section=check.section,
        expected=check.expected,
        came=came,
        verdict=verdict,
    )


def _applying(profile: Profile, checks: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(check for check in checks if check.applies(profile))
