"""FastAPI endpoints that claim their key after all dependencies and validation have passed."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Final

from fastapi import Depends
from starlette.background import BackgroundTasks
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from onceward.frameworks.asgi import SCOPE_KEY
from onceward.frameworks.views import (
    check_is_guarded,
    refuse_generator,
    signature_of,
)
from onceward.guard.execution import EXCHANGE_KEY, Exchange, Execution, PendingExecution
from onceward.guard.request import Principal
from onceward.records import Record

# The parameter that FastAPI fills in and the wrapper takes out.
_PARAMETER: Final = "onceward_claim_"


def claim_after_dependencies(
    handler: Callable[..., Any], principal: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap an endpoint: FastAPI resolves ``principal``, then the wrapper claims the key.

    FastAPI calls an endpoint when all dependencies have run and all parameters are valid. So 401,
    403 and 422 of the app come before the claim; nothing is stored for them.
    """

    async def resolve(
        request: Request, principal: Annotated[Any, Depends(principal)]
    ) -> tuple[Any, Any]:
        exchange = request.scope.get(EXCHANGE_KEY)
        if isinstance(exchange, Exchange) and isinstance(principal, Principal):
            exchange.principal = principal
        return request.scope, principal

    refuse_generator(handler)
    is_async = inspect.iscoroutinefunction(handler) or (
        not inspect.isroutine(handler) and inspect.iscoroutinefunction(type(handler).__call__)
    )

    @wraps(handler)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        scope, caller = kwargs.pop(_PARAMETER, ({}, None))
        exchange = scope.get(EXCHANGE_KEY)
        if isinstance(exchange, Exchange) and exchange.is_claimed_late:
            outcome = await exchange.pipeline.claim(exchange, caller)
            if not isinstance(outcome, Execution):
                return _stored(outcome.record)
            scope[SCOPE_KEY] = outcome
            for name, value in kwargs.items():
                if isinstance(value, PendingExecution):
                    kwargs[name] = outcome
        else:
            check_is_guarded(handler)
        if is_async:
            return await handler(*args, **kwargs)
        return await run_in_threadpool(handler, *args, **kwargs)

    signature = signature_of(handler)
    parameters = list(signature.parameters.values())
    last = (
        parameters.pop()
        if parameters and parameters[-1].kind is parameters[-1].VAR_KEYWORD
        else None
    )
    parameters.append(
        inspect.Parameter(
            _PARAMETER,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[tuple[Any, Any], Depends(resolve)],
        )
    )
    if last is not None:
        parameters.append(last)
    guarded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return guarded


def _stored(record: Record) -> Response:
    """Return the stored response for the app's middleware; ours sends it from the record."""
    response = Response(record.body, record.status, record.headers)
    response.background = BackgroundTasks()  # in place of the tasks of dependencies
    return response
