"""A batch: several requests in one body, and the references between them. Pure.

``{local:UUID}`` in the path, a header or a string of the body of an item is replaced by the id, and
``{version:UUID}`` by the version, that an earlier item with that ``local_id`` has responded with.
This happens before the request is fingerprinted, so the same request sent alone, with the id and
the version in it, has the same fingerprint.
"""

import re
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec

from onceward_protocol.endpoint_validation import check_endpoint
from onceward_protocol.errors import (
    BatchSkippedError,
    BatchTooLargeError,
    BodyInvalidError,
    EntryInvalidError,
    KeyInvalidError,
)
from onceward_protocol.fingerprint import MAX_DEPTH, decode_json
from onceward_protocol.local_ids import UUID_TEXT, is_local_id, strings_in, with_strings

__all__ = [
    "ITEM_HEADERS",
    "BatchItem",
    "ItemResult",
    "ResolvedItem",
    "Results",
    "check_headers",
    "is_json",
    "parse_batch",
    "parse_item",
    "parse_results",
]

# The headers that an item may have; the policy of its endpoint may add some.
ITEM_HEADERS: Final = frozenset(
    {"content-type", "if-match", "traceparent", "x-client-generated-at", "x-correlation-id"}
)

_METHOD: Final = re.compile(r"[A-Za-z]{1,16}")
_MAX_TEXT_CHARS: Final = 256
_MAX_HEADER_CHARS: Final = 8192
_MAX_SEQUENCE: Final = 2**63 - 1
_JSON: Final = "application/json"
_PLACEHOLDER: Final = re.compile(rf"\{{(local|version):({UUID_TEXT})\}}")
_OPENING: Final = re.compile(r"\{(?:local|version):")
# A body without one of these has no placeholder. The backslash is that of an escaped brace.
_HINTS: Final = (b"{local:", b"{version:", b"\\")
_STRONG_TAG: Final = re.compile(r'"([\x21\x23-\x7e]*)"')
_VERSION: Final = re.compile(r"[1-9][0-9]{0,18}")
_FIRST_REDIRECT: Final = 300
# Deeper than any body that is accepted, and less deep than what the decoder can read.
_CUT_DEPTH: Final = 2 * MAX_DEPTH
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]+|[\]}]+', re.DOTALL)

Reference = tuple[str, str]


class BatchItem(msgspec.Struct, frozen=True, gc=False):
    """One item as it was sent, placeholders included."""

    # In upper case.
    method: str
    # With the query.
    path: str
    # None if the item has none.
    key: str | None = None
    # Names in lower case.
    headers: dict[str, str] = {}
    # The JSON text, or the decoded bytes of another content type; empty without a body.
    body: bytes = b""
    # After an item that did not succeed, later items of its lane are skipped.
    lane: str | None = None
    # The id by which other items refer to this one.
    local_id: str | None = None
    # The stream of one device, and the number in it.
    client_id: str | None = None
    sequence: int | None = None

    @property
    def is_json(self) -> bool:
        """Whether the body is JSON, in which placeholders are replaced."""
        return is_json(self.headers.get("content-type"))


class ResolvedItem(msgspec.Struct, frozen=True, gc=False):
    """The parts of a request in which placeholders have been replaced."""

    path: str
    headers: dict[str, str]
    body: bytes


