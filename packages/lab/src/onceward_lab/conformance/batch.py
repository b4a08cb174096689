"""Checks of the batch endpoint, if the server has one."""

import asyncio
from typing import Any, Final
from uuid import uuid4

import msgspec

from onceward_lab.conformance.batch_results import (
    BatchResult,
    endpoint_of,
    expect_executed,
    expect_item_error,
    expect_same,
    item_of,
    post,
    send_batch,
)
from onceward_lab.conformance.expect import expect, expect_error, expect_first, expect_replay
from onceward_lab.conformance.harness import (
    ANONYMOUS,
    Check,
    CheckSkippedError,
    Harness,
    Request,
    Response,
    unique,
)
from onceward_lab.conformance.profile import Profile

__all__ = ["CHECKS", "FIELD_CHECKS", "OFFER", "PLANNING_CHECKS", "WALK_CHECKS"]

_SECTION: Final = "Batch"
_OVERLAP: Final = 4
_LARGE: Final = 10
_IN_PROGRESS: Final = 409


async def _offer(harness: Harness) -> str:
    endpoint = await endpoint_of(harness)
    return f"POST {endpoint.path}, up to {endpoint.max_items} items"


async def _mixed(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    single = expect_first(await harness.send(request, key))
    (result,) = await send_batch(harness, [item_of(request, key)])
    expect_same(result, single, "an item whose key a single request has used")
    other, other_key = await harness.new_request(), harness.new_key()
    results = await send_batch(harness, [item_of(other, other_key)])
    expect_executed(results[0])
    again = await send_batch(harness, [item_of(other, other_key)])
    expect_same(again[0], results[0], "an item that is sent again")
    replay = await harness.send(other, other_key)
    expect(
        replay.is_replay and replay.document() == results[0].body,
        f"a single request after its batch got {replay.summary()}",
    )
    return f"{result.summary()}, then {replay.summary()}"


async def _twice(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first, second = await send_batch(harness, [item_of(request, key)] * 2)
    expect_executed(first)
    expect_same(second, first, "the second item with the key")
    return f"{first.summary()}, then {second.summary()}"


async def _mismatch(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    first = expect_first(await harness.send(request, key))
    other = await harness.new_request()
    wrong = item_of(request, key, body=request.other_body)
    results = await send_batch(harness, [wrong, item_of(other, harness.new_key())])
    expect_item_error(harness, results[0], "payload_mismatch")
    expect_executed(results[1])
    expect_replay(await harness.send(request, key), first)
    return f"{results[0].summary()}, {results[1].summary()}"


async def _lane(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    expect_first(await harness.send(request, key))
    behind, behind_key = await harness.new_request(), harness.new_key()
    aside = await harness.new_request()
    lane = {"lane": "conformance"}
    results = await send_batch(
        harness,
        [
            item_of(request, key, body=request.other_body, **lane),
            item_of(behind, behind_key, **lane),
            item_of(aside, harness.new_key()),
            item_of(await harness.new_request(), harness.new_key(), lane="another"),
        ],
    )
    expect_item_error(harness, results[0], "payload_mismatch")
    expect_item_error(harness, results[1], "batch_skipped")
    for result in results[2:]:
        expect_executed(result)
    later = await harness.send(behind, behind_key)
    expect(
        later.is_success and not later.is_replay,
        f"a skipped item, sent alone, got {later.summary()}",
        change="Store nothing for an item that was skipped: it has not run.",
    )
    return f"{results[1].summary()}, then {later.summary()} alone"


async def _local_id(harness: Harness) -> str:
    local_id, key = str(uuid4()), harness.new_key()
    refers = await harness.new_request(f"{{local:{local_id}}}")
    first = await harness.new_request()
    results = await send_batch(
        harness,
        [item_of(first, harness.new_key(), local_id=local_id), item_of(refers, key)],
    )
    expect_executed(results[0])
    made = results[0].body.get("id") if isinstance(results[0].body, dict) else None
    if made is None:
        raise CheckSkippedError("the response has no id: gives_id in the profile may be false")
    expect_executed(results[1])
    return await _replayed_alone(harness, _replaced(refers, local_id, made), key, results[1])


async def _replayed_alone(harness: Harness, request: Request, key: str, result: BatchResult) -> str:
    """Send a request with what its placeholders became; it must be a replay."""
    alone = await harness.send(request, key)
    expect(
        alone.is_replay and alone.document() == result.body,
        f"the request with the id in it, sent alone, got {alone.summary()}",
        change="Replace placeholders before the fingerprint is made.",
    )
    return f"{result.summary()}, then {alone.summary()} alone"


def _replaced(request: Request, local_id: str, value: Any) -> Request:
    text = msgspec.json.encode([request.path, request.body]).decode()
    number = isinstance(value, int)
    place = f"{{local:{local_id}}}"
    if number:
        text = text.replace(f'"{place}"', str(value))
    path, body = msgspec.json.decode(text.replace(place, str(value)))
    return Request(
        method=request.method, path=path, headers=request.headers, body=body, other_body=None
    )


async def _failed_local_id(harness: Harness) -> str:
    local_id = str(uuid4())
    request, key = await harness.new_request(), harness.new_key()
    expect_first(await harness.send(request, key))
    refers = await harness.new_request(f"{{local:{local_id}}}")
    results = await send_batch(
        harness,
        [
            item_of(request, key, body=request.other_body, local_id=local_id),
            item_of(refers, harness.new_key()),
        ],
    )
    expect_item_error(harness, results[0], "payload_mismatch")
    expect_item_error(harness, results[1], "batch_skipped")
    return results[1].summary()


async def _malformed_items(harness: Harness) -> str:
    endpoint = await endpoint_of(harness)
    request = await harness.new_request()
    path, local_id = request.path, str(uuid4())

    def wrong(**members: Any) -> dict[str, Any]:
        return item_of(request, harness.new_key()) | members

    items: dict[str, Any] = {
        "a path that is not guarded": wrong(path=f"/conform-{unique()}"),
        "a GET": wrong(method="GET"),
        "an absolute URL": wrong(path=f"https://elsewhere.example{path}"),
        "a URL without a scheme": wrong(path=f"//elsewhere.example{path}"),
        "a batch": wrong(path=endpoint.path, body={"items": []}),
        "the header Authorization": wrong(headers={"Authorization": "Bearer x"}),
        "the header Cookie": wrong(headers={"Cookie": "a=b"}),
        "a header with a line break": wrong(headers={"If-Match": "x\r\nAuthorization: y"}),
        "an unknown placeholder": wrong(path=f"{path}/{{local:{local_id}}}"),
        "a placeholder in the body": wrong(body={"a": f"{{version:{local_id}}}"}),
        "an unknown member": wrong(surprise=1),
        "no object": [],
        "no path": {"method": "POST", "key": harness.new_key()},
    }
    good, key = await harness.new_request(), harness.new_key()
    results = await send_batch(harness, [*items.values(), item_of(good, key)])
    for name, result in zip(items, results, strict=False):
        expect(result.status == 400, f"an item with {name} got {result.summary()}")  # noqa: PLR2004
    expect_executed(results[-1])
    return f"400 for each of {len(items)}, {results[-1].summary()} for the next item"


async def _malformed_batch(harness: Harness) -> str:
    request = await harness.new_request()
    item = item_of(request, harness.new_key())
    wrong: tuple[Any, ...] = (b"{", b"", [item], {}, {"items": item}, {"items": [], "more": 1})
    for content in wrong:
        response = await post(harness, content)
        _expect_refusal(harness, response, "body_invalid")
    twice = b'{"items":[],"items":[' + msgspec.json.encode(item) + b"]}"
    _expect_refusal(harness, await post(harness, twice), "body_invalid")
    return f"400 for each of {len(wrong) + 1}"


def _expect_refusal(harness: Harness, response: Response, kind: str) -> None:
    """Expect an error of the whole batch. Its format is that of the server, not of an operation."""
    if harness.profile.has_own_format:
        expect_error(harness, response, kind)
        return
    status = {"body_invalid": 400, "batch_too_large": 413, "not_authenticated": 401}[kind]
    expect(response.status == status, f"{response.summary()}, expected {status}")


async def _too_large(harness: Harness) -> str:
    endpoint = await endpoint_of(harness)
    request = await harness.new_request()
    keys = [harness.new_key() for _ in range(endpoint.max_items + 1)]
    response = await post(harness, {"items": [item_of(request, key) for key in keys]})
    _expect_refusal(harness, response, "batch_too_large")
    if not harness.profile.has_own_format:
        text = response.body.decode(errors="replace").lower()
        expect("too_large" in text, f"{response.summary()} without the code batch.too_large")
    return f"{response.summary()} for {len(keys)} items"


async def _overlapping(harness: Harness) -> str:
    requests = [(await harness.new_request(), harness.new_key()) for _ in range(_OVERLAP)]
    items = [item_of(request, key) for request, key in requests]
    runs: list[Any] = await asyncio.gather(
        send_batch(harness, items),
        send_batch(harness, items[::-1]),
        *(harness.send(request, key) for request, key in requests),
    )
    forward, backward, *singles = runs
    executed = 0
    for number, (request, key) in enumerate(requests):
        results = [forward[number], backward[-1 - number], _as_result(singles[number])]
        done = [result for result in results if result.status != _IN_PROGRESS]
        last = await harness.send(request, key)
        expect(last.is_replay, f"after all of them, a key got {last.summary()}")
        for result in done:
            expect(result.is_success, f"{result.summary()} among overlapping batches")
            expect(result.body == last.document(), "two responses to one key")
        fresh = sum(not result.replayed for result in done)
        expect(fresh <= 1, f"{fresh} of {len(done)} responses to one key are not replays")
        executed += fresh
    return f"{executed} executed of {_OVERLAP}, the others replayed"


def _as_result(response: Any) -> BatchResult:
    return BatchResult(
        status=response.status,
        headers=dict(response.headers),
        body=response.document(),
        replayed=response.is_replay,
    )


async def _anonymous(harness: Harness) -> str:
    request, key = await harness.new_request(), harness.new_key()
    response = await post(harness, {"items": [item_of(request, key)]}, credentials=ANONYMOUS)
    if response.status == 200:  # noqa: PLR2004 - an app may sign in each item
        (result,) = msgspec.json.decode(response.body)["results"]
        expect(result["status"] == 401, f"an item got {result['status']} without sign-in")  # noqa: PLR2004
        found = f"{response.summary()}, its item 401"
    else:
        expect(response.status == 401, f"{response.summary()} without sign-in")  # noqa: PLR2004
        found = response.summary()
    expect_first(await harness.send(request, key))
    return found


async def _other_tenant(harness: Harness) -> str:
    credentials = harness.other_credentials
    request, key = await harness.new_request(), harness.new_key()
    (first,) = await send_batch(harness, [item_of(request, key)])
    expect_executed(first)
    other = harness.other_request() or request
    (second,) = await send_batch(harness, [item_of(other, key)], credentials=credentials)
    expect(not second.replayed, f"another tenant got {second.summary()}")
    expect(second.status != _IN_PROGRESS, f"another tenant got {second.summary()}")
    return second.summary()


# -- versions -------------------------------------------------------------------------------------


async def _field_versions(harness: Harness) -> str:
    request, local_id = await harness.new_request(), str(uuid4())
    return await _versions(
        harness,
        [item_of(request, harness.new_key(), local_id=local_id)],
        local_id,
        "/api/v1/contacts",
        "name",
    )


async def _planning_versions(harness: Harness) -> str:
    request, project, local_id = await harness.new_request(), str(uuid4()), str(uuid4())
    mission = Request(
        method="POST",
        path=f"/v1/projects/{{local:{project}}}/missions",
        body={"title": f"conformance {unique()}"},
        other_body=None,
    )
    made = [
        item_of(request, harness.new_key(), local_id=project),
        item_of(mission, harness.new_key(), local_id=local_id),
    ]
    return await _versions(harness, made, local_id, "/v1/missions", "title")


async def _versions(
    harness: Harness, made: list[dict[str, Any]], local_id: str, path: str, field: str
) -> str:
    """Create, edit and edit again in one batch; then send an edit alone."""
    edits, keys = [], [harness.new_key(), harness.new_key()]
    for key in keys:
        edit = Request(
            method="PATCH",
            path=f"{path}/{{local:{local_id}}}",
            headers={"If-Match": f"{{version:{local_id}}}"},
            body={field: f"changed {unique()}"},
            other_body=None,
        )
        edits.append((edit, item_of(edit, key, local_id=local_id)))
    results = await send_batch(harness, [*made, *(item for _, item in edits)])
    for result in results:
        expect_executed(result)
    created = results[len(made) - 1]
    versions = [result.headers.get("etag") for result in results[len(made) - 1 :]]
    expect(len(set(versions)) == len(versions), f"the versions of one entity are {versions}")
    alone = Request(
        method="PATCH",
        path=f"{path}/{created.body['id']}",
        headers={"If-Match": versions[0] or ""},
        body=edits[0][0].body,
        other_body=None,
    )
    return await _replayed_alone(harness, alone, keys[0], results[len(made)])


def _has_id_and_text(profile: Profile) -> bool:
    return profile.gives_id and "{unique}" in msgspec.json.encode(profile.request.body).decode()


OFFER: Final = Check(
    "batch endpoint",
    _SECTION,
    "named by the header Onceward-Batch, if there is one",
    _offer,
    why="A client finds the endpoint by the header, and sends single requests without it.",
    change="Send Onceward-Batch: /batch; items=200 with every response to a guarded request.",
)
_MIXED: Final = Check(
    "batch and single sends replay each other",
    _SECTION,
    "an item is replayed to a single request, and a single request to an item",
    _mixed,
    why="A client that lost the response of a batch may send its items alone.",
    change="Give each item its own record under its key, as its single request has.",
)
_MALFORMED_BATCH: Final = Check(
    "malformed batch",
    _SECTION,
    "400, and nothing is run",
    _malformed_batch,
    why="A batch that is read in part runs what the client did not mean.",
    change='Accept an object with one member, "items", which is an array; respond 400 to anything '
    "else.",
)
_ANONYMOUS: Final = Check(
    "batch without sign-in",
    _SECTION,
    "401 for the batch or for its items, and nothing is run",
    _anonymous,
    why="A batch would be a way around the sign-in of the operations.",
    change="Sign the caller in before the batch is read, as for any request.",
)
CHECKS: Final = (
    OFFER,
    _MIXED,
    Check(
        "one key twice in a batch",
        _SECTION,
        "the second item is a replay of the first",
        _twice,
        why="A client that enqueued an action twice would cause two effects.",
        change="Look each key up again when its item's turn comes, in the items before it, too.",
    ),
    Check(
        "other body in a batch",
        _SECTION,
        "409 payload_mismatch for its item, the others are run",
        _mismatch,
        why="One wrong item must not hold up everything that was queued behind it.",
        change="Compare fingerprints item by item, and go on after a conflict.",
    ),
    Check(
        "lane after a failure",
        _SECTION,
        "later items of the lane are 424 and not stored, all others are run",
        _lane,
        why="What follows in a lane may need what has failed; a stored 424 could never be retried.",
        change="After a result that is not 2xx, respond 424 batch_skipped to later items of its "
        "lane, without a record; run the others.",
    ),
    Check(
        "id of an earlier item",
        _SECTION,
        "{local:…} becomes the id, and the same request alone is a replay",
        _local_id,
        why="The retry of an item carries the id: with another fingerprint it would be a conflict.",
        change="Replace {local:…} by the id of the earlier result, before the fingerprint is made.",
        applies=_has_id_and_text,
    ),
    Check(
        "id of a failed item",
        _SECTION,
        "424 for the item that refers to it",
        _failed_local_id,
        why="The item cannot be sent before the other one has succeeded; a 400 would end it.",
        change="Respond 424 batch_skipped if an item refers to one that did not succeed.",
        applies=_has_id_and_text,
    ),
    Check(
        "malformed items",
        _SECTION,
        "400 for each of them, the next item is run",
        _malformed_items,
        why="A batch must not reach what a single request of the client could not, nor fail as a "
        "whole because of one item.",
        change="Accept guarded paths of the own server only, and headers of the list only; respond "
        "400 to the item and go on.",
    ),
    _MALFORMED_BATCH,
    Check(
        "batch with too many items",
        _SECTION,
        "413 batch_too_large, and nothing is run",
        _too_large,
        why="A limit that is not enforced lets one client take the server's time.",
        change="Count the items before the first is run; respond 413 batch_too_large.",
    ),
    Check(
        "overlapping batches at once",
        _SECTION,
        "each key is executed once, whatever the order, and no batch waits for ever",
        _overlapping,
        why="Two processes of a device send the same entries, and wait for each other's keys.",
        change="Claim keys without waiting while others are held; end the results before a key "
        "that is held, with retry_after.",
    ),
    _ANONYMOUS,
    Check(
        "another tenant's key in a batch",
        _SECTION,
        "executed, not replayed",
        _other_tenant,
        why="A replay would show one tenant the response of another.",
        change="Decide the tenant of each item, and make it the first part of its record's key.",
    ),
)
WALK_CHECKS: Final = (OFFER, _MIXED, _MALFORMED_BATCH, _ANONYMOUS)
_VERSIONS: Final[dict[str, Any]] = {
    "section": _SECTION,
    "expected": "create, edit and edit run in one batch; an edit alone is a replay",
    "why": "Each edit names the version of the one before it, which exists only on the server.",
    "change": "Replace {version:…} by the ETag of the latest result with that local_id, before the "
    "fingerprint is made.",
}
FIELD_CHECKS: Final = (Check("version of an earlier item", run=_field_versions, **_VERSIONS),)
PLANNING_CHECKS: Final = (Check("version of an earlier item", run=_planning_versions, **_VERSIONS),)
