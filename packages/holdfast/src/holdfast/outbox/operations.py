"""What every operation on the queue stands on: one transaction of the file at a time."""

from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.transactions import Transactions

__all__ = ["Operations"]


class Operations:
    """The base of the queue's operations. They are told apart by who calls for them."""

    def __init__(self, transactions: Transactions, settings: QueueSettings) -> None:
        """Work in these transactions."""
        self._settings = settings
        self._transactions = transactions
        self._write = transactions.write
        self._read = transactions.read
