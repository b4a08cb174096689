"""Settings of the server, read from ``ONCEWARD_…`` environment variables."""

import os
from collections.abc import Callable, Mapping
from datetime import time, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from onceward import ErrorFormat, Policy, Staleness
from onceward.batch.options import BatchOptions, ItemReport
from onceward.errors import ConfigurationError
from onceward.guard.error_formats import ProblemFormat
from onceward.guard.limits import Limits
from onceward.guard.rate_limits import check_limit
from onceward.maintenance.retention import AUDIT_EVENTS, DEAD_LETTERS, Retention
from onceward_services.field.policy import POLICY as FIELD
from onceward_services.field.settings import FieldSettings
from onceward_services.planning.policy import POLICY as PLANNING
from onceward_services.planning.settings import PlanningSettings
from onceward_services.routes.policy import POLICY as ROUTES
from onceward_services.sign_in_settings import MIN_SECRET_BYTES, Secret, SignInSettings
from onceward_services.walk.policy import POLICY as WALK
from onceward_services.walk.policy import VOLATILE_FIELDS
from onceward_services.walk.push.settings import PushSettings
from onceward_services.walk.settings import WalkSettings
from onceward_services.walk.steps.settings import StepSettings

__all__ = ["Policies", "Settings", "load_settings", "unknown_variables", "variable_of"]

_PREFIX: Final = "ONCEWARD_"

# A hundred years. More is a typing error, and would exceed the range of datetime.
_MAX_HOURS: Final = 876_000
# 3.6 milliseconds. Less would round to a lifetime of zero.
_MIN_HOURS: Final = 0.000001

