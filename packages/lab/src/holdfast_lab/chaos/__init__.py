"""Real processes under fire: servers, workers and devices are killed, and a checker decides."""

from holdfast_lab.chaos.runner import Report, Standing, run_chaos

__all__ = ["Report", "Standing", "run_chaos"]
