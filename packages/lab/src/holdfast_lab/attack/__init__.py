"""Hostile clients, for tests of one's own server.

``run`` runs the attacks of ``tokens``, ``headers``, ``json_bodies``, ``floods``, ``slow`` and
``cache`` for ``holdfast attack``. ``overload`` measures a server of its own under load.
"""
