"""Settings of steps, streaks, attestation and reviews: part of the server's ``Settings``."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from holdfast.errors import ConfigurationError
from holdfast_services.walk.steps.rules import Limits
from holdfast_services.walk.steps.streaks import StreakRules

__all__ = ["DEVELOPMENT_AUDIENCE", "DEVELOPMENT_ISSUER", "StepSettings"]

# What development tokens say where nothing else is set; no real issuer has these names.
DEVELOPMENT_AUDIENCE: Final = "projects/holdfast-development"
DEVELOPMENT_ISSUER: Final = "holdfast-development"

_MAX_HOURS: Final = 876_000
_MAX_STEPS: Final = 1_000_000


def split(text: str) -> list[str]:
    """Read a list as variables have it: words with commas between them."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _some_words(text: str) -> str:
    if not split(text):
        raise ValueError("empty")
    return text


def _growing(text: str) -> str:
    """Take thresholds that can be climbed: whole numbers above 0, each larger than the last."""
    numbers = [int(word) for word in split(text)]
    if not numbers or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise ValueError("not growing")
    return text


Words = Annotated[str, AfterValidator(_some_words)]
Thresholds = Annotated[str, AfterValidator(_growing)]
Hours = Annotated[float, Field(ge=0, le=_MAX_HOURS, allow_inf_nan=False)]
_HOURS: Final = "a number of hours from 0"
_STEPS: Final = f"a whole number of steps from 1 to {_MAX_STEPS}"
_FACTOR: Final = "a number above 0, at most 1000"


class StepSettings(BaseModel):
    """What is believed, what is counted, and what it is worth."""

    # App Check: whose tokens attest that a report comes from the app. Both or none of audience
    # and issuer may be left out only where the keys are the development ones.
    app_check_jwks_file: Path | None = Field(None, description="a file with a JWKS")
    app_check_jwks_url: str | None = Field(None, description="a URL")
    app_check_audience: str | None = Field(None, description="the audience of App Check tokens")
    app_check_issuer: str | None = Field(None, description="the issuer of App Check tokens")
    app_check_max_age_seconds: float = Field(
        300.0, gt=0, le=86_400, description="a number of seconds above 0, at most 86400"
    )

    # What a report may claim.
    step_source_bundles: Words = Field(
        "com.apple.health,com.google.android.apps.healthdata",
        description="names of source bundles with commas between them",
    )
    step_max_per_day: int = Field(50_000, ge=1, le=_MAX_STEPS, description=_STEPS)
    step_max_per_second: float = Field(3.0, gt=0, le=1000, description=_FACTOR)
    step_burst_tolerance: float = Field(3.0, gt=0, le=1000, description=_FACTOR)
    step_tz_jump_hours: Hours = Field(12.0, description=_HOURS)
    step_tz_window_hours: Hours = Field(24.0, description=_HOURS)
    step_offline_cap_days: int = Field(
        7, ge=0, le=365, description="a whole number of days from 0 to 365"
    )

    # What steps are worth.
    step_provisional_factor: float = Field(1.5, gt=0, le=1000, description=_FACTOR)
    step_energy_per_step: float = Field(1.0, gt=0, le=1000, description=_FACTOR)
    step_attested_threshold: int = Field(2000, ge=1, le=_MAX_STEPS, description=_STEPS)
    step_streak_tiers: Thresholds = Field(
        "3,7,14,30", description="growing whole numbers of days with commas between them"
    )
    step_streak_decay_tiers: int = Field(
        1, ge=0, le=1000, description="a whole number of tiers from 0"
    )

    # When things are settled, and how long they are kept.
    step_reconcile_delay_seconds: float = Field(
        60.0, ge=0, le=86_400, description="a number of seconds from 0 to 86400"
    )
    step_refund_grace_hours: Hours = Field(24.0, description=_HOURS)
    step_attestation_retention_days: float = Field(
        30.0, gt=0, le=36_500, description="a number of days above 0"
    )
    step_review_rejections: int = Field(
        5, ge=1, le=1_000_000, description="a whole number of rejections, at least 1"
    )
    step_review_window_hours: Hours = Field(24.0, description=_HOURS)

    @model_validator(mode="after")
    def _app_check_is_whole(self) -> Self:
        if self.app_check_jwks_file is not None and self.app_check_jwks_url is not None:
            raise ConfigurationError(
                "set only one of HOLDFAST_APP_CHECK_JWKS_FILE and HOLDFAST_APP_CHECK_JWKS_URL"
            )
        named = self.app_check_audience is not None and self.app_check_issuer is not None
        if not self.app_check_is_development and not named:
            # The keys of a key server sign for everybody's apps, not for ours alone.
            raise ConfigurationError(
                "App Check tokens by a JWKS need HOLDFAST_APP_CHECK_AUDIENCE and "
                "HOLDFAST_APP_CHECK_ISSUER"
            )
        return self

    @property
    def app_check_is_development(self) -> bool:
        """True when nobody has said whose App Check tokens count."""
        return self.app_check_jwks_file is None and self.app_check_jwks_url is None

    @property
    def app_check_party(self) -> tuple[str, str]:
        """Whom App Check tokens are for, and who makes them."""
        return (
            self.app_check_audience or DEVELOPMENT_AUDIENCE,
            self.app_check_issuer or DEVELOPMENT_ISSUER,
        )

    @property
    def step_limits(self) -> Limits:
        """How much is believed."""
        return Limits(
            bundles=frozenset(split(self.step_source_bundles)),
            steps_per_day=self.step_max_per_day,
            steps_per_second=self.step_max_per_second,
            burst_tolerance=self.step_burst_tolerance,
            tz_jump=timedelta(hours=self.step_tz_jump_hours),
            tz_window=timedelta(hours=self.step_tz_window_hours),
            offline_days=self.step_offline_cap_days,
        )

    @property
    def streak_rules(self) -> StreakRules:
        """How many days each tier takes, and what a missed day costs."""
        tiers = tuple(int(word) for word in split(self.step_streak_tiers))
        return StreakRules(tiers, self.step_streak_decay_tiers)

    @property
    def refund_grace(self) -> timedelta:
        """How long allocations of a rejected day stay in place."""
        return timedelta(hours=self.step_refund_grace_hours)

    @property
    def review_window(self) -> timedelta:
        """How long a rejection counts against a walker."""
        return timedelta(hours=self.step_review_window_hours)
