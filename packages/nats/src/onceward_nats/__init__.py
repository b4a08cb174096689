"""Jobs delivered by NATS JetStream: the broker delivers, the job table decides."""

from onceward_nats.jetstream import jetstream

__all__ = ["jetstream"]
