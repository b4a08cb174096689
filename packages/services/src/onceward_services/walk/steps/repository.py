"""Queries of steps: days, reports, streaks, attestations. The same SQL on SQLite and PostgreSQL.

Callers that write have locked the walker.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Final, Literal
from zoneinfo import ZoneInfo

from onceward import Transaction
from onceward.ports import Params, Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_protocol.ids import new_id
from onceward_services.walk.steps.day_assessment import Reading, Ruling
from onceward_services.walk.steps.rules import LastSync, Report, Span, find_zone
from onceward_services.walk.steps.streaks import AttestedDay, StreakState
from onceward_services.walk.walkers import instant

__all__ = [
    "Attestation",
    "DayLog",
    "DayStatus",
    "RecentDay",
    "Sync",
    "add_attestation",
    "add_report",
    "attestation_values",
    "attested_after",
    "attested_before",
    "delete_attestations",
    "find_day",
    "find_sync",
    "list_days",
    "list_rejected_days",
    "neighbours_of",
    "open_challenges",
    "read_settled_streak",
    "readings_of",
    "recent_days",
    "save_challenge",
    "save_ruling",
    "save_streak",
    "set_streak_of_day",
    "settle_day_log",
    "sql",
    "stored_zone",
]

DayStatus = Literal["PENDING", "ACCEPTED", "QUARANTINED", "REJECTED"]
# Sorts after every day.
AFTER_LAST_DAY: Final = "9999-99-99"
# Samples with a grace of hours reach at most into the days next to their own.
_AROUND: Final = timedelta(days=2)


@dataclass(frozen=True, slots=True)
class Sync:
    """A walker's last report, and the totals of settled days."""

    zone: ZoneInfo
    last: LastSync
    total_steps: int
    # When a day was last settled as attested.
    attested_at: datetime | None


@dataclass(frozen=True, slots=True)
class DayLog:
    """A day before it is settled."""

    status: DayStatus
    reported_count: int
    accepted_count: int
    is_attested: bool
    credited_energy: int
    settlements: int
    ruling: Ruling | None
    challenge_id: str | None = None
    challenge_due_at: datetime | None = None
    # The number of the report that responded to the challenge.
    reread_number: int | None = None


@dataclass(frozen=True, slots=True)
class RecentDay:
    """A day that may still change, to predict the streak."""

    day: date
    status: DayStatus
    reported_count: int
    is_attested: bool
    is_rejected_for_good: bool
    challenge_id: str | None = None
    challenge_due_at: datetime | None = None
    is_reread: bool = False


@dataclass(frozen=True, slots=True)
class Attestation:
    """One row of the attestation log."""

    verdict: Literal["ACCEPTED", "REJECTED", "QUARANTINED", "UNVERIFIED"]
    day: date
    token_id: str
    payload_hash: str
    request_id: str
    code: str | None = None
    is_anti_cheat: bool = False
    summary: Mapping[str, Any] | None = None


# -- what rejected days take back ------------------------------------------------------------------


async def list_rejected_days(
    tx: Transaction, tenant: str, since: datetime
) -> list[tuple[date, datetime]]:
    """Return the days that are rejected and became so since then, with when they did."""
    rows = await tx.fetch_all(sql("rejected_days_since"), {"tenant": tenant, "since": since})
    return [(date.fromisoformat(row["day"]), instant(row["reconciled_at"])) for row in rows]


# -- reports ---------------------------------------------------------------------------------------


async def find_sync(tx: Transaction, tenant: str) -> Sync | None:
    """Return a walker's last report, or None."""
    row = await tx.fetch_one(sql("find_sync"), {"tenant": tenant})
    return None if row is None else _sync(row)


async def add_report(
    tx: Transaction,
    tenant: str,
    report: Report,
    *,
    source: str,
    client_submitted_at: datetime,
    token_id: str,
    request_id: str,
    provisional_energy: int,
    sample_digest: str | None = None,
    now: datetime,
) -> DayStatus:
    """Store a report and update its day; returns the status of the day.

    With a digest it responds to a challenge, and the day's reports before it do not count any more.
    """
    offset = now.astimezone(report.zone).utcoffset() or timedelta()
    await tx.execute(
        sql("save_sync"),
        {
            "tenant": tenant,
            "tz": report.zone.key,
            "utc_offset_seconds": int(offset.total_seconds()),
            "now": now,
        },
    )
    values = {
        "tenant": tenant,
        "day": report.day.isoformat(),
        "count": report.count,
        "source": source,
        "bundle": report.bundle,
        "tz": report.zone.key,
        "span_start": report.span.start,
        "span_end": report.span.end,
        "now": now,
    }
    row = await tx.fetch_one(sql("save_log"), values | {"provisional_energy": provisional_energy})
    if row is None:
        raise LookupError("the upsert of a day returned no row")
    await tx.execute(
        sql("add_report"),
        values
        | {
            "number": row["reports"],
            "client_submitted_at": client_submitted_at,
            "token_id": token_id,
            "request_id": request_id,
            "sample_digest": sample_digest,
        },
    )
    if sample_digest is not None:
        about = {"tenant": tenant, "day": report.day.isoformat()}
        await tx.execute(sql("save_reread"), about | {"number": row["reports"]})
    status: DayStatus = row["status"]
    return status


