"""What gateways, replicas and the controller send each other. No Ray, no FastAPI, no torch.

messages.py             a gateway's Call to a replica, and the items of its answer
replica_report.py       what a replica tells gateways and the controller of itself
placement_decision.py   what the controller tells a replica
peers.py                what gateways ask each other

All of it is pickled: dataclasses and named tuples of plain values.
"""
