"""A fleet under traffic, request by request, with the product's own routing and eviction.

Importing this loads no torch and no Ray.
"""