async def readings_of(
    tx: Transaction, tenant: str, day: date, zones: Sequence[ZoneInfo] = ()
) -> tuple[list[Reading], Row]:
    """Return all readings of a day, and the row of the newest report.

    ``zones`` are others in which the walker has been around that day.
    """
    rows = await tx.fetch_all(sql("list_reports"), {"tenant": tenant, "day": day.isoformat()})
    readings = [
        Reading(
            row["number"],
            row["source_bundle_id"],
            row["step_count"],
            Span(instant(row["span_start"]), instant(row["span_end"])),
            (stored_zone(row["tz"]), *zones),
        )
        for row in rows
    ]
    return readings, rows[-1]


async def neighbours_of(
    tx: Transaction, tenant: str, day: date
) -> tuple[list[Span], list[ZoneInfo]]:
    """Return the samples that count on the days around a day, and the zones of their reports."""
    values = {
        "tenant": tenant,
        "day": day.isoformat(),
        "first": (day - _AROUND).isoformat(),
        "last": (day + _AROUND).isoformat(),
    }
    rows = await tx.fetch_all(sql("neighbouring_reports"), values)
    spans = [
        Span(instant(row["span_start"]), instant(row["span_end"]))
        for row in rows
        if row["step_count"] and row["accepted_count"]
    ]
    return spans, [stored_zone(name) for name in sorted({row["tz"] for row in rows})]


# -- days ------------------------------------------------------------------------------------------


async def find_day(tx: Transaction, tenant: str, day: date) -> DayLog | None:
    """Return a day, or None if nothing was reported."""
    row = await tx.fetch_one(sql("find_log"), {"tenant": tenant, "day": day.isoformat()})
    if row is None:
        return None
    ruling = (
        None
        if row["ruling"] is None
        else Ruling(row["ruling"] == "accept", row["ruled_reports"], row["ruled_count"])
    )
    return DayLog(
        status=row["status"],
        reported_count=row["reported_count"],
        accepted_count=row["accepted_count"],
        is_attested=row["streak_length"] is not None,
        credited_energy=row["credited_energy"],
        settlements=row["settlements"],
        ruling=ruling,
        challenge_id=row["challenge_id"],
        challenge_due_at=_instant_or_none(row["challenge_due_at"]),
        reread_number=row["reread_number"],
    )


async def recent_days(tx: Transaction, tenant: str, since: date) -> list[RecentDay]:
    """Return a walker's days since a day, oldest first."""
    rows = await tx.fetch_all(sql("recent_days"), {"tenant": tenant, "day": since.isoformat()})
    return [
        RecentDay(
            date.fromisoformat(row["day"]),
            row["status"],
            row["reported_count"],
            row["streak_length"] is not None,
            row["ruling"] == "reject",
            row["challenge_id"],
            _instant_or_none(row["challenge_due_at"]),
            row["reread_number"] is not None,
        )
        for row in rows
    ]


async def settle_day_log(
    tx: Transaction,
    tenant: str,
    day: date,
    *,
    status: DayStatus,
    accepted_count: int,
    credited_energy: int,
    now: datetime,
) -> None:
    """Save the result of settling a day."""
    values = {
        "tenant": tenant,
        "day": day.isoformat(),
        "status": status,
        "accepted_count": accepted_count,
        "credited_energy": credited_energy,
        "now": now,
    }
    await tx.execute(sql("settle_log"), values)


async def save_ruling(
    tx: Transaction, tenant: str, day: date, *, accepted: bool, count: int
) -> None:
    """Save an admin's decision; the day becomes pending again."""
    values = {
        "tenant": tenant,
        "day": day.isoformat(),
        "ruling": "accept" if accepted else "reject",
        "ruled_count": count,
    }
    await tx.execute(sql("rule_log"), values)


async def save_challenge(
    tx: Transaction, tenant: str, day: date, *, challenge_id: str, due_at: datetime
) -> None:
    """Save the request to read a day again."""
    values = {"tenant": tenant, "day": day.isoformat()}
    await tx.execute(
        sql("save_challenge"), values | {"challenge_id": challenge_id, "due_at": due_at}
    )


