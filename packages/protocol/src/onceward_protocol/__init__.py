"""What client and server of Onceward agree on: pure functions and values, without I/O."""
