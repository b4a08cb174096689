"""The outbox profile of field: entries are independent by entity, activities go first."""

from datetime import timedelta
from typing import Final

from onceward_outbox import Profile

__all__ = ["PROFILE"]

_PRIORITIES: Final = {"activity": 10, "expense": 8, "contact": 5}
_PLURALS: Final = {"activities": "activity", "expenses": "expense", "contacts": "contact"}

PROFILE: Final = Profile(
    name="field",
    # Entity types are named in the singular, or in the plural that endpoints use.
    priorities=_PRIORITIES | {plural: _PRIORITIES[one] for plural, one in _PLURALS.items()},
    key_lifetime=timedelta(days=7),
)
