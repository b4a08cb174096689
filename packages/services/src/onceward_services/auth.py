"""Authentication of operations without a guard: reads need a token too."""

import inspect
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from onceward import Onceward, Principal
from onceward.guard.execution import exchange_of

__all__ = ["REQUIRED", "CurrentPrincipal", "authenticate"]

# Only for the OpenAPI document. The guard and `authenticate` check the tokens.
_BEARER = HTTPBearer(auto_error=False, bearerFormat="JWT", description="From `onceward token`.")


async def authenticate(request: Request) -> Principal:
    """Return the caller of a request; raises ``NotAuthenticatedError``."""
    onceward: Onceward = request.app.state.onceward
    exchange = exchange_of(request.scope)
    assert exchange is not None  # noqa: S101 - every request passes through the guard
    found = onceward.runtime.callers.identify(exchange.head)
    return await found if inspect.isawaitable(found) else found


CurrentPrincipal = Annotated[Principal, Depends(authenticate)]
REQUIRED = Security(_BEARER)
