"""The walk service's tables, one directory per database."""
