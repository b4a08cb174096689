"""Work beside requests: expiry, erasure, removal of records."""
