"""From documents to samples: a BPE tokenizer trained on the spot, token files in a cache, and a stateless order.

The whole position in the data is one integer, the number of samples consumed: sample ``n`` of a run is a function of
(seed, n) alone. So resuming, and resuming at another world size, needs nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from commopt.train import prepared
from commopt.train.config import DataConfig
from commopt.train.corpus import PIECE, Document, documents
from commopt.train.errors import BusyError, DataError, writing
from commopt.train.lock import Lock
from commopt.train.prepared import DamagedCorpusError
from commopt.train.world import World

log = logging.getLogger(__name__)
SPECIALS = ("<|endoftext|>", "<|pad|>", "<|mask|>", "<|cls|>", "<|sep|>")
EOT, PAD, MASK, CLS, SEP = range(len(SPECIALS))
BATCH = 256  # documents tokenised at once
ASIDE = ".tmp-"
OLD = 86400.0
"""Seconds after which what a preparation on another machine has left counts as left."""
LOOK = 0.2
"""Seconds between two looks whether another preparation of the same corpus is done."""
Heed = Callable[[], None]
"""To be called now and then by what takes long: raises when the run is told to stop."""


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
    """True if a document is kept for evaluation: decided by its name alone, so adding others moves none."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _key(config: DataConfig, heed: Heed) -> str:
    import tokenizers

    settings = [prepared.FORMAT, config.vocab_size, config.heldout, tokenizers.__version__]
    digest = hashlib.sha256(json.dumps(settings).encode())
    spelt = False
    for name, text in documents(config):
        heed()
        spelt = spelt or any(special in text for special in SPECIALS)
        for part in (name, text):
            data = part.encode("utf-8", "surrogateescape")
            digest.update(len(data).to_bytes(8, "big") + data)
    if spelt:  # they were special tokens once: what was prepared then is no longer that
        digest.update(b"special tokens in the text are text")
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
    """Tokenise into a flat .npy file without holding the corpus in memory; return the number of tokens.

    What is spelt as a special token in the text is text, as all else there.
    """
    tokenizer.encode_special_tokens = True
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    raw, count = path.with_suffix(".raw"), 0
    with raw.open("wb") as out:
        while batch := list(islice(docs, BATCH)):
            for encoded in tokenizer.encode_batch([text for _, text in batch], add_special_tokens=False):
                ids = np.asarray([*encoded.ids, EOT], dtype=dtype)
                out.write(ids.tobytes())
                count += len(ids)
    if count:  # by writing, not through a memory map: on a full disk that is an error, and not the process' end
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        with path.open("wb") as out, raw.open("rb") as ids_only:
            np.lib.format.write_array_header_1_0(out, header)
            shutil.copyfileobj(ids_only, out, 1 << 22)
    raw.unlink()
    return count


def _split(config: DataConfig, heldout: bool, heed: Heed) -> Iterator[Document]:
    """Documents with text in them, of one side of the split."""
    for doc in documents(config):
        heed()
        if doc[1].strip() and is_heldout(doc[0], config.heldout) == heldout:
            yield doc


def _prepare(config: DataConfig, heed: Heed) -> Path:
    """The cache folder of this corpus, verified; made if it is not there, made again if it is damaged."""
    log.info("reading corpus %s", config.corpus)
    folder = cache_root(config) / _key(config, heed)
    if _is_good(folder):
        return folder
    with writing("data.cache_dir", folder.parent):
        lock = _wait_for_lock(folder, heed)
        try:
            if not _is_good(folder):  # nobody has made it while we waited
                _make(folder, config, heed, alone=lock.handle >= 0)
        finally:
            lock.release()
    return folder


def _is_good(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        prepared.verify(folder)
    except DamagedCorpusError as error:
        log.warning("%s; it is made again", error)
        return False
    log.info("prepared corpus found in %s", folder)
    return True


def _wait_for_lock(folder: Path, heed: Heed) -> Lock:
    said = False
    while True:
        try:
            return Lock(folder.parent, f".lock-{folder.name}")
        except BusyError:
            if not said:
                log.info("another run prepares this corpus: waiting for it")
            said = True
            heed()
            time.sleep(LOOK)


def _make(folder: Path, config: DataConfig, heed: Heed, alone: bool) -> None:
    """Write it aside and rename, so that it is whole or absent. ``alone``: a lock says that nobody else is at it."""
    if alone:
        _clear_leftovers(folder)
    aside = folder.with_name(f"{ASIDE}{folder.name}-{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    aside.mkdir(parents=True)
    try:
        _fill(aside, folder.name, config, heed)
        if _key(config, heed) != folder.name:
            raise DataError(
                f"corpus {config.corpus} has changed while it was prepared; start again when it is finished"
            )
        if folder.exists():  # damaged
            folder.rename(aside / "damaged")
        try:
            aside.rename(folder)
        except OSError:  # without locks another run may have been faster: its folder has the same content
            prepared.verify(folder)
        shutil.rmtree(folder / "damaged", ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("prepared corpus written to %s", folder)


def _clear_leftovers(folder: Path) -> None:
    """Remove what preparations of this corpus have left that were killed: on this machine, which the lock excludes
    from being at work, or long ago on another, whose lock may not reach here."""
    here = f"{ASIDE}{folder.name}-{socket.gethostname()}-"
    for path in folder.parent.glob(f"{ASIDE}{folder.name}-*"):
        with contextlib.suppress(OSError):
            newest = max(p.stat().st_mtime for p in (path, *path.iterdir()))
            if path.name.startswith(here) or time.time() - newest > OLD:
                shutil.rmtree(path, ignore_errors=True)
                log.info("removed what a killed preparation has left: %s", path)


def _fill(folder: Path, key: str, config: DataConfig, heed: Heed) -> None:
    log.info("training a tokenizer of %d tokens", config.vocab_size)
    tokenizer = _train_tokenizer((text for _, text in _split(config, False, heed)), config.vocab_size)
    # not save(), whose error on a full disk is no OSError
    (folder / prepared.TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    counts = {}
    for side in prepared.SIDES:
        heldout = side == "heldout"
        counts[side] = _write_tokens(folder / prepared.token_file(side), _split(config, heldout, heed), tokenizer)
        if counts[side] == 0:
            part = "held-out split" if heldout else "training split"
            raise DataError(
                f"corpus {config.corpus}: no text for the {part}: it needs more documents (files, or each {PIECE} "
                "characters of a file alone, to the next end of a line), or another share of them than "
                f"data.heldout={config.heldout:g}"
            )
    log.info("%d training tokens, %d held-out tokens", counts["train"], counts["heldout"])
    prepared.write_meta(folder, key, tokenizer.get_vocab_size(), counts, asdict(config))


def _open(folder: Path) -> Corpus:
    try:
        meta = prepared.read_meta(folder)
        train, heldout = prepared.open_tokens(folder, meta)
    except DamagedCorpusError as error:  # rank 0 has just found it good
        raise DataError(f"{error} (on several machines data.cache_dir must be a shared folder)") from None
    return Corpus(folder.name, meta["vocab_size"], train, heldout)


def load_corpus(config: DataConfig, world: World) -> Corpus:
    """Prepare on rank 0, however long that takes, and open on every rank, which finds it below its own
    ``data.cache_dir``. A failure anywhere raises the same DataError on all."""
    key = world.patiently(lambda heed: _prepare(config, heed)).name
    return world.together(lambda: _open(cache_root(config) / key))


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
