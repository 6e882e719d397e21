"""Which replica a request goes to; no I/O, no Ray.

`fleet` is what one gateway knows of one base model's replicas and what it asks for an order: each
replica is a `tracked_replica`, fed by a `status_update`, answers and own sends; `locations` says
which replicas hold an adapter, and which have computed a prompt's beginning. `ranking` takes a
sample of candidates and sorts them by expected cost, by coefficients that `median_costs` makes of
what replicas measured. Callers: Serve's request router (`serving/request_router.py`), and the
simulator, which calls `ranking` itself.
"""
