"""HTTP routes of tree, quests, walker and events.

Energy, synchronization and deletion are in ``account_api``, steps and reviews in ``steps.api``.
"""

import re
from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from onceward import Onceward
from onceward.errors import BodyInvalidError
from onceward.frameworks.starlette import Caller, Run, Tx
from onceward_protocol.staleness import parse_instant
from onceward_services.auth import CurrentPrincipal
from onceward_services.event_stream import EVENT_STREAM, EventStream, token_expiry, wants_stream
from onceward_services.routing import extend_router, service_router
from onceward_services.settings import Settings
from onceward_services.walk import account_api, model, quests, tree
from onceward_services.walk.action_attestation import AppCheckTokens, attest_actions
from onceward_services.walk.body_key import check_key_in_body
from onceward_services.walk.catalogue import Catalogue
from onceward_services.walk.documentation import ACTION_ERRORS, documented, envelope_errors
from onceward_services.walk.events import list_events
from onceward_services.walk.jobs import REFUND
from onceward_services.walk.profile import read_profile
from onceward_services.walk.push import api as push_api
from onceward_services.walk.sse import StreamNotifier, server_is_stopping, stream_events
from onceward_services.walk.steps import api as steps_api
from onceward_services.walk.steps.ingest import QUEUE
from onceward_services.walk.steps.streak_view import streak_view
from onceward_services.walk.views import allocation_views, node_views, quest_fields
from onceward_services.walk.walkers import save_settle_due

__all__ = ["enqueue_settlement", "router"]

# The largest event id of a database, and its number of digits.
_MAX_SEQ: Final = 2**63 - 1
_SEQ_DIGITS: Final = 19
_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]*")


def _plain(value: object) -> object:
    """Reject 01, +1, 1.0 and 1_0: with several spellings one action would have several paths."""
    if isinstance(value, str) and _WHOLE.fullmatch(value) is None:
        raise PydanticCustomError("int_parsing", "should be a whole number, such as 1")
    return value


Step = Annotated[int, BeforeValidator(_plain), Path(examples=[1])]


def router(onceward: Onceward, settings: Settings) -> APIRouter:
    """Build the walk service. Raises ``ConfigurationError`` for an inconsistent catalogue."""
    catalogue = settings.catalogue
    notifier = StreamNotifier()
    nodes = node_views(catalogue, energy_required=settings.walk_energy_required)
    return extend_router(
        APIRouter(),
        _tree(onceward, settings, catalogue, notifier, nodes),
        _quests(onceward, settings, catalogue, notifier),
        _walker(onceward, settings, notifier),
        account_api.router(onceward, settings, notifier, nodes),
        push_api.router(onceward, settings),
        steps_api.router(onceward, settings),
    )


# -- the tree -------------------------------------------------------------------------------------


def _tree(
    onceward: Onceward,
    settings: Settings,
    catalogue: Catalogue,
    notifier: StreamNotifier,
    nodes: list[model.NodeView],
) -> APIRouter:
    api = service_router("walk", prefix="/tree")
    attest = attest_actions(onceward, settings)
    energy_required = settings.walk_energy_required

    @api.get("/state", summary="Read the tree", responses=envelope_errors(401, 503))
    async def state(caller: CurrentPrincipal) -> model.TreeState:
        found = await tree.read_tree(onceward.store, caller.tenant)
        return model.TreeState(
            walker_id=caller.tenant,
            points_banked=found.points_banked,
            energy_balance=found.energy_balance,
            spendable_energy=found.spendable_energy,
            catalogue_version=catalogue.version,
            allocations=allocation_views(found.allocations),
            nodes=nodes,
        )

    @api.post(
        "/allocate",
        summary="Allocate nodes",
        **documented(
            "Allocates nodes in the order given, all or none. A node may be in the same batch as "
            "its prerequisites, after them.",
            "ALREADY_ALLOCATED",
            "UNKNOWN_NODE",
            "PREREQUISITES_NOT_MET",
            "INSUFFICIENT_POINTS",
            "INSUFFICIENT_ENERGY",
            *ACTION_ERRORS,
        ),
    )
    @onceward.guard("tree.allocate", policy=settings.policies().walk)
    async def allocate(
        wanted: model.TreeAllocation,
        tx: Tx,
        caller: Caller,
        run: Run,
        tokens: AppCheckTokens = None,
    ) -> model.TreeState:
        await attest(tokens)
        check_key_in_body(run, wanted.idempotency_key)
        after = await tree.allocate(
            tx,
            caller.tenant,
            [choice.node_id for choice in wanted.allocations],
            now=onceward.clock.now(),
            catalogue=catalogue,
            energy_required=energy_required,
            empty_after=settings.empty_day_after,
            acted_at=_acted_at(wanted.client_generated_at),
        )
        await enqueue_settlement(onceward, tx, caller.tenant, after.settle_at)
        run.describe(resource=f"walker:{caller.tenant}")
        run.after_commit(lambda: notifier.notify(caller.tenant))
        return model.TreeState(
            walker_id=caller.tenant,
            points_banked=after.points_banked,
            energy_balance=after.energy_balance,
            spendable_energy=after.spendable_energy,
            catalogue_version=catalogue.version,
            allocations=allocation_views(after.allocations),
            nodes=nodes,
        )

    return api


