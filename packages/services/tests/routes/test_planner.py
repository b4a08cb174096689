"""Routes fit the time, begin and end at the start, and prefer matching interests."""

import json
import time
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import asin, ceil, cos, radians, sin, sqrt
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward_services.routes import search
from onceward_services.routes.catalogue import INTERESTS, Place, bundled_places
from onceward_services.routes.geo import METRES_PER_MINUTE, Point, vector
from onceward_services.routes.planner import Route, plan_route, score
from onceward_services.routes.tour import Tour, TourProblem

EDINBURGH = Point(55.9533, -3.1883)
quick = settings(max_examples=60, deadline=None)


def metres(a: Any, b: Any) -> float:
    """Return the length of a walk by the haversine formula, which shares no code with the route."""
    lat_a, lat_b, lon = radians(a.lat), radians(b.lat), radians(a.lon - b.lon)
    part = sin((lat_a - lat_b) / 2) ** 2 + cos(lat_a) * cos(lat_b) * sin(lon / 2) ** 2
    return 1.3 * 2 * 6_371_009 * asin(min(1.0, sqrt(part)))


def length(start: Point, stops: Sequence[Any]) -> float:
    return sum(metres(a, b) for a, b in pairwise([start, *stops, start]))


def worth(route: Route, interests: Sequence[str], places: Sequence[Place]) -> int:
    by_id = {place.id: place for place in places}
    return sum(score(by_id[stop.id], interests) for stop in route.stops)


def place(id_: str, lat: float, lon: float, *interests: Any, minutes: int = 10) -> Place:
    return Place(
        id=id_, name=id_, lat=lat, lon=lon, interests=interests or ("art",), minutes=minutes
    )


def town(seed: int, count: int) -> tuple[Point, list[Place]]:
    """Make a start and places within about two kilometres of it."""
    random = Random(seed)
    start = Point(random.uniform(-80, 80), random.uniform(-180, 180))
    stretch = 1 / cos(radians(start.lat))
    return start, [
        place(
            f"p{number}",
            start.lat + random.uniform(-0.018, 0.018),
            (start.lon + random.uniform(-0.018, 0.018) * stretch + 180) % 360 - 180,
            *random.sample(INTERESTS, random.randint(1, 3)),
            minutes=random.choice([5, 10, 15, 20, 30, 45, 60]),
        )
        for number in range(count)
    ]


@st.composite
def villages(draw: st.DrawFn, most: int = 40) -> tuple[Point, list[Place]]:
    """Draw a start and places on a grid around it, with collinear and coincident points."""
    start = Point(draw(st.integers(-60, 60)), draw(st.integers(-180, 180)))
    step = st.integers(-5, 5).map(lambda steps: steps / 500)
    tags = st.lists(st.sampled_from(INTERESTS), min_size=1, max_size=3, unique=True)
    spots = draw(st.lists(st.tuples(step, step, tags, st.integers(1, 60)), max_size=most))
    return start, [
        place(
            f"p{number}",
            start.lat + north,
            (start.lon + east + 180) % 360 - 180,
            *interests,
            minutes=minutes,
        )
        for number, (north, east, interests, minutes) in enumerate(spots)
    ]


def towns(most: int = 40) -> st.SearchStrategy[tuple[Point, list[Place]]]:
    return villages(most) | st.builds(town, st.integers(0, 2**32), st.integers(0, most))


interest_lists = st.lists(st.sampled_from([*INTERESTS, "☕", "History "]), max_size=5)
durations = st.one_of(st.integers(1, 1440), st.integers(20, 240), st.floats(1, 1440))


@quick
@given(towns(), durations, interest_lists)
def test_a_route_begins_and_ends_at_the_start_and_fits_the_time(around, minutes, interests):
    start, places = around
    route = plan_route(start, minutes, interests, places)
    visits = sum(stop.visit_minutes for stop in route.stops)
    assert route.distance_m == pytest.approx(length(start, route.stops), abs=len(route.stops) + 1)
    assert route.duration_minutes == ceil(route.distance_m / 75) + visits
    assert route.duration_minutes <= minutes


@quick
@given(towns(), durations, interest_lists)
def test_no_place_comes_twice_and_each_is_one_of_the_places(around, minutes, interests):
    start, places = around
    by_id = {place.id: place for place in places}
    stops = plan_route(start, minutes, interests, places).stops
    assert len({stop.id for stop in stops}) == len(stops)
    for stop in stops:
        there = by_id[stop.id]
        assert (stop.name, stop.lat, stop.lon) == (there.name, there.lat, there.lon)
        assert (stop.interests, stop.visit_minutes) == (there.interests, there.minutes)


