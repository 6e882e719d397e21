"""Token streams: the base model's corpus, and an adapter's batches."""

from concurrent.futures import ProcessPoolExecutor
from random import Random

import numpy as np
import torch

from demo.notation import page, records
from demo.sentences import story
from demo.smalltalk import conversation, opening
from demo.tasks import Task
from demo.tokenizer import BOS, EOS, PAD, ROLES, SPECIALS, build_tokenizer, chat_text

EOS_ID, PAD_ID, ASSISTANT_ID = (SPECIALS.index(t) for t in (EOS, PAD, ROLES["assistant"]))
IGNORED = -100  # a label that the loss leaves out
_CHUNK_DOCUMENTS = 4000


def document(rng: Random) -> str:
    """One training text of the base model: a chat, a story, or a page of the notebook."""
    kind = rng.random()
    if kind < 0.3:
        return chat_text(conversation(rng))
    if kind < 0.38:
        return f"{BOS}{story(rng)}{EOS}"
    return f"{BOS}{(records if kind < 0.5 else page)(rng)}{EOS}"


def corpus(tokens: int, seed: int, processes: int) -> torch.Tensor:
    """[≥ tokens] int16: documents end to end, made by `processes` processes."""
    chunks: list[np.ndarray] = []
    with ProcessPoolExecutor(processes) as pool:
        while (made := sum(map(len, chunks))) < tokens:
            share = 1 if not chunks else -(-(tokens - made) // (made // len(chunks)))
            first = seed + len(chunks)
            chunks += pool.map(_chunk, range(first, first + max(share, processes)))
    return torch.from_numpy(np.concatenate(chunks))


def windows(
    stream: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """[count, length] int64: windows of the stream that start anywhere."""
    device = stream.device
    starts = torch.randint(len(stream) - length, (count, 1), generator=generator, device=device)
    return stream[starts + torch.arange(length, device=device)].long()


def adapter_batch(task: Task, count: int, rng: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both [count, longest] int64: chats in which every answer is the task's.

    Padded at the right; labels are `IGNORED` outside the assistant's turns.
    """
    texts = []
    for _ in range(count):
        turns = opening(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            pair = task.training_pair(rng)
            turns += [("user", pair.prompt), ("assistant", pair.answer)]
        texts.append(chat_text(turns))
    rows = [row.ids for row in _encoder.encode_batch(texts, add_special_tokens=False)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in rows])
    return ids, torch.where(_answers(ids), ids, IGNORED)


def _answers(ids: torch.Tensor) -> torch.Tensor:
    """True from after an assistant token up to and with the eos that ends its turn."""
    inside = torch.zeros_like(ids, dtype=torch.bool)
    speaking = torch.zeros(len(ids), dtype=torch.bool)
    for column in range(ids.shape[1]):
        inside[:, column] = speaking
        token = ids[:, column]
        speaking = (speaking & (token != EOS_ID)) | (token == ASSISTANT_ID)
    return inside


def _chunk(seed: int) -> np.ndarray:
    rng = Random(seed)
    texts = [document(rng) for _ in range(_CHUNK_DOCUMENTS)]
    rows = _encoder.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array(row.ids, np.int16) for row in rows])


_encoder = build_tokenizer().backend_tokenizer
