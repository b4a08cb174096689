"""Every query uses an index of the tenant, so a long history costs nothing."""

import re
from typing import Any

import pytest

from onceward.stores.sql_loader import load_queries

from .fixtures import Game, ok

HISTORY = 3000
TABLES = [
    "walkers",
    "tree_allocations",
    "tree_refunds",
    "quest_progress",
    "energy_ledger",
    "energy_holds",
    "walker_events",
]
# The parameters of each query. Inserts are not listed.
SMALL = {
    "walkers",
    "quest_progress",
    "tree_allocations",
    "streak_states",
    "step_logs",
    "energy_holds",
}
PARAMS: dict[str, dict[str, Any]] = {
    "profile": {},
    "find_entry": {"reason": "steps", "reference": "7"},
    "list_events": {"after": HISTORY - 10, "limit": 10},
    "allocations": {},
    "tree_state": {},
    "quest_board": {},
    "confirm_allocation": {"node_id": "node.even-stride"},
    "advance_quest": {"quest_id": "quest.001", "steps_done": 1, "unsettled": ""},
    "complete_quest": {"quest_id": "quest.001", "points": 1, "unsettled": ""},
    "find_walker": {},
    "list_holds": {},
    "unsettled_quests": {},
}
# The database generates the rows: single inserts would take longer than all tests.
NUMBERS = (
    "WITH RECURSIVE numbers (n) AS"
    f" (SELECT 1000 UNION ALL SELECT n + 1 FROM numbers WHERE n < {1000 + HISTORY - 1})"
)
LONG_AGO = {
    "tree_refunds (tenant, seq, node_id, points_cost, energy_cost, allocated_at, reason,"
    " refunded_at)": ":tenant, n, 'node.light-pack', 1, 0, :now, 'steps_rejected', :now",
    "energy_ledger (tenant, seq, delta, reason, reference, balance_after, created_at)": (
        ":tenant, n, 0, 'steps', CAST(n AS TEXT), 0, :now"
    ),
    "walker_events (tenant, seq, type, data, created_at)": ":tenant, n, 'x', '{}', :now",
}

PLANS_OF_ONE_SERVER = pytest.mark.parametrize("database_url", ["sqlite", "postgres"], indirect=True)


async def live_long(game: Game) -> None:
    """Insert a long history for Ada and for others."""
    await game.ada.finish("quest.001")
    ok(await game.ada.allocate("node.even-stride"))
    now = game.clock.at
    for walker in ("ada", "eve", "bob"):
        unit = await game.store.begin()
        for columns, values in LONG_AGO.items():
            await unit.transaction.execute(
                f"{NUMBERS} INSERT INTO {columns} SELECT {values} FROM numbers",
                {"tenant": walker, "now": now},
            )
        await unit.commit(None, None)


def in_place(sql: str, params: dict[str, Any]) -> str:
    """Inline the values: EXPLAIN of a prepared statement may show another plan."""

    def literal(match: re.Match[str]) -> str:
        value = params[match[1]]
        return str(value) if isinstance(value, int) else f"'{value}'"

    without_comments = re.sub(r"--[^\n]*", "", sql)
    return re.sub(r"(?<!:):(\w+)", literal, without_comments)


@PLANS_OF_ONE_SERVER
async def test_no_query_scans_a_long_history(game: Game) -> None:
    await live_long(game)
    is_sqlite = game.store.name == "sqlite"
    if not is_sqlite:
        unit = await game.store.begin()
        await unit.transaction.execute("ANALYZE")
        await unit.commit(None, None)
    queries = load_queries("onceward_services.walk")
    for name, given in PARAMS.items():
        params = {"tenant": "ada", "now": game.clock.at.isoformat()} | given
        explain = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN "
        rows = await game.store.read(explain + in_place(queries[name], params))
        plan = "\n".join(str(row["detail" if is_sqlite else "QUERY PLAN"]) for row in rows)
        if is_sqlite:
            assert "SCAN" not in plan, f"{name}: {plan}"
            assert "tenant=?" in plan, f"{name}: {plan}"
        else:
            # Small tables are scanned, which is fine.
            scanned = set(re.findall(r"Seq Scan on (\w+)", plan))
            assert scanned <= SMALL, f"{name}: {plan}"


@PLANS_OF_ONE_SERVER
async def test_ledger_and_snapshot_read_only_their_page_of_a_long_history(game: Game) -> None:
    await live_long(game)
    given = {"tenant": "ada", "before": HISTORY, "after": HISTORY - 10, "limit": 10}
    is_sqlite = game.store.name == "sqlite"
    queries = load_queries("onceward_services.walk", "account.sql")
    for name in ("ledger_page", "snapshot"):
        if is_sqlite:
            plan = await game.store.read("EXPLAIN QUERY PLAN " + in_place(queries[name], given))
            scanned = [row["detail"] for row in plan if row["detail"].startswith("SCAN")]
            # Only the page itself, which the subquery has limited.
            assert set(scanned) <= {"SCAN e", "SCAN e LEFT-JOIN", "SCAN (subquery-2)"}, (
                name,
                scanned,
            )
        else:
            await game.store.write("ANALYZE")
            plan = await game.store.read("EXPLAIN " + in_place(queries[name], given))
            text = "\n".join(str(row["QUERY PLAN"]) for row in plan)
            assert set(re.findall(r"Seq Scan on (\w+)", text)) <= SMALL, f"{name}: {text}"


async def test_accepted_days_are_not_read_on_sqlite(sqlite_game: Game) -> None:
    days: dict[str, Any] = {"tenant": "ada", "since": "2026-03-01", "after": 0, "limit": 10}
    days |= {"reason": "r", "reference": "1"}
    of_walk, of_steps = (load_queries(f"onceward_services.walk{name}") for name in ("", ".steps"))
    queries = {
        "snapshot": load_queries("onceward_services.walk", "account.sql")["snapshot"],
        **{name: of_walk[name] for name in ("profile", "tree_state", "find_entry")},
        **{
            name: of_steps[name] for name in ("open_days", "rejected_days_since", "open_challenges")
        },
    }
    for name, query in queries.items():
        plan = await sqlite_game.rows("EXPLAIN QUERY PLAN " + in_place(query, days))
        details = [row["detail"] for row in plan]
        assert any("INDEX idx_step_logs_doubtful (tenant=? AND status=?" in d for d in details), (
            name,
            details,
        )
        # By the primary key, a day or the days since one are read, not all days of the walker.
        assert not [
            d for d in details if re.fullmatch(r"SEARCH (step_logs|p|d) .*\(tenant=\?\)", d)
        ]


async def test_old_refunds_are_neither_listed_nor_read(game: Game) -> None:
    await live_long(game)
    assert await game.ada.allocated() == ["node.even-stride"]
    ok(await game.ada.allocate("node.light-pack"))
    assert await game.ada.allocated() == ["node.even-stride", "node.light-pack"]


@pytest.mark.parametrize("table", TABLES)
async def test_every_key_and_index_begins_with_the_tenant(sqlite_game: Game, table: str) -> None:
    """But for the one by which old rows of all tenants are found, to be deleted."""
    indexes = await sqlite_game.rows(
        f"SELECT name FROM pragma_index_list('{table}') WHERE name <> 'idx_{table}_age'"
    )
    assert indexes
    for index in indexes:
        columns = await sqlite_game.rows(
            f"SELECT name FROM pragma_index_info('{index['name']}') ORDER BY seqno"
        )
        assert columns[0]["name"] == "tenant"
