"""Tests and measurements of Onceward: demo, simulation, chaos runs, conformance, benchmarks.

Everything here uses the library and the services from outside; neither of them imports it.
"""

__all__: list[str] = []
