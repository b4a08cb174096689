"""Real processes under fire: servers, workers and devices are killed, and a checker decides."""

from holdfast.proof.processes.siege import Report, Standing, run_siege

__all__ = ["Report", "Standing", "run_siege"]