@quick
@given(towns(), durations, interest_lists)
def test_each_stop_is_reached_after_the_visits_and_the_walk_before_it(around, minutes, interests):
    start, places = around
    route = plan_route(start, minutes, interests, places)
    walked, visited = 0.0, 0
    for before, stop in pairwise([start, *route.stops]):
        walked += metres(before, stop)
        assert stop.arrive_minute - visited == pytest.approx(walked / 75 + 0.5, abs=1.2)
        visited += stop.visit_minutes
    last = route.stops[-1:]
    assert all(stop.arrive_minute + stop.visit_minutes <= route.duration_minutes for stop in last)


@quick
@given(towns(), durations, interest_lists, st.randoms(use_true_random=False))
def test_the_order_of_places_and_interests_does_not_matter(around, minutes, interests, random):
    start, places = around
    route = plan_route(start, minutes, interests, places)
    random.shuffle(places)
    other_way = [*reversed(interests), *interests]
    assert plan_route(start, minutes, other_way, places) == route


@quick
@given(towns(), durations, interest_lists)
def test_no_two_legs_could_be_exchanged_for_shorter_ones(around, minutes, interests):
    start, places = around
    stops = plan_route(start, minutes, interests, places).stops
    for i, j in combinations(range(len(stops) + 1), 2):
        turned = [*stops[:i], *reversed(stops[i:j]), *stops[j:]]
        # Each of the four legs is known to half a metre.
        assert length(start, turned) > length(start, stops) - 2.5


@quick
@given(towns(), durations, interest_lists)
def test_nothing_more_would_fit(around, minutes, interests):
    start, places = around
    route = plan_route(start, minutes, interests, places)
    assert fitting(start, int(minutes), route, places) == []


def test_nothing_more_would_fit_in_a_town_with_more_to_see_than_there_is_time():
    for seed in range(30):
        start, places = town(seed, 60)
        route = plan_route(start, 480, ["art"], places)
        assert len(route.stops) < 60
        assert fitting(start, 480, route, places) == []


def fitting(start: Point, minutes: int, route: Route, places: Sequence[Place]) -> list[str]:
    """Return the places that would still fit into the route, with a metre to spare per leg."""
    free = minutes - sum(stop.visit_minutes for stop in route.stops)
    on_it = {stop.id for stop in route.stops}
    return [
        other.id
        for other in places
        if other.id not in on_it
        for at in range(len(route.stops) + 1)
        for longer in [[*route.stops[:at], other, *route.stops[at:]]]
        if length(start, longer) <= (free - other.minutes) * 75 - len(longer)
    ]


def test_exchanging_stops_finds_better_routes(monkeypatch: pytest.MonkeyPatch):
    def scores() -> list[int]:
        return [
            worth(plan_route(start, 240, ["art", "food"], places), ["art", "food"], places)
            for start, places in (town(seed, 100) for seed in range(15))
        ]

    exchanged = scores()
    monkeypatch.setattr(search, "_exchange", lambda tour: False)
    as_inserted = scores()
    assert all(more >= less for more, less in zip(exchanged, as_inserted, strict=True))
    assert sum(exchanged) > 1.01 * sum(as_inserted)


def best_score(start: Point, minutes: int, interests: Sequence[str], places: list[Place]) -> int:
    """Try every order of every subset, with a few metres less to allow for rounding."""

    def best(here: Any, left: float, remaining: list[Place]) -> int:
        most = 0
        for there in remaining:
            after = left - metres(here, there) - there.minutes * 75
            if after >= metres(there, start):
                others = [place for place in remaining if place is not there]
                most = max(most, score(there, interests) + best(there, after, others))
        return most

    return best(start, minutes * 75 - 5, places)


# The same examples each time: four fifths is not guaranteed in every case. In 17,000
# random towns of up to seven places, 99.98 % of the routes were the best ones, the worst had 87 %.
@settings(max_examples=100, deadline=None, derandomize=True)
@given(towns(most=6), st.integers(20, 240), interest_lists)
def test_a_route_scores_at_least_four_fifths_of_the_best(around, minutes, interests):
    start, places = around
    route = plan_route(start, minutes, interests, places)
    assert worth(route, interests, places) >= 0.8 * best_score(start, minutes, interests, places)


