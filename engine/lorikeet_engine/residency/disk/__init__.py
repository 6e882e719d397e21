"""The disk tier: a folder of verified blobs and packed images that several processes may share."""
