"""Settings of tree, quests and events, ``ONCEWARD_WALK_…``: part of the server's ``Settings``."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from onceward_services.walk.catalogue_settings import CatalogueSettings

__all__ = ["WalkSettings"]

# A day is settled, reviewed and refunded within weeks. Until then entries are needed: they make
# a booking that is repeated have one effect.
_MIN_KEPT_DAYS: Final = 30
_SINK: Final = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_SINKS: Final = "a comma-separated list of names, such as combat,craft,harvest"
_KEPT: Final = f"a number of days from {_MIN_KEPT_DAYS}, or 0 to keep everything"


def _long_enough(days: float) -> float:
    if 0 < days < _MIN_KEPT_DAYS:
        raise ValueError("too short")
    return days


KeptDays = Annotated[
    float, Field(ge=0, le=36_500, allow_inf_nan=False), AfterValidator(_long_enough)
]


def _check_sinks(text: str) -> str:
    names = text.split(",")
    if len(set(names)) < len(names) or not all(map(_SINK.fullmatch, names)):
        raise ValueError("not names")
    return text


Sinks = Annotated[str, AfterValidator(_check_sinks)]


class WalkSettings(CatalogueSettings):
    """Descriptions say what the variable should be; error messages quote them."""

    # What needs an App Check token: reports of steps, or every action of a walker.
    walk_app_check: Literal["reports", "actions"] = Field(
        "reports", description="reports or actions"
    )
    # "strict": a device numbers the actions that it queues.
    walk_ordering: Literal["none", "strict"] = Field("none", description="none or strict")
    walk_energy_required: bool = Field(default=False, description="true or false")
    walk_energy_sinks: Sinks = Field("combat,craft,harvest", description=_SINKS)
    walk_events_streams: int = Field(
        10, ge=0, le=1_000_000, description="a whole number, or 0 for no limit"
    )
    # How long events, refunds and entries of the energy ledger are kept; 0 keeps them for ever.
    walk_event_retention_days: KeptDays = Field(90.0, description=_KEPT)
    walk_refund_retention_days: KeptDays = Field(730.0, description=_KEPT)
    walk_ledger_retention_days: KeptDays = Field(730.0, description=_KEPT)

    @property
    def energy_sinks(self) -> tuple[str, ...]:
        """Sinks on which walkers may spend energy with ``POST /energy/spend``."""
        return tuple(self.walk_energy_sinks.split(","))
