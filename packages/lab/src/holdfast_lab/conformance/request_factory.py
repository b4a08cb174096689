"""Thinks of things to do: from a template, or for walk from how far the walker is."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from holdfast_lab.conformance.harness import Action, Kit, NotCheckedError, UnmetError, unique
from holdfast_lab.conformance.profile import RequestTemplate

__all__ = ["TemplateActions", "WalkActions", "instant"]


class TemplateActions:
    """The same request again and again, with something unique in it."""

    def __init__(self, template: RequestTemplate) -> None:
        """Take the template."""
        self._template = template

    async def fresh(self, kit: Kit) -> Action:
        """Return a request nobody has sent."""
        del kit
        template = self._template
        return Action(
            method=template.method,
            path=template.path,
            headers=template.headers,
            body=_filled(template.body, unique()),
            other_body=_filled(template.body, unique()),
        )


class WalkActions:
    """The next step of a quest. A quest is begun and completed as needed."""

    async def fresh(self, kit: Kit) -> Action:
        """Return the next step the walker can do."""
        answer = await kit.ask("GET", "/quest/available")
        if not answer.is_success:
            raise UnmetError(f"GET /quest/available got {answer.told()}")
        quests = answer.document().get("quests", [])
        for quest in sorted(quests, key=lambda quest: quest["status"] != "in_progress"):
            if quest["status"] == "in_progress" and quest["currentStep"] > quest["steps"]:
                body = {"questId": quest["questId"], "clientGeneratedAt": instant()}
                await kit.ask("POST", "/quest/complete", body, key=str(uuid4()))
                return await self.fresh(kit)
            if quest["status"] == "in_progress":
                return _advance(quest["questId"], quest["currentStep"])
        for quest in quests:
            body = {"questId": quest["questId"]}
            if quest["status"] == "available":
                started = await kit.ask("POST", "/quest/start", body, key=str(uuid4()))
                if started.is_success:
                    return _advance(quest["questId"], 1)
        raise NotCheckedError("this walker has done every quest: use --secret or another token")


def instant(back: timedelta = timedelta()) -> str:
    """Return an instant so long ago, as devices write it."""
    return (datetime.now(UTC) - back).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _advance(quest: str, step: int) -> Action:
    return Action(
        method="POST",
        path=f"/quest/{quest}/step/{step}/advance",
        body={"clientGeneratedAt": instant()},
        other_body={"clientGeneratedAt": instant(timedelta(seconds=1))},
    )


def _filled(value: Any, text: str) -> Any:
    """Return the template's body with what stands for something in it."""
    if isinstance(value, str):
        return value.replace("{unique}", text).replace("{now}", instant())
    if isinstance(value, dict):
        return {name: _filled(inner, text) for name, inner in value.items()}
    return [_filled(inner, text) for inner in value] if isinstance(value, list) else value
