"""Records, requests that did not run, and traces, as operators find them."""

import asyncio
import re
import uuid
from html import unescape

import pytest

from packages.operator.tests.console.lab import ConsoleLab

ENDPOINT = "POST /orders/{shop}"


async def flush(lab: ConsoleLab) -> None:
    """Write what the log of requests has collected."""
    await lab.onceward.runtime.request_log.stop()
    lab.onceward.runtime.request_log.start()


def keys_of(text: str) -> list[str]:
    return re.findall(r'<code class="id">([0-9a-f-]{36})</code>', text)


async def test_list_pages_through_all_records_once(lab: ConsoleLab) -> None:
    for _ in range(120):
        assert (await lab.order("bob")).status_code == 201
    async with lab.browser("ada", "viewer") as browser:
        found, path = list[str](), "records?tenant=bob"
        while path:
            page = await browser.get(path)
            assert page.status_code == 200
            listed = keys_of(page.text)
            assert 0 < len(listed) <= 20
            found += listed
            following = re.search(r'rel="next" href="/console/([^"]+)"', page.text)
            path = "" if following is None else unescape(following[1])
    assert len(found) == len(set(found)) == 120


@pytest.mark.parametrize("name", ["key", "request_id", "correlation_id"])
async def test_record_is_found_by_each_of_its_ids(lab: ConsoleLab, name: str) -> None:
    key, correlation_id = str(uuid.uuid4()), "tap-1"
    headers = {"idempotency-key": key, "x-correlation-id": correlation_id}
    response = await lab.order("bob", **headers)
    assert (await lab.order("bob")).status_code == 201
    ids = {
        "key": key,
        "request_id": response.headers["x-request-id"],
        "correlation_id": correlation_id,
    }
    async with lab.browser("ada", "viewer") as browser:
        listed = await browser.get(f"records?{name}={ids[name]}")
        assert keys_of(listed.text) == [key]
        shown = await browser.get(f"find?q={ids[name]}")
        assert shown.url.path == "/console/records/show"
        assert shown.url.params["key"] == key


async def test_replay_is_found_by_its_own_request_id(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    first = await lab.order("bob", **{"idempotency-key": key})
    again = await lab.order("bob", **{"idempotency-key": key})
    assert again.headers["idempotency-replayed"] == "true"
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={again.headers['x-request-id']}")
        assert "It was replayed" in page.text
        assert first.headers["x-request-id"] in page.text


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/orders/mill?item=hat", "query"),
        ("/orders/farm", "path or query"),
    ],
)
async def test_conflict_is_explained_by_the_part_that_differs(
    lab: ConsoleLab, path: str, part: str
) -> None:
    key = str(uuid.uuid4())
    await lab.order("bob", **{"idempotency-key": key})
    refused = await lab.order("bob", path, **{"idempotency-key": key})
    assert refused.status_code == 409
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={refused.headers['x-request-id']}")
        assert "Why 409?" in page.text
        assert f"<strong>{part}</strong>" in page.text


async def test_refusal_before_the_key_is_read_is_found(lab: ConsoleLab) -> None:
    refused = await lab.order("bob", **{"idempotency-key": "two words"})
    assert refused.status_code == 400
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={refused.headers['x-request-id']}")
        assert "It was refused" in page.text


async def counted(lab: ConsoleLab, name: str) -> float:
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render(
            "SELECT sum(number) AS number FROM onceward_request_counts WHERE name = :name"
        ),
        {"name": name},
    )
    return float(rows[0]["number"] or 0)


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/orders/mill", {"idempotency-key": None}, 400, "idempotency.key_required"),
        ("/orders/mill", {"idempotency-key": "two words"}, 400, "idempotency.key_invalid"),
        ("/orders/mill?item=private", {}, 403, None),
        ("/orders/mill?item=none", {}, 422, None),
    ],
)
async def test_every_counted_refusal_is_found_by_its_request_id(
    lab: ConsoleLab, path: str, headers: dict[str, str | None], status: int, code: str | None
) -> None:
    refused = await lab.order("bob", path, **headers)
    assert refused.status_code == status
    await flush(lab)
    assert await counted(lab, "refused") == 1
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={refused.headers['x-request-id']}")
        assert page.status_code == 200, page.text
        assert page.url.path != "/console/find"
        assert f">{status}<" in page.text
        assert code is None or f"<code>{code}</code>" in page.text


