"""Routes of an organization's webhooks and their deliveries, for its admins."""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from onceward import Principal
from onceward.errors import FieldNotAllowedError, NotFoundError, ServiceError
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward.ports import Row
from onceward_services.auth import authenticate
from onceward_services.openapi import errors
from onceward_services.planning.aggregates import AggregateService, json_response
from onceward_services.planning.model import (
    DeliveryDetail,
    DeliveryState,
    DeliveryView,
    NewWebhook,
    Page,
    Rotation,
    WebhookPatch,
    WebhookView,
    WebhookWithSecret,
    row_view,
)
from onceward_services.planning.openapi import LIST
from onceward_services.planning.paging import After, Limit, page, read_cursor
from onceward_services.planning.repository import is_id
from onceward_services.planning.webhook_delivery import (
    DISABLED,
    add_delivery,
    check_enabled,
    next_attempt_at,
    send_again,
    webhook_sql,
)
from onceward_services.settings import Settings
from onceward_services.webhooks.addresses import AddressRefusedError
from onceward_services.webhooks.http_post import InvalidUrlError
from onceward_services.webhooks.sender import WebhookSender
from onceward_services.webhooks.signature import new_secret

__all__ = ["add_routes"]

TOO_MANY: Final = "webhook.too_many"

_WEBHOOK: Final = "/webhooks/{webhook_id}"
_DELIVERY: Final = f"{_WEBHOOK}/deliveries/{{delivery_id}}"
_ATTEMPTS: Final = 100
_AFTER_ALL_IDS: Final = "g"  # ids are hexadecimal
_LOCATION: Final = {"description": "The path of the new resource.", "schema": {"type": "string"}}


