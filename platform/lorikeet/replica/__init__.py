"""A replica: one engine, with grammars before it and answers formatted behind it. No Ray.

replica.py            Replica: runs calls, hands them the engine's outputs, and answers gateways
                      and the controller
request_builder.py    the engine's request for a call, within the limits of one answer
grammar_sandbox.py    a child process that compiles each grammar before the engine does
grammar_matcher.py    ModelGrammars, which compiles a grammar and masks tokens in the engine
answer_sender.py      sends one growing answer (apis/answer.py) into its gateway's stream
slot_metering.py      usage of GPU slots and loads, by tenant
status_feed.py        status updates for gateways
pushed_adapters.py    adapters that training pushes to the host memory
smoke.py              smoke tests of adapters
parity.py             parity proofs of adapters
base_copies.py        checks of base-model matrices that adapters carry along
engine_process.py, engine_settings.py   the engine's construction in its own process

serving/deployments.py makes it a deployment.
"""
