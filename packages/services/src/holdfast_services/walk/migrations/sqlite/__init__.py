"""For SQLite."""
