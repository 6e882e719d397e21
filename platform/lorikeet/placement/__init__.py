"""Which adapters each replica keeps and prefetches, and how many replicas there are; no I/O.

`pinned_versions` reads the pins in force, `pin_placement` gives each its replicas, `pin_status`
says whether each is met, and `pin_dry_run` what one more would move. `prefetcher` keeps `demand`
from survey to survey and calls `prefetch_plan`, which fills the free room of each `tier_budget`.
`pressure` is the load of one replica, `scaling` turns it into a number of replicas. Callers: the
controller (`serving/controller.py`), the admin API, Serve's autoscaler and the simulator.
"""
