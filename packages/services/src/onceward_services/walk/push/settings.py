"""Settings of pushes, ``ONCEWARD_WALK_PUSH…``."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from onceward.errors import ConfigurationError
from onceward_services.walk.push.port import Push
from onceward_services.walk.push.webhook_push import WebhookPush
from onceward_services.webhooks.addresses import parse_networks
from onceward_services.webhooks.http_post import parse_url
from onceward_services.webhooks.settings import WebhookSettings
from onceward_services.webhooks.signature import check_secret

__all__ = ["PushSettings"]


def _check_url(url: str) -> str:
    parse_url(url)
    return url


Url = Annotated[str, AfterValidator(_check_url)]
Secret = Annotated[str, AfterValidator(check_secret)]


class PushSettings(WebhookSettings):
    """Descriptions say what the variable should be; error messages quote them."""

    walk_push: Literal["off", "webhook", "fcm"] = Field("off", description="off, webhook or fcm")
    walk_push_webhook_url: Url | None = Field(
        None, description="an address such as https://example.com/push"
    )
    walk_push_webhook_secret: Secret | None = Field(
        None, description="whsec_ and 24 to 64 random bytes in base64"
    )
    walk_fcm_credentials_file: Path | None = Field(
        None, description="the key file of a service account"
    )
    walk_fcm_url: Url = Field(
        "https://fcm.googleapis.com", description="an address such as https://fcm.googleapis.com"
    )

    @model_validator(mode="after")
    def _check_push(self) -> Self:
        if self.walk_push == "webhook" and (
            self.walk_push_webhook_url is None or self.walk_push_webhook_secret is None
        ):
            raise ConfigurationError(
                "ONCEWARD_WALK_PUSH=webhook needs ONCEWARD_WALK_PUSH_WEBHOOK_URL and "
                "ONCEWARD_WALK_PUSH_WEBHOOK_SECRET"
            )
        if self.walk_push == "fcm" and self.walk_fcm_credentials_file is None:
            raise ConfigurationError(
                "ONCEWARD_WALK_PUSH=fcm needs ONCEWARD_WALK_FCM_CREDENTIALS_FILE"
            )
        return self

    def create_push(self) -> Push | None:
        """Return the adapter that is set; None if pushes are off. Raises ``ConfigurationError``."""
        if self.walk_push == "fcm" and self.walk_fcm_credentials_file is not None:
            # Here, because most commands read the settings and need neither JWTs nor FCM.
            from onceward_services.walk.push.fcm_push import (  # noqa: PLC0415
                FcmPush,
                load_service_account,
            )

            return FcmPush(
                load_service_account(self.walk_fcm_credentials_file),
                url=self.walk_fcm_url,
                timeout_seconds=self.webhook_timeout_seconds,
                allowed=parse_networks(self.webhook_allowed_networks or ""),
            )
        url, secret = self.walk_push_webhook_url, self.walk_push_webhook_secret
        if self.walk_push == "webhook" and url is not None and secret is not None:
            return WebhookPush(self.webhook_sender(), url=url, secret=secret)
        return None
