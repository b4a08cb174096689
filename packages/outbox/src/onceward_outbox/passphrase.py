"""Which passphrases are too weak for a new file."""

import logging
import re
from pathlib import Path
from typing import Final

from onceward_outbox.errors import ConfigurationError

__all__ = ["check_new_passphrase", "warn_of_weak_passphrase"]

_MIN_CHARS: Final = 12
# SQLCipher takes such a text as the key itself, without stretching it.
_RAW_KEY: Final = re.compile(r"x'.*'\Z|raw:", re.IGNORECASE | re.DOTALL)

_log = logging.getLogger(__name__)


def check_new_passphrase(passphrase: str | bytes, *, allow_weak: bool) -> None:
    """Raise ``ConfigurationError`` for a weak one. Keys of type bytes are not passphrases."""
    reason = _weakness(passphrase)
    if reason is not None and not allow_weak:
        raise ConfigurationError(
            f"the passphrase {reason}: use a longer one, or a key of 32 random bytes "
            "(allow_weak_passphrase=True, or --allow-weak-passphrase, accepts it)"
        )


def warn_of_weak_passphrase(passphrase: str | bytes, path: Path) -> None:
    """Log a warning for a file that has a weak passphrase; refusing it would lock its owner out."""
    reason = _weakness(passphrase)
    if reason is not None:
        _log.warning("the passphrase of %s %s: change it with change_passphrase", path, reason)


def _weakness(passphrase: str | bytes) -> str | None:
    if isinstance(passphrase, bytes):
        return None
    if _RAW_KEY.match(passphrase):
        return "has the form of a raw key (x'…' or raw:…), which is not stretched"
    if len(passphrase) < _MIN_CHARS:
        return f"has fewer than {_MIN_CHARS} characters"
    return None
