"""A device mesh: over some of its dimensions a parameter is cut into pieces, over the others every rank has the same.

What commopt averages is averaged over the dimensions that a parameter's own mesh lacks:

    mesh = init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])       # parameters are cut over "shard", and lack "replicate"

So it is with dimensions of its own mesh that FSDP2 leaves to commopt (:mod:`commopt.hsdp`). A plain tensor lacks them
all. Where several are lacking, the first is between nodes, the others are inside a node. But over dimensions that other
parameters of the model are cut over, ranks hold one replica together: there the gradient of a parameter that is not cut
is averaged first, in full precision, and then all of them do the same. So it is over dimensions of its own mesh that it
is whole over, such as a bias under tensor parallelism, whose ranks have got the same gradient, but for rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import Backend, LocalBackend, OfWorld, sends_from
from commopt.comm.holding import Holding
from commopt.comm.nodes import NodesBackend
from commopt.comm.torch import TorchBackend, group_of_ranks, same_on_all
from commopt.sharding import is_sharded, left_dims


class MeshBackend(OfWorld):
    """The ranks of a device mesh, of which each holds pieces of parameters.

    All of them agree on every step; each parameter is averaged over the dimensions of ``mesh`` that its own mesh lacks.

    Args:
        mesh: of any number of dimensions. All its ranks must make this at the same time.
        pipeline: the name of a dimension over which ranks hold other parameters altogether, the stages of a pipeline:
            nothing is averaged over it, but its ranks agree too.

    Raises:
        ValueError: on a rank that the mesh does not contain, if ranks give different meshes of the same ranks, and for
            a dimension that the mesh does not have.
    """

    def __init__(self, mesh: DeviceMesh, pipeline: str | None = None) -> None:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"rank {dist.get_rank()} of the world is not a member of the device mesh given")
        names = mesh.mesh_dim_names or ()
        if pipeline is not None and pipeline not in names:
            raise ValueError(f"pipeline must be one of the dimensions {names} of the mesh, or None; got {pipeline!r}")
        self.mesh, self._coordinate = mesh, tuple(coordinate)
        self._pipeline = None if pipeline is None else names.index(pipeline)
        ranks = mesh.mesh.flatten().tolist()
        same_on_all(ranks, f"device mesh {names} of shape {tuple(mesh.shape)} with ranks {mesh.mesh.tolist()}")
        if mesh.size() == dist.get_world_size():
            self.world: TorchBackend = TorchBackend()
        else:
            self.world = TorchBackend(mesh.get_group() if mesh.ndim == 1 else group_of_ranks(ranks))
        self.rank, self.world_size = self.world.rank, self.world.world_size
        self._rank_at = dict(zip(itertools.product(*map(range, mesh.shape)), ranks))
        place_of = {rank: place for place, rank in self._rank_at.items()}
        self._by_rank = [place_of[rank] for rank in dist.get_process_group_ranks(self.world.group)]
        self._backends: dict[tuple[int, ...], Backend] = {(): LocalBackend()}
        self._cut: set[int] = set()
        self._met_dtensors = False
        self._in_pieces: set[int] = set()
        self._pieces: dict[Any, tuple[int, ...]] = {}
        self._holdings: dict[Any, Holding] = {}
        self._dims: dict[tuple[DeviceMesh, tuple[int, ...]], tuple[int, ...] | None] = {}
        self._own: dict[int, MeshBackend] = {}

    def anew(self) -> MeshBackend:
        """One of the same mesh that no parameter has been asked for yet. All ranks must call this at the same point.

        Raises:
            ValueError: if parameters are on a mesh of their own.
        """
        if self._own:
            raise ValueError("parameter groups with a mesh of their own keep what was averaged over replicas before")
        names = self.mesh.mesh_dim_names or ()
        return MeshBackend(self.mesh, None if self._pipeline is None else names[self._pipeline])

    @property
    def grid(self) -> list[tuple[int, ...]]:
        """Of every rank, by rank, its place in the mesh."""
        return self._by_rank

    @property
    def devices(self) -> tuple[str, ...] | None:
        """Those that the ranks can send from."""
        return sends_from(self.world)

    @property
    def stages(self) -> list[int]:
        """By rank, its coordinate along the pipeline."""
        return [0 if self._pipeline is None else place[self._pipeline] for place in self._by_rank]

    @property
    def parts(self) -> list[int]:
        """By rank, a number of the part of the model that it holds."""
        dims = self._inside()
        keys = [tuple(place[dim] for dim in dims) for place in self._by_rank]
        known = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return [known[key] for key in keys]

    @property
    def holds_whole(self) -> bool:
        """True if every rank holds the whole model, as far as parameters were asked for: the mesh is one of nodes."""
        return not (self._met_dtensors or self._own or any(self.stages))

    @property
    def inside(self) -> Backend:
        """The ranks that hold one replica together, as far as parameters are cut that were asked for."""
        return self._over(self._inside())

    def give(self, mesh: DeviceMesh, params: Sequence[Tensor]) -> None:
        """Has ``params`` be cut over dimensions of another ``mesh`` of the same ranks, as experts are. All ranks must
        call this at the same point.

        Raises:
            ValueError: it has other ranks.
        """
        ours, theirs = (sorted(m.mesh.flatten().tolist()) for m in (self.mesh, mesh))
        if ours != theirs:
            raise ValueError(
                f"the mesh of a parameter group must have the ranks of the optimizer's, {ours}, got {theirs} ({mesh})"
            )
        backend = next((other for other in self._own.values() if other.mesh == mesh), None) or MeshBackend(mesh)
        self._own.update((id(p), backend) for p in params)

    def check(self, p: Tensor, elsewhere: bool = False) -> None:
        """Raises ValueError for a parameter that is cut over other ranks than those along dimensions of the mesh;
        ``elsewhere``: others average it, and it says nothing of how the rest of the model is held."""
        if (own := self._own.get(id(p))) is not None:
            own.check(p)
            return
        dims = self.dims_of(p)
        self._met_dtensors |= is_sharded(p)
        if not elsewhere:
            self._cut.update(dims)
            self._in_pieces.update(self._cut_over(p))

    def holding(self, p: Tensor) -> Holding:
        if (own := self._own.get(id(p))) is not None:
            return own.holding(p)
        dims = self.dims_of(p)
        along = _groups_cut_over(p)
        ranks_along = tuple(tuple(dist.get_process_group_ranks(group)) for group in along)
        key = dims, ranks_along, frozenset(self._cut), frozenset(self._in_pieces)  # there may be more of these later
        if key not in self._holdings:
            lacking = [i for i in self._several() if i not in dims]
            replicas = self._nodes([i for i in lacking if i not in self._cut])
            cut = self._cut_over(p)
            whole = [i for i in dims if i in self._in_pieces and i not in cut]
            inner = tuple(sorted([*(i for i in lacking if i in self._cut), *whole]))
            pieces = tuple(TorchBackend(group) for group in along)
            copies = self.world_size // math.prod(ranks.world_size for ranks in pieces)
            if self._pipeline is not None:
                copies //= self.mesh.size(self._pipeline)
            alike = math.prod(self.mesh.size(i) for i in whole)
            self._holdings[key] = Holding(replicas, copies, pieces, self._over(inner) if inner else None, alike)
        return self._holdings[key]

    def _cut_over(self, p: Tensor) -> tuple[int, ...]:
        """The dimensions of the mesh that ``p`` is in pieces over."""
        if not is_sharded(p):
            return ()
        key = p.device_mesh, p.placements  # type: ignore[attr-defined]
        if key not in self._pieces:
            self._pieces[key] = tuple(itertools.chain.from_iterable(map(self._along, _groups_cut_over(p))))
        return self._pieces[key]

    def dims_of(self, p: Tensor) -> tuple[int, ...]:
        """The dimensions of the mesh, of several ranks each, that the own mesh of ``p`` is made of, less those that
        were left to us (:mod:`commopt.hsdp`).

        Raises:
            ValueError: it is not made of dimensions of this one.
        """
        if not is_sharded(p):
            return ()
        mesh: DeviceMesh = p.device_mesh  # type: ignore[attr-defined]
        left = left_dims(p)
        if (mesh, left) not in self._dims:
            self._dims[mesh, left] = self._dims_with(sorted(_ranks_along(mesh, left)))
        if (dims := self._dims[mesh, left]) is not None:
            return dims
        theirs = sorted(_ranks_along(mesh, left))
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is cut over ranks {theirs} ({mesh}), which are not those "
            f"along dimensions of the mesh given, {self.mesh}; allowed are parameters on slices of it, such as "
            'fully_shard(model, mesh=mesh["shard"])'
        )

    def as_nodes(self, group: dist.ProcessGroup) -> Backend:
        """The ranks of ``group``, as nodes if they are those along several dimensions of the mesh: the first is between
        nodes, the others are inside a node. All of them must call this at the same point; it may communicate."""
        ranks = TorchBackend(group)
        dims = self._along(group)
        if len(dims) < 2:
            return ranks
        return NodesBackend(ranks, self._over(dims[1:]), self._over(dims[:1]))

    def has_nodes(self, group: dist.ProcessGroup) -> bool:
        """True if :meth:`as_nodes` has any. Communicates nothing."""
        return len(self._along(group)) > 1

    def _along(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        return self._dims_with(sorted(dist.get_process_group_ranks(group))) or ()

    def _dims_with(self, ranks: list[int]) -> tuple[int, ...] | None:
        """The dimensions along which these ``ranks`` are, this one among them; None if there are none."""
        several = self._several()
        every = (dims for n in range(len(several) + 1) for dims in itertools.combinations(several, n))
        return next((dims for dims in every if ranks == sorted(self._ranks(dims))), None)

    def _several(self) -> list[int]:
        """The dimensions of several ranks that hold the same parameters, whole or in pieces."""
        return [i for i in range(self.mesh.ndim) if self.mesh.size(i) > 1 and i != self._pipeline]

    def _inside(self) -> tuple[int, ...]:
        """The dimensions of several ranks that hold one replica together."""
        return tuple(i for i in range(self.mesh.ndim) if self.mesh.size(i) > 1 and i in {*self._cut, self._pipeline})

    def _ranks(self, dims: Sequence[int]) -> list[int]:
        """The ranks along ``dims``, this one among them."""
        at = self._coordinate
        along = [range(self.mesh.size(i)) if i in dims else (at[i],) for i in range(self.mesh.ndim)]
        return [self._rank_at[place] for place in itertools.product(*along)]

    def _over(self, dims: tuple[int, ...]) -> Backend:
        """The ranks along ``dims``."""
        if dims not in self._backends:
            ranks = self._ranks(dims)
            if len(ranks) == self.world_size:
                self._backends[dims] = self.world
            else:
                one = len(dims) == 1
                self._backends[dims] = TorchBackend(self.mesh.get_group(dims[0]) if one else group_of_ranks(ranks))
        return self._backends[dims]

    def _nodes(self, dims: Sequence[int]) -> Backend:
        """The ranks along ``dims``, as nodes if there are several dimensions."""
        every = self._over(tuple(dims))
        if len(dims) < 2:
            return every
        return NodesBackend(every, self._over(tuple(dims[1:])), self._over((dims[0],)))


def _ranks_along(mesh: DeviceMesh, but: Sequence[int]) -> list[int]:
    """The ranks of ``mesh`` along all of its dimensions ``but`` some, this one among them."""
    here: Any = mesh.get_coordinate()
    at = tuple(here[i] if i in but else slice(None) for i in range(mesh.ndim))
    return [int(rank) for rank in mesh.mesh[at].flatten()]


def _groups_cut_over(p: Tensor) -> list[dist.ProcessGroup]:
    """For each dimension of its own mesh that ``p`` is cut over, the ranks along that; of several ranks each."""
    if not is_sharded(p):
        return []
    mesh: DeviceMesh = p.device_mesh  # type: ignore[attr-defined]
    cut = (i for i, placement in enumerate(p.placements) if not placement.is_replicate())  # type: ignore[attr-defined]
    return [mesh.get_group(i) for i in cut if mesh.size(i) > 1]
