"""Prometheus metrics of each process, joined into one page; docs/metrics.md lists them.

`replica`, `gateway` and `controller` define the metrics of the three kinds of process, made with
`metric_builders`. `exposition` writes a process's part of the page and joins the parts; the
gateway's route `/metrics` (`gateway/routes/metrics.py`) asks all processes for theirs.
`named_counters` limits how many tenants and adapters have series of their own, and counts by them.
"""
