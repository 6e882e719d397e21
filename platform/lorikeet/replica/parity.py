"""Parity proof of an adapter on one replica: a trainer's tokens are scored, and a difference of
log-probabilities is explained by scoring them with variants of the adapter.
"""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lorikeet.errors import InvalidInput, StoreError
from lorikeet.parity.figures import Gap, GapCause, Parity, Verdict, joined, judge, rounding
from lorikeet.parity.probes import Probe
from lorikeet.protocol.parity import ParityTest
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format.variants import (
    Variant,
    VariantKind,
    outline,
    scaled,
    variants,
    write_variant,
)
from lorikeet_engine.errors import AdapterError, NotFinite
from lorikeet_engine.request import Request, SamplingParams
from lorikeet_engine.telemetry.status import EngineInfo

_SAMPLE_TOKENS = 2048
"""Number of tokens of the probes that are scored with the base model and with variants."""
_LEAST_SCORED = 32
"""Number of scored tokens below which a gap of the base model says nothing about rounding."""
_MAX_VARIANT_BYTES = 2**29
_TRY_S = 20.0
"""Seconds after which no further variant is tried."""
_ROUNDED_NATS = 0.25
"""Largest mean of |Δ| of the base model that rounding of its weights or activations may cause.

FP8 weights cause 0.01 to 0.05, 4 bits up to 0.2; another base model causes more.
"""
_FACTORS = (0.25, 0.5, 2.0, 4.0)
_REFINEMENTS = 5
_SAME_RATIO = 0.02

Fetch = Callable[[AdapterRef, Path], object]
"""Function that downloads an adapter's blob from the store to a file. Raises StoreError."""
Forget = Callable[[str], object]
"""Function that drops the transient adapter with this digest from the engine."""
Score = Callable[[Request], Awaitable[Sequence[Sequence[float]]]]
"""Function that runs a request and returns, for each of its prompts, the log-probabilities of the
tokens from the second to the last.
"""


class _Candidate(NamedTuple):
    """Tried hypothesis of why the replica's log-probabilities differ from the trainer's.

    reason: the hypothesis in words, with a remedy.
    scores: the replica's log-probabilities of the sample (the first probes) under the hypothesis.
    """

    cause: GapCause
    reason: str
    scores: np.ndarray


async def prove_parity(
    test: ParityTest,
    info: EngineInfo,
    blobs: Path,
    fetch: Fetch,
    lock: asyncio.Lock,
    score: Score,
    forget: Forget,
) -> Parity:
    """Score a trainer's probes with the served adapter, judge the difference and explain it.

    Probes are token sequences with the trainer's own log-probabilities. Variants are changed
    copies of the adapter, such as with another scaling, that may explain the difference.

    test: the adapter, the probes, and the bounds of an accepted difference.
    blobs: folder of the disk cache, where the adapter's blob lies and variants are written.
    fetch: downloads an adapter's blob from the store to a file.
    lock: lock that lets one proof at a time try variants.
    score: runs a request; returns the log-probabilities of each prompt's tokens from the second.
    forget: drops a variant from the engine once it is scored.

    Requests have no tenant, so that no tenant's usage counts their loads.

    Raises InvalidInput for probes that the engine cannot score, EngineError if a request fails.
    """
    return await _Proof(test, info, blobs, fetch, score, forget).run(lock)


