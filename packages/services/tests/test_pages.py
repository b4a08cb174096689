"""The pages ``/`` and ``/docs``: what they say, and that a browser needs no other host for them."""

from html.parser import HTMLParser
from importlib.metadata import version
from urllib.parse import urljoin

from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from holdfast_services.registry import SERVICES

from .conftest import Serve


class Page(HTMLParser):
    """What a page loads, what it links to, and scripts and styles inside it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.inline: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not [name for name in found if name.startswith("on") or name == "style"], attrs
        if tag == "a":
            self.links.append(found["href"] or "")
        elif address := found.get("src") or found.get("href"):
            self.loaded.append(address)
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in {"script", "style"} and data.strip():
            self.inline.append(self._inside)


def directives(policy: str) -> dict[str, list[str]]:
    found = (part.split() for part in policy.split(";"))
    return {name: values for name, *values in found}


async def test_docs_page_loads_everything_from_this_server_under_a_strict_policy(
    serve: Serve, sqlite_url: str
) -> None:
    async with serve(sqlite_url) as client:
        del client.headers["Authorization"]
        response = await client.get("/docs")
        page = Page(response.text)
        types = {}
        for address in (*page.loaded, "openapi.json"):
            assert "//" not in address
            loaded = await client.get(urljoin("/docs", address))
            assert loaded.status_code == 200, address
            assert loaded.content
            types[address] = loaded.headers["content-type"].partition(";")[0]
        start = await client.get("/docs/start.js")
        document = (await client.get("/openapi.json")).json()
        old = await client.get("/redoc")
    policy = directives(response.headers["content-security-policy"])
    assert types == {
        "docs/favicon.png": "image/png",
        "docs/swagger-ui.css": "text/css",
        "docs/swagger-ui-bundle.js": "text/javascript",
        "docs/start.js": "text/javascript",
        "openapi.json": "application/json",
    }
    assert page.inline == []
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == ["'none'"]
    assert 'url: "openapi.json"' in start.text
    assert (old.status_code, old.headers["location"]) == (308, "docs")
    assert not {"/", "/docs", "/redoc"} & set(document["paths"])


async def test_index_page_names_services_and_version_and_every_link_works(
    serve: Serve, sqlite_url: str
) -> None:
    async with serve(sqlite_url) as client:
        del client.headers["Authorization"]
        response = await client.get("/")
        head = await client.head("/")
        page = Page(response.text)
        for link in {*page.links, *page.loaded}:
            assert (await client.get(urljoin("/", link))).status_code == 200, link
        document = (await client.get("/openapi.json")).json()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert version("holdfast") in response.text
    assert {"docs", "healthz", "readyz", "metrics", "openapi.json"} <= set(page.links)
    assert "console" not in page.links
    tags = {
        tag for path in document["paths"].values() for op in path.values() for tag in op["tags"]
    }
    for service in SERVICES:
        assert service.name in tags
        assert f"docs#/{service.name}" in page.links
        assert all(path in response.text for path in service.paths)
    policy = directives(response.headers["content-security-policy"])
    assert "script-src" not in policy
    assert policy["default-src"] == ["'none'"]
    assert page.inline == ["style"]
    assert (head.status_code, head.content) == (200, b"")


def mount_console(app: FastAPI) -> None:
    app.mount("/console", PlainTextResponse("the console"))


async def test_index_as_json_names_the_console_if_one_is_mounted(
    serve: Serve, sqlite_url: str
) -> None:
    async with serve(sqlite_url, prepare=mount_console) as client:
        response = await client.get("/", headers={"Accept": "application/json"})
        page = Page((await client.get("/")).text)
    assert response.headers["vary"] == "Accept"
    assert response.json() == {
        "name": "holdfast",
        "version": version("holdfast"),
        "services": [{"name": s.name, "paths": list(s.paths)} for s in SERVICES],
        "links": {
            "docs": "/docs",
            "openapi": "/openapi.json",
            "console": "/console",
            "health": "/healthz",
            "readiness": "/readyz",
            "metrics": "/metrics",
        },
    }
    assert "console" in page.links


ACCEPT = {
    "*/*": "text/html",
    "": "text/html",
    "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": "text/html",
    "application/json, text/plain, */*": "application/json",
    "text/html;q=0.5, Application/JSON": "application/json",
    "application/json;q=0": "text/html",
    "application/json;q=much": "text/html",
}


async def test_index_is_json_for_clients_that_prefer_json(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url) as client:
        for accept, media_type in ACCEPT.items():
            response = await client.get("/", headers={"Accept": accept})
            assert response.headers["content-type"].partition(";")[0] == media_type, accept
