"""The console is closed: sessions, roles, forms, headers."""

import asyncio
from datetime import timedelta

import pytest

from onceward_operator.console import console
from onceward_operator.console.access import Operator, Role
from onceward_operator.console.sessions import Sessions
from packages.operator.tests.console.lab import Browser, ConsoleLab

PATHS = ("", "records", "records/show", "requests/x", "trace/x", "find?q=x", "events", "nothing")


@pytest.mark.parametrize("path", PATHS)
async def test_page_without_a_session_leads_to_the_sign_in(
    sqlite_lab: ConsoleLab, path: str
) -> None:
    async with sqlite_lab.client() as client:
        response = await client.get(f"/console/{path}")
        assert response.status_code == 303
        assert response.headers["location"].startswith("/console/sign-in")
        assert response.text == ""


async def test_action_without_a_session_does_nothing(sqlite_lab: ConsoleLab) -> None:
    order = await sqlite_lab.order("bob")
    assert order.status_code == 201
    async with sqlite_lab.client() as client:
        response = await client.post("/console/records/remove", data={"tenant": "bob"})
        assert response.status_code == 303
        assert response.headers["location"] == "/console/sign-in"


@pytest.mark.parametrize("roles", [(), ("walker",), ("Admin",)])
async def test_token_without_a_role_of_the_console_is_refused(
    sqlite_lab: ConsoleLab, roles: tuple[str, ...]
) -> None:
    async with sqlite_lab.client() as client:
        response = await Browser(client).sign_in(sqlite_lab.token("bob", *roles))
        assert response.status_code == 403
        assert "set-cookie" not in response.headers
        assert "needs the role" in response.text


@pytest.mark.parametrize("token", ["", "x", "a.b.c", "ü", "a b", "x" * 20_000])
async def test_invalid_token_is_refused_without_a_session(
    sqlite_lab: ConsoleLab, token: str
) -> None:
    async with sqlite_lab.client() as client:
        response = await Browser(client).sign_in(token)
        assert response.status_code == 403
        assert "set-cookie" not in response.headers


async def test_expired_token_is_refused(sqlite_lab: ConsoleLab) -> None:
    async with sqlite_lab.client() as client:
        response = await Browser(client).sign_in(sqlite_lab.token("bob", "viewer", seconds=-5))
        assert response.status_code == 403


async def test_cookie_is_for_the_console_only(sqlite_lab: ConsoleLab) -> None:
    async with sqlite_lab.client() as client:
        response = await Browser(client).sign_in(sqlite_lab.token("bob", "viewer"))
        cookie = response.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/console/" in cookie


async def test_cookie_is_secure_over_https(sqlite_lab: ConsoleLab) -> None:
    async with sqlite_lab.client() as client:
        client.base_url = "https://shop.test"
        response = await Browser(client).sign_in(sqlite_lab.token("bob", "viewer"))
        assert "secure" in response.headers["set-cookie"].lower()


async def test_session_id_sent_by_the_browser_is_not_taken_over(sqlite_lab: ConsoleLab) -> None:
    async with sqlite_lab.client() as client:
        client.cookies.set("onceward_console", "chosen-by-an-attacker", path="/console/")
        response = await Browser(client).sign_in(sqlite_lab.token("bob", "viewer"))
        assert "chosen-by-an-attacker" not in response.headers["set-cookie"]
        client.cookies.clear()
        client.cookies.set("onceward_console", "chosen-by-an-attacker", path="/console/")
        assert (await client.get("/console/records")).status_code == 303


async def test_signing_in_again_ends_the_session_before(sqlite_lab: ConsoleLab) -> None:
    async with sqlite_lab.browser("bob", "viewer") as browser:
        before = browser.client.cookies["onceward_console"]
        await browser.sign_in(sqlite_lab.token("bob", "viewer"))
        browser.client.cookies.clear()
        browser.client.cookies.set("onceward_console", before, path="/console/")
        assert (await browser.client.get("/console/records")).status_code == 303


async def test_sign_out_ends_the_session_on_the_server(lab: ConsoleLab) -> None:
    async with lab.browser("bob", "viewer") as browser:
        cookie = browser.client.cookies["onceward_console"]
        assert (await browser.post("sign-out")).status_code == 303
        browser.client.cookies.clear()
        browser.client.cookies.set("onceward_console", cookie, path="/console/")
        assert (await browser.client.get("/console/records")).status_code == 303


