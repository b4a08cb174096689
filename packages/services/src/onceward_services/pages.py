"""The server's own pages: ``/`` says what runs here, ``/docs`` shows the HTTP API.

All files come from this server. The pages allow no inline scripts and nothing from other hosts.
"""

import base64
import hashlib
import html
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse

from onceward_services.ops_port import OpsPort
from onceward_services.registry import Service
from onceward_services.security_headers import STRICT_POLICY

__all__ = ["router"]

# Swagger UI's files, from the distribution "fastapi-swagger". Its code is not used.
_SWAGGER_FILES: Final = {
    "swagger-ui-bundle.js": ("swagger-ui-bundle.js", "text/javascript"),
    "swagger-ui.css": ("swagger-ui.css", "text/css"),
    "favicon.png": ("favicon-32x32.png", "image/png"),
}
_CACHE: Final = "public, max-age=3600"
# Swagger UI's stylesheet has pictures as data: URLs; requests go to this server only.
_DOCS_POLICY: Final = (
    f"{STRICT_POLICY}; "
    "script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
)


def router(
    services: Sequence[Service], version: str, *, has_docs: bool, ports: OpsPort
) -> APIRouter:
    """Build ``/``, ``/docs`` with its files, and ``/redoc``, which leads to ``/docs``.

    ``/`` links to what the port of the request serves.
    """
    api = APIRouter(include_in_schema=False)

    @api.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        links = _links(request, ports)
        if _prefers_json(request.headers.get("accept", "")):
            found: dict[str, Any] = {
                "name": "onceward",
                "version": version,
                "services": [{"name": s.name, "paths": list(s.paths)} for s in services],
                "links": {name: f"{request.scope['root_path']}/{path}" for name, path, _ in links},
            }
            return JSONResponse(found, headers={"vary": "Accept"})
        style = _text("index.css")
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        policy = f"{STRICT_POLICY}; style-src 'sha256-{digest}'; img-src 'self'"
        headers = {"vary": "Accept", "content-security-policy": policy}
        return HTMLResponse(_index_page(services, version, links, style), headers=headers)

    if has_docs:
        _add_docs(api)
    return api


def _add_docs(api: APIRouter) -> None:
    @api.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> Response:
        return HTMLResponse(_text("docs.html"), headers={"content-security-policy": _DOCS_POLICY})

    @api.api_route("/docs/start.js", methods=["GET", "HEAD"])
    async def start() -> Response:
        headers = {"cache-control": _CACHE}
        return Response(_text("docs.js"), headers=headers, media_type="text/javascript")

    for path, (name, media_type) in _SWAGGER_FILES.items():
        api.add_api_route(f"/docs/{path}", _file(name, media_type), methods=["GET", "HEAD"])

    @api.get("/redoc")
    async def redoc() -> Response:
        return RedirectResponse("docs", status_code=308)


def _file(name: str, media_type: str) -> Any:
    async def send() -> Response:
        headers = {"cache-control": _CACHE}
        return FileResponse(_swagger_directory() / name, headers=headers, media_type=media_type)

    return send


@cache
def _swagger_directory() -> Path:
    """Return where the files are, without importing the package that brings them."""
    spec = find_spec("fastapi_swagger")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("Swagger UI is missing: pip install fastapi-swagger")
    return Path(spec.origin).parent / "resources"


@cache
def _text(name: str) -> str:
    return files("onceward_services").joinpath("static", name).read_text(encoding="utf-8")


def _links(request: Request, ports: OpsPort) -> list[tuple[str, str, str]]:
    """Return name, path and meaning of each page that this port serves."""
    links = [
        ("docs", "docs", "the HTTP API, with requests to try"),
        ("openapi", "openapi.json", "the same for programs (OpenAPI)"),
        ("console", "console", "what operators look at"),
        ("health", "healthz", "the process runs"),
        ("readiness", "readyz", "the store responds"),
        ("metrics", "metrics", "Prometheus metrics"),
    ]
    paths = {getattr(route, "path", None) for route in request.app.routes}
    return [
        link
        for link in links
        if f"/{link[1]}" in paths and ports.serves(request.scope, f"/{link[1]}")
    ]


def _index_page(
    services: Sequence[Service], version: str, links: Sequence[tuple[str, str, str]], style: str
) -> str:
    has_docs = any(name == "docs" for name, _, _ in links)
    described = "\n".join(
        f"<dt>{_service_name(service.name, has_docs=has_docs)}</dt>\n"
        f"<dd>{', '.join(f'<code>{html.escape(path)}</code>' for path in service.paths)}</dd>"
        for service in services
    )
    listed = "\n".join(
        f'<li><a href="{path}">{name}</a> <span>{meaning}</span></li>'
        for name, path, meaning in links
    )
    return Template(_text("index.html")).substitute(
        version=html.escape(version),
        services=described,
        links=listed,
        style=style,
        icon='<link rel="icon" href="docs/favicon.png">' if has_docs else "",
    )


def _service_name(name: str, *, has_docs: bool) -> str:
    text = html.escape(name)
    return f'<a href="docs#/{text}">{text}</a>' if has_docs else text


def _prefers_json(accept: str) -> bool:
    """Return whether a client names ``application/json`` and wants HTML less."""
    found: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_type, *parameters = (piece.strip() for piece in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            found.setdefault(media_type, float(quality))
        except ValueError:
            found.setdefault(media_type, 0.0)
    return found.get("application/json", 0.0) > found.get("text/html", 0.0)
