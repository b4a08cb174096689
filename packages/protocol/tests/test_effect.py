"""The effect that a response names for its key."""

import pytest

from onceward_protocol.effect import is_conclusive


@pytest.mark.parametrize(
    ("headers", "is_final"),
    [
        ({}, False),
        ({"onceward-effect": "none"}, True),
        ({"onceward-effect": "stored"}, True),
        ({"onceward-effect": ""}, False),
        ({"onceward-effect": "None"}, False),
        ({"onceward-effect": "none, none"}, False),
        ({"idempotency-replayed": "true"}, True),
        ({"onceward-error": "feature.disabled"}, False),
    ],
)
def test_response_is_conclusive(headers: dict[str, str], is_final: bool) -> None:
    assert is_conclusive(headers) is is_final
