"""vLLM's endpoints that trainers call, switched on by LORIKEET_LOAD_FROM (docs/training.md).

generate_request.py requests for token ids, of SkyRL's rollouts
requests.py         paths and bodies
routes.py           loads and unloads adapters, answers questions about the server, refuses updates
                    of base weights
tokens.py           converts prompts to token ids, and token ids to text
shared_adapter.py   copies an adapter out of its tenant's folder of the shared file system
"""
