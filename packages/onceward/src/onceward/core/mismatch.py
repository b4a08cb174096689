"""Which part of a request differs from the one that its key was used for first.

The record has two hashes and nothing else of the first request. So each guess is hashed and
compared: the parts of the second request, with one of them replaced.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from onceward.core.idempotency_record import RequestFingerprint
from onceward_protocol.fingerprint import request_fingerprint

__all__ = ["Part", "differing_parts"]

Part = Literal["body", "method", "path", "query", "path or query"]


def differing_parts(
    stored: RequestFingerprint,
    *,
    method: str,
    endpoint: str,
    path_params: Mapping[str, str],
    query: bytes,
    body_hash: str,
    methods: Iterable[str] = (),
) -> tuple[Part, ...]:
    """Return the parts that differ. ``methods`` are the others that the endpoint is guarded for.

    Empty if no guess fits: the policy has its own fingerprint, or several parts differ.
    """
    found: list[Part] = ["body"] if stored.body_hash != body_hash else []

    def fits(*, method: str = method, query: bytes = query) -> bool:
        guess = request_fingerprint(
            method=method,
            endpoint=endpoint,
            path_params=path_params,
            query=query,
            body_hash=stored.body_hash,
        )
        return guess == stored.request_hash

    if fits():
        return tuple(found)
    if any(fits(method=other) for other in methods if other != method):
        return (*found, "method")
    if query and fits(query=b""):
        return (*found, "query")
    if not path_params:
        return (*found, "query")
    return (*found, "path or query")
