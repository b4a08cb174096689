"""The same little app in three frameworks, each a process of its own."""
