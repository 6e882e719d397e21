"""Prompts of adapters, pinned or learned, whose KV pages a replica computes before users ask.

Each prompt is computed once by a request in the background. The engine keeps its pages in host
memory if it has such memory, else in the prefix cache, where they may be evicted. A failed prompt
is tried again. A pinned prompt is rendered anew every hour, as its chat template may write the
date.

Prompts that were learned from traffic come after pinned ones, and are computed once. Their pages
are ordinary ones of the prefix cache, which may be evicted.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial

from lorikeet.errors import LorikeetError
from lorikeet.logs import log_unexpected
from lorikeet.protocol.messages import TokenIds
from lorikeet.protocol.placement_decision import LearnedPrompt, PinnedPrompt, PinTarget
from lorikeet.text.adapter_templates import AdapterTemplates
from lorikeet.text.prompts import MAX_OWN_TOKENIZERS, PromptEncoder
from lorikeet_engine.errors import EngineClosed, EngineError
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Request, SamplingParams, SchedulingParams

log = logging.getLogger(__name__)

_CHECK_S = 30.0
_RENDER_S = 3600.0


@dataclass(slots=True)
class _Progress:
    """Progress of one prompt.

    computed: hash of the tokens that were computed last; None before.
    rendered_s: monotonic time at which the prompt was rendered last.
    failure: reason why the last computation failed; "" before the first ends, None if it succeeded.
    """

    computed: int | None = None
    rendered_s: float = 0.0
    failure: str | None = ""


class PinnedPrompts:
    """Computes the pinned and learned prompts of one replica, one after the other. For one event
    loop.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        engine: EngineProcessClient,
        run: Callable[[Request], Awaitable[object]],
    ) -> None:
        """Begin without prompts, and without a task.

        encoder: encoder of the base model's prompts.
        run: runs a request of the engine to its end.
        """
        self._engine, self._run = engine, run
        self._with_tokenizer = lru_cache(MAX_OWN_TOKENIZERS)(encoder.with_tokenizer)
        self._wanted: Mapping[str, PinnedPrompt | LearnedPrompt] = {}
        self._pinned: tuple[str, ...] = ()
        self._progress: dict[str, _Progress] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._templates: AdapterTemplates | None = None

    def update(self, targets: Iterable[PinTarget], learned: Iterable[LearnedPrompt] = ()) -> None:
        """Compute the prompts of these pins, and then those learned, in their order; forget others.

        A prompt that is wanted again within the hour is not computed again.
        """
        pinned = {prompt.name: prompt for target in targets for prompt in target.prompts}
        wanted: dict[str, PinnedPrompt | LearnedPrompt] = {**pinned}
        wanted |= {prompt.name: prompt for prompt in learned}
        if tuple(pinned) == self._pinned and wanted.keys() == self._wanted.keys():
            return
        self._wanted, self._pinned = wanted, tuple(pinned)
        since_s = time.monotonic() - _RENDER_S
        recent = {n: each for n, each in self._progress.items() if each.rendered_s > since_s}
        self._progress = recent | {n: self._progress.get(n) or _Progress() for n in wanted}
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_computed())

    def progress(self) -> Mapping[str, str | None]:
        """Return, by name, None for a pinned prompt that is computed, "" for one that is not yet,
        else the reason why its computation failed.
        """
        return {name: self._progress[name].failure for name in self._pinned}

    def close(self) -> None:
        """Compute no more prompts. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
        if self._templates is not None:
            self._templates.close()

    async def _keep_computed(self) -> None:
        """Compute the wanted prompts, and those whose pages are lost, until the engine ends."""
        with suppress(EngineClosed):
            while True:
                self._changed.clear()
                kept = await asyncio.wrap_future(self._engine.keep_prompts(self._pinned))
                for name, prompt in self._wanted.items():
                    is_kept = kept is None or name in kept or name not in self._pinned
                    await self._compute(prompt, is_kept=is_kept)
                    if self._changed.is_set():
                        break
                await _wait(self._changed, _CHECK_S if self._wanted else None)

    async def _compute(self, prompt: PinnedPrompt | LearnedPrompt, *, is_kept: bool) -> None:
        """Compute a prompt unless its pages are kept and it was rendered within the last hour.

        is_kept: whether the engine still keeps the prompt's pages; True, too, if it has no host
            memory for them, or if the prompt was learned.
        """
        progress, is_pinned = self._progress[prompt.name], isinstance(prompt, PinnedPrompt)
        failed = "pinned_prompt_failed" if is_pinned else "learned_prompt_failed"
        is_done = progress.failure is None and is_kept
        if is_done and time.monotonic() - progress.rendered_s < _RENDER_S:
            return
        try:
            if isinstance(prompt, LearnedPrompt):
                tokens = tuple(array("i", prompt.tokens))
            else:
                tokens = tuple(await self._render(prompt))
            progress.rendered_s = time.monotonic()
            if not (is_done and hash(tokens) == progress.computed):
                await self._run(_request(prompt, tokens, prompt.name if is_pinned else ""))
                progress.computed = hash(tokens)
            progress.failure = None
        except EngineClosed:
            raise
        except (EngineError, LorikeetError) as error:
            if progress.failure != error.message:
                facts = {"adapter": str(prompt.ref), "error": error.message}
                log.warning(failed, extra=facts)
            progress.failure = error.message
        except Exception as error:
            log_unexpected(failed, prompt.name, error)
            progress.failure = "the replica failed to compute it"

    async def _render(self, prompt: PinnedPrompt) -> TokenIds:
        context, template = self._engine.info.max_context, prompt.defaults.chat_template

        def encode(encoder: PromptEncoder) -> TokenIds:
            return encoder.encode_system_prompt(prompt.defaults, context)

        encoder = await asyncio.to_thread(self._with_tokenizer, prompt.defaults.tokenizer)
        if template is None:
            return await asyncio.to_thread(partial(encode, encoder))
        if self._templates is None:
            self._templates = AdapterTemplates()
        return await self._templates.run(prompt.ref.tenant, encoder, template, encode)


def _request(prompt: PinnedPrompt | LearnedPrompt, tokens: tuple[int, ...], keeps: str) -> Request:
    """Return the request that computes a prompt and generates one token.

    tokens: the rendered prompt.
    keeps: name under which the engine keeps the pages; "": they are ordinary ones.
    """
    return Request(
        f"prompt {prompt.name}",
        (tokens,),
        SamplingParams(max_tokens=1, temperature=0.0),
        adapter=prompt.ref,
        salt=prompt.ref.tenant,
        scheduling=SchedulingParams(tenant=prompt.ref.tenant, background=True),
        keeps=keeps,
    )


async def _wait(event: asyncio.Event, within_s: float | None) -> None:
    """Wait until an event is set, at most `within_s` seconds; None: without a limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
