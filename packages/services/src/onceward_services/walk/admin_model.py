"""Response models for admins."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from onceward_services.walk.model import View
from onceward_services.walk.steps.model import ReviewView

__all__ = ["AttestationView", "Reinstated", "ReportView", "ReviewDetail", "WalkerDetail"]


class ReportView(View):
    """One report of the reviewed day."""

    number: int
    count: int
    source: str
    source_bundle_id: str
    tz: str
    sample_span: dict[str, datetime]
    client_submitted_at: datetime
    received_at: datetime
    token_id: str
    request_id: str


class AttestationView(View):
    """One row of the attestation log."""

    id: str
    verdict: Literal["ACCEPTED", "REJECTED", "QUARANTINED", "UNVERIFIED"]
    code: str | None
    anti_cheat: bool
    day: str
    token_id: str
    summary: dict[str, Any]
    request_id: str
    created_at: datetime


class WalkerDetail(View):
    """A walker as admins see it."""

    walker_id: str
    points_banked: int
    energy_balance: int
    first_action_at: datetime
    last_action_at: datetime
    suspended_at: datetime | None
    deleting_at: datetime | None
    open_reviews: int
    stale_actions: int = Field(description="Stored `STALE_ACTION` of the last days.")
    last_stale_action_at: datetime | None


class Reinstated(View):
    """The walker may act again."""

    walker_id: str
    suspended_at: None = None


class ReviewDetail(ReviewView):
    """A review with its evidence: reports of the day and the attestation log, newest first."""

    walker: WalkerDetail
    reports: list[ReportView]
    attestations: list[AttestationView]
