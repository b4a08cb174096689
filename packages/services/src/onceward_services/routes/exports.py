"""A finished route as GeoJSON (RFC 7946) and as GPX 1.1, for maps and navigation devices."""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final
from xml.etree import ElementTree as ET

from onceward_services.routes.model import Place

__all__ = ["GEOJSON", "GPX", "route_geojson", "route_gpx"]

GEOJSON: Final = "application/geo+json"
GPX: Final = "application/gpx+xml"

_GPX_NAMESPACE: Final = "http://www.topografix.com/GPX/1/1"
_HALF_TURN: Final = 180
# What XML 1.0 cannot contain, not even escaped.
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Longitude and latitude, in the order of GeoJSON.
Position = list[float]


def route_geojson(start: Place, route: dict[str, Any]) -> dict[str, Any]:
    """Return a collection of features: the way in straight legs, the start, and each place."""
    places = route["places"]
    positions = [[start.lon, start.lat], *([p["lon"], p["lat"]] for p in places)]
    lines = _split([*positions, positions[0]])
    way = {
        "type": "Feature",
        "geometry": {"type": "LineString", "coordinates": lines[0]}
        if len(lines) == 1
        else {"type": "MultiLineString", "coordinates": lines},
        "properties": {
            "kind": "route",
            "distance_m": route["distance_m"],
            "duration_minutes": route["duration_minutes"],
        },
    }
    points = [
        _point(positions[0], {"kind": "start"}),
        *(
            _point(at, {"kind": "place"} | _without_position(place))
            for at, place in zip(positions[1:], places, strict=True)
        ),
    ]
    return {"type": "FeatureCollection", "features": [way, *points]}


def route_gpx(request_id: str, created_at: datetime, start: Place, route: dict[str, Any]) -> bytes:
    """Return the places as way points, and the way as a route from the start and back."""
    ET.register_namespace("", _GPX_NAMESPACE)
    root = ET.Element(_tag("gpx"), {"version": "1.1", "creator": "Onceward"})
    metadata = ET.SubElement(root, _tag("metadata"))
    ET.SubElement(metadata, _tag("name")).text = f"Route {request_id}"
    ET.SubElement(metadata, _tag("time")).text = created_at.isoformat().replace("+00:00", "Z")
    for place in route["places"]:
        _add_point(root, "wpt", place["lat"], place["lon"], place)
    way = ET.SubElement(root, _tag("rte"))
    ET.SubElement(way, _tag("name")).text = f"Route {request_id}"
    length, minutes = route["distance_m"], route["duration_minutes"]
    ET.SubElement(way, _tag("desc")).text = f"{length} m, {minutes} minutes with visits"
    _add_point(way, "rtept", start.lat, start.lon, {"name": "Start"})
    for place in route["places"]:
        _add_point(way, "rtept", place["lat"], place["lon"], place)
    _add_point(way, "rtept", start.lat, start.lon, {"name": "End"})
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _split(line: Sequence[Position]) -> list[list[Position]]:
    """Cut a line where it crosses the antimeridian, as RFC 7946 §3.1.9 asks for."""
    lines = [[line[0]]]
    for (lon, lat), (next_lon, next_lat) in pairwise(line):
        if abs(next_lon - lon) > _HALF_TURN:
            edge = _HALF_TURN if lon > 0 else -_HALF_TURN
            east = next_lon + 2 * edge  # on the side of the first point
            share = (edge - lon) / (east - lon)
            crossing = lat + share * (next_lat - lat)
            lines[-1].append([edge, crossing])
            lines.append([[-edge, crossing]])
        lines[-1].append([next_lon, next_lat])
    return lines


def _point(at: Position, properties: dict[str, Any]) -> dict[str, Any]:
    geometry = {"type": "Point", "coordinates": at}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def _without_position(place: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in place.items() if name not in ("lat", "lon")}


def _tag(name: str) -> str:
    return f"{{{_GPX_NAMESPACE}}}{name}"


def _add_point(
    parent: ET.Element, name: str, lat: float, lon: float, place: dict[str, Any]
) -> None:
    point = ET.SubElement(parent, _tag(name), {"lat": f"{lat:.7f}", "lon": f"{lon:.7f}"})
    ET.SubElement(point, _tag("name")).text = _NOT_XML.sub("", place["name"])
    if "arrive_minute" in place:
        stay = f"arrive after {place['arrive_minute']} minutes, stay {place['visit_minutes']}"
        ET.SubElement(point, _tag("desc")).text = stay
        ET.SubElement(point, _tag("type")).text = ", ".join(place["interests"])