Hours = Annotated[float, Field(ge=_MIN_HOURS, le=_MAX_HOURS, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Days = Annotated[float, Field(ge=0, le=36_500, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**40)]
Count = Annotated[int, Field(ge=0, le=2**40)]

_HOURS: Final = "a number of hours above 0, such as 24 or 0.5"
_SECONDS: Final = "a number of seconds from 0 to 86400"
_DAYS: Final = "a number of days, such as 365, or 0 to keep everything"
_BYTES: Final = "a whole number of bytes"
_URL: Final = "a URL"
_ROUTES_TTL_ALIAS: Final = "ROUTES_IDEMPOTENCY_TTL_HOURS"
_LIMIT: Final = 'a rate such as "50/minute", or 0 for none'
_COUNT: Final = "a whole number, or 0 for no limit"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _rate(value: object) -> object:
    """Check that the limiter can parse the rate; 0 and empty mean no limit."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "0")):
        return None
    try:
        check_limit(str(value))
    except ConfigurationError as error:
        raise ValueError(str(error)) from error
    return value


Level = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]
Rate = Annotated[str | None, BeforeValidator(_rate)]


class Policies(NamedTuple):
    """The policies of the services with this server's settings applied."""

    walk: Policy
    step_ingest: Policy
    planning: Policy
    routes: Policy
    field: Policy


class Settings(
    SignInSettings,
    WalkSettings,
    StepSettings,
    PlanningSettings,
    FieldSettings,
    PushSettings,
    BaseSettings,
):
    """All settings. ``ONCEWARD_WAIT_SECONDS`` sets ``wait_seconds``, and so on.

    A field's description says what its variable should be; error messages quote it.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, extra="forbid", populate_by_name=True, hide_input_in_errors=True
    )

    # Addresses and directories.
    database_url: str = Field(
        "sqlite:///onceward.db", description="sqlite:///file.db or postgresql://…"
    )
    table_prefix: str | None = Field(None, description="a prefix such as acme_")
    table_schema: str | None = Field(None, description="the name of a schema of PostgreSQL")
    # Limits for a PostgreSQL that does not respond; 0 is no limit.
    database_connect_seconds: float = Field(
        5.0, gt=0, le=3600, description="a number of seconds above 0, at most 3600"
    )
    # Without a limit, a process that is out of connections would collect requests.
    database_acquire_seconds: float = Field(
        10.0, gt=0, le=3600, description="a number of seconds above 0, at most 3600"
    )
    database_claim_seconds: Seconds = Field(5.0, description=_SECONDS)
    database_statement_seconds: Seconds = Field(30.0, description=_SECONDS)
    database_commit_seconds: Seconds = Field(10.0, description=_SECONDS)
    require_durability: Literal["replicated"] | None = Field(None, description="replicated")
    redis_url: str | None = Field(None, description=_URL)
    nats_url: str | None = Field(None, description=_URL)
    home: Path = Field(Path(".onceward"), description="a directory")

    # Logging.
    log_level: Level = Field("INFO", description="DEBUG, INFO, WARNING, ERROR or CRITICAL")
    log_json: bool | None = Field(None, description="true or false")

    # Pages for operators and developers, which need no sign-in.
    metrics_enabled: bool = Field(default=True, description="true or false")
    docs_enabled: bool = Field(default=True, description="true or false")
    openapi_enabled: bool = Field(default=True, description="true or false")
    ops_host: str = Field("127.0.0.1", description="an address to listen on")
    ops_port: int | None = Field(
        None, ge=0, le=65535, description="a port from 1 to 65535, or 0 for a free one"
    )

    # The console for operators, which needs a sign-in.
    console_enabled: bool = Field(default=True, description="true or false")
    console_operators: str = Field("", description="subjects of tokens, separated by commas")
    request_log_days: Days | None = Field(
        None, description="a number of days; 0 logs nothing; not set: 7 with the console"
    )

    # Requests.
    wait_seconds: Seconds = Field(10.0, description=_SECONDS)
    max_body_bytes: Bytes = Field(1024 * 1024, description=_BYTES)
    body_seconds: float = Field(
        30.0, gt=0, le=86_400, description="a number of seconds above 0, at most 86400"
    )
    head_seconds: float = Field(
        10.0, gt=0, le=3600, description="a number of seconds above 0, at most 3600"
    )
    # Larger than the body's limit: responses repeat the request and add to it.
    max_response_bytes: Bytes = Field(2 * 1024 * 1024, description=_BYTES)
    ietf_statuses: bool = Field(default=False, description="true or false")
    disabled_endpoints: str | None = Field(
        None, description="names of endpoints with commas between them, such as tree.allocate"
    )
    error_help_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s<>\"]+$",
        description="an address such as https://example.com/errors#{code}",
    )
    shutdown_seconds: Seconds = Field(30.0, description=_SECONDS)

    # Many requests in one.
    batch_enabled: bool = Field(default=True, description="true or false")
    batch_path: str = Field(
        "/batch", pattern=r"^(/[A-Za-z0-9._~-]+)+$", description="a path such as /batch"
    )
    batch_items: int = Field(
        200, ge=1, le=10_000, description="a whole number of items, at least 1"
    )
    batch_bytes: int = Field(
        1024 * 1024, ge=1, le=2**30, description="a whole number of bytes, at least 1"
    )
    batch_seconds: float = Field(
        20.0, gt=0, le=3600, description="a number of seconds above 0, at most 3600"
    )
    # Handlers are called without FastAPI's request handler, items of a batch without the
    # middleware of the server.
    direct_routes: bool = Field(default=True, description="true or false")

    # What one process holds for its callers.
    max_connections: int = Field(
        2048, ge=1, le=1_000_000, description="a whole number of connections, at least 1"
    )
    max_connections_per_address: int = Field(
        512, ge=0, le=1_000_000, description="a whole number of connections, or 0 for no limit"
    )
    body_memory_bytes: Bytes = Field(
        64 * 1024 * 1024, description="a whole number of bytes, or 0 for no limit"
    )
    waiting_per_tenant: Count = Field(200, description=_COUNT)
    records_per_tenant: Count = Field(1_000_000, description=_COUNT)

    # The store.
    memory_bytes: Bytes = Field(32 * 1024 * 1024, description=_BYTES)
    sweep_every_seconds: float = Field(
        3600.0, ge=1, le=31_536_000, description="a number of seconds from 1 to 31536000"
    )
    breaker_failure_limit: int = Field(
        5, ge=1, le=1_000_000, description="a whole number of failures in a row, at least 1"
    )
    breaker_open_seconds: float = Field(
        1.0, gt=0, le=3600, description="a number of seconds above 0, at most 3600"
    )
    pool_size: int = Field(
        16, ge=1, le=10_000, description="a whole number of connections, at least 1"
    )

    # Jobs.
    run_jobs: bool = Field(default=True, description="true or false")
    jobs_concurrency: int = Field(
        8, ge=1, le=10_000, description="a whole number of jobs at a time, at least 1"
    )
    jobs_lease_seconds: float = Field(
        30.0, ge=1, le=86_400, description="a number of seconds from 1 to 86400"
    )
    jobs_payload_bytes: Bytes = Field(256 * 1024, description=_BYTES)
    jobs_keep_done_days: float = Field(
        7.0, gt=0, le=36_500, description="a number of days above 0, such as 7 or 0.5"
    )
    jobs_keep_dead_days: float = Field(
        30.0, gt=0, le=36_500, description="a number of days above 0, such as 30"
    )
    # The chain of audit events.
    audit_seal_seconds: Seconds = Field(60.0, description=f"{_SECONDS}; 0 does not seal")
    audit_key: Secret | None = Field(
        None,
        description=f"a random text of at least {MIN_SECRET_BYTES} bytes, or several of them "
        "separated by commas",
    )
    # How long rows are kept; 0 keeps them for ever. Those of walk are in its settings.
    audit_retention_days: Days = Field(0.0, description=_DAYS)
    dead_letter_retention_days: Days = Field(365.0, description=_DAYS)
    cleanup_at: time = Field(time(3, 0), description="a time of day in UTC, such as 03:00")

    # How long responses are stored. Routes stores no errors, so it has one TTL.
    walk_success_ttl_hours: Hours = Field(168.0, description=_HOURS)
    walk_error_ttl_hours: Hours = Field(168.0, description=_HOURS)
    planning_success_ttl_hours: Hours = Field(24.0, description=_HOURS)
    planning_error_ttl_hours: Hours = Field(4.0, description=_HOURS)
    routes_success_ttl_hours: Hours = Field(24.0, description=_HOURS)
    # An older name of the same setting; the one above wins if both are set.
    routes_idempotency_ttl_hours: Hours | None = Field(
        None, validation_alias=_ROUTES_TTL_ALIAS, description=_HOURS
    )
    field_success_ttl_hours: Hours = Field(168.0, description=_HOURS)
    field_error_ttl_hours: Hours = Field(4.0, description=_HOURS)

    # The maximum age of an action.
    walk_staleness_cap_days: float = Field(
        7.0, gt=0, le=36_500, description="a number of days above 0, such as 7 or 0.5"
    )
    walk_staleness_grace_hours: float = Field(
        6.0, ge=0, le=_MAX_HOURS, description="a number of hours from 0"
    )

    # Requests per tenant and endpoint.
    step_ingest_rate_limit: Rate = Field("50/minute", description=_LIMIT)
    # Generous: a tenant that exceeds one of these is broken or hostile.
    walk_rate_limit: Rate = Field("1200/minute", description=_LIMIT)
    planning_rate_limit: Rate = Field("6000/minute", description=_LIMIT)
    routes_rate_limit: Rate = Field("6000/minute", description=_LIMIT)
    field_rate_limit: Rate = Field("6000/minute", description=_LIMIT)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_unset(cls, values: Any) -> Any:
        """Treat ``VAR=`` as unset, as container files write it; an empty rate means no limit."""
        if not isinstance(values, Mapping):
            return values
        return {
            name: value
            for name, value in values.items()
            if value != "" or str(name).endswith("rate_limit")
        }

    @model_validator(mode="after")
    def _apply_routes_ttl_alias(self) -> Self:
        alias = self.routes_idempotency_ttl_hours
        if alias is not None and "routes_success_ttl_hours" not in self.model_fields_set:
            self.routes_success_ttl_hours = alias
        return self

    @property
    def disabled(self) -> list[str]:
        """The endpoints that are switched off."""
        return _names(self.disabled_endpoints or "")

    @property
    def request_log_seconds(self) -> float | None:
        """How long requests that did not run are kept; None: as the console says."""
        return None if self.request_log_days is None else self.request_log_days * 86_400

    @property
    def operators_of_console(self) -> list[str]:
        """The subjects that see all tenants in the console, if they have a role."""
        return _names(self.console_operators)

    @property
    def problem_format(self) -> ErrorFormat | ProblemFormat:
        """The format of errors of all services but walk."""
        if self.error_help_url is None:
            return ErrorFormat.PROBLEM
        return ProblemFormat(self.error_help_url)

    @property
    def _ttl_shorter_than_staleness(self) -> bool:
        """True if the operator chose a TTL that ends before an action becomes stale.

        The default value is not a choice: a file that lists every default must change nothing.
        """
        default = type(self).model_fields["walk_success_ttl_hours"].default
        hours = self.walk_success_ttl_hours
        return hours != default and hours < self._staleness_hours

    @property
    def _staleness_hours(self) -> float:
        return 24 * self.walk_staleness_cap_days + self.walk_staleness_grace_hours

    def warnings(self) -> list[str]:
        """Return one line for each setting that is valid but has a side effect to know about."""
        lines = []
        if self.is_production and self.app_check_is_development:
            lines.append(
                "ONCEWARD_APP_CHECK_JWKS_URL is not set: in production, reports of steps are "
                "refused without it"
            )
        if self._ttl_shorter_than_staleness:
            lines.append(
                f"ONCEWARD_WALK_SUCCESS_TTL_HOURS={self.walk_success_ttl_hours:g} is shorter than "
                f"the {self._staleness_hours:g} hours in which walk accepts an action: an action "
                "that is sent again after its record has expired will run a second time"
            )
        return lines

    def audit_keys(self) -> tuple[str, ...]:
        """Return the keys that sign audit seals."""
        text = "" if self.audit_key is None else self.audit_key.get_secret_value()
        return tuple(part.strip() for part in text.split(",") if part.strip())

    def retention(self) -> list[Retention]:
        """Return how long rows are kept, for the tables from which old rows are deleted."""
        kept = (
            (AUDIT_EVENTS, None, self.audit_retention_days),
            (DEAD_LETTERS, None, self.dead_letter_retention_days),
            ("walker_events", "created_at", self.walk_event_retention_days),
            ("tree_refunds", "refunded_at", self.walk_refund_retention_days),
            ("energy_ledger", "created_at", self.walk_ledger_retention_days),
            ("planning_deliveries", "created_at", self.planning_delivery_retention_days),
            ("planning_delivery_attempts", "started_at", self.planning_delivery_retention_days),
        )
        return [
            Retention(table, timedelta(days=days), column) for table, column, days in kept if days
        ]

    def _with_limits(self, policy: Policy) -> Policy:
        """Apply the settings that all services share."""
        return policy.replace(
            wait=timedelta(seconds=self.wait_seconds),
            max_body_bytes=self.max_body_bytes,
            body_deadline=timedelta(seconds=self.body_seconds),
            max_response_bytes=self.max_response_bytes,
            ietf_statuses=self.ietf_statuses,
        )

    def limits(self) -> Limits:
        """Return the limits of a process; 0 in a setting is no limit."""
        return Limits(
            body_memory_bytes=self.body_memory_bytes or None,
            waiting_per_tenant=self.waiting_per_tenant or None,
            records_per_tenant=self.records_per_tenant or None,
        )

    def batch(self, on_item: Callable[[ItemReport], None] | None = None) -> BatchOptions | None:
        """Return the options of the batch endpoint; None if it is switched off."""
        if not self.batch_enabled:
            return None
        return BatchOptions(
            path=self.batch_path,
            max_items=self.batch_items,
            max_bytes=self.batch_bytes,
            max_seconds=self.batch_seconds,
            direct=self.direct_routes,
            on_item=on_item,
        )

    def policies(self) -> Policies:
        """Return the policies of the services with these settings applied."""
        walk = self._with_limits(WALK).replace(
            success_ttl=timedelta(hours=self.walk_success_ttl_hours),
            error_ttl=timedelta(hours=self.walk_error_ttl_hours),
            staleness=Staleness(
                cap=timedelta(days=self.walk_staleness_cap_days),
                grace=timedelta(hours=self.walk_staleness_grace_hours),
            ),
            outlive_staleness=not self._ttl_shorter_than_staleness,
            rate_limit=self.walk_rate_limit,
            ordering=self.walk_ordering,
        )
        return Policies(
            walk=walk,
            # A report is about a day, and its age is checked in the walker's time zone.
            step_ingest=walk.replace(
                key_field="idempotencyKey",
                # The key is in the hash of reports since the first version.
                volatile_fields=VOLATILE_FIELDS,
                staleness=None,
                rate_limit=self.step_ingest_rate_limit,
            ),
            planning=self._with_limits(PLANNING).replace(
                success_ttl=timedelta(hours=self.planning_success_ttl_hours),
                error_ttl=timedelta(hours=self.planning_error_ttl_hours),
                rate_limit=self.planning_rate_limit,
            ),
            routes=self._with_limits(ROUTES).replace(
                success_ttl=timedelta(hours=self.routes_success_ttl_hours),
                rate_limit=self.routes_rate_limit,
            ),
            field=self._with_limits(FIELD).replace(
                success_ttl=timedelta(hours=self.field_success_ttl_hours),
                error_ttl=timedelta(hours=self.field_error_ttl_hours),
                rate_limit=self.field_rate_limit,
            ),
        )


def load_settings(**overrides: Any) -> Settings:
    """Read the environment. Arguments that are not None take precedence.

    Raises ``ConfigurationError`` with one line that names the variable and what it should be.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError(_first_error(error)) from None


def variable_of(name: str) -> str:
    """Return the environment variable of a field of ``Settings``."""
    alias = Settings.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"{_PREFIX}{name.upper()}"


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return one line for each ``ONCEWARD_…`` variable that is not a setting."""
    known = {variable_of(name) for name in Settings.model_fields}
    known.add(f"{_PREFIX}APP")  # of the command line
    lines = []
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.85)
            hint = f"; did you mean {near[0]}?" if near else ""
            lines.append(f"{name} is not a setting and is ignored{hint}")
    return lines


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    if name == _ROUTES_TTL_ALIAS:
        variable, field = name, Settings.model_fields["routes_idempotency_ttl_hours"]
    else:
        variable, field = _PREFIX + name.upper(), Settings.model_fields[name]
    received = "" if name.endswith("_secret") else f", not {first['input']!r}"
    return f"{variable} should be {field.description}{received}"
