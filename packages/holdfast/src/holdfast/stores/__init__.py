"""Adapters for databases and caches. They speak the domain and never a framework."""
