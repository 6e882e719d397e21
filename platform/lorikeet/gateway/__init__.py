"""The gateway: OpenAI's HTTP API for tenants, and an API of its own for admins. No Ray.

app.py                assembles the application from services.py and adds its middleware
generate.py           steps of a generate request, in order: GenerateEndpoint (schemas: apis/)
  auth.py             the key's tenant and the model's adapter, from catalog_view.py
    oidc_tokens.py    verification of an identity provider's tokens
  call_encoders.py    prompts as token ids, without blocking the event loop
  replica_response.py   the answer, passed on as it arrives, with observers
    client_connection.py   cancels the call when the client hangs up; keeps silent streams alive
routes/, admin/       all other routes of tenants and admins
audit.py              a record of each change that a key asks the admin API for
parity.py             parity proofs of registered and pushed versions, by a replica
pushing/              versions that trainers push: received, sent to all replicas, then recorded
vllm/, tinker/        endpoints of other servers that trainers call, off unless switched on
error_responses.py    every error as an HTTP response
listeners.py          the tenants' listener and the admins' listener
limit_sync.py         loop in which gateways agree on shares of limits

serving/deployments.py makes the gateway a deployment. The gateway reaches replicas only through
`EngineClient` (services.py).
"""
