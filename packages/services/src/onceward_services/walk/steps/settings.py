"""Settings of steps, streaks, attestation and reviews: part of the server's ``Settings``."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from onceward.errors import ConfigurationError
from onceward_services.walk.catalogue_settings import CatalogueSettings
from onceward_services.walk.steps.rules import Limits
from onceward_services.walk.steps.streaks import StreakRules
from onceward_services.webhooks.http_post import parse_url
from onceward_services.webhooks.signature import check_secret

__all__ = ["DEVELOPMENT_AUDIENCE", "DEVELOPMENT_ISSUER", "StepSettings"]

# What development tokens say where nothing else is set; no real issuer has these names.
DEVELOPMENT_AUDIENCE: Final = "projects/onceward-development"
DEVELOPMENT_ISSUER: Final = "onceward-development"

_MAX_HOURS: Final = 876_000
_MAX_STEPS: Final = 1_000_000


def split(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _check_not_empty(text: str) -> str:
    if not split(text):
        raise ValueError("empty")
    return text


def _check_ascending(text: str) -> str:
    """Check that the thresholds are whole numbers above 0 in ascending order."""
    numbers = [int(word) for word in split(text)]
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise ValueError("not ascending")
    return text


def _check_url(url: str) -> str:
    parse_url(url)
    return url


WebhookUrl = Annotated[str, AfterValidator(_check_url)]
WebhookSecret = Annotated[str, AfterValidator(check_secret)]
Words = Annotated[str, AfterValidator(_check_not_empty)]
Thresholds = Annotated[str, AfterValidator(_check_ascending)]
Hours = Annotated[float, Field(ge=0, le=_MAX_HOURS, allow_inf_nan=False)]
_HOURS: Final = "a number of hours from 0"
_STEPS: Final = f"a whole number of steps from 1 to {_MAX_STEPS}"
_FACTOR: Final = "a number above 0, at most 1000"


class StepSettings(CatalogueSettings):
    """Descriptions say what the variable should be; error messages quote them."""

    # App Check: the issuer of the tokens that attest reports. Audience and issuer are optional only
    # with the development keys.
    app_check_jwks_file: Path | None = Field(None, description="a file with a JWKS")
    app_check_jwks_url: str | None = Field(None, description="a URL")
    app_check_audience: str | None = Field(None, description="the audience of App Check tokens")
    app_check_issuer: str | None = Field(None, description="the issuer of App Check tokens")
    app_check_max_age_seconds: float = Field(
        300.0, gt=0, le=86_400, description="a number of seconds above 0, at most 86400"
    )

    # Limits of a report.
    step_source_bundles: Words = Field(
        "com.apple.health,com.apple.health.*,com.google.android.apps.healthdata,"
        "com.google.android.wearable.healthservices",
        description="a comma-separated list of source bundles, such as com.apple.health.*",
    )
    step_max_per_day: int = Field(50_000, ge=1, le=_MAX_STEPS, description=_STEPS)
    step_max_per_second: float = Field(3.0, gt=0, le=1000, description=_FACTOR)
    step_burst_tolerance: float = Field(3.0, gt=0, le=1000, description=_FACTOR)
    step_tz_jump_hours: Hours = Field(12.0, description=_HOURS)
    step_tz_window_hours: Hours = Field(24.0, description=_HOURS)
    step_offline_cap_days: int = Field(
        7, ge=0, le=365, description="a whole number of days from 0 to 365"
    )

    step_empty_day_grace_hours: Hours = Field(6.0, description=_HOURS)
    step_span_grace_hours: Hours = Field(6.0, description=_HOURS)
    step_clock_ahead_seconds: float = Field(
        300.0, ge=0, le=86_400, description="a number of seconds from 0 to 86400"
    )

    # Energy and streaks.
    step_provisional_factor: float = Field(1.5, gt=0, le=1000, description=_FACTOR)
    step_provisional_floor: int = Field(
        2000, ge=0, le=_MAX_STEPS, description=f"a whole number of steps from 0 to {_MAX_STEPS}"
    )
    step_energy_per_step: float = Field(1.0, gt=0, le=1000, description=_FACTOR)
    step_attested_threshold: int = Field(2000, ge=1, le=_MAX_STEPS, description=_STEPS)
    step_streak_tiers: Thresholds = Field(
        "3,7,14,30",
        description="a comma-separated list of whole numbers of days in ascending order",
    )
    step_streak_decay_tiers: int = Field(
        1, ge=0, le=1000, description="a whole number of tiers from 0"
    )

    # Reconciliation, refunds, retention and reviews.
    step_reconcile_delay_seconds: float = Field(
        60.0, ge=0, le=86_400, description="a number of seconds from 0 to 86400"
    )
    step_reread_hours: Hours = Field(72.0, description="a number of hours, or 0 for no challenges")
    step_refund_grace_hours: Hours = Field(24.0, description=_HOURS)
    step_attestation_retention_days: float = Field(
        30.0, gt=0, le=36_500, description="a number of days above 0"
    )
    step_review_rejections: int = Field(
        5, ge=1, le=1_000_000, description="a whole number of rejections, at least 1"
    )
    step_review_window_hours: Hours = Field(24.0, description=_HOURS)

    # The webhook about reviews that were opened.
    walk_review_webhook_url: WebhookUrl | None = Field(
        None, description="an address such as https://example.com/hook"
    )
    walk_review_webhook_secret: WebhookSecret | None = Field(
        None, description="whsec_ and 24 to 64 random bytes in base64"
    )

    @model_validator(mode="after")
    def _check_review_webhook(self) -> Self:
        if (self.walk_review_webhook_url is None) != (self.walk_review_webhook_secret is None):
            raise ConfigurationError(
                "ONCEWARD_WALK_REVIEW_WEBHOOK_URL and ONCEWARD_WALK_REVIEW_WEBHOOK_SECRET are set "
                "together or not at all"
            )
        return self

    @model_validator(mode="after")
    def _check_app_check(self) -> Self:
        if self.app_check_jwks_file is not None and self.app_check_jwks_url is not None:
            raise ConfigurationError(
                "set only one of ONCEWARD_APP_CHECK_JWKS_FILE and ONCEWARD_APP_CHECK_JWKS_URL"
            )
        named = self.app_check_audience is not None and self.app_check_issuer is not None
        if not self.app_check_is_development and not named:
            # The keys of a JWKS may sign tokens for other apps too.
            raise ConfigurationError(
                "an App Check JWKS needs ONCEWARD_APP_CHECK_AUDIENCE and ONCEWARD_APP_CHECK_ISSUER"
            )
        return self

    @property
    def app_check_is_development(self) -> bool:
        """True if no JWKS for App Check tokens is set."""
        return self.app_check_jwks_file is None and self.app_check_jwks_url is None

    @property
    def app_check_party(self) -> tuple[str, str]:
        """The audience and the issuer of App Check tokens."""
        return (
            self.app_check_audience or DEVELOPMENT_AUDIENCE,
            self.app_check_issuer or DEVELOPMENT_ISSUER,
        )

    @property
    def step_limits(self) -> Limits:
        """Limits of a report."""
        return Limits(
            bundles=frozenset(split(self.step_source_bundles)),
            steps_per_day=self.step_max_per_day,
            steps_per_second=self.step_max_per_second,
            burst_tolerance=self.step_burst_tolerance,
            tz_jump=timedelta(hours=self.step_tz_jump_hours),
            tz_window=timedelta(hours=self.step_tz_window_hours),
            offline_days=self.step_offline_cap_days,
            span_grace=timedelta(hours=self.step_span_grace_hours),
            clock_ahead=timedelta(seconds=self.step_clock_ahead_seconds),
        )

    @property
    def streak_rules(self) -> StreakRules:
        """The thresholds of the tiers, and the tiers lost per missed day."""
        tiers = tuple(int(word) for word in split(self.step_streak_tiers))
        return StreakRules(tiers, self.step_streak_decay_tiers)

    @property
    def empty_day_after(self) -> timedelta:
        """How long after its end a day without a report is not settled."""
        grace = timedelta(hours=self.step_empty_day_grace_hours)
        return timedelta(days=self.step_offline_cap_days) + grace

    @property
    def reread_within(self) -> timedelta:
        """How long a device may take to read a day again; zero if days are not challenged."""
        return timedelta(hours=self.step_reread_hours)

    @property
    def refund_grace(self) -> timedelta:
        """The time between the rejection of a day and the refund of its allocations."""
        return timedelta(hours=self.step_refund_grace_hours)

    @property
    def review_window(self) -> timedelta:
        """How long a rejection counts towards a review."""
        return timedelta(hours=self.step_review_window_hours)
