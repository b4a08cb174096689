"""Torture: the real device, intake, store and jobs in one process, under a seeded scheduler.

===============  ================================================================================
``loop``         virtual time, and processes that can be paused and killed between two steps
``strands``      the device's synchronous code, taking turns with the loop
``possession``   chance, and what else the product takes from the machine without asking
``disk``         the device's file system: fills up, and forgets what was not synced
``store``        the real SQLite store, its threads run as steps of the loop
``database``     the file behind it: one for all worlds of a process, emptied between two
``app``          the service under torture, and its jobs
``broker``       a broker that loses, repeats and forgets, behind the real engine and relay
``network``      requests and answers that get lost, doubled, late and out of order
``faults``       what goes wrong when: decided by the seed alone, counted, and droppable
``server``       processes of the server, from start to kill
``device``       devices, from start to power cut
``taps``         what people want to do
``person``       how they do it, and what they do when it fails
``world``        one seed: set up, torture, let drain, write the history
``templates``    empty databases, and a place for worlds
``shrinking``    the fewest faults that still break a promise
``campaign``     many seeds on many cores, and what came of them
===============  ================================================================================

Nothing in here decides what is right: that is the checker's.
"""

__all__: list[str] = []
