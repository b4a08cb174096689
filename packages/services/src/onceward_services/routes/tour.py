"""A closed tour over spots, and the problem it belongs to.

Spots are indexes; spot 0 is the start. Times are converted to the metres walked in them, so that
one sum decides whether a tour fits.
"""

from collections.abc import Sequence

from onceward_services.routes.geo import Vector, walking_metres

__all__ = ["Tour", "TourProblem"]


class TourProblem:
    """The spots to choose from. The start has no score and no visit."""

    def __init__(
        self, vectors: Sequence[Vector], visits: Sequence[int], scores: Sequence[int], limit: int
    ) -> None:
        """Store the problem; ``limit`` is for walking and visits together."""
        self.vectors = vectors
        self.visits = visits
        self.scores = scores
        self.limit = limit
        self._rows: dict[int, list[int]] = {}

    def row(self, spot: int) -> list[int]:
        """Return the distance of every spot from this one.

        Computed on first use: only the few spots that were on a tour need it.
        """
        row = self._rows.get(spot)
        if row is None:
            row = self._rows[spot] = walking_metres(self.vectors[spot], self.vectors)
        return row


class Tour:
    """A mutable closed tour, which always begins and ends at spot 0.

    These lists are parallel to ``spots``:

    ``rows``   the distances of all spots from this one
    ``legs``   the distance to the next spot; the last leg returns to the start
    ``used``   the cost of the spot: its visit, the leg to it and the leg from it
    ``freed``  what removing the spot would free: ``used`` minus the leg that replaces it

    ``slack`` is the unused part of the limit.
    """

    def __init__(self, problem: TourProblem, spots: Sequence[int] = ()) -> None:
        """Create a tour with these spots in this order."""
        self.problem = problem
        self.unvisited = set(range(1, len(problem.vectors))).difference(spots)
        self._rebuild([0, *spots])

    def _rebuild(self, spots: list[int]) -> None:
        """Recompute all lists from the spots. Tours are short, so this is fast enough."""
        visits = [self.problem.visits[spot] for spot in spots]
        following = [*spots[1:], spots[0]]
        self.spots = spots
        self.rows = [self.problem.row(spot) for spot in spots]
        self.legs = [row[after] for row, after in zip(self.rows, following, strict=True)]
        legs_to = [self.legs[-1], *self.legs[:-1]]
        rows_before = [self.rows[-1], *self.rows[:-1]]
        self.used = [sum(parts) for parts in zip(legs_to, self.legs, visits, strict=True)]
        self.freed = [
            used - before[after]
            for used, before, after in zip(self.used, rows_before, following, strict=True)
        ]
        self.slack = self.problem.limit - sum(self.legs) - sum(visits)

    def insert(self, spot: int, after: int) -> None:
        """Insert a spot after another one."""
        self.unvisited.remove(spot)
        at = self.spots.index(after) + 1
        self._rebuild([*self.spots[:at], spot, *self.spots[at:]])

    def exchange(self, old: int, new: int, after: int) -> None:
        """Replace an old spot, and insert the new one after ``after``."""
        self.unvisited.add(old)
        self.spots.remove(old)
        self.insert(new, after)

    def distances(self, spot: int) -> list[int]:
        """Return the distances of the spot from the spots of the tour."""
        return [row[spot] for row in self.rows]

    def cheapest(self, spot: int) -> tuple[int, int]:
        """Return the lowest insertion cost of the spot, and the spot to insert it after."""
        away = self.distances(spot)
        detours = [
            there + onward - leg
            for there, onward, leg in zip(away, [*away[1:], away[0]], self.legs, strict=True)
        ]
        least = min(detours)
        return least + self.problem.visits[spot], self.spots[detours.index(least)]

    def shorten(self) -> None:
        """Replace two legs by two shorter ones until no such pair is left (2-opt)."""
        spots, legs = [*self.spots, 0], list(self.legs)
        shorter = True
        while shorter:
            shorter = False
            for i in range(len(spots) - 3):
                # Reversing the spots from i + 1 to j replaces the legs after i and after j.
                to_j, from_j = self.problem.row(spots[i]), self.problem.row(spots[i + 1])
                later = zip(spots[i + 2 : -1], spots[i + 3 :], legs[i + 2 :], strict=True)
                changes = [to_j[at_j] + from_j[after] - leg for at_j, after, leg in later]
                least = min(changes)
                if least < legs[i]:
                    j = i + 2 + changes.index(least)
                    legs[i], legs[j] = to_j[spots[j]], from_j[spots[j + 1]]
                    legs[i + 1 : j] = legs[j - 1 : i : -1]
                    spots[i + 1 : j + 1] = spots[j:i:-1]
                    shorter = True
        self._rebuild(spots[:-1])
