"""vLLM's endpoints that trainers call, switched on by LORIKEET_LOAD_FROM (docs/training.md).

generate_request.py requests that continue token ids
requests.py         paths and bodies of other requests
routes.py           routes: loads and unloads of adapters, questions about the server, refusals of
                    updates of base weights
tokens.py           routes that convert prompts to token ids, and token ids to text
shared_adapter.py   adapter in its tenant's folder of the shared file system
"""
