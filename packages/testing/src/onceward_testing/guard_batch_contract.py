"""Batches through a front of the guard. Fronts with a batch endpoint inherit it."""

# ruff: noqa: PLR2004 - the names of tests say what they check; statuses of HTTP are numbers
from typing import Any
from uuid import uuid4

from onceward import Policy
from onceward_testing.guard_harness import Caller, GuardHarness, LimiterOf, NewCaller, code_of
from onceward_testing.guard_shop import BATCH_PATH, NOT_SIGNED_IN
from onceward_testing.in_process_client import Response

__all__ = ["GuardBatchContract"]


def _item(key: str, do: str = "", **fields: Any) -> dict[str, Any]:
    item = {"method": "POST", "path": "/orders", "key": key, "body": {"item": "boots"}}
    return {**item, "headers": {"X-Do": do}, **fields}


def _results(response: Response) -> list[dict[str, Any]]:
    assert response.status == 200, response.body
    found: list[dict[str, Any]] = response.json()["results"]
    return found


def _statuses(response: Response) -> list[int]:
    return [result["status"] for result in _results(response)]


class GuardBatchContract(GuardHarness):
    """Tests of the batch endpoint."""

    def test_items_and_single_requests_replay_each_other(self, new_caller: NewCaller) -> None:
        policy = Policy(rate_limit="100/hour", batch_headers=("x-do",))
        caller = new_caller(policy, limiter=LimiterOf(100))
        alone = caller.send("k1")
        assert alone.header("onceward-batch") == f"{BATCH_PATH}; items=200"
        other = _item("k1", body={"item": "hat"})
        items = [_item("k0"), _item("k1"), _item("k2", "422"), _item("k0"), other]
        first = _results(caller.batch(*items))
        assert [result["status"] for result in first] == [201, 201, 422, 201, 409]
        assert [result["replayed"] for result in first] == [False, True, False, True, False]
        assert [result["effect"] for result in first] == [*["stored"] * 4, None]
        assert first[1]["body"] == alone.json()
        assert first[0]["headers"]["etag"] == '"7"'
        assert first[0]["headers"]["ratelimit"]
        assert "onceward-batch" not in first[0]["headers"]
        again = _results(caller.batch(*items[:3]))
        assert [result["replayed"] for result in again] == [True] * 3
        assert [result["body"] for result in again] == [result["body"] for result in first[:3]]
        assert caller.send("k0").is_replay
        assert caller.counts() == (2, 3, 2)

    def test_items_of_another_tenant_are_not_replayed(self, caller: Caller) -> None:
        items = [_item("k0"), _item("k1")]
        assert _statuses(caller.batch(*items)) == [201, 201]
        other = _results(caller.batch(*items, tenant=f"{caller.tenant}-2"))
        assert [result["replayed"] for result in other] == [False, False]

    def test_failed_item_stops_its_lane_and_frees_its_key(self, caller: Caller) -> None:
        items = [
            _item("k0", lane="a"),
            _item("k1", "raise", lane="a"),
            _item("k2", lane="a"),
            _item("k3"),
            _item("k4", "500"),
            _item("k5"),
        ]
        results = _results(caller.batch(*items))
        assert [result["status"] for result in results] == [201, 500, 424, 201, 500, 201]
        assert [results[place]["effect"] for place in (2, 4, 5)] == [None, "none", "stored"]
        assert caller.counts() == (3, 3, 3)
        assert _statuses(caller.batch(_item("k1"), _item("k2"), _item("k4"))) == [201] * 3

    def test_placeholders_are_resolved_from_earlier_results(self, caller: Caller) -> None:
        local = str(uuid4())
        results = _results(
            caller.batch(
                _item("k0", local_id=local),
                _item("k1", body={"parent": f"{{local:{local}}}"}),
                _item(
                    "k2",
                    path=f"/shelves/{{local:{local}}}",
                    headers={"If-Match": f"{{version:{local}}}"},
                ),
            )
        )
        assert [result["status"] for result in results] == [201, 201, 201]
        assert results[1]["body"]["parent"] == results[0]["body"]["id"]
        assert results[2]["body"]["match"] == '"7"'
        [record] = [one for one in caller.records() if one["endpoint"] == "shelves.fill"]
        assert record["response_status"] == 201

    def test_items_that_are_not_guarded_are_refused(self, caller: Caller) -> None:
        hostile: list[dict[str, Any]] = [
            {"path": "/open"},
            {"path": BATCH_PATH},
            {"path": "/%62atch"},
            {"path": "/nowhere"},
            {"path": "/orders", "method": "GET"},
            {"path": "/orders/../open"},
            {"path": "http://evil.example/orders"},
            {"headers": {"X-Tenant": "bob"}},
            {"headers": {"Cookie": "session=another"}},
            {"headers": {"If-Match": "x\r\nX-Tenant: bob"}},
        ]
        items = [{**_item(f"h{number}"), **wrong} for number, wrong in enumerate(hostile)]
        statuses = _statuses(caller.batch(*items, _item("k0")))
        assert statuses == [400] * len(hostile) + [201]
        assert (caller.runs, caller.counts()) == (1, (1, 1, 1))

    def test_malformed_batch_is_refused(self, caller: Caller) -> None:
        many = caller.batch(*(_item(f"k{number}") for number in range(201)))
        assert code_of(many) == (413, "batch.too_large")
        large = caller.send(None, path=BATCH_PATH, body={"items": ["x" * 2**20]})
        assert code_of(large) == (413, "batch.too_large")
        assert caller.send(None, path=BATCH_PATH, body=[]).status == 400
        untyped = caller.send(None, path=BATCH_PATH, content=b'{"items": []}', content_type=None)
        assert untyped.status == 400
        assert caller.send(method="GET", path=BATCH_PATH).status in (200, 404, 405)
        assert caller.runs == 0

    def test_items_need_the_sign_in_of_the_app(self, caller: Caller) -> None:
        """Where the app signs each item in, each is refused; elsewhere the whole batch is."""
        caller.batch(_item("k0"))
        refused = caller.batch(_item("k0"), _item("k1"), tenant=NOT_SIGNED_IN)
        assert refused.status == 401 or _statuses(refused) == [401, 401]
        assert (caller.runs, caller.shop.visits[NOT_SIGNED_IN].runs) == (1, [])
