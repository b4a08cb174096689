"""The route for a submission: which places, in which order, and when. Pure, no clock, no dice.

The walk begins and ends at the start and fits in the minutes asked for, visits included.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from msgspec import Struct

from holdfast_services.routes.catalogue import Interest, Place
from holdfast_services.routes.geo import METRES_PER_MINUTE, Point, vector, walking_metres
from holdfast_services.routes.search import best_tour
from holdfast_services.routes.tour import TourProblem

__all__ = ["Route", "Stop", "plan_route", "score"]

# For each interest that a place has in common with the caller's.
_MATCH: Final = 10
# For having been there: a walk where nothing matches is still a walk, and one with time left after
# all that matches has more to see.
_ANY: Final = 1


class Stop(Struct, frozen=True, kw_only=True):
    """A place on the route, and how many minutes after setting out one gets there."""

    id: str
    name: str
    lat: float
    lon: float
    interests: tuple[Interest, ...]
    arrive_minute: int
    visit_minutes: int


class Route(Struct, frozen=True, kw_only=True):
    """A walk from the start past the stops and back. Without stops, there is nothing in reach."""

    stops: tuple[Stop, ...] = msgspec.field(name="places")
    distance_m: int
    duration_minutes: int

    def as_json(self) -> dict[str, Any]:
        """Return it as plain dicts and lists, the stops as ``places``."""
        # By way of the text, so that it is the same before it was stored and after.
        return msgspec.json.decode(msgspec.json.encode(self), type=dict[str, Any])


def score(place: Place, interests: Iterable[str]) -> int:
    """Return what a place is worth to someone with these interests; upper and lower case alike."""
    wanted = {interest.strip().casefold() for interest in interests}
    return max(_ANY, _MATCH * len(wanted.intersection(place.interests)))


def plan_route(
    start: Point, minutes: float, interests: Sequence[str], places: Sequence[Place]
) -> Route:
    """Return a walk that passes as much of interest as it can in the time.

    Which one does not depend on the order of the interests or of the places; their ids have to
    differ. A part of a minute is not used, so that the duration in whole minutes fits too.
    """
    limit = int(minutes) * METRES_PER_MINUTE
    # By id, because the search settles ties by the order.
    known = sorted(places, key=lambda place: place.id)
    origin, vectors = vector(start), [vector(place) for place in known]
    in_reach = [
        (place, at)
        for place, at, away in zip(known, vectors, walking_metres(origin, vectors), strict=True)
        if 2 * away + place.minutes * METRES_PER_MINUTE <= limit
    ]
    ground = TourProblem(
        [origin, *(at for _, at in in_reach)],
        [0, *(place.minutes * METRES_PER_MINUTE for place, _ in in_reach)],
        [0, *(score(place, interests) for place, _ in in_reach)],
        limit,
    )
    spots = best_tour(ground)
    legs = [ground.row(here)[there] for here, there in pairwise([*spots, 0])]
    return _timetable([in_reach[spot - 1][0] for spot in spots[1:]], legs)


def _timetable(places: Sequence[Place], legs: Sequence[int]) -> Route:
    """Return the walk past the places; there is a leg to each of them and one home."""
    stops: list[Stop] = []
    walked = visited = 0
    for place, leg in zip(places, legs, strict=False):
        walked += leg
        stops.append(
            Stop(
                id=place.id,
                name=place.name,
                lat=place.lat,
                lon=place.lon,
                interests=place.interests,
                arrive_minute=_walking_minutes(walked) + visited,
                visit_minutes=place.minutes,
            )
        )
        visited += place.minutes
    walked += legs[-1]
    return Route(
        stops=tuple(stops),
        distance_m=walked,
        duration_minutes=_walking_minutes(walked) + visited,
    )


def _walking_minutes(metres: int) -> int:
    """Return how long one walks, rounded up: better early than late."""
    return -(-metres // METRES_PER_MINUTE)
