"""Corpora, tokens, order and masks: all functions of the config, the text and a counter."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_pair import Pair

from commopt.train import data, sums
from commopt.train.config import Config, DataConfig
from commopt.train.corpus import documents
from commopt.train.data import CLS, EOT, MASK, SEP, SPECIALS, Corpus, Windows, is_heldout, load_corpus
from commopt.train.errors import ConfigError, DataError, FolderError, UserError
from commopt.train.stop import Stopped, StopSignal
from commopt.train.tasks import IGNORE, MaskedToken, NextToken, Samples, make_samples
from commopt.train.world import World, open_world

ALONE = World(0, 1, torch.device("cpu"))
Make = Callable[..., Config]


# --- documents ---


def test_stdlib_is_sorted_source_without_tests() -> None:
    names = [name for name, _ in documents(DataConfig())]
    assert names == sorted(names)
    assert {"json/decoder.py", "typing.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def test_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\x00\x01")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    expected = [("a.txt", "one"), ("b/two.txt", "two"), ("latin.txt", "caf�")]
    assert list(documents(DataConfig(corpus=str(tmp_path)))) == expected
    paths = [str(tmp_path / "latin.txt"), str(tmp_path / "b")]
    assert list(documents(DataConfig(corpus=paths))) == [("latin.txt", "caf�"), ("two.txt", "two")]


def test_a_link_to_a_folder_is_not_followed_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A corpus that were without a word smaller than it looks would be trained on; a link to a file is a file."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "here/more").symlink_to(tmp_path / "there")
    (tmp_path / "here/b.txt").symlink_to(tmp_path / "there/a.txt")
    corpus = DataConfig(corpus=str(tmp_path / "here"))
    for _ in range(2):
        assert list(documents(corpus)) == [("a.txt", "here"), ("b.txt", "there")]
    assert caplog.text.count("1 links to folders are not followed") == 1
    assert str(tmp_path / "here/more") in caplog.text


def test_what_is_left_out_for_bytes_of_0_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.txt").write_bytes("words".encode("utf-16-le"))
    (tmp_path / "c.bin").write_bytes(b"\x00\x01")
    with caplog.at_level(logging.INFO, logger="commopt"):
        for _ in range(2):
            assert list(documents(DataConfig(corpus=str(tmp_path)))) == [("a.txt", "words")]
    assert caplog.text.count("2 files are left out, which are no text, but have bytes of 0, such as b.txt") == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_with_a_byte_order_mark_is_text(tmp_path: Path, encoding: str) -> None:
    """As text files of Windows have it; what only begins so is read as before."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "a.txt").write_bytes((mark + "eins zwei \u00fc\r\n\U0001f600").encode(encoding))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfeabc")
    texts = ["eins zwei \u00fc\n\U0001f600", "\ufffd\ufffdabc"]
    assert [text for _, text in documents(DataConfig(corpus=str(tmp_path)))] == texts
    assert list(documents(DataConfig(corpus=str(tmp_path / "a.txt")))) == [("a.txt:0", texts[0])]


@pytest.mark.parametrize("encode", [gzip.compress, lambda data: data.decode().encode("utf-16-le")])
@pytest.mark.parametrize("beside", [True, False])
def test_a_file_that_is_named_and_is_no_text_is_refused(
    corpus: Path, tmp_path: Path, encode: Callable[[bytes], bytes], beside: bool
) -> None:
    """It would be trained on, as U+FFFD."""
    path = tmp_path / "text.txt.gz"
    path.write_bytes(encode(b"".join(file.read_bytes() for file in corpus.iterdir())))
    with pytest.raises(DataError, match=r"text.txt.gz: it is no text in UTF-8"):
        list(documents(DataConfig(corpus=[str(path), *[str(corpus)] * beside])))


