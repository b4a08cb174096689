"""Mutation tests of the simulation: bugs are planted in the real code, and it must find each.

=====================  ==========================================================================
``planting``           replaces attributes of the real code while a ``with`` block lasts
``outbox_bugs``        bugs of the outbox: queue, drain, clock
``outbox_batch_bugs``  bugs of the outbox when it sends batches
``response_bugs``      bugs of the outbox about versions, refusals, outages and foreign responses
``hold_bugs``          bugs of the outbox about holds: while a server is down, and after it
``server_bugs``        bugs of the server and of the store of idempotency records
``batch_bugs``         bugs of the server's batches: chunks, lanes, placeholders
``sequence_bugs``      bugs of strict sequences, on the server and in the outbox
``job_bugs``           bugs of the jobs: store, executor, relay
``operator_bugs``      bugs of what operators do: paused queues and cancelled jobs
``runner``             runs seeds with one bug at a time until a guarantee is violated
=====================  ==========================================================================

``onceward simulate --planted`` runs all of them. The library does not contain them.
"""

__all__: list[str] = []
