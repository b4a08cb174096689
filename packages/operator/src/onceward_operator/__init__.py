"""For people who run Onceward: console, trace, live view, moves, backups, tenants, audits."""
