"""Messages between gateways, replicas and the controller. No Ray, no FastAPI, no torch.

messages.py             a gateway's Call to a replica, and the items of its answer
response_stream.py      the stream of all answers from a replica to a gateway, both ends, and each
                        answer's log, from which another replica goes on
status_update.py        a replica's load and adapters' tiers, for gateways
replica_report.py       a replica's full status, for the controller and admins
placement_decision.py   pins and prefetches of a replica, from the controller
pushing.py              a pushed adapter's transfer and hold, from a gateway to replicas
peers.py                questions of gateways to each other

All messages are pickled: dataclasses and named tuples of plain values.
"""
