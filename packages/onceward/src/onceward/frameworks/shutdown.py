"""Whether the server that runs this process is shutting down, for responses that do not end."""

import signal
from typing import Any

__all__ = ["server_is_stopping"]


def server_is_stopping() -> bool:
    """Return whether the server is shutting down.

    Uvicorn waits for open responses before it runs the lifespan shutdown, and a stream never ends
    without a reason. Only the signal handler's server object shows that a shutdown has begun.
    """
    server: Any = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))
