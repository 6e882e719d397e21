"""The real service on models of real shapes and random weights, and clients that keep up with it.

The repository has no weights; what a service does and how fast it is does not depend on them.
"""
