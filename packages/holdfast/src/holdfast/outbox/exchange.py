"""One request to the server and what came back, and the port that carries the one and the other."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

__all__ = ["Answer", "NoAnswer", "Request", "Transport"]


class Request(msgspec.Struct, frozen=True):
    """One HTTP request to the configured server."""

    method: str
    # Path and query.
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None


class Answer(msgspec.Struct, frozen=True):
    """What the server said."""

    status: int
    # Names in lower case.
    headers: Mapping[str, str]
    body: bytes
    # The body was longer than is read.
    cut_short: bool = False

    def json(self) -> Any:
        """Return the body as a JSON value; None if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def code(self) -> str | None:
        """The machine's code of an error, in either dialect."""
        if self.status < 400:  # noqa: PLR2004
            return None
        body = self.json()
        code = body.get("code", body.get("error")) if isinstance(body, dict) else None
        return code if isinstance(code, str) else None

    @property
    def request_id(self) -> str | None:
        """The server's id of this exchange."""
        return self.headers.get("x-request-id")


class NoAnswer(msgspec.Struct, frozen=True):
    """The server said nothing."""

    # A few words for a person; no body, no token.
    why: str
    # Whether the request may have left the device. If not, it has certainly not happened.
    left: bool = True


class Transport(Protocol):
    """What the drain sends with. Implementations are used by several threads."""

    def send(self, request: Request) -> Answer | NoAnswer:
        """Send a request once."""
