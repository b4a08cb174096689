"""The places that a route can visit: ``places.json``, read once and checked.

The places are fictional. A deployment with real ones replaces the file.
"""

from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from onceward.errors import ConfigurationError
from onceward_services.routes.geo import Point

__all__ = ["INTERESTS", "Interest", "Place", "bundled_places", "parse_places"]

# The interests of places. A submission may name others, which match no place.
Interest = Literal[
    "architecture",
    "art",
    "books",
    "coffee",
    "food",
    "history",
    "music",
    "nature",
    "shopping",
    "sport",
    "views",
    "water",
]
INTERESTS: Final[tuple[Interest, ...]] = get_args(Interest)

_Text = Annotated[str, Meta(min_length=1, max_length=100)]


class Place(Point, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place, and how many minutes a visit takes."""

    id: _Text
    name: _Text
    interests: Annotated[tuple[Interest, ...], Meta(min_length=1, max_length=3)]
    # At least 1: with visits of 0 minutes a route could have any number of stops.
    minutes: Annotated[int, Meta(ge=1, le=480)]


@cache
def bundled_places() -> tuple[Place, ...]:
    """Return the places that come with the package."""
    return parse_places(files(__package__).joinpath("places.json").read_bytes(), "places.json")


def parse_places(data: bytes, source: str) -> tuple[Place, ...]:
    """Parse a JSON array of places; raises ``ConfigurationError`` with the first error."""
    try:
        places = msgspec.json.decode(data, type=tuple[Place, ...])
    # UnicodeDecodeError for bytes that are not UTF-8.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: {error}") from error
    for id_, times in Counter(place.id for place in places).items():
        if times > 1:
            raise ConfigurationError(f"{source}: the id {id_!r} occurs {times} times")
    for place in places:
        if len(set(place.interests)) < len(place.interests):
            raise ConfigurationError(f"{source}: {place.id!r} has the same interest twice")
    return places
