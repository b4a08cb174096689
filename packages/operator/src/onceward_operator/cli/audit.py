"""``onceward audit``: verify the chains of audit events, export them, seal them now."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import msgspec
import typer

from onceward.audit.chain import (
    EVENT_FIELDS,
    AuditKeys,
    ChainCheck,
    Finding,
    Seal,
)
from onceward.audit.seals import AuditSealer
from onceward.cli.database import audit_keys, check_known_tenant, opened
from onceward.cli.options import Json, Target, Tenant, command, new_group, tenant_or_all
from onceward.guard.erasures import erased_at
from onceward.stores.parts import AUDIT_SEALS
from onceward_operator.audit_trail import EXPORT_FORMAT, AuditTrail
from onceward_protocol.cli.output import CommandError, instant_text, print_json, printable
from onceward_protocol.clock import SystemClock
from onceward_protocol.storage.private_files import private_output

app = new_group("audit")

_USAGE: Final = 2
_HASH_DIGITS: Final = 64
# More are counted.
_SHOWN_FINDINGS: Final = 1000


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A seal that was the last one of its tenant when it was noted."""

    number: int
    hash: str
    # None if only number and hash were noted.
    sealed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """Facts about the chains that the person knows."""

    # Only this tenant.
    tenant: str | None = None
    # The number and hash of a seal of the tenant, ``NUMBER:HASH``.
    head: str | None = None
    # A file with such seals of many tenants.
    heads: Path | None = None
    # Ids of events whose findings do not count.
    accepted: frozenset[str] = frozenset()
    # Seals need no signature.
    allow_unsigned: bool = False

    def known_heads(self) -> dict[str, list[KnownHead]]:
        """Return known seals by tenant. Raises ``CommandError``."""
        known: dict[str, list[KnownHead]] = {}
        if self.heads is not None:
            try:
                with self.heads.open(encoding="utf-8") as file:
                    for line in file:
                        tenant, saved = _parse_saved_head(line)
                        known.setdefault(tenant, []).append(saved)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise CommandError(
                    f"--heads {self.heads} is not a file of --save-heads: {error}", _USAGE
                ) from error
        if self.head is not None:
            if self.tenant is None:
                raise CommandError("--head is a seal of one tenant: give --tenant, too", _USAGE)
            number, colon, digest = self.head.partition(":")
            if not (colon and number.isdecimal() and _is_hash(digest)):
                raise CommandError(
                    "--head is a number and 64 hexadecimal digits, such as 12:9f86d0…", _USAGE
                )
            known.setdefault(self.tenant, []).append(KnownHead(int(number), digest))
        return known


@dataclass(slots=True)
class _Report:
    """The sums over all tenants that were checked."""

    accepted: frozenset[str]
    tenants: int = 0
    seals: int = 0
    events: int = 0
    unsealed: int = 0
    swept: int = 0
    # Tenants with a known head that were erased since.
    erased: int = 0
    found: int = 0
    findings: list[Finding] = field(default_factory=list)
    # The last seal of the last tenant.
    head: Seal | None = None

    def add(self, check: ChainCheck) -> None:
        self.tenants += 1
        self.seals += check.seals
        self.events += check.events
        self.unsealed += check.unsealed
        self.swept += check.swept
        self.head = check.head
        counted = [one for one in check.findings if one.event not in self.accepted]
        self.found += len(counted)
        self.findings += counted[: _SHOWN_FINDINGS - len(self.findings)]

    def print(self, *, as_json: bool, is_one_tenant: bool) -> None:
        head = None
        if is_one_tenant and self.head is not None:
            head = {"number": self.head.number, "hash": self.head.hash}
        if as_json:
            numbers = {
                name: getattr(self, name)
                for name in ("tenants", "seals", "events", "unsealed", "swept", "erased")
            }
            findings = [msgspec.to_builtins(one) for one in self.findings]
            shown = {"ok": not self.found, **numbers, "found": self.found, "findings": findings}
            print_json(shown | ({"head": head} if is_one_tenant else {}))
            return
        for one in self.findings:
            where = "" if one.seal is None else f", seal {one.seal}"
            where += "" if one.event is None else f", event {one.event}"
            print(printable(f"{one.code}: tenant {one.tenant}{where}: {one.detail}"))
        if self.found > len(self.findings):
            print(f"… and {self.found - len(self.findings)} more")
        print(
            f"{_count(self.events, 'event')} in {_count(self.seals, 'seal')} of "
            f"{_count(self.tenants, 'tenant')} verified, {self.unsealed} not sealed yet, "
            f"{self.swept} deleted by retention: {_count(self.found, 'finding')}"
        )
        if head is not None:
            print(f"head {head['number']}:{head['hash']}")