@pytest.mark.parametrize("alone", [True, False])
def test_text_in_another_encoding_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    """A file with an odd byte is not: every corpus has some."""
    folder = tmp_path / str(alone)
    folder.mkdir()
    text = "Gr\u00fc\u00dfe an alle, die es h\u00f6ren wollen.\n" * 100
    (folder / "latin1.txt").write_bytes(text.encode("latin-1"))
    (folder / "odd.txt").write_bytes(text.encode() + b"\xe9")
    for _ in range(2):  # a corpus is read several times
        list(documents(DataConfig(corpus=str(folder / "latin1.txt" if alone else folder))))
        list(documents(DataConfig(corpus=str(folder / "odd.txt"))))
    assert caplog.text.count("1 files are not in UTF-8, such as latin1.txt: ") == 1
    assert caplog.text.count("not in UTF-8") == 1


def test_a_file_alone_is_many_documents(tmp_path: Path) -> None:
    """Of its lines, so that both splits have some; of one line, too."""
    lines = "".join(f"line {i} of a text that is long enough\n" for i in range(4000))
    for text in (lines, lines.replace("\n", "\r\n"), lines.replace("\n", " ") * 3, "one"):
        path = tmp_path / "mine.txt"
        path.write_bytes(text.encode())
        for corpus in (str(path), [str(path)]):
            docs = list(documents(DataConfig(corpus=corpus)))
            assert "".join(part for _, part in docs) == path.read_text()
            assert len({name for name, _ in docs}) == len(docs)
            assert all(part.endswith("\n") or len(part) == 100_000 for _, part in docs[:-1])
    path.write_text(lines)
    config = DataConfig(corpus=str(path), vocab_size=300, cache_dir=str(tmp_path / "cache"))
    assert 0.02 < len(load_corpus(config, ALONE).heldout) / len(load_corpus(config, ALONE).train) < 0.12
    path.write_text("a few words")
    with pytest.raises(DataError, match=r"each 2000 characters of a file alone"):
        load_corpus(config, ALONE)


def test_heldout_is_decided_by_name_alone() -> None:
    names = [f"pkg/module{n}.py" for n in range(4000)]
    held = {name for name in names if is_heldout(name, 0.05)}
    assert 0.03 < len(held) / len(names) < 0.07
    assert held <= {name for name in names if is_heldout(name, 0.1)}


@pytest.fixture(scope="module")
def hf_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "small"
    folder.mkdir()
    with (folder / "train.jsonl").open("w") as file:
        for path in sorted(corpus.iterdir()):
            file.write(json.dumps({"body": path.read_text(), "name": path.name}) + "\n")
    return folder


def test_hugging_face_data_set(hf_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's real loading code on a local data set."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    config = DataConfig(corpus=f"hf:{hf_folder}", hf_text_field="body")
    texts = [text for _, text in documents(config)]
    assert texts == [path.read_text() for path in sorted(corpus.iterdir())]
    with pytest.raises(DataError, match="hf_text_field='text' is not one of its columns: body, name"):
        list(documents(DataConfig(corpus=f"hf:{hf_folder}")))
    with pytest.raises(DataError, match=r"split 'validation'.*Unknown split"):
        list(documents(DataConfig(corpus=f"hf:{hf_folder}", hf_split="validation", hf_text_field="body")))
    prepared = load_corpus(
        DataConfig(**vars(config) | {"vocab_size": 300, "heldout": 0.2, "cache_dir": str(tmp_path)}), ALONE
    )
    assert len(prepared.train) > len(prepared.heldout) > 0


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [("turns", [{"role": "user"}], "List|list"), ("label", 3, "int64"), ("raw", True, "bool")],
)
def test_a_column_that_is_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: Any, kind: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps({"name": "a", column: value}) + "\n")
    with pytest.raises(DataError, match=rf"data\.hf_text_field='{column}' must be a column of text, not of .*({kind})"):
        load_corpus(small(Path(f"hf:{folder}"), tmp_path, hf_text_field=column), ALONE)


# --- preparing ---


