"""The server side: guards operations and integrates with frameworks. Decisions are in ``core``."""
