"""``onceward outbox``: the queue of a device."""
