"""A guarded request whose key is claimed after the app's dependencies have run."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from onceward.errors import NoTransactionError, RequestError, StoreUnavailableError, UsageError
from onceward.guard.execution import Execution
from onceward.guard.idempotency import Replay
from onceward.guard.request import Principal

__all__ = ["PENDING_KEY", "PendingExecution", "PendingRequest"]

# The key of a pending request in the ASGI scope.
PENDING_KEY: Final = "onceward.pending"

Outcome = Execution | Replay | RequestError | StoreUnavailableError


class PendingRequest:
    """Is claimed by the guarded endpoint; the middleware then sends what its outcome says."""

    __slots__ = ("_claim", "caller", "outcome")

    def __init__(self, claim: Callable[[Principal], Awaitable[Execution | Replay]]) -> None:
        self._claim = claim
        # Known before the claim, so that a request that the app refuses by itself can be logged.
        self.caller: Principal | None = None
        # None until the claim: the app has refused the request by itself.
        self.outcome: Outcome | None = None

    async def claim(self, principal: object) -> Execution | Replay:
        """Claim the key for this caller. Raises what is to be the response."""
        if not isinstance(principal, Principal):
            raise UsageError(
                f"the principal dependency returned {type(principal).__name__}: it must return "
                "onceward.Principal(tenant=…, actor=…)"
            )
        if self.outcome is not None:
            raise UsageError("a guarded endpoint ran twice in one request")
        try:
            outcome = await self._claim(principal)
        except (RequestError, StoreUnavailableError) as error:
            self.outcome = error
            raise
        self.outcome = outcome
        return outcome


class PendingExecution:
    """What a dependency gets for the execution; it has the attributes of it after the claim."""

    __slots__ = ("_pending",)

    def __init__(self, pending: PendingRequest) -> None:
        self._pending = pending

    def __getattr__(self, name: str) -> Any:
        execution = self._pending.outcome
        if not isinstance(execution, Execution):
            raise NoTransactionError(
                "dependencies run before the key is claimed, so there is no execution yet: use it "
                "in the handler"
            )
        return getattr(execution, name)
