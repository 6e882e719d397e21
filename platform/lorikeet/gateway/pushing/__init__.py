"""Pushing: trainers send new versions of adapters, authorized by publish keys (docs/pushing.md).

routes.py            receives and checks a blob (the adapter's file), waits as the client asks,
                     shows the push's state
push_pipeline.py     delivers each push to all replicas (serving/push_delivery.py, which calls
                     replica/pushed_adapters.py), announces it to all gateways, then records it
pushed_versions.py   versions that are ready but not yet in the catalog's log, shown alike by every
                     gateway
push_folders.py      temporary folders for pushed blobs
"""
