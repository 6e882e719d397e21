"""What becomes of requests whose adapter was found damaged on the GPU (residency/image_checks.py).

Tokens that they got since the check before may be wrong, and their clients have read them. So they
fail, rather than go on from a wrong beginning to an answer that looks right, and the keys and
values that were computed with the adapter leave the prefix cache. Requests that have only waited go
on waiting for the adapter, which is loaded anew.
"""

from collections.abc import Mapping

from lorikeet_engine.errors import AdapterDamaged
from lorikeet_engine.scheduling.kv_cache import KVCache
from lorikeet_engine.scheduling.scheduler import Scheduler


def give_up_damaged(
    damaged: Mapping[str, AdapterDamaged], scheduler: Scheduler, cache: KVCache
) -> dict[str, AdapterDamaged]:
    """Use adapters no more that are damaged; the requests that must fail, by id.

    damaged: by digest. Once these requests have ended, nobody leases any of the adapters.
    """
    failed = dict[str, AdapterDamaged]()
    for digest, error in damaged.items():
        cache.forget_adapter(digest)
        for sequence in (*scheduler.running, *scheduler.waiting):
            if sequence.adapter is None or sequence.adapter.digest != digest:
                continue
            if sequence.kv.pages or sequence.output_length or sequence.kv.score_from:
                failed[sequence.request.request_id] = error
            else:
                sequence.release()
    return failed
