"""Push by a signed webhook to the app's own gateway, which knows how to reach devices."""

from datetime import datetime

from onceward_services.walk.push.port import PushMessage
from onceward_services.webhooks.sender import Outcome, WebhookSender

__all__ = ["WebhookPush"]


class WebhookPush:
    """Sends each message to one URL. The gateway responds 404 or 410 for an unknown device."""

    def __init__(self, sender: WebhookSender, *, url: str, secret: str) -> None:
        self._sender = sender
        self._url = url
        self._secret = secret

    async def send(self, message: PushMessage, now: datetime) -> Outcome:
        """Send one message."""
        event = message.event
        body = {
            "type": event.type,
            "timestamp": event.created_at.isoformat(),
            "data": {
                "walkerId": message.walker,
                "device": {"platform": message.platform, "token": message.token},
                "event": {"id": event.seq, "data": event.data},
            },
        }
        return await self._sender.send(
            self._url, [self._secret], body, message_id=message.id, now=now
        )
