"""The gateway: OpenAI's HTTP API for tenants, and an API of its own for admins. No Ray.

app.py               puts the application together from services.py, its middleware around it
generate.py          a generate request's walk: GenerateEndpoint
  auth.py            whose it is and which model it means, by catalog_view.py
  apis/              its body as a schema, which becomes a Call
  replica_response.py   the answer, passed on as it comes, with observers beside it
routes/, admin/      everything else that tenants and admins can ask
pushing/             versions that trainers push: taken, brought to all replicas, then recorded
limit_sync.py        the loop that agrees with other gateways on shares of limits

serving/deployments.py makes it a deployment; `EngineClient` is all that it knows of replicas.
"""
