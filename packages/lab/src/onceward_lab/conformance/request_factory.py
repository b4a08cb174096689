"""Creates requests from a template, or for the walk service from the progress of the walker."""

import secrets
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from onceward_lab.conformance.harness import (
    CheckFailedError,
    CheckSkippedError,
    Harness,
    Request,
    unique,
)
from onceward_lab.conformance.profile import Profile, RequestTemplate

__all__ = ["TemplateRequests", "WalkRequests", "timestamp"]


class TemplateRequests:
    """Requests from the templates of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    async def new_request(self, harness: Harness, text: str | None = None) -> Request:
        """Return the template with new random values, or with this text."""
        del harness
        return _request(self._profile.request, text)

    def other_request(self) -> Request | None:
        """Return the second tenant's template with new random values."""
        template = self._profile.other_request
        return None if template is None else _request(template)


class WalkRequests:
    """Advances quests step by step; starts and completes them as needed."""

    def other_request(self) -> None:
        """Return None: every walker may send the same request."""

    async def new_request(self, harness: Harness, text: str | None = None) -> Request:
        """Return the next possible step of the walker; its body has no text."""
        response = await harness.request("GET", "/quest/available")
        if not response.is_success:
            raise CheckFailedError(f"GET /quest/available got {response.summary()}")
        quests = response.document().get("quests", [])
        for quest in sorted(quests, key=lambda quest: quest["status"] != "in_progress"):
            if quest["status"] == "in_progress" and quest["currentStep"] > quest["steps"]:
                body = {"questId": quest["questId"], "clientGeneratedAt": timestamp()}
                await harness.request("POST", "/quest/complete", body, key=str(uuid4()))
                return await self.new_request(harness, text)
            if quest["status"] == "in_progress":
                return _advance(quest["questId"], quest["currentStep"])
        for quest in quests:
            body = {"questId": quest["questId"]}
            if quest["status"] == "available":
                started = await harness.request("POST", "/quest/start", body, key=str(uuid4()))
                if started.is_success:
                    return _advance(quest["questId"], 1)
        raise CheckSkippedError(
            "this walker has completed every quest: use --secret or another token"
        )


def timestamp(ago: timedelta = timedelta()) -> str:
    """Return the time ``ago`` before now, in the format of the devices."""
    return (datetime.now(UTC) - ago).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _advance(quest: str, step: int) -> Request:
    return Request(
        method="POST",
        path=f"/quest/{quest}/step/{step}/advance",
        body={"clientGeneratedAt": timestamp()},
        other_body={"clientGeneratedAt": timestamp(timedelta(seconds=1))},
    )


def _request(template: RequestTemplate, text: str | None = None) -> Request:
    # Small: it may be a price or an amount.
    number = 1 + secrets.randbelow(1_000_000)
    return Request(
        method=template.method,
        path=template.path,
        headers=template.headers,
        body=_filled(template.body, text or unique(), number),
        other_body=_filled(template.body, unique(), number + 1),
    )


def _filled(value: Any, text: str, number: int) -> Any:
    """Replace the placeholders in all strings of a value."""
    if value == "{unique_number}":
        return number
    if isinstance(value, str):
        value = value.replace("{unique_number}", str(number))
        return value.replace("{unique}", text).replace("{now}", timestamp())
    if isinstance(value, dict):
        return {name: _filled(inner, text, number) for name, inner in value.items()}
    return [_filled(inner, text, number) for inner in value] if isinstance(value, list) else value
