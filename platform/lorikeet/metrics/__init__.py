"""Prometheus metrics of each process, joined into one page. docs/metrics.md lists all metrics.

replica.py, gateway.py, controller.py  define the metrics of the three kinds of process
metric_builders.py                     builds gauges, counters and histograms from finished numbers
named_counters.py                      counts by tenant or adapter, with a limited number of series
exposition.py                          writes a process's part of the page, and joins the parts

The gateway's route `/metrics` (gateway/routes/metrics.py) collects the parts of all processes.
"""
