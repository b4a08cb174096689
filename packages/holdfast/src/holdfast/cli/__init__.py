"""The command line, ``holdfast``: parses options, calls the library, prints results.

Commands import what they need when they run, so ``holdfast --help`` is quick and ``holdfast hash``
works where only the core and the ``cli`` extra are installed.
"""