# -- quests ---------------------------------------------------------------------------------------


def _quests(
    onceward: Onceward, settings: Settings, catalogue: Catalogue, notifier: StreamNotifier
) -> APIRouter:
    api = service_router("walk", prefix="/quest")
    attest = attest_actions(onceward, settings)
    policy = settings.policies().walk

    @api.get("/available", summary="List quests", responses=envelope_errors(401, 503))
    async def available(caller: CurrentPrincipal) -> model.QuestBoard:
        states = await quests.read_board(onceward.store, caller.tenant, catalogue)
        return model.QuestBoard(quests=[model.QuestView(**quest_fields(s)) for s in states])

    @api.post(
        "/start",
        summary="Start a quest",
        **documented(
            "Without a key every request is executed, and the second start of a quest fails.",
            "QUEST_ALREADY_IN_PROGRESS",
            "QUEST_ALREADY_COMPLETED",
            "PREREQUISITES_NOT_MET",
            *ACTION_ERRORS,
            statuses=(404,),
        ),
    )
    # Older clients send neither a key nor times, so staleness cannot be checked.
    @onceward.guard(
        "quest.start", policy=policy.replace(key_required=False, staleness=None, ordering="none")
    )
    async def start(
        wanted: model.QuestStart,
        tx: Tx,
        caller: Caller,
        run: Run,
        tokens: AppCheckTokens = None,
    ) -> model.QuestView:
        await attest(tokens)
        check_key_in_body(run, wanted.idempotency_key)
        made_at = wanted.client_generated_at
        state = await quests.start_quest(
            tx,
            caller.tenant,
            wanted.quest_id,
            now=onceward.clock.now(),
            catalogue=catalogue,
            acted_at=None if made_at is None else _acted_at(made_at),
        )
        _record_change(run, notifier, state)
        return model.QuestView(**quest_fields(state))

    @api.post(
        "/{quest_id}/step/{step}/advance",
        summary="Complete a step",
        **documented(
            "Steps are numbered from 1 and completed in order.",
            "STEP_OUT_OF_ORDER",
            "QUEST_NOT_IN_PROGRESS",
            "QUEST_ALREADY_COMPLETED",
            "PREREQUISITES_NOT_MET",
            *ACTION_ERRORS,
            statuses=(404,),
        ),
    )
    @onceward.guard("quest.advance", policy=policy)
    async def advance(
        quest_id: Annotated[str, Path(examples=["quest.001"])],
        step: Step,
        action: model.QuestAdvance,
        *,
        tx: Tx,
        caller: Caller,
        run: Run,
        tokens: AppCheckTokens = None,
    ) -> model.QuestView:
        await attest(tokens)
        check_key_in_body(run, action.idempotency_key)
        if action.step_index is not None and action.step_index != step:
            raise BodyInvalidError(f"stepIndex is {action.step_index}, and the path has {step}")
        state = await quests.advance_quest(
            tx,
            caller.tenant,
            quest_id,
            step,
            now=onceward.clock.now(),
            catalogue=catalogue,
            empty_after=settings.empty_day_after,
            acted_at=_acted_at(action.client_generated_at),
        )
        await enqueue_settlement(onceward, tx, caller.tenant, state.settle_at)
        _record_change(run, notifier, state)
        return model.QuestView(**quest_fields(state))

    @api.post(
        "/complete",
        summary="Complete a quest",
        **documented(
            "Awards the quest's points, once.",
            "QUEST_INCOMPLETE",
            "QUEST_NOT_IN_PROGRESS",
            "QUEST_ALREADY_COMPLETED",
            "PREREQUISITES_NOT_MET",
            *ACTION_ERRORS,
            statuses=(404,),
        ),
    )
    @onceward.guard("quest.complete", policy=policy)
    async def complete(
        done: model.QuestCompletion,
        tx: Tx,
        caller: Caller,
        run: Run,
        tokens: AppCheckTokens = None,
    ) -> model.QuestCompleted:
        await attest(tokens)
        check_key_in_body(run, done.idempotency_key)
        state, points = await quests.complete_quest(
            tx,
            caller.tenant,
            done.quest_id,
            now=onceward.clock.now(),
            catalogue=catalogue,
            empty_after=settings.empty_day_after,
            acted_at=_acted_at(done.client_generated_at),
        )
        await enqueue_settlement(onceward, tx, caller.tenant, state.settle_at)
        _record_change(run, notifier, state)
        return model.QuestCompleted(**quest_fields(state), points_banked=points)

    return api


