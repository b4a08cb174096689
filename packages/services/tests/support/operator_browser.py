"""A browser of an operator, signed in to the console of a server under test."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from html import unescape
from typing import Any

import httpx

from onceward.sign_in.jwt_auth import mint_token
from packages.services.tests.conftest import SECRET


class OperatorBrowser:
    """Keeps the cookie of its session, and sends forms with their token."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        # Another client: it has its own cookies and no token in its headers.
        self._client = httpx.AsyncClient(
            transport=client._transport, base_url="http://onceward", follow_redirects=True
        )

    async def sign_in(
        self, sub: str, *roles: str, org: str | None = None, now: datetime
    ) -> "OperatorBrowser":
        token = mint_token(
            SECRET, sub=sub, org=org, roles=roles, lifetime=timedelta(hours=1), now=now
        )
        page = await self._client.post("/console/sign-in", data={"token": token})
        assert page.status_code == 200, page.text
        return self

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(f"/console/{path}")

    async def post(self, path: str, /, **fields: Any) -> httpx.Response:
        """Send a form as a page of the console does."""
        page = await self.get("records")
        found = re.search(r'name="form_token" value="([^"]+)"', page.text)
        assert found is not None
        form = {"form_token": unescape(found[1]), **fields}
        return await self._client.post(f"/console/{path}", data=form)


def links(page: httpx.Response, prefix: str) -> Sequence[str]:
    """Return the paths below the console that a page leads to."""
    found = re.findall(rf'href="/console/({prefix}[^"]*)"', page.text)
    return list(dict.fromkeys(unescape(path) for path in found))
