"""Settings as operators see them: by subject, with the values that count, without secrets."""

from fnmatch import fnmatchcase
from typing import Any, Final

from pydantic import SecretStr

from onceward.stores.table_names import DEFAULT_PREFIX
from onceward_services.settings import Settings, variable_of

__all__ = ["effective_settings"]

_NOT_SET: Final = "not set"
# The headings of docs/reference/settings.md, and the fields below each. The first match counts.
_GROUPS: Final = {
    "Connections": "database_* table_* require_durability redis_url nats_url environment home",
    "Sign-in": "jwt_* jwks_*",
    "App Check": "app_check_*",
    "Logging": "log_*",
    "Metrics and docs": "metrics_* docs_* openapi_* ops_*",
    "Console": "console_* request_log_days",
    "Requests": "wait_seconds max_body_bytes body_seconds head_seconds max_response_bytes"
    " ietf_statuses disabled_endpoints error_help_url shutdown_seconds",
    "Batches": "batch_* direct_routes",
    "What a process holds for its callers": "max_connections* body_memory_bytes *_per_tenant",
    "The store": "memory_bytes planning_cache_bytes sweep_* breaker_* pool_size",
    "Jobs": "run_jobs jobs_* cleanup_at",
    "Audit": "audit_seal_seconds audit_key",
    "Retention": "audit_retention_days dead_letter_retention_days walk_*_retention_days",
    "How long responses are stored": "*_ttl_hours",
    "How old an action may be": "walk_staleness_*",
    "Rate limits": "*_rate_limit",
    "Planning": "planning_*",
    "Changes of field": "field_changes_*",
    "Walk": "walk_*",
    "Webhooks": "webhook_*",
    "Steps and streaks": "step_*",
}


def effective_settings(settings: Settings) -> dict[str, dict[str, str]]:
    """Return the settings by heading and variable. Of secrets only whether they are set."""
    groups: dict[str, dict[str, str]] = {heading: {} for heading in _GROUPS}
    for name in type(settings).model_fields:
        text = _text(getattr(settings, name))
        if text is None:
            text = _when_unset(settings, name)
        elif name not in settings.model_fields_set:
            text = f"{text} (default)"
        groups[_heading(name)][variable_of(name)] = text
    return groups


def _heading(name: str) -> str:
    for heading, patterns in _GROUPS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return heading
    raise LookupError(f"the setting {name} has no heading")


def _text(value: Any) -> str | None:
    """Return a value as its variable has it; None if there is none."""
    if isinstance(value, SecretStr):
        return "set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str) and "://" in value:
        return _without_password(value)
    return None if value is None or value == "" else str(value)


def _when_unset(settings: Settings, name: str) -> str:
    """Return the value that counts while a variable is not set."""
    if name.endswith("_rate_limit"):
        return "no limit"
    if name == "jwt_secret" and settings.needs_development_secret:
        return f"{_NOT_SET}: a development secret signs tokens"
    default = {
        "jwt_algorithm": settings.algorithm,
        "log_json": "true unless standard error is a terminal",
        "request_log_days": "7" if settings.console_enabled else None,
        "table_prefix": DEFAULT_PREFIX,
        "walk_catalogue_dir": "the bundled catalogue",
    }.get(name)
    return _NOT_SET if default is None else f"{default} (default)"


def _without_password(url: str) -> str:
    """Return a URL without what signs in: the part before the host, and the query."""
    scheme, _, rest = url.partition("://")
    rest = rest.partition("?")[0]
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
