"""Protocol of client and server of Onceward: pure functions and values, without I/O."""
