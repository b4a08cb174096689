"""The garbage collector while a command starts: it has nothing to find, and looks all the time.

Starting makes some 150,000 objects, nearly all of them modules, classes and routes that stay. The
collector walks over them again and again, for a tenth of the time it takes to start a server.
"""

import gc

__all__ = ["hold_collector", "release_collector"]


def hold_collector() -> None:
    """Do not look for garbage until what stays is there."""
    gc.disable()


def release_collector() -> None:
    """Look from now on, and only at what is made from now on."""
    gc.freeze()
    gc.enable()