def _errors(*statuses: int, conflict: str | None = None) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a write; ``conflict`` is a code of its own for 409."""
    found = errors(401, 403, 409, 422, *statuses)
    if conflict is not None:
        found[409] = {**found[409], "description": f"{found[409]['description']}, `{conflict}`"}
    return found


def add_routes(api: APIRouter, service: AggregateService, settings: Settings) -> None:
    """Add the routes of webhooks."""

    async def admin(request: Request) -> Principal:
        """Return the caller. Not even a stored response goes to one who is not an admin."""
        caller = await authenticate(request)
        service.roles.check_admin(caller)
        return caller

    sender = settings.planning_webhook_sender()
    _add_reads(api, service, admin)
    _add_registration(api, service, admin, sender, settings.planning_webhooks)
    _add_changes(api, service, admin, sender)
    _add_sending(api, service, admin)


def _add_registration(
    api: APIRouter, service: AggregateService, admin: Any, sender: WebhookSender, most: int
) -> None:
    onceward, policy = service.onceward, service.policy

    @api.post(
        "/webhooks",
        status_code=201,
        summary="Register a webhook",
        operation_id="create_webhook",
        description="It gets the notifications of all members, signed as in Standard Webhooks. "
        "`secret` is shown in this response and in replays of it only.",
        responses={
            201: {"model": WebhookWithSecret, "headers": {"Location": _LOCATION}},
            **_errors(conflict=TOO_MANY),
        },
    )
    @onceward.guard("POST /v1/webhooks", policy=policy, principal=admin)
    async def create(webhook: NewWebhook, tx: Tx, caller: Caller, run: Run) -> Response:
        _check_url(sender, webhook.url)
        tenant, secret = caller.tenant, new_secret()
        counted = {"tenant": tenant, "most": most}
        if most < 1 or await tx.fetch_one(webhook_sql("count_up"), counted) is None:
            run.no_store()  # once another is deleted, the same request may be sent again
            raise ServiceError(
                409,
                TOO_MANY,
                f"the organization has {most} webhooks, which is the maximum: delete one first",
                details={"limit": most},
            )
        values = {
            "tenant": tenant,
            "id": service.new_id(),
            "url": webhook.url,
            "description": webhook.description,
            "events": _joined(webhook.events),
            "secret": secret,
            "actor": caller.actor,
            "now": onceward.clock.now(),
        }
        row = await tx.fetch_one(webhook_sql("add_webhook"), values)
        assert row is not None  # noqa: S101 - an insert returns its row
        run.describe(resource=f"webhook:{row['id']}")
        response = json_response(_webhook_view(row) | {"secret": secret})
        response.status_code = 201
        response.headers["location"] = f"/v1/webhooks/{row['id']}"
        return response

    @api.delete(
        _WEBHOOK,
        status_code=204,
        response_class=Response,
        summary="Delete a webhook",
        operation_id="delete_webhook",
        description="Deliveries that wait are not sent any more.",
        responses={204: {"description": "The webhook is deleted."}, **_errors(404)},
    )
    @onceward.guard(f"DELETE /v1{_WEBHOOK}", policy=policy, principal=admin)
    async def delete(webhook_id: str, tx: Tx, caller: Caller, run: Run) -> Response:
        values = {"tenant": caller.tenant, "id": webhook_id, "now": onceward.clock.now()}
        # The count first, as a registration does: two that lock in turns could deadlock.
        await tx.execute(webhook_sql("count_down"), {"tenant": caller.tenant})
        if not is_id(webhook_id) or not await tx.fetch_one(webhook_sql("remove_webhook"), values):
            raise _no_webhook()
        run.describe(resource=f"webhook:{webhook_id}")
        return Response(status_code=204)


def _add_changes(
    api: APIRouter, service: AggregateService, admin: Any, sender: WebhookSender
) -> None:
    onceward, policy = service.onceward, service.policy

    @api.patch(
        _WEBHOOK,
        summary="Change a webhook",
        operation_id="change_webhook",
        description="Missing fields keep their values. `enabled` true enables one that was "
        "disabled because it failed for long.",
        responses={200: {"model": WebhookView}, **_errors(404)},
    )
    @onceward.guard(f"PATCH /v1{_WEBHOOK}", policy=policy, principal=admin)
    async def change(
        webhook_id: str, webhook: WebhookPatch, tx: Tx, caller: Caller, run: Run
    ) -> Response:
        fields = webhook.model_dump(exclude_unset=True)
        if "url" in fields:
            _check_url(sender, webhook.url)
        values = _about(caller, webhook_id) | {
            "sets_url": "url" in fields,
            "url": fields.get("url"),
            "sets_description": "description" in fields,
            "description": fields.get("description"),
            "sets_events": "events" in fields,
            "events": _joined(fields.get("events")),
            "enables": fields.get("enabled") is True,
            "disables": fields.get("enabled") is False,
            "reason": f"disabled by {caller.actor}",
            "now": onceward.clock.now(),
        }
        row = await tx.fetch_one(webhook_sql("change_webhook"), values)
        if row is None:
            raise _no_webhook()
        run.describe(resource=f"webhook:{webhook_id}")
        return json_response(_webhook_view(row))

    @api.post(
        f"{_WEBHOOK}/rotate",
        summary="Rotate the secret of a webhook",
        operation_id="rotate_webhook_secret",
        description="Returns a new `secret`, which is shown in this response and in replays of it "
        "only. For `overlap_hours` messages are signed with both.",
        responses={200: {"model": WebhookWithSecret}, **_errors(404)},
    )
    @onceward.guard(f"POST /v1{_WEBHOOK}/rotate", policy=policy, principal=admin)
    async def rotate(
        webhook_id: str,
        tx: Tx,
        caller: Caller,
        run: Run,
        rotation: Annotated[Rotation | None, Body()] = None,
    ) -> Response:
        now, secret = onceward.clock.now(), new_secret()
        overlap = timedelta(hours=24 if rotation is None else rotation.overlap_hours)
        values = _about(caller, webhook_id) | {"secret": secret, "until": now + overlap, "now": now}
        row = await tx.fetch_one(webhook_sql("rotate_secret"), values)
        if row is None:
            raise _no_webhook()
        run.describe(resource=f"webhook:{webhook_id}")
        return json_response(_webhook_view(row) | {"secret": secret})


def _add_sending(api: APIRouter, service: AggregateService, admin: Any) -> None:
    onceward, policy = service.onceward, service.policy
    responses: Any = {
        202: {"model": DeliveryView, "headers": {"Location": _LOCATION}},
        **_errors(404, conflict=DISABLED),
    }

    async def accepted(run: Any, delivery: Mapping[str, Any]) -> Response:
        row = await run.statements.fetch_one(webhook_sql("find_delivery"), delivery)
        run.describe(resource=f"delivery:{row['id']}")
        response = json_response(_delivery_view(row))
        response.status_code = 202
        path = f"/v1/webhooks/{row['webhook_id']}/deliveries/{row['id']}"
        response.headers["location"] = path
        return response

    @api.post(
        f"{_WEBHOOK}/test",
        status_code=202,
        summary="Send a test message to a webhook",
        operation_id="test_webhook",
        description="A message of the type `webhook.test`. The path in `Location` shows what "
        "becomes of it.",
        responses=responses,
    )
    @onceward.guard(f"POST /v1{_WEBHOOK}/test", policy=policy, principal=admin)
    async def test(webhook_id: str, tx: Tx, caller: Caller, run: Run) -> Response:
        await check_enabled(tx, _about(caller, webhook_id))
        about = {"tenant": caller.tenant, "webhook_id": webhook_id}
        data = {"organization": caller.tenant, "sent_by": caller.actor}
        now = onceward.clock.now()
        delivery_id = await add_delivery(tx, onceward.enqueue, about, "webhook.test", data, now=now)
        return await accepted(run, about | {"id": delivery_id})

    @api.post(
        f"{_DELIVERY}/resend",
        status_code=202,
        summary="Send a delivery again",
        operation_id="resend_delivery",
        description="With the same `webhook-id` and body, so a receiver that has it ignores it. "
        "One that still waits is not sent twice.",
        responses=responses,
    )
    @onceward.guard(f"POST /v1{_DELIVERY}/resend", policy=policy, principal=admin)
    async def resend(
        webhook_id: str, delivery_id: str, tx: Tx, caller: Caller, run: Run
    ) -> Response:
        values = _about_delivery(caller, webhook_id, delivery_id)
        await send_again(tx, onceward.enqueue, values)
        return await accepted(run, values)


def _add_reads(api: APIRouter, service: AggregateService, admin: Any) -> None:
    store = service.onceward.store
    admin_only = Depends(admin)

    async def find(query: str, values: Mapping[str, Any]) -> Row | None:
        rows = await store.read(webhook_sql(query), values)
        return rows[0] if rows else None

    @api.get(
        "/webhooks",
        summary="List webhooks",
        operation_id="list_webhooks",
        description="Oldest first, without their secrets.",
        response_model=Page[WebhookView],
        responses=LIST,
    )
    async def list_page(
        limit: Limit = 50, after: After = None, caller: Principal = admin_only
    ) -> Response:
        position = read_cursor(after, "webhooks") or ""
        values = {"tenant": caller.tenant, "after": position, "limit": limit + 1}
        rows = await store.read(webhook_sql("list_webhooks"), values)
        return json_response(page(rows, limit, "webhooks", _webhook_view))

    @api.get(
        _WEBHOOK,
        summary="Read a webhook",
        operation_id="read_webhook",
        response_model=WebhookView,
        responses=errors(401, 403, 404, 503),
    )
    async def read_one(webhook_id: str, caller: Principal = admin_only) -> Response:
        row = await find("find_webhook", _about(caller, webhook_id))
        if row is None:
            raise _no_webhook()
        return json_response(_webhook_view(row))

    @api.get(
        f"{_WEBHOOK}/deliveries",
        summary="List the deliveries to a webhook",
        operation_id="list_deliveries",
        description="Newest first. They are kept for 30 days, or as long as the operator has set.",
        response_model=Page[DeliveryView],
        responses=LIST,
    )
    async def list_deliveries(
        webhook_id: str,
        *,
        limit: Limit = 50,
        after: After = None,
        state: Annotated[
            DeliveryState | None, Query(description="Only deliveries in this state.")
        ] = None,
        caller: Principal = admin_only,
    ) -> Response:
        before = read_cursor(after, "deliveries") or _AFTER_ALL_IDS
        if await find("find_webhook", _about(caller, webhook_id)) is None:
            raise _no_webhook()
        values: dict[str, Any] = {
            "tenant": caller.tenant,
            "webhook_id": webhook_id,
            "before": before,
            "limit": limit + 1,
        }
        if state is None:
            rows = await store.read(webhook_sql("list_deliveries"), values)
        else:
            values["state"] = state
            rows = await store.read(webhook_sql("list_deliveries_by_state"), values)
        return json_response(page(rows, limit, "deliveries", _delivery_view))

    @api.get(
        _DELIVERY,
        summary="Read a delivery with its attempts",
        operation_id="read_delivery",
        response_model=DeliveryDetail,
        responses=errors(401, 403, 404, 503),
    )
    async def read_delivery(
        webhook_id: str, delivery_id: str, caller: Principal = admin_only
    ) -> Response:
        row = await find("find_delivery", _about_delivery(caller, webhook_id, delivery_id))
        if row is None or await find("find_webhook", _about(caller, webhook_id)) is None:
            raise NotFoundError("there is no such delivery")
        values = {"tenant": caller.tenant, "delivery_id": delivery_id, "limit": _ATTEMPTS}
        attempts = await store.read(webhook_sql("list_attempts"), values)
        return json_response(
            _delivery_view(row)
            | {
                "next_attempt_at": await next_attempt_at(store, caller.tenant, row),
                "message": json.loads(row["body"]),
                "attempt_log": [row_view(each) for each in attempts],
            }
        )


def _check_url(sender: WebhookSender, url: str) -> None:
    """Raise ``FieldNotAllowedError`` for a URL that is refused whatever its name resolves to."""
    try:
        sender.check_url(url)
    except (InvalidUrlError, AddressRefusedError) as error:
        reason = str(error)
        raise FieldNotAllowedError(
            f"url: {reason}", details={"fields": [{"field": "url", "reason": reason}]}
        ) from None


def _no_webhook() -> NotFoundError:
    return NotFoundError("there is no such webhook")


def _about(caller: Principal, webhook_id: str) -> dict[str, Any]:
    """Return the parameters of a query. Raises ``NotFoundError`` for what cannot be an id."""
    if not is_id(webhook_id):
        raise _no_webhook()
    return {"tenant": caller.tenant, "id": webhook_id}


def _about_delivery(caller: Principal, webhook_id: str, delivery_id: str) -> dict[str, Any]:
    if not is_id(webhook_id) or not is_id(delivery_id):
        raise NotFoundError("there is no such delivery")
    return {"tenant": caller.tenant, "webhook_id": webhook_id, "id": delivery_id}


def _joined(events: list[Any] | None) -> str | None:
    """Return the types of events as they are stored, each once."""
    return None if events is None else ",".join(sorted(set(events)))


def _webhook_view(row: Row) -> dict[str, Any]:
    shown = row_view(row)
    events = shown["events"]
    return {
        "id": shown["id"],
        "url": shown["url"],
        "description": shown["description"],
        "events": None if events is None else events.split(","),
        "enabled": shown["disabled_at"] is None,
        "failing_since": shown["failing_since"],
        "disabled_at": shown["disabled_at"],
        "disabled_reason": shown["disabled_reason"],
        "secret_created_at": shown["secret_created_at"],
        "previous_secret_until": shown["previous_until"],
        "created_by": shown["created_by"],
        "created_at": shown["created_at"],
        "updated_at": shown["updated_at"],
    }


_DELIVERY_FIELDS: Final = (
    "id", "webhook_id", "notification_id", "type", "state", "attempts", "detail", "created_at",
    "finished_at",
)  # fmt: skip


def _delivery_view(row: Row) -> dict[str, Any]:
    return row_view({name: row[name] for name in _DELIVERY_FIELDS})
