"""Settings of requests to servers of others, ``ONCEWARD_WEBHOOK_…``."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from onceward_services.webhooks.addresses import parse_networks
from onceward_services.webhooks.sender import WebhookSender

__all__ = ["Networks", "WebhookSettings"]


def _check_networks(text: str) -> str:
    parse_networks(text)
    return text


Networks = Annotated[str, AfterValidator(_check_networks)]


class WebhookSettings(BaseModel):
    """Descriptions say what the variable should be; error messages quote them."""

    webhook_timeout_seconds: float = Field(
        10.0, gt=0, le=60, description="a number of seconds above 0, at most 60"
    )
    webhook_allowed_networks: Networks | None = Field(
        None, description="a comma-separated list of networks, such as 10.1.0.0/16,127.0.0.1"
    )

    def webhook_sender(self) -> WebhookSender:
        """Return a sender with these settings."""
        return WebhookSender(
            timeout_seconds=self.webhook_timeout_seconds,
            allowed=parse_networks(self.webhook_allowed_networks or ""),
        )