class _Verification:
    """One run of ``onceward audit verify``: what is known, and what was found."""

    def __init__(self, keys: AuditKeys, expected: Expected, save: "_SaveHead") -> None:
        self.expected = expected
        self.report = _Report(expected.accepted)
        self.known = expected.known_heads()
        self.keys = keys
        self._save = save

    def start(self, tenant: str, *, is_partial: bool = False) -> ChainCheck:
        """Return the check of a tenant in an export."""
        return ChainCheck(
            tenant,
            keys=self.keys,
            known_heads={head.number: head.hash for head in self.known.pop(tenant, [])},
            allow_unsigned=self.expected.allow_unsigned,
            is_partial=is_partial,
        )

    def end(self, check: ChainCheck) -> None:
        """Count what the check of a tenant has found."""
        self.report.add(check)
        self._save(check)

    def finish(self, *, as_json: bool) -> None:
        """Print the report. Raises ``CommandError`` if something was found."""
        found = self.report.found
        self.report.print(as_json=as_json, is_one_tenant=self.expected.tenant is not None)
        if found:
            raise CommandError(
                f"the audit trail is not as it was sealed: {_count(found, 'finding')}"
            )


@command(app, "verify")
def verify(
    target: Target,
    *,
    tenant: Tenant = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER:HASH",
            help="A seal of the tenant that was noted earlier, and must still exist.",
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="Seals of many tenants that were noted earlier, by --save-heads."),
    ] = None,
    save_heads: Annotated[
        Path | None,
        typer.Option(
            help="Write the last seal of each tenant to this file, if nothing is found. Keep it "
            "out of reach of those who can write to the database."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Verify an export instead of a database; - reads stdin."),
    ] = None,
    allow_unsigned: Annotated[
        bool,
        typer.Option(
            "--allow-unsigned", help="Accept seals from before ONCEWARD_AUDIT_KEY was set."
        ),
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="ID",
            help="An event whose finding you have looked into. May be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check audit events against their chain of seals; exit with 1 if something was changed.

    Finds events and seals that were changed, removed, inserted or exchanged. Events that are not
    sealed yet are counted. The last seals can be removed together with their events without a
    trace in the database: give --head or --heads to find that. With ONCEWARD_AUDIT_KEY, also checks
    the signatures of the seals. Reads one page at a time, while the server runs.

    Examples:
        onceward audit verify --save-heads heads.jsonl

        onceward audit verify --heads heads.jsonl --save-heads heads.jsonl

        onceward audit verify --tenant ada --head 12:9f86d0…

        onceward audit export | onceward audit verify --file -

    """
    expected = Expected(tenant, head, heads, frozenset(accept or ()), allow_unsigned)
    if file is not None:
        _verify_file(file, target, expected, save_heads=save_heads, as_json=as_json)
        return
    keys = audit_keys(target)
    with _saving(save_heads) as save:
        run = _Verification(keys, expected, save)
        asyncio.run(_verify(target, run))
        run.finish(as_json=as_json)


async def _verify(target: Target, run: _Verification) -> None:
    async with opened(target, AUDIT_SEALS) as store:
        if not run.known:
            await check_known_tenant(store, tenant_or_all(run.expected.tenant))
        trail = AuditTrail(store, keys=run.keys)
        async for tenant in _tenants(trail, run.expected.tenant, run.known):
            heads = run.known.get(tenant, [])
            erased = await erased_at(store, tenant) if heads else None
            if erased is not None:
                # The chain of the erased tenant is gone; a later one has begun again.
                kept = [head for head in heads if (head.sealed_at or erased) >= erased]
                run.report.erased += len(kept) < len(heads)
                heads = kept
            check = await trail.verify(
                tenant,
                known_heads={head.number: head.hash for head in heads},
                allow_unsigned=run.expected.allow_unsigned,
            )
            run.end(check)


async def _tenants(
    trail: AuditTrail, only: str | None, known: Iterable[str] = ()
) -> AsyncIterator[str]:
    """Yield one tenant, or all, and those of known heads that have nothing left."""
    if only is not None:
        yield only
        return
    missing = set(known)
    async for tenant in trail.tenants():
        missing.discard(tenant)
        yield tenant
    for tenant in sorted(missing):
        yield tenant


def _verify_file(
    path: Path, target: Target, expected: Expected, *, save_heads: Path | None, as_json: bool
) -> None:
    """Verify an export, or stdin for ``-``, without a database."""
    keys = audit_keys(target)
    with _saving(save_heads) as save:
        run = _Verification(keys, expected, save)
        export = _ExportCheck(run)
        try:
            if str(path) == "-":
                export.read(sys.stdin)
            else:
                with path.open(encoding="utf-8") as file:
                    export.read(file)
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read {path}: {error}", _USAGE) from error
        run.finish(as_json=as_json)


class _ExportCheck:
    """Checks the lines of an export; holds the events of one seal at a time."""

    def __init__(self, run: _Verification) -> None:
        self._run = run
        self._check: ChainCheck | None = None
        # The events whose seal has not been read yet.
        self._events: dict[str, Mapping[str, Any]] = {}
        self._is_partial = False
        self._is_complete = False

    def read(self, lines: Iterable[str]) -> None:
        """Check all lines. Raises ``CommandError`` if they are not an export."""
        for number, text in enumerate(lines, 1):
            line = _parse_line(text, number)
            match line["kind"]:
                case "export":
                    self._is_partial = line["after"] is not None
                case "complete":
                    self._is_complete = True
                case _ if self._run.expected.tenant in {None, line["tenant"]}:
                    self._add(line, number)
        self._end()
        if not self._is_complete:
            raise CommandError("the export is not complete: its last line is missing")
        for tenant in sorted(self._run.known):
            self._check = self._run.start(tenant)
            self._end()

    def _add(self, line: dict[str, Any], number: int) -> None:
        if self._check is None or line["tenant"] != self._check.tenant:
            self._end()
            self._check = self._run.start(line["tenant"], is_partial=self._is_partial)
        if line["kind"] == "seal":
            seal = _seal_of(line, number)
            self._check.add_seal(seal, self._events)
            for event_id in self._events.keys() - {listed for listed, _ in seal.events}:
                self._check.report_not_listed(event_id, seal.number)
            self._events.clear()
        elif line["seal"] is None:
            self._check.add_unsealed(line)
        else:
            self._events[line["id"]] = line

    def _end(self) -> None:
        """End the check of the tenant at hand."""
        check, self._check = self._check, None
        if check is not None:
            for event_id, line in self._events.items():
                check.report_without_seal(event_id, line["seal"])
            self._events.clear()
            check.finish()
            self._run.end(check)


@command(app, "export")
def export_events(
    target: Target,
    *,
    tenant: Tenant = None,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="SEAL|TIME",
            help="Only seals after this number (with --tenant), or made after this time, such as "
            "2026-01-31T09:30:00Z.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The file to write, for its owner only. Default: stdout."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write the summary as JSON; the export always is.")
    ] = False,
) -> None:
    """Write audit events and their seals as JSON lines, which can be verified without the database.

    The first line describes the export. Of each tenant, the events of a seal come before the seal,
    and events that are not sealed yet come last. The last line has the numbers: without it the
    export is not complete. Reads one page at a time.

    Examples:
        onceward audit export --output audit.jsonl

        onceward audit export --tenant ada --after 12 | gzip > ada.gz

    """
    number, since = _parse_after(after, tenant)
    if output is None:
        asyncio.run(_export(target, tenant, number, since, sys.stdout))
        return
    with private_output(output, force=force) as file:
        counts = asyncio.run(_export(target, tenant, number, since, file))
    if as_json:
        print_json({"file": str(output)} | counts)
    else:
        print(
            f"{output} written ({_count(counts['events'], 'event')}, "
            f"{_count(counts['seals'], 'seal')}, {counts['unsealed']} not sealed yet)"
        )


async def _export(
    target: Target, tenant: str | None, number: int, since: datetime | None, file: TextIO
) -> dict[str, int]:
    counts = {"events": 0, "seals": 0, "unsealed": 0}
    async with opened(target, AUDIT_SEALS) as store:
        await check_known_tenant(store, tenant_or_all(tenant))
        trail = AuditTrail(store)
        after = instant_text(since) if since is not None else number or None
        head = {
            "kind": "export",
            "format": EXPORT_FORMAT,
            "exported_at": instant_text(SystemClock().now()),
            "tenant": tenant,
            "after": after,
        }
        _write_line(file, head)
        async for name in _tenants(trail, tenant):
            async for line in trail.export(name, after=number, since=since):
                _write_line(file, line)
                counts[f"{line['kind']}s"] += 1
                counts["unsealed"] += line["kind"] == "event" and line["seal"] is None
        _write_line(file, {"kind": "complete", **counts})
        file.flush()
    return counts


@command(app, "seal")
def seal_events(target: Target, *, as_json: Json = False) -> None:
    """Seal all audit events now. A server does it every ONCEWARD_AUDIT_SEAL_SECONDS (default: 60).

    With ONCEWARD_AUDIT_KEY, the seals are signed.

    Example:
        onceward audit seal --database sqlite:///onceward.db

    """
    keys = audit_keys(target)

    async def run() -> tuple[int, int]:
        async with opened(target, AUDIT_SEALS) as store:
            sealed = await AuditSealer(store, SystemClock(), keys=keys).seal()
            return sealed.events, sealed.seals

    events, seals = asyncio.run(run())
    if as_json:
        print_json({"events": events, "seals": seals})
    else:
        print(f"{_count(events, 'event')} sealed by {_count(seals, 'seal')}")


# -- heads ------------------------------------------------------------------------------------


class _SaveHead:
    """Writes the last seal of each tenant as a line of JSON."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def __call__(self, check: ChainCheck) -> None:
        if self._file is not None and check.head is not None:
            head = check.head
            line = {"tenant": head.tenant, "number": head.number, "hash": head.hash}
            _write_line(self._file, line | {"sealed_at": instant_text(head.sealed_at)})


@contextmanager
def _saving(path: Path | None) -> Iterator[_SaveHead]:
    """Save heads to a file that appears only if nothing was found."""
    if path is None:
        yield _SaveHead(None)
        return
    # The heads of an earlier run are replaced, unless the command ends with an error.
    with private_output(path, force=True) as file:
        yield _SaveHead(file)


def _parse_saved_head(line: str) -> tuple[str, KnownHead]:
    read = json.loads(line)
    tenant, number, digest = read["tenant"], read["number"], read["hash"]
    if not (isinstance(tenant, str) and isinstance(number, int) and _is_hash(digest)):
        raise ValueError("a line has no tenant, number and hash")
    return tenant, KnownHead(number, digest, datetime.fromisoformat(read["sealed_at"]))


def _is_hash(text: object) -> bool:
    return (
        isinstance(text, str) and len(text) == _HASH_DIGITS and not text.strip("0123456789abcdef")
    )


# -- lines ------------------------------------------------------------------------------------


def _write_line(file: TextIO, value: dict[str, Any]) -> None:
    # In ASCII: some readers take U+2028 for the end of a line.
    file.write(json.dumps(value) + "\n")


_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "export": ("format", "after"),
    "event": ("seal", *EVENT_FIELDS),
    "seal": ("tenant", "number", "events", "hash"),
    "complete": (),
}


def _parse_line(text: str, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind not in _FIELDS or any(name not in line for name in _FIELDS[kind]):
        raise CommandError(f"line {number} is not a line of onceward audit export", _USAGE)
    if kind == "export" and line["format"] != EXPORT_FORMAT:
        raise CommandError(
            f"the export has format {line['format']}, this version reads {EXPORT_FORMAT}", _USAGE
        )
    found: dict[str, Any] = line
    return found


def _seal_of(line: dict[str, Any], number: int) -> Seal:
    try:
        return msgspec.convert({key: line[key] for key in line if key != "kind"}, Seal)
    except msgspec.ValidationError as error:
        raise CommandError(f"line {number} is not a seal: {error}", _USAGE) from error


def _parse_after(text: str | None, tenant: str | None) -> tuple[int, datetime | None]:
    """Return the number of a seal, or a time. Raises ``CommandError``."""
    if text is None:
        return 0, None
    if text.isdecimal():
        if tenant is None:
            raise CommandError(
                "--after with the number of a seal needs --tenant: each tenant has its own", _USAGE
            )
        return int(text), None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise CommandError(
            f"--after {text} is neither the number of a seal nor a time with a zone, such as "
            "2026-01-31T09:30:00Z",
            _USAGE,
        )
    return 0, instant


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