class _Proof:
    def __init__(
        self,
        test: ParityTest,
        info: EngineInfo,
        blobs: Path,
        fetch: Fetch,
        score: Score,
        forget: Forget,
    ) -> None:
        self._test, self._info, self._blobs = test, info, blobs
        self._fetch, self._score, self._forget = fetch, score, forget
        self._probes = test.probes.probes
        longest = max(len(probe.token_ids) for probe in self._probes)
        if longest >= info.max_context:
            raise InvalidInput(
                f"probes: one has {longest} tokens, and the replica takes {info.max_context - 1}",
                param="probes",
            )
        vocabulary = max(info.vocab_size, test.adapter.vocabulary)
        if max(max(probe.token_ids) for probe in self._probes) >= vocabulary:
            raise InvalidInput(
                f"probes: a token id is not in the base model's vocabulary of {vocabulary}",
                param="probes",
            )
        self._sample = _sample(self._probes)
        # of the adapter's own tokens the base model knows nothing
        self._beyond_base = max(max(p.token_ids) for p in self._sample) >= info.vocab_size
        self._trained = joined([probe.logprobs for probe in self._sample])
        self._base: np.ndarray | None = None
        self._tries = 0

    async def run(self, lock: asyncio.Lock) -> Parity:
        trained_base = joined([probe.base_logprobs for probe in self._sample])
        knows_base = trained_base.size == self._trained.size >= _LEAST_SCORED
        knows_base = knows_base and not self._beyond_base
        if knows_base:
            all_scores, self._base = await asyncio.gather(
                self._scores(self._probes, self._test.adapter), self._scores(self._sample, None)
            )
        else:
            all_scores = await self._scores(self._probes, self._test.adapter)
        gap = Gap.of(all_scores, joined([probe.logprobs for probe in self._probes]))
        served = all_scores[: self._trained.size]
        here = Gap.of(served, self._trained)
        base, explained = None, None
        if knows_base and self._base is not None:
            base = Gap.of(self._base, trained_base)
            effect = float(np.abs(self._trained - trained_base).mean())
            explained = rounding(base, effect)
        bounds = self._test.bounds
        beyond = explained is not None and here.mean > explained
        verdict = judge(gap.mean, bounds, beyond_rounding=beyond)
        parity = Parity(
            verdict, all_scores.size, gap.mean, gap.max, gap.kl, base.mean if base else None
        )
        if verdict is Verdict.ACCEPTED:
            return parity
        noise = bounds.warn_above if explained is None else explained
        async with lock:
            cause, reason = await self._explain(served, here, base, noise)
        return replace(parity, cause=cause, reason=reason)

    async def _explain(
        self, served: np.ndarray, gap: Gap, base: Gap | None, noise: float
    ) -> tuple[GapCause, str]:
        """Return the cause of a gap that rounding does not explain, and the cause in words.

        served: the replica's log-probabilities of the sample (the first probes) with the served
            adapter.
        gap: their difference from the trainer's.
        base: the same difference of the base model alone; None if the trainer gave too few values.
        noise: mean of |Δ| (the absolute difference, nats) that rounding explains.
        """
        if self._beyond_base:
            return GapCause.UNKNOWN, _BEYOND_BASE
        if base is not None and base.mean >= gap.mean / 2:
            return self._of_base(base)
        if self._base is None:
            self._base = await self._scores(self._sample, None)
        facts = self._test.probes
        if self._gap(self._base) <= min(noise, gap.mean / 2):
            return GapCause.NO_ADAPTER, _NO_ADAPTER
        found = [_Candidate(GapCause.NO_ADAPTER, _NO_ADAPTER, self._base)]
        async with self._blob() as blob:
            if blob is not None:
                if lacking := set(facts.linears or ()) - set(outline(blob).linears):
                    return GapCause.MODULES, (
                        f"the file has no weights of {', '.join(sorted(lacking))}, which the "
                        "trainer adapted: save the adapter again, with all of its modules"
                    )
                if blob.stat().st_size <= _MAX_VARIANT_BYTES:
                    found += [each async for each in self._tried(blob, served)]
        best = min(found, key=lambda each: self._gap(each.scores))
        left = self._gap(best.scores)
        if left <= gap.mean / 2 and left <= max(noise, gap.mean / 4):
            return best.cause, best.reason
        if float(np.abs(served - self._base).mean()) <= min(noise, gap.mean / 4):
            return GapCause.VERSION, (
                "the registered adapter changes nothing, as before the first step of its training: "
                "register the trained weights"
            )
        if facts.digest == self._test.adapter.digest or (base is None and facts.digest is None):
            return GapCause.UNKNOWN, _UNKNOWN if base is None else _SAME_FILE
        return GapCause.VERSION, (
            "the trainer's log-probabilities are those of other weights: register the version that "
            "the probes were made with, or make the probes with this one"
        )

    def _of_base(self, base: Gap) -> tuple[GapCause, str]:
        """Return the cause, and the cause in words, of a gap that the base model has as well.

        base: the gap (difference from the trainer's log-probabilities) without the adapter.
        """
        info, trained = self._info, self._test.probes.dtype
        differs = f"the base model alone differs by {base.mean:.2g} nats"
        if base.mean <= _ROUNDED_NATS and info.quantization is not None:
            return GapCause.QUANTIZATION, (
                f"{differs}, since its weights are {info.quantization}: serve them as they were "
                "trained, or state a higher bound"
            )
        if base.mean <= _ROUNDED_NATS:
            return GapCause.PRECISION, (
                f"{differs}: the trainer computes in {trained or 'an unknown data type'}, the "
                f"replica in {info.dtype}: compute both in one data type, or state a higher bound"
            )
        named = self._test.probes.base_model
        return GapCause.BASE_MODEL, (
            f"{differs}: the trainer used another base model"
            f"{f', {named}' if named else ''}: register with --base-model, or serve that one"
        )

    @asynccontextmanager
    async def _blob(self) -> AsyncIterator[Path | None]:
        """Yield a file with the served adapter's blob for the time of the context; None if neither
        the disk cache nor the store has the blob.
        """
        ref = self._test.adapter
        file = self._blobs / f"{ref.digest}.{uuid.uuid4().hex}.part"
        try:
            try:
                os.link(self._blobs / ref.digest, file)
            except FileNotFoundError:  # evicted, since host or GPU hold the adapter
                await asyncio.to_thread(self._fetch, ref, file)
            yield file
        except StoreError:
            yield None
        finally:
            file.unlink(missing_ok=True)

    async def _tried(self, blob: Path, served: np.ndarray) -> AsyncIterator[_Candidate]:
        """Score the sample (the first probes) with changed copies of a blob; yield a candidate for
        each copy that the engine can load.

        served: the replica's log-probabilities of the sample with the served adapter.
        """
        due_s, facts = time.monotonic() + _TRY_S, self._test.probes
        for variant in variants(blob, facts.scaling):
            if time.monotonic() > due_s:
                return
            if (candidate := await self._candidate(blob, variant)) is not None:
                yield candidate
        if facts.scaling is None or facts.scaling != outline(blob).scaling:
            async for candidate in self._scaled(blob, served, due_s):
                yield candidate

    async def _scaled(
        self, blob: Path, served: np.ndarray, due_s: float
    ) -> AsyncIterator[_Candidate]:
        """Search for the scaling that fits the trainer's log-probabilities best.

        The best of a few factors is refined by the change of the log-probabilities that it causes:
        to first order, they change in proportion to the scaling.

        served: the replica's log-probabilities of the sample (the first probes) with the served
            adapter.
        due_s: time.monotonic() after which the search ends.
        """
        assert self._base is not None
        wanted = self._trained - self._base
        factor, best = 1.0, served
        for each in _FACTORS:
            if (candidate := await self._candidate(blob, scaled(blob, each))) is not None:
                yield candidate
                if self._gap(candidate.scores) < self._gap(best):
                    factor, best = each, candidate.scores
        for _ in range(_REFINEMENTS):
            effect = best - self._base
            size = float(effect @ effect)
            ratio = float(effect @ wanted) / size if size else 0.0
            if ratio <= 0 or abs(ratio - 1) < _SAME_RATIO or time.monotonic() > due_s:
                return
            factor *= ratio
            candidate = await self._candidate(blob, scaled(blob, factor))
            if candidate is None:
                return
            yield candidate
            best = candidate.scores

    async def _candidate(self, blob: Path, variant: Variant) -> _Candidate | None:
        scores = await self._scores_of(blob, variant)
        kind = GapCause(variant.kind.value)
        return None if scores is None else _Candidate(kind, _reason(variant), scores)

    async def _scores_of(self, blob: Path, variant: Variant) -> np.ndarray | None:
        """Return the log-probabilities of the sample (the first probes) with a changed copy of a
        blob; None if the copy is no adapter for this model.
        """
        adapter = self._test.adapter
        async with _written(blob, variant) as digest:
            name = f"{adapter.name} (variant)"
            changed = replace(adapter, name=name, digest=digest, transient=True)
            try:
                return await self._scores(self._sample, changed)
            except (AdapterError, NotFinite):
                return None
            finally:
                self._forget(digest)

    async def _scores(self, probes: Sequence[Probe], adapter: AdapterRef | None) -> np.ndarray:
        """Return the replica's log-probabilities of all probes' scored tokens (those for which the
        trainer gave one), concatenated.

        adapter: None for the base model alone.
        """
        self._tries += 1
        request = Request(
            f"{self._test.request_id}-parity-{self._tries}",
            tuple(tuple(probe.token_ids) for probe in probes),
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
            adapter=adapter,
            salt=self._test.request_id,  # no prefixes that others cached
        )
        found = await self._score(request)
        return joined([all_[-len(p.logprobs) :] for p, all_ in zip(probes, found, strict=True)])

    def _gap(self, scores: np.ndarray) -> float:
        return Gap.of(scores, self._trained).mean


