"""Decides what each step computes; called by engine.py. A request passes it in this order:

request_queue checks the request, makes a Sequence (sequence.py) of each choice and hands them to
the engine's thread; deadlines ends those that wait too long and refuses those that
would. The scheduler plans a step under a token budget: decodes first, then chunks of prompts, which
run already or may begin. admission keeps the sequences that wait in their tenants' turns, which go
by virtual token counters (fairness), and decides which may begin; kv_cache allocates KV
pages (page_pool), as many as page_needs says, and finds cached prefixes. Where pages are too few,
the youngest sequence of the tenant furthest ahead is preempted, and computed again later; so it is
for a tenant whose turn finds no place or pages, as far as preemption says. With an
inter-token goal, step_budget bounds the ranks and prompt tokens of steps; forced_budget bounds the
tokens that grammars force beside others. step_counters counts steps and tokens.

A request that waits for nothing, on an engine without an inter-token goal, is decided on by
request_queue, scheduler, admission and kv_cache alone.
"""
