"""Which parameters an optimizer has: how the ranks make sure that all bring the same, and what becomes of those that
somebody exchanges. Functions of an optimizer."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from commopt import ops
from commopt.agreement import calls, checks
from commopt.agreement.setup import LISTS, agree_on_setup, counts_of, describe, equalize, versions
from commopt.comm import Backend, Holding, MeshBackend, Replicas, Topology, message_device, resolve_backend
from commopt.hsdp import refuse_gathered
from commopt.sharding import covers, is_sharded, local
from commopt.state import following, loading, packing
from commopt.state.split import RANK_LOCAL

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer

logger = logging.getLogger("commopt")

Function = TypeVar("Function", bound=Callable[..., Any])


def on_itself(method: Function) -> Function:
    """``method`` of an optimizer, on the optimizer itself where a wrapper calls it whose class is derived from the
    optimizer's, but whose attributes are its own: those of Lightning and Fabric."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(vars(self).get("_optimizer", self), *args, **kwargs)

    return cast(Function, called)


def in_a_list(params: Any) -> Any:
    """``params`` as an optimizer is given them, so that they can be looked at more than once.

    Raises:
        TypeError: for None, a model, or a method of it.
    """
    if params is None:
        raise TypeError("an optimizer takes parameters, got None: give it model.parameters()")
    if isinstance(params, nn.Module):
        raise TypeError(f"an optimizer takes parameters, got the model {type(params).__name__}: give it .parameters()")
    if inspect.ismethod(params):
        raise TypeError(
            f"an optimizer takes parameters, got the method {params.__name__}: call it, {params.__name__}()"
        )
    if isinstance(params, (Tensor, str, bytes, dict, set, torch.optim.Optimizer)) or not isinstance(params, Iterable):
        return params
    entries = list(params)
    for i, entry in enumerate(entries):
        if isinstance(entry, dict) and not isinstance(entry.get("params"), (list, tuple, Tensor)) and "params" in entry:
            entries[i] = {**entry, "params": in_a_list(entry["params"])}
    return entries


def forget_groups(optimizer: PackedOptimizer, known: int) -> None:
    """Forgets what was made for groups behind the first ``known``, which are gone again."""
    gone = {id(p) for _, params in optimizer._registered[known:] for p in params}
    optimizer.buckets = [bucket for bucket in optimizer.buckets if id(bucket.params[0]) not in gone]
    optimizer._layout = None
    optimizer._registered = optimizer._registered[:known]


def rebind_if_new(optimizer: PackedOptimizer) -> None:
    """Calls ``optimizer.rebind()`` if parameters were exchanged before its first step."""
    begun = any(group[name] for group in optimizer.param_groups for name in optimizer.group_counters)
    if not begun and following.exchanged(optimizer):
        optimizer.rebind()


def or_not_at_all(function: Function) -> Function:
    """``function`` of an optimizer, which has its attributes back, state and buckets among them, where that raises."""

    @functools.wraps(function)
    def called(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(optimizer))
        try:
            return function(optimizer, *args, **kwargs)
        except BaseException:
            vars(optimizer).clear()
            vars(optimizer).update(before)
            raise

    return cast(Function, called)


@or_not_at_all
def rebind(optimizer: PackedOptimizer) -> None:
    """``optimizer.rebind()``."""
    before = [params for _, params in optimizer._registered]
    now = [list(group["params"]) for group in optimizer.param_groups]
    error: Exception | None = None
    if [len(params) for params in before] != [len(params) for params in now]:
        error = ValueError(
            f"the parameter groups have {[len(params) for params in now]} parameters now, they had "
            f"{[len(params) for params in before]}; allowed are as many, in the same order"
        )
    differ = optimizer.replicas_differ
    new = {p: q for old, here in zip(before, now) for p, q in zip(old, here)}
    state, origin = optimizer.all_state(), packing.origin_here(optimizer)
    moved = {new.get(key, key): entry for key, entry in state.items()}
    runs = [[new[p] for p in run if p in new] for run in packing.runs_of(optimizer)]
    optimizer._kept_packed = {id(p) for run in runs for p in run}
    if any(is_sharded(q) for q in new.values()) and not optimizer.topology.is_sharded:
        # residuals of whole parameters, which other ranks had the other parts of, mean nothing here
        moved = {
            key: {name: t for name, t in entry.items() if name not in RANK_LOCAL} if isinstance(entry, dict) else entry
            for key, entry in moved.items()
        }
        optimizer.topology = Topology(resolve_backend(params=optimizer.param_groups), optimizer.knows_nodes)
        optimizer._restart()
        runs = []
    if not optimizer.has_stepped():
        runs = []  # they may be of another device
    optimizer._kept_runs = runs
    optimizer.state, optimizer.buckets = defaultdict(dict), []
    optimizer._register(optimizer.param_groups, error or _error_in_groups(optimizer), differ)
    optimizer._kept_packed = ()
    loading.take_over(optimizer, moved, packing.origin_with_runs(optimizer, origin, runs))
    optimizer.rebound(new)


def take_replicas(optimizer: PackedOptimizer) -> None:
    """As :meth:`rebind`, of parameters that FSDP2 averages over replicas no longer: the optimizer does, from now on."""
    optimizer.give_up_step()  # for good, whatever comes of the rest
    _take_replicas(optimizer)


