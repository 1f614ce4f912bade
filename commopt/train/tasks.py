"""Tasks, what the model is asked about a window of tokens: (input, label) pairs for GPT and Llama, and for BERT.

A label of ``IGNORE`` is not predicted. BERT's masks come from a counter-based generator keyed by (seed, sample), so
they need no state and are the same at any world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from commopt.train.config import Config
from commopt.train.data import CLS, MASK, SEP, SPECIALS, Corpus, Windows
from commopt.train.errors import DataError

IGNORE = -100
HELDOUT = 1 << 62  # held-out samples draw their masks from another part of the counter space than training samples
Batch = tuple[torch.Tensor, torch.Tensor]


class Task(Protocol):
    """Turns one window into inputs and labels."""

    @property
    def length(self) -> int:
        """Tokens of one window."""
        ...

    def sample(self, window: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of equal length; ``number`` identifies the sample."""
        ...


@dataclass(frozen=True)
class NextToken:
    """Causal language modelling: the label is the token that follows."""

    seq_len: int

    @property
    def length(self) -> int:
        """One token more than the model reads: the last label."""
        return self.seq_len + 1

    def sample(self, window: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The window without its last token, and without its first."""
        return window[:-1], window[1:]


@dataclass(frozen=True)
class MaskedToken:
    """BERT's masking (arXiv:1810.04805, section 3.1): 15 % of the tokens are predicted; of those 80 % read the mask
    token, 10 % a random token and 10 % themselves. Special tokens are never chosen. There is no next-sentence task.
    """

    seq_len: int
    vocab_size: int
    seed: int
    share: float = 0.15

    @property
    def length(self) -> int:
        """The model reads ``CLS``, the window and ``SEP``."""
        return self.seq_len - 2

    def sample(self, window: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Masked inputs, and labels at the chosen places; at least one place is chosen where there is an ordinary
        token."""
        draw = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        inputs = np.concatenate(([CLS], window, [SEP]))
        ordinary = inputs >= len(SPECIALS)
        places = draw.random(len(inputs))
        chosen = ordinary & (places < self.share)
        if not chosen.any() and ordinary.any():
            chosen[np.argmin(np.where(ordinary, places, 2.0))] = True
        labels = np.where(chosen, inputs, IGNORE)
        fate = draw.random(len(inputs))
        other = draw.integers(len(SPECIALS), self.vocab_size, len(inputs))
        inputs = np.where(chosen & (fate < 0.8), MASK, inputs)
        inputs = np.where(chosen & (fate >= 0.8) & (fate < 0.9), other, inputs)
        return inputs, labels


@dataclass(frozen=True)
class Samples:
    """The training stream and the held-out set of a run, as batches of int64 tensors (samples, seq_len)."""

    task: Task
    train: Windows
    heldout: Windows
    seed: int

    def train_batch(self, positions: Sequence[int]) -> Batch:
        """Samples at these places of the endless shuffled stream."""
        return self._stack([(self.train.shuffled(position, self.seed), position) for position in positions])

    def heldout_batch(self, indices: Sequence[int]) -> Batch:
        """Held-out samples in file order, with masks that never change."""
        return self._stack([(self.heldout.window(index), HELDOUT + index) for index in indices])

    def _stack(self, windows: list[tuple[np.ndarray, int]]) -> Batch:
        pairs = [self.task.sample(window, number) for window, number in windows]
        inputs, labels = (np.stack(column) for column in zip(*pairs))
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def make_samples(config: Config, corpus: Corpus) -> Samples:
    """The run's samples; raises DataError (on every rank alike) when the corpus is too small for one batch."""
    seq_len, seed = config.data.seq_len, config.train.seed
    task: Task = MaskedToken(seq_len, corpus.vocab_size, seed) if config.model.kind == "bert" else NextToken(seq_len)
    train, heldout = Windows(corpus.train, task.length), Windows(corpus.heldout, task.length)
    batch = config.train.batch_size
    if len(train) < batch:
        raise DataError(
            f"corpus {config.data.corpus}: {len(corpus.train)} training tokens make {len(train)} samples of "
            f"{task.length} tokens, fewer than train.batch_size={batch}"
        )
    if len(heldout) < 1:
        raise DataError(
            f"corpus {config.data.corpus}: {len(corpus.heldout)} held-out tokens are fewer than one sample "
            f"of {task.length} tokens"
        )
    return Samples(task, train, heldout, seed)
