"""Rows of the services that the console shows: webhooks with a delivery, reviews, a device."""

import json
from datetime import datetime

from onceward.ports import Store

__all__ = ["DELIVERY", "REVIEWS", "WEBHOOK", "add_services_rows"]

WEBHOOK = "0190163d-8694-739b-aea5-000000000001"
DELIVERY = "0190163d-8694-739b-aea5-000000000002"
REVIEWS = {
    "wanda": "0190163d-8694-739b-aea5-000000000003",
    "willy": "0190163d-8694-739b-aea5-000000000004",
}
AT = "2026-05-22T12:00:00.000000Z"


async def add_services_rows(store: Store, text: str) -> None:
    """Write the rows; ``text`` is in every column that a stranger can fill."""
    await _add(
        store,
        "planning_webhooks",
        tenant="acme",
        id=WEBHOOK,
        url="https://127.0.0.1:9/hooks/secret",
        description=text,
        secret="whsec_none",
        secret_created_at=AT,
        created_by=text,
        created_at=AT,
        updated_at=AT,
    )
    await _add(
        store,
        "planning_deliveries",
        tenant="acme",
        id=DELIVERY,
        webhook_id=WEBHOOK,
        type="assignment.changed",
        body=json.dumps({"title": text}),
        state="failed",
        sends=1,
        created_at=AT,
        finished_at=AT,
    )
    await _add(
        store,
        "planning_delivery_attempts",
        tenant="acme",
        delivery_id=DELIVERY,
        id="0190163d-8694-739b-aea5-000000000005",
        started_at=AT,
        finished_at=AT,
        outcome="failed",
        status=500,
        detail=f"the response was 500: {text}",
    )
    for walker, review in REVIEWS.items():
        numbers = dict.fromkeys(
            ("points_banked", "energy_balance", "allocation_seq", "ledger_seq", "event_seq"), 0
        )
        await _add(store, "walkers", tenant=walker, created_at=AT, updated_at=AT, **numbers)
        await _add(
            store,
            "walk_reviews",
            tenant=walker,
            id=review,
            kind="anti_cheat",
            day="",
            reasons=json.dumps([{"code": "TZ_JUMP", "detail": text}]),
            status="open",
            opened_at=AT,
        )
    await _add(
        store,
        "walker_devices",
        tenant="wanda",
        id=text,
        platform="web",
        token="push-token",
        pushed_seq=0,
        registered_at=AT,
    )


async def _add(store: Store, table: str, /, **values: object) -> None:
    if store.name != "sqlite":  # which has times as text
        at = datetime.fromisoformat(AT)
        values = {name: at if value == AT else value for name, value in values.items()}
    columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    await store.write(f"INSERT INTO {table} ({columns}) VALUES ({marks})", values)
