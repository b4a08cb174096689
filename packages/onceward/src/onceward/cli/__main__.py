"""``python -m onceward.cli``, for environments without the ``onceward`` script."""

from onceward.cli.main import main

main()
