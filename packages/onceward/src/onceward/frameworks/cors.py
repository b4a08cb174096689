"""Headers that an app in a browser sends and reads, for the CORS middleware of any framework."""

from typing import Final, TypedDict

from onceward_protocol.error_codes import ERROR_HEADER
from onceward_protocol.keys import KEY_HEADER
from onceward_protocol.sequence import CLIENT_HEADER, SEQUENCE_HEADER

__all__ = ["CORS_HEADERS", "CorsHeaders"]


class CorsHeaders(TypedDict):
    """The arguments of Starlette's ``CORSMiddleware`` that name headers."""

    # ``Access-Control-Allow-Headers``: what requests may have.
    allow_headers: tuple[str, ...]
    # ``Access-Control-Expose-Headers``: what the app may read.
    expose_headers: tuple[str, ...]


CORS_HEADERS: Final = CorsHeaders(
    allow_headers=(
        "Authorization",
        "Content-Type",
        KEY_HEADER,
        "If-Match",
        CLIENT_HEADER,
        SEQUENCE_HEADER,
        "X-Client-Generated-At",
        "X-Correlation-ID",
        "X-Request-ID",
        "traceparent",
    ),
    expose_headers=(
        "Date",
        "ETag",
        "Idempotency-Replayed",
        "Link",
        "Location",
        "Onceward-Batch",
        "Onceward-Effect",
        ERROR_HEADER,
        "RateLimit",
        "RateLimit-Policy",
        "Retry-After",
        "WWW-Authenticate",
        "X-Correlation-ID",
        "X-Original-Request-ID",
        "X-Request-ID",
    ),
)
"""Headers to allow and expose: ``add_middleware(CORSMiddleware, **CORS_HEADERS, allow_origins=…)``.

Add the methods of the app, and headers of its own, such as another ``Policy.key_header``.
"""
