"""The test kit: real servers from wheels, and contract tests for stores and engines."""
