"""Eyes: logs, metrics, traces. Names, hashes and times come in; raw keys and bodies never do."""
