"""Ingest a report of steps: attest, check, store, and enqueue its reconciliation.

Every request adds a row to the attestation log, whatever the response is. A rejected report writes
nothing else, and its key can be used again.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta
from typing import Final, NoReturn

from onceward import Execution, Onceward, ServiceError, Transaction
from onceward.errors import StoreError, StoreUnavailableError
from onceward_services.walk.announcements import announce_reviews
from onceward_services.walk.steps.attestation import AppCheck, AttestationError, Attested
from onceward_services.walk.steps.challenges import Reread, Sample, check_reread
from onceward_services.walk.steps.model import (
    ChallengeResponse,
    ChallengeView,
    IngestResponse,
    StepReport,
)
from onceward_services.walk.steps.repository import (
    Attestation,
    RecentDay,
    add_attestation,
    add_report,
    attestation_values,
    attested_before,
    find_sync,
    recent_days,
    sql,
)
from onceward_services.walk.steps.reviews import review_rejections
from onceward_services.walk.steps.rules import (
    Rejection,
    Report,
    Span,
    find_rejection,
    find_zone,
    provisional_credit,
    scaled,
)
from onceward_services.walk.steps.settings import StepSettings
from onceward_services.walk.steps.streak_view import streak_view
from onceward_services.walk.steps.streaks import StreakState, extend_streak, streak_on, today_in
from onceward_services.walk.suspension import lock_active_walker

__all__ = ["QUEUE", "RECONCILE", "StepIngestion"]

QUEUE: Final = "walk"
RECONCILE: Final = "steps.reconcile"
# Days of one walker are reconciled one at a time, in the order of their reports.
ORDER: Final = "steps"

_log = logging.getLogger("onceward.services")


class StepIngestion:
    """Ingests reports, one transaction each."""

    def __init__(self, onceward: Onceward, settings: StepSettings, app_check: AppCheck) -> None:
        self._onceward = onceward
        self._settings = settings
        self._app_check = app_check
        self._limits = settings.step_limits
        self._streaks = settings.streak_rules

    async def ingest(
        self, tx: Transaction, run: Execution, sent: StepReport, tokens: Sequence[str]
    ) -> IngestResponse:
        """Store one report; raises ``ServiceError`` if it is rejected."""
        tenant, now = run.request.principal.tenant, self._onceward.clock.now()
        note = Attestation(
            verdict="ACCEPTED",
            day=sent.day,
            token_id="none",  # noqa: S106 - not a secret
            payload_hash=run.request.fingerprint.body_hash,
            request_id=run.request.request_id,
        )
        attested = await self._attest(tx, run, sent, tokens, note)
        note = replace(note, token_id=attested.token_id, summary=attested.summary)
        report = Report(
            day=sent.day,
            count=sent.count,
            zone=find_zone(sent.tz),
            span=Span(sent.sample_span.start, sent.sample_span.end),
            bundle=sent.source_bundle_id,
        )
        await lock_active_walker(tx, tenant, now, now)
        sync = await find_sync(tx, tenant)
        rejection = find_rejection(report, self._limits, None if sync is None else sync.last, now)
        since = min(sent.day, today_in(report.zone, now) - timedelta(self._limits.offline_days + 1))
        days = await recent_days(tx, tenant, since) if rejection is None else []
        if rejection is None and sent.challenge is not None:
            rejection = self._check_challenge(sent.challenge, report, days)
        if rejection is not None:
            await self._reject(tx, run, rejection, note, now)
        await add_attestation(tx, tenant, note, now)
        energy = self._credit(report, days)
        status = await add_report(
            tx,
            tenant,
            report,
            source=sent.source,
            client_submitted_at=sent.client_submitted_at,
            token_id=attested.token_id,
            request_id=run.request.request_id,
            provisional_energy=energy,
            sample_digest=None if sent.challenge is None else sent.challenge.sample_digest,
            now=now,
        )
        if status == "PENDING":
            await self._onceward.enqueue(
                RECONCILE,
                {"day": sent.day.isoformat()},
                queue=QUEUE,
                delay_seconds=self._settings.step_reconcile_delay_seconds,
                coalesce=sent.day.isoformat(),
                order=ORDER,
            )
        run.describe(resource=f"day:{sent.day.isoformat()}")
        state = await self._expected_streak(tx, tenant, report, days, since=since, now=now)
        return IngestResponse(
            provisional_energy=energy,
            streak_state=streak_view(state, 0 if sync is None else sync.total_steps),
            challenge=_open_challenge(days, sent, now),
        )

    # -- rejecting -------------------------------------------------------------------------------

    async def _attest(
        self,
        tx: Transaction,
        run: Execution,
        sent: StepReport,
        tokens: Sequence[str],
        note: Attestation,
    ) -> Attested:
        """Check the token before any query, so that requests from elsewhere cost little."""
        try:
            return await self._app_check.verify(tokens, sent.attestation_token)
        except AttestationError as error:
            rejection = Rejection(
                401,
                "ATTESTATION_INVALID",
                f"App Check: {error.reason}",
                {
                    "received": error.token_id,
                    "reason": error.reason,
                    "maxAgeSeconds": self._settings.app_check_max_age_seconds,
                },
            )
            note = replace(note, token_id=error.token_id)
            await self._reject(tx, run, rejection, note, self._onceward.clock.now())
        except StoreUnavailableError:
            await self._log_outage(run, note)
            raise

    async def _reject(
        self,
        tx: Transaction,
        run: Execution,
        rejection: Rejection,
        note: Attestation,
        now: datetime,
    ) -> NoReturn:
        """Log the rejection, in a transaction that commits although the response is an error."""
        run.keep_writes_on_error()
        tenant = run.request.principal.tenant
        await add_attestation(
            tx,
            tenant,
            replace(
                note,
                verdict="REJECTED",
                code=rejection.code,
                is_anti_cheat=rejection.is_anti_cheat,
                summary={**(note.summary or {}), "reason": rejection.message},
            ),
            now,
        )
        if rejection.is_anti_cheat:
            await review_rejections(
                tx,
                tenant,
                limit=self._settings.step_review_rejections,
                window=self._settings.review_window,
                now=now,
            )
            enqueue = self._onceward.enqueue
            await announce_reviews(tx, tenant, enqueue, settings=self._settings, now=now)
        raise ServiceError(
            rejection.status, rejection.code, rejection.message, details=rejection.details
        )

    async def _log_outage(self, run: Execution, note: Attestation) -> None:
        """Log a request whose token could not be checked, outside its transaction.

        A 503 rolls the request's transaction back, so it is aborted first: if every request held a
        connection while it waited for a second one, all of them could wait for ever.
        """
        await self._onceward.runtime.idempotency.abort(run)
        note = replace(note, verdict="UNVERIFIED", code="STORE_UNAVAILABLE")
        values = attestation_values(run.request.principal.tenant, note, self._onceward.clock.now())
        try:
            await self._onceward.store.write(sql("add_attestation"), values)
        except StoreError as error:
            _log.warning("could not log a request whose App Check token was not checked: %s", error)

    def _check_challenge(
        self, response: ChallengeResponse, report: Report, days: Sequence[RecentDay]
    ) -> Rejection | None:
        known = next((day for day in days if day.day == report.day), None)
        samples = [
            Sample(Span(sample.start, sample.end), sample.count) for sample in response.samples
        ]
        reread = Reread(response.id, samples, response.sample_digest)
        open_id = None if known is None else known.challenge_id
        return check_reread(reread, report, open_id, self._limits)

    # -- the response ------------------------------------------------------------------------------

    def _credit(self, report: Report, days: Sequence[RecentDay]) -> int:
        known = next((day for day in days if day.day == report.day), None)
        if known is not None and known.is_rejected_for_good:
            return 0
        prior = None if known is None else known.reported_count
        credit = provisional_credit(
            report.count,
            prior,
            self._settings.step_provisional_factor,
            self._settings.step_provisional_floor,
        )
        return scaled(credit, self._settings.step_energy_per_step)

    async def _expected_streak(
        self,
        tx: Transaction,
        tenant: str,
        report: Report,
        days: Sequence[RecentDay],
        *,
        since: date,
        now: datetime,
    ) -> StreakState:
        """Return the streak as if this day, and pending days that reach the goal, were attested."""
        attested = {day.day for day in days if self._may_be_attested(day)}
        if not any(day.day == report.day and day.is_rejected_for_good for day in days):
            attested.add(report.day)
        before = await attested_before(tx, tenant, since)
        *_, last = [before, *extend_streak(before, sorted(attested), self._streaks)]
        return streak_on(last, today_in(report.zone, now), report.zone, self._streaks)

    def _may_be_attested(self, day: RecentDay) -> bool:
        return day.is_attested or (
            day.status == "PENDING" and day.reported_count >= self._settings.step_attested_threshold
        )


def _open_challenge(
    days: Sequence[RecentDay], sent: StepReport, now: datetime
) -> ChallengeView | None:
    """Return the challenge of the earliest day that waits for a response other than this one."""
    for day in days:
        is_this = sent.challenge is not None and day.day == sent.day
        if day.challenge_id is None or day.challenge_due_at is None or day.is_reread or is_this:
            continue
        if day.challenge_due_at > now and day.status in ("QUARANTINED", "PENDING"):
            return ChallengeView(id=day.challenge_id, day=day.day, due_at=day.challenge_due_at)
    return None
