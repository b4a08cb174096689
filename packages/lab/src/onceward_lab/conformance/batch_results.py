"""Sends batches, and reads their results."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from onceward_lab.conformance.expect import expect
from onceward_lab.conformance.harness import (
    CheckFailedError,
    CheckSkippedError,
    Credentials,
    Harness,
    Request,
    Response,
)
from onceward_protocol.error_codes import CODES

__all__ = [
    "BatchEndpoint",
    "BatchResult",
    "endpoint_of",
    "expect_executed",
    "expect_item_error",
    "expect_same",
    "item_of",
    "post",
    "send_batch",
]

_OFFER: Final = re.compile(r"(/[\x21-\x7e]*?); *items=([1-9][0-9]*)")
# A server may end the results early; it must come to an end.
_MAX_ROUNDS: Final = 20
_MAX_PAUSE_SECONDS: Final = 10.0
# These are members of an item, not headers.
_MEMBERS: Final = {"x-client-id": "client_id", "x-sequence": "sequence"}


class BatchEndpoint(NamedTuple):
    """Where batches are posted, and how many items they may have."""

    path: str
    max_items: int


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one item."""

    status: int
    headers: dict[str, str]
    body: Any
    replayed: bool

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300  # noqa: PLR2004

    def response(self) -> Response:
        """Return it as the response to a single request."""
        return Response(self.status, httpx.Headers(self.headers), msgspec.json.encode(self.body))

    def summary(self) -> str:
        """Return status, replay mark and error code as text."""
        text = self.response().summary()
        return text if not self.replayed or "replayed" in text else f"{text}, replayed"


class _Results(msgspec.Struct):
    results: list[BatchResult]
    retry_after: float | None


async def endpoint_of(harness: Harness) -> BatchEndpoint:
    """Return the offer of batches in responses to guarded requests.

    Raises ``CheckSkippedError`` if there is no such endpoint.
    """
    if harness.batch_offer is None:
        await harness.send(await harness.new_request(), harness.new_key())
    offer = harness.batch_offer
    if offer is None:
        raise CheckSkippedError("not offered: responses have no header Onceward-Batch")
    found = _OFFER.fullmatch(offer.strip())
    if found is None:
        raise CheckFailedError(
            f"Onceward-Batch is {offer!r}", change="Send a path and a limit: /batch; items=200."
        )
    return BatchEndpoint(found[1], int(found[2]))


def item_of(request: Request, key: str | None, **members: Any) -> dict[str, Any]:
    """Return a request as an item; ``members`` are its lane, local_id and so on."""
    item: dict[str, Any] = {"method": request.method, "path": request.path, "body": request.body}
    if key is not None:
        item["key"] = key
    for name, value in request.headers.items():
        member = _MEMBERS.get(name.lower())
        if member is None:
            item.setdefault("headers", {})[name] = value
        else:
            item[member] = int(value) if member == "sequence" else value
    return item | members


async def post(
    harness: Harness, content: Any, *, credentials: Credentials | None = None
) -> Response:
    """Post a batch as it is: bytes, or a JSON value."""
    endpoint = await endpoint_of(harness)
    request = Request(method="POST", path=endpoint.path, body=None, other_body=None)
    raw = content if isinstance(content, bytes) else msgspec.json.encode(content)
    return await harness.send(request, content=raw, credentials=credentials)


async def send_batch(
    harness: Harness, items: Sequence[Mapping[str, Any]], *, credentials: Credentials | None = None
) -> list[BatchResult]:
    """Return one result per item; what the server has left over is sent again."""
    found: list[BatchResult] = []
    items = [_numbered(harness, item) for item in items]
    for _ in range(_MAX_ROUNDS):
        left = list(items[len(found) :])
        response = await post(harness, {"items": left}, credentials=credentials)
        expect(response.status == 200, f"{response.summary()} for a batch")  # noqa: PLR2004
        try:
            decoded = msgspec.json.decode(response.body, type=_Results)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckFailedError(f"the response of a batch cannot be read: {error}") from None
        count = len(decoded.results)
        expect(0 < count <= len(left), f"{count} results for {len(left)} items")
        found += decoded.results
        if len(found) == len(items):
            return found
        expect(
            decoded.retry_after is not None,
            "the results end early and retry_after is null",
            change="Say in retry_after after how many seconds to send the rest.",
        )
        await asyncio.sleep(min(decoded.retry_after or 0.0, _MAX_PAUSE_SECONDS))
    raise CheckFailedError(f"{len(found)} of {len(items)} results after {_MAX_ROUNDS} batches")


def _numbered(harness: Harness, item: Any) -> Any:
    """Return an item with the number that its key has by itself."""
    if not isinstance(item, dict) or "client_id" in item:
        return item
    number = harness.number_of(item.get("key"))
    if number is None:
        return item
    return item | {"client_id": number.client_id, "sequence": number.number}


def expect_executed(result: BatchResult) -> BatchResult:
    """Expect a success that is not a replay."""
    expect(result.is_success, f"{result.summary()}, expected a success")
    expect(not result.replayed, f"{result.summary()}, expected an execution")
    return result


def expect_same(result: BatchResult, first: BatchResult | Response, name: str) -> None:
    """Expect a replay of the first response, which may be that of a single request."""
    body = first.document() if isinstance(first, Response) else first.body
    expect(
        result.status == first.status,
        f"{name} got {result.summary()}, the first response was {first.summary()}",
    )
    expect(result.body == body, f"{name} got another body than the first response")
    expect(result.replayed, f"{name} got {result.summary()}, which is not marked as a replay")


def expect_item_error(harness: Harness, result: BatchResult, kind: str) -> None:
    """Expect an error of this kind, with its code."""
    code, profile = CODES[kind], harness.profile
    status = profile.mismatch_status if kind == "payload_mismatch" else code.status
    name = code.name(profile.error_format)
    expect(result.status == status, f"an item got {result.summary()}, expected {status} {name}")
    expect(not result.replayed, f"an item got {result.summary()}")
    found = harness.code_of(result.response())
    expect(profile.statuses_only or found == name, f"an item got the code {found}, expected {name}")
