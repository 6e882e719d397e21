"""Placement of adapters on replicas and the number of replicas: pure computation, no I/O.

`pinned_versions` resolves the pins in force, `pin_placement` assigns replicas to each pin,
`pin_status` says whether each is met, and `pin_dry_run` computes the moves that one more pin would
cause. `prefetcher` keeps `demand` between surveys and calls `prefetch_plan`, which fills free bytes
of each tier. `learned_prompts` finds what an adapter's prompts begin with. `pressure` is the load
of one replica; `scaling` computes the number of replicas from all of them. Callers: the controller
(`serving/controller.py`), the admin API, and Serve's autoscaler.
"""
