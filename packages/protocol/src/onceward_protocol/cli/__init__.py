"""The command ``onceward``, to which installed packages add their commands."""
