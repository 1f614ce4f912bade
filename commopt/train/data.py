"""From documents to samples: a BPE tokenizer trained on the spot, token files in a cache, and a stateless order.

The whole position in the data is one integer, the number of samples consumed: sample ``n`` of a run is a function of
(seed, n) alone. So resuming, and resuming at another world size, needs nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from commopt.train.config import DataConfig
from commopt.train.corpus import Document, documents
from commopt.train.errors import DataError
from commopt.train.world import World

log = logging.getLogger(__name__)
FORMAT = 1  # raise it when the meaning of the cached files changes
SPECIALS = ("<|endoftext|>", "<|pad|>", "<|mask|>", "<|cls|>", "<|sep|>")
EOT, PAD, MASK, CLS, SEP = range(len(SPECIALS))
BATCH = 256  # documents tokenised at once


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: two flat arrays of token ids, memory-mapped, documents ended by ``EOT``."""

    key: str
    """Hash of the text and of every setting that shaped the tokens; a checkpoint remembers it."""
    vocab_size: int
    """Tokens the tokenizer really has: at most the configured number."""
    train: np.ndarray
    heldout: np.ndarray


def cache_root(config: DataConfig) -> Path:
    """Folder of prepared corpora."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "commopt"


def is_heldout(name: str, share: float) -> bool:
    """Whether a document is kept for evaluation: decided by its name alone, so adding others moves none."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _key(config: DataConfig) -> str:
    import tokenizers

    settings = [FORMAT, config.vocab_size, config.heldout, tokenizers.__version__]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for name, text in documents(config):
        for part in (name, text):
            data = part.encode("utf-8", "surrogateescape")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:20]


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_tokens(path: Path, docs: Iterator[Document], tokenizer: Any) -> int:
    """Tokenise into a flat .npy file without holding the corpus in memory; return the number of tokens."""
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    raw, count = path.with_suffix(".raw"), 0
    with raw.open("wb") as out:
        while batch := list(islice(docs, BATCH)):
            for encoded in tokenizer.encode_batch([text for _, text in batch], add_special_tokens=False):
                ids = np.asarray([*encoded.ids, EOT], dtype=dtype)
                out.write(ids.tobytes())
                count += len(ids)
    if count:
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(count,))
        array[:] = np.memmap(raw, dtype=dtype, mode="r")
        array.flush()
    raw.unlink()
    return count


def _split(config: DataConfig, heldout: bool) -> Iterator[Document]:
    """Documents with text in them, of one side of the split."""
    return (doc for doc in documents(config) if doc[1].strip() and is_heldout(doc[0], config.heldout) == heldout)


def _prepare(config: DataConfig) -> Path:
    """The cache folder of this corpus, made if it is not there: written aside and renamed, so it is whole or absent."""
    log.info("reading corpus %s", config.corpus)
    folder = cache_root(config) / _key(config)
    if (folder / "meta.json").exists():
        log.info("prepared corpus found in %s", folder)
        return folder
    aside = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    aside.mkdir(parents=True)
    try:
        _fill(aside, config)
        try:
            aside.rename(folder)
        except OSError:  # another run was faster: its folder has the same content
            if not (folder / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("prepared corpus written to %s", folder)
    return folder


def _fill(folder: Path, config: DataConfig) -> None:
    log.info("training a tokenizer of %d tokens", config.vocab_size)
    tokenizer = _train_tokenizer((text for _, text in _split(config, False)), config.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    counts = {}
    for side, heldout in (("train", False), ("heldout", True)):
        counts[side] = _write_tokens(folder / f"{side}.npy", _split(config, heldout), tokenizer)
        if counts[side] == 0:
            part = "held-out split" if heldout else "training split"
            raise DataError(f"corpus {config.corpus}: no text for the {part}: it needs more documents")
    log.info("%d training tokens, %d held-out tokens", counts["train"], counts["heldout"])
    meta = {"format": FORMAT, "vocab_size": tokenizer.get_vocab_size(), "tokens": counts, "settings": asdict(config)}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def _open(folder: Path) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        train, heldout = (np.load(folder / f"{side}.npy", mmap_mode="r") for side in ("train", "heldout"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"prepared corpus {folder}: {reason}; delete that folder to make it again "
            "(on several machines data.cache_dir must be a shared folder)"
        ) from None
    return Corpus(folder.name, meta["vocab_size"], train, heldout)


def load_corpus(config: DataConfig, world: World) -> Corpus:
    """Prepare on rank 0, open on every rank. A failure anywhere raises the same DataError on all."""
    folder = world.once(lambda: _prepare(config))
    return world.together(lambda: _open(folder))


@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Order of an epoch, from (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
    )
    return torch.randperm(count, generator=generator)


@dataclass(frozen=True)
class Windows:
    """Non-overlapping windows of ``length`` tokens of a flat array."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def window(self, index: int) -> np.ndarray:
        """Window ``index``, as int64."""
        start = index * self.length
        return np.asarray(self.tokens[start : start + self.length], dtype=np.int64)

    def shuffled(self, position: int, seed: int) -> np.ndarray:
        """The ``position``-th sample of an endless stream of epochs, each in its own order."""
        epoch, place = divmod(position, len(self))
        return self.window(int(_permutation(len(self), seed, epoch)[place]))
