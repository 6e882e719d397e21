"""Ray Serve deployments of the platform. No other folder imports Ray.

start.py                   checks a start by `serve run`, and gives it an exit status
deployments.py             defines the three deployments: engines, controller, gateway
In a gateway:
  engine_client.py         sends calls to replicas and streams their answers
  request_router.py        ranks the replicas for each call, as Serve's request router
  status_subscriber.py     updates the Fleet (routing/fleet.py) from replicas' status
  push_delivery.py         sends a pushed adapter to all replicas
  peers.py                 asks the other gateways
  freed_memory.py          returns freed memory to the system
In the controller:
  controller.py            reads pins and reports, computes the placement plan
  replica_reconciler.py    sends the replicas of one base model their part of the plan
In Serve's own processes:
  autoscaling.py           scaling policy, called by Serve's controller
  proxy_middleware.py      ASGI middleware of Serve's HTTP proxies
Everywhere:
  replica_calls.py         broadcasts to replicas, and streams kept open from each
"""
