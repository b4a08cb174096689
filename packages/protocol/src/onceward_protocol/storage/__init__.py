"""Storage code of both halves: migrations, SQL files, private files."""
