"""The search for a good tour: which spots, in which order. Pure: the same ground, the same tour.

The best tour within a limit is the orienteering problem, for which no quick exact way is known.
So: take in the spot that scores most for what it adds until none fits, untangle, exchange spots
for better ones, and again until nothing helps. Ties go to the lower index.
"""

from typing import Final

from holdfast.services.routes.tour import Ground, Tour

__all__ = ["best_tour"]

# Where a greedy tour goes is decided by its first spot, so several first spots are tried. How many
# is decided by what a tour costs, which is spots times stops: every one of a town's few dozen, but
# of hundreds only some. Measured in docs…
_EFFORT: Final = 12_000
# Exchanges cost more than the tour itself, so only the most promising tours get them.
_FINALISTS: Final = 3
# Every round makes the tour better, so rounds end by themselves, nearly always after a few; the
# limit is for the case nobody has thought of.
_MOST_ROUNDS: Final = 20
APPEAL = lambda s, a: s / a


def best_tour(ground: Ground) -> list[int]:
    """Return the spots of the tour, from the start on."""
    first = Tour(ground)
    _fill(first)
    tours = [first]
    if first.left_out:
        spots = len(ground.vectors)
        for spot in _far_apart(ground, _EFFORT // (spots * len(first.spots))):
            tour = Tour(ground, [spot])
            _fill(tour)
            tours.append(tour)
    # Sorting keeps the order of equals, so a tie goes to the first one here and below.
    tours.sort(key=_worth, reverse=True)
    finalists = tours[:_FINALISTS]
    for tour in finalists:
        _improve(tour)
    return max(finalists, key=_worth).spots


def _worth(tour: Tour) -> tuple[int, int]:
    """Return what tours are compared by: the score, then the time that is left."""
    return sum(tour.ground.scores[spot] for spot in tour.spots), tour.room


def _far_apart(ground: Ground, count: int) -> list[int]:
    """Return so many spots, each as far as can be from the start and from those before it."""
    away = list(ground.row(0))
    chosen: list[int] = []
    for _ in range(min(count, len(away) - 1)):
        # The start and the chosen ones are out; others at the same point are still in, with 0.
        away[0] = -1
        spot = away.index(max(away))
        chosen.append(spot)
        away = [min(pair) for pair in zip(away, ground.row(spot), strict=True)]
        away[spot] = -1
    return chosen


def _improve(tour: Tour) -> None:
    """Exchange spots, which may make room for more, until nothing helps."""
    for _ in range(_MOST_ROUNDS):
        if not _exchange(tour):
            break
        _fill(tour)


def _fill(tour: Tour) -> None:
    """Leave no tangle in the tour, and no room for another spot."""
    tour.untangle()
    while _insert(tour):
        tour.untangle()


def _insert(tour: Tour) -> bool:
    """Take in what fits, the best for the time it takes first; say whether there was any."""
    scores = tour.ground.scores
    fitting: dict[int, tuple[int, int]] = {}
    for spot in sorted(tour.left_out):
        if tour.ground.visits[spot] <= tour.room:
            fitting[spot] = tour.cheapest(spot)
    found = False
    while True:
        # What does not fit now will not fit later: the tour only gets longer.
        fitting = {spot: cost for spot, cost in fitting.items() if cost[0] <= tour.room}
        if not fitting:
            return found
        found = True
        new = max(fitting, key=lambda spot: APPEAL(scores[spot], max(fitting[spot][0], 1)))
        _, before = fitting.pop(new)
        tour.put(new, before)
        _reconsider(tour, fitting, tour.spots.index(new))


def _reconsider(tour: Tour, fitting: dict[int, tuple[int, int]], at: int) -> None:
    """Bring up to date what each spot adds, now that there is a new one on the tour.

    One leg has gone and two have come. Only a spot that would have used the one that has gone
    needs a look at the whole tour.
    """
    after = (at + 1) % len(tour.spots)
    before, new = tour.spots[at - 1], tour.spots[at]
    row_before, row_new, row_after = tour.rows[at - 1], tour.rows[at], tour.rows[after]
    leg_to, leg_from = tour.legs[at - 1], tour.legs[at]
    visits = tour.ground.visits
    for spot, (added, where) in fitting.items():
        if where == before:
            fitting[spot] = tour.cheapest(spot)
            continue
        away = row_new[spot] + visits[spot]
        added_to, added_from = row_before[spot] + away - leg_to, row_after[spot] + away - leg_from
        if added_to < added and added_to <= added_from:
            fitting[spot] = (added_to, before)
        elif added_from < added:
            fitting[spot] = (added_from, new)


def _exchange(tour: Tour) -> bool:
    """Swap spots of the tour for better ones, or as good ones nearer by; say whether any was."""
    scores = tour.ground.scores
    exchanged = False
    for new in sorted(tour.left_out, key=lambda spot: (-scores[spot], spot)):
        score, growth, old, after = min(_swaps(tour, new), default=(scores[new], 0, 0, 0))
        if (score, growth) < (scores[new], 0):
            tour.drop(old)
            tour.put(new, after)
            exchanged = True
    return exchanged


def _swaps(tour: Tour, new: int) -> list[tuple[int, int, int, int]]:
    """Return what could make room for a new spot: its score, what the tour grows by, it, where.

    The new one comes either in the place of the old one or where it adds least.
    """
    scores, room, spots = tour.ground.scores, tour.room, tour.spots
    visit = tour.ground.visits[new]
    away = tour.distances(new)
    swaps = [
        (scores[old], there + back + visit - held, old, before)
        for before, old, there, back, held in zip(
            spots, spots[1:], away, [*away[2:], away[0]], tour.held[1:], strict=False
        )
        if there + back + visit - held <= room
    ]
    added, where = tour.cheapest(new)
    swaps += [
        (scores[old], added - freed, old, where)
        for before, old, freed in zip(spots, spots[1:], tour.freed[1:], strict=False)
        if added - freed <= room and where not in (before, old)
    ]
    return swaps
