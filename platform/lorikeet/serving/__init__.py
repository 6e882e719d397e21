"""The only code that knows Ray Serve.

`deployments` makes Serve's three kinds of deployment. In a gateway, `listeners` opens its two HTTP
listeners, `engine_client` sends calls to replicas and reads their answers over `replica_calls`,
`request_router` orders replicas for each call with the process's one Fleet (`fleet_registry`),
which `status_subscriber` keeps up to date, and `peers` asks the other gateways. `controller` reads
pins and reports, and a `replica_reconciler` for each base model sends replicas their decisions.
`autoscaling` is the policy that Serve's own controller calls; `proxy_middleware` runs in its
proxies. `replica_calls` and `malloc_trim` serve the others.
"""
