"""The command line, ``onceward``: parses options, calls the library, prints results.

Commands import what they need when they run, so ``onceward --help`` is quick and ``onceward hash``
works where only the core and the ``cli`` extra are installed.
"""
