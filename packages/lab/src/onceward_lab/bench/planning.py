"""Planning and field services on PostgreSQL: distant pages, long histories, a bare PATCH."""

import json
import statistics
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
from fastapi import FastAPI, Request, Response

from onceward import update_with_version
from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.in_process import call, routes_before, spread
from onceward_services.app import create_app
from onceward_services.auth import CurrentPrincipal
from onceward_services.planning.aggregates import IfMatch, json_response
from onceward_services.planning.model import MissionPatch, check_period, row_view
from onceward_services.planning.repository import change_mission, find
from onceward_services.settings import load_settings

SECRET = "a secret for the benchmark, long enough for HS256"
PAGES = 10_000
PER_PAGE = 5
NOTIFICATIONS = 1_000_000

# Increasing ids, like UUID version 7: n in the first characters.
_ID = "(lpad(to_hex({n}), 8, '0') || '-0000-7000-8000-000000000000')"
_PROJECT = f"""
INSERT INTO planning_projects (tenant, id, name, version, created_at, updated_at)
VALUES ('acme', {_ID.format(n="1")}, 'a project', 1, now(), now())
"""
_FILL = {
    "missions": f"""
INSERT INTO planning_missions (tenant, id, project_id, title, status, version, created_at,
                               updated_at)
SELECT 'acme', {_ID.format(n="n")}, {_ID.format(n="1")}, 'a mission', 'planned', 1, now(),
       now()
  FROM generate_series(1, $1::int) AS n
""",
    "audit": f"""
INSERT INTO onceward.audit_events (tenant, id, actor, endpoint, payload_hash, status, resource,
                                   request_id, correlation_id, created_at)
SELECT 'acme', {_ID.format(n="n")}, 'ada', 'PATCH /v1/missions/{{mission_id}}', repeat('0', 64),
       200, 'mission:1', 'r', 'c', now()
  FROM generate_series(1, $1::int) AS n
""",
    "activities": f"""
INSERT INTO field_items (tenant, kind, id, version, document, seq, created_at, updated_at)
SELECT 'acme', 'activities', {_ID.format(n="n")}, 1, '{{"title": "an activity"}}', n, now(), now()
  FROM generate_series(1, $1::int) AS n
""",
}
# A person with one notification and a person with many.
_NOTIFICATIONS = (
    f"""
INSERT INTO planning_notifications (tenant, id, assignment_id, version, kind, mission_id, recipient,
                                    told_at, seq)
SELECT 'acme', {_ID.format(n="n")}, {_ID.format(n="n")}, 1, 'moved', {_ID.format(n="1")}, person,
       now(), number
  FROM (SELECT 0 AS n, 'one' AS person, 1 AS number
        UNION ALL SELECT n, 'many', n FROM generate_series(1, $1::int) AS n) AS added
""",
    "INSERT INTO planning_inboxes VALUES ('acme', 'one', 1), ('acme', 'many', $1::int)",
)


def token(sub: str = "acme") -> str:
    """Return a bearer token of a member of the organization."""
    now, lifetime = datetime.now(UTC), timedelta(hours=4)
    return mint_token(SECRET, sub=sub, org="acme", roles=["admin"], lifetime=lifetime, now=now)


class PlanningApp:
    """The app with one organization, and headers of one of its users."""

    def __init__(self, url: str, home: Path) -> None:
        settings = load_settings(
            database_url=url,
            jwt_secret=SECRET,
            home=home,
            run_jobs=False,
            log_level="CRITICAL",
            planning_rate_limit="0",
        )
        self.app = create_app(settings)
        _add_bare_patch(self.app)
        self.headers = {"authorization": f"Bearer {token()}"}

    async def page(self, path: str, sub: str = "acme") -> tuple[float, str | None]:
        """Read a page; returns the seconds it took and the cursor of the next page."""
        headers = self.headers if sub == "acme" else {"authorization": f"Bearer {token(sub)}"}
        started = time.perf_counter()
        status, body = await call(self.app, "GET", path, b"", headers)
        took = time.perf_counter() - started
        if status != 200:
            raise RuntimeError(f"{path}: {status} {body!r}")
        found = json.loads(body)
        return took, found.get("next")


