"""Reviews and devices in the console: shown by tenant, resolved once, with an audit event."""

import asyncio
from typing import Any

import pytest

from packages.services.tests.conftest import Serve
from packages.services.tests.support.operator_browser import OperatorBrowser, links

from .fixtures import Game, OpenGame, new_key, opener
from .step_fixtures import Stepping, stepping
from .test_reviews import cheat, quarantine

OPERATORS: dict[str, Any] = {"console_enabled": True, "console_operators": "boss"}


async def signed_in(steps: Stepping | Game, sub: str, *roles: str) -> OperatorBrowser:
    return await OperatorBrowser(steps.client).sign_in(sub, *roles, now=steps.clock.now())


async def test_review_is_listed_shown_with_evidence_and_resolved(open_game: OpenGame) -> None:
    async with stepping(open_game, **OPERATORS) as steps:
        review_id = await quarantine(steps)
        boss = await signed_in(steps, "boss", "admin")
        listed = await boss.get("reviews")
        (path,) = links(listed, "reviews/")
        assert review_id in path
        shown = await boss.get(path)
        assert "5,000" in shown.text
        assert "3,000" in shown.text
        assert "accepted" in shown.text
        done = await boss.post(
            f"reviews/{review_id}/resolve", decision="accept", accepted_count="4000", reason="seen"
        )
        assert done.status_code == 200
        assert "resolved: accept" in done.text
        (row,) = await steps.game.rows("SELECT * FROM walk_reviews")
        assert (row["status"], row["decision"], row["note"]) == ("resolved", "accept", "seen")
        assert row["resolved_by"] == "boss via console"
        (day,) = await steps.game.rows("SELECT accepted_count, status FROM step_logs")
        assert (day["accepted_count"], day["status"]) == (4000, "ACCEPTED")
        (audit,) = await steps.game.rows(
            "SELECT * FROM onceward_audit_events WHERE resource = :resource",
            resource=f"review:{review_id}",
        )
        assert (audit["tenant"], audit["actor"], audit["reason"]) == (
            "ada",
            "boss via console",
            "seen",
        )


async def test_two_admins_resolve_a_review_once(open_game: OpenGame) -> None:
    async with stepping(open_game, **OPERATORS) as steps:
        review_id = await quarantine(steps)
        browsers = [await signed_in(steps, "boss", "admin") for _ in range(2)]
        found = await asyncio.gather(
            *(
                browser.post(f"reviews/{review_id}/resolve", decision="reject", reason="odd")
                for browser in browsers
            )
        )
        assert sorted(page.status_code for page in found) == [200, 400]
        assert any("resolved already" in page.text for page in found)
        audits = await steps.game.rows(
            "SELECT id FROM onceward_audit_events WHERE resource = :resource",
            resource=f"review:{review_id}",
        )
        assert len(audits) == 1


async def test_suspension_by_the_console_refuses_the_walker(open_game: OpenGame) -> None:
    async with stepping(open_game, **OPERATORS) as steps:
        review_id = await quarantine(steps)
        boss = await signed_in(steps, "boss", "admin")
        await boss.post(f"reviews/{review_id}/resolve", decision="suspend", reason="a script")
        refused = await steps.report()
        assert refused.json()["error"] == "WALKER_SUSPENDED"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decision": "forgive", "reason": "x"}, "decision"),
        ({"decision": "accept", "reason": ""}, "Say why"),
        ({"decision": "reject", "accepted_count": "1", "reason": "x"}, "acceptedCount"),
        ({"decision": "accept", "accepted_count": "-1", "reason": "x"}, "whole number"),
        ({"decision": "accept", "accepted_count": "200000", "reason": "x"}, "at most"),
    ],
)
async def test_resolution_with_wrong_fields_changes_nothing(
    serve: Serve, sqlite_url: str, fields: dict[str, str], message: str
) -> None:
    async with stepping(opener(serve, sqlite_url), **OPERATORS) as steps:
        review_id = await quarantine(steps)
        boss = await signed_in(steps, "boss", "admin")
        page = await boss.post(f"reviews/{review_id}/resolve", **fields)
        assert page.status_code == 400
        assert message in page.text
        assert [each["status"] for each in await steps.reviews()] == ["open"]


