"""``holdfast conform``: checks a server over HTTP; prints a table, lines or JSON."""

import asyncio
import ipaddress
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from holdfast.cli.output import CommandError, print_json, printable
from holdfast_lab.conformance import (
    BUILT_IN,
    NoOperationError,
    NotSignedInError,
    Plan,
    Profile,
    ProfileError,
    Result,
    SignIn,
    UnreachableError,
    Verdict,
    conform,
    plan_checks,
    read_profile,
)

__all__ = [
    "Operation",
    "host_of",
    "is_loopback",
    "json_option",
    "local_sign_in",
    "run_conform",
]

_BAD_INPUT: Final = 2
_STYLES: Final = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}

_VERSION: Final = 1

_OnResult = Callable[[Result], None]
_OnCheck = Callable[[str], None]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """The guarded operation as the command line describes it. Bodies are JSON, or @file."""

    method: str | None = None
    path: str | None = None
    body: str | None = None
    other_path: str | None = None
    other_body: str | None = None
    code_at: str | None = None
    statuses_only: bool = False


def run_conform(
    url: str,
    *,
    sign_in: SignIn,
    service: str | None,
    profile_file: Path | None,
    operation: Operation = Operation(),
    as_json: bool,
) -> int:
    """Check a server; returns the exit code, 1 if a check failed."""
    host = host_of(url)
    if service is not None and service not in BUILT_IN:
        raise CommandError(f"--service should be one of {', '.join(BUILT_IN)}", _BAD_INPUT)
    if service is not None and profile_file is not None:
        raise CommandError(
            "--service and --profile exclude each other: give one of them", _BAD_INPUT
        )
    profile = _chosen_profile(profile_file, operation, service)
    if profile is None and sign_in == SignIn():
        sign_in = local_sign_in(host)
    plans = plan_checks(profile, service)
    try:
        results = asyncio.run(_collect(url, plans, sign_in, as_json=as_json))
    except (UnreachableError, NotSignedInError, NoOperationError) as error:
        raise CommandError(str(error), _BAD_INPUT) from error
    counts = Counter(result.verdict for result in results)
    if as_json:
        print_json(
            {"url": url}
            | {name: counts[verdict] for name, verdict in _COUNTED.items()}
            | {"results": msgspec.to_builtins(results)}
        )
    else:
        _print_summary(counts, is_table=sys.stdout.isatty(), results=results)
    return 1 if counts[Verdict.FAIL] else 0


_COUNTED: Final = {"passed": Verdict.PASS, "failed": Verdict.FAIL, "skipped": Verdict.SKIP}


async def _collect(
    url: str, plans: Sequence[Plan], sign_in: SignIn, *, as_json: bool
) -> list[Result]:
    results = []
    total = sum(len(plan.checks) for plan in plans)
    with _showing_progress(total, as_json=as_json) as (on_check, on_result):
        async for result in conform(url, plans, sign_in, on_check=on_check):
            results.append(result)
            on_result(result)
    return results


@contextmanager
def _showing_progress(total: int, *, as_json: bool) -> Iterator[tuple[_OnCheck, _OnResult]]:
    """Show a bar on a terminal, a line per result over a pipe, nothing with ``--json``."""
    if as_json:
        yield lambda _check: None, lambda _result: None
    elif not sys.stdout.isatty():
        yield lambda _check: None, _print_line
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("", total=total)
            yield (
                lambda check: progress.update(task, description=check),
                lambda _result: progress.advance(task),
            )


def _print_line(result: Result) -> None:
    cells = (result.verdict, result.service, result.section, result.check)
    text = f"expected {result.expected}; actual {result.actual}"
    print("\t".join([*cells, printable(text)]), flush=True)
    for name, explanation in _explanations(result):
        print("\t".join([name, *cells[1:], explanation]), flush=True)


def _explanations(result: Result) -> list[tuple[str, str]]:
    found = (("why", result.why), ("change", result.change))
    return [(name, text) for name, text in found if text is not None]


def _print_summary(counts: Counter[Verdict], *, is_table: bool, results: Sequence[Result]) -> None:
    if is_table:
        _print_table(results)
    summary = ", ".join(f"{counts[verdict]} {name}" for name, verdict in _COUNTED.items())
    conclusion = "the server conforms"
    if counts[Verdict.FAIL]:
        conclusion = "THE SERVER DOES NOT CONFORM"
    elif counts[Verdict.SKIP]:
        conclusion = "the server conforms in all checks that ran"
    print(f"{summary}: {conclusion}")


