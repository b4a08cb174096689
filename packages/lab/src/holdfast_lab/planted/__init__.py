"""Bugs planted on purpose, to see that the torture finds them. Never a part of what is installed.

Each is a context manager that breaks the real code while it lasts, in a way somebody could really
have written it. ``holdfast simulate --planted`` hunts them one by one.
"""

from holdfast_lab.planted import job_bugs, server_bugs
from holdfast_lab.planted import outbox_bugs as device_bugs
from holdfast_lab.planted.planting import PLANTED

__all__ = ["BUGS", "device_bugs", "job_bugs", "server_bugs"]

BUGS = PLANTED
