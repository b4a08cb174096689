"""A closed tour over spots, and the ground it is on. Numbers only: no places, no names.

Spots are indexes and spot 0 is the start. Times are written as the metres one would walk in them,
so that one sum tells whether a tour fits.
"""

from collections.abc import Sequence

from holdfast.services.routes.walking import Vector, walking_metres

__all__ = ["Ground", "Tour"]


class Ground:
    """What there is to choose from. The start has no score and takes no visit."""

    def __init__(
        self, vectors: Sequence[Vector], visits: Sequence[int], scores: Sequence[int], limit: int
    ) -> None:
        """Keep it; the limit is for walking and visits together."""
        self.vectors = vectors
        self.visits = visits
        self.scores = scores
        self.limit = limit
        self._rows: dict[int, list[int]] = {}

    def row(self, spot: int) -> list[int]:
        """Return how far every spot is from this one.

        Made when asked for: only spots that were on a tour need theirs, which are few of many.
        """
        row = self._rows.get(spot)
        if row is None:
            row = self._rows[spot] = walking_metres(self.vectors[spot], self.vectors)
        return row


class Tour:
    """A closed tour that is changed in place. It starts and ends at spot 0, whatever is done."""

    def __init__(self, ground: Ground, spots: Sequence[int] = ()) -> None:
        """Start with these spots, in this order."""
        self.ground = ground
        self.left_out = set(range(1, len(ground.vectors))).difference(spots)
        self._lay([0, *spots])

    def _lay(self, spots: list[int]) -> None:
        self.spots = spots
        self.rows = [self.ground.row(spot) for spot in spots]
        # From each spot to the next one; the last one is the way home.
        self.legs = [row[to] for row, to in zip(self.rows, [*spots[1:], spots[0]], strict=True)]
        # What each spot holds of the limit: its visit and the legs to it and from it. Without it,
        # all of that is free but for the leg past it.
        self.held = [
            self.legs[i - 1] + self.legs[i] + self.ground.visits[spot]
            for i, spot in enumerate(spots)
        ]
        self.freed = [
            h - self.rows[i - 1][spots[(i + 1) % len(spots)]] for i, h in enumerate(self.held)
        ]
        taken = sum(self.legs) + sum(self.ground.visits[spot] for spot in spots)
        self.room = self.ground.limit - taken

    @property
    def worth(self) -> tuple[int, int]:
        """What tours are compared by: the score, then the time that is left."""
        return sum(self.ground.scores[spot] for spot in self.spots), self.room

    def put(self, spot: int, after: int) -> None:
        """Take a spot in, after another one."""
        self.left_out.remove(spot)
        at = self.spots.index(after) + 1
        self._lay([*self.spots[:at], spot, *self.spots[at:]])

    def drop(self, spot: int) -> None:
        """Leave a spot out."""
        self.left_out.add(spot)
        self._lay([other for other in self.spots if other != spot])

    def distances(self, spot: int) -> list[int]:
        """Return how far the spot is from each of the tour's."""
        return [row[spot] for row in self.rows]

    def detours(self, spot: int) -> list[int]:
        """Return how much longer the walk gets with the spot after each of the tour's."""
        away = self.distances(spot)
        return [
            there + back - leg
            for there, back, leg in zip(away, [*away[1:], away[0]], self.legs, strict=True)
        ]

    def cheapest(self, spot: int) -> tuple[int, int]:
        """Return the least by which the spot makes the tour longer, and after which one."""
        detours = self.detours(spot)
        least = min(detours)
        return least + self.ground.visits[spot], self.spots[detours.index(least)]

    def untangle(self) -> None:
        """Exchange two legs for two shorter ones until there are no such legs (2-opt)."""
        spots, legs = [*self.spots, 0], self.legs
        shorter = True
        while shorter:
            shorter = False
            for i in range(len(spots) - 3):
                here, then = self.ground.row(spots[i]), self.ground.row(spots[i + 1])
                # In place of the legs after i and after j: i to j, and what followed each.
                changes = [
                    here[j] + then[after] - leg
                    for j, after, leg in zip(
                        spots[i + 2 : -1], spots[i + 3 :], legs[i + 2 :], strict=True
                    )
                ]
                least = min(changes)
                if least < legs[i]:
                    j = i + 2 + changes.index(least)
                    legs[i], legs[j] = here[spots[j]], then[spots[j + 1]]
                    spots[i + 1 : j + 1] = spots[j:i:-1]
                    legs[i + 1 : j] = legs[j - 1 : i : -1]
                    shorter = True
        self._lay(spots[:-1])
