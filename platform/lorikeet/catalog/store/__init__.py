"""Object storage of the catalog: one protocol, implemented by a local folder and by an S3 bucket.

object_store.py: the protocols `ObjectStore` and `PartStore` (multipart uploads), and `open_store`.
local.py, s3.py: the two implementations.
parallel_download.py: download of a large object in parallel ranges.
timed_session.py: HTTP session for S3 that gives up answers that arrive too slowly.
conditional_writes.py: check that a store honours conditional writes.
gc_protection.py: protection of objects that no record names yet from garbage collection.
"""
