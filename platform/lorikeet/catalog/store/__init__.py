"""Where the catalog's bytes lie: one protocol, with a folder or an S3 bucket behind it.

object_store.py is the protocol `ObjectStore` and `open_store`; local.py and s3.py implement it.
multipart.py is the protocol of uploads in parts, with local_multipart.py and s3_multipart.py.
parallel_download.py fetches large objects from S3, s3_errors.py explains S3's refusals, and
gc_protection.py keeps objects that are about to be named from being deleted as garbage.
"""
