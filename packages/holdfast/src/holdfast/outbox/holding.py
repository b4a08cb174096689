"""Claims on entries, and what came of them: for whoever sends."""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import UNSET

from holdfast.core.outbox_entry import Claimed, Entry, Reason
from holdfast.core.retry import QUEUE, RetryPolicy
from holdfast.outbox import claiming
from holdfast.outbox.operations import Operations
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.transactions import Transactions

__all__ = ["Holding"]


class Holding(Operations):
    """An entry is taken before it is sent, and given back with its outcome."""

    def __init__(
        self,
        transactions: Transactions,
        settings: QueueSettings,
        *,
        worker: str,
        chance: Callable[[], float],
    ) -> None:
        """Claim in the name of ``worker``; ``chance`` spreads the retries."""
        super().__init__(transactions, settings)
        self._worker = worker
        self._chance = chance

    def claim(self, user_id: str, *, lease_seconds: float | None = None) -> Claimed | None:
        """Take the user's next entry for sending, atomically among threads and processes.

        Next is, among those that have the turn in their lane, wait for nothing and are due: the
        highest priority, then the lowest sequence number. So there is one in flight per lane; the
        profiles with strict order have one lane. None if there is nothing to send now.

        The claim holds until the lease runs out (2 minutes unless said otherwise); ``renew`` holds
        it longer. ``attempt_count`` of the returned entry counts this send.
        """
        with self._write("claim") as unit:
            return claiming.claim(
                unit,
                user_id,
                lease_seconds=lease_seconds or self._settings.lease_seconds,
                worker=self._worker,
            )

    def claim_some(
        self,
        user_id: str,
        limit: int,
        *,
        lease_seconds: float | None = None,
        skip_profiles: Iterable[str] = (),
    ) -> list[Claimed]:
        """Take up to ``limit`` entries at once, in the order in which to send them.

        Several may be of one lane. Of those the next may be sent only after the one before has
        succeeded, recorded or not; otherwise it has to be given back with ``release``. Whoever
        sends one after the other saves commits so, and the order stays what it is with ``claim``.
        Entries of ``skip_profiles`` are not claimed.
        """
        with self._write("claim") as unit:
            return claiming.claim_some(
                unit,
                user_id,
                limit=limit,
                lease_seconds=lease_seconds or self._settings.lease_seconds,
                worker=self._worker,
                skip_profiles=skip_profiles,
            )

    def renew(self, claimed: Claimed) -> None:
        """Start the lease anew, for a send that takes long. Raises ``ClaimLostError``."""
        with self._write("renew") as unit:
            claiming.renew(unit, claimed)

    def succeed(
        self,
        claimed: Claimed,
        *,
        server_id: str | int | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that it has happened on the server.

        For a ``create`` with a local id, ``server_id`` is mapped in the same commit, and entries
        that refer to the local id are freed. (Without a ``server_id`` those stay blocked until
        ``map_local_id``.) Raises ``ClaimLostError``.
        """
        with self._write("succeed") as unit:
            return claiming.succeed(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, None),
                server_id=server_id,
            )

    def schedule_retry(
        self,
        claimed: Claimed,
        *,
        delay_seconds: float | None = None,
        retry_after_seconds: float | None = None,
        policy: RetryPolicy = QUEUE,
        give_up: bool = True,
        outcome_unknown: bool = False,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Send it back into the queue after a failure that may pass by itself.

        Without ``delay_seconds`` the policy and the number of attempts say how long it waits;
        ``retry_after_seconds`` is a floor in either case. With ``give_up``, an entry that has had
        ``max_attempts`` becomes ``failed`` instead (reason ``attempts``), and its dependents are
        parked: look at the status of what is returned.

        ``outcome_unknown``: no answer settled it, so it may have happened. Such an entry is not
        edited, cancelled or expired until one does; it is sent again with the same key and body.
        Raises ``ClaimLostError``.
        """
        with self._write("schedule_retry") as unit:
            return claiming.retry_later(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, error),
                claiming.Pause(
                    delay_seconds, retry_after_seconds, policy, self._chance(), give_up=give_up
                ),
                outcome_unknown=outcome_unknown,
            )

    def release(
        self,
        claimed: Claimed,
        *,
        sent: bool = False,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Give a claim back as if it had not been taken: no attempt is counted, no wait is set.

        For a stop between claim and send, for a token that is not accepted (401), for local ids
        that are not known yet. ``sent`` says whether there was a send worth a line in the history;
        it had an answer, so the outcome is known. Raises ``ClaimLostError``.
        """
        with self._write("release") as unit:
            return claiming.release(
                unit, claimed, claiming.Answer(http_status, code, request_id, error), sent=sent
            )

    def fail(
        self,
        claimed: Claimed,
        *,
        reason: Reason = Reason.ANSWER,
        outcome_unknown: bool = False,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that the server will not do it as it stands. Dependents are parked.

        The lane stands still until a person retries, edits or discards it. Raises
        ``ClaimLostError``.
        """
        with self._write("fail") as unit:
            return claiming.fail(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, error),
                reason=reason,
                outcome_unknown=outcome_unknown,
            )

    def conflict(
        self,
        claimed: Claimed,
        *,
        theirs: Any = UNSET,
        theirs_version: str | None = None,
        error: str | None = None,
        http_status: int | None = 409,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that the entity has moved on; the lane waits for ``resolve``.

        ``theirs`` is the server's side as a JSON value, if it is known. Dependents wait. Raises
        ``ClaimLostError``.
        """
        with self._write("conflict") as unit:
            return claiming.conflict(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, error),
                theirs=theirs,
                theirs_version=theirs_version,
            )

    def expire(
        self,
        claimed: Claimed,
        *,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that the server finds it too old. Dependents are parked, the lane goes on.

        Raises ``ClaimLostError``.
        """
        with self._write("expire") as unit:
            return claiming.expire(
                unit, claimed, claiming.Answer(http_status, code, request_id, error)
            )

    def map_local_id(
        self, user_id: str, local_id: str, server_id: str | int, *, entity_type: str
    ) -> None:
        """Record a server id that the app learnt by other means, and free what waits for it.

        A mapping is never changed: one that is there stays.
        """
        with self._write("map_local_id") as unit:
            claiming.map_local_id(unit, user_id, local_id, server_id, entity_type=entity_type)