def parse_batch(raw: bytes, *, max_items: int) -> list[bytes]:
    """Return the texts of the items. Raises ``BodyInvalidError`` or ``BatchTooLargeError``."""
    try:
        members = _members(raw, "the batch")
    except RecursionError:
        members = _members(_cut(raw), "the batch")
    if set(members) != {"items"}:
        raise BodyInvalidError('a batch is a JSON object with one member: {"items": […]}')
    try:
        items = msgspec.json.decode(members["items"], type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BodyInvalidError("items must be an array of objects") from None
    if len(items) > max_items:
        raise BatchTooLargeError(
            f"a batch may have at most {max_items} items", details={"maxItems": max_items}
        )
    return [bytes(item) for item in items]


def parse_item(raw: bytes) -> BatchItem:
    """Read one item. Raises ``BodyInvalidError`` or ``KeyInvalidError``, which are its response."""
    try:
        sent = _decode_item(raw)
    except msgspec.ValidationError as error:
        raise BodyInvalidError(f"the item is not valid: {_reason(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BodyInvalidError("the item is not a JSON object that can be read") from None
    body = bytes(sent.body)
    _check_names(raw, sent, body)
    if _METHOD.fullmatch(sent.method) is None:
        raise BodyInvalidError("method must be the name of an HTTP method, such as POST")
    headers = _headers(sent.headers) if sent.headers else {}
    if sent.local_id is not None and not is_local_id(sent.local_id):
        raise BodyInvalidError("local_id must be a lowercase UUID")
    if sent.client_id is not None and not _is_printable(sent.client_id):
        raise BodyInvalidError("client_id must be printable ASCII")
    if sent.key is not None and not _is_printable(sent.key):
        raise KeyInvalidError("The idempotency key must be 1 to 128 visible ASCII characters.")
    body = _body(body, headers)
    if body and "content-type" not in headers:
        headers["content-type"] = _JSON
    return BatchItem(
        method=sent.method.upper(),
        path=sent.path,
        key=sent.key,
        headers=headers,
        body=body,
        lane=sent.lane,
        local_id=sent.local_id,
        client_id=sent.client_id,
        sequence=sent.sequence,
    )


_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT_CHARS)]


