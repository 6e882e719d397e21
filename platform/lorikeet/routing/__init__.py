"""Choice of a replica for each request. No I/O, no Ray.

fleet.py              the replicas of one base model as one gateway knows them
  tracked_replica.py  one replica: last status, and the requests that this gateway sent since
  locations.py        replicas that hold an adapter, or have computed a prompt's prefix
ranking.py            expected cost of a request at a replica, and the order of replicas by cost
median_costs.py       cost coefficients for ranking, from replicas' measurements

The seconds of a step and of an adapter load come from `StepCosts` and `LoadCosts` in
`lorikeet_engine/costs.py`, which engines, placement and simulator use too.

Callers: Serve's request router (serving/request_router.py) asks the fleet; the simulator calls
`ranking` itself.
"""
