"""Hostile clients, for tests of one's own server.

``run`` runs the attacks of ``tokens``, ``headers``, ``json_bodies``, ``floods``, ``slow`` and
``cache`` for ``onceward attack``. ``overload`` measures a server of its own under load.
"""
