"""A fleet under traffic, request by request, with the product's own routing and eviction.

`traffic` and `demand` say what is asked for, `fleet` runs the events, `replica` models one replica
(its prompts in a `fair_queue`, its adapters in `memory`), and `router` calls the product's own
routing. `capacity` searches for the fewest replicas that meet a demand's goals, with `forecast` for
each number and `feasibility` for goals that none can meet. Callers: `lorikeet capacity` and
`loadtest/simulator`. Importing this loads no torch and no Ray.
"""
