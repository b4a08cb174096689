"""Plan the route of a submission: which places, in which order, and when. Pure and deterministic.

The walk begins and ends at the start and fits in the requested minutes, visits included.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from msgspec import Struct

from onceward_services.routes.catalogue import Interest, Place
from onceward_services.routes.geo import METRES_PER_MINUTE, Point, vector, walking_metres
from onceward_services.routes.search import best_tour
from onceward_services.routes.tour import TourProblem

__all__ = ["Route", "Stop", "plan_route", "score"]

# Points for each interest that a place shares with the submission.
_MATCH: Final = 10
# Points for any place, so that a walk without matches has stops too, and spare time is used.
_ANY: Final = 1


class Stop(Struct, frozen=True, kw_only=True):
    """A place on the route. ``arrive_minute`` counts from the start of the walk."""

    id: str
    name: str
    lat: float
    lon: float
    interests: tuple[Interest, ...]
    arrive_minute: int
    visit_minutes: int


class Route(Struct, frozen=True, kw_only=True):
    """A walk from the start past the stops and back. No stops means that no place is in reach."""

    stops: tuple[Stop, ...] = msgspec.field(name="places")
    distance_m: int
    duration_minutes: int

    def as_json(self) -> dict[str, Any]:
        """Return plain dicts and lists, the stops as ``places``."""
        # Through JSON text, so that the value is the same before and after it is stored.
        return msgspec.json.decode(msgspec.json.encode(self), type=dict[str, Any])


def score(place: Place, interests: Iterable[str]) -> int:
    """Return the score of a place for these interests, ignoring case."""
    wanted = {interest.strip().casefold() for interest in interests}
    return max(_ANY, _MATCH * len(wanted.intersection(place.interests)))


def plan_route(
    start: Point, minutes: float, interests: Sequence[str], places: Sequence[Place]
) -> Route:
    """Return a walk with a high total score within the time.

    The result does not depend on the order of the interests or of the places, whose ids must be
    distinct. Fractions of a minute are not used, so that the duration in whole minutes fits too.
    """
    limit = int(minutes) * METRES_PER_MINUTE
    # By id, because the search breaks ties by position.
    known = sorted(places, key=lambda place: place.id)
    origin, vectors = vector(start), [vector(place) for place in known]
    in_reach = [
        (place, at)
        for place, at, away in zip(known, vectors, walking_metres(origin, vectors), strict=True)
        if 2 * away + place.minutes * METRES_PER_MINUTE <= limit
    ]
    problem = TourProblem(
        [origin, *(at for _, at in in_reach)],
        [0, *(place.minutes * METRES_PER_MINUTE for place, _ in in_reach)],
        [0, *(score(place, interests) for place, _ in in_reach)],
        limit,
    )
    spots = best_tour(problem)
    legs = [problem.row(here)[there] for here, there in pairwise([*spots, 0])]
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
    """Return the walking time, rounded up."""
    return -(-metres // METRES_PER_MINUTE)
