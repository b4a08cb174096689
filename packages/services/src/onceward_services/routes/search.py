"""Search for a good tour: which spots, in which order. Pure and deterministic.

The best tour within a limit is the orienteering problem, which is NP-hard. This is a heuristic:
insert the spot with the highest score per added time until none fits, shorten the tour (2-opt),
exchange spots for better ones, and repeat until nothing improves. Ties go to the lower index.
"""

from collections.abc import Iterator
from itertools import chain, combinations, islice
from typing import Final

from onceward_services.routes.tour import Tour, TourProblem

__all__ = ["best_tour"]

# The first spots determine where a tour goes, and the greedy choice is not always the best, so
# other beginnings are tried too. Their number depends on the cost of a tour, which is spots times
# stops: every pair among ten spots, nearly every spot among some dozens, hardly any among hundreds.
# More would cost time and rarely find a better tour.
_EFFORT: Final = 8_000
# Exchanging costs more than building a tour, so only the best tours are improved.
_FINALISTS: Final = 3
# Each round improves the tour or is the last one; four are rare. The limit is a safeguard.
_MAX_ROUNDS: Final = 20

# The old spot's score, the added length, the old spot, and the spot before the new one. The minimum
# of several is the best exchange.
_Exchange = tuple[int, int, int, int]


def best_tour(problem: TourProblem) -> list[int]:
    """Return the spots of a tour within the limit, beginning with the start.

    Each spot alone must fit: the way there, the visit and the way back.
    """
    first = Tour(problem)
    _fill(first)
    # By value, because many beginnings lead to the same tour.
    tours = {_value(first): first}
    if first.unvisited:
        for beginning in _beginnings(problem, _EFFORT // (len(problem.vectors) * len(first.spots))):
            tour = Tour(problem, beginning)
            if tour.slack >= 0:
                _fill(tour)
                tours.setdefault(_value(tour), tour)
    finalists = [tours[value] for value in sorted(tours, reverse=True)[:_FINALISTS]]
    for tour in finalists:
        _improve(tour)
    return max(finalists, key=_value).spots


def _value(tour: Tour) -> tuple[int, int]:
    """Return the sort key of tours: the score, then the unused time."""
    return sum(tour.problem.scores[spot] for spot in tour.spots), tour.slack


def _beginnings(problem: TourProblem, count: int) -> Iterator[tuple[int, ...]]:
    """Return up to ``count`` beginnings: single spots, then pairs, those far apart first."""
    away = list(problem.row(0))
    away[0] = -1
    far_apart: list[int] = []
    for _ in range(min(count, len(away) - 1)):
        spot = away.index(max(away))
        far_apart.append(spot)
        away = [min(pair) for pair in zip(away, problem.row(spot), strict=True)]
        # Below 0, the distance of another spot at the same point.
        away[spot] = -1
    return islice(chain(combinations(far_apart, 1), combinations(far_apart, 2)), count)


def _improve(tour: Tour) -> None:
    """Exchange spots, which may free time for more, until nothing improves."""
    for _ in range(_MAX_ROUNDS):
        if not _exchange(tour):
            break
        _fill(tour)


def _fill(tour: Tour) -> None:
    """Shorten the tour and insert spots until no other one fits."""
    tour.shorten()
    while _insert(tour):
        tour.shorten()


def _insert(tour: Tour) -> bool:
    """Insert spots that fit, the best score per added time first; return whether any did."""
    scores, visits = tour.problem.scores, tour.problem.visits
    costs = {
        spot: tour.cheapest(spot) for spot in sorted(tour.unvisited) if visits[spot] <= tour.slack
    }
    inserted = False
    while True:
        # A spot that does not fit now will not fit later: insertions only make a tour longer.
        costs = {spot: cost for spot, cost in costs.items() if cost[0] <= tour.slack}
        if not costs:
            return inserted
        # Rounded to metres, a spot on the way can have a negative cost.
        gains = {spot: scores[spot] / max(1, cost[0]) for spot, cost in costs.items()}
        new = max(gains, key=gains.__getitem__)
        _, after = costs.pop(new)
        tour.insert(new, after)
        _update_costs(tour, new, costs)
        inserted = True


def _update_costs(tour: Tour, new: int, costs: dict[int, tuple[int, int]]) -> None:
    """Update the insertion cost of each spot after a new one was inserted.

    Two legs have replaced one. Only a spot whose best position was the old leg, and for which the
    two new legs are worse, needs a search of the whole tour. Searching for every spot would be
    quadratic in the stops.
    """
    at = tour.spots.index(new)
    before, next_at = tour.spots[at - 1], (at + 1) % len(tour.spots)
    row_before, row_new, row_next = tour.rows[at - 1], tour.rows[at], tour.rows[next_at]
    leg_to, leg_from = tour.legs[at - 1], tour.legs[at]
    visits = tour.problem.visits
    for spot, (least, after) in costs.items():
        partly = row_new[spot] + visits[spot]
        to_it, from_it = row_before[spot] + partly - leg_to, row_next[spot] + partly - leg_from
        if to_it <= least or from_it <= least:
            costs[spot] = (to_it, before) if to_it <= from_it else (from_it, new)
        elif after == before:
            costs[spot] = tour.cheapest(spot)


def _exchange(tour: Tour) -> bool:
    """Exchange spots for better or nearer ones of the same score; return whether any was."""
    scores = tour.problem.scores
    exchanged = False
    for new in sorted(tour.unvisited, key=lambda spot: (-scores[spot], spot)):
        if scores[new] < min(scores[spot] for spot in tour.spots[1:]):
            # The remaining spots score no more, so none of them is better than one of the tour.
            break
        best = min(_exchanges(tour, new), default=None)
        if best is not None and best[:2] < (scores[new], 0):
            _, _, old, after = best
            tour.exchange(old, new, after)
            exchanged = True
    return exchanged


def _exchanges(tour: Tour, new: int) -> list[_Exchange]:
    """Return the possible exchanges for a new spot within the limit.

    The new spot takes the position of the old one or, if that is elsewhere, its cheapest position.
    """
    scores, slack, visit = tour.problem.scores, tour.slack, tour.problem.visits[new]
    befores, olds = tour.spots[:-1], tour.spots[1:]
    away = tour.distances(new)
    stretches = zip(befores, olds, away[:-1], [*away[2:], away[0]], tour.used[1:], strict=True)
    there = [
        (scores[old], to + onward + visit - used, old, before)
        for before, old, to, onward, used in stretches
        if to + onward + visit - used <= slack
    ]
    added, cheapest = tour.cheapest(new)
    elsewhere = [
        (scores[old], added - freed, old, cheapest)
        for before, old, freed in zip(befores, olds, tour.freed[1:], strict=True)
        if added - freed <= slack and cheapest not in (before, old)
    ]
    return there + elsewhere
