"""Settings: every variable is read, and a bad one is named in one line."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from onceward.errors import ConfigurationError
from onceward.guard.limits import Limits
from onceward.sign_in.jwt_keys import SAMPLE_SECRETS
from onceward_services.app import create_app
from onceward_services.field.policy import POLICY as FIELD
from onceward_services.planning.policy import POLICY as PLANNING
from onceward_services.routes.policy import POLICY as ROUTES
from onceward_services.settings import Settings, load_settings, unknown_variables
from onceward_services.walk.policy import POLICY as WALK


def test_without_variables_the_policies_are_the_defaults_of_the_services() -> None:
    policies = load_settings().policies()
    assert policies.walk == WALK.replace(rate_limit="1200/minute")
    assert policies.planning == PLANNING.replace(rate_limit="6000/minute")
    assert policies.routes == ROUTES.replace(rate_limit="6000/minute")
    assert policies.field == FIELD.replace(rate_limit="6000/minute")


def test_step_ingest_has_its_key_in_the_body_and_its_own_limit() -> None:
    policies = load_settings().policies()
    assert policies.step_ingest == WALK.replace(
        key_field="idempotencyKey",
        rate_limit="50/minute",
        staleness=None,
        # The key is in the hash of reports since the first version.
        volatile_fields=frozenset({"clientSubmittedAt", "attestationToken"}),
    )


@pytest.mark.parametrize(
    ("variable", "policy", "attribute", "expected"),
    [
        ("ONCEWARD_WALK_SUCCESS_TTL_HOURS", "walk", "success_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_WALK_ERROR_TTL_HOURS", "walk", "error_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_PLANNING_SUCCESS_TTL_HOURS", "planning", "success_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_PLANNING_ERROR_TTL_HOURS", "planning", "error_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_ROUTES_SUCCESS_TTL_HOURS", "routes", "success_ttl", timedelta(seconds=3.6)),
        ("ROUTES_IDEMPOTENCY_TTL_HOURS", "routes", "success_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_FIELD_SUCCESS_TTL_HOURS", "field", "success_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_FIELD_ERROR_TTL_HOURS", "field", "error_ttl", timedelta(seconds=3.6)),
        ("ONCEWARD_WAIT_SECONDS", "routes", "wait", timedelta(milliseconds=1)),
    ],
)
def test_each_time_has_a_variable_that_takes_fractions(
    monkeypatch: pytest.MonkeyPatch, variable: str, policy: str, attribute: str, expected: timedelta
) -> None:
    monkeypatch.setenv(variable, "0.001")
    policies = load_settings().policies()
    assert getattr(getattr(policies, policy), attribute) == expected


def test_staleness_has_its_two_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEWARD_WALK_STALENESS_CAP_DAYS", "0.5")
    monkeypatch.setenv("ONCEWARD_WALK_STALENESS_GRACE_HOURS", "0")
    staleness = load_settings().policies().walk.staleness
    assert staleness is not None
    assert (staleness.cap, staleness.grace) == (timedelta(hours=12), timedelta(0))


def test_onceward_name_of_the_routes_ttl_wins_over_the_older_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROUTES_IDEMPOTENCY_TTL_HOURS", "1")
    monkeypatch.setenv("ONCEWARD_ROUTES_SUCCESS_TTL_HOURS", "2")
    assert load_settings().policies().routes.success_ttl == timedelta(hours=2)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEWARD_WAIT_SECONDS", "")
    monkeypatch.setenv("ONCEWARD_JWT_SECRET", "")
    monkeypatch.setenv("ONCEWARD_ROUTES_SUCCESS_TTL_HOURS", "")
    monkeypatch.setenv("ROUTES_IDEMPOTENCY_TTL_HOURS", "3")
    settings = load_settings()
    assert settings.wait_seconds == 10
    assert settings.needs_development_secret
    assert settings.policies().routes.success_ttl == timedelta(hours=3)


@pytest.mark.parametrize("off", ["", "0"])
def test_an_empty_rate_limit_switches_it_off(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("ONCEWARD_STEP_INGEST_RATE_LIMIT", off)
    assert load_settings().policies().step_ingest.rate_limit is None


@pytest.mark.parametrize("service", ["walk", "planning", "routes", "field"])
def test_each_service_has_a_rate_limit_of_its_own(
    monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    monkeypatch.setenv(f"ONCEWARD_{service.upper()}_RATE_LIMIT", "5/second")
    limits = {
        name: policy.rate_limit for name, policy in load_settings().policies()._asdict().items()
    }
    usual = dict.fromkeys(("planning", "routes", "field"), "6000/minute")
    walk = {"walk": "1200/minute", "step_ingest": "50/minute"}
    assert limits == usual | walk | {service: "5/second"}


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("ONCEWARD_WAIT_SECONDS", "ten", "a number of seconds"),
        ("ONCEWARD_WAIT_SECONDS", "nan", "a number of seconds"),
        ("ONCEWARD_WAIT_SECONDS", "-1", "a number of seconds"),
        ("ONCEWARD_ROUTES_SUCCESS_TTL_HOURS", "0", "a number of hours above 0"),
        ("ROUTES_IDEMPOTENCY_TTL_HOURS", "inf", "a number of hours above 0"),
        ("ONCEWARD_FIELD_ERROR_TTL_HOURS", "1e-12", "a number of hours above 0"),
        ("ONCEWARD_MAX_BODY_BYTES", "1.5", "a whole number of bytes"),
        ("ONCEWARD_POOL_SIZE", "0", "a whole number of connections"),
        ("ONCEWARD_BREAKER_FAILURE_LIMIT", "0", "failures in a row"),
        ("ONCEWARD_BREAKER_OPEN_SECONDS", "0", "seconds above 0"),
        ("ONCEWARD_SWEEP_EVERY_SECONDS", "0", "seconds from 1"),
        ("ONCEWARD_WALK_STALENESS_CAP_DAYS", "x", "a number of days above 0"),
        ("ONCEWARD_ROUTES_RATE_LIMIT", "often", "a rate such as"),
        ("ONCEWARD_LOG_LEVEL", "LOUD", "DEBUG, INFO"),
        ("ONCEWARD_LOG_JSON", "maybe", "true or false"),
        ("ONCEWARD_JWT_ALGORITHM", "none", "HS256, RS256 or ES256"),
        ("ONCEWARD_ENVIRONMENT", "a:b", "a name of letters"),
    ],
)
def test_a_bad_value_is_one_line_with_the_variable_and_what_it_should_be(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, wanted: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    message = str(caught.value)
    assert message.startswith(f"{variable} should be ")
    assert wanted in message
    assert repr(value) in message
    assert "\n" not in message


def test_short_secret_is_rejected_and_not_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCEWARD_JWT_SECRET", "hunter2")
    with pytest.raises(ConfigurationError, match="ONCEWARD_JWT_SECRET should be") as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


PARTY = {"jwt_issuer": "https://id.example", "jwt_audience": "onceward"}


@pytest.mark.parametrize(
    "given",
    [
        {"jwt_secret": "s" * 40, "jwks_url": "https://id.example/keys"},
        {"jwks_file": "keys.json", "jwks_url": "https://id.example/keys"},
        {"jwks_url": "https://id.example/keys", "jwt_algorithm": "HS256"},
        {"jwt_secret": "s" * 40, "jwt_algorithm": "RS256"},
    ],
)
def test_only_one_authentication_source_may_be_set(given: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="ONCEWARD_J"):
        load_settings(**given)


def test_the_algorithm_follows_from_the_keys() -> None:
    assert load_settings(jwt_secret="s" * 40).algorithm == "HS256"
    assert load_settings(jwks_url="https://id.example/keys", **PARTY).algorithm == "RS256"
    es256 = load_settings(jwks_url="https://id.example/keys", jwt_algorithm="ES256", **PARTY)
    assert es256.algorithm == "ES256"


def test_a_secret_is_not_shown_with_the_settings() -> None:
    assert "s" * 40 not in repr(load_settings(jwt_secret="s" * 40))


def test_log_level_may_be_lowercase() -> None:
    assert load_settings(log_level="debug").log_level == "DEBUG"


def test_a_misspelt_variable_is_noticed() -> None:
    lines = unknown_variables({"ONCEWARD_WAIT_SECOND": "1", "ONCEWARD_HOME": "x", "PATH": "/"})
    assert lines == [
        "ONCEWARD_WAIT_SECOND is not a setting and is ignored; did you mean ONCEWARD_WAIT_SECONDS?"
    ]


def test_every_setting_says_what_it_should_be() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("hours", ["0.0005", "167", "170"])
def test_walk_ttl_shorter_than_staleness_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, hours: str
) -> None:
    monkeypatch.setenv("ONCEWARD_WALK_SUCCESS_TTL_HOURS", hours)
    settings = load_settings()
    assert not settings.policies().walk.outlive_staleness
    [line] = settings.warnings()
    assert f"ONCEWARD_WALK_SUCCESS_TTL_HOURS={hours}" in line
    assert "174 hours" in line


@pytest.mark.parametrize("hours", ["168", "174", "500", ""])
def test_walk_ttl_longer_than_staleness_has_no_warning(
    monkeypatch: pytest.MonkeyPatch, hours: str
) -> None:
    monkeypatch.setenv("ONCEWARD_WALK_SUCCESS_TTL_HOURS", hours)
    settings = load_settings()
    assert settings.policies().walk.outlive_staleness
    assert settings.warnings() == []


@pytest.mark.parametrize("source", ["jwks_url", "jwks_file"])
@pytest.mark.parametrize("missing", ["jwt_issuer", "jwt_audience"])
def test_jwks_without_issuer_or_audience_is_refused_with_the_line_to_add(
    source: str, missing: str
) -> None:
    party = {name: value for name, value in PARTY.items() if name != missing}
    with pytest.raises(ConfigurationError, match=f"for example ONCEWARD_{missing.upper()}="):
        load_settings(**{source: "https://id.example/keys"}, **party)
    with pytest.raises(ConfigurationError, match=f"ONCEWARD_{missing.upper()} should be"):
        load_settings(**{source: "https://id.example/keys", missing: " , "}, **party)


def test_several_issuers_and_audiences_are_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONCEWARD_JWT_ISSUER", "https://a, https://b,")
    monkeypatch.setenv("ONCEWARD_JWT_AUDIENCE", "shop")
    settings = load_settings()
    assert settings.jwt_issuers == ("https://a", "https://b")
    assert settings.jwt_audiences == ("shop",)


def test_several_secrets_are_separated_by_commas_and_the_first_signs() -> None:
    new, old = "n" * 32, "o" * 32
    assert load_settings(jwt_secret=f"{new}, {old}").jwt_secrets[:2] == (new, old)
    one = "a secret with a comma, which is one secret"
    assert load_settings(jwt_secret=one).jwt_secrets == (one,)
    for secret in (new, one):
        assert load_settings(jwt_secret=secret).jwt_secrets == (secret,)


def test_one_secret_with_a_comma_between_two_long_parts_is_accepted_as_a_whole_too() -> None:
    whole = f"{'n' * 32},{'o' * 32}"
    assert whole in load_settings(jwt_secret=whole).jwt_secrets


@pytest.mark.parametrize("environment", ["production", "Production", "prod"])
@pytest.mark.parametrize(
    ("secret", "reason"),
    [(None, "a development secret"), ("sample", "a sample secret from the documentation")],
)
def test_production_never_runs_on_a_development_or_sample_secret(
    environment: str, secret: str | None, reason: str, tmp_path: Path
) -> None:
    sample = None if secret is None else min(SAMPLE_SECRETS)
    settings = load_settings(environment=environment, jwt_secret=sample, home=tmp_path / "home")
    with pytest.raises(ConfigurationError, match=f"never runs on {reason}: set ONCEWARD_JWT"):
        create_app(settings)
    assert not (tmp_path / "home").exists()
    load_settings(environment=environment, jwt_secret="s" * 40).check_production()
    load_settings(environment=environment, jwks_url="https://id/keys", **PARTY).check_production()


def test_every_secret_in_the_documentation_is_a_known_sample() -> None:
    """Readers copy them, so they are refused beyond loopback."""
    root = Path(__file__).parents[3]
    pages = [*root.glob("docs/**/*.md"), *root.glob("*.md"), *root.glob("packages/*/README.md")]
    shown = {
        secret
        for page in pages
        for secret in re.findall(
            r"""(?:secret|SECRET) ?= ?["']([^"']{32,})["']""", page.read_text(encoding="utf-8")
        )
    }
    assert shown <= SAMPLE_SECRETS


def test_limits_of_a_process_are_settings_and_zero_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    default = load_settings().limits()
    assert (default.waiting_per_tenant, default.records_per_tenant) == (200, 1_000_000)
    for name in ("BODY_MEMORY_BYTES", "WAITING_PER_TENANT", "RECORDS_PER_TENANT"):
        monkeypatch.setenv(f"ONCEWARD_{name}", "0")
    assert load_settings().limits() == Limits(None, None, None)
    monkeypatch.setenv("ONCEWARD_BODY_SECONDS", "5")
    assert load_settings().policies().field.body_deadline == timedelta(seconds=5)
