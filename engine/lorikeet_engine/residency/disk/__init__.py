"""The disk tier: a folder of verified blobs and packed images that several processes may share.

`cache` fetches, pins and evicts files, `image_file` is the format of a packed image, `usage`
lists the folder, and `watcher` sees what other processes change in it.
"""
