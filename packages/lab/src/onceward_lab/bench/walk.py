"""The walk service on PostgreSQL, guarded and bare, in one process.

Requests are ASGI calls without a socket, so that the cost of the guard is not hidden. Every request
is from another walker.
"""

import json
import os
import tempfile
import time
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from onceward.guard.execution import Execution, set_current_execution
from onceward.guard.request import GuardedRequest
from onceward.records import RequestFingerprint
from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.in_process import call, compare, routes_before, spread
from onceward_protocol.staleness import parse_instant
from onceward_services.app import create_app
from onceward_services.auth import CurrentPrincipal
from onceward_services.dev_secrets import development_app_check_key
from onceward_services.settings import load_settings
from onceward_services.walk import model, tree
from onceward_services.walk.account_model import EnergySpend, EnergySpent
from onceward_services.walk.action_attestation import AppCheckTokens, attest_actions
from onceward_services.walk.api import enqueue_settlement
from onceward_services.walk.catalogue import bundled_catalogue
from onceward_services.walk.energy import spend_energy
from onceward_services.walk.sse import StreamNotifier
from onceward_services.walk.steps.attestation import AppCheck
from onceward_services.walk.steps.ingest import StepIngestion
from onceward_services.walk.steps.model import IngestResponse, StepReport
from onceward_services.walk.views import allocation_views, node_views

SECRET = "a secret for the benchmark, long enough for HS256"
_WALKERS = """
INSERT INTO walkers (tenant, points_banked, energy_balance, allocation_seq, ledger_seq, event_seq,
                     created_at, updated_at)
SELECT 'w-' || n, 100, 1000, 0, 0, 0, now(), now() FROM generate_series(1, $1::bigint) AS n
"""


async def measure(url: str, rounds: int, seconds: float, *, count: int = 200_000) -> dict[str, Any]:
    """Return guarded ÷ bare for the writes of walk; ``count`` is the number of walkers."""
    with tempfile.TemporaryDirectory(prefix="onceward-bench-") as directory:
        settings = load_settings(
            database_url=url,
            jwt_secret=SECRET,
            home=Path(directory),
            run_jobs=False,
            log_level="CRITICAL",
            walk_rate_limit="0",
            step_ingest_rate_limit="",
        )
        app = create_app(settings)
        onceward = app.state.onceward
        _add_bare_routes(app, settings)
        await onceward.open()
        try:
            import asyncpg

            connection = await asyncpg.connect(url)
            await connection.execute(_WALKERS, count)
            await connection.close()
            walkers = iter(range(1, count))
            app_check = _app_check_token(settings)
            token = app_check()
            found = {}
            for name, guarded, bare, body in (
                ("tree.allocate", "/tree/allocate", "/tree/bare-allocate", _allocation),
                ("step.ingest", "/step/ingest", "/tree/bare-ingest", _report),
                ("energy.spend", "/energy/spend", "/tree/bare-spend", _purchase),
            ):

                async def send(path: str, body: Any = body) -> None:
                    await _post(app, path, f"w-{next(walkers)}", body, token)

                found[name] = await compare(
                    partial(send, guarded), partial(send, bare), rounds, seconds
                )
            return found
        finally:
            await onceward.close()


def _add_bare_routes(app: FastAPI, settings: Any) -> None:
    """Add the same handlers without key, look-up, record and audit event.

    Each has the same parameters as the guarded one and is found as late among the routes.
    """
    onceward = app.state.onceward
    catalogue = bundled_catalogue()
    nodes = node_views(catalogue, energy_required=False)
    ingestion = StepIngestion(onceward, settings, AppCheck(settings, settings.home, onceward.clock))
    policy = settings.policies().walk.replace(audit=False)
    attest, notifier = attest_actions(onceward, settings), StreamNotifier()

    def _bare_request(caller: CurrentPrincipal) -> GuardedRequest:
        return GuardedRequest(
            endpoint="bare",
            policy=policy,
            principal=caller,
            record_id=None,
            fingerprint=RequestFingerprint("0" * 64, "0" * 64),
            body=b"",
            request_id="r",
            correlation_id="c",
        )

    with routes_before(app, "/tree/allocate") as router:

        @router.post("/tree/bare-allocate")
        async def allocate(
            wanted: model.TreeAllocation,
            caller: CurrentPrincipal,
            tokens: AppCheckTokens = None,
        ) -> model.TreeState:
            await attest(tokens)
            unit = await onceward.store.begin()
            set_current_execution(Execution(_bare_request(caller), unit))
            after = await tree.allocate(
                unit.statements,
                caller.tenant,
                [choice.node_id for choice in wanted.allocations],
                now=onceward.clock.now(),
                catalogue=catalogue,
                energy_required=False,
                empty_after=settings.empty_day_after,
                acted_at=parse_instant(wanted.client_generated_at, "clientGeneratedAt"),
            )
            await enqueue_settlement(onceward, unit.statements, caller.tenant, after.settle_at)
            await unit.commit(None, None)
            notifier.notify(caller.tenant)
            return model.TreeState(
                walker_id=caller.tenant,
                points_banked=after.points_banked,
                energy_balance=after.energy_balance,
                spendable_energy=after.spendable_energy,
                catalogue_version=catalogue.version,
                allocations=allocation_views(after.allocations),
                nodes=nodes,
            )

    with routes_before(app, "/energy/spend") as router:

        @router.post("/tree/bare-spend")
        async def spend(
            wanted: EnergySpend, caller: CurrentPrincipal, tokens: AppCheckTokens = None
        ) -> EnergySpent:
            await attest(tokens)
            unit = await onceward.store.begin()
            spent = await spend_energy(
                unit.statements,
                caller.tenant,
                wanted.sink,
                wanted.amount,
                sinks=settings.energy_sinks,
                acted_at=parse_instant(wanted.client_generated_at, "clientGeneratedAt"),
                now=onceward.clock.now(),
            )
            await unit.commit(None, None)
            notifier.notify(caller.tenant)
            return EnergySpent(
                spend_id=spent.id,
                sink=wanted.sink,
                amount=wanted.amount,
                energy_balance=spent.energy_balance,
                provisional=spent.is_provisional,
            )

    with routes_before(app, "/step/ingest") as router:

        @router.post("/tree/bare-ingest")
        async def ingest(
            report: StepReport,
            caller: CurrentPrincipal,
            tokens: AppCheckTokens = None,
        ) -> IngestResponse:
            unit = await onceward.store.begin()
            run = Execution(_bare_request(caller), unit)
            set_current_execution(run)
            response = await ingestion.ingest(unit.statements, run, report, tokens or [])
            await unit.commit(None, None)
            return response


