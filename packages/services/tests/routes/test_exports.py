"""Finished routes as GeoJSON and GPX."""

from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from onceward_services.routes.exports import route_geojson, route_gpx
from onceward_services.routes.model import Place
from onceward_services.routes.repository import save_route
from packages.services.tests.conftest import Serve, signed_in

NS = {"g": "http://www.topografix.com/GPX/1/1"}
START = Place(lat=52.52, lon=13.405)
STOP: dict[str, Any] = {
    "id": "berlin.tower",
    "name": 'Tower & <"Café">',
    "lat": 52.521,
    "lon": 13.41,
    "interests": ["views", "coffee"],
    "arrive_minute": 4,
    "visit_minutes": 20,
}
ROUTE: dict[str, Any] = {"places": [STOP], "distance_m": 900, "duration_minutes": 32}


async def test_finished_route_is_exported_and_an_unfinished_one_is_not(
    serve: Serve, database_url: str
) -> None:
    apps: list[Any] = []
    async with serve(database_url, prepare=apps.append) as client:
        body = {"start": {"lat": 52.52, "lon": 13.405}, "minutes": 90}
        one = (await client.post("/api/v1/routes", json=body)).headers["location"]
        early = await client.get(f"{one}/gpx")
        assert (early.status_code, early.json()["code"]) == (409, "route.not_finished")
        assert early.json()["details"] == {"status": "queued"}
        assert early.headers["retry-after"] == "1"
        unit = await apps[0].state.onceward.store.begin()
        await save_route(
            unit.transaction,
            tenant="ada",
            request_id=one.rpartition("/")[2],
            route=ROUTE,
            now=datetime.now(UTC),
        )
        await unit.commit(None, None)
        geojson = await client.get(f"{one}/geojson")
        assert geojson.headers["content-type"] == "application/geo+json"
        assert geojson.json() == route_geojson(START, ROUTE)
        gpx = await client.get(f"{one}/gpx")
        assert gpx.headers["content-type"] == "application/gpx+xml"
        assert gpx.headers["content-disposition"].endswith('.gpx"')
        assert ET.fromstring(gpx.content).tag == f"{{{NS['g']}}}gpx"
        for path in (f"{one}/gpx", f"{one}/geojson"):
            assert (await client.get(path, headers=signed_in("bob"))).status_code == 404


def test_geojson_has_the_way_the_start_and_the_places() -> None:
    features = route_geojson(START, ROUTE)["features"]
    assert features[0]["geometry"] == {
        "type": "LineString",
        "coordinates": [[13.405, 52.52], [13.41, 52.521], [13.405, 52.52]],
    }
    assert features[0]["properties"]["distance_m"] == 900
    assert features[1]["properties"] == {"kind": "start"}
    assert features[2]["geometry"] == {"type": "Point", "coordinates": [13.41, 52.521]}
    assert features[2]["properties"]["name"] == STOP["name"]
    assert "lat" not in features[2]["properties"]


def test_geojson_without_places_is_a_line_of_two_positions() -> None:
    nothing = {"places": [], "distance_m": 0, "duration_minutes": 0}
    way = route_geojson(START, nothing)["features"][0]["geometry"]
    assert way == {"type": "LineString", "coordinates": [[13.405, 52.52]] * 2}


@pytest.mark.parametrize(("lon", "edge"), [(179.0, 180), (-179.0, -180)])
def test_geojson_is_cut_at_the_antimeridian(lon: float, edge: float) -> None:
    start = Place(lat=-16.0, lon=lon)
    far = STOP | {"lat": -18.0, "lon": -lon}
    way = route_geojson(start, ROUTE | {"places": [far]})["features"][0]["geometry"]
    assert way == {
        "type": "MultiLineString",
        "coordinates": [
            [[lon, -16.0], [edge, -17.0]],
            [[-edge, -17.0], [-lon, -18.0], [-edge, -17.0]],
            [[edge, -17.0], [lon, -16.0]],
        ],
    }


def test_gpx_has_way_points_and_a_route_from_the_start_and_back() -> None:
    route = ROUTE | {"places": [STOP | {"name": STOP["name"] + "\x00\x1f"}]}
    text = route_gpx("abc", datetime(2026, 1, 31, 9, 30, tzinfo=UTC), START, route)
    root = ET.fromstring(text)
    assert root.attrib["version"] == "1.1"
    assert root.findtext("g:metadata/g:time", namespaces=NS) == "2026-01-31T09:30:00Z"
    # The order that the schema of GPX demands.
    assert [child.tag.rpartition("}")[2] for child in root] == ["metadata", "wpt", "rte"]
    (stop,) = root.findall("g:wpt", NS)
    assert [child.tag.rpartition("}")[2] for child in stop] == ["name", "desc", "type"]
    assert stop.findtext("g:name", namespaces=NS) == STOP["name"]
    points = [(p.attrib["lat"], p.attrib["lon"]) for p in root.findall("g:rte/g:rtept", NS)]
    start = ("52.5200000", "13.4050000")
    assert points == [start, ("52.5210000", "13.4100000"), start]
