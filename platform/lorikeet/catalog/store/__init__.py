"""Where the catalog's bytes lie: one protocol, with a folder or an S3 bucket behind it.

object_store.py has the protocols `ObjectStore` and `PartStore`, and `open_store`; local.py and
s3.py implement both. parallel_download.py fetches large objects from S3, and gc_protection.py
keeps objects that are about to be named from being deleted as garbage.
"""
