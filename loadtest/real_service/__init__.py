"""The real service on models of real shapes with random weights, for benchmarks through HTTP.

The repository holds no weights; behaviour and speed of a service do not depend on them.
"""
