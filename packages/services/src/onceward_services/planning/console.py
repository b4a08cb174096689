"""Pages of the console about planning: webhooks, their deliveries and attempts."""

import json
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from onceward import Onceward
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward.tenants import tenant_or_none
from onceward_operator.console import (
    ConsoleError,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Role,
    Shown,
    operator_action,
    read_tenant_rows,
)
from onceward_protocol.storage.sql_files import Queries
from onceward_services.planning.repository import is_id
from onceward_services.planning.webhook_delivery import next_attempt_at, send_again, webhook_sql
from onceward_services.settings import Settings

__all__ = ["pages"]

_TEMPLATES: Final = "onceward_services.planning"
_PAGE_ROWS: Final = 50
_ATTEMPTS: Final = 100
_STATES: Final = ("waiting", "delivered", "failed", "cancelled")
_AFTER_ALL_IDS: Final = "g"  # ids are hexadecimal


def pages(onceward: Onceward, _settings: Settings) -> list[Page]:
    """Return the pages of planning."""
    found = _WebhookPages(onceward)
    delivery = "webhooks/{id}/deliveries/{delivery_id}"
    return [
        Page("webhooks", found.all, title="Webhooks", group="Planning", templates=_TEMPLATES),
        Page("webhooks/{id}", found.webhook, templates=_TEMPLATES),
        Page(delivery, found.delivery, templates=_TEMPLATES),
        # The same role as in the API: a token must not be worth more here.
        Page(f"{delivery}/resend", found.resend, method="POST", role=Role.ADMIN),
    ]


class _WebhookPages:
    def __init__(self, onceward: Onceward) -> None:
        self._onceward = onceward

    async def all(self, request: PageRequest) -> Shown:
        """List webhooks by organization."""
        sql = _sql(request.store)
        rows, following = await read_tenant_rows(
            request,
            of_all=sql["webhooks"],
            of_one=sql["webhooks_of_organization"],
            limit=_PAGE_ROWS,
        )
        webhooks = [_webhook(request, row) for row in rows]
        return Shown(
            "webhooks.html", {"webhooks": webhooks, **request.pager("webhooks", following)}
        )

    async def webhook(self, request: PageRequest) -> Shown:
        """Show one webhook and its deliveries, newest first."""
        tenant, webhook = await self._find(request)
        state, after = request.query.get("state"), request.query.get("after")
        if state is not None and state not in _STATES:
            raise ConsoleError(f"state must be one of {', '.join(_STATES)}")
        if after is not None and not is_id(after):
            raise ConsoleError("after is not a place in this list")
        values: dict[str, Any] = {
            "tenant": tenant,
            "webhook_id": webhook["id"],
            "before": after or _AFTER_ALL_IDS,
            "limit": _PAGE_ROWS + 1,
        }
        name = "list_deliveries"
        if state is not None:
            name, values = "list_deliveries_by_state", values | {"state": state}
        rows = await request.store.read(webhook_sql(name), values)
        shown = [_times(row) for row in rows[:_PAGE_ROWS]]
        following = shown[-1]["id"] if len(rows) > _PAGE_ROWS else None
        return Shown(
            "webhook.html",
            {
                "webhook": webhook,
                "deliveries": shown,
                "organization": tenant,
                "states": _STATES,
                **request.pager(f"webhooks/{webhook['id']}", following),
            },
        )

    async def delivery(self, request: PageRequest) -> Shown:
        """Show one delivery with its attempts."""
        tenant, webhook = await self._find(request)
        about = _about_delivery(request, tenant)
        rows = await request.store.read(webhook_sql("find_delivery"), about)
        if not rows:
            raise NotShownError("there is no such delivery")
        values = {"tenant": tenant, "delivery_id": about["id"], "limit": _ATTEMPTS}
        attempts = await request.store.read(webhook_sql("list_attempts"), values)
        body: str = rows[0]["body"]
        log = [_times(row) for row in attempts]
        return Shown(
            "delivery.html",
            {
                "webhook": webhook,
                "delivery": _times(rows[0]),
                "organization": tenant,
                "attempts": log,
                "next_attempt_at": await next_attempt_at(request.store, tenant, rows[0]),
                "last_response": next((row for row in reversed(log) if row["status"]), None),
                "body": _pretty(body) if request.operator.sees_payloads else None,
                "body_size": len(body.encode()),
            },
        )

    async def resend(self, request: PageRequest) -> Redirected:
        """Send a delivery again, with the same id and body."""
        tenant = request.own(request.form.get("tenant", ""))
        about = _about_delivery(request, tenant)
        async with operator_action(
            self._onceward,
            request,
            tenant=tenant,
            name="webhook.resend",
            resource=f"delivery:{about['id']}",
        ) as action:
            await send_again(action.transaction, action.enqueue, about)
        path = f"webhooks/{about['webhook_id']}/deliveries/{about['id']}"
        return Redirected(f"{path}?{urlencode({'tenant': tenant})}", "The delivery is sent again.")

    @staticmethod
    async def _find(request: PageRequest) -> tuple[str, dict[str, Any]]:
        """Return the organization and the webhook of the path."""
        tenant = request.own(tenant_or_none(request.tenant) or "")
        if not is_id(request.path["id"]):
            raise NotShownError("there is no such webhook")
        about = {"tenant": tenant, "id": request.path["id"]}
        rows = await request.store.read(webhook_sql("find_webhook"), about)
        if not rows:
            raise NotShownError("there is no such webhook")
        return tenant, _webhook(request, rows[0])


def _about_delivery(request: PageRequest, tenant: str) -> dict[str, str]:
    webhook_id, delivery_id = request.path["id"], request.path["delivery_id"]
    if not is_id(webhook_id) or not is_id(delivery_id):
        raise NotShownError("there is no such delivery")
    return {"tenant": tenant, "webhook_id": webhook_id, "id": delivery_id}


def _webhook(request: PageRequest, row: Row) -> dict[str, Any]:
    """Return the visible fields of a webhook. Paths of receivers often contain a secret."""
    shown = _times(row)
    if not request.operator.sees_payloads:
        parts = urlsplit(row["url"])
        shown["url"] = f"{parts.scheme}://{parts.hostname}/…"
    return shown


def _times(row: Row) -> dict[str, Any]:
    """Return a row with instants; SQLite has them as texts."""
    return {
        name: datetime.fromisoformat(value)
        if isinstance(value, str) and (name.endswith(("_at", "_since", "_until")))
        else value
        for name, value in row.items()
    }


def _pretty(body: str) -> str:
    return msgspec.json.format(json.dumps(json.loads(body), ensure_ascii=False), indent=2)


def _sql(store: Store) -> Queries:
    return load_queries("onceward_services.planning", "console.sql", names=store.table_names)
