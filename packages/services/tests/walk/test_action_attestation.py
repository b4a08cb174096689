"""App Check tokens of actions, and the device's times in the log lines of requests."""

import logging
from datetime import timedelta
from typing import Any

import pytest

from .fixtures import Game, OpenGame, new_key, ok, refused, text
from .step_fixtures import stepping


async def test_actions_need_a_token_if_the_operator_says_so(open_game: OpenGame) -> None:
    async with stepping(open_game, walk_app_check="actions") as steps:
        ada = steps.game.device()
        times = ada.times()
        actions: list[tuple[str, Any]] = [
            ("/quest/start", {"questId": "quest.001"}),
            ("/quest/quest.001/step/1/advance", times),
            ("/quest/quest.001/step/2/advance", times),
            ("/quest/complete", {"questId": "quest.001"} | times),
            ("/tree/allocate", {"allocations": [{"nodeId": "node.even-stride"}]} | times),
        ]
        spend = ("/energy/spend", {"sink": "craft", "amount": 1} | times)
        stale = {"X-Firebase-AppCheck": steps.token(iat=0)}
        for path, body in [*actions, spend]:
            for headers in ({}, stale, {"X-Firebase-AppCheck": "x"}):
                response = await ada.post(path, body, key=new_key(), headers=headers)
                refused(response, 401, "ATTESTATION_INVALID")
        assert await steps.game.count("walkers") == 0
        for path, body in actions:
            key, token = new_key(), {"X-Firebase-AppCheck": steps.token()}
            first = await ada.post(path, body, key=key, headers=token)
            ok(first)
            # A replay runs nothing, so it needs no token.
            again = await ada.post(path, body, key=key)
            assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
        token = {"X-Firebase-AppCheck": steps.token()}
        response = await ada.post(*spend, key=new_key(), headers=token)
        refused(response, 422, "INSUFFICIENT_ENERGY")


async def test_log_lines_of_requests_have_the_times_of_the_device(
    sqlite_game: Game, caplog: pytest.LogCaptureFixture
) -> None:
    made, sent = sqlite_game.clock.at - timedelta(hours=3), sqlite_game.clock.at
    with caplog.at_level(logging.INFO, "onceward.request"):
        await sqlite_game.ada.allocate("node.x", at=made, clientSubmittedAt=text(sent))
        await sqlite_game.ada.allocate("node.x", at=made)
        await sqlite_game.ada.allocate("node.x", clientGeneratedAt="yesterday\nat noon")
        await sqlite_game.ada.me()
    lines: list[Any] = [r for r in caplog.records if r.message == "request"]
    assert [
        (getattr(line, "client_generated_at", None), getattr(line, "client_submitted_at", None))
        for line in lines
    ] == [
        (made.isoformat(), sent.isoformat()),
        (made.isoformat(), None),
        (None, None),
        (None, None),
    ]
