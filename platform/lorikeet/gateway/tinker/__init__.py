"""Sampling side of Tinker's API, switched on by LORIKEET_TINKER (docs/training.md).

requests.py         paths and bodies of requests
routes.py           routes: sampling, questions about models, refusals of training
sample_futures.py   samples that run in the background, and their outcomes
sample_response.py  conversion of a completion to the protobuf message that the client reads
"""
