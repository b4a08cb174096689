"""Errors of the outbox. Nothing was changed by the operation that raises one.

::

    OutboxError
    ├── EntryInvalidError
    ├── EntryNotFoundError
    ├── TransitionError                not allowed in the entry's status
    ├── OutcomeUnknownError            the entry may have been executed by the server
    ├── ClaimLostError                 the lease of the claim expired
    ├── QueueFullError
    ├── UnsentEntriesError             a user with unsent entries cannot be purged
    └── OutboxFileError                the file cannot be used; it was not changed
        ├── WrongPassphraseError
        ├── NewerFileError
        ├── FileDamagedError
        ├── FileReadOnlyError
        ├── DiskFullError
        └── FileBusyError

The base class and ``EntryInvalidError`` are the protocol's: its checks of paths, keys and local ids
raise the latter.
"""

from onceward_protocol.errors import (
    ConfigurationError,
    EntryInvalidError,
    MissingExtraError,
    OncewardError,
    OutboxError,
    UsageError,
)

__all__ = [
    "ClaimLostError",
    "ConfigurationError",
    "DiskFullError",
    "EntryInvalidError",
    "EntryNotFoundError",
    "FileBusyError",
    "FileDamagedError",
    "FileReadOnlyError",
    "MissingExtraError",
    "NewerFileError",
    "OncewardError",
    "OutboxError",
    "OutboxFileError",
    "OutcomeUnknownError",
    "QueueFullError",
    "TransitionError",
    "UnsentEntriesError",
    "UsageError",
    "WrongPassphraseError",
]


class EntryNotFoundError(OutboxError):
    """The entry does not exist, or was pruned."""


class TransitionError(OutboxError):
    """The entry's status does not allow this; see the table in ``entry.py``."""

    # The rule that was violated, for programs.
    rule = "status_transition_must_be_valid"


class OutcomeUnknownError(OutboxError):
    """The entry was sent without a conclusive response: changing it could execute it twice."""


class ClaimLostError(OutboxError):
    """The lease of the claim expired and the entry was released to other processes."""


class QueueFullError(OutboxError):
    """The user's queue has reached its maximum number of entries."""


class UnsentEntriesError(OutboxError):
    """The user has ``unsent`` entries that are not final."""

    def __init__(self, message: str, *, unsent: int) -> None:
        super().__init__(message)
        # How many entries were not sent.
        self.unsent = unsent


class OutboxFileError(OutboxError):
    """The outbox's file cannot be used. It was not changed."""


class WrongPassphraseError(OutboxFileError):
    """The passphrase is wrong or missing, or was given for an unencrypted file."""


class NewerFileError(OutboxFileError):
    """The file was written by a newer version of Onceward."""


class FileDamagedError(OutboxFileError):
    """The file is not a database, or part of it cannot be read."""


class FileReadOnlyError(OutboxFileError):
    """The file or its directory is not writable."""


class DiskFullError(OutboxFileError):
    """The disk is full. The write was rolled back."""


class FileBusyError(OutboxFileError):
    """Another connection kept the file locked for too long."""
