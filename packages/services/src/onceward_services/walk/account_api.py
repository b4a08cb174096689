"""HTTP routes of the walker's account: the energy ledger, spending, synchronization, deletion."""

from typing import Annotated, Final

from fastapi import APIRouter, Query

from onceward import Onceward
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward_operator.tenant_data import OPERATOR_TENANT
from onceward_protocol.staleness import parse_instant
from onceward_services.auth import CurrentPrincipal
from onceward_services.routing import service_router
from onceward_services.settings import Settings
from onceward_services.walk import account_model as model
from onceward_services.walk.action_attestation import AppCheckTokens, attest_actions
from onceward_services.walk.body_key import check_key_in_body
from onceward_services.walk.documentation import ACTION_ERRORS, documented, envelope_errors
from onceward_services.walk.energy import read_ledger, spend_energy
from onceward_services.walk.erasure import DELETE_WALKER, request_deletion
from onceward_services.walk.model import EventView, NodeView, QuestView, TreeState
from onceward_services.walk.sse import StreamNotifier
from onceward_services.walk.steps.streak_view import streak_view
from onceward_services.walk.sync import read_snapshot
from onceward_services.walk.views import allocation_views, quest_fields

__all__ = ["router"]

_MAX_SEQ: Final = 2**63 - 1


def router(
    onceward: Onceward, settings: Settings, notifier: StreamNotifier, nodes: list[NodeView]
) -> APIRouter:
    """Build the routes. ``nodes`` are those of the tree, in the format of ``/tree/state``."""
    api = service_router("walk")
    policy = settings.policies().walk
    sinks = settings.energy_sinks
    attest = attest_actions(onceward, settings)
    catalogue = settings.catalogue

    @api.get(
        "/walker/energy",
        summary="List the energy ledger",
        description="Entries with the newest first, and the balance.",
        responses=envelope_errors(400, 401, 422, 503),
    )
    async def energy(
        caller: CurrentPrincipal,
        after: Annotated[int | None, Query(ge=1, le=_MAX_SEQ)] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> model.EnergyPage:
        before = _MAX_SEQ if after is None else after
        page = await read_ledger(onceward.store, caller.tenant, before=before, limit=limit + 1)
        items = [
            model.EnergyEntry(
                id=entry.seq,
                delta=entry.delta,
                reason=entry.reason,
                reference=entry.reference,
                balance_after=entry.balance_after,
                created_at=entry.created_at,
            )
            for entry in page.entries[:limit]
        ]
        following = items[-1].id if len(page.entries) > limit else None
        return model.EnergyPage(energy_balance=page.energy_balance, items=items, next=following)

    @api.post(
        "/energy/spend",
        summary="Spend energy",
        **documented(
            f"Debits energy for one of the app's sinks: {', '.join(f'`{s}`' for s in sinks)}.",
            "INSUFFICIENT_ENERGY",
            "UNKNOWN_SINK",
            *ACTION_ERRORS,
        ),
    )
    @onceward.guard("energy.spend", policy=policy)
    async def spend(
        wanted: model.EnergySpend,
        tx: Tx,
        caller: Caller,
        run: Run,
        tokens: AppCheckTokens = None,
    ) -> model.EnergySpent:
        await attest(tokens)
        check_key_in_body(run, wanted.idempotency_key)
        spent = await spend_energy(
            tx,
            caller.tenant,
            wanted.sink,
            wanted.amount,
            sinks=sinks,
            acted_at=parse_instant(wanted.client_generated_at, "clientGeneratedAt"),
            now=onceward.clock.now(),
        )
        run.describe(resource=f"spend:{spent.id}")
        run.after_commit(lambda: notifier.notify(caller.tenant))
        return model.EnergySpent(
            spend_id=spent.id,
            sink=wanted.sink,
            amount=wanted.amount,
            energy_balance=spent.energy_balance,
            provisional=spent.is_provisional,
        )

    @api.get(
        "/sync",
        summary="Read everything at once",
        description=(
            "The tree, the quests, the energy, the streak, and the events after `after`, all of "
            "one instant. `lastEventId` is the next `after` of a device that has got all events."
        ),
        responses=envelope_errors(400, 401, 422, 503),
    )
    async def sync(
        caller: CurrentPrincipal,
        after: Annotated[int, Query(ge=0, le=_MAX_SEQ)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> model.SyncView:
        found = await read_snapshot(
            onceward.store,
            caller.tenant,
            after=after,
            limit=limit + 1,
            catalogue=catalogue,
            rules=settings.streak_rules,
            now=onceward.clock.now(),
        )
        profile, events = found.profile, found.events[:limit]
        return model.SyncView(
            walker_id=caller.tenant,
            last_event_id=profile.last_event_id,
            tree=TreeState(
                walker_id=caller.tenant,
                points_banked=profile.points_banked,
                energy_balance=profile.energy_balance,
                spendable_energy=profile.spendable_energy,
                catalogue_version=catalogue.version,
                allocations=allocation_views(found.allocations),
                nodes=nodes,
            ),
            quests=[QuestView(**quest_fields(state)) for state in found.quests],
            energy=model.EnergyView(
                energy_balance=profile.energy_balance,
                provisional_energy=profile.provisional_energy,
                spendable_energy=profile.spendable_energy,
            ),
            streak_state=streak_view(profile.streak, profile.total_steps),
            events=[
                EventView(id=e.seq, type=e.type, data=e.data, created_at=e.created_at)
                for e in events
            ],
            next=events[-1].seq if len(found.events) > limit else None,
        )

    @api.delete(
        "/walker/me",
        status_code=202,
        summary="Delete the walker",
        **documented(
            "Deletes all data of the walker, in a job. Until it has ended, writes are refused. "
            "Afterwards the same person starts as a new walker.",
            "WALKER_BEING_DELETED",
        ),
    )
    # A person who wants to be deleted is never too late.
    @onceward.guard("walker.delete", policy=policy.replace(staleness=None, ordering="none"))
    async def delete(tx: Tx, caller: Caller, run: Run) -> model.DeletionAccepted:
        await request_deletion(tx, caller.tenant, onceward.clock.now())
        # The job deletes the walker's jobs, so it does not belong to the walker.
        await onceward.enqueue(
            DELETE_WALKER,
            {"walker": caller.tenant},
            tenant=OPERATOR_TENANT,
            coalesce=caller.tenant,
        )
        run.describe(resource=f"walker:{caller.tenant}")
        return model.DeletionAccepted()

    return api
