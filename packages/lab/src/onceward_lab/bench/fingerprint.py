"""The fingerprint of a 2 KB body, compared with orjson.loads and SHA-256 of the same bytes."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable

import orjson

from onceward_protocol.fingerprint import body_hash

ITEMS = [
    {
        "sku": f"BOOT-{n:04}",
        "name": f"Walking boot, size {38 + n % 9}, brown",
        "quantity": n % 4 + 1,
        "price": round(89.95 + n * 1.37, 2),
        "tags": ["outdoor", "leather"],
    }
    for n in range(14)
]
BODY = json.dumps(
    {
        "orderId": "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10",
        "clientGeneratedAt": "2026-03-01T09:30:00Z",
        "customer": {"name": "Zofia Łęcka", "lat": 52.2297, "lon": 21.0122},
        "lines": ITEMS,
        "note": "Please call first.",
    },
    ensure_ascii=False,
).encode()


def measure(rounds: int = 60, calls: int = 200) -> dict[str, float]:
    """Return the median ratio of interleaved rounds, and the best times in microseconds."""

    def ours() -> None:
        body_hash(BODY, "application/json")

    def bare() -> None:
        orjson.loads(BODY)
        hashlib.sha256(BODY).hexdigest()

    pairs = [(_time(ours, calls), _time(bare, calls)) for _ in range(rounds)]
    return {
        "body_bytes": len(BODY),
        "ratio": statistics.median(a / b for a, b in pairs),
        "ours_us": min(a for a, _ in pairs),
        "bare_us": min(b for _, b in pairs),
    }


def _time(work: Callable[[], None], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - started) / calls * 1e6