async def test_request_whose_handler_raised_is_found_by_its_request_id(lab: ConsoleLab) -> None:
    with pytest.raises(RuntimeError, match="the stock cannot be read"):
        await lab.order("bob", "/orders/mill?item=broken", **{"x-request-id": "broken-1"})
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("find?q=broken-1")
        assert "It failed" in page.text
        assert "rolled back" in page.text


async def test_refusal_of_a_stranger_is_not_logged(lab: ConsoleLab) -> None:
    async with lab.client() as client:
        response = await client.post("/orders/mill")
        assert response.status_code == 401
    await flush(lab)
    assert (
        await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT * FROM onceward_request_log")
        )
        == []
    )


async def test_log_of_requests_has_no_key_and_no_payload(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    for item in ("secret-hat", "secret-hat", "secret-coat"):
        await lab.order("bob", f"/orders/mill?item={item}", **{"idempotency-key": key})
    await flush(lab)
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render("SELECT * FROM onceward_request_log")
    )
    assert len(rows) == 2
    text = str([dict(row) for row in rows])
    assert key not in text
    assert "secret" not in text


async def test_trace_shows_one_action_in_the_order_of_time(lab: ConsoleLab) -> None:
    headers = {"idempotency-key": str(uuid.uuid4()), "x-correlation-id": "tap-7"}
    await lab.order("bob", "/orders/mill?item=job", **headers)
    await lab.order("bob", "/orders/mill?item=job", **headers)
    await lab.order("bob", "/orders/mill?item=hat", **headers)
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("trace/tap-7")
        kinds = re.findall(r'<span class="state">(\w+)</span>', page.text)
        assert kinds.index("record") < kinds.index("replayed") < kinds.index("mismatched")
        assert "audit" in kinds


async def test_refused_request_is_found_by_its_key(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    headers = {"idempotency-key": key}
    assert (await lab.order("bob", "/orders/mill?item=private", **headers)).status_code == 403
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q={key}")
        assert page.url.path.startswith("/console/requests/")
        assert "refused by the app" in page.text
    assert (await lab.order("bob", "/orders/mill?item=private", **headers)).status_code == 403
    await flush(lab)
    async with lab.browser("bob", "viewer") as browser:
        page = await browser.get(f"find?q={key}")
        assert page.text.count("Key of a request at") == 2


async def test_request_page_says_what_the_error_code_means(lab: ConsoleLab) -> None:
    refused = await lab.order("bob", **{"idempotency-key": "two words"})
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = (await browser.get(f"requests/{refused.headers['x-request-id']}")).text
        assert "<code>idempotency.key_invalid</code>: Idempotency key invalid" in page
        assert "It is invalid, so it has no record." in page
        assert "Search for the key itself" not in page


async def test_ids_are_found_in_upper_case(lab: ConsoleLab) -> None:
    first = await lab.order("bob")
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"find?q=+{first.headers['x-request-id'].upper()}+")
        assert "This request was executed once" in page.text


async def test_request_page_shows_the_key_and_one_link_to_its_record(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    await lab.order("bob", **{"idempotency-key": key})
    again = await lab.order("bob", **{"idempotency-key": key})
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"requests/{again.headers['x-request-id']}")
        main = page.text.partition("<main")[2]
        assert f"<code>{key}</code>" in main
        assert main.count("records/show?") == 1
        assert "requests/" not in main


async def test_record_of_a_request_that_came_too_early_is_found_by_a_later_replay(
    lab: ConsoleLab,
) -> None:
    """The log has no keys: a replay with the same hash names the record."""
    key = str(uuid.uuid4())
    first = await lab.order("bob", **{"idempotency-key": key})
    lab.onceward.runtime.request_log.add(
        tenant="bob",
        endpoint=ENDPOINT,
        key=key,
        request_id="too-early",
        correlation_id="c",
        outcome="in_progress",
        status=409,
    )
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        assert "Open the record" not in (await browser.get("requests/too-early")).text
        await lab.order("bob", **{"idempotency-key": key})
        await flush(lab)
        page = await browser.get("requests/too-early")
        assert "Open the record of this key" in page.text
        record = await browser.get(f"find?q={first.headers['x-request-id']}")
        assert "This request was executed once" in record.text
        assert "1 request arrived while another one ran" in record.text