async def test_operator_without_the_role_admin_cannot_resolve(open_game: OpenGame) -> None:
    async with stepping(open_game, **OPERATORS) as steps:
        review_id = await quarantine(steps)
        boss = await signed_in(steps, "boss", "operator")
        assert "Resolve this review" not in (await boss.get(f"reviews/{review_id}")).text
        page = await boss.post(f"reviews/{review_id}/resolve", decision="accept", reason="x")
        assert page.status_code == 403
        assert [each["status"] for each in await steps.reviews()] == ["open"]


async def test_walker_sees_and_resolves_nothing_of_another(open_game: OpenGame) -> None:
    async with stepping(open_game, **OPERATORS) as steps:
        await cheat(steps, 5)
        (review,) = await steps.reviews()
        await steps.game.ada.post(
            "/walker/devices", {"platform": "web", "token": "push-token"}, key=new_key()
        )
        eve = await signed_in(steps, "eve", "admin")
        for path in (
            "reviews",
            "reviews?tenant=ada",
            f"reviews/{review['id']}",
            f"reviews/{review['id']}?tenant=ada",
            f"reviews/{review['id']}?tenant=eve",
            "devices",
            "devices?tenant=ada",
            "devices?after=%1F",
        ):
            page = await eve.get(path)
            assert review["id"] not in page.text.replace(path, ""), path
            assert "ada" not in page.text, path
        for tenant in ("ada", "eve", ""):
            refused = await eve.post(
                f"reviews/{review['id']}/resolve", decision="accept", reason="mine", tenant=tenant
            )
            assert refused.status_code == 404
        assert [each["status"] for each in await steps.reviews()] == ["open"]


async def test_evidence_is_hidden_from_viewers(open_game: OpenGame) -> None:
    async with stepping(open_game, **OPERATORS) as steps:
        review_id = await quarantine(steps)
        seen = await (await signed_in(steps, "boss", "admin")).get(f"reviews/{review_id}")
        hidden = await (await signed_in(steps, "boss", "viewer")).get(f"reviews/{review_id}")
        assert "<pre" in seen.text
        assert "<pre" not in hidden.text
        assert "Hidden." in hidden.text


async def test_devices_are_listed_without_their_tokens(open_game: OpenGame) -> None:
    async with open_game(**OPERATORS) as game:
        for name in ("ada", "bob"):
            body = {"platform": "ios", "token": f"secret-token-of-{name}"}
            await game.device(name).post("/walker/devices", body, key=new_key())
        boss = await signed_in(game, "boss", "viewer")
        page = await boss.get("devices")
        assert page.status_code == 200
        assert page.text.count("<code>") == 2
        assert "secret-token" not in page.text
        assert (await boss.get("devices?tenant=bob")).text.count("<code>") == 1


async def test_reviews_are_paged_without_loss(serve: Serve, sqlite_url: str) -> None:
    rows = [
        f"('w{n:03}', '0190163d-8694-739b-aea5-{n:012x}', 'anti_cheat', '', '[]', 'open',"
        " '2026-05-22T12:00:00.000000Z')"
        for n in range(120)
    ]
    async with opener(serve, sqlite_url)(**OPERATORS) as game:
        await game.store.write(
            "INSERT INTO walk_reviews (tenant, id, kind, day, reasons, status, opened_at) VALUES "
            + ", ".join(rows)
            + " RETURNING id"
        )
        boss, found, path = await signed_in(game, "boss", "viewer"), list[str](), "reviews"
        while path:
            page = await boss.get(path)
            found += links(page, "reviews/")
            following = [each for each in links(page, "reviews") if "after=" in each]
            path = following[0] if following else ""
        assert len(found) == len(set(found)) == 120
        own = await (await signed_in(game, "w007", "viewer")).get("reviews")
        assert len(links(own, "reviews/")) == 1
