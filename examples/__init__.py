"""Small apps with guarded endpoints, tested together with the documentation."""
