"""One server process of ``onceward serve --workers``, started by the supervisor.

Arguments: the file descriptors of the listening sockets, separated by commas, and of the ready
pipe, and the file in which the processes share their rate limits.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from onceward_protocol.cli.gc import pause_gc, resume_gc
from onceward_protocol.cli.main import report_errors

if TYPE_CHECKING:
    import uvicorn

__all__: list[str] = []


def _run() -> int:
    from onceward_services.app import create_app
    from onceward_services.cli.logs import configure_logging_from_settings
    from onceward_services.cli.serve import port_of, run_in_process
    from onceward_services.settings import load_settings

    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")]
    ready = int(sys.argv[2])
    settings = load_settings()
    configure_logging_from_settings(settings)

    def announce_ready() -> None:
        resume_gc()
        os.write(ready, b".")
        os.close(ready)

    def stop_with_parent(server: "uvicorn.Server") -> None:
        """Stop when the supervisor has ended for any reason: stdin then reaches end of file."""

        def watch() -> None:
            # Not sys.stdin: a thread in a buffered read makes the interpreter abort at exit.
            while os.read(0, 1):
                pass
            server.handle_exit(signal.SIGTERM, None)

        Thread(target=watch, name="onceward-parent", daemon=True).start()

    ops = listeners[1] if len(listeners) > 1 else None
    app = create_app(settings, rate_limit_file=Path(sys.argv[3]), ops_port=port_of(ops))
    run_in_process(app, settings, listeners, announce_ready, on_start=stop_with_parent)
    return 0


if __name__ == "__main__":
    pause_gc()
    sys.exit(report_errors(_run))
