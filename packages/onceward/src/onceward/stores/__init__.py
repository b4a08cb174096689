"""Adapters for databases and caches. They implement the ports and depend on no web framework."""
