"""The first look: a server, a device that loses its network and its life, and a verdict."""

from holdfast.proof.demo.stage import Watcher, run_demo
from holdfast.proof.demo.verdict import Verdict

__all__ = ["Verdict", "Watcher", "run_demo"]
