"""The demo: a server, and a device that loses its network and is killed twice."""

from onceward_lab.demo.result import DemoResult
from onceward_lab.demo.scenario import OnStep, run_demo

__all__ = ["DemoResult", "OnStep", "run_demo"]
