"""The search for a good tour: which spots, in which order. Pure: the same ground, the same tour.

The best tour within a limit is the orienteering problem, for which no quick exact way is known.
So: take in the spot that scores most for the time it adds until none fits, untangle, exchange
spots for better ones, and again until nothing helps. Ties go to the lower index.
"""

from collections.abc import Iterator
from itertools import chain, combinations, islice
from typing import Final

from holdfast_services.routes.tour import Tour, TourProblem

__all__ = ["best_tour"]

# Where a tour goes is settled by the first spots it takes in, and the most tempting ones can lead
# away from the best; so other beginnings are tried too. How many depends on what a tour costs,
# which is spots times stops: among ten spots every pair, in a town of some dozens nearly every
# spot, among hundreds hardly any. More would cost time and hardly find anything better.
_EFFORT: Final = 8_000
# Exchanging costs more than the tour did, so only the most promising tours come to it.
_FINALISTS: Final = 3
# A round makes the tour better or is the last one, and four are rare. The limit is for the case
# nobody has thought of.
_MAX_ROUNDS: Final = 20

# The old spot's score, by how much the tour grows, the old spot, after which one the new one comes:
# what counts most stands first, so the least of several is the best.
_Exchange = tuple[int, int, int, int]


def best_tour(ground: TourProblem) -> list[int]:
    """Return the spots of a tour within the limit, from the start on.

    Each spot by itself has to fit: the way there, the visit and the way back.
    """
    first = Tour(ground)
    _fill(first)
    # By worth, because many beginnings end in the same tour, and one of each will do.
    tours = {_worth(first): first}
    if first.left_out:
        for beginning in _beginnings(ground, _EFFORT // (len(ground.vectors) * len(first.spots))):
            tour = Tour(ground, beginning)
            if tour.room >= 0:
                _fill(tour)
                tours.setdefault(_worth(tour), tour)
    finalists = [tours[worth] for worth in sorted(tours, reverse=True)[:_FINALISTS]]
    for tour in finalists:
        _improve(tour)
    return max(finalists, key=_worth).spots


def _worth(tour: Tour) -> tuple[int, int]:
    """Return what tours are compared by: the score, then the time that is left."""
    return sum(tour.ground.scores[spot] for spot in tour.spots), tour.room


def _beginnings(ground: TourProblem, count: int) -> Iterator[tuple[int, ...]]:
    """Return so many ways to begin: with one spot, then with two, those far apart first."""
    away = list(ground.row(0))
    away[0] = -1
    far_apart: list[int] = []
    for _ in range(min(count, len(away) - 1)):
        spot = away.index(max(away))
        far_apart.append(spot)
        away = [min(pair) for pair in zip(away, ground.row(spot), strict=True)]
        # Lower than the 0 of a spot at the same point, which has not had its turn yet.
        away[spot] = -1
    return islice(chain(combinations(far_apart, 1), combinations(far_apart, 2)), count)


def _improve(tour: Tour) -> None:
    """Exchange spots, which may make room for more, until nothing helps."""
    for _ in range(_MAX_ROUNDS):
        if not _exchange(tour):
            break
        _fill(tour)


def _fill(tour: Tour) -> None:
    """Leave no tangle in the tour, and no room for another spot."""
    tour.untangle()
    while _insert(tour):
        tour.untangle()


def _insert(tour: Tour) -> bool:
    """Take in what fits, the most for the time it adds first; say whether anything did."""
    scores, visits = tour.ground.scores, tour.ground.visits
    costs = {
        spot: tour.cheapest(spot) for spot in sorted(tour.left_out) if visits[spot] <= tour.room
    }
    inserted = False
    while True:
        # What does not fit now will not fit later: taking in others only makes a tour longer.
        costs = {spot: cost for spot, cost in costs.items() if cost[0] <= tour.room}
        if not costs:
            return inserted
        # Rounded to metres, a spot on the way can seem to be a short cut.
        gains = {spot: scores[spot] / max(1, cost[0]) for spot, cost in costs.items()}
        new = max(gains, key=gains.__getitem__)
        _, after = costs.pop(new)
        tour.put(new, after)
        _reckon(tour, new, costs)
        inserted = True


def _reckon(tour: Tour, new: int, costs: dict[int, tuple[int, int]]) -> None:
    """Bring up to date what each spot would add, after a new one came in.

    One leg has gone and two have come. Only a spot for which the one was the best place, and the
    two are worse, needs a look at the whole tour: else the search would grow with the square of
    the stops.
    """
    at = tour.spots.index(new)
    before, next_at = tour.spots[at - 1], (at + 1) % len(tour.spots)
    row_before, row_new, row_next = tour.rows[at - 1], tour.rows[at], tour.rows[next_at]
    leg_to, leg_from = tour.legs[at - 1], tour.legs[at]
    visits = tour.ground.visits
    for spot, (least, after) in costs.items():
        partly = row_new[spot] + visits[spot]
        to_it, from_it = row_before[spot] + partly - leg_to, row_next[spot] + partly - leg_from
        if to_it <= least or from_it <= least:
            costs[spot] = (to_it, before) if to_it <= from_it else (from_it, new)
        elif after == before:
            costs[spot] = tour.cheapest(spot)


def _exchange(tour: Tour) -> bool:
    """Exchange spots for better ones, or for as good ones nearer by; say whether any was."""
    scores = tour.ground.scores
    exchanged = False
    for new in sorted(tour.left_out, key=lambda spot: (-scores[spot], spot)):
        if scores[new] < min(scores[spot] for spot in tour.spots[1:]):
            # Nor is any of the others, which score no more, worth one of the tour's.
            break
        best = min(_exchanges(tour, new), default=None)
        if best is not None and best[:2] < (scores[new], 0):
            _, _, old, after = best
            tour.exchange(old, new, after)
            exchanged = True
    return exchanged


def _exchanges(tour: Tour, new: int) -> list[_Exchange]:
    """Return what a new spot could come in for, within the limit.

    It comes either where the old one was or, if that is elsewhere, where it adds least.
    """
    scores, room, visit = tour.ground.scores, tour.room, tour.ground.visits[new]
    befores, olds = tour.spots[:-1], tour.spots[1:]
    away = tour.distances(new)
    stretches = zip(befores, olds, away[:-1], [*away[2:], away[0]], tour.held[1:], strict=True)
    there = [
        (scores[old], to + onward + visit - held, old, before)
        for before, old, to, onward, held in stretches
        if to + onward + visit - held <= room
    ]
    added, cheapest = tour.cheapest(new)
    elsewhere = [
        (scores[old], added - freed, old, cheapest)
        for before, old, freed in zip(befores, olds, tour.freed[1:], strict=True)
        if added - freed <= room and cheapest not in (before, old)
    ]
    return there + elsewhere
