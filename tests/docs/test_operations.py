"""Alerts, dashboard and the page "Operate": every series that they name exists in a running app."""

import asyncio
import json
import re

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from fastapi import FastAPI, Response
from prometheus_client.parser import text_string_to_metric_families

from onceward import GuardConfig, JobContext, Onceward, Principal
from onceward.observability.metrics import PrometheusMetrics
from tests.docs.pages import DOCS

OPERATIONS = DOCS / "operations"
# Added by Prometheus to every series.
_TARGET_LABELS = {"job", "instance"}
_SELECTOR = re.compile(r"\b(onceward_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\bby \(([\w, ]+)\)")

Series = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Return the series of a running app, by metric name."""
    return asyncio.run(_scrape(f"sqlite:///{tmp_path_factory.mktemp('operations')}/shop.db"))


async def _scrape(url: str) -> Series:
    """Run an app with a guarded request, its duplicate and a job, and scrape it."""
    metrics = PrometheusMetrics()
    onceward = Onceward(
        url, config=GuardConfig(metrics=metrics), identify=lambda _head: Principal("ada", "ada")
    )
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard("orders.create")
    async def create() -> dict[str, str]:
        await asyncio.sleep(0.02)  # the duplicate waits
        await onceward.enqueue("pack", {"order": 1})
        return {"id": "1"}

    @onceward.jobs.handler("pack")
    async def pack(job: JobContext) -> None:
        return

    @app.get("/metrics")
    def show_metrics() -> Response:
        body, content_type = metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    await onceward.open()
    worker = onceward.worker()
    await worker.start()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        post = client.post("/orders", headers={"Idempotency-Key": "k"})
        duplicate = client.post("/orders", headers={"Idempotency-Key": "k"})
        assert [r.status_code for r in await asyncio.gather(post, duplicate)] == [201, 201]
        await worker.until_idle()
        series = _series((await client.get("/metrics")).text)
    await worker.stop()
    await onceward.close()
    return series


def _series(exposition: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
            found.setdefault(family.name, []).append(sample.labels)
    return found


def _alerts() -> dict[str, str]:
    rules = yaml.safe_load((OPERATIONS / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def _panels() -> dict[str, str]:
    dashboard = json.loads((OPERATIONS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }


def _on_page() -> list[str]:
    """Return the selectors in the list of alerts of the page."""
    page = (DOCS / "how-to/operate.md").read_text(encoding="utf-8")
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    return re.findall(r"`(onceward_[^`]+)`", section)


def _check(series: Series, expression: str) -> None:
    """Check that every selector finds a series, and that every label that is grouped by exists."""
    for name, matchers in _SELECTOR.findall(expression):
        assert name in series, f"there is no metric {name}"
        wanted = [m for m in _MATCHER.findall(matchers) if m[0] not in _TARGET_LABELS]
        found = [labels for labels in series[name] if all(_matches(labels, m) for m in wanted)]
        assert found, f"no series of {name} has {matchers}"
        for grouping in _GROUPING.findall(expression):
            labels = {label.strip() for label in grouping.split(",")} - _TARGET_LABELS
            assert any(labels <= set(one) for one in found), f"{name} has not all of {labels}"


def _matches(labels: dict[str, str], matcher: tuple[str, str, str]) -> bool:
    label, operator, value = matcher
    if label not in labels:
        return False
    is_equal = (
        re.fullmatch(value, labels[label]) is not None
        if "~" in operator
        else labels[label] == value
    )
    return is_equal is not operator.startswith("!")


@pytest.mark.parametrize("name", _alerts())
def test_series_of_an_alert_exist_in_a_running_app(scraped: Series, name: str) -> None:
    _check(scraped, _alerts()[name])


@pytest.mark.parametrize("name", _panels())
def test_series_of_a_panel_exist_in_a_running_app(scraped: Series, name: str) -> None:
    _check(scraped, _panels()[name])


@pytest.mark.parametrize("selector", _on_page())
def test_series_on_the_page_exist_in_a_running_app(scraped: Series, selector: str) -> None:
    _check(scraped, selector)


def test_page_explains_the_metric_of_every_alert() -> None:
    explained = {_base(match[0]) for one in _on_page() for match in _SELECTOR.findall(one)}
    for name, expression in _alerts().items():
        for metric, _ in _SELECTOR.findall(expression):
            assert _base(metric) in explained, f"{name}: the page does not explain {metric}"


def _base(metric: str) -> str:
    return re.sub(r"_(bucket|count|sum)$", "", metric)


def test_alerts_have_a_severity_and_a_text() -> None:
    rules = yaml.safe_load((OPERATIONS / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert {"summary", "description"} == set(rule["annotations"])


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads((OPERATIONS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_missing_series_is_found() -> None:
    """The check itself: a wrong name, a wrong value and a wrong label are errors."""
    series: Series = {"onceward_jobs": [{"queue": "mail", "state": "dead"}]}
    _check(series, 'max by (queue) (onceward_jobs{state="dead"}) > 0')
    for wrong in ("onceward_job", 'onceward_jobs{state="gone"}', "sum by (type) (onceward_jobs)"):
        with pytest.raises(AssertionError):
            _check(series, wrong)
