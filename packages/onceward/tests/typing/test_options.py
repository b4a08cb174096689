"""The typed options name every option of what they are for; names may be given as text."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest

from onceward import Policy
from onceward.client import ClientOptions, RequestOptions
from onceward.errors import UsageError
from onceward.guard.policy import PolicyChanges
from onceward_nats.jetstream import JetStreamEngine, JetStreamOptions
from onceward_outbox import (
    Conflicted,
    ConflictPlan,
    ConflictResolution,
    ConflictResolutionName,
    NewEntry,
    Operation,
    OperationName,
    Outbox,
    OutboxOptions,
    OutboxQueue,
    Resolution,
    ResolutionName,
    Status,
    StatusName,
)
from onceward_outbox.entries import _REQUEST
from onceward_outbox.entry import EntryOptions


def keywords(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (OutboxOptions, keywords(Outbox)),
        (JetStreamOptions, keywords(JetStreamEngine) - {"worker", "lease_seconds", "url"}),
        (PolicyChanges, {field.name for field in fields(Policy)}),
        (EntryOptions, {*NewEntry.__struct_fields__} - {*_REQUEST}),
        (RequestOptions, keywords(httpx.Client.build_request)),
        (ClientOptions, keywords(httpx.Client) - {"base_url", "max_redirects"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_typed_options_are_the_keywords_of_what_takes_them(
    options: type, expected: set[str]
) -> None:
    assert set(get_type_hints(options)) == expected


def test_types_of_policy_changes_are_those_of_the_policy() -> None:
    assert get_type_hints(PolicyChanges) == get_type_hints(Policy)


@pytest.mark.parametrize(
    ("names", "members"),
    [
        (OperationName, Operation),
        (ConflictResolutionName, ConflictResolution),
        (ResolutionName, Resolution),
        (StatusName, Status),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_names_are_the_values_of_the_enumeration(names: Any, members: Any) -> None:
    assert list(get_args(names)) == [member.value for member in members]


def test_status_and_resolution_may_be_given_as_text(tmp_path: Path) -> None:
    with OutboxQueue.open(tmp_path / "outbox.db") as queue:
        queue.add_user("ada")
        new = NewEntry(user_id="ada", operation="create", entity_type="note", endpoint="/notes")
        entry = queue.enqueue(new)
        assert queue.entries(status="pending") == [entry]
        assert queue.entries(status=["failed", Status.CONFLICT]) == []
        claimed = queue.claim("ada")
        assert claimed is not None
        queue.record(claimed, Conflicted(plan=ConflictPlan(theirs={})))
        with pytest.raises(UsageError, match="'ours' is not a Resolution: it must be one"):
            queue.resolve(entry.id, "ours")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="'waiting' is not a Status"):
            queue.entries(status="waiting")  # type: ignore[arg-type]
        assert queue.resolve(entry.id, "server_wins").status is Status.DISCARDED
