"""Bugs planted on purpose, to see that the torture finds them. Never a part of what is installed.

Each is a context manager that breaks the real code while it lasts, in a way somebody could really
have written it. ``holdfast torture --planted`` hunts them one by one.
"""

from tests.planted import device_bugs, job_bugs, server_bugs
from tests.planted.planting import PLANTED

__all__ = ["BUGS", "device_bugs", "job_bugs", "server_bugs"]

BUGS = PLANTED
