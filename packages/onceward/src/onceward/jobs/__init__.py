"""Jobs: enqueued in the transaction of the write that causes them, done once. No HTTP in here."""
