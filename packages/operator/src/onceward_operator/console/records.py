"""Pages about idempotency records: the list, one record, and its removal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from onceward.app import Onceward
from onceward.errors import CommitUnknownError, InProgressError, RequestError
from onceward.guard.policy import Policy
from onceward.guard.request_log import code_of
from onceward.maintenance.record_removal import RecordRemoval
from onceward.ports import Row, Store
from onceward.records import Record, RecordId
from onceward.tenants import tenant_or_none
from onceward_operator.console.access import Role
from onceward_operator.console.not_found import not_found
from onceward_operator.console.outcomes import OUTCOME_PHRASES, label_of
from onceward_operator.console.page import (
    ConsoleError,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Shown,
)
from onceward_operator.console.rendering import visible_text
from onceward_operator.console.trace import record_path
from onceward_operator.console.verdict import verdict_of
from onceward_operator.record_search import (
    RECORD_FILTERS,
    RecordPlace,
    find_records,
    record_queries,
)
from onceward_operator.request_counts import OUTCOMES
from onceward_operator.request_trace import MOST_MOMENTS, requests_of_key
from onceward_protocol.staleness import parse_instant

__all__ = ["record_pages"]

_PAGE_ROWS: Final = 20
_CURSOR_PARTS: Final = 4
# As in record_search.sql.
_MOST_JOBS: Final = 100
_SEPARATOR: Final = "\x1f"


def record_pages(onceward: Onceward[Any]) -> list[Page]:
    """Return the pages about records."""
    pages = _RecordPages(onceward)
    return [
        Page("records", pages.all, title="Records"),
        Page("records/show", pages.show),
        Page("records/remove", pages.remove, method="POST", role=Role.ADMIN),
    ]


@dataclass(frozen=True, slots=True)
class _Audit:
    id: str
    actor: str
    resource: str | None
    version: int | None
    created_at: datetime
    seal: int | None


class _RecordPages:
    def __init__(self, onceward: Onceward[Any]) -> None:
        self._onceward = onceward

    async def all(self, request: PageRequest) -> Shown:
        """List records by filter, newest first."""
        filters = {name: request.query[name] for name in RECORD_FILTERS if name in request.query}
        before = _instant(request.query.get("before"))
        after = _cursor(request.query.get("after"))
        found = await find_records(
            request.store,
            tenant=tenant_or_none(request.tenant),
            filters=filters,
            before=before,
            after=after,
            limit=_PAGE_ROWS + 1,
        )
        shown, more = found[:_PAGE_ROWS], len(found) > _PAGE_ROWS
        kept = {k: v for k, v in request.query.items() if k not in {"after", "notice"}}
        return Shown(
            "records.html",
            {
                "records": [_listed(record) for record in shown],
                "endpoints": sorted(
                    {r.endpoint for r in self._onceward.runtime.routes.table().routes}
                ),
                "first": _link(kept) if after else None,
                "next": _link(kept | {"after": _encode_cursor(shown[-1])}) if more else None,
            },
        )

    async def show(self, request: PageRequest) -> Shown:
        """Show one record and what belongs to it."""
        record_id = _record_id(request, request.query)
        record = await self._find(request.store, record_id)
        if record is None:
            return not_found(
                request,
                self._onceward,
                wanted=record_id.key,
                searched_as=f"the key of a record of {record_id.endpoint}",
            )
        elsewhere = await find_records(
            request.store,
            tenant=record_id.tenant,
            filters={"key": record_id.key},
            limit=_PAGE_ROWS,
        )
        names = record.headers.items()
        jobs = await self._jobs(request.store, record)
        repeats = await requests_of_key(request.store, record)
        code = code_of(record.response()) if record.status else None
        log_seconds = self._onceward.runtime.request_log.keep_seconds
        return Shown(
            "record.html",
            {
                "record": record,
                "audit": await self._audit(request.store, record),
                "verdict": verdict_of(
                    record,
                    repeats=repeats,
                    most_repeats=MOST_MOMENTS,
                    jobs=jobs,
                    most_jobs=_MOST_JOBS,
                    code=code,
                    is_logged=log_seconds > 0,
                    now=request.now,
                ),
                "code": code,
                "jobs": jobs,
                "repeats": [(row, label_of(row["outcome"])) for row in repeats],
                "phrases": OUTCOME_PHRASES,
                "names": OUTCOMES,
                "log_kept": timedelta(seconds=log_seconds) if log_seconds > 0 else None,
                "others": [each for each in elsewhere if each.id != record.id],
                "headers": sorted(names),
                "policy": self._policy(record.id.endpoint),
                "body": _text(record.body) if request.operator.sees_payloads else None,
            },
        )

    async def remove(self, request: PageRequest) -> Redirected:
        """Remove a record; the next request with its key runs again."""
        record_id = _record_id(request, request.form)
        reason = request.reason()
        removal = RecordRemoval(request.store, self._onceward.clock)
        try:
            removed = await removal.remove(
                record_id, actor=request.actor, reason=reason, started_at=request.now
            )
        except InProgressError as error:
            raise ConsoleError(f"nothing was removed: {error}") from error
        except CommitUnknownError as error:
            raise ConsoleError(
                "the connection was lost during the commit: look whether the record is there"
            ) from error
        if removed is None:
            raise NotShownError("there is no such record")
        return Redirected("records", f"removed; audit event {removed.audit_id}")

    async def _find(self, store: Store, record_id: RecordId) -> Record | None:
        found = await find_records(
            store,
            tenant=record_id.tenant,
            filters={"endpoint": record_id.endpoint, "key": record_id.key},
            limit=1,
        )
        return found[0] if found else None

    @staticmethod
    async def _audit(store: Store, record: Record) -> _Audit | None:
        if record.audit_id is None:
            return None
        about = {"tenant": record.id.tenant, "id": record.audit_id}
        rows = await store.read(record_queries(store)["find_audit_event"], about)
        return _audit_of(rows[0]) if rows else None

    @staticmethod
    async def _jobs(store: Store, record: Record) -> Sequence[Row]:
        about = {
            "tenant": record.id.tenant,
            "request_id": record.request_id,
            "correlation_id": record.correlation_id,
        }
        rows = await store.read(record_queries(store)["jobs_of_request"], about)
        return [{**row, "id": str(row["job_id"])} for row in rows]

    def _policy(self, endpoint: str) -> Policy | None:
        for route in self._onceward.runtime.routes.table().routes:
            if route.endpoint == endpoint:
                return route.guard.policy
        return None


def _listed(record: Record) -> tuple[object, ...]:
    """Return the cells of a row of the list: most of the page's time is spent on its rows."""
    status = record.status
    return (
        status or "unreadable",
        status // 100,
        [visible_text(part) for part in record.id],
        record_path(record.id),
        record.created_at,
        record.expires_at,
    )


def _record_id(request: PageRequest, values: Mapping[str, str]) -> RecordId:
    tenant = request.own(values.get("tenant", ""))
    return RecordId(tenant, values.get("endpoint", ""), values.get("key", ""))


def _audit_of(row: Row) -> _Audit:
    at = row["created_at"]
    return _Audit(
        id=str(row["id"]),
        actor=row["actor"],
        resource=row["resource"],
        version=row["version"],
        created_at=datetime.fromisoformat(at) if isinstance(at, str) else at,
        seal=row["seal"],
    )


def _instant(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return parse_instant(text, "before")
    except RequestError as error:
        raise ConsoleError(str(error)) from error


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def _link(query: Mapping[str, str]) -> str:
    return f"records?{urlencode(query)}"


def _encode_cursor(record: Record) -> str:
    at = record.created_at.astimezone(UTC).isoformat(timespec="microseconds")
    return _SEPARATOR.join((at, *record.id))


def _cursor(text: str | None) -> RecordPlace | None:
    if text is None:
        return None
    at, *rest = text.split(_SEPARATOR)
    moment = _instant(at)
    if moment is None or len(rest) != _CURSOR_PARTS - 1:
        raise ConsoleError("after is not a place in this list")
    return RecordPlace(moment, *rest)
