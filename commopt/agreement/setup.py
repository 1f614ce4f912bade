"""Setup: what the ranks compare before there is an optimizer, and the parameters that it starts from.

A difference is an error on every rank, instead of a hang or of replicas that drift apart without a word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from commopt.agreement.digest import digest
from commopt.comm import Backend, gather_rows, message_device, numbers_in_world, wait
from commopt.sharding import is_sharded

SETUP_BYTES = 768
"""Bytes of the row that each rank all-gathers at construction."""

PAYLOAD_FORMAT = 1
"""Goes up when what compressors or collectives send changes its layout."""

LISTS = "parameter lists"
"""The fact of which parameters there are: one a line."""

THREADS = "numbers of threads of torch (torch.get_num_threads())"
"""The fact of how many threads multiply matrices."""

OF_STAGE = (LISTS, "names of the parameters")
"""Facts that are equal on the ranks of one stage of a pipeline only."""

_REMEDIES = {
    LISTS: "build the same model on every rank, and give its parameters in the same order",
    "names of the parameters": "give named_parameters() of the same model on every rank, or parameters() on every rank",
    "settings or kernel providers": "give every rank the same arguments, and the same build of commopt",
    "versions of commopt": "install the same one on every rank",
    "versions of torch": "install the same one on every rank",
    "instruction sets of torch (ATEN_CPU_CAPABILITY)": "set ATEN_CPU_CAPABILITY to the lesser one on every rank",
    THREADS: "every rank multiplies the same matrices, and rounds by that: set OMP_NUM_THREADS alike on all",
}
"""Remedies for facts that differ."""

VALUE = re.compile(r"'([^']+)': (?:(?!, ')[^{}])*$")
"""The key in whose value the text of a dict ends."""
_DIGEST = 16
_TEXT = 512


def agree_on_setup(
    backend: Backend,
    device: torch.device,
    facts: dict[str, str],
    error: Exception | None,
    counts: str = "",
    stages: Sequence[int] | None = None,
) -> None:
    """Raises, on every rank, if ``error`` is set on any rank or if any of ``facts`` differs between ranks.

    Args:
        backend: the ranks. With one rank, ``error`` is raised and that is all.
        device: where the message is put, a device that the backend can communicate from.
        facts: at most 15 things that must be equal on all ranks, by name, in words of any length.
        error: what this rank has found wrong with its own arguments.
        counts: a short description of this rank's parameters, for the message.
        stages: of each rank, which parameters it has at all; what differs between ranks of different stages is no
            error. None: all have the same.

    Raises:
        ValueError: names the rank that differs from rank 0 and in what, or the rank whose arguments are wrong.
    """
    if backend.world_size == 1:
        if error is not None:
            raise error
        return
    names = list(facts)
    everyone = _exchange(backend, device, _encode(facts, error, counts))
    if error is not None:
        raise error
    for rank, (failed, _, text) in enumerate(everyone):
        if failed:
            raise ValueError(f"rank {numbers_in_world(backend)[rank]} refused its arguments: {text}")
    stages = [0] * backend.world_size if stages is None else stages
    first = {stage: stages.index(stage) for stage in stages}
    for i, name in enumerate(names):
        of_stage = name in OF_STAGE
        for rank, (_, digests, _) in enumerate(everyone):
            reference = first[stages[rank]] if of_stage else 0
            if digests[i] != everyone[reference][1][i]:
                texts = [text for _, _, text in everyone]
                _raise_different(backend, name, facts[name], rank, reference, texts)


def describe(group: int, number: int, p: Tensor, with_frozen: bool = True) -> str:
    """Properties of a parameter that ranks must have alike, by its number in its group, in words that are the same on
    all ranks that have the same, or hold pieces of one tensor. ``with_frozen``: also whether it is frozen."""
    dtype, frozen = str(p.dtype).removeprefix("torch."), ", frozen" if with_frozen and not p.requires_grad else ""
    cut = f" cut over {tuple(p.device_mesh.shape)} {p.placements}" if is_sharded(p) else ""  # type: ignore[attr-defined]
    shape = "no shape yet" if is_lazy(p) else f"shape {tuple(p.shape)}"
    return f"parameter {number} of group {group} ({dtype} of {shape} on {p.device.type}{cut}{frozen})"


def counts_of(params: Sequence[Tensor]) -> str:
    """Number of parameters and of elements, in words."""
    return f"{len(params)} parameters with {sum(p.numel() for p in params if not is_lazy(p))} elements"


def versions(devices: Sequence[str]) -> dict[str, str]:
    """Versions that must be the same on all ranks for their arithmetic to be, whatever they train.

    Args:
        devices: types of the devices that parameters are on. On a CPU, torch rounds by the instruction set it uses
            (ATEN_CPU_CAPABILITY chooses).
    """
    import commopt

    known = {"versions of commopt": commopt.__version__, "versions of torch": torch.__version__}
    known["payload formats"] = str(PAYLOAD_FORMAT)
    if "cpu" in devices:
        known["instruction sets of torch (ATEN_CPU_CAPABILITY)"] = torch.backends.cpu.get_cpu_capability()
    return known


def _raise_different(backend: Backend, name: str, fact: str, rank: int, reference: int, counts: Sequence[str]) -> None:
    """Every rank has seen that ``rank`` differs from rank ``reference`` in the fact called ``name``."""
    facts = gather_texts(backend, fact)
    theirs, first = facts[rank], facts[reference]
    odd_one, usual_one = numbers_in_world(backend)[rank], numbers_in_world(backend)[reference]
    where = ""
    if name == LISTS:
        odd, usual = first_lines_apart(theirs, first)
        where = f"; the first that differs: rank {odd_one} has {odd}, rank {usual_one} has {usual}"
        theirs, first = counts[rank], counts[reference]
    at = next((i for i, (a, b) in enumerate(zip(theirs, first)) if a != b), min(len(theirs), len(first)))
    if name != LISTS and (key := VALUE.search(first[:at])):
        where = f"; the first that differs: {key[1]!r}"
    if max(len(theirs), len(first)) > 500:  # show where they part
        theirs, first = (f"... {text[max(0, at - 100) : at + 100]} ..." for text in (theirs, first))
    remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
    there, here = f"rank {odd_one} has {theirs}", f"rank {usual_one} has {first}"
    raise ValueError(f"{name} differ between ranks: {there}, {here}{where}{remedy}")


def first_lines_apart(some: str, others: str) -> tuple[str, str]:
    """The first lines in which two texts differ."""
    lines = zip_longest(some.split("\n"), others.split("\n"), fillvalue="no more")
    return next((a, b) for a, b in lines if a != b)


def gather_texts(backend: Backend, text: str) -> list[str]:
    """The text of every rank, by rank. Two all-gathers, for what is told once and of any length."""
    if backend.world_size == 1:
        return [text]
    device = message_device(backend)
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = gather_rows(backend, torch.tensor([mine.numel()], device=device), "texts of the ranks")
    if not lengths.any():
        return [""] * backend.world_size
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    rows = zip(gather_rows(backend, padded, "texts of the ranks").tolist(), lengths.flatten().tolist())
    return [bytes(row[:length]).decode(errors="replace") for row, length in rows]


def _encode(facts: dict[str, str], error: Exception | None, counts: str) -> bytes:
    head = SETUP_BYTES - _TEXT
    assert len(facts) <= head // _DIGEST - 1
    digests = b"".join(hashlib.blake2b(v.encode(), digest_size=_DIGEST).digest() for v in facts.values())
    text = (str(error) if error is not None else counts).encode()[:_TEXT]
    return (bytes([error is not None]).ljust(_DIGEST, b"\0") + digests).ljust(head, b"\0") + text.ljust(_TEXT, b"\0")


def _exchange(backend: Backend, device: torch.device, row: bytes) -> list[tuple[bool, list[bytes], str]]:
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    table = gather_rows(backend, mine, "construction of the optimizer, comparing what the ranks were given")
    out = []
    for line in table.cpu():
        raw = bytes(line.tolist())
        head, text = raw[: SETUP_BYTES - _TEXT], raw[SETUP_BYTES - _TEXT :].rstrip(b"\0").decode(errors="replace")
        digests = [head[i : i + _DIGEST] for i in range(_DIGEST, len(head), _DIGEST)]
        out.append((bool(head[0]), digests, text))
    return out


def equalize(backend: Backend, device: torch.device, params: Sequence[Tensor], source: int = 0) -> bool:
    """Gives every rank the ``params`` of rank ``source`` if any rank's differ, and says whether. Replicas that start
    apart would stay apart.

    Sends 8 bytes per parameter, its digest, where nothing differs.
    """
    if backend.world_size == 1 or not params:
        return False
    with torch.no_grad():
        mine = torch.stack([digest(p).to(device) for p in params])
        theirs = mine.clone()
        wait(backend.broadcast(theirs, source), "comparing the parameters of the ranks")
        differ = torch.tensor([float(not torch.equal(mine, theirs))], device=device)
        wait(backend.all_reduce(differ), "comparing the parameters of the ranks")
        if differ.item() == 0:
            return False
        for p in params:
            flat = p.detach().contiguous()
            wait(backend.broadcast(flat, source), "parameters of one rank for all")
            p.copy_(flat)
    return True
