"""Means of the state of the bases: named tensors, each at synchronisations of its own (DES-LOC, arXiv 2505.22549).

Read first: tests/oracle_outer.py, the same on plain lists of floats.

    at the k-th synchronisation, for each s with K_s | k:    s_i <- mean_i s_i,  in full precision

with s a tensor of the state of the base, shaped like its parameter. A state that lives longer is averaged more seldom:
of Adam the paper advises K = 3 for the first moment and K = 6 for the second. Its K_u and K_v are these times our
period, which is its K_x.

Where this differs from the paper: it is one option of any outer step on any base. A rank whose base has no state of a
parameter yet, because it has never had a gradient there, counts for nothing, and is given nothing: a base that makes
its state in its first step would take a part of it for all. A tensor that is not finite counts for nothing, and is
given the mean of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import Pipeline, Topology, confirm, mean_over_all
from commopt.outer.loading import state_known_of
from commopt.outer.mixed import name_of
from commopt.sharding import local
from commopt.state.host import square_norm
from commopt.state.packed import PackedOptimizer
from commopt.state.replicas import reaching_others
from commopt.state.state_bucket import StateBucket

Means = list[tuple[Tensor, Tensor]]
"""Tensors of the state of a base, and what they become."""


def check_state_period(value: object) -> None:
    """Raises ValueError if ``value`` is no mapping of names to ints >= 1."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"state_period must be None, or name tensors of the base's state, as {{'exp_avg': 3}}; got {value!r}"
        )
    for name, every in value.items():
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"state_period[{name!r}] must be an int >= 1, in synchronisations, got {every!r}")


def check_names(base: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Raises ValueError if the state of ``base`` has no tensors of these names that are shaped like their parameters.
    Says nothing where the state before the first step is not known: :func:`lacking` will; nor where nothing is trained,
    as in a part of a model that is frozen."""
    if not any(p.requires_grad for group in base.param_groups for p in group["params"]):
        return
    if (shaped := _shaped_in(base)) is not None and (error := _refusal(base, names, shaped)) is not None:
        raise error


def lacking(base: torch.optim.Optimizer, names: Sequence[str]) -> ValueError | None:
    """The error of :func:`check_names`, by the state that there is; None where it is of scalars alone, and as long as
    some parameter has none: it may be what will have it."""
    trained = [p for group in base.param_groups for p in group["params"] if p.requires_grad and p.dim()]
    if not names or not all(base.state.get(p) for p in trained):
        return None
    if not any(entry and isinstance(p, Tensor) and p.dim() for p, entry in base.state.items()):
        return None
    shaped = _shaped_in(base)
    return None if shaped is None else _refusal(base, names, shaped)


def _shaped_in(base: torch.optim.Optimizer) -> set[str] | None:
    """The names of what ``base`` has, or will have, shaped like its parameters; None if that is not known. Of a shape
    that has no state yet, one parameter of a group is like the others: it may be frozen for a while."""
    shaped: set[str] = set()
    for group in base.param_groups:
        entries = [(p, base.state[p]) for p in group["params"] if base.state.get(p)]
        there = {p.shape for p, _ in entries}
        first = {p.shape: p for p in sorted(group["params"], key=lambda p: p.requires_grad) if p.shape not in there}
        for p in [p for p in first.values() if p.dim() and not isinstance(base, PackedOptimizer)]:
            known = state_known_of(base, p, local(p.detach()))
            if known is None:
                return None
            entries.append((p, known))
        shaped = shaped.union(*(_shaped_like(local(p.detach()), entry) for p, entry in entries))
    return shaped


def _shaped_like(x: Tensor, entry: Mapping[str, Any]) -> set[str]:
    """The names of what is shaped like ``x``; a scalar tells nothing, as counters are shaped like it, too."""
    tensors = {name: local(t) for name, t in entry.items() if isinstance(t, Tensor)}
    return {name for name, t in tensors.items() if x.dim() and t.shape == x.shape and t.is_floating_point()}


def _refusal(base: torch.optim.Optimizer, names: Sequence[str], shaped: set[str]) -> ValueError | None:
    for name in names:
        if name not in shaped:
            there = f"allowed are {', '.join(sorted(shaped))}" if shaped else "it has no such tensors at all"
            return ValueError(
                f"state_period[{name!r}]: the state of {name_of(base)} has no tensor of that name that is shaped "
                f"like its parameter; {there}"
            )
    return None


def due(state_period: Mapping[str, int], number: int) -> list[str]:
    """The names that are averaged at the synchronisation ``number``, from 1."""
    return [name for name, every in state_period.items() if number % every == 0]


def mean_states(
    topology: Topology,
    buckets: Sequence[StateBucket],
    base: torch.optim.Optimizer,
    names: Sequence[str],
    where: str,
) -> Means:
    """The means over the ranks of the tensors ``names`` of the state of ``base``. The caller copies them; nothing that
    lasts is changed.

    Raises:
        commopt.comm.CollectiveError: begins with ``where``.
    """
    tasks = [(bucket, name) for name in names for bucket in buckets if bucket.world_size > 1]
    flats = [_packed(bucket, base, name) for bucket, name in tasks]
    with reaching_others(topology, where):
        pipeline = Pipeline()
        for i, ((bucket, name), flat) in enumerate(zip(tasks, flats)):
            task = mean_over_all(flat, *bucket.replicas.pair(i))
            pipeline.start(task, f"{where}, {name} of {bucket.describe()}")
        pipeline.finish()
    if names and topology.world_size > 1:
        confirm(topology.world, square_norm(flats) < float("inf"), where)
    out: Means = []
    for (bucket, name), flat in zip(tasks, flats):
        shares = flat[bucket.padded :].tolist()  # of the ranks that have it
        for p, mean, share in zip(bucket.params, bucket.views(flat[: bucket.padded]), shares):
            mine = _tensor(base, p, name)
            if mine is not None and share > 0:
                out.append((mine, mean if share == 1 else mean.div_(share)))
    return out


def _packed(bucket: StateBucket, base: torch.optim.Optimizer, name: str) -> Tensor:
    """The tensors ``name`` of the parameters of ``bucket`` in a flat buffer, and behind it whether they are there."""
    flags = -(-len(bucket.params) // bucket.world_size) * bucket.world_size
    flat = torch.zeros(bucket.padded + flags, dtype=bucket.dtype, device=bucket.device)
    for i, (p, view) in enumerate(zip(bucket.params, bucket.views(flat[: bucket.padded]))):
        mine = _tensor(base, p, name)
        if mine is not None and ops.all_finite(mine):
            view.copy_(mine)
            flat[bucket.padded + i] = 1
    return flat


def _tensor(base: torch.optim.Optimizer, p: Tensor, name: str) -> Tensor | None:
    """This rank's piece of the tensor ``name`` of ``p``, if there is one that is shaped like the parameter."""
    found = base.state[p].get(name) if p in base.state else None
    if not isinstance(found, Tensor) or local(found).shape != local(p).shape:
        return None
    return local(found)
