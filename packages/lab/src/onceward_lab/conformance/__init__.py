"""Conformance checks over HTTP for any server that implements Onceward's protocol.

``profile`` describes a server's guarded operation, ``harness`` sends requests, ``run`` runs the
checks, and the other modules contain them.
"""

from onceward_lab.conformance.harness import Result, Verdict
from onceward_lab.conformance.profile import BUILT_IN, Profile, ProfileError, read_profile
from onceward_lab.conformance.run import (
    NoOperationError,
    NotSignedInError,
    Plan,
    RequestRefusedError,
    SignIn,
    UnreachableError,
    conform,
    plan_checks,
)

__all__ = [
    "BUILT_IN",
    "NoOperationError",
    "NotSignedInError",
    "Plan",
    "Profile",
    "ProfileError",
    "RequestRefusedError",
    "Result",
    "SignIn",
    "UnreachableError",
    "Verdict",
    "conform",
    "plan_checks",
    "read_profile",
]
