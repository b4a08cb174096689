"""Projects, missions and assignments of organizations: many people, one plan, no lost update."""
