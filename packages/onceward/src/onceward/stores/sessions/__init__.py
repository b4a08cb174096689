"""Stores in an app's own sessions and connections: of SQLAlchemy and Django.

What a guarded request does to its transaction is written once, in blocking style (``store``). An
adapter says where that runs: async SQLAlchemy in its greenlet, sync SQLAlchemy in threads, Django
in the thread of the request. See docs/decisions/0065-session-stores.md.
"""
