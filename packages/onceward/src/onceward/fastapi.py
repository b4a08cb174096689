"""Dependencies for FastAPI apps, in guarded and unguarded routes alike.

::

    from onceward.fastapi import Session

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(order: NewOrder, session: Session) -> OrderOut: ...
"""

from onceward.frameworks.starlette import (
    Caller,
    Run,
    Tx,
    the_execution,
    the_principal,
    the_transaction,
)
from onceward.sign_in.identify import principal_from

__all__ = [
    "Caller",
    "Run",
    "Tx",
    "principal_from",
    "the_execution",
    "the_principal",
    "the_transaction",
]

try:
    from sqlalchemy.ext.asyncio import AsyncSession
except ImportError:  # without the extra sqlalchemy
    pass
else:
    from typing import Annotated

    from fastapi import Depends

    # The app's SQLAlchemy session, with a SqlAlchemyStore.
    Session = Annotated[AsyncSession, Depends(the_transaction)]
    __all__ += ["Session"]
