"""Between devices and servers: requests and answers get lost, doubled, late and out of order."""

from collections.abc import Callable, Mapping
from email.utils import format_datetime
from random import Random
from typing import Any, Final, Protocol

import msgspec

from holdfast.outbox.transport import NoResponse, Request, Response
from holdfast_lab.history import ResponseSeen
from holdfast_lab.simulation.faults import Faults
from holdfast_lab.simulation.loop import OUTSIDE, VirtualLoop
from holdfast_lab.simulation.server import Server

__all__ = ["Network", "NetworkWorld"]

_TIME_OUT_SECONDS: Final = 30.0
_LONG_SECONDS: Final = 130.0
_ERROR: Final = 400

Hear = Callable[[Response | NoResponse], None]


class NetworkWorld(Protocol):
    """What the network needs to know of the world it is in."""

    loop: VirtualLoop
    faults: Faults
    serving: list[Server]

    def now(self) -> Any:
        """Return the server's clock."""

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""


class Network:
    """Carries requests to any of the servers, and keeps what they answered."""

    def __init__(self, world: NetworkWorld, chance: Random) -> None:
        """Be up."""
        self._world = world
        self._chance = chance
        self.answers: list[ResponseSeen] = []
        self.requests = 0
        # Devices without a network.
        self.cut_off: set[str] = set()
        self._nights = 0
        self._age = ""

    def forget(self, *, keys: bool) -> None:
        """Lose all that is on its way: nothing stays in a network for days.

        Where keys are forgotten too, what is answered from now on is answered for the first time.
        """
        self._nights += 1
        if keys:
            self._age = f"~{self._nights}"

    def send(self, who: str, request: Request, hear: Hear) -> None:
        """Carry a request; ``hear`` is called once, in the end with silence."""
        faults, loop = self._world.faults, self._world.loop
        key = request.headers.get("Idempotency-Key", "")[:8]
        what = f"{request.method} {request.target} {key}"
        if who in self.cut_off:
            self._later(0.05, hear, NoResponse("no network", may_have_been_sent=False))
            return
        self.requests += 1
        # Longer than a third of a lease, where renewals are to be seen.
        patience = _LONG_SECONDS if faults.favours("renew") else _TIME_OUT_SECONDS
        loop.call_later(
            patience, hear, NoResponse("the server took too long"), context=OUTSIDE.copy()
        )
        if faults.happens("request lost", 0.5 if faults.favours("renew") else None):
            self._world.note(who, f"{what} lost")
            return
        self._world.note(who, what)
        delay = self._delay("request late")
        doubled = faults.happens("request doubled")
        night = self._nights
        self._later(delay, self._arrive, night, who, request, hear, doubled)
        if doubled:
            self._world.note(who, f"{what} doubled")
            # A proxy that tries again gives the device whichever answer comes first.
            again = self._chance.choice((0.0, 0.01, 1.0, 40.0))
            self._later(again, self._arrive, night, who, request, hear, doubled)

    def _arrive(self, night: int, who: str, request: Request, hear: Hear, doubled: bool) -> None:
        if night != self._nights:
            return
        server = self._chance.choice(self._world.serving)
        if server.app is None:
            # What a proxy has taken has left the device.
            self._later(0.01, hear, NoResponse("could not connect", may_have_been_sent=doubled))
            return
        process = server.process
        process.at_death.append(
            lambda: self._later(0.05, hear, NoResponse("the connection was closed"))
        )
        process.spawn(self._serve(server, who, request, hear))

    async def _serve(self, server: Server, who: str, request: Request, hear: Hear) -> None:
        app = server.app
        assert app is not None  # noqa: S101 - looked at before
        answer = await _ask(app, request)
        # From here on it is out of the process, which may die.
        self._answered(who, request, answer, hear)

    def _answered(self, who: str, request: Request, answer: Response, hear: Hear) -> None:
        if request.method != "GET":
            self.answers.append(_seen(request, answer, self._age))
        world = self._world
        replayed = " again" if "idempotency-replayed" in answer.headers else ""
        key = request.headers.get("Idempotency-Key", "")[:8]
        if world.faults.happens("answer lost"):
            world.note("net", f"answer {answer.status}{replayed} to {key} of {who} lost")
            return
        world.note("net", f"answer {answer.status}{replayed} to {key} of {who}")
        dated = dict(answer.headers) | {"date": format_datetime(world.now(), usegmt=True)}
        told = msgspec.structs.replace(answer, headers=dated)
        self._later(self._delay("answer late"), hear, told)

    def _delay(self, kind: str) -> float:
        faults = self._world.faults
        if faults.happens(kind):
            return faults.between(0.5, 45.0)
        return 0.01 + 0.05 * self._chance.random()

    def _later(self, seconds: float, step: Callable[..., None], *args: Any) -> None:
        self._world.loop.call_later(seconds, step, *args, context=OUTSIDE.copy())


async def _ask(app: Any, request: Request) -> Response:
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
    except Exception:  # noqa: BLE001 - what the server around the app does of it
        if not sent:
            return Response(500, {}, b'{"code":"internal"}')
    start = sent[0]
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return Response(start["status"], headers, b"".join(part["body"] for part in sent[1:]))


def _seen(request: Request, answer: Response, age: str) -> ResponseSeen:
    told = answer.json()
    payload = msgspec.json.decode(request.body) if request.body else None
    if isinstance(payload, dict):
        payload.pop("clientSubmittedAt", None)
    asked = msgspec.json.encode([request.method, request.target, payload], order="sorted")
    return ResponseSeen(
        tenant=request.headers.get("Authorization", "").removeprefix("Bearer "),
        key=request.headers.get("Idempotency-Key", "") + age,
        status=answer.status,
        body=answer.body,
        request=asked.decode(),
        code=answer.code,
        data_of=told.get("owner") if isinstance(told, dict) else None,
        stored=answer.status < _ERROR
        or answer.code == "STALE_ACTION"
        or not request.target.startswith("/steps"),
    )