class _Sent(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    method: str
    path: str
    key: str | None = None
    headers: dict[str, str] | None = None
    body: msgspec.Raw = msgspec.Raw()
    lane: _Text | None = None
    local_id: str | None = None
    client_id: _Text | None = None
    sequence: Annotated[int, msgspec.Meta(ge=1, le=_MAX_SEQUENCE)] | None = None


_decode_item = msgspec.json.Decoder(_Sent).decode


def _check_names(raw: bytes, sent: _Sent, body: bytes) -> None:
    """Raise for a name that is there twice: the decoder keeps the last one, others the first.

    Each name and each text has two quotes. If there are others than expected, a slower check
    decides: they may be of a member that is null, or escaped.
    """
    texts = [sent.key, sent.lane, sent.local_id, sent.client_id]
    texts = [text for text in texts if text is not None]
    names = 2 + len(texts) + (sent.sequence is not None) + bool(body)
    count = names + 2 + len(texts)
    if sent.headers is not None:
        count += 1 + 2 * len(sent.headers)
    if raw.count(b'"') == 2 * count + body.count(b'"'):
        return
    members = _members(raw, "the item")
    if sent.headers is not None:
        _members(bytes(members["headers"]), "headers")


def _reason(error: msgspec.ValidationError) -> str:
    """Return the fault, without the values that were sent."""
    text = str(error)
    return "it has a member that items do not have" if "unknown field" in text else text


def check_headers(item: BatchItem, extra: Collection[str]) -> None:
    """Raise ``BodyInvalidError`` for a header that items must not have."""
    for name in item.headers:
        if name not in ITEM_HEADERS and name not in extra:
            raise BodyInvalidError(
                "the item has a header that is not allowed in a batch; allowed are "
                + _names({*ITEM_HEADERS, *extra})
            )


class Results:
    """Responses to earlier items, as far as later ones can refer to it."""

    def __init__(self) -> None:
        self._ids: dict[str, str | int] = {}
        self._tags: dict[str, str] = {}
        self._succeeded: dict[str, bool] = {}

    def note(
        self,
        local_id: str,
        status: int,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> None:
        """Keep id and version of the latest response to an item with this ``local_id``."""
        is_success = 200 <= status < _FIRST_REDIRECT  # noqa: PLR2004 - the first success
        self._succeeded[local_id] = is_success
        if not is_success:
            return
        value = _object(body)
        found = value.get("id")
        if isinstance(found, str | int) and not isinstance(found, bool):
            self._ids[local_id] = found
        tag = next((v.decode("latin-1").strip() for n, v in headers if n == b"etag"), "")
        version = value.get("version")
        if _STRONG_TAG.fullmatch(tag) is not None:
            self._tags[local_id] = tag
        elif isinstance(version, int) and not isinstance(version, bool):
            self._tags[local_id] = f'"{version}"'

    def resolve(self, item: BatchItem) -> ResolvedItem:
        """Replace the placeholders of an item.

        Raises ``BatchSkippedError`` if it refers to an item that did not succeed, and
        ``BodyInvalidError`` if a placeholder cannot be replaced.
        """
        value = None
        local, version, escaped = _HINTS
        body = item.body
        if (local in body or version in body or escaped in body) and item.is_json:
            value = _decode_body(item.body)
        wanted: set[Reference] = set()
        if value is not None or "{" in item.path or any("{" in v for v in item.headers.values()):
            wanted = set(_references(item, value))
        if wanted:
            self._check(wanted)
            headers = {name: self._in_header(text) for name, text in item.headers.items()}
            path = self._in_path(item.path)
            body = item.body
            if any(_OPENING.search(text) for text in strings_in(value)):
                body = msgspec.json.encode(with_strings(value, self._in_body))
        else:
            path, headers, body = item.path, item.headers, item.body
        problem = _problem_of(path)
        if problem is not None:
            raise BodyInvalidError(problem)
        return ResolvedItem(path, headers, body)

    def _check(self, wanted: set[Reference]) -> None:
        for kind, local_id in sorted(wanted):
            if local_id not in self._succeeded:
                raise BodyInvalidError(
                    f"{{{kind}:…}} refers to a local_id that no earlier item of this batch has"
                )
        if not all(self._succeeded[local_id] for _, local_id in wanted):
            raise BatchSkippedError(
                "an item that this one refers to did not succeed; this one was not run"
            )
        for kind, local_id in sorted(wanted):
            if local_id not in (self._ids if kind == "local" else self._tags):
                what = "id" if kind == "local" else "version"
                raise BodyInvalidError(
                    f"{{{kind}:…}} refers to an item whose response has no {what}"
                )

    def _text(self, found: re.Match[str]) -> str:
        kind, local_id = found[1], found[2]
        return str(self._ids[local_id]) if kind == "local" else self._tags[local_id][1:-1]

    def _in_path(self, path: str) -> str:
        return _PLACEHOLDER.sub(lambda found: quote(self._text(found), safe=""), path)

    def _in_header(self, text: str) -> str:
        whole = _PLACEHOLDER.fullmatch(text)
        if whole is not None and whole[1] == "version":
            return self._tags[whole[2]]
        replaced = _PLACEHOLDER.sub(self._text, text)
        if not _is_printable(replaced):
            raise BodyInvalidError("an id that an earlier item has got cannot be in a header")
        return replaced

    def _in_body(self, text: str) -> str | int:
        whole = _PLACEHOLDER.fullmatch(text)
        if whole is None:
            return _PLACEHOLDER.sub(self._text, text) if _OPENING.search(text) else text
        if whole[1] == "local":
            return self._ids[whole[2]]
        version = self._text(whole)
        return int(version) if _VERSION.fullmatch(version) else version


@lru_cache(maxsize=1024)  # most items of a batch have one of a few paths
def _problem_of(path: str) -> str | None:
    try:
        check_endpoint(path)
    except EntryInvalidError as error:
        return f"path: {error.message}"
    return None


def _references(item: BatchItem, body: Any) -> Iterator[Reference]:
    for text in (item.path, *item.headers.values(), *strings_in(body)):
        opened = len(_OPENING.findall(text))
        if not opened:
            continue
        found = _PLACEHOLDER.findall(text)
        if len(found) != opened:
            raise BodyInvalidError("{local:…} and {version:…} must hold a lowercase UUID")
        yield from found


def _members(raw: bytes, what: str) -> dict[str, msgspec.Raw]:
    """Return the members of an object. Raises for a name that is there twice."""
    try:
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BodyInvalidError(f"{what} is not a JSON object that can be read") from None
    # Names have no quotes in them, or they would be refused as unknown.
    quotes = sum(bytes(value).count(b'"') for value in members.values()) + 2 * len(members)
    if quotes != raw.count(b'"') and all('"' not in name for name in members):
        raise BodyInvalidError(f"{what} has the same member twice")
    return members


def _cut(raw: bytes) -> bytes:
    """Drop what is nested too deep for the decoder.

    What is left of such an item is still deeper than a body may be: it is refused, and the others
    are not.
    """
    kept: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(raw):
        text = token[0]
        if text[:1] == b'"':
            continue
        before, depth = depth, depth + (len(text) if text[:1] in b"[{" else -len(text))
        if before < _CUT_DEPTH <= depth:
            kept.append(raw[start : token.start() + _CUT_DEPTH - before])
        elif depth < _CUT_DEPTH <= before:
            start = token.end() - (_CUT_DEPTH - depth)
    kept.append(raw[start:] if depth < _CUT_DEPTH else b"")
    return b"".join(kept)


def _decode_body(body: bytes) -> Any:
    try:
        value = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        return None  # refused with the request, when it is fingerprinted
    return value if _depth_of(value) <= MAX_DEPTH else None


def _depth_of(value: Any) -> int:
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        depth += 1
    return depth


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _headers(given: dict[str, str]) -> dict[str, str]:
    headers = {name.lower(): value for name, value in given.items()}
    if len(headers) != len(given):
        raise BodyInvalidError("headers has the same name twice")
    if not all(map(_is_printable, headers.values())):
        raise BodyInvalidError("the value of a header must be printable ASCII")
    return headers


def _body(raw: bytes, headers: Mapping[str, str]) -> bytes:
    if not raw or raw == b"null":
        return b""
    if is_json(headers.get("content-type")):
        return raw
    try:
        return b64decode(msgspec.json.decode(raw, type=_Encoded).base64, validate=True)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        raise BodyInvalidError(
            'a body that is not JSON must be {"base64": …}, with its Content-Type in headers'
        ) from None


class _Encoded(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


class ItemResult(msgspec.Struct, frozen=True):
    """The response to one item, as a single request would have got it."""

    status: int
    # Names in lower case.
    headers: dict[str, str]
    body: bytes


def parse_results(raw: bytes, count: int) -> tuple[list[ItemResult], float | None] | None:
    """Return the results of a batch of ``count`` items, and ``retry_after``.

    None if the text is not the response to a batch.
    """
    try:
        found = msgspec.json.decode(raw, type=_SentResults)
        results = [_result(sent) for sent in found.results]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    return (results, found.retry_after) if len(results) <= count else None


class _SentResult(msgspec.Struct):
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    headers: dict[str, str]
    body: msgspec.Raw = msgspec.Raw(b"null")


class _SentResults(msgspec.Struct):
    results: Annotated[list[_SentResult], msgspec.Meta(min_length=1)]
    retry_after: float | None = None


def _result(sent: _SentResult) -> ItemResult:
    headers = {name.lower(): value for name, value in sent.headers.items()}
    body = bytes(sent.body)
    body = b"" if body == b"null" else body
    if body and "json" not in headers.get("content-type", "").lower():
        with suppress(msgspec.ValidationError):  # the JSON of a text that the service sent
            body = b64decode(msgspec.json.decode(body, type=_Encoded).base64, validate=True)
    return ItemResult(sent.status, headers, body)


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable() and len(text) <= _MAX_HEADER_CHARS


@lru_cache(maxsize=256)
def is_json(content_type: str | None) -> bool:
    """Return whether a content type is JSON. None, for an item without one, is."""
    if content_type is None:
        return True
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == _JSON or media_type.endswith("+json")


def _names(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
