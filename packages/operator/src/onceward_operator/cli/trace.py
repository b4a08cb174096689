"""``onceward trace``: one correlation id from tap to effect, for operators."""

import asyncio
import sys
from typing import Annotated

import typer

from onceward.cli.database import opened
from onceward.cli.options import Json, Target, Tenant, command, new_app, tenant_or_all
from onceward.stores.parts import JOBS, REQUEST_LOG
from onceward.tenants import tenant_or_none
from onceward_operator.request_trace import Moment, timeline
from onceward_protocol.cli.output import CommandError, instant_text, print_json, print_table

app = new_app()

_NOT_INCLUDED = (
    "Not included: requests without a key, or with another key, whose client sent no "
    "X-Correlation-ID; requests without a valid sign-in; what was deleted since."
)


@command(app, "trace")
def trace(
    target: Target,
    correlation_id: Annotated[
        str, typer.Argument(help="The X-Correlation-ID of a request, or the id of an outbox entry.")
    ],
    *,
    tenant: Tenant = None,
    as_json: Json = False,
) -> None:
    """Show one action from the tap to its effects: requests, record, audit events, jobs.

    Example:
        onceward trace 0c2ffdcb-87ec-4b59-9bf5-a6852a0054f8

    """
    if not correlation_id or "\x00" in correlation_id:
        raise CommandError("the correlation id is empty or contains a NUL character", 2)

    async def read() -> list[Moment]:
        async with opened(target, JOBS, REQUEST_LOG) as store:
            return await timeline(store, correlation_id, tenant_or_none(tenant_or_all(tenant)))

    moments = asyncio.run(read())
    if not moments:
        where = "in any tenant" if tenant is None else f"in the tenant {tenant}"
        raise CommandError(
            f"nothing has this correlation id {where}, or it was deleted since: records when they "
            "expire, replays and refusals after ONCEWARD_REQUEST_LOG_DAYS"
        )
    if as_json:
        print_json([_fields(moment) for moment in moments])
        return
    first = moments[0].at
    print_table(
        ("time", "after", "what", "about", "status", "request id", "tenant"),
        [
            (
                instant_text(moment.at),
                f"+{(moment.at - first).total_seconds():.3f} s",
                f"{moment.kind} (same key)" if moment.is_by_key else moment.kind,
                moment.text,
                _status(moment),
                moment.request_id or "-",
                moment.tenant,
            )
            for moment in moments
        ],
    )
    print(_NOT_INCLUDED, file=sys.stderr)


def _status(moment: Moment) -> str:
    status = "-" if moment.status is None else str(moment.status)
    return f"{status} {moment.code}" if moment.code else status


def _fields(moment: Moment) -> dict[str, object]:
    return {
        "at": instant_text(moment.at),
        "kind": moment.kind,
        "text": moment.text,
        "tenant": moment.tenant,
        "request_id": moment.request_id,
        "status": moment.status,
        "code": moment.code,
        "same_key": moment.is_by_key,
        "key": None if moment.record_id is None else moment.record_id.key,
        "job_id": moment.job_id,
    }
