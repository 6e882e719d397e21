"""The disk tier: a folder of verified blobs and packed images, shared by several processes.

`cache` fetches, pins and evicts files, and `index` lists them. `image_file` is the format of a
packed image, which is written after a load. `incoming_blobs` packs blobs that another process is
still writing. `watcher` calls the file system on a thread of its own, so that the engine's thread
never waits for a disk.
"""
