"""Simulated fleet under traffic, with the product's routing and eviction beside other routers."""
