"""From requests to sequences: checks requests, cuts max_tokens, hands out seeds."""

import itertools
import secrets

from lorikeet_engine.errors import InvalidRequest
from lorikeet_engine.request import Request
from lorikeet_engine.sampling.grammar import Grammars, Matcher
from lorikeet_engine.scheduling.sequence import Sequence
from lorikeet_engine.telemetry.status import EngineInfo


class InputProcessor:
    """Refuses requests that could never run; makes a sequence for each choice of the others."""

    def __init__(self, info: EngineInfo, page_size: int, grammars: Grammars | None = None) -> None:
        self._info = info
        self._page_size = page_size
        self._grammars = grammars
        self._arrivals = itertools.count()

    def process(self, request: Request) -> list[Sequence]:
        """A sequence for each choice; max_tokens is cut to what the context leaves after prompts.

        On any thread; takes as long as its grammar takes to compile. Raises InvalidRequest for a
        prompt that fills the context, for token ids out of range, for a bad grammar.
        """
        self._check(request)
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self._info.eos_token_ids
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
        matcher = self._compile(sampling.grammar) if sampling.grammar is not None else None
        return [
            Sequence(
                request,
                choice,
                arrival=next(self._arrivals),
                max_tokens=min(sampling.max_tokens, self._info.max_context - len(prompt)),
                stop_ids=frozenset((*sampling.stop_token_ids, *eos)),
                seed=seed + choice,
                page_size=self._page_size,
                matcher=matcher.copy() if matcher else None,
            )
            for choice, prompt in enumerate(prompts)
        ]

    def _check(self, request: Request) -> None:
        context = self._info.max_context
        for prompt in request.prompts:
            if len(prompt) >= context:
                raise InvalidRequest(
                    f"a prompt of {len(prompt)} tokens: want at most {context - 1}, so that one "
                    f"token fits behind it in the context of {context}",
                    param="prompt",
                    code="context_length_exceeded",
                )
            self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", request.sampling.stop_token_ids)
        self._check_ids("logit_bias", tuple(token for token, _ in request.sampling.logit_bias))

    def _compile(self, grammar: str) -> Matcher:
        if self._grammars is None:
            raise InvalidRequest("this engine knows no grammars", param="grammar")
        return self._grammars.compile(grammar)

    def _check_ids(self, param: str, ids: tuple[int, ...]) -> None:
        last = self._info.vocab_size - 1
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise InvalidRequest(
                f"{param} has token ids from {min(ids)} to {max(ids)}: want 0 to {last}",
                param=param,
            )
