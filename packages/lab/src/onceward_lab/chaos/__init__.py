"""Chaos runs: kill and stop real servers, workers and devices, then check the result."""

from onceward_lab.chaos.runner import Progress, Report, run_chaos

__all__ = ["Progress", "Report", "run_chaos"]
