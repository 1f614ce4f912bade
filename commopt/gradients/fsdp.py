"""FSDP2's parameter groups: which a model has, and where their parameters lie in the flat tensors that FSDP exchanges.

FSDP2 exchanges the parameters of a group, those of a module less those of modules inside that are sharded by
themselves, in one collective: a reduce-scatter of gradients in backward, an all-gather of weights in forward and in
backward. In place of both it takes other ones. Which parameters have a gradient is not told to these: hooks on the
whole parameters see it, which there are from the first forward on.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commopt import ops
from commopt.hsdp import averages_over_replicas, groups_in, modules_of

MASKS = 16
"""Most masks that a group keeps, of so many choices of parameters with a gradient."""


@dataclass(frozen=True)
class Place:
    """Place of a parameter in each row of a flat tensor of its group.

    Attributes:
        shape: of the parameter, whole.
        dim: along which it is cut.
        start, stop: its columns.
    """

    shape: torch.Size
    dim: int
    start: int
    stop: int

    def whole(self, columns: Tensor) -> Tensor:
        """Its elements, (W, stop - start), put together: (numel,), without padding."""
        if self.dim == 0 or not self.shape.numel():
            return columns.reshape(-1)[: self.shape.numel()]
        piece = list(self.shape)
        piece[self.dim] //= len(columns)
        return torch.cat([row.view(piece) for row in columns], self.dim).reshape(-1)

    def columns(self, whole: Tensor, world_size: int) -> Tensor:
        """The inverse of :meth:`whole`, with zeros for padding."""
        if self.dim != 0 and self.shape.numel():
            pieces = whole.view(self.shape).chunk(world_size, self.dim)
            return torch.stack([piece.reshape(-1) for piece in pieces])
        out = whole.new_zeros(world_size * (self.stop - self.start))
        out[: whole.numel()] = whole
        return out.view(world_size, -1)


class Group:
    """A parameter group of an FSDP module.

    Args:
        module: the FSDPModule.
        theirs: the parameter group, FSDP's own.

    Attributes:
        ranks: the process group that the parameters are cut over.
        params: sharded parameters that get gradients, in FSDP's order.
        places: of each, as they lie if all have a gradient.
    """

    def __init__(self, module: Any, theirs: Any) -> None:
        self.module, self._theirs = module, theirs
        self.ranks: dist.ProcessGroup = theirs.mesh_info.shard_process_group
        self._of = [p for p in theirs.fsdp_params if p.sharded_param.requires_grad]
        self._frozen = [p for p in theirs.fsdp_params if not p.sharded_param.requires_grad]
        self.params: list[nn.Parameter] = [p.sharded_param for p in self._of]
        self.places: list[Place] = []
        for p in self._of:
            start = self.places[-1].stop if self.places else 0
            dim, shape = p.fsdp_placement.dim, p._orig_size
            sizes = [-(-n // self.world_size) if i == dim else n for i, n in enumerate(shape)]
            self.places.append(Place(shape, dim, start, start + math.prod(sizes)))
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._arrived: set[int] = set()
        self._handles: list[Any] = []
        self._watched: dict[int, Any] = {}

    @property
    def trained(self) -> list[nn.Parameter]:
        """Its sharded parameters as they are now: load_state_dict(assign=True) exchanges them."""
        return [p.sharded_param for p in self._of]

    @property
    def world_size(self) -> int:
        return self.ranks.size()

    @property
    def columns(self) -> int:
        """Elements of a row, if all parameters have a gradient."""
        return self.places[-1].stop if self.places else 0

    @property
    def name(self) -> str:
        """The module's, for messages."""
        return str(self._theirs._module_fqn or type(self.module).__name__)

    @property
    def device(self) -> torch.device:
        device: torch.device = self._theirs.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """That gradients are compressed in."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.params) else torch.float32

    def divided_by(self, dtype: torch.dtype) -> float:
        """By what FSDP has divided gradients of ``dtype`` before it hands them over: a power of 2."""
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

        theirs = self._theirs
        factor, only_sums = theirs.gradient_divide_factor, theirs.force_sum_reduction_for_comms
        first, *_ = _get_gradient_divide_factors(self.ranks, None, dtype, self.device.type, factor, only_sums)
        return first or 1.0

    @property
    def averages(self) -> bool:
        """True if a backward ends in a mean; else gradients add up, whole."""
        return bool(self._theirs.reduce_grads)

    @averages.setter
    def averages(self, value: bool) -> None:
        self.module.set_requires_gradient_sync(value, recurse=False)

    def layout(self, numbers: Mapping[int, int]) -> int:
        """Checksum of which parameters lie where in its flat tensors; ``numbers`` are those of parameters, by id."""
        trained = [(numbers.get(id(p)), tuple(place.shape), place.dim) for p, place in zip(self.params, self.places)]
        frozen = [tuple(p._orig_size) for p in self._frozen]
        return zlib.crc32(f"{trained} {frozen} {self.dtype}".encode())

    def mask(self, present: Sequence[int]) -> Tensor | None:
        """Bit mask of what is no padding in the columns of some parameters, (W, ceil(n / 8)) uint8; None if nothing
        is."""
        key = tuple(present)
        if key not in self._masks:
            if len(self._masks) == MASKS:  # a mixture of experts has other ones in every step
                del self._masks[next(iter(self._masks))]
            self._masks[key] = self._mask([self.places[i] for i in present])
        return self._masks[key]

    def _mask(self, places: Sequence[Place]) -> Tensor | None:
        world = self.world_size
        if all(place.shape.numel() == (place.stop - place.start) * world for place in places):
            return None
        used = [place.columns(torch.ones(place.shape.numel(), device="cpu"), world) for place in places]
        n = sum(columns.shape[1] for columns in used)
        flat = torch.cat([*used, torch.zeros(world, -n % 8, device="cpu")], 1).to(self.device).view(-1)
        bits = torch.empty(flat.numel() // 8, dtype=torch.uint8, device=self.device)
        ops.pack_nonzero(flat, bits)
        return bits.view(world, -1)

    def watch(self) -> None:
        """Sees from now on which parameters get a gradient."""
        here = weakref.ref(self)

        @torch.compiler.disable  # as FSDP's hooks: whoever compiles a block with fullgraph=True means what is inside
        def forward(module: nn.Module, args: Any) -> None:
            if (group := here()) is not None:
                group._watch_whole()

        self._handles += [module.register_forward_pre_hook(forward) for module in self._theirs.modules]

    @property
    def _whole(self) -> list[nn.Parameter | None]:
        """The whole parameters, None for those that FSDP has never made."""
        return [getattr(p, "_unsharded_param", None) for p in self._of]

    def _watch_whole(self) -> None:
        """After FSDP has made the whole parameters; they are the same objects in every forward."""
        whole, here = self._whole, weakref.ref(self)
        trained = [p if p is not None and p.requires_grad else None for p in whole]
        new = [i for i, p in enumerate(trained) if p is not None and self._watched.get(i) is not p]
        if not new:
            return

        def hook(i: int) -> Any:
            def arrived(_: Tensor) -> None:
                if (group := here()) is not None:
                    group._arrived.add(i)

            return arrived

        for i in new:
            p: Any = trained[i]
            self._watched[i] = p
            self._handles.append(p.register_post_accumulate_grad_hook(hook(i)))

    def with_gradient(self, columns: int) -> Sequence[int]:
        """The indices of the parameters of which FSDP hands over gradients, as ``columns`` columns.

        Raises:
            RuntimeError: if that cannot be told.
        """
        self.refuse_thawed()
        arrived, self._arrived = self._arrived, set()
        if columns == self.columns:
            return range(len(self.places))
        if getattr(self._theirs, "reduce_scatter_unused_params", False):  # as zeros, which no hook has seen
            arrived |= {i for i, p in enumerate(self._whole) if p is not None and p.requires_grad}
        if columns != sum(self.places[i].stop - self.places[i].start for i in arrived):
            raise RuntimeError(
                f"of the parameters of a {type(self.module).__name__} some have no gradient, and which could not be "
                "seen: call set_reduce_scatter_unused_params(True) on the model"
            )
        return sorted(arrived)

    def check(self) -> None:
        """Raises ValueError if FSDP takes no other collectives for it, or has others already."""
        if not hasattr(self.module, "set_custom_reduce_scatter"):
            raise ValueError(
                "FSDP2's own exchanges (of a model that it cuts over all ranks; inside=, weights=) are compressed with "
                f"torch 2.9 or later, and this is {torch.__version__}"
            )
        groups = len(groups_in(self.module))
        if groups > 1:
            raise ValueError(
                f"{self.name} has {groups} groups of parameters on different meshes (shard_placement_fn), and FSDP "
                "takes other collectives for modules of one group only: shard what is on another mesh as a module of "
                "its own"
            )
        for comm in (self._theirs._reduce_scatter_comm, self._theirs._all_gather_comm):
            if type(comm).__name__ not in ("DefaultReduceScatter", "DefaultAllGather"):
                raise ValueError(
                    f"{self.name} has a collective of its own, {type(comm).__name__}, in whose place gradients or "
                    "weights would be compressed: leave it away, or call remove() on the handle that has set it"
                )

    @property
    def dtypes(self) -> set[str]:
        """Of what FSDP gathers; it gathers several as bytes."""
        computes = self._theirs.mp_policy.param_dtype
        return {str(computes or p.sharded_param.dtype) for p in (*self._of, *self._frozen)}

    def check_dtypes(self) -> None:
        """Raises ValueError if FSDP gathers bytes, and no numbers that could be compressed; what has a way of its own
        to be gathered may."""
        dtypes, every = self.dtypes, (*self._of, *self._frozen)
        own = any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in every)
        if len(dtypes) > 1 and not own:
            raise ValueError(
                f"{self.name} has parameters of {', '.join(sorted(dtypes))}, which FSDP2 gathers as bytes, so that "
                "weights= could compress none of them: give fully_shard() MixedPrecisionPolicy(param_dtype=...), shard "
                "them as modules of their own, or leave weights= out"
            )

    def refuse_thawed(self) -> None:
        """Raises RuntimeError if a parameter is trained that was frozen."""
        if any(p.sharded_param.requires_grad for p in self._frozen):
            raise RuntimeError(
                f"a parameter of {self.name} is trained that was frozen when compress_gradients was called: call "
                "remove() on the handle, and compress_gradients again"
            )

    def exchange_by(self, reduce_scatter: Any, all_gather: Any) -> Any:
        """Has FSDP call these in place of its own collectives, where they are not None. Returns a function that undoes
        it."""
        theirs = self._theirs
        before = theirs._reduce_scatter_comm, theirs._all_gather_comm, theirs.force_sum_reduction_for_comms
        if reduce_scatter is not None:
            self.module.set_custom_reduce_scatter(reduce_scatter)
            self.module.set_force_sum_reduction_for_comms(True)  # else a factor may come as an operation of NCCL's
            self.watch()
        if all_gather is not None:
            self.module.set_custom_all_gather(all_gather)

        def undo() -> None:
            self.module.set_custom_reduce_scatter(before[0])
            self.module.set_custom_all_gather(before[1])
            self.module.set_force_sum_reduction_for_comms(before[2])
            for handle in self._handles:
                handle.remove()

        return undo


class Groups(NamedTuple):
    """FSDP's groups of parameters."""

    over_all: Sequence[Group] = ()
    """Those that are cut over all ranks."""
    replicated: Sequence[Group] = ()
    """Those of which there are replicas."""
    frozen: Sequence[Group] = ()
    """Those that no gradient is of."""


def groups_of(model: nn.Module) -> list[Group]:
    """The parameter groups of ``model`` that are cut over several ranks and averaged by a reduce-scatter alone."""
    modules: dict[Any, Any] = {}  # several of one group, fully_shard([norm, head]), have the same
    for module in modules_of(model):
        for group in groups_in(module):
            modules.setdefault(group, module)
    return [Group(module, group) for group, module in modules.items() if _is_cut(group)]


def _is_cut(group: Any) -> bool:
    """True if FSDP averages it over the ranks that it is cut over, and over no others."""
    cut = any(kind.__name__ == "FSDPMeshInfo" for kind in type(group.mesh_info).__mro__)
    return cut and not averages_over_replicas(group) and group.mesh_info.shard_mesh_size > 1
