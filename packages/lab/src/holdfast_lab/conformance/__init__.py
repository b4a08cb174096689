"""Conformance over HTTP: does a server that claims the contract keep it? Knows nothing of its code.

``profile`` says where a server's guarded operation is, ``kit`` sends requests, the modules of
checks say what has to come, and ``run`` puts them one after another.
"""

from holdfast_lab.conformance.harness import Result, Verdict
from holdfast_lab.conformance.profile import BUILT_IN, Profile, ProfileError, read_profile
from holdfast_lab.conformance.run import (
    NotSignedInError,
    Plan,
    SignIn,
    UnreachableError,
    conform,
    plan_checks,
)

__all__ = [
    "BUILT_IN",
    "NotSignedInError",
    "Plan",
    "Profile",
    "ProfileError",
    "Result",
    "SignIn",
    "UnreachableError",
    "Verdict",
    "conform",
    "plan_checks",
    "read_profile",
]
