"""Simulation of the real outbox, server, store and jobs in one process, in virtual time.

A seed determines every fault and every choice, so a run can be repeated exactly.

=======================  ==========================================================================
``runner``               many seeds in several processes, and their sum
``scenario``             one seed: set up, inject faults, drain, record the history
``shrinking``            few faults that still violate the same guarantee
``faults``               which faults occur and when
``loop``                 virtual time, and processes that can be paused and killed
``cooperative_threads``  synchronous code of the device, scheduled by the loop
``determinism``          randomness and threads that have no port
``server``, ``app``      server processes, and the service that they run
``store``, ``database``  the real SQLite store as steps of the loop, and its file
``batch_clients``        clients that send batches, without an outbox
``stream_clients``       clients with strict sequences, without an outbox
``batches``              the items of a batch as single requests
``records``              compares responses with the stored records
``broker``               a broker that loses and repeats messages
``network``              loses, duplicates, delays and reorders requests and responses
``device``               devices, with their processes and clocks
``faulty_vfs``           the device's file system: full, or without its unsynced writes
``users``                simulated users
``user_actions``         their planned actions
``templates``            empty databases, migrated once per process
=======================  ==========================================================================

``onceward_lab.checker`` decides whether a guarantee was violated.
"""

__all__: list[str] = []
