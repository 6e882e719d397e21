"""Entry of requests to the engine: checks them, makes sequences of them, and queues the sequences.

Engine.submit calls InputProcessor and then RequestQueue.submit on the caller's thread. Before its
next step, the engine's thread takes the sequences and gives them to the Scheduler (scheduler.py).
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

from lorikeet_engine.errors import EngineClosed, EngineError, InvalidRequest
from lorikeet_engine.request import Failed, Output, Pooled, PromptLogprobs, Request, Tokens
from lorikeet_engine.sampling.grammar import Grammars, Matcher
from lorikeet_engine.sampling.grammar_worker import GrammarWorker
from lorikeet_engine.scheduling.kv_cache import PageKeys
from lorikeet_engine.scheduling.sequence import Sequence, SequenceStatus
from lorikeet_engine.telemetry.status import EngineInfo

log = logging.getLogger(__name__)


class InputProcessor:
    """Refuses requests that could never run; makes a sequence of each choice of a valid request.

    grammars: compiler of grammars; None: requests with a grammar are refused.
    """

    def __init__(self, info: EngineInfo, page_size: int, grammars: Grammars | None) -> None:
        self._info = info
        self._page_size = page_size
        self._grammars = grammars
        self._compiler = GrammarWorker(self._compile)
        self._arrivals = itertools.count()

    def process(self, request: Request) -> list[Sequence]:
        """Make a sequence of each choice of a request that has not ended on another engine.

        A choice's max_tokens is cut to the context that its prompt leaves. May be called on any
        thread, which hashes the prompts; another thread compiles the grammar.

        Raises InvalidRequest for a prompt that fills the context, for token ids out of range, for
        output tokens of another engine (Request.made) that leave none to sample, and for a request
        to generate if the base model has no lm_head. Raises
        EngineOverloaded if too many grammars of the tenant are in use or wait to be compiled.
        """
        self._check(request)
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self._info.eos_token_ids
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        prompts = [(prompt, self._page_keys(request, prompt)) for prompt in request.prompts]
        compiled = self._compiled(sampling.grammar, request.scheduling.tenant)
        choices = [pair for pair in prompts for _ in range(request.n)]
        made = request.made or (None,) * len(choices)
        return [
            Sequence(
                request,
                choice,
                arrival=next(self._arrivals),
                max_tokens=self._max_tokens(request, prompt),
                stop_ids=frozenset((*sampling.stop_token_ids, *eos)),
                seed=seed + choice,
                prompt_keys=keys,
                compiled=compiled,
                made=made[choice],
            )
            for choice, (prompt, keys) in enumerate(choices)
            if not request.made or made[choice] is not None
        ]

    def close(self) -> None:
        """Stop the thread that compiles grammars."""
        self._compiler.close()

    def _page_keys(self, request: Request, prompt: tuple[int, ...]) -> PageKeys:
        adapter, salt = request.adapter, request.salt
        active_from = None if adapter is None else adapter.active_from(prompt)
        if adapter is None or active_from is None:
            return PageKeys(prompt, self._page_size, salt)
        return PageKeys(prompt, self._page_size, salt, adapter.digest, active_from)

    def _check(self, request: Request) -> None:
        if request.pools is None and not self._info.generates:
            raise InvalidRequest(
                "the base model has no lm_head and generates nothing: ask /v1/embeddings, or serve "
                "a checkpoint that AutoModelForCausalLM saved",
                param="model",
            )
        context = self._info.max_context
        for prompt in request.prompts:
            if len(prompt) >= context:
                raise InvalidRequest(
                    # OpenAI's words, by which clients such as LiteLLM recognise this error
                    f"This model's maximum context length is {context} tokens. However, the prompt "
                    f"has {len(prompt)}, and an answer needs one more: shorten the prompt",
                    param="prompt",
                    code="context_length_exceeded",
                )
            self._check_ids("prompt", prompt, request)
        for choice, made in enumerate(request.made):
            self._check_ids("made", made or (), request)
            most = self._max_tokens(request, request.prompts[choice // request.n])
            if made is not None and len(made) >= most:
                raise InvalidRequest(
                    f"{len(made)} tokens are made of an answer of at most {most}: raise max_tokens",
                    param="max_tokens",
                )
        sampling = request.sampling
        self._check_ids("stop_token_ids", sampling.stop_token_ids, request)
        self._check_ids("logit_bias", tuple(token for token, _ in sampling.logit_bias), request)

    def _max_tokens(self, request: Request, prompt: tuple[int, ...]) -> int:
        return min(request.sampling.max_tokens, self._info.max_context - len(prompt))

    def _compiled(self, grammar: str | None, tenant: str) -> "Future[Matcher] | None":
        if grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("this engine knows no grammars", param="grammar")
        return self._compiler.result(grammar, tenant)

    def _compile(self, grammar: str) -> Matcher:
        assert self._grammars is not None
        try:
            return self._grammars.compile(grammar)
        except EngineError:
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            log.exception("grammar_not_compiled")
            raise InvalidRequest("the grammar cannot be compiled", param="grammar") from error

    def _check_ids(self, param: str, ids: tuple[int, ...], request: Request) -> None:
        members = () if request.adapter is None else request.adapter.members
        last = max([self._info.vocab_size, *(each.vocabulary for each in members)]) - 1
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise InvalidRequest(
                f"{param} has token ids from {min(ids)} to {max(ids)}: want 0 to {last}",
                param=param,
            )


class Abort(NamedTuple):
    """Order to abort a request or one of its choices.

    choice: index of the choice; None for all choices.
    """

    request_id: str
    choice: int | None


class TakenRequests(NamedTuple):
    """Requests and aborts that the engine's thread takes from the queue before a step.

    submitted: choices to add to the scheduler.
    compiling: choices that remain in the queue until their grammars are compiled.
    aborts: requests and choices to abort.
    """

    submitted: list[Sequence]
    compiling: list[Sequence]
    aborts: set[Abort]

    def is_aborted(self, sequence: Sequence) -> bool:
        """Whether a sequence is to be aborted."""
        request_id = sequence.request.request_id
        return (request_id, None) in self.aborts or (request_id, sequence.choice) in self.aborts


class RequestQueue:
    """Queue between the threads that call an engine and the thread that runs its steps.

    Thread-safe, but outputs are added and taken by the engine's thread only.

    open_choices: request id → number of the request's choices that have not ended.
    """

    def __init__(self) -> None:
        self.open_choices: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._submitted: list[Sequence] = []
        self._aborts: list[Abort] = []
        self._outputs: list[Output] = []

    @property
    def closed(self) -> bool:
        """Whether the queue accepts no more requests."""
        return self._closed

    @property
    def submitted(self) -> list[Sequence]:
        """Choices that the engine's thread has not taken yet."""
        return list(self._submitted)

    def submit(self, request_id: str, sequences: list[Sequence]) -> None:
        """Add all choices of a request to the queue.

        Raises EngineClosed if the queue was closed, and InvalidRequest if a request with the same
        id has not ended.
        """
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed: send the request to another replica")
            if request_id in self.open_choices:
                raise InvalidRequest(
                    f"request_id={request_id!r} is in flight: want a new one", param="request_id"
                )
            self.open_choices[request_id] = len(sequences)
            # an abort still queued was for an earlier request of the same id
            self._aborts = [abort for abort in self._aborts if abort.request_id != request_id]
            self._submitted += sequences

    def abort(self, request_id: str, choice: int | None) -> None:
        """Queue an abort of a request; do nothing if the request has ended.

        choice: index of the choice to abort; None for all choices.
        """
        with self._lock:
            if request_id in self.open_choices:
                self._aborts.append(Abort(request_id, choice))

    def take(self) -> TakenRequests:
        """Take the choices submitted and the aborts requested since the last call.

        A choice stays in the queue until its grammar is compiled; if compiling fails, the request
        fails. Choices in the queue that are to be aborted are removed, and not returned.
        """
        aborted: list[Sequence] = []
        with self._lock:
            aborts, self._aborts = set(self._aborts), []
            taken = TakenRequests([], [], aborts)
            for sequence in self._submitted:
                if taken.is_aborted(sequence):
                    aborted.append(sequence)
                elif sequence.compiled is None or sequence.compiled.done():
                    taken.submitted.append(sequence)
                else:
                    taken.compiling.append(sequence)
            self._submitted = list(taken.compiling)
        for sequence in aborted:
            sequence.status = SequenceStatus.FINISHED
            self.end_choice(sequence.request.request_id)
        errors: dict[str, EngineError] = {}
        for sequence in taken.submitted:
            if error := _set_matcher(sequence):
                errors[sequence.request.request_id] = error
        for request_id, error in errors.items():
            self.fail(request_id, error)
        sound = [s for s in taken.submitted if s.request.request_id not in errors]
        return taken._replace(submitted=sound)

    def end_choice(self, request_id: str) -> None:
        """Record that one choice of a request has ended."""
        with self._lock:
            left = self.open_choices.get(request_id, 0) - 1
            if left > 0:
                self.open_choices[request_id] = left
            else:
                self.open_choices.pop(request_id, None)

    def add_output(self, output: Tokens) -> None:
        """Keep new tokens of a choice until `take_outputs` returns them.

        If they are the choice's last tokens, record that the choice has ended.
        """
        self._outputs.append(output)
        if output.finish is not None:
            self.end_choice(output.request_id)

    def add_scores(self, outputs: Iterable[PromptLogprobs | Pooled]) -> None:
        """Keep scores of prompts until `take_outputs` returns them."""
        self._outputs += outputs

    def fail(self, request_id: str, error: EngineError) -> None:
        """End a request with an error; remove its choices that are still in the queue."""
        with self._lock:
            self.open_choices.pop(request_id, None)
            kept = list[Sequence]()
            for sequence in self._submitted:
                if sequence.request.request_id == request_id:
                    sequence.status = SequenceStatus.FINISHED
                else:
                    kept.append(sequence)
            self._submitted = kept
        self._outputs.append(Failed(request_id, error))

    def fail_all(self, error: EngineError) -> None:
        """End all requests with an error."""
        with self._lock:
            ids = list(self.open_choices)
            self.open_choices.clear()
            self._submitted.clear()
        self._outputs += [Failed(request_id, error) for request_id in ids]

    def take_outputs(self) -> list[Output]:
        """Return the outputs kept since the last call, in order.

        After a step that was interrupted by an error, the outputs that it had made are included.
        """
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> bool:
        """Accept no more requests; return False if the queue was closed before."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        return not was_closed


def _set_matcher(sequence: Sequence) -> EngineError | None:
    """Give a sequence its own copy of its compiled grammar, if it has one, which accepts the
    output that another engine has made.

    Returns the error if the grammar could not be compiled or does not accept the output. Compiling
    must have ended before.
    """
    if sequence.compiled is None:
        return None
    if error := sequence.compiled.exception():
        assert isinstance(error, EngineError), "the compiler raises no other"
        return error
    try:
        sequence.matcher = sequence.compiled.result().copy()
        for token in sequence.tokens[sequence.prompt_length :]:
            sequence.matcher.accept(token)
    except InvalidRequest as error:
        return error
    except BaseException:  # a panic in Rust is no Exception
        log.exception("grammar_not_copied")
        return InvalidRequest("the grammar cannot be compiled", param="grammar")
    return None
