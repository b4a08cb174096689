"""Tools of this repository, run by make."""
