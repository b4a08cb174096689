"""Checks of what a server says of itself: health, metrics, documentation, unknown paths."""

from typing import Final

from holdfast_lab.conformance.expect import expect, expect_error, expect_fresh
from holdfast_lab.conformance.harness import NOBODY, Check, Kit

__all__ = ["CHECKS", "PATH_CHECKS"]

_WITHOUT_SIGN_IN: Final = ("/healthz", "/readyz", "/docs")


async def _health(kit: Kit) -> str:
    for path in _WITHOUT_SIGN_IN:
        answer = await kit.ask("GET", path, person=NOBODY)
        expect(answer.is_success, f"{answer.told()} for {path}")
    return f"200 for {', '.join(_WITHOUT_SIGN_IN)}"


async def _metrics(kit: Kit) -> str:
    key = kit.new_key()
    expect_fresh(await kit.send(await kit.fresh(), key))
    answer = await kit.ask("GET", "/metrics", person=NOBODY)
    expect(answer.is_success, f"{answer.told()} for /metrics")
    expect(b"# TYPE " in answer.body, "/metrics is not in Prometheus's format")
    expect(key.encode() not in answer.body, "/metrics shows a raw key")
    return f"{answer.status}, and no raw key in it"


async def _openapi(kit: Kit) -> str:
    answer = await kit.ask("GET", "/openapi.json", person=NOBODY)
    expect(answer.is_success, f"{answer.told()} for /openapi.json")
    document = answer.document()
    expect(str(document.get("openapi", "")).startswith("3."), "it is not OpenAPI 3")
    paths = document.get("paths")
    expect(isinstance(paths, dict) and bool(paths), "it has no paths")
    return f"OpenAPI {document['openapi']}, {len(document['paths'])} paths"


async def _unknown_path(kit: Kit) -> str:
    beside = kit.profile.request.path.split("{")[0].rstrip("/")
    answer = await kit.ask("GET", f"{beside}/no/such/path")
    expect_error(kit, answer, "not_found")
    return answer.told()


CHECKS: Final = (
    Check("health", "§9", "200 without sign-in", _health),
    Check("metrics", "§9", "Prometheus's format, no raw key", _metrics),
    Check("OpenAPI", "§9", "/openapi.json is there", _openapi),
)
PATH_CHECKS: Final = (Check("an unknown path", "§4", "404 in the dialect", _unknown_path),)
