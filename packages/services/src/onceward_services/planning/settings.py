"""Settings of planning, ``ONCEWARD_PLANNING_…``: part of the server's ``Settings``."""

from pydantic import Field

from onceward_services.webhooks.addresses import parse_networks
from onceward_services.webhooks.sender import WebhookSender
from onceward_services.webhooks.settings import Networks, WebhookSettings

__all__ = ["PlanningSettings"]


class PlanningSettings(WebhookSettings):
    """Descriptions say what the variable should be; error messages quote them."""

    planning_cache_bytes: int = Field(
        16 * 1024 * 1024, ge=0, le=2**40, description="a whole number of bytes"
    )
    planning_roles_required: bool = Field(default=False, description="true or false")
    planning_notifications_streams: int = Field(
        10, ge=0, le=1_000_000, description="a whole number, or 0 for no limit"
    )
    # Few: a receiver that hangs holds a worker for the time-out of each attempt.
    planning_webhooks: int = Field(
        5, ge=0, le=1000, description="a whole number of webhooks from 0 to 1000"
    )
    # Of organizations: not those that the operator's own receivers are in.
    planning_webhook_allowed_networks: Networks | None = Field(
        None, description="a comma-separated list of networks, such as 10.1.0.0/16,127.0.0.1"
    )
    planning_webhook_gone_hours: float = Field(
        24.0, ge=0, le=8760, description="a number of hours from 0 to 8760"
    )
    planning_webhook_failing_hours: float = Field(
        120.0, ge=0, le=8760, description="a number of hours from 0 to 8760"
    )
    planning_delivery_retention_days: float = Field(
        30.0,
        ge=0,
        le=36_500,
        allow_inf_nan=False,
        description="a number of days, such as 30, or 0 to keep everything",
    )

    def planning_webhook_sender(self) -> WebhookSender:
        """Return a sender of the webhooks of organizations."""
        return WebhookSender(
            timeout_seconds=self.webhook_timeout_seconds,
            allowed=parse_networks(self.planning_webhook_allowed_networks or ""),
        )