async def test_executed_request_whose_client_got_503_names_its_record(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    first = await lab.order("bob", **{"idempotency-key": key})
    lab.onceward.runtime.request_log.add(
        tenant="bob",
        endpoint=ENDPOINT,
        key=key,
        request_id=first.headers["x-request-id"],
        correlation_id="c",
        outcome="unavailable",
        status=503,
    )
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"requests/{first.headers['x-request-id']}")
        assert "What happened is unknown from here" in page.text
        assert "Open the record of this key" in page.text
        record = await browser.get(f"records/show?tenant=bob&endpoint={ENDPOINT}&key={key}")
        assert "Its client got 503, although the request was executed" in record.text


async def test_executed_request_leads_to_its_record(lab: ConsoleLab) -> None:
    first = await lab.order("bob")
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"requests/{first.headers['x-request-id']}")
        assert page.url.path == "/console/records/show"
        assert "This request was executed once" in page.text


@pytest.mark.parametrize("start", ["first", "replay"])
async def test_trace_includes_requests_with_the_same_key_and_other_correlation_ids(
    lab: ConsoleLab, start: str
) -> None:
    """The server makes a correlation id for each request of a client that sends none."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    sent = [
        await lab.order("bob", f"/orders/mill?item={item}", **headers)
        for item in ("job", "job", "hat")
    ]
    ids = [each.headers["x-correlation-id"] for each in sent]
    assert len(set(ids)) == 3
    await lab.order("bob", "/orders/mill?item=job")  # of another key
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"trace/{ids[0] if start == 'first' else ids[1]}")
        kinds = re.findall(r'<span class="state">(\w+)</span>', page.text)
        assert sorted(kinds) == ["audit", "audit", "enqueued", "mismatched", "record", "replayed"]
        rows = page.text.partition("<tbody>")[2]
        own = 4 if start == "first" else 1
        assert rows.count("same key") == 6 - own
        assert "Not included: requests without a key" in page.text
        assert "7 days" in page.text


async def test_search_covers_all_tenants_of_an_operator(
    lab: ConsoleLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a named tenant; others stay hidden."""
    monkeypatch.setattr(lab.console._access, "_tenants_of", lambda _: ("amy", "bob"))
    headers = {"idempotency-key": str(uuid.uuid4()), "x-correlation-id": "tap-3"}
    await lab.order("bob", **headers)
    replay = await lab.order("bob", **headers)
    hidden = await lab.order("eve", **{"x-correlation-id": "tap-4"})
    await flush(lab)
    async with lab.browser("amy", "viewer") as browser:
        for wanted in (headers["idempotency-key"], replay.headers["x-request-id"]):
            assert (await browser.get(f"find?q={wanted}")).status_code == 200
        assert (
            "It was replayed"
            in (await browser.get(f"requests/{replay.headers['x-request-id']}")).text
        )
        assert "replayed" in (await browser.get("trace/tap-3")).text
        page = await browser.get("find?q=tap-4")
        assert page.status_code == 404
        assert "in the tenants amy, bob." in page.text
        assert (await browser.get(f"find?q={hidden.headers['x-request-id']}")).status_code == 404


@pytest.mark.parametrize(
    "path", ["find?q=nowhere", "requests/nowhere", "trace/nowhere", "records/show?{}"]
)
async def test_page_without_a_result_says_what_was_searched(lab: ConsoleLab, path: str) -> None:
    asked = path.format(f"tenant=bob&endpoint={ENDPOINT}&key=nowhere")
    async with lab.browser("bob", "viewer") as browser:
        page = await browser.get(asked)
        assert page.status_code == 404
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page.text))
        assert "There is no nowhere in the tenant bob. It was searched as" in text
        assert "You may see the tenant bob only." in text
        assert "for 7 days" in text
        assert "4 hours to 1 day after the request" in text
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get("find?q=nowhere")
        assert "in any tenant." in page.text
        assert "You may see" not in page.text
        assert 'name="tenant"' in page.text


