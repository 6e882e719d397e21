"""The disk tier: a folder of verified blobs and packed images that several processes may share.

`cache` fetches and evicts files, `pinned_files` locks those that are pinned, `image_file` is the
format of a packed image, `image_writer` writes it behind the loads, `usage` knows what the folder
holds, `incoming_blobs` packs blobs that are on their way into it, `watcher` does on a thread of its
own what would let the engine's thread wait for a file system, and `full_disk` stands in for a disk
that takes no more.
"""
