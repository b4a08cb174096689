"""Fronts of the guard: one for each web framework."""
