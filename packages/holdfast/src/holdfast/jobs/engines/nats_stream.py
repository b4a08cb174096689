"""What things are called at NATS, how stream and consumers are set up, and what a message is."""

import logging
import re
from hashlib import sha256
from typing import Final

import msgspec
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from holdfast.errors import ConfigurationError
from holdfast.ports import Row

__all__ = ["Names", "make_consumer", "make_stream", "publish_job"]

_DUPLICATES_SECONDS: Final = 120.0
# Jobs that wait for a retry count too, so it is far above what workers have in hand; what is
# above it waits in the stream.
_MOST_UNACKNOWLEDGED: Final = 65_536
_REPLICAS: Final = 3
# "replicas > 1 not supported in non-clustered mode", "no suitable peers for placement"
_TOO_FEW_NODES: Final = (10074, 10005)

_WORD: Final = re.compile(r"[A-Za-z0-9_-]+")

_log = logging.getLogger("holdfast.jobs")


class Names(msgspec.Struct, frozen=True):
    """What things are called at the broker. No tenant and no payload is part of any name."""

    stream: str
    subject: str
    # Stands for the database: two that share a stream do not get each other's messages.
    database: str

    def __post_init__(self) -> None:
        """Refuse names that NATS would refuse, or read as patterns."""
        if _WORD.fullmatch(self.stream) is None:
            raise ConfigurationError(f"a stream cannot be called {self.stream!r}")
        if any(_WORD.fullmatch(word) is None for word in self.subject.split(".")):
            raise ConfigurationError(f"jobs cannot be published under {self.subject!r}")

    @classmethod
    def of(cls, stream: str, subject: str, secret: bytes) -> "Names":
        """Name the database by a hash: it has no name of its own that it keeps when it moves."""
        return cls(stream, subject, sha256(b"holdfast.jobs.nats" + secret).hexdigest()[:12])

    def subject_of(self, queue: str) -> str:
        """Return where jobs of a queue are published: a dot would make two words of its name."""
        return f"{self.subject}.{self.database}.{queue.replace('.', '~')}"

    def consumer_of(self, queue: str) -> str:
        """Return the name of a queue's consumer."""
        return f"{self.database}-{queue.replace('.', '~')}"


async def make_stream(broker: JetStreamContext, names: Names, *, replicas: int | None) -> bool:
    """Make the stream unless it is there; returns whether it is new, and so holds nothing."""
    try:
        known = await broker.stream_info(names.stream)
    except NotFoundError:
        await _add_stream(broker, names, replicas)
        return True
    if known.config.retention != RetentionPolicy.WORK_QUEUE:
        raise ConfigurationError(f"the stream {names.stream} is there, but it is no work queue")
    if replicas is None and known.cluster is not None and known.cluster.name:
        await _grow(broker, known.config)
    return False


async def _add_stream(broker: JetStreamContext, names: Names, replicas: int | None) -> None:
    config = StreamConfig(
        name=names.stream,
        subjects=[f"{names.subject}.>"],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        num_replicas=replicas or _REPLICAS,
        duplicate_window=_DUPLICATES_SECONDS,
    )
    try:
        await broker.add_stream(config)
    except APIError as error:
        if replicas is not None or error.err_code not in _TOO_FEW_NODES:
            raise
        _log.warning(
            "NATS has fewer than %d nodes: the stream %s gets one replica", _REPLICAS, names.stream
        )
        await broker.add_stream(config.evolve(num_replicas=1))


async def _grow(broker: JetStreamContext, config: StreamConfig) -> None:
    """Give a stream its replicas that was made before the other nodes were there.

    A cluster that has just started is one: to wait for its nodes would be to wait for ever where
    there are only two.
    """
    if (config.num_replicas or 1) < _REPLICAS:
        try:
            await broker.update_stream(config, num_replicas=_REPLICAS)
        except APIError as error:
            _log.debug("the stream %s keeps its replicas: %s", config.name, error)


async def make_consumer(
    broker: JetStreamContext, names: Names, queue: str, *, ack_wait_seconds: float
) -> None:
    """Make the consumer that all workers of a queue share, unless it is there."""
    config = ConsumerConfig(
        name=names.consumer_of(queue),
        durable_name=names.consumer_of(queue),
        filter_subject=names.subject_of(queue),
        ack_wait=ack_wait_seconds,
        max_ack_pending=_MOST_UNACKNOWLEDGED,
        max_deliver=-1,  # the table counts attempts, and the dead letter is ours to write
    )
    await broker.add_consumer(names.stream, config)


async def publish_job(broker: JetStreamContext, names: Names, job: Row) -> None:
    """Name a job to its queue; returns when the broker has it on its disk."""
    # Two databases may have a job of the same id. The number of the row tells a requeued job from
    # the one that was given up.
    number = f"{names.database}:{job['job_id']}:{job['seq']}:{job['published'] + 1}"
    await broker.publish(
        names.subject_of(job["queue"]),
        msgspec.json.encode({"tenant": job["tenant"], "job_id": job["job_id"]}),
        stream=names.stream,
        headers={"Nats-Msg-Id": number},
    )
