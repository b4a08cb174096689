"""The first look: a server, a device that loses its network and its life, and a verdict."""

from holdfast_lab.demo.scenario import Watcher, run_demo
from holdfast_lab.demo.verdict import Verdict

__all__ = ["Verdict", "Watcher", "run_demo"]
