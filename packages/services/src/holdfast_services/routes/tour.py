"""A closed tour over spots, and the ground it is on. Numbers only: no places, no names.

Spots are indexes, and spot 0 is the start. Times are written as the metres one would walk in them,
so that one sum tells whether a tour fits.
"""

from collections.abc import Sequence

from holdfast_services.routes.geo import Vector, walking_metres

__all__ = ["Tour", "TourProblem"]


class TourProblem:
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
    """A closed tour that is changed in place. Whatever is done, it begins and ends at spot 0.

    The lists run side by side with ``spots``:

    ``rows``   how far everything is from the spot
    ``legs``   from the spot to the next one; the last leg leads home
    ``held``   what the spot holds of the limit: its visit, the leg to it and the leg from it
    ``freed``  what leaving the spot out would free: that, but for the leg past it
    """

    def __init__(self, ground: TourProblem, spots: Sequence[int] = ()) -> None:
        """Begin with these spots, in this order."""
        self.ground = ground
        self.left_out = set(range(1, len(ground.vectors))).difference(spots)
        self._lay([0, *spots])

    def _lay(self, spots: list[int]) -> None:
        """Bring everything up to date with the spots.

        Afresh each time: a tour is short, and keeping five things right by pieces is not.
        """
        visits = [self.ground.visits[spot] for spot in spots]
        following = [*spots[1:], spots[0]]
        self.spots = spots
        self.rows = [self.ground.row(spot) for spot in spots]
        self.legs = [row[after] for row, after in zip(self.rows, following, strict=True)]
        legs_to = [self.legs[-1], *self.legs[:-1]]
        rows_before = [self.rows[-1], *self.rows[:-1]]
        self.held = [sum(parts) for parts in zip(legs_to, self.legs, visits, strict=True)]
        self.freed = [
            held - before[after]
            for held, before, after in zip(self.held, rows_before, following, strict=True)
        ]
        self.room = self.ground.limit - sum(self.legs) - sum(visits)

    def put(self, spot: int, after: int) -> None:
        """Take a spot in, after another one."""
        self.left_out.remove(spot)
        at = self.spots.index(after) + 1
        self._lay([*self.spots[:at], spot, *self.spots[at:]])

    def exchange(self, old: int, new: int, after: int) -> None:
        """Take a spot in, after another one, in exchange for an old one."""
        self.left_out.add(old)
        self.spots.remove(old)
        self.put(new, after)

    def distances(self, spot: int) -> list[int]:
        """Return how far the spot is from each of the tour's."""
        return [row[spot] for row in self.rows]

    def cheapest(self, spot: int) -> tuple[int, int]:
        """Return the least by which the spot makes the tour longer, and after which one."""
        away = self.distances(spot)
        detours = [
            there + onward - leg
            for there, onward, leg in zip(away, [*away[1:], away[0]], self.legs, strict=True)
        ]
        least = min(detours)
        return least + self.ground.visits[spot], self.spots[detours.index(least)]

    def untangle(self) -> None:
        """Exchange two legs for two shorter ones until there are no such legs (2-opt)."""
        spots, legs = [*self.spots, 0], list(self.legs)
        shorter = True
        while shorter:
            shorter = False
            for i in range(len(spots) - 3):
                # With the stretch from i + 1 to j walked backwards, the leg after i leads to j, and
                # the leg after j begins where the one after i used to end.
                to_j, from_j = self.ground.row(spots[i]), self.ground.row(spots[i + 1])
                later = zip(spots[i + 2 : -1], spots[i + 3 :], legs[i + 2 :], strict=True)
                changes = [to_j[at_j] + from_j[after] - leg for at_j, after, leg in later]
                least = min(changes)
                if least < legs[i]:
                    j = i + 2 + changes.index(least)
                    legs[i], legs[j] = to_j[spots[j]], from_j[spots[j + 1]]
                    legs[i + 1 : j] = legs[j - 1 : i : -1]
                    spots[i + 1 : j + 1] = spots[j:i:-1]
                    shorter = True
        self._lay(spots[:-1])
