"""Pushing: trainers send versions of adapters with publish keys (docs/pushing.md).

routes.py            takes and checks a blob, waits as its sender wants, tells how far it is
push_pipeline.py     carries each to all replicas (serving/push_delivery.py, which calls
                     replica/pushed_adapters.py), tells the other gateways, then writes it down
pushed_versions.py   what is ready and not in the log, as every gateway shows it
"""
