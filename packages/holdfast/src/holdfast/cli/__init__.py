"""The command line. Talks to a person; everything it does is done by the rooms below.

Commands import what they need when they run, so ``holdfast --help`` is quick and ``holdfast hash``
works where only the core and the ``cli`` extra are installed.
"""
