"""Evidence: simulation, real processes under fire, a demo, conformance. Only proves; serves no one.

Everything here uses the product from the outside and counts what happened. Nothing below this
room may import it.
"""

__all__: list[str] = []
