"""The services of the seeds, built on Holdfast's public names. One server mounts them all.

Each service is a package beside ``routes``; ``catalogue`` lists them, ``app`` puts them together.
Nothing is imported here: the command line must start without a web framework.
"""
