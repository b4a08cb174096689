"""What runs beside requests: expiry, erasure, removal of records."""
