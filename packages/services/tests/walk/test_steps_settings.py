"""Settings of steps: invalid combinations are reported in one line."""

from pathlib import Path
from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward_services.settings import load_settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"app_check_jwks_file": Path("a"), "app_check_jwks_url": "https://b.example"},
            "set only one of ONCEWARD_APP_CHECK_JWKS_FILE and ONCEWARD_APP_CHECK_JWKS_URL",
        ),
        (
            {"app_check_jwks_url": "https://b.example", "app_check_issuer": "i"},
            "needs ONCEWARD_APP_CHECK_AUDIENCE and ONCEWARD_APP_CHECK_ISSUER",
        ),
        (
            {"step_source_bundles": " , "},
            "ONCEWARD_STEP_SOURCE_BUNDLES should be a comma-separated list",
        ),
        (
            {"step_streak_tiers": "3,2"},
            "ONCEWARD_STEP_STREAK_TIERS should be a comma-separated list",
        ),
        (
            {"step_streak_tiers": "0,2"},
            "ONCEWARD_STEP_STREAK_TIERS should be a comma-separated list",
        ),
        (
            {"step_streak_tiers": "three"},
            "ONCEWARD_STEP_STREAK_TIERS should be a comma-separated list",
        ),
        ({"step_max_per_day": 0}, "ONCEWARD_STEP_MAX_PER_DAY should be a whole number of steps"),
        ({"step_energy_per_step": 0}, "ONCEWARD_STEP_ENERGY_PER_STEP should be a number above 0"),
    ],
)
def test_invalid_setting_is_reported_in_one_line(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as found:
        load_settings(**given)
    assert expected in str(found.value)
    assert "\n" not in str(found.value)


def test_lists_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEWARD_STEP_SOURCE_BUNDLES", "a, b,,c")
    monkeypatch.setenv("ONCEWARD_STEP_STREAK_TIERS", "2, 5")
    settings = load_settings()
    assert settings.step_limits.bundles == {"a", "b", "c"}
    assert settings.streak_rules.tiers == (2, 5)


def test_a_report_needs_no_time_of_its_making_and_the_rest_does() -> None:
    policies = load_settings().policies()
    assert policies.step_ingest.staleness is None
    assert policies.step_ingest.key_field == "idempotencyKey"
    assert policies.step_ingest.rate_limit == "50/minute"
    assert policies.walk.staleness is not None