def _add_bare_patch(app: FastAPI) -> None:
    """Add the same PATCH without key, record and audit event."""
    onceward = app.state.onceward

    with routes_before(app, "/v1/missions/{mission_id}") as router:

        @router.patch("/v1/bare/{mission_id}")
        async def patch(
            mission_id: str,
            mission: MissionPatch,
            caller: CurrentPrincipal,
            request: Request,
            _tag: IfMatch = None,
        ) -> Response:
            fields = mission.model_dump(exclude={"version"}, exclude_unset=True)
            unit = await onceward.store.begin()
            tx, tenant = unit.statements, caller.tenant
            row = await update_with_version(
                if_match=request.headers.getlist("if-match"),
                in_body=mission.version,
                current=lambda: find(tx, "mission", tenant, mission_id),
                write=lambda version: change_mission(
                    tx,
                    tenant,
                    mission_id,
                    fields,
                    version=version,
                    now=onceward.clock.now(),
                ),
            )
            check_period(row)
            await unit.commit(None, None)
            return json_response(row_view(row))


async def pages(url: str, rounds: int, count: int = PAGES) -> dict[str, Any]:
    """Return the time of the last page ÷ that of the first, for each list."""
    with tempfile.TemporaryDirectory(prefix="onceward-bench-") as directory:
        service = PlanningApp(url, Path(directory))
        await service.app.state.onceward.open()
        try:
            rows = count * PER_PAGE
            await fill(url, {"missions": rows, "audit": rows, "activities": rows})
            project = "00000001-0000-7000-8000-000000000000"
            return {
                name: await _last_page(service, f"{path}limit={PER_PAGE}", rounds, count)
                for name, path in {
                    "missions": f"/v1/projects/{project}/missions?",
                    "audit": "/v1/audit?",
                    "activities": "/api/v1/activities?",
                }.items()
            }
        finally:
            await service.app.state.onceward.close()


async def _last_page(service: PlanningApp, path: str, rounds: int, count: int) -> dict[str, Any]:
    """Follow the cursors to the last page, then read first and last page in turns."""
    cursor, pages_read = None, 1
    while True:
        _, following = await service.page(path if cursor is None else f"{path}&after={cursor}")
        if following is None or pages_read >= count:
            break
        cursor, pages_read = following, pages_read + 1
    last = f"{path}&after={cursor}"
    ratios, first_ms = [], []
    for _ in range(rounds):
        times: dict[str, float] = {}
        for name, target in (("first", path), ("last", last), ("last", last), ("first", path)):
            took, _ = await service.page(target)
            times[name] = min(took, times.get(name, took))
        ratios.append(times["last"] / times["first"])
        first_ms.append(times["first"] * 1e3)
    return spread(ratios) | {
        "pages": pages_read,
        "first_ms": round(statistics.median(first_ms), 3),
    }


async def notifications(url: str, rounds: int, count: int = NOTIFICATIONS) -> dict[str, Any]:
    """Return the time of the last notification of many ÷ that of the only one."""
    with tempfile.TemporaryDirectory(prefix="onceward-bench-") as directory:
        service = PlanningApp(url, Path(directory))
        await service.app.state.onceward.open()
        connection = await asyncpg.connect(url)
        try:
            for statement in _NOTIFICATIONS:
                await connection.execute(statement, count)
            await connection.execute("VACUUM ANALYZE")
            before_last = await connection.fetchval(
                "SELECT seq || '-' || right(id, 12) FROM planning_notifications"
                " WHERE recipient = 'many' AND seq = $1",
                count - 1,
            )
            paths = {"one": "/v1/notifications", "many": f"/v1/notifications?after={before_last}"}
            ratios = []
            for _ in range(rounds):
                times: dict[str, float] = {}
                for name in ("one", "many", "many", "one"):
                    took, _ = await service.page(paths[name], name)
                    times[name] = min(took, times.get(name, took))
                ratios.append(times["many"] / times["one"])
            return spread(ratios) | {"notifications": count}
        finally:
            await connection.close()
            await service.app.state.onceward.close()


async def fill(url: str, rows: dict[str, int]) -> None:
    """Fill the tables of one organization."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_PROJECT)
        for name, count in rows.items():
            await connection.execute(_FILL[name], count)
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()
