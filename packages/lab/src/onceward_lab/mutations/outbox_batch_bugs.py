"""Bugs of the outbox when it sends batches."""

from typing import Any

import msgspec

from onceward_lab.mutations.planting import Replacement, bug, untyped
from onceward_outbox import requests, sender
from onceward_outbox.outcome import AttemptResult, Released
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.responses import Responses
from onceward_outbox.sender import Sender

REQUEST, SENDER = untyped(requests), untyped(sender)
_SKIPPED = 424


@bug
def missing_results_counted_as_done() -> list[Replacement]:
    # The results are those of the first items only; the rest was not run.
    right = SENDER.read_results

    def read_results(response: Any, count: int) -> Any:
        found = right(response, count)
        if found is None:
            return None
        missing = count - len(found.responses)
        responses = [*found.responses, *[found.responses[-1]] * missing]
        return msgspec.structs.replace(found, responses=responses)

    return [(SENDER, "read_results", read_results)]


@bug
def skipped_item_counted_as_done() -> list[Replacement]:
    right = Sender._result

    def result(self: Any, part: Any, send: Any, response: Any, *more: Any) -> Any:
        if response.status == _SKIPPED:
            response = msgspec.structs.replace(response, status=200)
        return right(self, part, send, response, *more)

    return [(SENDER, "_is_skipped", lambda _response: False), (Sender, "_result", result)]


@bug
def results_given_to_other_items() -> list[Replacement]:
    right = SENDER.read_results

    def read_results(response: Any, count: int) -> Any:
        found = right(response, count)
        if found is None or len(found.responses) < count:
            return found
        return msgspec.structs.replace(found, responses=found.responses[::-1])

    return [(SENDER, "read_results", read_results)]


@bug
def lanes_not_sent() -> list[Replacement]:
    # After an item that did not succeed, the server goes on with those behind it.
    return [(REQUEST, "_lanes", lambda entries: [None for _ in entries])]


@bug
def version_of_an_earlier_item_not_followed() -> list[Replacement]:
    return [(REQUEST.BatchMaker, "_before", lambda _self, _claimed: None)]


@bug
def batch_to_a_held_endpoint() -> list[Replacement]:
    right = OutboxQueue.claim_some

    def claim_some(self: Any, user_id: str, limit: int, **options: Any) -> Any:
        if options.get("in_batch"):
            options["held_paths"] = {}
        return right(self, user_id, limit, **options)

    return [(OutboxQueue, "claim_some", claim_some)]


@bug
def silent_batch_taken_for_unsent() -> list[Replacement]:
    # What may have happened is changed, and sent as something new.
    right = Responses.no_response

    def no_response(self: Any, sends: Any, failure: Any) -> Any:
        outcomes = right(self, sends, failure)
        is_batch = len(sends) > 1
        return [Released(AttemptResult()) for _ in sends] if is_batch else outcomes

    return [(Responses, "no_response", no_response)]
