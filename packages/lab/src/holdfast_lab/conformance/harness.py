"""Sends requests of one guarded operation and keeps what came. Decides nothing."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol
from uuid import uuid4

import httpx
import msgspec

from holdfast.core.policy import ErrorFormat
from holdfast.errors import ConfigurationError
from holdfast_lab.conformance.profile import Profile

__all__ = [
    "Action",
    "Actions",
    "Answer",
    "Check",
    "Kit",
    "NotCheckedError",
    "Person",
    "Result",
    "UnmetError",
    "Verdict",
]

_SHOWN: Final = 60
JSON: Final = "application/json"


class UnmetError(Exception):
    """Something else came than the contract says; the message says what."""


class NotCheckedError(Exception):
    """The check cannot be made here; the message says why."""


class Verdict(StrEnum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    SKIP = "skip"


class Person(msgspec.Struct, frozen=True):
    """Somebody who sends: the headers they sign in with."""

    headers: Mapping[str, str]

    def __post_init__(self) -> None:
        """Refuse what no request could carry."""
        if not all(text.isascii() and text.isprintable() for text in self.headers.values()):
            raise ConfigurationError("a token has only visible ASCII characters")


NOBODY: Final = Person({})


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be done once: a request, and another that differs from it in the body only."""

    method: str
    path: str
    body: Any
    other_body: Any
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)


class Answer(msgspec.Struct, frozen=True):
    """What came."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def is_replay(self) -> bool:
        """Whether it says that it is one."""
        marked: str | None = self.headers.get("idempotency-replayed")
        return marked == "true"

    @property
    def is_success(self) -> bool:
        """Whether the operation was done, now or before."""
        return 200 <= self.status < 300  # noqa: PLR2004

    def document(self) -> dict[str, Any]:
        """Return the body as the JSON object it should be."""
        found = self._object()
        if found is None:
            raise UnmetError(f"{self.told()}: the body is not a JSON object")
        return found

    def code(self, error_format: ErrorFormat) -> str | None:
        """Return the machine's code of an error, if there is one."""
        found = (self._object() or {}).get(
            "error" if error_format is ErrorFormat.ENVELOPE else "code"
        )
        return found if isinstance(found, str) else None

    def told(self) -> str:
        """Say in a few words what came."""
        marks = ", replayed" if self.is_replay else ""
        code = self.code(ErrorFormat.ENVELOPE) or self.code(ErrorFormat.PROBLEM)
        return f"{self.status}{marks}{f' {code[:_SHOWN]}' if code else ''}"

    def _object(self) -> dict[str, Any] | None:
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class Actions(Protocol):
    """Thinks of things to do."""

    async def fresh(self, kit: "Kit") -> Action:
        """Return something that has not been done and can be."""


class Kit:
    """One server, one profile, and who may sign in."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        profile: Profile,
        actions: Actions,
        *,
        me: Person,
        other: Person | None,
    ) -> None:
        """Take everything the checks need."""
        self.client = client
        self.profile = profile
        self.me = me
        self._actions = actions
        self._other = other

    @property
    def other(self) -> Person:
        """Somebody of another tenant."""
        if self._other is None:
            raise NotCheckedError("needs a second person: --secret, --other-token or other_sign_in")
        return self._other

    async def fresh(self) -> Action:
        """Return something that has not been done and can be."""
        return await self._actions.fresh(self)

    def new_key(self) -> str:
        """Return a key nobody has used; a UUID version 4 is good in both formats."""
        return str(uuid4())

    def location_of(self, answer: Answer) -> str | None:
        """Return where the Location leads, or None; raises if it is another server."""
        location = answer.headers.get("location")
        if location is None:
            return None
        # The next request takes a token along.
        target = self.client.base_url.join(location)
        base = self.client.base_url
        if (target.scheme, target.host, target.port) != (base.scheme, base.host, base.port):
            raise UnmetError("the Location leads to another server")
        # Whole, because a path would be taken for one below the path of the server's address.
        return str(target)

    async def send(
        self,
        action: Action,
        key: str | bytes | None = None,
        *,
        person: Person | None = None,
        content: bytes | None = None,
        keys: Sequence[str | bytes] = (),
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> Answer:
        """Send an action, as somebody, with a key or several, or with other bytes as its body."""
        sent = [*action.headers.items(), *(headers or {}).items()]
        sent += (person or self.me).headers.items()
        if action.body is not None or content is not None:
            sent.append(("content-type", JSON))
        all_keys = keys if key is None else (key, *keys)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in sent]
        raw += [
            (b"idempotency-key", value if isinstance(value, bytes) else value.encode())
            for value in all_keys
        ]
        body = content
        if body is None and action.body is not None:
            body = msgspec.json.encode(action.body)
        response = await self.client.request(
            action.method, action.path + query, content=body, headers=raw
        )
        return Answer(response.status_code, response.headers, response.content)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        person: Person | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send any other request of the server."""
        action = Action(method=method, path=path, body=body, other_body=None)
        return await self.send(action, key, person=person, headers=headers)


def unique() -> str:
    """Return a text that nobody has sent before."""
    return secrets.token_hex(8)


class Check(msgspec.Struct, frozen=True):
    """One demand of the contract. ``run`` returns what came, or raises what came instead."""

    name: str
    section: str
    expected: str
    run: Callable[[Kit], Awaitable[str]]
    applies: Callable[[Profile], bool] = lambda _profile: True


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How one check ended."""

    service: str
    check: str
    section: str
    expected: str
    came: str
    verdict: Verdict
