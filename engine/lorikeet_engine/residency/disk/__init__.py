"""The disk tier: a folder of verified blobs and packed images that several processes may share.

`cache` fetches, pins and evicts files, `image_file` is the format of a packed image, `usage`
lists the folder, `watcher` sees what other processes change in it, and `full_disk` stands in for
a disk that takes no more.
"""
