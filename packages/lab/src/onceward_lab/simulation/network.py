"""The network between devices and servers: loses, duplicates, delays and reorders messages."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from email.utils import format_datetime
from random import Random
from typing import Any, Final, Protocol

import msgspec

from onceward_lab.history import ResponseSeen
from onceward_lab.simulation.batches import BATCH_PATH, header_of, items_of, parts_of
from onceward_lab.simulation.database import ServerDatabase
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.loop import NO_PROCESS, Process, VirtualLoop
from onceward_lab.simulation.records import RecordCheck
from onceward_lab.simulation.server import Server
from onceward_lab.simulation.standby import Standby
from onceward_outbox.transport import NoResponse, Request, Response

__all__ = ["ELSEWHERE", "PORTALS", "Network", "NetworkWorld", "outage_response"]

_TIMEOUT_SECONDS: Final = 30.0
_LONG_TIMEOUT_SECONDS: Final = 130.0
_COPY_SECONDS: Final = (0.0, 0.001, 0.002, 0.003, 0.005, 0.01, 1.0, 40.0)
"""How long after a request its copy arrives. A request takes some milliseconds."""

_COPIED_SHARE: Final = 0.5
"""How often a request is doubled if there are two servers."""

_OK: Final = 200
_CREATED: Final = 201
_ERROR: Final = 400

OnResponse = Callable[[Response | NoResponse], None]

_HTML: Final = {"content-type": "text/html"}
_PORTALS: Final = {
    "page": Response(200, _HTML, b"<html>Sign in to the network</html>"),
    "redirect": Response(302, {"location": "http://portal.example/"}, b""),
    "not found": Response(404, _HTML, b"<html>Not found</html>"),
}
PORTALS: Final = tuple(_PORTALS)
"""Response of captive portals."""

ELSEWHERE: Final = "elsewhere"
"""The sender of requests that no device has sent."""

# So long after a restore, the caches of all servers must know of it.
SETTLED_SECONDS: Final = 60.0


def outage_response(status: int, retry_after: int | None) -> Response:
    """Return the response of a proxy while the server is down, or limits an endpoint."""
    if status in {502, 504}:
        return Response(status, _HTML, b"<html>Bad gateway</html>")
    headers = {"content-type": "application/json"}
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    return Response(status, headers, b'{"code":"unavailable"}')


class NetworkWorld(Protocol):
    """The parts of the world that the network uses."""

    loop: VirtualLoop
    faults: Faults
    http_servers: list[Server]
    database: ServerDatabase
    standby: Standby | None
    # Commits whose outcome the server does not know.
    unknown_commits: int

    def now(self) -> Any:
        """Return the server's clock."""

    def note_written(self, tenant: str, note: int) -> None:
        """Note that a device has created or changed a note."""

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""