@or_not_at_all
def _take_replicas(optimizer: PackedOptimizer) -> None:
    if isinstance(optimizer.topology.backend, MeshBackend):
        optimizer.topology = Topology(optimizer.topology.backend.anew(), optimizer.knows_nodes)
        optimizer._restart()
    optimizer.rebind()


def check_held(optimizer: PackedOptimizer, params: Sequence[Tensor]) -> None:
    """Raises ValueError if ``params`` cannot be trained, or not by these ranks. Communicates nothing."""
    checks.check_params(params, optimizer.devices(), optimizer.topology.is_sharded)
    refuse_gathered(params)
    for p in params:
        optimizer.topology.check(p)


def _error_in_groups(optimizer: PackedOptimizer) -> Exception | None:
    """The error of the parameters in the groups, if there is one."""
    try:
        for group in optimizer.param_groups:
            check_held(optimizer, group["params"])
    except ValueError as error:
        return error
    return None


def take_mesh(optimizer: PackedOptimizer, group: dict[str, Any]) -> None:
    """Takes the mesh that a new parameter group has for itself, if it has one."""
    mesh = group.pop("mesh", None)
    if mesh is None:
        return
    give = getattr(optimizer.topology.backend, "give", None)
    if give is None:
        raise ValueError(
            f"a parameter group has a mesh of its own, {mesh}, but the optimizer was given none: give it the mesh "
            "of all its ranks, process_group=mesh"
        )
    give(mesh, group["params"])


def register_groups(
    optimizer: PackedOptimizer,
    groups: list[dict[str, Any]],
    settings: list[Any],
    error: Exception | None,
    differ: bool = False,
) -> None:
    """Makes sure that all ranks bring the same new groups, settings and kernel providers, and gives the groups
    buckets. Values of parameters become those of rank 0, unless they may ``differ`` between ranks.

    Raises:
        ValueError: on every rank, if they differ, or for this or another rank's ``error``.
        commopt.agreement.calls.CallsDiffer: on every rank, if one is in another call.
    """
    params = [p for group in groups for p in group["params"]]
    topology, device = optimizer.topology, optimizer.control_device(params)
    calls.begin(optimizer.agrees_over, calls.REGISTRATION if optimizer._ready else calls.CONSTRUCTION)
    facts, counts = _setup(groups, settings, device)
    agree_on_setup(topology.world, device, facts, error, counts, topology.stages)
    held: dict[Replicas, list[Tensor]] = {}
    for p in params:
        held.setdefault(topology.held(p)[0], []).append(p)
    topology.agree_on_extent()
    for ranks in held:
        optimizer.check_replicas(ranks)
    for ranks, same in () if differ else held.items():
        if equalize(ranks.world, device, [local(p) for p in same]) and topology.rank == 0:
            logger.warning(
                "%s: parameters differed between ranks; all have those of rank 0 now", type(optimizer).__name__
            )
    optimizer.make_buckets(groups)
    split = following.regrouped(optimizer)  # some were taken out of other groups
    following.register(optimizer)
    if split:
        following.regroup(optimizer)


def check_alike(backend: Backend, groups: list[dict[str, Any]], settings: list[Any]) -> None:
    """Makes sure that the ranks of ``backend`` have parameter groups of the same parameters, frozen or not, and the
    same settings and kernel providers.

    Raises:
        ValueError: on every rank, if they differ.
    """
    device = message_device(backend)
    facts, counts = _setup(groups, settings, device, with_frozen=False)
    agree_on_setup(backend, device, facts, None, counts)


def _setup(
    groups: list[dict[str, Any]], settings: list[Any], device: torch.device, with_frozen: bool = True
) -> tuple[dict[str, str], str]:
    """Facts that ranks compare, and counts, as :func:`commopt.agreement.setup.agree_on_setup` takes them; a rank
    without parameters has the facts of ``device``."""
    params = [p for group in groups for p in group["params"]]
    # providers may differ in the last bit of an update; instruction sets of one provider do not
    devices = sorted({p.device.type for p in params} or {device.type})
    lines = [describe(i, j, p, with_frozen) for i, group in enumerate(groups) for j, p in enumerate(group["params"])]
    facts = {
        **versions(devices),
        LISTS: "\n".join(lines),
        "names of the parameters": str([group.get("param_names") for group in groups]),
        "settings or kernel providers": str([*settings, ops.providers(devices)]),
    }
    return facts, f"{counts_of(params)} in {len(groups)} groups"


def report_unaveraged(optimizer: PackedOptimizer) -> None:
    """Warns of sharded parameters that nothing is averaged of."""
    topology = optimizer.topology
    mesh = getattr(topology.backend, "mesh", None)  # one with a dimension for replicas, of one today, is fine
    alone = [p for p in optimizer.params if is_sharded(p) and topology.held(p)[0].world_size == 1]
    by_others = [_others_average(topology.held(p)[1]) for p in alone]
    found = [p for p, others in zip(alone, by_others) if others or covers(p, mesh)]
    if topology.world_size > 1 and found and topology.rank == 0:
        optimizer._diagnostics.nothing_to_average(len(found), any(by_others), topology.backend)


def _others_average(holding: Holding) -> bool:
    """True if more ranks hold the same of a parameter than average it here."""
    return holding.copies > holding.replicas.world_size * (holding.inside.world_size if holding.inside else 1)