async def open_challenges(tx: Transaction, tenant: str) -> list[tuple[date, datetime]]:
    """Return the days in quarantine whose challenge has no response, and when they are due."""
    rows = await tx.fetch_all(sql("open_challenges"), {"tenant": tenant})
    return [(date.fromisoformat(row["day"]), instant(row["challenge_due_at"])) for row in rows]


async def list_days(store: Store, tenant: str, *, before: str, limit: int) -> Sequence[Row]:
    """Return a page of a walker's days, newest first."""
    values = {"tenant": tenant, "before": before, "limit": limit}
    return await store.read(sql("list_logs"), values)


# -- streaks ---------------------------------------------------------------------------------------


async def attested_before(tx: Transaction, tenant: str, day: date | None) -> AttestedDay | None:
    """Return the last attested day before ``day``, or the last of all."""
    text = AFTER_LAST_DAY if day is None else day.isoformat()
    row = await tx.fetch_one(sql("attested_before"), {"tenant": tenant, "day": text})
    return None if row is None else _attested(row)


async def attested_after(tx: Transaction, tenant: str, day: date) -> list[AttestedDay]:
    """Return the attested days after ``day``, oldest first."""
    values = {"tenant": tenant, "day": day.isoformat()}
    return [_attested(row) for row in await tx.fetch_all(sql("attested_after"), values)]


async def set_streak_of_day(
    tx: Transaction, tenant: str, day: date, attested: AttestedDay | None
) -> None:
    """Save the streak at the end of a day; None for a day that is not attested."""
    values = {
        "tenant": tenant,
        "day": day.isoformat(),
        "length": None if attested is None else attested.length,
        "tier": None if attested is None else attested.tier,
    }
    await tx.execute(sql("set_streak_of_day"), values)


async def save_streak(
    tx: Transaction,
    tenant: str,
    state: StreakState,
    *,
    steps: int,
    attested_at: datetime | None,
) -> None:
    """Save a walker's streak, and add ``steps`` to the lifetime total."""
    last = state.last_attested
    values = {
        "tenant": tenant,
        "length": state.length,
        "last_attested": None if last is None else last.isoformat(),
        "tier": state.tier,
        "decay_at": state.decay_at,
        "attested_at": attested_at,
        "steps": steps,
    }
    await tx.execute(sql("save_streak"), values)


async def read_settled_streak(store: Store, tenant: str) -> tuple[Sync, AttestedDay | None] | None:
    """Read the inputs of a walker's streak; None for an unknown walker."""
    syncs = await store.read(sql("find_sync"), {"tenant": tenant})
    if not syncs:
        return None
    rows = await store.read(sql("attested_before"), {"tenant": tenant, "day": AFTER_LAST_DAY})
    return _sync(syncs[0]), _attested(rows[0]) if rows else None


def _sync(row: Row) -> Sync:
    attested_at = row["attested_at"]
    return Sync(
        zone=stored_zone(row["tz"]),
        last=LastSync(instant(row["synced_at"]), timedelta(seconds=row["utc_offset_seconds"])),
        total_steps=row["total_lifetime_steps"],
        attested_at=None if attested_at is None else instant(attested_at),
    )


def stored_zone(name: str) -> ZoneInfo:
    """Return a stored time zone. Zones can disappear from the IANA database; UTC replaces them."""
    try:
        return find_zone(name)
    except ValueError:
        return ZoneInfo("UTC")


def _instant_or_none(value: datetime | str | None) -> datetime | None:
    return None if value is None else instant(value)


def _attested(row: Row) -> AttestedDay:
    return AttestedDay(date.fromisoformat(row["day"]), row["streak_length"], row["streak_tier"])


# -- attestations ----------------------------------------------------------------------------------


async def add_attestation(
    tx: Transaction, tenant: str, attestation: Attestation, now: datetime
) -> None:
    """Write one row of the attestation log."""
    await tx.execute(sql("add_attestation"), attestation_values(tenant, attestation, now))


def attestation_values(tenant: str, attestation: Attestation, now: datetime) -> Params:
    """Return the values of a row, for a caller that writes it outside a transaction."""
    return {
        "tenant": tenant,
        "id": new_id(now),
        "verdict": attestation.verdict,
        "code": attestation.code,
        "anti_cheat": int(attestation.is_anti_cheat),
        "token_id": attestation.token_id,
        "day": attestation.day.isoformat(),
        "payload_hash": attestation.payload_hash,
        "summary": json.dumps(attestation.summary or {}, separators=(",", ":")),
        "request_id": attestation.request_id,
        "now": now,
    }


async def delete_attestations(store: Store, *, before: datetime, limit: int) -> int:
    """Delete one batch of old rows; returns how many were deleted."""
    return len(await store.write(sql("delete_attestations"), {"before": before, "limit": limit}))


def sql(name: str) -> str:
    """Return a statement by name."""
    return load_queries("onceward_services.walk.steps")[name]
