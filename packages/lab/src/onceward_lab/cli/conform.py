"""``onceward conform``: checks a server over HTTP; prints a table, lines or JSON."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from onceward_lab.cli.results import print_line, print_table, showing_progress
from onceward_lab.cli.target_options import (
    BAD_INPUT,
    host_of,
    json_option,
    local_sign_in,
    profile_from,
    read_file,
    request_of,
)
from onceward_lab.conformance import (
    BUILT_IN,
    NoOperationError,
    NotSignedInError,
    Plan,
    Profile,
    RequestRefusedError,
    Result,
    SignIn,
    UnreachableError,
    Verdict,
    conform,
    plan_checks,
)
from onceward_protocol.cli.output import CommandError, print_json

__all__ = ["Operation", "run_conform"]

_VERSION: Final = 1


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
        raise CommandError(f"--service should be one of {', '.join(BUILT_IN)}", BAD_INPUT)
    if service is not None and profile_file is not None:
        raise CommandError(
            "--service and --profile exclude each other: give one of them", BAD_INPUT
        )
    profile = _chosen_profile(profile_file, operation, service)
    if profile is None and sign_in == SignIn():
        sign_in = local_sign_in(host)
    plans = plan_checks(profile, service)
    try:
        results = asyncio.run(_collect(url, plans, sign_in, as_json=as_json))
    except (UnreachableError, NotSignedInError, NoOperationError, RequestRefusedError) as error:
        raise CommandError(str(error), BAD_INPUT) from error
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
    with showing_progress(total, as_json=as_json, on_line=_print_line) as (on_check, on_result):
        async for result in conform(url, plans, sign_in, on_check=on_check):
            results.append(result)
            on_result(result)
    return results


def _print_line(result: Result) -> None:
    print_line(result, result.verdict, (result.service, result.section, result.check))


def _print_summary(counts: Counter[Verdict], *, is_table: bool, results: Sequence[Result]) -> None:
    if is_table:
        print_table(
            results,
            words={verdict: verdict.value for verdict in Verdict},
            columns={
                "service": lambda result: result.service,
                "protocol": lambda result: result.section,
                "check": lambda result: result.check,
            },
            title=lambda result: f"{result.service}: {result.check}",
        )
    summary = ", ".join(f"{counts[verdict]} {name}" for name, verdict in _COUNTED.items())
    conclusion = "the server conforms"
    if counts[Verdict.FAIL]:
        conclusion = "THE SERVER DOES NOT CONFORM"
    elif counts[Verdict.SKIP]:
        conclusion = "the server conforms in all checks that ran"
    print(f"{summary}: {conclusion}")


def _chosen_profile(file: Path | None, operation: Operation, service: str | None) -> Profile | None:
    """Return the profile of a file or of the options; None for the built-in services."""
    if operation == Operation():
        return None if file is None else profile_from(str(file), read_file(file))
    if service is not None:
        raise CommandError("--service has its own requests: leave out --path and --body", BAD_INPUT)
    document: dict[str, Any] = {"version": _VERSION}
    if file is not None:
        if operation.path or operation.body or operation.method:
            raise CommandError(
                "the profile has the request: leave out --method, --path and --body", BAD_INPUT
            )
        document = msgspec.to_builtins(profile_from(str(file), read_file(file)))
    elif operation.path is None or operation.body is None:
        raise CommandError("give both --path and --body, or --profile", BAD_INPUT)
    else:
        document["request"] = request_of(operation.path, operation.body, operation.method)
    _add_settings(document, operation)
    return profile_from("the options" if file is None else str(file), msgspec.json.encode(document))


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
