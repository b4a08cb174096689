"""With ONCEWARD_WALK_ORDERING=strict the actions of a device are numbered."""

from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward_services.settings import load_settings
from onceward_services.walk.outbox_profile import PROFILE, STRICT_PROFILE

from .fixtures import OpenGame, new_key


async def test_actions_are_numbered_if_the_setting_says_so(open_game: OpenGame) -> None:
    async with open_game(walk_ordering="strict") as game:
        ada = game.ada

        async def post(path: str, number: int, key: str = "", **body: Any) -> Any:
            headers = {"X-Client-ID": "phone", "X-Sequence": str(number)}
            sent = ada.times() | body
            return await ada.post(path, sent, key=key or new_key(), headers=headers)

        assert (await ada.start("quest.001")).status_code == 200  # no action of the queue
        key = new_key()
        step = "/quest/quest.001/step/1/advance"
        unnumbered = await ada.post(step, ada.times(), key=key)
        assert (unnumbered.status_code, unnumbered.json()["error"]) == (400, "BAD_REQUEST")
        assert (await post(step, 1, key)).status_code == 200
        early = await post("/quest/complete", 3, questId="quest.001")
        assert (early.status_code, early.json()["error"]) == (422, "ORDERING_VIOLATION")
        assert early.json()["details"] == {"expected": 2}
        # Refusals are not stored, and leave their number.
        refused = await post("/tree/allocate", 2, allocations=[{"nodeId": "node.even-stride"}])
        assert refused.json()["error"] == "INSUFFICIENT_POINTS"
        assert (await post("/quest/quest.001/step/2/advance", 2)).status_code == 200


async def test_actions_are_not_numbered_by_default(open_game: OpenGame) -> None:
    async with open_game() as game:
        await game.ada.start("quest.001")
        assert (await game.ada.advance("quest.001", 1)).status_code == 200


def test_setting_and_profile_name_the_same_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().policies().walk.ordering == "none"
    monkeypatch.setenv("ONCEWARD_WALK_ORDERING", "strict")
    assert load_settings().policies().walk.ordering == "strict"
    monkeypatch.setenv("ONCEWARD_WALK_ORDERING", "loose")
    with pytest.raises(ConfigurationError, match=r"ONCEWARD_WALK_ORDERING.*none or strict"):
        load_settings()
    for profile in (PROFILE, STRICT_PROFILE):
        assert profile.is_strict_endpoint("/quest/quest.001/step/2/advance")
        assert not profile.is_strict_endpoint("/quest/start")
    assert (PROFILE.numbers_on_demand, STRICT_PROFILE.numbers_on_demand) == (True, False)