async def test_form_without_its_token_is_refused(sqlite_lab: ConsoleLab) -> None:
    order = await sqlite_lab.order(
        "ada", **{"idempotency-key": "0d4ef91f-91ab-4b3e-b3aa-7d8a64a45e4d"}
    )
    assert order.status_code == 201
    async with sqlite_lab.browser("ada", "admin") as browser:
        form = {
            "tenant": "ada",
            "endpoint": "POST /orders/{shop}",
            "key": "0d4ef91f-91ab-4b3e-b3aa-7d8a64a45e4d",
            "reason": "test",
        }
        for token in ({}, {"form_token": ""}, {"form_token": "x" * 43}):
            response = await browser.client.post("/console/records/remove", data=form | token)
            assert response.status_code == 403
        found = await browser.get("records")
        assert "0d4ef91f" in found.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.test"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_form_of_another_site_is_refused(
    sqlite_lab: ConsoleLab, headers: dict[str, str]
) -> None:
    async with sqlite_lab.client() as client:
        form = {"token": sqlite_lab.token("bob", "viewer")}
        response = await client.post("/console/sign-in", data=form, headers=headers)
        assert response.status_code == 403
        assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "to",
    ["https://evil.test/", "//evil.test", "/\\evil.test", "\\evil.test", "javascript:alert(1)",
     "../../x", "records\r\nset-cookie: a=b"],
)  # fmt: skip
async def test_sign_in_never_leads_to_another_site(sqlite_lab: ConsoleLab, to: str) -> None:
    async with sqlite_lab.client() as client:
        response = await Browser(client).sign_in(sqlite_lab.token("bob", "viewer"), to)
        assert response.headers["location"] == "/console/"


async def test_session_ends_with_the_token(lab: ConsoleLab) -> None:
    await lab.onceward.runtime.ready()
    sessions = Sessions(lab.onceward.store, lab.onceward.clock, idle_seconds=99, max_seconds=99)
    soon = lab.onceward.clock.now() + timedelta(seconds=0.2)
    operator = Operator(subject="bob", role=Role.VIEWER, tenants=("bob",), expires_at=soon)
    session = await sessions.begin(operator)
    assert await sessions.find(session.secret or "") is not None
    await asyncio.sleep(0.25)
    assert await sessions.find(session.secret or "") is None


async def test_session_ends_when_it_is_not_used(lab: ConsoleLab) -> None:
    await lab.onceward.runtime.ready()
    sessions = Sessions(lab.onceward.store, lab.onceward.clock, idle_seconds=0, max_seconds=99)
    operator = Operator(subject="bob", role=Role.VIEWER, tenants=("bob",))
    session = await sessions.begin(operator)
    assert await sessions.find(session.secret or "") is None


async def test_table_of_sessions_does_not_contain_the_cookie(lab: ConsoleLab) -> None:
    async with lab.browser("bob", "viewer") as browser:
        cookie = browser.client.cookies["onceward_console"]
        rows = await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT * FROM onceward_console_sessions")
        )
        assert len(rows) == 1
        assert cookie not in str(dict(rows[0]))


async def test_every_response_has_the_security_headers(sqlite_lab: ConsoleLab) -> None:
    async with sqlite_lab.browser("ada", "admin") as browser:
        for path in ("", "records", "nothing", "sign-in", "static/console.css", "static/no"):
            response = await browser.get(path)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert response.headers["x-frame-options"] == "DENY"
            assert response.headers["x-content-type-options"] == "nosniff"


async def test_console_of_an_app_has_only_the_pages_for_the_role(sqlite_lab: ConsoleLab) -> None:
    order = await sqlite_lab.order(
        "bob", **{"idempotency-key": "2f1ab5be-32a4-4b6e-9a1c-1a2a3b4c5d6e"}
    )
    assert order.status_code == 201
    fields = {
        "tenant": "bob",
        "endpoint": "POST /orders/{shop}",
        "key": "2f1ab5be-32a4-4b6e-9a1c-1a2a3b4c5d6e",
    }
    async with sqlite_lab.browser("bob", "operator") as browser:
        page = await browser.get("records/show", params=fields)
        assert page.status_code == 200
        assert "Remove this record" not in page.text
        response = await browser.post("records/remove", reason="test", **fields)
        assert response.status_code == 403


async def test_viewer_does_not_see_payloads(sqlite_lab: ConsoleLab) -> None:
    order = await sqlite_lab.order("bob", "/orders/mill?item=secret-hat")
    fields = {"q": order.headers["x-request-id"]}
    async with sqlite_lab.browser("bob", "viewer") as browser:
        page = await browser.get("find", params=fields)
        assert "Stored response" in page.text
        assert "secret-hat" not in page.text
    async with sqlite_lab.browser("bob", "operator") as browser:
        page = await browser.get("find", params=fields)
        assert "secret-hat" in page.text


def test_access_has_no_default() -> None:
    with pytest.raises(TypeError, match="access"):
        console(None)  # type: ignore[call-arg, arg-type]