class Network:
    """Carries requests to any of the servers, and records the responses."""

    def __init__(self, world: NetworkWorld, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self.responses: list[ResponseSeen] = []
        self.records = RecordCheck(world.database.reader)
        self.requests = 0
        # Devices without a network.
        self.offline: set[str] = set()
        # Devices in a network with a sign-in page, and what it responds.
        self.portals: dict[str, str] = {}
        # Devices whose connections are open and deliver nothing.
        self.silent: set[str] = set()
        # Many requests that change notes are lost.
        self.loses_changes = False
        # The server's responses reach no device.
        self.is_server_silent = False
        # What a proxy responds instead of the server, to all paths or to one.
        self.outages: dict[str, Response] = {}
        self._epoch = 0
        # By process: requests that it has received and not responded to.
        self._serving: Counter[Process] = Counter()
        self._key_suffix = ""
        # The last request of a device for each caller and key.
        self._sent: dict[tuple[str, str], Request] = {}
        self._restored_at: float | None = None
        # The requests that a server has received and not responded to.
        self._served_now: list[Request] = []
        # The keys that were served while the database was restored, or shortly after.
        self._around_restore: set[str] = set()

    def was_around_restore(self, key: str) -> bool:
        """Return whether a request with the key may have run on what a restore has lost.

        It may have named an id that was lost, and may have been stored in the restored database.
        """
        return key in self._around_restore

    @property
    def are_keys_forgotten(self) -> bool:
        """True once the server may not know keys any more that it has responded to."""
        return bool(self._key_suffix)

    def drop_in_flight(self, *, keys_forgotten: bool) -> None:
        """Drop all requests in flight: none stays in a network for days.

        With ``keys_forgotten``, responses to keys used before may differ from now on.
        """
        self._epoch += 1
        if keys_forgotten:
            self._key_suffix = f"~{self._epoch}"

    def is_serving(self, process: Process) -> bool:
        """Return whether a process has received a request and not responded to it."""
        return self._serving[process] > 0

    def database_restored(self) -> None:
        """Note that the server's database has gone back to an earlier state."""
        self.drop_in_flight(keys_forgotten=True)
        self._restored_at = self._world.loop.time()
        for request in self._served_now:
            self._around_restore |= _keys_of(request)

    def resend(self, user: str, key: str) -> None:
        """Send the request of a device again, as a client does that has lost the response."""
        request = self._sent.get((f"Bearer {user}", key))
        if request is not None:
            self.send(ELSEWHERE, request, lambda _: None)

    def send(self, device: str, request: Request, on_response: OnResponse) -> None:
        """Send a request; ``on_response`` is called for each response and on timeout.

        Only the first call counts.
        """
        faults, loop = self._world.faults, self._world.loop
        line = f"{request.method} {request.target} {_keys(request)}"
        if device in self.offline:
            self._later(0.05, on_response, NoResponse("no network", may_have_been_sent=False))
            return
        if device in self.portals:
            self._world.note(device, f"{line} to a captive portal")
            self._later(0.05, on_response, _PORTALS[self.portals[device]])
            return
        self.requests += 1
        if device != ELSEWHERE and request.target != BATCH_PATH:
            self._remember(request)
        # Longer than a third of a lease, so that leases are renewed.
        timeout = _LONG_TIMEOUT_SECONDS if faults.focuses_on("renew") else _TIMEOUT_SECONDS
        loop.call_later(
            timeout, on_response, NoResponse("the server took too long"), context=NO_PROCESS.copy()
        )
        if faults.happens("request lost", self._loss_rate(request)):
            self._world.note(device, f"{line} lost")
            return
        self._world.note(device, line)
        delay = self._delay("request late")
        count = len(self._world.http_servers)
        # Two servers are there to have the same request at the same time.
        is_doubled = faults.happens("request doubled", _COPIED_SHARE if count > 1 else None)
        server = self._rng.randrange(count)
        arguments = (self._epoch, device, request, on_response, is_doubled)
        self._later(delay, self._deliver, server, *arguments)
        if is_doubled:
            self._world.note(device, f"{line} doubled")
            # A proxy that retries uses the next server, perhaps while the first one is at work. It
            # returns the first response.
            delay += self._rng.choice(_COPY_SECONDS)
            self._later(delay, self._deliver, server + 1, *arguments)

    def _remember(self, request: Request) -> None:
        caller = request.headers.get("Authorization", "")
        self._sent[caller, request.headers.get("Idempotency-Key", "")] = request

    def _deliver(  # noqa: PLR0917
        self,
        number: int,
        epoch: int,
        device: str,
        request: Request,
        on_response: OnResponse,
        is_doubled: bool,
    ) -> None:
        if epoch != self._epoch:
            return
        for path, refusal in self.outages.items():
            if request.target.startswith(path):
                self._world.note("net", f"{refusal.status} to {request.target} of {device}")
                self._later(0.01, on_response, refusal)
                return
        standby = self._world.standby
        if request.method == "GET" and standby is not None and standby.is_away:
            # It would show what is not replicated; nothing confirms the reads of an app.
            self._later(0.01, on_response, outage_response(503, None))
            return
        servers = self._world.http_servers
        server = servers[number % len(servers)]
        if server.app is None:
            # A proxy has received the request, so the device has sent it.
            self._later(
                0.01, on_response, NoResponse("could not connect", may_have_been_sent=is_doubled)
            )
            return
        process = server.process
        process.on_kill.append(
            lambda: self._later(0.05, on_response, NoResponse("the connection was closed"))
        )
        self.records.on_delivery(request)
        delivered_at = self._world.loop.time()
        process.spawn(self._serve(server, device, request, on_response, delivered_at, epoch))

    async def _serve(  # noqa: PLR0917
        self,
        server: Server,
        device: str,
        request: Request,
        on_response: OnResponse,
        delivered_at: float,
        epoch: int,
    ) -> None:
        app = server.app
        assert app is not None  # noqa: S101 - checked by the caller
        unknown_commits = self._world.unknown_commits
        process = server.process
        self._serving[process] += 1
        self._served_now.append(request)
        if not self._is_settled(delivered_at):
            self._around_restore |= _keys_of(request)
        try:
            response = await _call_app(app, request)
        finally:
            self._serving[process] -= 1
            self._served_now.remove(request)
        # The response has left the process, which may be killed now.
        is_current = epoch == self._epoch
        is_certain = unknown_commits == self._world.unknown_commits
        self._note_responses(
            device, request, response, delivered_at, is_current=is_current, is_certain=is_certain
        )
        self._on_response(device, request, response, on_response)

    def _note_responses(
        self,
        device: str,
        request: Request,
        response: Response,
        delivered_at: float,
        *,
        is_current: bool,
        is_certain: bool,
    ) -> None:
        """Note what the server has responded to each request, also of a batch.

        ``is_current`` is False if the database was restored meanwhile, or days have passed.
        ``is_certain`` is False if the outcome of a commit was unknown meanwhile.
        """
        restored_at = self._restored_at
        is_settled = self._is_settled(delivered_at)
        if request.method == "GET":
            return
        for each, result in _exchanges(request, response):
            seen = _to_history(each, result, self._key_suffix)
            if not is_settled or not is_current:
                self.responses.append(msgspec.structs.replace(seen, is_unsettled=True))
                continue
            if device != ELSEWHERE:
                self._remember(each)
            is_after = restored_at is not None
            self.responses.append(msgspec.structs.replace(seen, is_after_restore=is_after))
            self.records.on_response(seen, each, is_certain=is_certain)

    def _is_settled(self, delivered_at: float) -> bool:
        """Return False around a restore: a key may get the lost response, and then another one."""
        at = self._restored_at
        return at is None or delivered_at >= at + SETTLED_SECONDS

    def _on_response(
        self,
        device: str,
        request: Request,
        response: Response,
        on_response: OnResponse,
    ) -> None:
        world = self._world
        self._report_note(device, request, response)
        replayed = " (replayed)" if "idempotency-replayed" in response.headers else ""
        key = _keys(request)
        is_silent = self.is_server_silent or device in self.silent
        if is_silent or world.faults.happens("response lost"):
            world.note("net", f"response {response.status}{replayed} to {key} of {device} lost")
            return
        world.note("net", f"response {response.status}{replayed} to {key} of {device}")
        dated = dict(response.headers) | {"date": format_datetime(world.now(), usegmt=True)}
        dated_response = msgspec.structs.replace(response, headers=dated)
        self._later(self._delay("response late"), on_response, dated_response)

    def _report_note(self, device: str, request: Request, response: Response) -> None:
        if device == ELSEWHERE or request.method == "GET":
            return
        for each, result in _exchanges(request, response):
            if each.target.startswith("/notes") and result.status == _CREATED:
                tenant = each.headers.get("Authorization", "").removeprefix("Bearer ")
                self._world.note_written(tenant, result.json()["id"])

    def _loss_rate(self, request: Request) -> float | None:
        """Return how many requests are lost; None for the rate of the seed."""
        if self._world.faults.focuses_on("renew"):
            return 0.5
        # Another change of the note may then succeed before the retry.
        is_change = any(part.method == "PATCH" for part in parts_of(request))
        return 0.3 if self.loses_changes and is_change else None

    def _delay(self, kind: str) -> float:
        faults = self._world.faults
        if faults.happens(kind):
            return faults.between(0.5, 45.0)
        return 0.01 + 0.05 * self._rng.random()

    def _later(self, seconds: float, step: Callable[..., None], *args: Any) -> None:
        self._world.loop.call_later(seconds, step, *args, context=NO_PROCESS.copy())


def _keys(request: Request) -> str:
    """Return the keys of a request, for the timeline."""
    keys = [header_of(part, "Idempotency-Key") or "" for part in parts_of(request)]
    return " ".join(key[:8] for key in keys)


def _keys_of(request: Request) -> set[str]:
    return {header_of(part, "Idempotency-Key") or "" for part in parts_of(request)}


def _exchanges(request: Request, response: Response) -> Iterator[tuple[Request, Response]]:
    """Yield a request and its response, or those of the items of a batch that are known."""
    if request.target != BATCH_PATH:
        yield request, response
    elif response.status == _OK:
        for item in items_of(request, response):
            if item.key and item.request is not None and item.response is not None:
                yield item.request, item.response


async def _call_app(app: Any, request: Request) -> Response:
    path, _, query = request.target.partition("?")
    body = request.body or b""
    scope = {
        "type": "http",
        "method": request.method,
        "path": path,
        "query_string": query.encode(),
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in request.headers.items()
        ],
    }
    sent: list[Mapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except Exception:  # noqa: BLE001 - an ASGI server responds with 500
        if not sent:
            return Response(500, {}, b'{"code":"internal"}')
    start = sent[0]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return Response(start["status"], headers, b"".join(part["body"] for part in sent[1:]))


def _to_history(request: Request, response: Response, key_suffix: str) -> ResponseSeen:
    content = response.json()
    payload = msgspec.json.decode(request.body) if request.body else None
    if isinstance(payload, dict):
        payload.pop("clientSubmittedAt", None)
    request_text = msgspec.json.encode([request.method, request.target, payload], order="sorted")
    return ResponseSeen(
        tenant=request.headers.get("Authorization", "").removeprefix("Bearer "),
        key=request.headers.get("Idempotency-Key", "") + key_suffix,
        status=response.status,
        body=response.body,
        request=request_text.decode(),
        code=response.code,
        effect=response.headers.get("onceward-effect"),
        action=payload.get("action_id") if isinstance(payload, dict) else None,
        data_of=content.get("owner") if isinstance(content, dict) else None,
        stored=response.status < _ERROR
        or response.code == "STALE_ACTION"
        or not (
            request.target.startswith("/steps")
            or response.code == "sequence.violation"
            or (response.status == _ERROR and b"required_headers" in response.body)
        ),
    )
