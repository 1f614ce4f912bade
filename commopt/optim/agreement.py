"""What the ranks tell each other so that all of them do the same.

At construction: what they were built from, so that a difference is an error on every rank instead of a hang or silent
drift.
At each step: one small all-reduce, before anything is touched, that settles whether to skip, how to clip, and which
parameters take part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.comm import Backend, Work, wait

_TEXT = 448
_ROW = 64 + _TEXT
SETUP_BYTES = _ROW
"""Bytes of the row that each rank all-gathers at construction."""


def agree_on_setup(
    backend: Backend, device: torch.device, facts: dict[str, str], error: Exception | None, counts: str = ""
) -> None:
    """Raises, on every rank, if ``error`` is set on any rank or if any of ``facts`` differs between ranks.

    Args:
        backend: the ranks. With one rank, ``error`` is raised and that is all.
        device: where the message is put, a device that the backend can communicate from.
        facts: at most 3 things that must be equal on all ranks, by name, in words of any length.
        error: what this rank has found wrong with its own arguments.
        counts: a short description of this rank's parameters, for the message.

    Raises:
        ValueError: names the rank that differs from rank 0 and in what, or the rank whose arguments are wrong.
    """
    if backend.world_size == 1:
        if error is not None:
            raise error
        return
    everyone = _exchange(backend, device, _encode(facts, error, counts))
    if error is not None:
        raise error
    names = list(facts)
    for rank, (failed, _, text) in enumerate(everyone):
        if failed:
            raise ValueError(f"rank {rank} refused its arguments: {text}")
    for rank, (_, digests, text) in enumerate(everyone):
        for i, name in enumerate(names):
            if digests[i] != everyone[0][1][i]:
                raise ValueError(f"{name} differ between ranks: rank {rank} has {text}, rank 0 has {everyone[0][2]}")


def _encode(facts: dict[str, str], error: Exception | None, counts: str) -> bytes:
    assert len(facts) <= 3
    digests = b"".join(hashlib.blake2b(v.encode(), digest_size=16).digest() for v in facts.values())
    text = (str(error) if error is not None else counts).encode()[:_TEXT]
    return bytes([error is not None]).ljust(16, b"\0") + digests.ljust(48, b"\0") + text.ljust(_TEXT, b"\0")


def _exchange(backend: Backend, device: torch.device, row: bytes) -> list[tuple[bool, list[bytes], str]]:
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    table = torch.empty(backend.world_size, _ROW, dtype=torch.uint8, device=device)
    wait(backend.all_gather(table, mine), "construction of the optimizer, comparing what the ranks were given")
    out = []
    for line in table.cpu():
        raw = bytes(line.tolist())
        text = raw[64:].rstrip(b"\0").decode(errors="replace")
        out.append((bool(raw[0]), [raw[16 + 16 * i : 32 + 16 * i] for i in range(3)], text))
    return out


@dataclass(frozen=True)
class LocalView:
    """What one rank brings to a step.

    Attributes:
        square_norm: sum of squares of its gradients; finite if and only if all of them are.
        present: which parameters have a gradient here.
        unaveraged: whether some gradient that the step needs averaged has not been averaged yet.
        error: why this rank cannot take the step at all.
    """

    square_norm: float
    present: Sequence[bool]
    unaveraged: bool
    error: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """What all ranks agreed on; equal on every rank, but for ``already_equal``.

    Attributes:
        non_finite: on how many ranks some gradient was inf or NaN; the step is skipped unless 0.
        norm: root mean square over the ranks of their gradient norms.
        present: which parameters have a gradient on any rank.
        average: whether gradients still have to be averaged where averages are wanted.
        already_equal: whether this rank's norm is that of every other rank: somebody else has averaged the gradients.
    """

    non_finite: int
    norm: float
    present: Sequence[bool]
    average: bool
    already_equal: bool


class StepSkipped(Exception):
    """All ranks skip the step; the verdict says why."""


class StepRefused(RuntimeError):
    """All ranks refuse the step, because one cannot take it or they do not fit together."""


class Agreement:
    """What all ranks decide about one step, and a :class:`Work` that is done when they have.

    One all-reduce of 7 float64, which ``start()`` begins, and a second of one per parameter if any rank lacks a
    gradient.

    Attributes:
        verdict: what was decided; None before.
    """

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        self._backend: Backend | None = None
        self._first: Work | None = None
        self._second: Work | None = None
        self._answer: list[float] | None = None

    def start(self, backend: Backend, device: torch.device, view: LocalView, where: str) -> None:
        """Tells the other ranks this rank's ``view``; ``where`` says in an error which step it was about."""
        self._backend, self._device, self._view, self._where = backend, device, view, where
        if backend.world_size == 1:
            return
        finite = math.isfinite(view.square_norm)
        self._message = torch.tensor(
            [
                float(not finite),
                view.square_norm if finite else 0.0,
                float(not all(view.present)),
                float(view.unaveraged),
                float(view.error is not None),
                float(len(view.present)),
                float(len(view.present)) ** 2,
            ],
            dtype=torch.float64,
            device=device,
        )
        self._first = backend.all_reduce(self._message)

    def is_completed(self) -> bool:
        """Whether wait() would not block. Starts the second all-reduce when its time has come."""
        if self.verdict is not None or self._first is None:
            return True
        if self._answer is None and not self._first.is_completed():
            return False
        try:
            self._read()
        except Exception:  # wait() raises it
            return True
        return self._second is None or self._second.is_completed()

    def wait(self) -> Verdict:
        """Learns the verdict. May be called again.

        Raises:
            view.error: on the rank that has one; the others raise StepRefused.
            StepRefused: if ranks hold different numbers of trainable parameters.
            StepSkipped: if some gradient on some rank is inf or NaN.
        """
        assert self._backend is not None
        if self.verdict is None:
            self.verdict = self._alone() if self._backend.world_size == 1 else self._settle()
        if self.verdict.non_finite:
            raise StepSkipped
        return self.verdict

    def forget(self) -> None:
        """Lets go of this rank's view: its error holds the frames that it has passed, and some of these the step."""
        self._view = LocalView(0.0, [], False)

    def _alone(self) -> Verdict:
        view = self._view
        if view.error is not None:
            raise view.error
        finite = math.isfinite(view.square_norm)
        norm = math.sqrt(view.square_norm) if finite else math.nan
        return Verdict(int(not finite), norm, view.present, False, False)

    def _read(self) -> list[float]:
        """What the first all-reduce said; starts the second if it is needed.

        Raises:
            Exception: the step is refused.
        """
        if self._answer is not None:
            return self._answer
        view, backend = self._view, self._backend
        assert backend is not None
        assert self._first is not None
        wait(self._first, self._where)
        answer = self._message.tolist()
        _, _, missing, _, failed, count, count_square = answer
        if view.error is not None:
            raise view.error
        if failed > 0:
            raise StepRefused("another rank cannot take this step; its own error says why")
        if not math.isclose(count_square, count**2, rel_tol=1e-12):
            raise StepRefused(
                f"ranks hold different numbers of trainable parameters: {len(view.present)} here, {count:g} on "
                "average; freeze and unfreeze the same ones on every rank"
            )
        if missing > 0:
            self._shares = torch.tensor([float(p) for p in view.present], dtype=torch.float64, device=self._device)
            self._second = backend.all_reduce(self._shares)
        self._answer = answer
        return answer

    def _settle(self) -> Verdict:
        non_finite, square, _, unaveraged, _, _, _ = self._read()
        view, backend = self._view, self._backend
        assert backend is not None
        present: Sequence[bool] = view.present
        if self._second is not None:
            wait(self._second, self._where)
            present = [share > 0 for share in self._shares.tolist()]
        return Verdict(
            non_finite=round(non_finite * backend.world_size),
            norm=math.sqrt(square),
            present=present,
            average=unaveraged > 0,
            already_equal=square > 0 and math.isclose(square, view.square_norm, rel_tol=1e-12),
        )


def equalize(backend: Backend, device: torch.device, params: Sequence[Tensor]) -> bool:
    """Gives every rank rank 0's ``params`` if any rank's differ, and says whether. Replicas that start apart would stay
    apart.

    Sends 8 bytes per parameter where nothing differs. Ranks are compared by the sum and the sum of squares of each
    parameter.
    """
    if backend.world_size == 1 or not params:
        return False
    where = "comparing the parameters of the ranks"
    with torch.no_grad():
        sums = torch.stack([_checksum(p).to(device) for p in params])
        rank_0 = sums.clone()
        wait(backend.broadcast(rank_0), where)
        differ = torch.tensor([float(not torch.equal(sums.nan_to_num(), rank_0.nan_to_num()))], device=device)
        wait(backend.all_reduce(differ), where)
        if differ.item() == 0:
            return False
        for p in params:
            flat = p.detach().contiguous()
            wait(backend.broadcast(flat), where)
            p.copy_(flat)
    return True


def _checksum(p: Tensor) -> Tensor:
    x = p.detach().double()
    return x.sum() + 3.7 * x.square().sum()
