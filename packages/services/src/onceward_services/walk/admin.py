"""Views of admins: a review with its evidence, and a walker."""

import json
from typing import Any, Final

from onceward.errors import NotFoundError
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_protocol.storage.sql_files import Queries
from onceward_services.walk import admin_model as model
from onceward_services.walk.steps import reviews
from onceward_services.walk.walkers import instant

__all__ = ["read_review", "read_walker"]

# The newest of each; a device reports a day a few dozen times.
_MOST: Final = 500


async def read_review(store: Store, review_id: str) -> model.ReviewDetail:
    """Return a review with reports, spans, bundles and attestations. Raises ``NotFoundError``."""
    review = reviews.as_view(await reviews.read_review(store, review_id))
    tenant, sql = review.walker_id, _sql(store)
    about: dict[str, Any] = {"tenant": tenant, "day": review.day or "", "limit": _MOST}
    reports = [] if review.day is None else await store.read(sql["reports_of_day"], about)
    attestations = await store.read(sql["attestations_of_walker"], about)
    return model.ReviewDetail(
        **review.model_dump(),
        walker=await read_walker(store, tenant),
        reports=[_report(row) for row in reports],
        attestations=[_attestation(row) for row in attestations],
    )


async def read_walker(store: Store, tenant: str) -> model.WalkerDetail:
    """Return a walker. Raises ``NotFoundError`` for one who has never acted."""
    sql = _sql(store)
    rows = await store.read(sql["walker_for_admins"], {"tenant": tenant})
    if not rows:
        raise NotFoundError("there is no such walker")
    row = rows[0]
    stale = (await store.read(sql["stale_actions"], {"tenant": tenant}))[0]
    return model.WalkerDetail(
        walker_id=tenant,
        points_banked=row["points_banked"],
        energy_balance=row["energy_balance"],
        first_action_at=instant(row["created_at"]),
        last_action_at=instant(row["updated_at"]),
        suspended_at=_instant(row["suspended_at"]),
        deleting_at=_instant(row["deleting_at"]),
        open_reviews=row["open_reviews"],
        stale_actions=stale["actions"],
        last_stale_action_at=_instant(stale["last_at"]),
    )


def _report(row: Row) -> model.ReportView:
    return model.ReportView(
        number=row["number"],
        count=row["step_count"],
        source=row["source"],
        source_bundle_id=row["source_bundle_id"],
        tz=row["tz"],
        sample_span={"start": instant(row["span_start"]), "end": instant(row["span_end"])},
        client_submitted_at=instant(row["client_submitted_at"]),
        received_at=instant(row["received_at"]),
        token_id=row["token_id"],
        request_id=row["request_id"],
    )


def _attestation(row: Row) -> model.AttestationView:
    return model.AttestationView(
        id=row["id"],
        verdict=row["verdict"],
        code=row["code"],
        anti_cheat=bool(row["anti_cheat"]),
        day=row["day"],
        token_id=row["token_id"],
        summary=json.loads(row["summary"]),
        request_id=row["request_id"],
        created_at=instant(row["created_at"]),
    )


def _instant(value: Any) -> Any:
    return None if value is None else instant(value)


def _sql(store: Store) -> Queries:
    return load_queries("onceward_services.walk", "admin.sql", names=store.table_names)
