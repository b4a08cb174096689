"""HTTP routes of steps and reviews."""

import re
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Path, Query
from pydantic import Field

from onceward import ErrorFormat, Onceward, Principal
from onceward.errors import BodyInvalidError, ForbiddenError, NotFoundError
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward.ports import Row
from onceward_services.auth import CurrentPrincipal
from onceward_services.openapi import errors
from onceward_services.routing import extend_router, service_router
from onceward_services.settings import Settings
from onceward_services.walk.admin import read_review, read_walker
from onceward_services.walk.admin_model import Reinstated, ReviewDetail, WalkerDetail
from onceward_services.walk.documentation import documented
from onceward_services.walk.errors import walk_error
from onceward_services.walk.steps import reviews
from onceward_services.walk.steps.attestation import AppCheck
from onceward_services.walk.steps.ingest import StepIngestion
from onceward_services.walk.steps.model import (
    DayView,
    DayViews,
    IngestResponse,
    Resolution,
    ReviewView,
    ReviewViews,
    StepReport,
)
from onceward_services.walk.steps.repository import AFTER_LAST_DAY, list_days
from onceward_services.walk.steps.resolution import resolve_review
from onceward_services.walk.suspension import reinstate
from onceward_services.walk.walkers import instant, lock_walker

__all__ = ["router"]

_ADMIN: Final = "admin"
# The server creates all ids. Other text is not looked up: PostgreSQL rejects some characters.
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# PostgreSQL refuses NUL in text.
WalkerId = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_INGEST: Final = """\
Reports the steps of one of the walker's days so far. The App Check token is in the header
`X-Firebase-AppCheck` or in `attestationToken`. The response is provisional: the day is reconciled
about a minute later. If a day looks odd, the response has a `challenge`: read that day from the
health app again, and report it with the samples and their digest."""
_INGEST_ERRORS: Final = (
    "ATTESTATION_INVALID",
    "SOURCE_NOT_ALLOWED",
    "STEP_COUNT_EXCEEDED",
    "BURST_RATE_EXCEEDED",
    "TZ_JUMP",
    "FUTURE_DATED",
    "OFFLINE_CAP_EXCEEDED",
    "REREAD_INVALID",
    "WALKER_BEING_DELETED",
    "WALKER_SUSPENDED",
)


def router(onceward: Onceward, settings: Settings) -> APIRouter:
    """Build the routes of steps and of the review queue."""
    return extend_router(
        APIRouter(),
        _steps(onceward, settings),
        _reviews(onceward, settings),
        _walkers(onceward, settings),
    )


