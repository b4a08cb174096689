"""What both halves need around their databases: migrations, SQL files, private files."""
