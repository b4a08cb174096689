"""State of the batch endpoint of a server: its offer, and what went wrong with it.

A server that takes batches says so with ``Onceward-Batch: /batch; items=200`` in responses. The
offer is stored in the outbox's file, so that the next process knows it, and forgotten after a day.
"""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from math import inf
from threading import Lock
from typing import Final

import msgspec

from onceward_outbox.backoff import path_template
from onceward_outbox.errors import EntryInvalidError
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction
from onceward_protocol.endpoint_validation import check_endpoint

OFFER_HEADER: Final = "onceward-batch"

_KEEP_SECONDS: Final = 86_400.0
"""How long an offer is remembered after it was seen last."""

_RENEW_SECONDS: Final = 3_600.0
"""How old a stored offer is when it is stored anew."""

_REFUSED_SECONDS: Final = 3_600.0
"""How long offers are ignored after the endpoint was not there."""

_MAX_ALONE: Final = 10_000
_SINGLES_BEFORE_BATCH: Final = 8
"""Successful single sends after which a batch is tried again."""

_ITEMS: Final = re.compile(r"items=([1-9][0-9]{0,5})")


class BatchOffer(msgspec.Struct, frozen=True):
    """A batch endpoint. No path: there is none, and offers are ignored for a while."""

    path: str | None
    # The most items that the server takes.
    items: int
    # How long this is valid.
    seconds: float


def parse_offer(header: str | None) -> BatchOffer | None:
    """Return the offer of the header; None without one, and for a value that is malformed.

    The path is one of the same server: a URL, or a path with a query, is malformed.
    """
    if header is None or not (header.isascii() and header.isprintable()):
        return None
    path, *parameters = (part.strip() for part in header.split(";"))
    found = [match for text in parameters if (match := _ITEMS.fullmatch(text))]
    if len(found) != 1 or "?" in path or "{" in path:
        return None
    try:
        check_endpoint(path)
    except EntryInvalidError:
        return None
    return BatchOffer(path, int(found[0][1]), _KEEP_SECONDS)