def small(corpus: Path, cache: Path, **more: Any) -> DataConfig:
    return DataConfig(corpus=str(corpus), vocab_size=300, seq_len=16, heldout=0.2, cache_dir=str(cache), **more)


def test_preparing_is_deterministic_and_cached(corpus: Path, tmp_path: Path) -> None:
    first = load_corpus(small(corpus, tmp_path / "a"), ALONE)
    second = load_corpus(small(corpus, tmp_path / "b"), ALONE)
    assert first.key == second.key
    for name in ("tokenizer.json", "train.npy", "heldout.npy"):
        assert (tmp_path / "a" / first.key / name).read_bytes() == (tmp_path / "b" / first.key / name).read_bytes()
    assert first.train.dtype == np.uint16
    with mock.patch.object(data, "_fill", side_effect=AssertionError("prepared twice")):
        load_corpus(small(corpus, tmp_path / "a"), ALONE)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.key]


def test_tokens_decode_to_the_text(corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    prepared = load_corpus(small(corpus, tmp_path), ALONE)
    tokenizer = Tokenizer.from_file(str(tmp_path / prepared.key / "tokenizer.json"))
    ids = np.asarray(prepared.heldout)
    texts = [tokenizer.decode(part.tolist()[: -1 if part[-1] == EOT else None])
             for part in np.split(ids, np.flatnonzero(ids == EOT)[:-1] + 1)]  # fmt: skip
    held = [path for path in sorted(corpus.iterdir()) if is_heldout(path.name, 0.2)]
    assert texts == [path.read_text() for path in held]
    assert prepared.vocab_size == tokenizer.get_vocab_size() == 300


def test_what_is_spelt_as_a_special_token_in_the_text_is_text(corpus: Path, tmp_path: Path) -> None:
    """Else source text of a tokenizer would end documents within it, and give labels that BERT never predicts."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    for path in copy.iterdir():
        path.write_text(f"{path.read_text()} {' '.join(SPECIALS)} {SPECIALS[EOT]}")
    prepared = load_corpus(small(copy, tmp_path / "cache"), ALONE)
    ids = np.concatenate([prepared.train, prepared.heldout])
    assert np.bincount(ids)[: len(SPECIALS)].tolist() == [30, 0, 0, 0, 0]


def test_the_largest_vocabulary_is_one_that_the_tokenizer_has_memory_for(corpus: Path) -> None:
    """Its library reserves memory for all of it, and ends the process where it gets none."""
    most = DataConfig(vocab_size=2**24)
    texts = (path.read_text() for path in corpus.iterdir())
    assert data._train_tokenizer(texts, most.vocab_size).get_vocab_size() < 5000
    with pytest.raises(ConfigError, match=r"data.vocab_size=16777217 is not allowed: it must be in \[261, 16777216\]"):
        replace(most, vocab_size=2**24 + 1)


def test_the_key_follows_text_and_settings(corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    key = load_corpus(small(corpus, tmp_path / "cache"), ALONE).key
    assert load_corpus(small(copy, tmp_path / "cache"), ALONE).key == key
    (copy / "doc00.txt").write_text("changed")
    assert load_corpus(small(copy, tmp_path / "cache"), ALONE).key != key


def test_a_failed_preparation_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    with (
        mock.patch.object(data, "_write_tokens", side_effect=OSError(28, "No space left on device")),
        pytest.raises(Exception, match="No space left on device"),
    ):
        load_corpus(small(corpus, tmp_path), ALONE)
    assert list(tmp_path.iterdir()) == []


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change_meta(folder: Path, **changes: Any) -> None:
    """With a checksum that fits: what another program may have written."""
    content = json.loads((folder / "meta.json").read_text()) | changes
    (folder / "meta.json").write_text(sums.sealed(content))


def raise_an_id(folder: Path) -> None:
    """An id that is not in the vocabulary, under checksums that fit."""
    ids = np.load(folder / "train.npy")
    ids[7] = 300
    np.save(folder / "train.npy", ids)
    files = json.loads((folder / "meta.json").read_text())["files"]
    change_meta(
        folder, files=files | {"train.npy": files["train.npy"] | {"sha256": sums.of_file(folder / "train.npy")}}
    )


def flip_a_token(folder: Path) -> None:
    data = bytearray((folder / "train.npy").read_bytes())
    data[-9] ^= 1
    (folder / "train.npy").write_bytes(data)


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "short": (lambda folder: (folder / "train.npy").write_bytes(b"short"), "train.npy has another size"),
    "a bit": (flip_a_token, "the content of train.npy has changed"),
    "no file": (lambda folder: (folder / "heldout.npy").unlink(), "No such file"),
    "an id": (raise_an_id, "train.npy has ids that are not below 300"),
    "empty meta": (lambda folder: (folder / "meta.json").write_text(""), "meta.json is damaged"),
    "no meta": (lambda folder: (folder / "meta.json").unlink(), "cannot read meta.json"),
    "a list": (lambda folder: (folder / "meta.json").write_text("[]"), "meta.json is damaged"),
    "deep": (lambda folder: (folder / "meta.json").write_text("[" * 100_000), "meta.json is damaged"),
    "not UTF-8": (lambda folder: (folder / "meta.json").write_bytes(b"\xff"), "meta.json is damaged"),
    "a changed digit": (
        lambda folder: (folder / "meta.json").write_text((folder / "meta.json").read_text().replace("300", "301", 1)),
        "meta.json is damaged",
    ),
    "vocabulary": (lambda folder: change_meta(folder, vocab_size="300"), "of another corpus or format"),
    "files": (lambda folder: change_meta(folder, files=[]), "of another corpus or format"),
    "of another": (lambda folder: change_meta(folder, key="0123"), "of another corpus or format"),
    "count": (lambda folder: change_meta(folder, tokens={"train": 3, "heldout": 3}), r"holds uint16 of shape"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_damaged_cache_is_made_again(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    spoil, reason = SPOILT[case]
    folder = tmp_path / load_corpus(small(corpus, tmp_path), ALONE).key
    whole = snapshot(folder)
    spoil(folder)
    with caplog.at_level(logging.WARNING):
        again = load_corpus(small(corpus, tmp_path), ALONE)
    assert re.search(rf"prepared corpus .*{folder.name}: .*{reason}.*; it is made again", caplog.text)
    assert snapshot(folder) == whole
    assert again.train.max() < 300
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_what_killed_preparations_left_is_removed(corpus: Path, tmp_path: Path) -> None:
    """Those of this corpus, of this machine or old; never what may still be at work on another machine."""
    key = load_corpus(small(corpus, tmp_path), ALONE).key
    here = socket.gethostname()
    names = [f".tmp-{key}-{here}-0a", f".tmp-{key}-elsewhere-0b", f".tmp-{key}-elsewhere-0c", f".tmp-other-{here}-0d"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.raw").write_text("half")
    for path in (tmp_path / names[1], tmp_path / names[1] / "train.raw"):
        os.utime(path, (1.0, 1.0))
    shutil.rmtree(tmp_path / key)
    load_corpus(small(corpus, tmp_path), ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([key, *names[2:]])


def test_two_jobs_prepare_at_once(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second waits for the first, and removes nothing of what that is writing."""
    fill, filled, seen = data._fill, [], threading.Event()

    def slowly(folder: Path, *args: Any) -> None:
        filled.append(folder)
        seen.wait(60)
        fill(folder, *args)

    results: list[Corpus] = []
    with mock.patch.object(data, "_fill", slowly), mock.patch.object(data, "LOOK", 0.01), caplog.at_level(logging.INFO):
        jobs = [
            threading.Thread(target=lambda: results.append(load_corpus(small(corpus, tmp_path), ALONE)))
            for _ in range(2)
        ]
        for job in jobs:
            job.start()
        while "waiting for it" not in caplog.text:
            time.sleep(0.01)
        seen.set()
        for job in jobs:
            job.join()
    assert len(filled) == 1
    assert [result.key for result in results] == [results[0].key] * 2
    assert [path.name for path in tmp_path.iterdir()] == [results[0].key]


def test_preparing_hears_that_the_run_is_told_to_stop(corpus: Path, tmp_path: Path) -> None:
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        load_corpus(small(corpus, tmp_path), replace(ALONE, stop=stop))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_preparing_is_called_that(corpus: Path, tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    with (
        mock.patch.object(shutil, "copyfileobj", side_effect=full),
        pytest.raises(UserError, match=r"the disk is full: .*No space left on device"),
    ):
        load_corpus(small(corpus, tmp_path), ALONE)
    assert list(tmp_path.iterdir()) == []


def load_on_both(config: DataConfig) -> str:
    with open_world() as world:
        return load_corpus(config, world).key


def test_both_ranks_open_what_rank_0_prepared(pair: Pair, corpus: Path, tmp_path: Path) -> None:
    first, second = pair.run(load_on_both, small(corpus, tmp_path))
    assert first == second


def test_corpus_errors_are_the_same_on_every_rank(pair: Pair, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {str(tmp_path / "nowhere"): "no such file or folder", str(empty): "no text for the training split"}
    for path, message in cases.items():
        errors = pair.errors(load_on_both, small(Path(path), tmp_path / "cache"))
        assert errors[0] == errors[1]
        assert errors[0][0] == "DataError"
        assert message in errors[0][1]
        assert path in errors[0][1]


def test_a_cache_that_cannot_be_made_ends_the_run(corpus: Path) -> None:
    """Here the system says that there is no such folder, as it does where another run has removed one."""
    with pytest.raises(FolderError, match=r"^data.cache_dir=/proc/nowhere cannot be written: .*No such file"):
        load_corpus(small(corpus, Path("/proc/nowhere")), ALONE)


def test_a_corpus_that_changes_while_it_is_prepared(corpus: Path, tmp_path: Path) -> None:
    """Else its tokens would be found under the hash of another text."""
    corpus = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    fill = data._fill

    def fill_what_grows(*args: Any) -> None:
        (corpus / "doc00.txt").write_text("another text")
        fill(*args)

    with mock.patch.object(data, "_fill", fill_what_grows), pytest.raises(DataError, match="has changed while it was"):
        load_corpus(small(corpus, tmp_path / "cache"), ALONE)
    assert not list((tmp_path / "cache").glob("[!.]*"))


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("words")
    config = DataConfig(corpus=str(tmp_path))
    assert list(documents(config)) == [("text", "words")]
    with pytest.raises(DataError, match="pipe: it is neither a file nor a folder"):
        list(documents(replace(config, corpus=str(tmp_path / "pipe"))))


def test_an_unreadable_corpus(corpus: Path, tmp_path: Path) -> None:
    denied = PermissionError(13, "Permission denied")
    with mock.patch.object(Path, "read_text", side_effect=denied), pytest.raises(DataError, match="Permission denied"):
        load_corpus(small(corpus, tmp_path), ALONE)


def test_too_small_for_a_batch(tiny: Make, tmp_path: Path) -> None:
    config = tiny(tmp_path)
    few, many = np.zeros(100, np.uint16), np.zeros(1000, np.uint16)
    with pytest.raises(
        DataError, match=r"100 training tokens make 5 samples of 17 tokens, fewer than train.batch_size=8"
    ):
        make_samples(config, Corpus("key", 300, few, many))
    with pytest.raises(DataError, match=r"10 held-out tokens are fewer than one sample of 17 tokens"):
        make_samples(config, Corpus("key", 300, many, few[:10]))


def test_every_kind_of_model_has_its_task(tiny: Make, tmp_path: Path) -> None:
    corpus = Corpus("key", 300, np.zeros(1000, np.uint16), np.zeros(100, np.uint16))
    for kind, task in {"gpt": NextToken, "llama": NextToken, "bert": MaskedToken}.items():
        config = tiny(tmp_path, model={"kind": kind, "dropout": 0.0})
        assert isinstance(make_samples(config, corpus).task, task)


# --- order ---


@given(count=st.integers(1, 60), length=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_an_epoch_sees_every_window_once(count: int, length: int, seed: int, epoch: int) -> None:
    windows = Windows(np.arange(count * length + length - 1, dtype=np.uint32), length)
    assert len(windows) == count
    seen = [windows.shuffled(epoch * count + n, seed) for n in range(count)]
    assert sorted(np.concatenate(seen)) == list(range(count * length))
    assert all(np.array_equal(w, np.arange(w[0], w[0] + length)) for w in seen)


def test_order_depends_on_seed_and_epoch_only() -> None:
    windows = Windows(np.arange(1000), 1)

    def order(seed: int, start: int) -> list[int]:
        return [int(windows.shuffled(start + n, seed)[0]) for n in range(1000)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 1000) != order(2, 0)
    torch.manual_seed(3)
    assert int(windows.shuffled(1500, 1)[0]) == order(1, 1000)[500]


# --- tasks ---


def test_next_token() -> None:
    task = NextToken(4)
    inputs, labels = task.sample(np.arange(task.length), 7)
    assert inputs.tolist() == [0, 1, 2, 3]
    assert labels.tolist() == [1, 2, 3, 4]


def test_masks_follow_the_paper() -> None:
    """15 % chosen; of those 80 % masked, 10 % random, 10 % kept; special tokens never."""
    task = MaskedToken(seq_len=100_002, vocab_size=1000, seed=5)
    window = np.random.default_rng(0).integers(len(SPECIALS), 1000, task.length)
    window[::10] = EOT
    inputs, labels = task.sample(window, 0)
    original = np.concatenate(([CLS], window, [SEP]))
    chosen = labels != IGNORE
    assert np.array_equal(labels[chosen], original[chosen])
    assert np.array_equal(inputs[~chosen], original[~chosen])
    assert not chosen[original < len(SPECIALS)].any()
    ordinary = original >= len(SPECIALS)
    assert chosen[ordinary].mean() == pytest.approx(0.15, abs=0.005)
    masked, kept = inputs[chosen] == MASK, inputs[chosen] == original[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.015)
    assert kept.mean() == pytest.approx(0.1, abs=0.015)
    assert (inputs[chosen][~masked] >= len(SPECIALS)).all()


def test_masks_are_a_function_of_seed_and_sample() -> None:
    window = np.arange(10, 72)
    first = MaskedToken(64, 100, 1).sample(window, 3)
    for task, number, same in ((MaskedToken(64, 100, 1), 3, True), (MaskedToken(64, 100, 1), 4, False), (MaskedToken(64, 100, 2), 3, False)):  # fmt: skip  # noqa: E501
        again = task.sample(window, number)
        assert np.array_equal(first[1], again[1]) == same


@given(st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_something_is_always_predicted(number: int) -> None:
    _, labels = MaskedToken(8, 100, 0).sample(np.full(6, 50), number)
    assert (labels != IGNORE).any()
    window = np.array([EOT, EOT, EOT, EOT, EOT, 50])  # the one token that may be
    assert MaskedToken(8, 100, 0).sample(window, number)[1].tolist() == [IGNORE] * 6 + [50, IGNORE]


def test_heldout_samples_have_masks_of_their_own() -> None:
    """Not those of the training samples with the same numbers."""
    windows = Windows(np.full(62 * 8, 50), 62)
    samples = Samples(MaskedToken(64, 100, 1), windows, windows, 1)
    heldout, train = samples.heldout_batch(range(8))[1], samples.train_batch(range(8))[1]
    assert not any(map(torch.equal, heldout, train))
    assert torch.equal(heldout, samples.heldout_batch(range(8))[1])
