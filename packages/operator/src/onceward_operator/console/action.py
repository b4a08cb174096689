"""A change that an operator makes: one transaction with its jobs and its audit event.

::

    async def cancel(request: PageRequest) -> Redirected:
        tenant = request.own(request.form.get("tenant", ""))
        async with operator_action(
            onceward, request, tenant=tenant, name="parcel.cancel", resource="parcel:42"
        ) as action:
            await action.transaction.execute("UPDATE parcels SET …", {…})
            await action.enqueue("parcel.cancelled", {"id": 42})
        return Redirected("parcels", "cancelled")
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Unpack

import msgspec

from onceward.app import Onceward
from onceward.errors import CommitUnknownError, NotFoundError, RequestError
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.ports import Transaction
from onceward.records import AuditEvent
from onceward_operator.console.page import ConsoleError, NotShownError, PageRequest
from onceward_protocol.fingerprint import canonical_json
from onceward_protocol.ids import new_id

__all__ = ["OperatorAction", "operator_action"]

_OK: Final = 200


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """The transaction of one action."""

    # Commits with the audit event and the jobs when the block ends.
    transaction: Transaction
    _onceward: Onceward[Any]
    _cause: Cause

    async def enqueue(
        self,
        job_type: str,
        payload: Any = None,
        **options: Unpack[EnqueueOptions],
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction."""
        onceward = self._onceward
        job = new_job(
            job_type,
            payload,
            cause=self._cause,
            defaults=onceward.jobs.defaults_for(job_type),
            max_payload_bytes=onceward.runtime.config.max_payload_bytes,
            **options,
        )
        return await onceward.runtime.job_store.enqueue(self.transaction, job)


@asynccontextmanager
async def operator_action(
    onceward: Onceward[Any], request: PageRequest, *, tenant: str, name: str, resource: str
) -> AsyncIterator[OperatorAction]:
    """Commit what the block writes together with an audit event that has the operator's reason.

    ``name`` is what is done, ``resource`` to what. Errors of requests that the block raises are
    shown to the operator, and nothing is written.
    """
    tenant, reason = request.own(tenant), request.reason()
    cause = Cause(tenant, request.actor, request.request_id, request.request_id)
    fields = {name: value for name, value in request.form.items() if name != "form_token"}
    audit = AuditEvent(
        id=new_id(request.now),
        tenant=tenant,
        actor=request.actor,
        endpoint=name,
        payload_hash=sha256(canonical_json(msgspec.json.encode(fields))).hexdigest(),
        status=_OK,
        request_id=request.request_id,
        correlation_id=request.request_id,
        created_at=request.now,
        resource=resource,
        reason=reason,
    )
    unit = await request.store.begin()
    try:
        yield OperatorAction(unit.statements, onceward, cause)
        await unit.commit(None, audit)
    except CommitUnknownError as error:
        await unit.rollback()
        raise ConsoleError(
            "the connection was lost during the commit: look whether it was done"
        ) from error
    except NotFoundError as error:
        await unit.rollback()
        raise NotShownError(str(error)) from error
    except RequestError as error:
        await unit.rollback()
        raise ConsoleError(f"nothing was changed: {error}") from error
    except BaseException:
        await unit.rollback()
        raise
    onceward.runtime.notifier.notify()
