"""``python -m holdfast.cli``, for environments without the ``holdfast`` script."""

from holdfast.cli.main import main

main()
