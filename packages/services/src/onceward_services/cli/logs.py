"""Logging of the server and the worker."""

import logging
import sys

from onceward.observability.logs import configure_logging
from onceward_services.settings import Settings

__all__ = ["configure_logging_from_settings"]


def configure_logging_from_settings(settings: Settings) -> None:
    """Log to stderr at the level of the settings, as JSON unless stderr is a terminal."""
    as_json = settings.log_json
    configure_logging(
        level=settings.log_level, json=not sys.stderr.isatty() if as_json is None else as_json
    )
    # At DEBUG, asyncio logs every connection of the event loop.
    logging.getLogger("asyncio").setLevel(logging.INFO)
