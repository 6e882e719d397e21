"""A fleet under traffic, request by request, with the product's own routing and eviction."""
