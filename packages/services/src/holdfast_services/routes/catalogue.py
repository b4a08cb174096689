"""The places a walk can pass: read once from ``places.json``, checked, and never changed.

The places are invented. A deployment with real ones replaces the file.
"""

from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from holdfast.errors import ConfigurationError
from holdfast_services.routes.geo import Point

__all__ = ["INTERESTS", "Interest", "Place", "bundled_places", "parse_places"]

# What a place can be for. A submission may name anything; other words just match no place.
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
    """Somewhere worth a stop, and how many minutes a visit takes."""

    id: _Text
    name: _Text
    interests: Annotated[tuple[Interest, ...], Meta(min_length=1, max_length=3)]
    # At least one: a visit that takes no time would make a walk of any number of stops.
    minutes: Annotated[int, Meta(ge=1, le=480)]


@cache
def bundled_places() -> tuple[Place, ...]:
    """Return the places that come with the package."""
    return parse_places(files(__package__).joinpath("places.json").read_bytes(), "places.json")


def parse_places(data: bytes, source: str) -> tuple[Place, ...]:
    """Return the places of a JSON array, or say what is wrong with it and where."""
    try:
        places = msgspec.json.decode(data, type=tuple[Place, ...])
    # Bytes that are no UTF-8 come as the second kind.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: {error}") from error
    for id_, times in Counter(place.id for place in places).items():
        if times > 1:
            raise ConfigurationError(f"{source}: the id {id_!r} is there {times} times")
    for place in places:
        if len(set(place.interests)) < len(place.interests):
            raise ConfigurationError(f"{source}: {place.id!r} has the same interest twice")
    return places