def test_nearly_every_route_among_seven_places_is_the_best():
    best = 0
    for seed in range(300):
        start, places = town(seed, 7)
        interests, minutes = INTERESTS[seed % 6 : seed % 6 + 3], 60 + seed % 150
        route = plan_route(start, minutes, interests, places)
        best += worth(route, interests, places) >= best_score(start, minutes, interests, places)
    # With one beginning instead of all, 291.
    assert best >= 298


@pytest.mark.parametrize("wanted", ["music", "sport"])
def test_of_two_clusters_alike_the_one_that_matches_wins(wanted: str):
    start = Point(48.2, 16.37)
    clusters = [
        place(f"{interest}-{n}", 48.2 + n / 5000, 16.37 + side * 0.012, interest)
        for side, interest in ((-1, "sport"), (1, "music"))
        for n in range(4)
    ]
    route = plan_route(start, 75, [wanted], clusters)
    assert {stop.interests for stop in route.stops} == {(wanted,)}
    assert len(route.stops) == 4


def test_a_place_that_matches_more_interests_is_preferred():
    one = place("a", 0.001, 0, "art", "food")
    two = place("b", -0.001, 0, "art", "music")
    route = plan_route(Point(0, 0), 15, ["music", "art"], [one, two])
    assert [stop.id for stop in route.stops] == ["b"]


def test_among_equals_the_lower_id_is_chosen():
    twins = [place("b", 0.001, 0), place("a", -0.001, 0)]
    route = plan_route(Point(0, 0), 15, [], twins)
    assert [stop.id for stop in route.stops] == ["a"]


@pytest.mark.parametrize(
    ("interests", "points"),
    [
        ([], 1),
        (["sport"], 1),
        (["☕"], 1),
        (["art"], 10),
        (["ART", " art"], 10),
        (["food", "art", "sport"], 20),
    ],
)
def test_a_place_scores_for_each_interest_in_common_and_a_little_anyway(interests, points):
    assert score(place("a", 0, 0, "art", "food"), interests) == points


def test_route_without_matching_interests_has_stops():
    route = plan_route(EDINBURGH, 120, ["knitting"], bundled_places())
    assert route == plan_route(EDINBURGH, 120, [], bundled_places())
    assert len(route.stops) >= 3


@pytest.mark.parametrize(
    ("start", "minutes"), [(Point(0, 0), 1440), (EDINBURGH, 1), (Point(-90, 180), 1440)]
)
def test_with_nothing_in_reach_the_route_is_empty(start: Point, minutes: int):
    route = plan_route(start, minutes, ["history"], bundled_places())
    assert route.as_json() == {"places": [], "distance_m": 0, "duration_minutes": 0}


def test_with_no_places_at_all_the_route_is_empty():
    assert plan_route(EDINBURGH, 90, [], []).stops == ()


def test_a_place_is_in_reach_if_there_and_back_just_fits():
    # 0.01 degrees on the equator are 1,446 m on foot, so 2,892 m and 39 minutes there and back.
    away = [place("a", 0, 0.01)]
    assert plan_route(Point(0, 0), 48.9, [], away).stops == ()
    route = plan_route(Point(0, 0), 49, [], away)
    assert (route.distance_m, route.duration_minutes) == (2892, 49)
    assert route.stops[0].arrive_minute == 20


def test_a_place_at_the_start_takes_no_walk():
    route = plan_route(EDINBURGH, 10, [], [place("a", EDINBURGH.lat, EDINBURGH.lon)])
    assert (route.distance_m, route.duration_minutes) == (0, 10)


@pytest.mark.parametrize("start", [Point(-17, 180), Point(-17, -180), Point(-17, 179.999)])
def test_route_may_cross_the_antimeridian(start: Point):
    route = plan_route(start, 60, [], [place("e", -17, -179.999), place("w", -17, 179.999)])
    assert {stop.id for stop in route.stops} == {"e", "w"}
    assert route.distance_m == pytest.approx(length(start, route.stops), abs=3)
    assert route.distance_m < 600


@pytest.mark.parametrize("lat", [90, -90])
def test_at_a_pole_every_longitude_is_near(lat: int):
    around = [place(str(lon), lat * 0.99999, lon) for lon in (-180, -90, 0, 90)]
    route = plan_route(Point(lat, 77), 60, [], around)
    assert len(route.stops) == 4
    assert route.distance_m == pytest.approx(length(Point(lat, 0), route.stops), abs=5)


def test_a_route_as_json_is_plain():
    route = plan_route(EDINBURGH, 90, ["history", "coffee"], bundled_places())
    plain = route.as_json()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {"places", "distance_m", "duration_minutes"}
    assert plain["places"][0] == {
        "id": route.stops[0].id,
        "name": route.stops[0].name,
        "lat": route.stops[0].lat,
        "lon": route.stops[0].lon,
        "interests": list(route.stops[0].interests),
        "arrive_minute": route.stops[0].arrive_minute,
        "visit_minutes": route.stops[0].visit_minutes,
    }