def _print_table(results: Sequence[Result]) -> None:
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold cyan")
    for heading in ("", "service", "protocol", "check", "expected", "actual"):
        table.add_column(heading, overflow="fold")
    for result in results:
        style = _STYLES[result.verdict]
        table.add_row(
            Text(result.verdict, style=style),
            result.service,
            result.section,
            Text(result.check),
            Text(result.expected, style="dim"),
            Text(printable(result.actual), style=style if result.verdict is Verdict.FAIL else ""),
        )
    console = Console()
    console.print(table)
    for result in results:
        if result.verdict is Verdict.FAIL:
            console.print(Text(f"{result.service}: {result.check}", style="bold red"))
            for name, text in _explanations(result):
                label = "why it matters" if name == "why" else "what to change"
                console.print(Padding(Text.assemble((f"{label}: ", "cyan"), text), (0, 0, 0, 2)))
            console.print()


def host_of(url: str) -> str:
    """Return the host of a URL. Raises ``CommandError`` if it is not one of HTTP."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise CommandError("the URL should be like http://127.0.0.1:8000", _BAD_INPUT)
    return host


def _chosen_profile(file: Path | None, operation: Operation, service: str | None) -> Profile | None:
    """Return the profile of a file or of the options; None for the built-in services."""
    if operation == Operation():
        return None if file is None else _read_profile(str(file), _read(file))
    if service is not None:
        raise CommandError(
            "--service has its own requests: leave out --path and --body", _BAD_INPUT
        )
    document: dict[str, Any] = {"version": _VERSION}
    if file is not None:
        if operation.path or operation.body or operation.method:
            raise CommandError(
                "the profile has the request: leave out --method, --path and --body", _BAD_INPUT
            )
        document = msgspec.to_builtins(_read_profile(str(file), _read(file)))
    elif operation.path is None or operation.body is None:
        raise CommandError("give both --path and --body, or --profile", _BAD_INPUT)
    else:
        document["request"] = {
            "path": operation.path,
            "body": json_option("--body", operation.body),
        }
        if operation.method is not None:
            document["request"]["method"] = operation.method.upper()
    _add_settings(document, operation)
    return _read_profile(
        "the options" if file is None else str(file), msgspec.json.encode(document)
    )


def _add_settings(document: dict[str, Any], operation: Operation) -> None:
    """Add the second tenant's request and the format of errors to a profile."""
    if operation.other_path is not None or operation.other_body is not None:
        other = dict(document.get("other_request") or document["request"])
        if operation.other_path is not None:
            other["path"] = operation.other_path
        if operation.other_body is not None:
            other["body"] = json_option("--other-body", operation.other_body)
        document["other_request"] = other
    if operation.code_at is not None:
        document["code_at"] = operation.code_at
    if operation.statuses_only:
        document["statuses_only"] = True


def json_option(option: str, text: str) -> Any:
    """Return the JSON of an option, or of the file that it names with ``@``."""
    raw = _read(Path(text[1:])) if text.startswith("@") else text.encode()
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{option} is not JSON: {error} (give JSON, or @file)", _BAD_INPUT
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", _BAD_INPUT) from error


def _read_profile(source: str, raw: bytes) -> Profile:
    try:
        return read_profile(raw)
    except ProfileError as error:
        raise CommandError(f"{source}: {error}", _BAD_INPUT) from error


def local_sign_in(host: str) -> SignIn:
    """Return the secret of a server in this directory, for URLs of this machine only."""
    from holdfast_services.dev_secrets import JWT_SECRET, development_secret
    from holdfast_services.settings import load_settings

    settings = load_settings()
    if is_loopback(host):
        secret = None
        if settings.jwt_secrets:
            secret = settings.jwt_secrets[0]
        elif settings.needs_development_secret and (settings.home / JWT_SECRET).is_file():
            secret = development_secret(settings.home)
        if secret is not None:
            return SignIn(
                secret=secret,
                issuer=settings.jwt_issuers[0] if settings.jwt_issuers else None,
                audience=settings.jwt_audiences,
            )
    raise CommandError(
        "no credentials: give --token, or --secret to sign tokens (not needed for a server on this "
        "machine if the command runs in its directory); for your own app give --path and --body",
        _BAD_INPUT,
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, without looking its name up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