async def test_bound_operator_sees_nothing_of_another_tenant(lab: ConsoleLab) -> None:
    key = str(uuid.uuid4())
    headers = {"idempotency-key": key, "x-correlation-id": "tap-9"}
    first = await lab.order("bob", "/orders/mill?item=job", **headers)
    refused = await lab.order("bob", "/orders/mill?item=hat", **headers)
    await flush(lab)
    jobs = await lab.onceward.store.read(
        lab.onceward.store.table_names.render("SELECT id FROM onceward_jobs")
    )
    first_id = first.headers["x-request-id"]
    paths = [
        "records",
        "records?tenant=bob",
        f"records?key={key}",
        f"records/show?tenant=bob&endpoint={ENDPOINT}&key={key}",
        f"records/show?tenant=eve&endpoint={ENDPOINT}&key={key}",
        "trace/tap-9",
        "trace/tap-9?tenant=bob",
        f"requests/{refused.headers['x-request-id']}",
        f"requests/{first.headers['x-request-id']}",
        *(f"find?q={each}" for each in (key, "tap-9", refused.headers["x-request-id"])),
        f"find?q={jobs[0]['id']}",
        f"find?q={jobs[0]['id']}&tenant=bob",
    ]
    for roles in (("viewer",), ("admin",)):
        async with lab.browser("eve", *roles) as browser:
            for path in paths:
                page = await browser.get(path)
                assert "mill" not in page.text, path
                # What eve has sent may be shown to her.
                assert first_id in path or first_id not in page.text, path
                assert page.status_code in {200, 404}, path
            fields = {"tenant": "bob", "endpoint": ENDPOINT, "key": key, "reason": "test"}
            response = await browser.post("records/remove", **fields)
            assert response.status_code in {403, 404}
    async with lab.browser("ada", "viewer") as browser:
        assert keys_of((await browser.get(f"records?key={key}")).text) == [key]


async def test_list_without_a_match_leads_to_the_search_for_everything(lab: ConsoleLab) -> None:
    refused = await lab.order("bob", **{"idempotency-key": "two words"})
    request_id = refused.headers["x-request-id"]
    await flush(lab)
    async with lab.browser("ada", "viewer") as browser:
        page = await browser.get(f"records?request_id={request_id}")
        assert "No record matches." in page.text
        link = re.search(r'href="/console/(find[^"]+)"', page.text)
        assert link is not None
        assert "It was refused" in (await browser.get(unescape(link[1]))).text


async def test_removed_record_leaves_an_audit_event_with_actor_and_reason(
    lab: ConsoleLab,
) -> None:
    key = str(uuid.uuid4())
    await lab.order("bob", **{"idempotency-key": key})
    fields = {"tenant": "bob", "endpoint": ENDPOINT, "key": key}
    async with lab.browser("ada", "admin") as browser:
        assert (await browser.post("records/remove", reason=" ", **fields)).status_code == 400
        response = await browser.post("records/remove", reason="customer asked", **fields)
        assert response.status_code == 303
        assert (await browser.post("records/remove", reason="again", **fields)).status_code == 404
    rows = await lab.onceward.store.read(
        lab.onceward.store.table_names.render(
            "SELECT actor, reason FROM onceward_audit_events WHERE reason IS NOT NULL"
        )
    )
    assert [dict(row) for row in rows] == [{"actor": "ada via console", "reason": "customer asked"}]
    # Within a second or so: then the memory of this process does not count any more.
    async with asyncio.timeout(30):
        while (
            "idempotency-replayed" in (await lab.order("bob", **{"idempotency-key": key})).headers
        ):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "item",
    ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "\u202eevil\u0000\x1b[31m"],
)
async def test_stored_text_is_shown_and_never_interpreted(lab: ConsoleLab, item: str) -> None:
    response = await lab.order(
        "bob",
        "/orders/mill?"
        + str(lab.client().build_request("GET", "/", params={"item": item}).url.query, "ascii"),
    )
    assert response.status_code == 201
    async with lab.browser("ada", "admin") as browser:
        page = await browser.get(f"find?q={response.headers['x-request-id']}")
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert "<img" not in page.text
        assert "\u202e" not in page.text
        assert "\x1b" not in page.text


@pytest.mark.parametrize(
    "query",
    ["before=yesterday", "after=x", "after=%1f%1f%1f", "key=%00", "tenant=%00", "before=9999"],
)
async def test_malformed_filter_is_an_error_for_the_operator(lab: ConsoleLab, query: str) -> None:
    async with lab.browser("ada", "viewer") as browser:
        response = await browser.get(f"records?{query}")
        assert response.status_code in {200, 400}
        assert "defect" not in response.text
