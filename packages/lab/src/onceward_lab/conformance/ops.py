"""Checks of health, metrics, OpenAPI and unknown paths."""

from typing import Final

from onceward_lab.conformance.expect import expect, expect_error, expect_first
from onceward_lab.conformance.harness import (
    ANONYMOUS,
    Check,
    CheckSkippedError,
    Harness,
    Response,
)

__all__ = ["CHECKS", "PATH_CHECKS"]

_WITHOUT_SIGN_IN: Final = ("/healthz", "/readyz")
_NOT_FOUND: Final = 404


async def _health(harness: Harness) -> str:
    for path in _WITHOUT_SIGN_IN:
        response = await harness.request("GET", path, credentials=ANONYMOUS)
        expect(response.is_success, f"{response.summary()} for {path}")
    return f"200 for {', '.join(_WITHOUT_SIGN_IN)}"


async def _page(harness: Harness, path: str) -> Response:
    """Return a page that the operator may have switched off; the check is skipped then."""
    response = await harness.request("GET", path, credentials=ANONYMOUS)
    if response.status == _NOT_FOUND:
        raise CheckSkippedError(f"{path} is switched off, or on another port")
    expect(response.is_success, f"{response.summary()} for {path}")
    return response


async def _metrics(harness: Harness) -> str:
    key = harness.new_key()
    expect_first(await harness.send(await harness.new_request(), key))
    response = await _page(harness, "/metrics")
    expect(b"# TYPE " in response.body, "/metrics is not in the Prometheus format")
    expect(key.encode() not in response.body, "/metrics shows a raw key")
    return f"{response.status}, and no raw key in it"


async def _openapi(harness: Harness) -> str:
    response = await _page(harness, "/openapi.json")
    document = response.document()
    expect(str(document.get("openapi", "")).startswith("3."), "not an OpenAPI 3 document")
    paths = document.get("paths")
    expect(isinstance(paths, dict) and bool(paths), "the document has no paths")
    docs = await harness.request("GET", "/docs", credentials=ANONYMOUS)
    expect(docs.is_success or docs.status == _NOT_FOUND, f"{docs.summary()} for /docs")
    return f"OpenAPI {document['openapi']}, {len(document['paths'])} paths"


async def _unknown_path(harness: Harness) -> str:
    base = harness.profile.request.path.split("{")[0].rstrip("/")
    response = await harness.request("GET", f"{base}/no/such/path")
    expect_error(harness, response, "not_found")
    return response.summary()


CHECKS: Final = (
    Check(
        "health",
        "",
        "200 without sign-in",
        _health,
        why="Load balancers and orchestrators have no token.",
        change="Serve /healthz and /readyz without authentication.",
    ),
    Check(
        "metrics",
        "",
        "Prometheus format, no raw key",
        _metrics,
        why="Keys in labels create a time series per request and show the keys to every reader.",
        change="Serve /metrics in the Prometheus text format; label with a truncated hash, if at "
        "all.",
    ),
    Check(
        "OpenAPI",
        "",
        "/openapi.json exists",
        _openapi,
        why="Clients are generated from it.",
        change="Serve an OpenAPI 3 document with the paths of the server at /openapi.json, and "
        "/docs without sign-in, if it exists.",
    ),
)
PATH_CHECKS: Final = (
    Check(
        "an unknown path",
        "Error codes",
        "404 in the error format",
        _unknown_path,
        why="Clients decide by the code in the body, and the framework's own 404 has none.",
        change="Register a handler for the framework's 404 that renders the operation's error "
        "format.",
    ),
)