def _acted_at(client_generated_at: str) -> datetime:
    """Return when the walker acted. The guard has checked the time."""
    return parse_instant(client_generated_at, "clientGeneratedAt")


async def enqueue_settlement(
    onceward: Onceward, tx: Tx, tenant: str, settle_at: datetime | None
) -> None:
    """Enqueue the job that looks at provisional actions once their days are settled as empty."""
    if settle_at is not None:
        await save_settle_due(tx, tenant, settle_at)
        await onceward.enqueue(
            REFUND, queue=QUEUE, run_at=settle_at, coalesce=settle_at.isoformat()
        )


def _record_change(run: Run, notifier: StreamNotifier, state: quests.QuestState) -> None:
    """Name the quest in the audit event, and notify event streams after the commit."""
    tenant = run.request.principal.tenant
    run.describe(resource=f"quest:{state.quest.id}")
    run.after_commit(lambda: notifier.notify(tenant))


# -- the walker -----------------------------------------------------------------------------------


def _walker(onceward: Onceward, settings: Settings, notifier: StreamNotifier) -> APIRouter:
    api = service_router("walk", prefix="/walker")

    @api.get("/me", summary="Read the current walker", responses=envelope_errors(401, 503))
    async def me(caller: CurrentPrincipal) -> model.WalkerView:
        profile = await read_profile(
            onceward.store, caller.tenant, settings.streak_rules, onceward.clock.now()
        )
        return model.WalkerView(
            walker_id=caller.tenant,
            points_banked=profile.points_banked,
            points_provisional=profile.points_provisional,
            energy_balance=profile.energy_balance,
            provisional_energy=profile.provisional_energy,
            spendable_energy=profile.spendable_energy,
            last_event_id=profile.last_event_id,
            streak_state=streak_view(profile.streak, profile.total_steps),
        )

    @api.get(
        "/events",
        summary="List events",
        description=(
            "A page of events, oldest first. With `Accept: text/event-stream` the response is a "
            "stream of server-sent events, which `Last-Event-ID` resumes."
        ),
        response_model=model.EventPage,
        responses={
            200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}},
            **envelope_errors(400, 401, 422, 429, 503),
        },
    )
    async def events(
        caller: CurrentPrincipal,
        after: Annotated[int, Query(ge=0, le=_MAX_SEQ)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        accept: Annotated[str, Header(include_in_schema=False)] = "",
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response | model.EventPage:
        if not wants_stream(accept):
            found = await list_events(onceward.store, caller.tenant, after=after, limit=limit + 1)
            items = [
                model.EventView(id=e.seq, type=e.type, data=e.data, created_at=e.created_at)
                for e in found[:limit]
            ]
            return model.EventPage(items=items, next=items[-1].id if len(found) > limit else None)
        after = _resume_after(last_event_id, after)
        close = notifier.open_stream(caller, settings.walk_events_streams)
        return EventStream(
            close,
            stream_events(
                onceward.store,
                caller.tenant,
                after=after,
                notifier=notifier,
                clock=onceward.clock,
                until=token_expiry(caller),
                is_stopping=server_is_stopping,
            ),
        )

    return api


def _resume_after(last_event_id: str | None, after: int) -> int:
    """Return the event to resume after: a reconnecting reader names it in the header."""
    if not last_event_id:
        return after
    is_number = last_event_id.isascii() and last_event_id.isdigit()
    if not is_number or len(last_event_id) > _SEQ_DIGITS:
        raise BodyInvalidError("Last-Event-ID should be the id of an event")
    return min(int(last_event_id), _MAX_SEQ)
