"""``RouteSubmissionService``: submit a route request over HTTP or from other code.

Both ways use the same records: a key that was used over HTTP is replayed here, and vice versa.
"""

from dataclasses import dataclass
from typing import Final, Literal, Protocol
from uuid import uuid4

from onceward import Execution, Onceward, Policy, Principal
from onceward.guard.execution import Replay
from onceward.guard.request import RequestHead, parse_request
from onceward.guard.route_table import Match
from onceward.records import Response
from onceward_services.routes.jobs import GENERATE, QUEUE
from onceward_services.routes.model import RouteAccepted, RouteSubmission
from onceward_services.routes.repository import add_request
from onceward_services.settings import Settings

__all__ = [
    "ENDPOINT",
    "GuardedRouteSubmissionService",
    "RouteSubmissionRequest",
    "RouteSubmissionResponse",
    "RouteSubmissionService",
    "location",
    "route_submissions",
]

ENDPOINT: Final = "POST /api/v1/routes"


@dataclass(frozen=True, slots=True)
class RouteSubmissionRequest:
    """One submission. Without a key every call is a new request."""

    # Whose route it is: the ``sub`` of the user's tokens.
    user_id: str
    payload: RouteSubmission
    # A UUID version 4, made once per action.
    idempotency_key: str | None = None
    # The id of the work that this belongs to; a new one by default.
    correlation_id: str | None = None


@dataclass(frozen=True, slots=True)
class RouteSubmissionResponse:
    """The id of the route request; a replay has the id of the first submission."""

    request_id: str
    status: Literal["accepted", "replayed"]


class RouteSubmissionService(Protocol):
    """Accepts route requests (the driving port of the routes service)."""

    async def submit(self, request: RouteSubmissionRequest) -> RouteSubmissionResponse:
        """Store a request and enqueue the job that plans its route, once per key.

        Raises ``PayloadMismatchError`` if the key was used for another payload, and
        ``KeyInvalidError``, ``InProgressError`` or ``StoreUnavailableError``; then nothing was
        stored.
        """


class GuardedRouteSubmissionService:
    """The service on the records, tables and jobs of a ``Onceward``."""

    def __init__(self, onceward: Onceward, policy: Policy) -> None:
        self._onceward = onceward
        self._policy = policy

    async def submit(self, request: RouteSubmissionRequest) -> RouteSubmissionResponse:
        """See ``RouteSubmissionService``. Rate limits are for HTTP and are not applied."""
        sent = [(b"content-type", b"application/json")]
        if request.idempotency_key is not None:
            # Other characters are no key either way.
            key = request.idempotency_key.encode("latin-1", "replace")
            sent.append((self._policy.key_header.lower().encode("latin-1"), key))
        if request.correlation_id is not None:
            correlation_id = request.correlation_id.encode("latin-1", "replace")
            sent.append((b"x-correlation-id", correlation_id))
        guarded = parse_request(
            RequestHead("POST", "/api/v1/routes", b"", sent),
            # What was not given is not sent over HTTP either, so that both are the same request.
            request.payload.model_dump_json(exclude_unset=True).encode(),
            Match(ENDPOINT, self._policy, {}),
            Principal(tenant=request.user_id, actor=request.user_id),
        )
        idempotency = await self._onceward.runtime.ready()
        outcome = await idempotency.process(guarded)
        if isinstance(outcome, Replay):
            return _replayed(outcome)
        try:
            accepted = await self.accept(outcome, request.payload)
            headers = (
                (b"content-type", b"application/json"),
                (b"location", location(accepted.request_id).encode()),
            )
            response = Response(202, headers, accepted.model_dump_json().encode())
            committed = await idempotency.finish(outcome, response)
        finally:
            await idempotency.abort(outcome)  # does nothing if it has ended
        if isinstance(committed, Replay):
            return _replayed(committed)
        return RouteSubmissionResponse(accepted.request_id, "accepted")

    async def accept(self, run: Execution, submission: RouteSubmission) -> RouteAccepted:
        """Store the request and enqueue its job in the transaction of a guarded request."""
        request_id = str(uuid4())
        await add_request(
            run.transaction,
            tenant=run.request.principal.tenant,
            request_id=request_id,
            submission=submission,
            now=self._onceward.clock.now(),
        )
        await self._onceward.runtime.enqueue(
            run, GENERATE, {"request_id": request_id}, queue=QUEUE, resource_id=request_id
        )
        run.describe(resource=f"route:{request_id}")
        return RouteAccepted(request_id=request_id)


def route_submissions(onceward: Onceward, settings: Settings) -> GuardedRouteSubmissionService:
    """Create the service with the policy of the server's settings."""
    return GuardedRouteSubmissionService(onceward, settings.policies().routes)


def location(request_id: str) -> str:
    """Return the path of a route request."""
    return f"/api/v1/routes/{request_id}"


def _replayed(replay: Replay) -> RouteSubmissionResponse:
    accepted = RouteAccepted.model_validate_json(replay.record.body)
    return RouteSubmissionResponse(accepted.request_id, "replayed")
