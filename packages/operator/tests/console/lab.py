"""An app with a console on a real database, and browsers of its operators."""

import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException

from onceward import Onceward
from onceward.sign_in.jwt_auth import JwtIdentify, mint_token
from onceward_operator.console import Page, TokenAccess, console

SECRET = "a secret of tests, long enough for HS256"


class ConsoleLab:
    """The app. ``browser`` signs an operator in, ``order`` sends a guarded request."""

    def __init__(self, url: str, pages: tuple[Page, ...] = ()) -> None:
        identify = JwtIdentify(secret=SECRET)
        self.onceward: Onceward[Any] = Onceward(url, identify=identify)
        self.app = FastAPI()
        self.onceward.install(self.app)

        @self.app.post("/orders/{shop}", status_code=201)
        @self.onceward.guard()
        async def order(shop: str, item: str = "boots") -> dict[str, str]:
            if item == "none":
                raise HTTPException(422, "there is no such item")
            if item == "private":
                raise HTTPException(403, "not for you")
            if item == "broken":
                raise RuntimeError("the stock cannot be read")
            if item == "job":
                await self.onceward.enqueue("parcel", {"shop": shop}, resource_id=shop)
            return {"shop": shop, "item": item}

        access = TokenAccess(identify, operators={"ada"})
        self.console = console(self.onceward, access=access, pages=pages)
        self.app.mount("/console", self.console)

    def token(self, sub: str, *roles: str, seconds: float = 3600) -> str:
        lifetime = timedelta(seconds=seconds)
        return mint_token(SECRET, sub=sub, roles=roles, lifetime=lifetime, now=datetime.now(UTC))

    def client(self, **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://shop.test", **options)

    async def order(
        self, sub: str, path: str = "/orders/mill", **headers: str | None
    ) -> httpx.Response:
        """Send a guarded request; a header that is None is left out."""
        sent = {"authorization": f"Bearer {self.token(sub)}", "idempotency-key": str(uuid.uuid4())}
        wanted = {name: value for name, value in (sent | headers).items() if value is not None}
        async with self.client() as client:
            return await client.post(path, headers=wanted)

    @asynccontextmanager
    async def browser(self, sub: str, *roles: str) -> AsyncIterator["Browser"]:
        async with self.client() as client:
            browser = Browser(client)
            response = await browser.sign_in(self.token(sub, *roles))
            assert response.status_code == 303, response.text
            yield browser


class Browser:
    """A browser: keeps the cookie, sends forms with their token."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def sign_in(self, token: str, to: str = "") -> httpx.Response:
        form = {"token": token, "to": to}
        return await self.client.post("/console/sign-in", data=form)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(f"/console/{path}", follow_redirects=True, **options)

    async def post(self, path: str, /, **fields: str) -> httpx.Response:
        """Send a form as a page of the console does."""
        page = await self.get("records")
        found = re.search(r'name="form_token" value="([^"]+)"', page.text)
        assert found is not None
        return await self.client.post(
            f"/console/{path}",
            data={"form_token": unescape(found[1]), **fields},
            headers={"origin": "http://shop.test"},
        )
