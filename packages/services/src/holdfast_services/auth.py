"""Who is calling an operation that is not guarded: reading takes a sign-in too."""

import inspect
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from holdfast import Holdfast, Principal

if TYPE_CHECKING:
    from holdfast.server.request_head import RequestHead

__all__ = ["BEARER", "REQUIRED", "CurrentPrincipal"]

# Only for the documentation and its "Authorize" button: the guard and `signed_in` do the checking.
BEARER = HTTPBearer(auto_error=False, bearerFormat="JWT", description="From `holdfast token`.")


async def signed_in(request: Request) -> Principal:
    """Sign the caller in, or raise ``NotAuthenticatedError``."""
    holdfast: Holdfast = request.app.state.holdfast
    head: RequestHead = request.scope["holdfast.head"]
    found = holdfast.identify(head)
    return await found if inspect.isawaitable(found) else found


CurrentPrincipal = Annotated[Principal, Depends(signed_in)]
REQUIRED = Security(BEARER)
