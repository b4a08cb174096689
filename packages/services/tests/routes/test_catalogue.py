"""The bundled places are valid, and an invalid file is rejected with the reason."""

import json
from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward_services.routes.catalogue import INTERESTS, bundled_places, parse_places
from onceward_services.routes.geo import METRES_PER_MINUTE, Point, vector, walking_metres

PLACE: dict[str, Any] = {
    "id": "a",
    "name": "The Lantern Garden",
    "lat": 55.95,
    "lon": -3.19,
    "interests": ["nature", "views"],
    "minutes": 20,
}
TOWNS = {
    "barcelona": Point(41.3874, 2.1686),
    "berlin": Point(52.5200, 13.4050),
    "buenos-aires": Point(-34.6037, -58.3816),
    "edinburgh": Point(55.9533, -3.1883),
    "kyoto": Point(35.0116, 135.7681),
    "lisbon": Point(38.7223, -9.1393),
    "london": Point(51.5074, -0.1278),
    "nairobi": Point(-1.2864, 36.8172),
    "new-york": Point(40.7484, -73.9857),
    "paris": Point(48.8566, 2.3522),
    "tokyo": Point(35.6812, 139.7671),
    "vienna": Point(48.2082, 16.3738),
}


def parse(*places: Any) -> Any:
    return parse_places(json.dumps(places).encode(), "places.json")


def test_there_are_some_hundred_bundled_places_and_they_are_read_once():
    assert 300 <= len(bundled_places()) <= 400
    assert bundled_places() is bundled_places()


@pytest.mark.parametrize(("town", "centre"), TOWNS.items(), ids=list(TOWNS))
def test_from_the_middle_of_a_town_some_dozen_places_are_within_an_hour(town: str, centre: Point):
    near = [
        place
        for place, away in zip(
            bundled_places(),
            walking_metres(vector(centre), [vector(place) for place in bundled_places()]),
            strict=True,
        )
        if away <= 60 * METRES_PER_MINUTE
    ]
    assert 25 <= len(near) <= 40
    assert [place.id for place in near if not place.id.startswith(town)] == []


def test_every_bundled_place_is_in_one_of_the_towns():
    lonely = [place.id for place in bundled_places() if not place.id.startswith(tuple(TOWNS))]
    assert lonely == []


def test_there_is_something_of_every_interest_in_every_town():
    for town in TOWNS:
        there = {
            interest
            for place in bundled_places()
            if place.id.startswith(town)
            for interest in place.interests
        }
        assert there == set(INTERESTS), town


def test_bundled_names_differ_and_coordinates_are_a_metre_fine():
    places = bundled_places()
    assert len({place.name for place in places}) == len(places)
    assert all(round(place.lat, 5) == place.lat for place in places)
    assert all(round(place.lon, 5) == place.lon for place in places)


def test_a_place_cannot_be_changed():
    (place,) = parse(PLACE)
    with pytest.raises(AttributeError, match="immutable"):
        place.name = "Elsewhere"
    assert isinstance(place.interests, tuple)


def test_extreme_coordinates_are_accepted():
    corners = [(90, 180), (-90, -180), (0, 0)]
    places = parse(*(PLACE | {"id": str(at), "lat": at[0], "lon": at[1]} for at in corners))
    assert [(place.lat, place.lon) for place in places] == corners


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lat": 90.00001}, r"<= 90.0 - at `\$\[1\].lat`"),
        ({"lat": -91}, r">= -90.0 - at `\$\[1\].lat`"),
        ({"lon": 180.5}, r"<= 180.0 - at `\$\[1\].lon`"),
        ({"lon": "2"}, r"`float`, got `str` - at `\$\[1\].lon`"),
        ({"interests": ["nature", "knitting"]}, r"'knitting' - at `\$\[1\].interests\[1\]`"),
        ({"interests": []}, r"length >= 1 - at `\$\[1\].interests`"),
        ({"interests": ["art", "food", "music", "views"]}, r"at `\$\[1\].interests`"),
        ({"interests": ["art", "art"]}, "'b' has the same interest twice"),
        ({"minutes": 0}, r">= 1 - at `\$\[1\].minutes`"),
        ({"minutes": 12.5}, r"`int`, got `float` - at `\$\[1\].minutes`"),
        ({"name": ""}, r"length >= 1 - at `\$\[1\].name`"),
        ({"id": "a"}, "the id 'a' occurs 2 times"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_a_place_that_is_not_right_is_refused_and_pointed_at(change: dict[str, Any], reason: str):
    with pytest.raises(ConfigurationError, match=reason) as refused:
        parse(PLACE, PLACE | {"id": "b"} | change)
    assert str(refused.value).startswith("places.json: ")


@pytest.mark.parametrize("field", sorted(PLACE))
def test_a_place_with_a_field_missing_is_refused(field: str):
    with pytest.raises(ConfigurationError, match=f"missing required field `{field}`"):
        parse({name: value for name, value in PLACE.items() if name != field})


@pytest.mark.parametrize("data", [b"", b"[", b"{}", b"[NaN]", b'["\xff"]', b"null"])
def test_invalid_list_of_places_is_rejected(data: bytes):
    with pytest.raises(ConfigurationError, match=r"^here: "):
        parse_places(data, "here")
