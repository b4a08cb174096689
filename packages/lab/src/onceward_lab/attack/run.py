"""Runs the attacks one after another and yields what held."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import httpx

from onceward_lab.attack import cache, floods, headers, json_bodies, slow, tokens
from onceward_lab.attack.latencies import measure
from onceward_lab.attack.target import Attack, Limits, Target
from onceward_lab.attack.transport import RetryingTransport
from onceward_lab.conformance.harness import (
    CheckFailedError,
    CheckSkippedError,
    Credentials,
    Harness,
    Result,
    Verdict,
)
from onceward_lab.conformance.profile import Profile
from onceward_lab.conformance.request_factory import TemplateRequests
from onceward_lab.conformance.run import (
    NoOperationError,
    NotSignedInError,
    SignIn,
    UnreachableError,
)

__all__ = ["ATTACKS", "GROUPS", "attack"]

ATTACKS: Final[tuple[Attack, ...]] = (
    *tokens.ATTACKS,
    *headers.ATTACKS,
    *json_bodies.ATTACKS,
    *floods.ATTACKS,
    *slow.ATTACKS,
    *cache.ATTACKS,
)
GROUPS: Final = tuple(dict.fromkeys(each.group for each in ATTACKS))

_TIMEOUT_SECONDS: Final = 60.0
_KEEP_ALIVE_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 0.5
_UNAUTHORIZED: Final = (401, 403)
_SUCCESS: Final = range(200, 300)


async def attack(
    url: str,
    profile: Profile,
    sign_in: SignIn,
    *,
    limits: Limits,
    redis_url: str | None = None,
    health_path: str = "/healthz",
    lose_commit: Callable[[str], Awaitable[None]] | None = None,
    attacks: Sequence[Attack] = ATTACKS,
    on_attack: Callable[[str], None] = lambda _name: None,
) -> AsyncIterator[Result]:
    """Attack a server and yield each result. ``on_attack`` gets the name of the next attack.

    ``lose_commit`` gets a key, and makes the database of the server lose what was committed for it.

    Raises ``UnreachableError`` if no server responds, ``NotSignedInError`` if it refuses the
    credentials, ``NoOperationError`` if it refuses the operation's own request.
    """
    connections = httpx.Limits(
        max_connections=2 * limits.connections + 10,
        # Servers close idle connections, and the next request on one of them would be lost.
        keepalive_expiry=_KEEP_ALIVE_SECONDS,
    )
    async with httpx.AsyncClient(
        base_url=url,
        timeout=_TIMEOUT_SECONDS,
        transport=RetryingTransport(limits=connections, trust_env=False),
        follow_redirects=False,
    ) as client:
        credentials = (
            Credentials(profile.sign_in) if profile.sign_in else sign_in.credentials(sign_in.token)
        )
        other = (
            Credentials(profile.other_sign_in)
            if profile.other_sign_in
            else sign_in.credentials(sign_in.other_token)
        )
        harness = Harness(
            client,
            profile,
            TemplateRequests(profile),
            credentials=credentials or Credentials({}),
            other_credentials=other,
        )
        target = Target(
            url,
            harness,
            sign_in,
            limits=limits,
            redis_url=redis_url,
            health_path=health_path,
            lose_commit=lose_commit,
        )
        try:
            target.quiet = await measure(target.health, seconds=_QUIET_SECONDS)
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
            raise UnreachableError(f"no server responds at {url} ({error})") from error
        await _check_operation(target)
        for each in attacks:
            on_attack(f"{each.group}: {each.name}")
            yield await _run(target, each)


async def _check_operation(target: Target) -> None:
    """Send one valid request: without it, every attack would be refused for another reason."""
    request = target.harness.profile.request
    status = await target.write()
    where = f"{request.method} {request.path} returns {status}"
    if status in _UNAUTHORIZED:
        raise NotSignedInError(f"{where}: check --token or --secret")
    if status not in _SUCCESS:
        raise NoOperationError(f"{where}: check --path and --body")


async def _run(target: Target, each: Attack) -> Result:
    actual, verdict, change = "", Verdict.PASS, each.change
    try:
        actual = await each.run(target)
    except CheckFailedError as error:
        actual, verdict, change = str(error), Verdict.FAIL, error.change or change
    except CheckSkippedError as error:
        actual, verdict = str(error), Verdict.SKIP
    except (httpx.HTTPError, OSError) as error:
        actual = f"no response ({type(error).__name__} {error})".rstrip()
        verdict = Verdict.FAIL
    if verdict is not Verdict.FAIL:
        try:
            await target.health()
        except httpx.HTTPError as error:
            actual = f"the server does not respond any more ({type(error).__name__})"
            verdict = Verdict.FAIL
    return Result(
        service=target.harness.profile.name,
        check=each.name,
        section=each.group,
        expected=each.expected,
        actual=actual,
        verdict=verdict,
        why=each.why if verdict is Verdict.FAIL else None,
        change=change if verdict is Verdict.FAIL else None,
    )
