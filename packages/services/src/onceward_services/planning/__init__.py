"""Projects, missions and assignments of organizations, with optimistic locking."""
