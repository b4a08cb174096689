"""Where the logs of a server and a worker go."""

import logging
import sys

from holdfast.observability.logs import configure_logging
from holdfast_services.settings import Settings

__all__ = ["configure_logging_from_settings"]


def configure_logging_from_settings(settings: Settings) -> None:
    """Send logs where the settings want them: JSON unless a person is watching."""
    as_json = settings.log_json
    configure_logging(
        level=settings.log_level, json=not sys.stderr.isatty() if as_json is None else as_json
    )
    # Its DEBUG is about every connection of the loop and helps nobody here.
    logging.getLogger("asyncio").setLevel(logging.INFO)
