"""Scheduling: requests enter here, and every step of engine.py gets its plan here.

A request passes these files in order:

request_queue   checks the request, makes a Sequence (sequence.py) of each choice, and hands the
                sequences to the engine's thread.
deadlines       ends requests that have waited too long; refuses those that would.
scheduler       plans a step under a token budget: preempt, decode, prefill.
waiting_queue   orders the waiting sequences fairly between tenants, by the virtual token counters
                of fairness.
own_order       orders one tenant's sequences: by arrival and shortest first, in turn.
admission       leases adapters and decides which waiting sequences may begin.
kv_cache        finds cached prefixes and allocates KV pages: page_pool owns the pages, page_needs
                counts the pages that a sequence needs.
preemption      chooses running sequences that give up their slots and pages to another tenant.
                Their tokens are computed again later.
step_budget     bounds the time of a step's prompt tokens, and its ranks for the inter-token goal.
prompt_lookup   predicts tokens of an answer that repeats its prompt or itself, or that resembles
                its adapter's recent_answers.
draft_budget    chooses the predicted tokens that a step verifies.
forced_budget   bounds the tokens that grammars force in steps shared with other requests.
step_counters   counts steps and tokens.

A request that never waits meets only request_queue, scheduler, waiting_queue, admission,
step_budget and kv_cache.
"""
