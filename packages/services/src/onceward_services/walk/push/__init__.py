"""Pushes to the devices of walkers: registration, the port, its adapters, the job."""
