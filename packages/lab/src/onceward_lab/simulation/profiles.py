"""The outbox profiles of the simulated devices: those of walk and field, and variants of both."""

from dataclasses import replace
from typing import Final

from onceward_outbox.entry import UnknownBase
from onceward_outbox.profile import Profile
from onceward_services.field.outbox_profile import PROFILE as FIELD
from onceward_services.walk.outbox_profile import PROFILE as WALK

__all__ = ["PROFILES"]

PROFILES: Final[tuple[Profile, ...]] = (
    replace(FIELD, name="field-read", unknown_base=UnknownBase.READ),
    replace(FIELD, name="field-ask", unknown_base=UnknownBase.ASK),
    replace(FIELD, name="field-strict", strict_endpoints=("/moves",)),
    replace(FIELD, name="field-on-demand", strict_endpoints=("/moves",), numbers_on_demand=True),
    replace(WALK, name="walk-chain", chains=("/steps#/chain",)),
)