def _steps(onceward: Onceward, settings: Settings) -> APIRouter:
    api = service_router("walk", prefix="/step")
    app_check = AppCheck(
        settings,
        settings.home,
        onceward.clock,
        allow_development_key=not settings.is_production,
    )
    ingestion = StepIngestion(onceward, settings, app_check)

    @api.post("/ingest", summary="Report steps", **documented(_INGEST, *_INGEST_ERRORS))
    @onceward.guard("step.ingest", policy=settings.policies().step_ingest)
    async def ingest(
        report: StepReport,
        tx: Tx,
        run: Run,
        tokens: Annotated[list[str] | None, Header(alias="X-Firebase-AppCheck")] = None,
    ) -> IngestResponse:
        return await ingestion.ingest(tx, run, report, tokens or [])

    @api.get("/log", summary="List days", responses=_errors(400, 401, 422, 503))
    async def log(
        caller: CurrentPrincipal,
        after: Annotated[str | None, Query(examples=["2026-05-18"])] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> DayViews:
        if after is not None and _DAY.fullmatch(after) is None:
            raise BodyInvalidError("after should be the `next` of the page before")
        before = after or AFTER_LAST_DAY
        rows = await list_days(onceward.store, caller.tenant, before=before, limit=limit + 1)
        items = [_day(row) for row in rows[:limit]]
        return DayViews(items=items, next=items[-1].id if len(rows) > limit else None)

    return api


def _reviews(onceward: Onceward, settings: Settings) -> APIRouter:
    api = service_router("walk", prefix="/admin/review-queue")

    @api.get("", summary="List reviews", responses=_errors(400, 401, 403, 422, 503))
    async def queue(  # noqa: PLR0917 - FastAPI reads them
        caller: CurrentPrincipal,
        status: Literal["open", "resolved"] = "open",
        kind: Literal["quarantined_day", "anti_cheat"] | None = None,
        walker_id: Annotated[WalkerId | None, Query(alias="walkerId")] = None,
        day: Annotated[str | None, Query(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> ReviewViews:
        _check_admin(caller)
        if after is not None and _ID.fullmatch(after) is None:
            raise BodyInvalidError("after should be the `next` of the page before")
        return await reviews.list_reviews(
            onceward.store,
            status=status,
            after=after or "",
            limit=limit,
            kind=kind,
            walker=walker_id,
            day=day,
        )

    @api.get("/{review_id}", summary="Read a review", responses=_errors(401, 403, 404, 503))
    async def review(
        caller: CurrentPrincipal,
        review_id: Annotated[str, Path(examples=["0190163d-8694-739b-aea5-966c26f8ad91"])],
    ) -> ReviewDetail:
        _check_admin(caller)
        if _ID.fullmatch(review_id) is None:
            raise NotFoundError("there is no such review")
        return await read_review(onceward.store, review_id)

    @api.post(
        "/{review_id}/resolve",
        summary="Resolve a review",
        **documented(
            "For a quarantined day, `accept` counts its steps and `reject` takes back the energy "
            "they earned. `suspend` rejects, and refuses further actions of the walker.",
            "REVIEW_ALREADY_RESOLVED",
            statuses=(403, 404),
        ),
    )
    # Admins work online, so their actions have no staleness.
    @onceward.guard(
        "admin.review.resolve",
        policy=settings.policies().walk.replace(staleness=None, ordering="none"),
    )
    async def resolve(
        review_id: Annotated[str, Path(examples=["0190163d-8694-739b-aea5-966c26f8ad91"])],
        resolution: Resolution,
        tx: Tx,
        caller: Caller,
        run: Run,
    ) -> ReviewView:
        _check_admin(caller)
        if _ID.fullmatch(review_id) is None:
            raise NotFoundError("there is no such review")
        resolved = await resolve_review(
            tx,
            onceward.enqueue,
            review_id,
            resolution,
            admin=caller.actor,
            settings=settings,
            now=onceward.clock.now(),
        )
        run.describe(resource=f"review:{review_id}")
        return reviews.as_view(resolved)

    return api


def _walkers(onceward: Onceward, settings: Settings) -> APIRouter:
    api = service_router("walk", prefix="/admin/walkers")

    @api.get("/{walker_id}", summary="Read a walker", responses=_errors(401, 403, 404, 422, 503))
    async def walker(
        caller: CurrentPrincipal, walker_id: Annotated[WalkerId, Path(examples=["ada"])]
    ) -> WalkerDetail:
        _check_admin(caller)
        return await read_walker(onceward.store, walker_id)

    @api.post(
        "/{walker_id}/reinstate",
        summary="End a suspension",
        **documented("The walker may act again.", "WALKER_NOT_SUSPENDED", statuses=(403, 404)),
    )
    @onceward.guard(
        "admin.walker.reinstate",
        policy=settings.policies().walk.replace(staleness=None, ordering="none"),
    )
    async def end_suspension(
        walker_id: Annotated[WalkerId, Path(examples=["ada"])], tx: Tx, caller: Caller, run: Run
    ) -> Reinstated:
        _check_admin(caller)
        # A walker who never acted has no row, and gets none here.
        await read_walker(onceward.store, walker_id)
        now = onceward.clock.now()
        await lock_walker(tx, walker_id, now)
        if not await reinstate(tx, walker_id, now):
            raise walk_error("WALKER_NOT_SUSPENDED", "this walker is not suspended")
        run.describe(resource=f"walker:{walker_id}")
        return Reinstated(walker_id=walker_id)

    return api


def _check_admin(caller: Principal) -> None:
    if _ADMIN not in caller.roles:
        raise ForbiddenError("this needs the role admin")


def _day(row: Row) -> DayView:
    reconciled_at = row["reconciled_at"]
    return DayView(
        id=row["day"],
        day=row["day"],
        reconciliation_status=row["status"],
        reported_count=row["reported_count"],
        accepted_count=row["accepted_count"],
        attested=row["streak_length"] is not None,
        source=row["source"],
        source_bundle_id=row["source_bundle_id"],
        tz=row["tz"],
        sample_span={"start": instant(row["span_start"]), "end": instant(row["span_end"])},
        reported_at=instant(row["reported_at"]),
        reconciled_at=None if reconciled_at is None else instant(reconciled_at),
    )


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return errors(*statuses, error_format=ErrorFormat.ENVELOPE)