_REMEDIES = {
    VariantKind.SCALING: "check lora_alpha, r and use_rslora in adapter_config.json",
    VariantKind.TRANSPOSED: "save lora_B as [d_out, rank]",
    VariantKind.MODULES: "leave these modules out, or let the trainer compute them",
}
_BEYOND_BASE = (
    "the probes have tokens that the base model lacks, so nothing can be compared with the base "
    "model: make probes without them"
)
_NO_ADAPTER = (
    "the trainer's log-probabilities are those of the base model: make the probes with the adapter "
    "enabled, after its training"
)
_UNKNOWN = (
    "no variant of the adapter explains the difference: the trainer used another base model or "
    "another version; probes that `lorikeet parity` makes tell which"
)
_SAME_FILE = (
    "no variant of the adapter explains the difference, although the probes were made with this "
    "file: compare the trainer's code of the adapted modules"
)


def _sample(probes: Sequence[Probe]) -> Sequence[Probe]:
    """Return the first probes, of at most _SAMPLE_TOKENS tokens together, but one at least."""
    tokens = np.cumsum([len(probe.token_ids) for probe in probes])
    return probes[: max(1, int(np.searchsorted(tokens, _SAMPLE_TOKENS, side="right")))]


def _reason(variant: Variant) -> str:
    return f"the trainer computed this adapter {variant.says}: {_REMEDIES[variant.kind]}"


@asynccontextmanager
async def _written(blob: Path, variant: Variant) -> AsyncIterator[str]:
    """Write a changed copy of a blob beside it for the time of the context; yield its digest.

    If the folder already has a file with that digest, such as another version of the adapter, that
    file is used and stays.
    """
    part = blob.parent / f"{blob.name}.{uuid.uuid4().hex}.part"
    try:
        digest = await asyncio.to_thread(write_variant, blob, variant, part)
        file = part.with_name(digest)
        if file.exists():
            yield digest
            return
        part.replace(file)
        try:
            yield digest
        finally:
            file.unlink(missing_ok=True)
    finally:
        part.unlink(missing_ok=True)
