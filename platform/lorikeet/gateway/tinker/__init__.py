"""Sampling side of Tinker's API, switched on by LORIKEET_TINKER (docs/training.md).

requests.py         paths and bodies
routes.py           samples, answers questions about models, refuses training
sample_futures.py   samples that run or have ended, until their clients have fetched them
sample_response.py  converts a completion to the protobuf message that the client reads
"""
