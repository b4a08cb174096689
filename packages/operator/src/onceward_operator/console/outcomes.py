"""Meanings of the outcomes of requests, in a phrase, for pages that name them."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from onceward.ports import Row
from onceward_operator.request_counts import OUTCOMES
from onceward_protocol.error_codes import CODES

__all__ = ["OUTCOME_PHRASES", "Explained", "explain", "label_of", "title_of"]

OUTCOME_PHRASES: Final[Mapping[str, str]] = {
    "replayed": "the key had been executed: the stored response was sent again, nothing ran",
    "mismatched": "the key was used before for another request: refused, nothing ran",
    "in_progress": "the first request with this key was still running: nothing ran again",
    "refused": "an error response that is not stored: a retry with the same key may run",
    "stale": "the user acted longer ago than the endpoint allows: the handler did not run",
    "limited": "too many requests: the handler did not run",
    "rolled_back": "the handler failed: its changes were undone, a retry may run",
    "unavailable": "503: the database did not respond",
    "record": "executed, and its response stored",
    "device": "when the user acted, by the clock of the device",
    "audit": "who changed what",
    "enqueued": "a job was added with this action",
    "done": "the job has completed",
    "dead": "the job was given up: it is a dead letter",
}
"""By outcome or kind of event; a part of a sentence."""

_FIRST_ERROR: Final = 400


class Explained(NamedTuple):
    """The title and the meaning of a logged request."""

    title: str
    meaning: str


_EXPLAINED: Final[Mapping[str, Explained]] = {
    "replayed": Explained(
        "It was replayed",
        "The key had been executed before, once. This request got the stored response again, and "
        "nothing was executed a second time.",
    ),
    "mismatched": Explained(
        "It was refused: the key was used for another request",
        "A mismatch: the same key with other content. Nothing was executed or written.",
    ),
    "in_progress": Explained(
        "It was refused: the first request was still running",
        "Nothing was executed. A retry gets the response of the first request.",
    ),
    "stale": Explained(
        "It was refused: the action was too old",
        "The user acted longer ago than the endpoint allows. The handler did not run.",
    ),
    "limited": Explained(
        "It was refused: rate limited",
        "Nothing was executed. A retry with the same key may be.",
    ),
    "unavailable": Explained(
        "The store was unavailable",
        "What happened is unknown from here: if the key has a record, it was executed, and a retry "
        "gets its response.",
    ),
    "rolled_back": Explained(
        "It failed, and was rolled back",
        "The handler raised an error, or responded with one of the server (5xx). Its changes were "
        "undone, and a retry with the same key runs again.",
    ),
}
_BEFORE_HANDLER: Final = Explained(
    "It was refused before it was executed",
    "Nothing was executed or written. The error code says what to correct.",
)
_BY_HANDLER: Final = Explained(
    "It was refused by the app",
    "The handler ran and responded with an error that is not stored. Its changes were undone, "
    "unless the app keeps them (keep_writes_on_error). A retry with the same key runs again.",
)
_NOT_STORED: Final = Explained(
    "Its response was not stored",
    "The handler ran, wrote nothing, and responded without an error, e.g. with a redirect. A retry "
    "with the same key runs again.",
)


def title_of(code: str | None) -> str | None:
    """Return the sense of an error code of the guard; None for codes of the app, or of several."""
    titles = {each.title for each in CODES.values() if code in {each.envelope, each.problem}}
    return titles.pop() if len(titles) == 1 else None


def explain(row: Row) -> Explained:
    """Return the outcome of a logged request in words."""
    if row["outcome"] != "refused":
        return _EXPLAINED.get(row["outcome"], _BEFORE_HANDLER)
    if row["received_request_hash"] is None:  # it was not read as a whole
        return _BEFORE_HANDLER
    is_error = row["status"] is None or row["status"] >= _FIRST_ERROR
    return _BY_HANDLER if is_error else _NOT_STORED


def label_of(outcome: str) -> str:
    """Return how an outcome is shown."""
    return OUTCOMES.get(outcome, outcome.replace("_", " ").capitalize())
