"""Selects the checks for a server and runs them one after another."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import httpx
import msgspec

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.conformance import (
    batch,
    bodies,
    error_caching,
    keys,
    ops,
    races,
    replays,
    sequences,
    staleness,
    tenants,
    versions,
)
from onceward_lab.conformance.harness import (
    Check,
    CheckFailedError,
    CheckSkippedError,
    Credentials,
    Harness,
    Request,
    RequestFactory,
    Result,
    Verdict,
    unique,
)
from onceward_lab.conformance.profile import BUILT_IN, Profile, RequestTemplate
from onceward_lab.conformance.request_factory import TemplateRequests, WalkRequests

__all__ = [
    "NoOperationError",
    "NotSignedInError",
    "Plan",
    "RequestRefusedError",
    "SignIn",
    "UnreachableError",
    "conform",
    "plan_checks",
]

_COMMON: Final = (
    *keys.CHECKS,
    *replays.CHECKS,
    *races.CHECKS,
    *bodies.CHECKS,
    *tenants.CHECKS,
)
_BY_SERVICE: Final[dict[str, tuple[Check, ...]]] = {
    "walk": (
        *ops.PATH_CHECKS,
        *error_caching.WALK_CHECKS,
        *staleness.CHECKS,
        # Its steps depend on each other, so two of them cannot be in one batch.
        *batch.WALK_CHECKS,
        *sequences.CHECKS,
    ),
    "planning": (
        *ops.PATH_CHECKS,
        *versions.PLANNING_CHECKS,
        *batch.CHECKS,
        *batch.PLANNING_CHECKS,
    ),
    "routes": (*ops.PATH_CHECKS, *error_caching.ROUTES_CHECKS, *batch.CHECKS),
    "field": (*ops.PATH_CHECKS, *versions.FIELD_CHECKS, *batch.CHECKS, *batch.FIELD_CHECKS),
}
_HOUR: Final = timedelta(hours=1)
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
# A duplicate may wait for the first request, by default up to 10 seconds.
_TIMEOUT_SECONDS: Final = 30.0
# Characters of a refusal.
_SHOWN_BODY: Final = 400
_NO_RESPONSE: Final = (
    "Find out why the connection ended or took longer than 30 seconds: read the log of the server. "
    "Every request needs a complete response, errors included."
)


class UnreachableError(Exception):
    """No server responds at the URL."""


class NotSignedInError(Exception):
    """The server refuses the credentials, so no check would be meaningful."""


class NoOperationError(Exception):
    """The server does not have the operation, so every check would fail."""


class RequestRefusedError(Exception):
    """The server refuses the request of the profile, so every check would fail."""


class SignIn(msgspec.Struct, frozen=True):
    """How to authenticate: with the given tokens, or with tokens signed by ``secret``."""

    token: str | None = None
    other_token: str | None = None
    secret: str | None = None
    # Claims of the signed tokens.
    issuer: str | None = None
    audience: tuple[str, ...] = ()

    def credentials(self, token: str | None) -> Credentials | None:
        """Return credentials for this token, or for a new user if there is only a secret."""
        if token is not None:
            return Credentials({"Authorization": f"Bearer {token}"})
        if self.secret is None:
            return None
        name = f"conform-{unique()}"
        minted = mint_token(
            self.secret,
            sub=name,
            org=f"{name}-org",
            iss=self.issuer,
            aud=self.audience,
            lifetime=_HOUR,
            now=datetime.now(UTC),
        )
        return Credentials({"Authorization": f"Bearer {minted}"})


class Plan(msgspec.Struct, frozen=True):
    """A profile and the checks to run on it."""

    profile: Profile
    checks: tuple[Check, ...]


def plan_checks(profile: Profile | None, service: str | None) -> list[Plan]:
    """Return the plans for one profile, for one built-in service, or for all of them."""
    if profile is not None:
        return [Plan(profile, _applying(profile, (*_COMMON, *batch.CHECKS, *sequences.CHECKS)))]
    plans = []
    for name in [service] if service is not None else list(BUILT_IN):
        ours = BUILT_IN[name]
        plans.append(Plan(ours, _applying(ours, (*_COMMON, *_BY_SERVICE[name]))))
    # Health, metrics and OpenAPI are the same for all services.
    last = plans.pop()
    return [*plans, Plan(last.profile, (*last.checks, *ops.CHECKS))]


async def conform(
    url: str,
    plans: Sequence[Plan],
    sign_in: SignIn,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    on_check: Callable[[str], None] = lambda _name: None,
) -> AsyncIterator[Result]:
    """Run the checks and yield each result. ``on_check`` gets the name of the next check.

    Raises ``UnreachableError`` if no server responds, ``NotSignedInError`` if it refuses the
    credentials, ``NoOperationError`` if it responds 404 to every operation, and
    ``RequestRefusedError`` if it refuses the request of a profile that is not built in.
    """
    async with httpx.AsyncClient(
        base_url=url, transport=transport, timeout=_TIMEOUT_SECONDS, follow_redirects=False
    ) as client:
        # Before the first request, so that an invalid token is reported first.
        harnesses = [_harness(client, plan.profile, sign_in) for plan in plans]
        try:
            await client.get("/healthz")
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
            raise UnreachableError(f"no server responds at {url} ({error})") from error
        statuses = [await _sign_in(harness) for harness in harnesses]
        if set(statuses) == {_NOT_FOUND}:
            raise NoOperationError(_missing_operation(plans))
        for harness in harnesses:
            if harness.profile in BUILT_IN.values():
                await _find_ordering(harness)
            else:
                await _send_valid_request(harness)
        for plan, harness in zip(plans, harnesses, strict=True):
            has_batch = True
            for check in plan.checks:
                if check.section == batch.OFFER.section and not has_batch:
                    continue  # one line says that there is none
                if check.section == sequences.SECTION and not harness.is_strict:
                    continue  # most operations have no numbers
                if check is sequences.CHECKS[0]:
                    _renew_credentials(harness, sign_in)
                on_check(f"{plan.profile.name}: {check.name}")
                result = await _run_check(harness, check)
                has_batch = has_batch and (check is not batch.OFFER or _is_offered(result))
                yield result


def _harness(client: httpx.AsyncClient, profile: Profile, sign_in: SignIn) -> Harness:
    credentials = (
        Credentials(profile.sign_in) if profile.sign_in else sign_in.credentials(sign_in.token)
    )
    other = (
        Credentials(profile.other_sign_in)
        if profile.other_sign_in
        else sign_in.credentials(sign_in.other_token)
    )
    is_walk = profile is BUILT_IN["walk"]
    factory: RequestFactory = WalkRequests() if is_walk else TemplateRequests(profile)
    return Harness(
        client,
        profile,
        factory,
        credentials=credentials or Credentials({}),
        other_credentials=other,
    )


def _renew_credentials(harness: Harness, sign_in: SignIn) -> None:
    """Go on as a new caller of a built-in service: a walker has a limited number of steps."""
    if harness.profile in BUILT_IN.values():
        harness.credentials = sign_in.credentials(sign_in.token) or harness.credentials


def _missing_operation(plans: Sequence[Plan]) -> str:
    profile = plans[0].profile
    if profile in BUILT_IN.values():
        names = ", ".join(plan.profile.name for plan in plans)
        return f"this server does not have {names}: for your own app give --path and --body"
    request = profile.request
    return (
        f"{request.method} {request.path} returns 404: check --path, or request.path in the profile"
    )


async def _sign_in(harness: Harness) -> int | None:
    """Check the credentials with a request without key and body, which has no effect.

    Returns the status for the first caller.
    """
    profile = harness.profile
    callers: list[tuple[str, Credentials, RequestTemplate]] = [
        ("--token or --secret", harness.credentials, profile.request)
    ]
    with suppress(CheckSkippedError):
        other = profile.other_request or profile.request
        callers.append(("--other-token or --secret", harness.other_credentials, other))
    first: int | None = None
    for option, credentials, template in callers:
        request = Request(method=template.method, path=template.path, body=None, other_body=None)
        with suppress(httpx.HTTPError):  # the checks will report it
            response = await harness.send(request, credentials=credentials)
            first = first or response.status
            if response.status == _UNAUTHORIZED:
                raise NotSignedInError(
                    f"the server refuses the sign-in ({template.method} {template.path}: "
                    f"{response.summary()}): check {option}, or sign_in in the profile"
                )
    return first


async def _find_ordering(harness: Harness) -> None:
    """Find out whether the operation demands numbers, by a request without a body."""
    template = harness.profile.request
    request = Request(method=template.method, path=template.path, body=None, other_body=None)
    with suppress(httpx.HTTPError):  # the checks will report it
        response = await harness.send(request, harness.new_key())
        harness.is_strict = harness.is_strict or harness.requires_number(response)


async def _send_valid_request(harness: Harness) -> None:
    """Send the request of the profile once, with a new key. Raises ``RequestRefusedError``."""
    request = await harness.new_request()
    try:
        response = await harness.send(request, harness.new_key())
        if harness.requires_number(response) and not harness.is_strict:
            harness.is_strict = True
            response = await harness.send(request, harness.new_key())
    except httpx.HTTPError:  # the checks will report it
        return
    if response.is_success:
        return
    text = " ".join(response.body.decode(errors="replace").split())
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text[:_SHOWN_BODY])
    more = "…" if len(text) > _SHOWN_BODY else ""
    raise RequestRefusedError(
        f"{request.method} {request.path} should accept the request of the profile, but responds "
        f"{response.status} {shown or '(no body)'}{more}: correct --body or --path, or request in "
        'the profile; "{unique}" becomes a text, "{unique_number}" an integer'
    )


async def _run_check(harness: Harness, check: Check) -> Result:
    change = check.change
    try:
        actual, verdict = await check.run(harness), Verdict.PASS
    except CheckFailedError as error:
        actual, verdict = str(error), Verdict.FAIL
        change = error.change or change
    except CheckSkippedError as error:
        actual, verdict = str(error), Verdict.SKIP
    except httpx.HTTPError as error:
        actual, verdict = f"no response ({type(error).__name__} {error})".rstrip(), Verdict.FAIL
        change = _NO_RESPONSE
    except (KeyError, TypeError, ValueError) as error:
        actual, verdict = f"an unreadable response ({error!r})", Verdict.FAIL
    return Result(
        service=harness.profile.name,
        check=check.name,
        section=check.section,
        expected=check.expected,
        actual=actual,
        verdict=verdict,
        why=check.why if verdict is Verdict.FAIL else None,
        change=change if verdict is Verdict.FAIL else None,
    )


def _is_offered(result: Result) -> bool:
    return result.verdict is not Verdict.SKIP


def _applying(profile: Profile, checks: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(check for check in checks if check.applies(profile))
