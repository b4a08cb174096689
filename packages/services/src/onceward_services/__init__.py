"""Four services built on Onceward's public API, and the server that runs them.

Each service is a package: ``field``, ``planning``, ``routes``, ``walk``. ``registry`` lists them,
``app`` builds the server. This module imports nothing, so that the command line starts without
loading a web framework.
"""
