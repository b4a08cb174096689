"""The pages ``/`` and ``/docs``: what they say, and that a browser needs no other host for them."""

from html.parser import HTMLParser
from importlib.metadata import version
from urllib.parse import urljoin

import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

from onceward_services.registry import SERVICES

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
    assert version("onceward") in response.text
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
        "name": "onceward",
        "version": version("onceward"),
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


@pytest.mark.parametrize(
    ("setting", "gone"),
    [
        ("metrics_enabled", {"/metrics"}),
        ("docs_enabled", {"/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/redoc"}),
        ("openapi_enabled", {"/openapi.json", "/docs", "/redoc"}),
    ],
)
async def test_pages_can_be_switched_off(
    serve: Serve, sqlite_url: str, setting: str, gone: set[str]
) -> None:
    every = {"/metrics", "/docs", "/openapi.json"}
    async with serve(sqlite_url, **{setting: "false"}) as client:
        index = Page((await client.get("/")).text)
        for link in {*index.links, *index.loaded}:
            assert (await client.get(urljoin("/", link))).status_code == 200, link
        for path in gone | every:
            response = await client.get(path)
            assert response.status_code == (404 if path in gone else 200), path


STRICT = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def fail() -> None:
    raise ZeroDivisionError


async def test_every_response_has_security_headers(serve: Serve, sqlite_url: str) -> None:
    place = {"start": {"lat": 55.95, "lon": -3.19}, "minutes": 90, "interests": []}
    key = {"Idempotency-Key": "0b3f8a3c-52f0-4a52-a7a4-d06fd9e3f6aa"}
    async with serve(sqlite_url, prepare=lambda app: app.add_api_route("/fail", fail)) as client:
        responses = {
            "created": await client.post("/api/v1/routes", json=place, headers=key),
            "replayed": await client.post("/api/v1/routes", json=place, headers=key),
            "malformed": await client.post("/api/v1/routes", content=b"{", headers=key),
            "unknown": await client.get("/unknown"),
            "failed": await client.get("/fail"),
            "health": await client.get("/healthz"),
            "metrics": await client.get("/metrics"),
            "openapi": await client.get("/openapi.json"),
            "index": await client.get("/"),
            "docs": await client.get("/docs"),
            "script": await client.get("/docs/start.js"),
        }
        del client.headers["Authorization"]
        responses["anonymous"] = await client.post("/api/v1/routes", json=place, headers=key)
    assert responses["replayed"].headers["idempotency-replayed"] == "true"
    assert responses["failed"].status_code == 500
    for name, response in responses.items():
        found = {header: response.headers.get(header) for header in STRICT}
        assert found == STRICT, name
        policy = directives(response.headers["content-security-policy"])
        assert policy["default-src"] == policy["frame-ancestors"] == ["'none'"], name
        assert "unsafe" not in response.headers["content-security-policy"]
        cached = "public, max-age=3600" if name == "script" else "no-store"
        assert response.headers.get_list("cache-control") == [cached], name


async def test_a_read_with_an_etag_may_be_revalidated(serve: Serve, sqlite_url: str) -> None:
    async with serve(sqlite_url) as client:
        made = await client.post(
            "/api/v1/contacts",
            json={"name": "Ada"},
            headers={"Idempotency-Key": "6a8d5e0e-6d59-4a6e-8c43-2d9c0c2d0c11"},
        )
        read = await client.get(made.headers["location"])
    assert (made.status_code, read.status_code) == (201, 200)
    assert made.headers["cache-control"] == "no-store"
    assert "etag" in read.headers
    assert read.headers["cache-control"] == "private, no-cache"
