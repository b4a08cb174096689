"""The items of a batch as single requests, with their results: written without the library.

What the server makes of placeholders is computed here once more, from the results that it sent.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from onceward_outbox.transport import Request, Response

__all__ = ["BATCH_PATH", "Item", "header_of", "items_of", "parts_of", "results_of"]

BATCH_PATH: Final = "/batch"

_PLACEHOLDER: Final = re.compile(r"\{(local|version):([0-9a-f-]{36})\}")
_OK: Final = range(200, 300)


class Item(NamedTuple):
    """One item of a batch."""

    # The request that it is; None if a placeholder of it could not be resolved.
    request: Request | None
    # Its result; None if the results end before it.
    response: Response | None
    # As in the batch.
    key: str


class _Result(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: msgspec.Raw
    replayed: bool


class _Results(msgspec.Struct):
    results: list[_Result]
    retry_after: float | None


def results_of(response: Response) -> tuple[list[Response], float | None]:
    """Return the results of a batch, and when to send the rest. Raises ``msgspec.DecodeError``."""
    decoded = msgspec.json.decode(response.body, type=_Results)
    return [_response(result) for result in decoded.results], decoded.retry_after


def header_of(request: Request, name: str) -> str | None:
    """Return a header, whatever the case of its name; None if there is none."""
    for found, value in request.headers.items():
        if found.lower() == name.lower():
            return value
    return None


def parts_of(request: Request) -> list[Request]:
    """Return the items of a batch as requests, with their placeholders; a single one as it is."""
    if request.target != BATCH_PATH:
        return [request]
    items = msgspec.json.decode(request.body or b"")["items"]
    return [_request_of(request, item, item["path"], item.get("headers", {})) for item in items]


def items_of(request: Request, response: Response | None) -> Iterator[Item]:
    """Yield the items of a batch, each with its result; without a response none has one."""
    results = results_of(response)[0] if response is not None and response.status in _OK else []
    found: dict[tuple[str, str], Any] = {}
    for number, item in enumerate(msgspec.json.decode(request.body or b"")["items"]):
        result = results[number] if number < len(results) else None
        yield Item(_resolved(request, item, found), result, item.get("key", ""))
        if result is not None and "local_id" in item:
            _learn(found, item["local_id"], result)


def _response(result: _Result) -> Response:
    body = bytes(result.body)
    return Response(result.status, result.headers, b"" if body == b"null" else body)


def _learn(found: dict[tuple[str, str], Any], local_id: str, result: Response) -> None:
    body = result.json()
    if result.status in _OK and isinstance(body, dict):
        for kind, name in (("local", "id"), ("version", "version")):
            if name in body:
                found[kind, local_id] = body[name]
    else:
        found.pop(("local", local_id), None)
        found.pop(("version", local_id), None)


def _resolved(batch: Request, item: dict[str, Any], found: dict[tuple[str, str], Any]) -> Any:
    def fill(match: re.Match[str]) -> str:
        return str(found[match[1], match[2]])

    def header(text: str) -> str:
        whole = _PLACEHOLDER.fullmatch(text)
        is_version = whole is not None and whole[1] == "version"
        return f'"{_PLACEHOLDER.sub(fill, text)}"' if is_version else _PLACEHOLDER.sub(fill, text)

    try:
        headers = {name: header(text) for name, text in item.get("headers", {}).items()}
        path = _PLACEHOLDER.sub(fill, item["path"])
    except KeyError:
        return None
    return _request_of(batch, item, path, headers)


def _request_of(
    batch: Request, item: dict[str, Any], path: str, headers: dict[str, str]
) -> Request:
    """Return an item as the single request that it is."""
    found = {"Authorization": header_of(batch, "Authorization") or "", **headers}
    if "key" in item:
        found["Idempotency-Key"] = item["key"]
    body = item.get("body")
    if body is not None:
        found["Content-Type"] = "application/json"
    return Request(item["method"], path, found, None if body is None else msgspec.json.encode(body))
