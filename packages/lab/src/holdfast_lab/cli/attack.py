"""``holdfast attack``: attacks one's own server; prints a table, lines or JSON."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Final

import msgspec

from holdfast.cli.database import opened
from holdfast.cli.output import CommandError, print_json, printable
from holdfast_lab.attack.lost_commits import lose_commit
from holdfast_lab.attack.run import ATTACKS, GROUPS, attack
from holdfast_lab.attack.target import Attack, Limits
from holdfast_lab.cli.conform import host_of, is_loopback, json_option, local_sign_in
from holdfast_lab.conformance import (
    BUILT_IN,
    NoOperationError,
    NotSignedInError,
    Profile,
    ProfileError,
    Result,
    SignIn,
    UnreachableError,
    Verdict,
    read_profile,
)

__all__ = ["AttackOptions", "run_attack"]

_BAD_INPUT: Final = 2
_WORDS: Final = {Verdict.PASS: "held", Verdict.FAIL: "BROKEN", Verdict.SKIP: "skipped"}
_STYLES: Final = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}

_OnResult = Callable[[Result], None]
_OnAttack = Callable[[str], None]


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
            _BAD_INPUT,
        )
    if options.group is not None and options.group not in GROUPS:
        raise CommandError(f"--group should be one of {', '.join(GROUPS)}", _BAD_INPUT)
    profile = _profile(options)
    if profile is None:
        profile = BUILT_IN["field"]
        if sign_in == SignIn():
            sign_in = local_sign_in(host)
    attacks = [each for each in ATTACKS if options.group in (None, each.group)]
    try:
        results = asyncio.run(_collect(url, profile, sign_in, options, attacks, as_json=as_json))
    except (UnreachableError, NotSignedInError, NoOperationError) as error:
        raise CommandError(str(error), _BAD_INPUT) from error
    counts = Counter(result.verdict for result in results)
    if as_json:
        print_json(
            {"url": url}
            | {_WORDS[verdict].lower(): counts[verdict] for verdict in Verdict}
            | {"results": [_as_json(result) for result in results]}
        )
    else:
        if sys.stdout.isatty():
            _print_table(results)
        summary = ", ".join(f"{counts[verdict]} {_WORDS[verdict].lower()}" for verdict in Verdict)
        conclusion = "THE SERVER DID NOT HOLD" if counts[Verdict.FAIL] else "the server held"
        print(f"{summary}: {conclusion}")
    return 1 if counts[Verdict.FAIL] else 0


def _profile(options: AttackOptions) -> Profile | None:
    """Return the profile of the options; None for the services of this project."""
    if options.path is None and options.body is None:
        return None
    if options.path is None or options.body is None:
        raise CommandError("give both --path and --body", _BAD_INPUT)
    request = {"path": options.path, "body": json_option("--body", options.body)}
    if options.method is not None:
        request["method"] = options.method.upper()
    document = {"version": 1, "name": "operation", "request": request}
    if options.other_body is not None:
        other = {**request, "body": json_option("--other-body", options.other_body)}
        document["other_request"] = other
    try:
        return read_profile(msgspec.json.encode(document))
    except ProfileError as error:
        raise CommandError(f"the options: {error}", _BAD_INPUT) from error


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
        on_attack, on_result = stack.enter_context(_showing_progress(len(attacks), as_json=as_json))
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


@contextmanager
def _showing_progress(total: int, *, as_json: bool) -> Iterator[tuple[_OnAttack, _OnResult]]:
    """Show a bar on a terminal, a line per result over a pipe, nothing with ``--json``."""
    if as_json:
        yield lambda _attack: None, lambda _result: None
    elif not sys.stdout.isatty():
        yield lambda _attack: None, _print_line
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("", total=total)
            yield (
                lambda name: progress.update(task, description=name),
                lambda _result: progress.advance(task),
            )


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
    cells = (_WORDS[result.verdict], result.section, result.check)
    text = f"expected {result.expected}; actual {result.actual}"
    print("\t".join([*cells, printable(text)]), flush=True)
    for name, explanation in (("why", result.why), ("change", result.change)):
        if explanation is not None:
            print("\t".join([name, *cells[1:], explanation]), flush=True)


def _print_table(results: Sequence[Result]) -> None:
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan")
    for heading in ("", "group", "attack", "expected", "actual"):
        table.add_column(heading, overflow="fold")
    for result in results:
        style = _STYLES[result.verdict]
        table.add_row(
            Text(_WORDS[result.verdict], style=style),
            result.section,
            Text(result.check),
            Text(result.expected, style="dim"),
            Text(printable(result.actual), style=style if result.verdict is Verdict.FAIL else ""),
        )
    console = Console()
    console.print(table)
    for result in results:
        if result.verdict is Verdict.FAIL:
            console.print(Text(f"{result.section}: {result.check}", style="bold red"))
            for label, text in (("why it matters", result.why), ("what to change", result.change)):
                line = Text.assemble((f"{label}: ", "cyan"), text or "")
                console.print(Padding(line, (0, 0, 0, 2)))
            console.print()
