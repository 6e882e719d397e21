"""A replica: one engine and the text around it. Prompts in, the client's bytes out. No Ray.

replica.py            Replica: a call's walk, and all that gateways and the controller may ask
request_builder.py    a call's request to the engine, and the room for its answer
prompts.py            chat templates and tokenizing
grammar.py, tool_grammar.py, thinking_grammar.py, grammar_sandbox.py   what an answer is held to
output_dispatcher.py  the engine's outputs, to each call's AnswerSender (answer_stream/)
metering.py           what is billed
status_feed.py        status updates for gateways
engine_process.py, engine_settings.py   what the engine is built from

serving/deployments.py makes it a deployment.
"""
