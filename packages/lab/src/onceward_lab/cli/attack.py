"""``onceward attack``: attacks one's own server; prints a table, lines or JSON."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec

from onceward.cli.database import opened
from onceward_lab.attack.lost_commits import lose_commit
from onceward_lab.attack.run import ATTACKS, GROUPS, attack
from onceward_lab.attack.target import Attack, Limits
from onceward_lab.cli.results import print_line, print_table, showing_progress
from onceward_lab.cli.target_options import (
    BAD_INPUT,
    host_of,
    is_loopback,
    json_option,
    local_sign_in,
    profile_from,
    request_of,
)
from onceward_lab.conformance import (
    BUILT_IN,
    NoOperationError,
    NotSignedInError,
    Profile,
    Result,
    SignIn,
    UnreachableError,
    Verdict,
)
from onceward_protocol.cli.output import CommandError, print_json

__all__ = ["AttackOptions", "run_attack"]

_WORDS: Final = {Verdict.PASS: "held", Verdict.FAIL: "BROKEN", Verdict.SKIP: "skipped"}


class AttackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command. Bodies are JSON, or @file."""

    method: str | None = None
    path: str | None = None
    body: str | None = None
    other_body: str | None = None
    group: str | None = None
    redis_url: str | None = None
    database_url: str | None = None
    health_path: str = "/healthz"
    limits: Limits = Limits()
    is_own_server: bool = False


def run_attack(url: str, *, sign_in: SignIn, options: AttackOptions, as_json: bool) -> int:
    """Attack a server; returns the exit code, 1 if an attack succeeded."""
    host = host_of(url)
    if not is_loopback(host) and not options.is_own_server:
        raise CommandError(
            f"{host} is another machine, and the attacks may stop its server: add "
            "--yes-i-own-this-server if it is yours",
            BAD_INPUT,
        )
    if options.group is not None and options.group not in GROUPS:
        raise CommandError(f"--group should be one of {', '.join(GROUPS)}", BAD_INPUT)
    profile = _profile(options)
    if profile is None:
        profile = BUILT_IN["field"]
        if sign_in == SignIn():
            sign_in = local_sign_in(host)
    attacks = [each for each in ATTACKS if options.group in (None, each.group)]
    try:
        results = asyncio.run(_collect(url, profile, sign_in, options, attacks, as_json=as_json))
    except (UnreachableError, NotSignedInError, NoOperationError) as error:
        raise CommandError(str(error), BAD_INPUT) from error
    counts = Counter(result.verdict for result in results)
    if as_json:
        print_json(
            {"url": url}
            | {_WORDS[verdict].lower(): counts[verdict] for verdict in Verdict}
            | {"results": [_as_json(result) for result in results]}
        )
    else:
        if sys.stdout.isatty():
            print_table(
                results,
                words=_WORDS,
                columns={
                    "group": lambda result: result.section,
                    "attack": lambda result: result.check,
                },
                title=lambda result: f"{result.section}: {result.check}",
            )
        summary = ", ".join(f"{counts[verdict]} {_WORDS[verdict].lower()}" for verdict in Verdict)
        conclusion = "THE SERVER DID NOT HOLD" if counts[Verdict.FAIL] else "the server held"
        print(f"{summary}: {conclusion}")
    return 1 if counts[Verdict.FAIL] else 0


def _profile(options: AttackOptions) -> Profile | None:
    """Return the profile of the options; None for the services of this project."""
    if options.path is None and options.body is None:
        return None
    if options.path is None or options.body is None:
        raise CommandError("give both --path and --body", BAD_INPUT)
    request = request_of(options.path, options.body, options.method)
    document = {"version": 1, "name": "operation", "request": request}
    if options.other_body is not None:
        other = {**request, "body": json_option("--other-body", options.other_body)}
        document["other_request"] = other
    return profile_from("the options", msgspec.json.encode(document))


async def _collect(
    url: str,
    profile: Profile,
    sign_in: SignIn,
    options: AttackOptions,
    attacks: Sequence[Attack],
    *,
    as_json: bool,
) -> list[Result]:
    results = []
    async with AsyncExitStack() as stack:
        lose = None
        if options.database_url is not None:
            store = await stack.enter_async_context(opened(options.database_url))
            lose = partial(lose_commit, store)
        on_attack, on_result = stack.enter_context(
            showing_progress(len(attacks), as_json=as_json, on_line=_print_line)
        )
        async for result in attack(
            url,
            profile,
            sign_in,
            limits=options.limits,
            redis_url=options.redis_url,
            health_path=options.health_path,
            lose_commit=lose,
            attacks=attacks,
            on_attack=on_attack,
        ):
            results.append(result)
            on_result(result)
    return results


def _as_json(result: Result) -> dict[str, str | None]:
    return {
        "group": result.section,
        "attack": result.check,
        "result": _WORDS[result.verdict].lower(),
        "expected": result.expected,
        "actual": result.actual,
        "why": result.why,
        "change": result.change,
    }


def _print_line(result: Result) -> None:
    print_line(result, _WORDS[result.verdict], (result.section, result.check))
