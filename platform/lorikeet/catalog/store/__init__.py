"""Where bytes lie: one protocol, a folder or an S3 bucket behind it."""
