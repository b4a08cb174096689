"""HTTP routes of devices."""

import re
from datetime import datetime
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Path, Response
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from onceward import Onceward
from onceward.errors import NotFoundError
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward_services.auth import CurrentPrincipal
from onceward_services.routing import service_router
from onceward_services.settings import Settings
from onceward_services.walk.body_key import check_key_in_body
from onceward_services.walk.documentation import documented, envelope_errors
from onceward_services.walk.model import OptionalTimes, View
from onceward_services.walk.push import devices

__all__ = ["router"]

_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _check_visible(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("should have visible ASCII characters only")
    return token


def _text(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("text", "should be a string")
    return value


Token = Annotated[
    str,
    Field(min_length=1, max_length=4096, examples=["fcm-registration-token"]),
    AfterValidator(_check_visible),
]
DeviceId = Annotated[str, Path(examples=["6b1d2a3c-0000-4000-8000-000000000000"])]


class Registration(OptionalTimes):
    """A device that gets pushes: its registration token."""

    platform: Annotated[Literal["android", "ios", "web"], BeforeValidator(_text)]
    token: Token


class DeviceView(View):
    """A registered device. The token is not shown."""

    id: str
    platform: Literal["android", "ios", "web"]
    registered_at: datetime


class DeviceList(View):
    """The devices of a walker."""

    items: list[DeviceView]
    next: None = None


def router(onceward: Onceward, settings: Settings) -> APIRouter:
    """Build the routes of devices."""
    api = service_router("walk", prefix="/walker/devices")
    # About the device and not about an action of the walker: it is never too late.
    policy = settings.policies().walk.replace(staleness=None)

    @api.get("", summary="List devices", responses=envelope_errors(401, 503))
    async def listed(caller: CurrentPrincipal) -> DeviceList:
        found = await devices.list_devices(onceward.store, caller.tenant)
        return DeviceList(items=[_view(device) for device in found])

    @api.post(
        "",
        status_code=201,
        summary="Register a device",
        **documented(
            "Registers a device for pushes. The same token is the same device; one that another "
            "walker has registered moves to the caller.",
            "TOO_MANY_DEVICES",
            "WALKER_BEING_DELETED",
        ),
    )
    @onceward.guard("walker.devices.register", policy=policy)
    async def register(
        wanted: Registration, tx: Tx, caller: Caller, run: Run, response: Response
    ) -> DeviceView:
        check_key_in_body(run, wanted.idempotency_key)
        device = await devices.register(
            tx,
            caller.tenant,
            platform=wanted.platform,
            token=wanted.token,
            now=onceward.clock.now(),
            on_sqlite=onceward.store.name == "sqlite",
        )
        run.describe(resource=f"device:{device.id}")
        response.headers["Location"] = f"/walker/devices/{device.id}"
        return _view(device)

    @api.delete(
        "/{device_id}", status_code=204, summary="Remove a device", responses=envelope_errors(404)
    )
    @onceward.guard("walker.devices.remove", policy=policy)
    async def remove(device_id: DeviceId, tx: Tx, caller: Caller, run: Run) -> None:
        known = _ID.fullmatch(device_id) is not None
        if not known or not await devices.remove(tx, caller.tenant, device_id):
            raise NotFoundError("there is no such device")
        run.describe(resource=f"device:{device_id}")

    return api


def _view(device: devices.Device) -> DeviceView:
    return DeviceView.model_validate(
        {
            "id": device.id,
            "platform": device.platform,
            "registered_at": device.registered_at,
        }
    )
