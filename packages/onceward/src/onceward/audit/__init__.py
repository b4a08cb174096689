"""The chain of audit events."""
