"""``python -m onceward.cli``, for environments without the ``onceward`` script."""

from onceward_protocol.cli.main import main

main()