class Batches:
    """State of batches to one server. Thread-safe: drains of one outbox share it."""

    def __init__(self, settings: QueueSettings, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._is_enabled = settings.batch
        self._wanted = settings.batch_items
        self._offer: BatchOffer | None = None
        self._until = float("-inf")
        # How many items a batch may have after time-outs; it grows again with each success.
        self._most = inf
        # How many the server has taken at most, by 413.
        self._accepted = inf
        self._singles = 0
        # Entries that have to be sent alone, and path templates whose requests have to.
        self._alone: set[str] = set()
        self._alone_paths: set[str] = set()
        # Path templates whose responses name no version.
        self._unversioned: set[str] = set()
        self.is_unsaved = False

    # ------------------------------------------------------------------ the offer

    @property
    def path(self) -> str | None:
        """The path of the endpoint; None if it is not known, or not to be used."""
        offer = self._offer
        if not self._is_enabled or offer is None or self._until <= self._monotonic():
            return None
        return offer.path

    @property
    def limit(self) -> int:
        """How many entries the next batch may have; below 2 they are sent one by one."""
        offer = self._offer
        if self.path is None or offer is None:
            return 0
        return int(min(self._wanted, offer.items, self._most, self._accepted))

    def note_offer(self, header: str | None) -> None:
        """Remember what the header of a response offers."""
        if header is None or not self._is_enabled:
            return
        offer = parse_offer(header)
        if offer is None:
            return
        with self._lock:
            left = self._until - self._monotonic()
            is_refused = self._offer is not None and self._offer.path is None and left > 0
            is_same = self._offer is not None and (self._offer.path, self._offer.items) == (
                offer.path,
                offer.items,
            )
            if is_refused or (is_same and left > _KEEP_SECONDS - _RENEW_SECONDS):
                return
            self._set(offer)

    def forget_offer(self) -> None:
        """Note that the endpoint is not there; offers are ignored for an hour."""
        with self._lock:
            self._set(BatchOffer(None, 0, _REFUSED_SECONDS))

    def to_store(self) -> BatchOffer | None:
        """Return the offer, to be stored now; None to store none."""
        with self._lock:
            self.is_unsaved = False
            left = self._until - self._monotonic()
            if self._offer is None or left <= 0:
                return None
            return msgspec.structs.replace(self._offer, seconds=left)

    def restore(self, stored: BatchOffer | None) -> None:
        """Take over what another process has stored, unless more is known here."""
        if stored is None:
            return
        with self._lock:
            if self._until <= self._monotonic():
                self._offer, self._until = stored, self._monotonic() + stored.seconds

    def _set(self, offer: BatchOffer) -> None:
        self._offer, self._until = offer, self._monotonic() + offer.seconds
        self._accepted = inf
        self.is_unsaved = True

    # ------------------------------------------------------------------ sizes

    def shrink(self, count: int, *, for_good: bool = False) -> None:
        """Halve the next batches after one of ``count`` items got no response.

        ``for_good``: the server does not take so many, so they do not grow again.
        """
        with self._lock:
            self._singles = 0
            if for_good:
                self._accepted = max(1, count // 2)
            else:
                self._most = max(1, count // 2)

    def grow(self) -> None:
        """Double the next batches after one has got its results."""
        with self._lock:
            self._most = 2 * self._most

    def note_single_success(self, entry_id: str, endpoint: str) -> None:
        """Note the success of an entry that was sent alone."""
        if entry_id in self._alone:
            with self._lock:
                self._alone.discard(entry_id)
                self._alone_paths.add(path_template(endpoint))
        if self._most < 2:  # noqa: PLR2004 - less is no batch
            with self._lock:
                self._singles += 1
                if self._singles >= _SINGLES_BEFORE_BATCH:
                    self._most, self._singles = 2, 0

    def reset(self) -> None:
        """Forget what time-outs and refusals have shown: at a wake-up the network is another."""
        with self._lock:
            self._most = inf
            self._alone.clear()
            self._alone_paths.clear()

    # ------------------------------------------------------------------ what cannot be in a batch

    def send_alone(self, entry_id: str) -> None:
        """Note that the server refuses an entry in a batch, and perhaps not alone."""
        with self._lock:
            if len(self._alone) >= _MAX_ALONE:
                self._alone.clear()
            self._alone.add(entry_id)

    def is_alone(self, entry_id: str, endpoint: str) -> bool:
        if entry_id in self._alone:
            return True
        return bool(self._alone_paths) and path_template(endpoint) in self._alone_paths

    def note_version(self, endpoint: str, *, is_known: bool) -> None:
        """Note whether a successful response named the entity's version."""
        template = path_template(endpoint)
        if is_known == (template in self._unversioned):
            with self._lock:
                if is_known:
                    self._unversioned.discard(template)
                else:
                    self._unversioned.add(template)

    def has_versions(self, endpoint: str) -> bool:
        """Return whether responses are expected to name the entity's version."""
        return path_template(endpoint) not in self._unversioned


# -- in the file -----------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    """An offer in the file: its end by the file's clock and by the device's."""

    path: str | None
    items: int
    until_ms: int
    until_at: datetime


def read_offer(tx: Transaction, stored: str | None) -> BatchOffer | None:
    """Return the offer in the row of a server, unless it has passed or cannot be read."""
    if stored is None:
        return None
    try:
        row = msgspec.json.decode(stored, type=_Row)
    except (msgspec.DecodeError, TypeError):  # of another version
        return None
    # The file's clock stops while the device is off, the other one can be set.
    left = min((row.until_ms - tx.ms) / 1000, (row.until_at - tx.now).total_seconds())
    return BatchOffer(row.path, row.items, min(left, _KEEP_SECONDS)) if left > 0 else None


def write_offer(tx: Transaction, server: str, offer: BatchOffer | None) -> None:
    """Store the offer of a server in place of the last one."""
    if offer is None:
        tx.rows("forget_batch_offer", row=offer_row(server))
        return
    row = _Row(
        offer.path,
        offer.items,
        tx.ms + int(offer.seconds * 1000),
        tx.now + timedelta(seconds=offer.seconds),
    )
    tx.rows("save_batch_offer", row=offer_row(server), value=msgspec.json.encode(row).decode())


def offer_row(server: str) -> str:
    """Return the name of the row with the offer of a server."""
    return f"batch {server}"
