"""Profiles: the guarded operation of a server and its settings, built in or from a file."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from onceward.guard.policy import ErrorFormat
from onceward_protocol.keys import KEY_HEADER, KeyFormat
from onceward_protocol.sequence import Ordering

__all__ = ["BUILT_IN", "Profile", "ProfileError", "RequestTemplate", "read_profile"]

_VERSION: Final = 1
_UNIQUE: Final = "{unique}"
_UNIQUE_NUMBER: Final = "{unique_number}"


class ProfileError(Exception):
    """The profile is invalid."""


class RequestTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to the guarded operation.

    In strings of the body ``{unique}`` is replaced by a random text, ``{now}`` by the time. The
    string ``{unique_number}`` becomes a random integer.
    """

    path: str
    body: dict[str, Any]
    method: str = "POST"
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One guarded operation and its policy settings."""

    version: int
    request: RequestTemplate
    # The same operation as the second tenant calls it: with ids of resources that it owns.
    other_request: RequestTemplate | None = None
    name: str = "profile"
    error_format: ErrorFormat = ErrorFormat.PROBLEM
    # Where the code is in error bodies of another format: "error.code".
    code_at: str | None = None
    # Compare the statuses of errors, not their bodies.
    statuses_only: bool = False
    # 401 and 404 come from the app's own sign-in and look-ups, and may have any body.
    own_errors: bool = True
    key_format: KeyFormat = KeyFormat.OPAQUE
    key_required: bool = True
    # The header that carries the key.
    key_header: str = KEY_HEADER
    # 422 for servers that use the statuses of the IETF draft.
    mismatch_status: int = 409
    volatile_fields: tuple[str, ...] = ()
    # Two executions of one body give different responses, for example because of an id.
    responses_are_unique: bool = True
    # The body of a success has the id of what was created.
    gives_id: bool = True
    # A success has a Location header.
    gives_location: bool = True
    # The operation accepts unknown members, so that checks can add any JSON.
    takes_any_member: bool = False
    # "strict": requests are numbered. It is found out if the server names the headers in its 400.
    ordering: Ordering = "none"
    # Headers that authenticate two callers of different tenants.
    sign_in: dict[str, str] = msgspec.field(default_factory=dict)
    other_sign_in: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ValueError(f"version should be {_VERSION}")
        if self.code_at is not None and not all(self.code_at.split(".")):
            raise ValueError("code_at should be names with dots between them: error.code")
        if self.code_at is not None and self.statuses_only:
            raise ValueError("code_at and statuses_only exclude each other")
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", self.key_header):
            raise ValueError("key_header should be the name of a header")
        headers = [*self.sign_in.items(), *self.other_sign_in.items()]
        for name, template in self._templates():
            if not template.path.startswith("/"):
                raise ValueError(f'{name}.path should begin with "/"')
            body = msgspec.json.encode(template.body).decode()
            if _UNIQUE not in body and _UNIQUE_NUMBER not in body:
                raise ValueError(
                    f"{name}.body should have {_UNIQUE} in one of its texts, or "
                    f'"{_UNIQUE_NUMBER}" in place of a number'
                )
            headers += template.headers.items()
        if not all(text.isascii() and text.isprintable() for pair in headers for text in pair):
            raise ValueError("headers should have only visible ASCII characters")

    @property
    def has_own_format(self) -> bool:
        """Whether error bodies have neither of Onceward's formats."""
        return self.code_at is not None or self.statuses_only

    def _templates(self) -> list[tuple[str, RequestTemplate]]:
        found = [("request", self.request)]
        if self.other_request is not None:
            found.append(("other_request", self.other_request))
        return found


def read_profile(raw: bytes) -> Profile:
    """Read a profile file. Raises ``ProfileError`` with a message of one line."""
    try:
        return msgspec.json.decode(raw, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"the profile cannot be used: {error}") from error


def _ours(name: str, path: str, body: dict[str, Any], **settings: Any) -> Profile:
    request = RequestTemplate(path=path, body=body)
    return Profile(version=_VERSION, name=name, request=request, own_errors=False, **settings)


BUILT_IN: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        "walk": _ours(
            "walk",
            # Quest and step depend on the progress of the walker.
            "/quest/{quest}/step/{step}/advance",
            {"clientGeneratedAt": _UNIQUE},
            error_format=ErrorFormat.ENVELOPE,
            key_format=KeyFormat.UUID4,
            volatile_fields=("attestationToken", "clientSubmittedAt"),
            responses_are_unique=False,
            gives_id=False,
            gives_location=False,
        ),
        "planning": _ours("planning", "/v1/projects", {"name": f"conformance {_UNIQUE}"}),
        "routes": _ours(
            "routes",
            "/api/v1/routes",
            {"start": {"lat": 55.95, "lon": -3.19}, "minutes": 30, "interests": [_UNIQUE]},
            key_format=KeyFormat.UUID4,
            key_required=False,
            gives_id=False,
        ),
        "field": _ours(
            "field",
            "/api/v1/contacts",
            {"name": f"conformance {_UNIQUE}"},
            key_format=KeyFormat.UUID4,
            takes_any_member=True,
        ),
    }
)
"""The profiles of the four services in onceward-services."""
