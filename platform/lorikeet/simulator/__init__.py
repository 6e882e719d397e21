"""Simulated fleet under traffic, request by request, with the product's own routing and eviction.

workload_models.py  popularity, arrivals, lengths, recorded traces
traffic.py          a fleet's setup, and requests
demand.py           tenants, adapters and rates, from which requests are drawn
fleet.py            the event loop, and the product's routing over simulated replicas
replica.py          one replica: its batch, prompts and loads
memory.py           a replica's adapters on GPU, host and disk
forecast.py         expected latencies of N replicas, against goals
capacity.py         the fewest replicas that meet the goals

`lorikeet capacity` runs it, and load programs draw from its workload models. Importing this loads
no torch and no Ray.
"""