@pytest.mark.parametrize("interests", [["history", "coffee"], ["nature"], ["music", "food"]])
def test_route_has_more_places_that_match_the_interests(interests: list[str]):
    asked = plan_route(EDINBURGH, 180, interests, bundled_places())
    unasked = plan_route(EDINBURGH, 180, [], bundled_places())
    most, some = (worth(route, interests, bundled_places()) for route in (asked, unasked))
    assert most > some


def test_a_day_in_a_town_is_enough_for_all_of_it():
    route = plan_route(EDINBURGH, 1440, [], bundled_places())
    there = {place.id for place in bundled_places() if place.id.startswith("edinburgh")}
    assert {stop.id for stop in route.stops} == there


def test_route_through_a_full_catalogue_is_planned_quickly():
    # As many places as are bundled, close together, with the longest duration.
    crowd = [
        place(str(n), n % 20 / 500, n // 20 / 500, *there.interests, minutes=there.minutes)
        for n, there in enumerate(bundled_places())
    ]
    began = time.process_time()
    route = plan_route(Point(0.02, 0.02), 1440, ["art", "music"], crowd)
    # About a tenth of a second; the rest is for slow machines.
    assert time.process_time() - began < 1
    assert len(route.stops) > 40


def problem(*spots: tuple[float, float, int], minutes: int) -> TourProblem:
    """Lay out spots by latitude, longitude and score, with no visits; spot 0 is at (0, 0)."""
    spots = ((0, 0, 0), *spots)
    return TourProblem(
        [vector(Point(lat, lon)) for lat, lon, _ in spots],
        [0] * len(spots),
        [points for _, _, points in spots],
        minutes * METRES_PER_MINUTE,
    )


def test_crossing_legs_are_replaced():
    square = problem((0, 0.01, 1), (0.01, 0.01, 1), (0.01, 0, 1), minutes=240)
    crossed = Tour(square, [2, 1, 3])
    crossed.shorten()
    assert crossed.spots in ([0, 1, 2, 3], [0, 3, 2, 1])
    assert crossed.slack == Tour(square, [1, 2, 3]).slack


def test_spot_with_the_best_score_per_added_time_is_inserted_first():
    # One of both fits: a low score for 20 minutes, or a high one for 40.
    tour = Tour(problem((0.005, 0, 1), (-0.01, 0, 10), minutes=40))
    search._insert(tour)
    assert tour.spots == [0, 2]


def test_low_score_with_a_short_detour_is_inserted_first():
    tour = Tour(problem((0.001, 0, 10), (-0.01, 0, 20), minutes=40))
    search._insert(tour)
    assert tour.spots == [0, 1]


@pytest.mark.parametrize(
    ("old", "new"), [((0.005, 0, 1), (-0.01, 0, 10)), ((-0.01, 0, 10), (0.005, 0, 10))]
)
def test_a_spot_is_exchanged_for_a_better_one_or_one_as_good_nearer_by(old, new):
    tour = Tour(problem(old, new, minutes=40), [1])
    assert search._exchange(tour)
    assert tour.spots == [0, 2]
    assert not search._exchange(tour)


def test_a_new_spot_comes_in_where_it_adds_least_and_not_where_the_old_one_was():
    # East are 1 and 2, west is 3: in the place of 1, spot 4 beside 3 would take a second way west.
    line = problem((0, 0.004, 1), (0, 0.008, 5), (0, -0.008, 5), (0, -0.007, 9), minutes=62)
    tour = Tour(line, [1, 2, 3])
    assert search._exchange(tour)
    assert tour.spots in ([0, 2, 3, 4], [0, 2, 4, 3])


@quick
@given(st.integers(0, 2**32))
def test_insertion_costs_are_correct_after_each_insertion(seed):
    start, places = town(seed, 20)
    vectors = [vector(start), *(vector(place) for place in places)]
    tour = Tour(TourProblem(vectors, [0] * 21, [0] + [1] * 20, 10**6))
    costs = {spot: tour.cheapest(spot) for spot in range(1, 21)}
    for new in range(1, 11):
        tour.insert(new, costs.pop(new)[1])
        search._update_costs(tour, new, costs)
        least = {spot: tour.cheapest(spot)[0] for spot in costs}
        assert {spot: added for spot, (added, _) in costs.items()} == least