def _allocation(_key: str) -> dict[str, Any]:
    return {
        "allocations": [{"nodeId": "node.even-stride"}],
        "clientGeneratedAt": datetime.now(UTC).isoformat(),
    }


def _purchase(_key: str) -> dict[str, Any]:
    return {"sink": "craft", "amount": 7, "clientGeneratedAt": datetime.now(UTC).isoformat()}


def _report(key: str) -> dict[str, Any]:
    end = datetime.now(UTC)
    return {
        "day": end.date().isoformat(),
        "count": 4000,
        "source": "HealthKit",
        "tz": "UTC",
        "sampleSpan": {"start": (end - timedelta(hours=2)).isoformat(), "end": end.isoformat()},
        "sourceBundleId": "com.apple.health",
        "idempotencyKey": key,
        "clientSubmittedAt": end.isoformat(),
    }


def _app_check_token(settings: Any) -> Any:
    from onceward_services.cli import tokens

    os.environ["ONCEWARD_HOME"] = str(settings.home)
    development_app_check_key(settings.home)
    return lambda: tokens._app_check(None, timedelta(minutes=4))  # noqa: SLF001 - our own


_HISTORY = """
INSERT INTO tree_refunds (tenant, seq, node_id, points_cost, energy_cost, allocated_at, reason,
                          refunded_at)
SELECT 'old-' || w, n, 'node.even-stride', 1, 0, now(), 'rejected', now()
  FROM generate_series(1, $1::bigint) AS w, generate_series(1, $2::bigint) AS n;
"""
_EVENTS = """
INSERT INTO walker_events (tenant, seq, type, data, created_at)
SELECT 'old-' || w, n, 'tree.allocated', '{}', now()
  FROM generate_series(1, $1::bigint) AS w, generate_series(1, $2::bigint) AS n;
"""
_OLD = """
INSERT INTO walkers (tenant, points_banked, energy_balance, allocation_seq, ledger_seq, event_seq,
                     created_at, updated_at)
SELECT prefix || n, 100, 0, $2::bigint, 0, $2::bigint, now(), now()
  FROM generate_series(1, $1::bigint) AS n, (VALUES ($3::text)) AS named(prefix);
"""


async def history(url: str, walkers: int = 40, length: int = 10_000) -> dict[str, Any]:
    """Return the time of a request of a walker with a long history ÷ that of a new one."""
    import asyncpg

    with tempfile.TemporaryDirectory(prefix="onceward-bench-") as directory:
        settings = load_settings(
            database_url=url,
            jwt_secret=SECRET,
            home=Path(directory),
            run_jobs=False,
            log_level="CRITICAL",
            walk_rate_limit="0",
        )
        app = create_app(settings)
        await app.state.onceward.open()
        try:
            connection = await asyncpg.connect(url)
            await connection.execute(_OLD, walkers, length, "old-")
            await connection.execute(_OLD, walkers, 0, "new-")
            await connection.execute(_HISTORY, walkers, length, timeout=300)
            await connection.execute(_EVENTS, walkers, length, timeout=300)
            await connection.execute("VACUUM ANALYZE", timeout=300)
            await connection.close()
            ratios = []
            for number in range(1, walkers + 1):
                took = {}
                order = ("old-", "new-") if number % 2 else ("new-", "old-")
                for kind in order:
                    took[kind] = await _seconds_to_allocate(app, f"{kind}{number}")
                ratios.append(took["old-"] / took["new-"])
            return spread(ratios[5:])
        finally:
            await app.state.onceward.close()


async def _seconds_to_allocate(app: Any, sub: str) -> float:
    started = time.perf_counter()
    await _post(app, "/tree/allocate", sub, _allocation, "")
    return time.perf_counter() - started


async def _post(app: Any, path: str, sub: str, body: Any, app_check: str) -> None:
    key = str(uuid.uuid4())
    now = datetime.now(UTC)
    signed = mint_token(SECRET, sub=sub, org=None, roles=[], lifetime=timedelta(hours=1), now=now)
    headers = {
        "authorization": f"Bearer {signed}",
        "idempotency-key": key,
        "x-firebase-appcheck": app_check,
    }
    status, content = await call(app, "POST", path, json.dumps(body(key)).encode(), headers)
    if status != 200:
        raise RuntimeError(f"{path}: {status} {content!r}")
