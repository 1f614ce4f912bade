"""A model sharded by FSDP2 <-> means of its gradients, and gathers of its weights, that are compressed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commopt.comm import Backend, MeshBackend, Topology, TorchBackend, Traffic, gather_rows, message_device
from commopt.compress import Compressor
from commopt.gradients.all_gather import Differences, GroupDifferences, GroupWeights
from commopt.gradients.fsdp import Group, Groups
from commopt.gradients.loco import LoCo
from commopt.gradients.reduce_scatter import GroupMean
from commopt.gradients.shard_group import ShardGroup

GROUPS = "groups"
"""Key of what is kept by group, and not by parameter, in the state."""


class ShardedDoor:
    """Exchanges of FSDP among the ranks that a model is cut over: a :class:`commopt.gradients.method.Part`.

    Args:
        model: all of it.
        topology: all ranks.
        groups: those whose gradients are averaged nowhere else, those whose are between replicas too, and those that
            have none.
        compressor, feedback: for the gradients of the first kind; the same on all ranks.
        inside: for the gradients of the second, and inside the nodes of the first, without feedback; None: in full
            precision.
        weights: for the weights of both; None: in full precision.
        begin: called before a mean is taken, whose end is to come.
        grouped: whether several dimensions of a mesh that a model is cut over are nodes, and ranks of a node.

    Attributes:
        handle: what lives as long as the model does, which holds this.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        groups: Groups,
        compressor: Any,
        feedback: bool | LoCo,
        inside: Compressor | None,
        weights: Compressor | Differences | None,
        begin: Callable[[], None],
        grouped: bool,
    ) -> None:
        self.whole, self._frozen = groups.over_all, groups.frozen
        self._topology, self._grouped = topology, grouped
        self._ranks: dict[dist.ProcessGroup, ShardGroup] = {}
        self.means: list[GroupMean] = []
        self.weights: list[GroupWeights] = []
        self.fp32_bytes = 0
        self.handle: Any = None
        self._undo: list[Callable[[], None]] = [
            model.register_forward_pre_hook(torch.compiler.disable(self._forward), prepend=True).remove,
            model.register_forward_hook(torch.compiler.disable(self._in_step), always_call=True).remove,
        ]
        self._far: list[GroupWeights] = []  # of what no rank has beside
        # differences would keep the whole of what is frozen, for nothing
        gathered = [g for g in groups.frozen if len(g.dtypes) == 1] if isinstance(weights, Compressor) else []
        for group in [*groups.over_all, *groups.replicated, *gathered]:
            between = group in groups.over_all or (group in groups.frozen and group.world_size == topology.world_size)
            ranks = self._cut_over(topology, group.ranks, inside=not between)
            mean: GroupMean | None = None
            if group in groups.over_all:
                mean = GroupMean(group, ranks, compressor, feedback, begin, inside)
                self.means.append(mean)
            elif inside is not None and group in groups.replicated:
                mean = GroupMean(group, ranks, inside, False, None)
            gather = None if weights is None else _gather_of(group, ranks, weights, topology.traffic)
            if gather is not None:
                self.weights.append(gather)
                self._far += [gather] if between else []
            self._undo.append(group.exchange_by(mean, gather))

    def _forward(self, model: nn.Module, args: Any) -> None:
        """Before FSDP's hook, which gathers: what is gathered in evaluations is of no step."""
        if torch.is_grad_enabled():
            for group in self._frozen:
                group.refuse_thawed()
        self._topology.traffic.in_step = torch.is_grad_enabled()

    def _in_step(self, *_: Any) -> None:
        """Behind a forward: one without gradients may come between that of a step and its backward."""
        self._topology.traffic.in_step = True

    def _cut_over(self, topology: Topology, group: dist.ProcessGroup, inside: bool) -> ShardGroup:
        if group not in self._ranks:
            mesh = topology.backend
            backend: Backend = TorchBackend(group)
            if isinstance(mesh, MeshBackend) and self._grouped and not inside:
                backend = mesh.as_nodes(group)
            self._ranks[group] = ShardGroup(backend, topology.among(backend, inside))
        return self._ranks[group]

    def remove(self) -> None:
        """Leaves the exchanges to FSDP again."""
        self._topology.traffic.in_step = True
        for undo in self._undo:
            undo()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up on each rank, whole, as FSDP does it."""
        groups = [group for group in self.whole if group.averages]
        for group in groups:
            group.averages = False
        try:
            yield
        finally:
            for group in groups:
                group.averages = True

    @property
    def nodes(self) -> list[tuple[int, list[int]]]:
        """Of each set of ranks that are grouped by nodes, how many there are, and the ranks by place."""
        return [(ranks.between.world_size, ranks.by_place) for ranks in self._ranks.values() if ranks.has_nodes]

    # as a part of a mean ----------------------------------------------------------------------------------------------

    @property
    def sound(self) -> Tensor | None:
        means = [mean for mean in self.means if mean.sound is not None]
        taken = [flag for mean in means for flag in (mean.sound, mean.in_range()) if flag is not None]
        return torch.stack([flag.to(taken[0].device) for flag in taken]).all() if taken else None  # some are offloaded

    def end(self, sound: bool) -> None:
        for mean in self.means:
            mean.end(sound)
        self.fp32_bytes = sum(mean.fp32_bytes for mean in self.means) + sum(gather.fp32_bytes for gather in self._far)
        for mean in self.means:
            mean.fp32_bytes = 0
        for gather in self.weights:
            gather.fp32_bytes = 0

    def forget(self) -> None:
        for mean in self.means:
            mean.forget()

    def rescale(self, factor: float) -> None:
        for mean in self.means:
            if mean.residual is not None:
                mean.residual.rescale(factor)

    # state ------------------------------------------------------------------------------------------------------------

    def own(self, params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        """The residuals of this rank, by the number of the parameter, whole; and by group, what else makes the next
        exchange what it would be. Copies."""
        number, out = {id(p): i for i, p in enumerate(params)}, dict[Any, dict[str, Any]]()
        for mean in self.means:
            if mean.residual is None:
                continue
            residual = mean.share()
            for p, place in zip(mean.group.params, mean.group.places):
                mine = place.whole(residual[:, place.start : place.stop]).clone()
                out[number[id(p)]] = {"worker_error": mine, "server_error": mine.new_zeros(0)}
        exactly = {
            key: mean.residual.state()
            for key, mean in zip(_keys("gradients", self.means, params), self.means)
            if mean.residual is not None
        }
        exactly |= {key: gather.state() for key, gather in zip(_keys("weights", self.weights, params), self.weights)}
        out[GROUPS] = {name: state for name, state in exactly.items() if state}
        return out

    def load(
        self, params: Sequence[Tensor], entries: Mapping[Any, Mapping[str, Any]], known: bool, mine: bool
    ) -> tuple[bool, list[Mapping[str, Any]]]:
        """Takes the residuals that were saved, by parameter. ``known``: they are this rank's, or the mean of all;
        ``mine``: they are this rank's, of the same layout. What was saved by group serves where the same parameters
        make a group, cut alike.

        Returns:
            whether something of another rank was left out, and what :meth:`load_weights` takes.

        Raises:
            ValueError: for the residuals of another model.
        """
        exactly = entries.get(GROUPS, {}) if mine else {}
        left_out, loads = False, list[Callable[[], None]]()
        for key, mean in zip(_keys("gradients", self.means, params), self.means):
            if mean.residual is None:
                continue
            now = torch.zeros_like(mean.share())
            for p, place in zip(mean.group.params, mean.group.places):
                error = entries.get(p, {}).get("worker_error")
                if error is None:
                    continue
                if error.numel() != place.shape.numel():
                    raise ValueError(
                        f"the loaded residual of a parameter of shape {tuple(place.shape)} has {error.numel()} "
                        f"elements, and {place.shape.numel()} are here: it is of another model, or of a mesh that cuts "
                        "it otherwise"
                    )
                server = entries[p].get("server_error")
                if not mine and server is not None and server.numel():  # of replicas of pieces
                    error = error + server.to(error)
                if known:
                    now[:, place.start : place.stop] = place.columns(error.to(now), len(now))
                else:
                    left_out = left_out or bool(error.any())
            loads.append(functools.partial(mean.load, now, mine, exactly.get(key, {})))
        for load in loads:  # all of them fit
            load()
        return left_out, [exactly.get(key, {}) for key in _keys("weights", self.weights, params)]

    def load_weights(self, given: Sequence[Any], error: Exception | None) -> None:
        """Takes of each group of weights what was gathered last, where all ranks have it: a group that no forward has
        used yet has none. All ranks call it, those too that an ``error`` has kept from having anything.

        Raises:
            Exception: the ``error``.
            ValueError: another rank has one.
        """
        has = [False] * (1 + len(self.weights)) if error is not None else [True, *map(bool, given)]
        row = torch.tensor(has, dtype=torch.uint8, device="cpu").to(message_device(self._topology.world))
        table = gather_rows(self._topology.world, row, "whose weights were loaded")
        if error is not None:
            raise error
        if failed := [rank for rank, good in zip(self._topology.numbers, table[:, 0].tolist()) if not good]:
            raise ValueError(
                f"ranks {failed} cannot load the state that they were given, their own errors say why; all load "
                "theirs again, or none"
            )
        for gather, state, everywhere in zip(self.weights, given, table[:, 1:].all(0).tolist()):
            gather.load(state if everywhere else {})


def _keys(kind: str, exchanges: Sequence[Any], params: Sequence[Tensor]) -> list[str]:
    """Names in the state of what is of the group of each of ``exchanges``."""
    numbers = {id(p): i for i, p in enumerate(params)}
    return [f"{kind} {i} {one.group.layout(numbers)}" for i, one in enumerate(exchanges)]


def _gather_of(group: Group, ranks: ShardGroup, weights: Compressor | Differences, traffic: Traffic) -> GroupWeights:
    if isinstance(weights, Differences):
        return GroupDifferences(group, ranks, weights, traffic)
    return GroupWeights(group, ranks, weights, traffic)
