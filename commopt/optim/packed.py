"""A torch optimizer whose state lives in the flat buffers of buckets.

The buffers are canonical; ``state[p][name]`` are views of them, of the buffers' dtype (float32, or float64 for float64
parameters) whatever the parameter's. State is complete at construction and has the same keys on every rank, because
tools that save and restore optimizers look at fresh ones. Loading copies into the buffers.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.bucket import bucket_bytes, partition
from commopt.comm import (
    LocalBackend,
    Topology,
    all_reduce_bytes,
    message_device,
    resolve_backend,
    sends_from,
    wait,
)
from commopt.compress import Compressor, Feedback
from commopt.optim.digest import digest
from commopt.optim.guard import Guard
from commopt.optim.own import (
    MIXED,
    NAMES,
    Origin,
    belongs,
    cloned,
    describe,
    digest_of,
    origin_of,
    same_as_in,
)
from commopt.optim.replicas import Replicas
from commopt.optim.setup import agree_on_setup, equalize, versions
from commopt.optim.state import MERGED, RANK_LOCAL
from commopt.optim.state_bucket import StateBucket

logger = logging.getLogger("commopt")

CLOCKS = ("step", "variance_step")
"""0-d float32 CPU tensors in the state of each parameter: how often it, and its second moment, was updated."""


class PackedOptimizer(Replicas, torch.optim.Optimizer):
    """State in buckets, saved and loaded without loss. Says nothing about steps."""

    topology: Topology
    compressor: Compressor
    max_grad_norm: float | None
    bucket_mb: float | None
    overlap: bool
    guard: Guard
    skipped_steps: int
    dropped_gradients: int
    buckets: list[StateBucket]
    _check_next: bool
    _damaged: str | None

    clocks: tuple[str, ...] = CLOCKS
    """Names of the 0-d float32 CPU tensors in the state of each parameter."""

    residual_of = "exp_avg"
    """Name of the flat buffer whose compression leaves the residuals."""

    scalars: Mapping[str, float] = {}
    """0-d float64 CPU tensors in the state of each parameter, besides the clocks, and what they start from."""

    sometimes: tuple[str, ...] = ()
    """Names in what is saved of a parameter that not every optimizer of this class has."""

    owns_alone = False
    """Whether a rank alone has something of its own to save."""

    def init_bucket(self, bucket: StateBucket) -> None:
        """Makes the flat buffers of a new bucket."""
        raise NotImplementedError

    def local_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """What of the state of ``p``, a parameter of ``group``, may differ between ranks now, besides residuals."""
        return {}

    @property
    def residuals(self) -> dict[Tensor, dict[str, Tensor]]:
        """What this rank's compression owes of each parameter, as views of its bucket's; empty with one node."""
        return {p: owed for bucket in self.buckets for p, owed in zip(bucket.params, bucket.owed())}

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """What must be the same on all ranks now, to the bit, each with what to call it: parameters unless replicas are
        apart, flat buffers that are not a rank's own, and numbers of the parameters."""
        for i, bucket in enumerate(self.buckets):
            where = f"bucket {i} ({bucket.describe()})"
            if not self.replicas_differ:
                yield f"the parameters of {where}", bucket.pack_params()
            for name, flat in self._replicated_buffers(bucket).items():
                yield f"{name} of {where}", flat
            numbers = self._numbers(bucket)
            if numbers:
                yield f"step counts of {where}", torch.stack([n.double() for n in numbers])

    def copy_replica(self, source: int) -> None:
        """Gives all ranks what rank ``source`` has of what must be the same on all of them."""
        for bucket in self.buckets:
            if not self.replicas_differ:
                flat = bucket.pack_params()
                self._copy_from(source, flat)
                bucket.unpack_params(flat)
            for flat in self._replicated_buffers(bucket).values():
                self._copy_from(source, flat)
            numbers = self._numbers(bucket)
            if numbers:
                values = torch.stack([n.double() for n in numbers]).to(bucket.device)
                self._copy_from(source, values)
                torch._foreach_copy_(numbers, list(values.cpu().to(numbers[0].dtype).unbind()))
            bucket.active = None

    def _copy_from(self, source: int, x: Tensor) -> None:
        wait(self.topology.world.broadcast(x, source), f"the replica of rank {source} for all")

    def _replicated_buffers(self, bucket: StateBucket) -> dict[str, Tensor]:
        """The flat buffers that are the same on all ranks now."""
        p = bucket.params[0]
        own = self.local_state(p, self.group_of()[id(p)])
        return {name: flat for name, flat in bucket.buffers.items() if name not in own}

    def _numbers(self, bucket: StateBucket) -> list[Tensor]:
        """The 0-d tensors in the state of its parameters."""
        return [self.state[p][name] for p in bucket.params for name in (*self.clocks, *self.scalars)]

    def digests(self) -> list[int]:
        """The digests of what :meth:`replicated` gives."""
        found = [digest(x) for _, x in self.replicated()]
        return torch.stack([d.to(found[0].device) for d in found]).tolist() if found else []

    def group_of(self) -> dict[int, dict[str, Any]]:
        """The parameter group of each parameter, by its id."""
        return {id(p): group for group in self.param_groups for p in group["params"]}

    def packed(self) -> set[int]:
        """The ids of the parameters that are in a bucket, which have state."""
        return {id(p) for bucket in self.buckets for p in bucket.params}

    # groups -----------------------------------------------------------------------------------------------------------

    def register_groups(self, groups: list[dict[str, Any]], settings: list[Any], error: Exception | None) -> None:
        """Makes sure that all ranks bring the same new groups, settings and kernel providers, and gives the groups
        buckets.

        Raises:
            ValueError: on every rank, if they differ, or for this or another rank's ``error``.
        """
        params = [p for group in groups for p in group["params"]]
        # providers may differ in the last bit of an update; instruction sets of one provider do not
        devices = sorted({p.device.type for p in params})
        providers = {op: [by.get(d, by["default"]).split()[0] for d in devices] for op, by in ops.report().items()}
        facts = {
            **versions(devices),
            "parameter lists": str(
                [[(tuple(p.shape), p.dtype, p.device.type) for p in group["params"]] for group in groups]
            ),
            "names of the parameters": str([group.get("param_names") for group in groups]),
            "settings or kernel providers": str([*settings, providers]),
        }
        counts = f"{len(params)} parameters with {sum(p.numel() for p in params)} elements in {len(groups)} groups"
        device = self.control_device(params)
        agree_on_setup(self.topology.world, device, facts, error, counts)
        if equalize(self.topology.world, device, params) and self.topology.rank == 0:
            logger.warning("%s: parameters differed between ranks; all have those of rank 0 now", type(self).__name__)
        for group in groups:
            self.make_buckets(group)

    def devices(self) -> tuple[str, ...] | None:
        """Types of devices that parameters may be on; None for all."""
        return sends_from(self.topology.backend) if self.topology.world_size > 1 else None

    def control_device(self, params: Sequence[Tensor]) -> torch.device:
        """Where this rank puts what it tells the others: where its parameters are, or where it can at all."""
        devices = self.devices()
        for p in params:
            if p.device.type != "meta" and (devices is None or p.device.type in devices):
                return p.device
        return message_device(self.topology.backend)

    def fp32_bytes(self) -> int:
        """Bytes that a float32 all-reduce of all trainable parameters would send on this rank; between nodes, where
        ranks are grouped by them."""
        places, nodes = self.topology.intra_node.world_size, self.topology.inter_node.world_size
        return all_reduce_bytes(-(-4 * sum(bucket.numel for bucket in self.buckets) // places), nodes)

    def traffic(self) -> dict[str, Any]:
        """What this rank has sent: ``step``, ``total``, ``fp32_bytes`` and ``ratio`` of ``comm_stats()``."""
        step, fp32 = self.topology.traffic.step.summary(), self.fp32_bytes()
        return {
            "step": step,
            "total": self.topology.traffic.total.summary(),
            "fp32_bytes": fp32,
            "ratio": fp32 / step["bytes"] if step["bytes"] else None,
        }

    # buckets ----------------------------------------------------------------------------------------------------------

    def make_buckets(self, group: dict[str, Any]) -> None:
        """Packs the trainable parameters of a group that are in no bucket yet, and makes their state, all zeros."""
        world, inside = self.topology.world_size, self.topology.intra_node
        packed = self.packed()
        new = [p for p in group["params"] if p.requires_grad and id(p) not in packed]
        capacity = bucket_bytes(self.bucket_mb, new)
        for run in partition(new, capacity):
            bucket = StateBucket(run, world, inside.rank, inside.world_size, self.topology.shard_index)
            self.init_messages(bucket, capacity)
            self.init_bucket(bucket)
            self.buckets.append(bucket)
            self._alias_state(bucket)

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        """In which columns a new bucket is sent, and the residuals of that."""
        nodes = self.topology.inter_node.world_size
        bucket.columns = bucket.cut(capacity, self.compressor.grain)
        if nodes > 1:
            numel = bucket.padded // bucket.places
            bucket.feedback = Feedback.zeros(numel, nodes, bucket.dtype, bucket.device, self.overlap)

    def _alias_state(self, bucket: StateBucket) -> None:
        views = {name: bucket.views(flat) for name, flat in bucket.buffers.items()}
        for i, p in enumerate(bucket.params):
            self.state[p].update({name: torch.zeros(()) for name in self.clocks})
            for name, start in self.scalars.items():
                self.state[p][name] = torch.tensor(start, dtype=torch.float64)
            self.state[p].update({name: tensors[i] for name, tensors in views.items()})

    def follow_parameters(self) -> bool:
        """Moves state after parameters that were moved or cast (``model.to(...)`` after construction), and packs those
        that have become trainable. Returns whether all buckets were made anew."""
        moved = any(bucket.stale() for bucket in self.buckets)
        if moved:
            self._rebuild(self._all_state(), self._origin())
        for group in self.param_groups:
            self.make_buckets(group)
        return moved

    def _all_state(self) -> dict[Any, Any]:
        """``state`` with the residuals in it; what users have put there besides is as it is."""
        owed = self.residuals
        entries = self.state.items()
        return {key: {**entry, **owed.get(key, {})} if isinstance(entry, dict) else entry for key, entry in entries}

    def _rebuild(self, state: Mapping[Any, Any], origin: Origin | None) -> None:
        self.state = defaultdict(dict)
        self.buckets = []
        for group in self.param_groups:
            self.make_buckets(group)
        self._fill(state, origin)
        self._keep_users(self._users(state))

    def _own_names(self) -> dict[Tensor, tuple[str, ...]]:
        """What ``state`` has of each parameter that is in a bucket, besides what users have added."""
        known = (*self.clocks, *self.scalars)
        return {p: (*known, *bucket.buffers) for bucket in self.buckets for p in bucket.params}

    def _users(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """What users have added to ``state``: other keys than parameters, and to a parameter's entry."""
        own, out, ours = self._own_names(), dict[Any, Any](), {*NAMES, *self.sometimes}
        for key, entry in state.items():
            if not isinstance(key, Tensor):
                out[key] = entry
            elif added := {k: v for k, v in entry.items() if k not in ours and k not in own.get(key, ())}:
                out[key] = added
        return out

    def _keep_users(self, users: Mapping[Any, Any]) -> None:
        for key, entry in users.items():
            if isinstance(key, Tensor):
                self.state[key].update(entry)
            else:
                self.state[key] = entry

    # saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as copies. Communicates nothing.

        ``state`` and ``param_groups`` are the same on every rank. With more than one rank, ``residuals`` holds those of
        this one, with its rank, the world size, a checksum of the layout of the buckets, where it stands among the
        nodes, and a digest of all that. They are apart because tools for distributed checkpoints take what is in
        ``state`` for equal on all ranks. Where replicas differ, ``residuals`` also holds what is this rank's own;
        ``state`` has that as well, so it is equal on all ranks only where they are not :attr:`apart` (CSER's momentum:
        never). Such a tool's mixture of ranks is known by the digest when it is loaded.
        :mod:`commopt.optim.state` has how to save the residuals of all ranks, and the rest once.
        """
        out = super().state_dict()
        out["state"] = cloned(out["state"])  # a view would be saved with the whole flat buffer behind it
        if self.topology.world_size > 1 or self.owns_alone:
            own = self.own_part()
            out["residuals"] = {**own, "digest": digest_of(own)}
        return out

    def own_part(self) -> dict[str, Any]:
        """What is this rank's own, as copies, and whose it is."""
        rank, world_size, layout = self._origin()
        whose = {"rank": rank, "world_size": world_size, "layout": layout}
        whose |= {"nodes": self.topology.inter_node.world_size, "share": self.topology.shard_index}
        owners = [(p, group) for group in self.param_groups for p in group["params"]]
        residuals, packed, owed = self.residuals, self.packed(), {}
        for i, (p, group) in enumerate(owners):
            own = {**residuals.get(p, {}), **self.local_state(p, group)} if id(p) in packed else {}
            if own:
                owed[i] = cloned(own)
        return {**whose, "state": owed}

    # loading ----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or ``join_state_dict`` gave, or the state of a ``torch.optim.Adam``.

        Copies into the buffers and keeps their dtypes. Residuals of another rank or world size, or of several ranks
        mixed by a tool, start again from zero, with one warning; replicas stay identical in any case. Keys that users
        have added to ``state``, or to a parameter's, are kept as they are.

        Raises:
            ValueError: if groups, parameters or shapes do not match; nothing is changed then.
            RuntimeError: within :meth:`averaged`.
        """
        self.refuse_inside_averaged("load_state_dict()")
        incoming: dict[str, Any] = {}

        def take_state(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            # Runs after the user's own hooks. torch would cast state to the dtype of the parameters, so it gets none.
            self._check_incoming(given)
            incoming.update(given)
            return {**given, "state": {}}

        hook = self.register_load_state_dict_pre_hook(take_state)
        self._incoming = incoming
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            del self._incoming
        self._check_next, self._damaged = True, None

    def _check_incoming(self, given: dict[str, Any]) -> None:
        ids = [i for group in given["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        if len(ids) != len(params):
            return  # torch raises, and says why
        own = self._own_names()
        for i, p in zip(ids, params):
            for name in own.get(p, ()):
                mine, value = self.state[p][name], given["state"].get(i, {}).get(name)
                if not isinstance(value, Tensor) or value.numel() == mine.numel() == 1:
                    continue
                if value.shape != mine.shape:
                    raise ValueError(
                        f"parameter {i}: {name} in the loaded state has shape {tuple(value.shape)}, but the parameter "
                        f"has shape {tuple(p.shape)}: it is the state of another model"
                    )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what load_state_dict, unpickling or copying brings."""
        if not hasattr(self, "_incoming"):
            self._unpickle(dict(state))
            return
        self.__dict__["param_groups"] = state["param_groups"]
        given = self._incoming
        entries, origin = self._incoming_state(given)
        users = self._forget_users(given)
        self._fill(entries, origin)
        self._keep_users(users)

    def _incoming_state(self, given: dict[str, Any]) -> tuple[dict[Any, Any], Origin | None]:
        """What is to be filled in, by parameter, and whose own part is in it. What differs between ranks is one's own
        or the mean of all; else, but for residuals, that of the rank whose ``state`` this is."""
        part = given.get("residuals") or {}
        origin = origin_of(part)
        mine = self.owns(origin)
        if origin is not None and not mine and not same_as_in(given["state"], part):
            origin = (MIXED, *origin[1:])
        entries = {i: dict(e) for i, e in given["state"].items() if isinstance(e, Mapping)}
        for i, entry in part.get("state", {}).items():
            taken = entry if mine else {name: t for name, t in entry.items() if name in RANK_LOCAL}
            entries.setdefault(i, {}).update(taken)
        return self._by_parameter(given, entries), origin

    def _by_parameter(self, given: dict[str, Any], state: Mapping[Any, Any]) -> dict[Any, Any]:
        """``state`` of what is loaded, with parameters for their numbers."""
        ids = [i for group in given["param_groups"] for i in group["params"]]
        params = dict(zip(ids, (p for group in self.param_groups for p in group["params"])))
        return {params.get(key, key): entry for key, entry in state.items()}

    def _forget_users(self, given: dict[str, Any]) -> dict[Any, Any]:
        """Drops what users have added to ``state``; returns what they have added to the state that is loaded. As in
        torch, a tensor goes where its parameter is; but it keeps its dtype."""
        own = {p: {name: self.state[p][name] for name in names} for p, names in self._own_names().items()}
        self.state = defaultdict(dict, own)
        users = cloned(self._users(self._by_parameter(given, given["state"])))
        for p in (p for p in users if isinstance(p, Tensor)):
            users[p] = {k: v.to(p.device) if isinstance(v, Tensor) else v for k, v in users[p].items()}
        return users

    def owns(self, origin: Origin | None) -> bool:
        """Whether an own part of ``origin`` is this rank's to take."""
        return belongs(origin, self.topology.rank, self.topology.world_size)

    def report_not_own(self, origin: Origin | None, what: str, consequence: str) -> None:
        """Warns that what ranks have of their own was not loaded as what this one saved: one rank speaks for all."""
        world_size = self.topology.world_size
        strangers = (rank for rank in range(world_size) if not belongs(origin, rank, world_size))
        if self.topology.rank == next(strangers, None):
            logger.warning(
                "%s: what is each rank's own (%s) is %s in the loaded state, not that of rank %d of %d; %s. Save that "
                "of every rank (commopt.optim.split_state_dict) to go on exactly.",
                type(self).__name__, what, describe(origin), self.topology.rank, world_size, consequence,
            )  # fmt: skip

    def _origin(self) -> Origin:
        order = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        layout = str([[order[id(p)] for p in bucket.params] for bucket in self.buckets])
        layout += str(getattr(self.topology.backend, "places", ""))
        return (self.topology.rank, self.topology.world_size, zlib.crc32(layout.encode()))

    def _fill(self, state: Mapping[Tensor, dict[str, Any]], origin: Origin | None) -> None:
        """Copies ``state`` into the buffers; what it lacks starts anew, what is not trainable here is left out."""
        for bucket in self.buckets:
            bucket.active = None
            for p in bucket.params:
                self._fill_one(self.state[p], state.get(p, {}))
        packed = self.packed()
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            if not group["step"]:  # the state of a plain Adam counts by parameter only
                steps = (self.state[p]["step"] for p in group["params"] if id(p) in packed)
                group["step"] = int(max(steps, default=0))
        self._fill_residuals(state, origin)

    def _fill_one(self, mine: dict[str, Tensor], entry: dict[str, Any]) -> None:
        for name, tensor in mine.items():
            if name in entry:
                tensor.copy_(torch.as_tensor(entry[name]).reshape(tensor.shape))
            else:
                tensor.fill_(self.scalars.get(name, 0.0))
        # the state of a plain Adam has one clock: its second moment never stopped
        if "variance_step" in mine and "variance_step" not in entry:
            mine["variance_step"].copy_(mine["step"])

    def _fill_residuals(self, state: Mapping[Tensor, dict[str, Any]], origin: Origin | None) -> None:
        here = self._origin()
        dropped: Any = False
        for bucket in self.buckets:
            mine: Sequence[Any] = bucket.owed() or [None] * len(bucket.params)
            for i, (p, owed) in enumerate(zip(bucket.params, mine)):
                worker, server = (state.get(p, {}).get(name) for name in RANK_LOCAL)
                if worker is None or server is None:
                    dropped = dropped or self.had_residuals(p)
                    worker = server = torch.zeros(())
                elif origin is not None and origin[0] == MERGED:
                    worker, server = self._take_share(bucket, i, owed, worker, server)
                elif origin != here or owed is None or not _same_sizes(owed, worker, server):
                    dropped = dropped or worker.any() or server.any()
                    worker = server = torch.zeros(())
                if owed is not None:
                    owed["worker_error"].copy_(worker)
                    owed["server_error"].copy_(server)
        keeps = origin is not None and origin[0] == 0 and origin[1:] == here[1:]  # rank 0, given its own
        if dropped and self.topology.world_size > 1 and self.topology.rank == int(keeps):  # one rank speaks for all
            logger.warning(
                "%s: the residuals in the loaded state are %s (rank, world size, layout: %s), not of %s; they start "
                "again from 0. Save those of every rank (commopt.optim.split_state_dict) to keep them.",
                type(self).__name__, describe(origin), origin, here,
            )  # fmt: skip

    def had_residuals(self, p: Tensor) -> bool:
        """Whether loaded state of ``p`` that comes without residuals is of a run that had some."""
        return bool(self.state[p]["variance_step"] < self.state[p]["step"])

    def pay(self, p: Tensor, owed: Tensor) -> None:
        """Adds what compression still owes of ``p`` to what is compressed: one node compresses no more."""
        self.state[p][self.residual_of].add_(owed)

    def _take_share(
        self, bucket: StateBucket, i: int, owed: dict[str, Tensor] | None, worker: Tensor, server: Tensor
    ) -> tuple[Tensor, Tensor]:
        """This rank's share of the residuals of all ranks of another world: of the mean of the workers' what it
        compresses, of the servers' what it averages."""
        p = bucket.params[i]
        worker, server = worker.reshape(-1), server.reshape(-1)
        if bucket.feedback is None or owed is None:  # one node compresses no more: what was owed is paid at once
            for part in (worker, server):
                self.pay(p, part.to(bucket.device).view(p.shape))
            return worker, server

        def own(whole: Tensor, share: int, chunk: Tensor, mine: Tensor) -> Tensor:
            start = min(max(share * chunk.numel() - bucket.offsets[i], 0), p.numel())
            return whole[start : start + mine.numel()].view(mine.shape)

        feedback = bucket.feedback
        return (
            own(worker, bucket.place, feedback.worker, owed["worker_error"]),
            own(server, self.topology.shard_index, feedback.server, owed["server_error"]),
        )

    # pickling and copying ---------------------------------------------------------------------------------------------

    _SETTINGS: tuple[str, ...] = (
        "compressor", "max_grad_norm", "bucket_mb", "overlap", "guard", "skipped_steps", "dropped_gradients",
        "defaults", "param_groups",
    )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process: the process group cannot be pickled, buckets are made anew. Who
        shall be alone stays alone."""
        own = {"state": cloned(self._all_state()), "origin": self._origin()}
        alone = type(self.topology.backend) is LocalBackend
        return {**{k: getattr(self, k) for k in self._SETTINGS}, **own, "alone": alone}

    def _unpickle(self, state: dict[str, Any]) -> None:
        tensors, origin = state.pop("state"), state.pop("origin")
        alone = LocalBackend() if state.pop("alone", False) else None
        self.topology = Topology(resolve_backend(backend=state.pop("backend", alone)))
        ours = set(state["defaults"])
        super().__setstate__(state)
        for key in self.defaults.keys() - ours:  # torch adds "differentiable", which would get into the groups
            del self.defaults[key]
        self._restart()
        self._rebuild(tensors, origin)

    def _restart(self) -> None:
        """Sets what is neither state nor setting."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedOptimizer:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__({**deepcopy(self.__getstate__(), memo), "backend": self.topology.backend})
        return new


def _same_sizes(owed: Mapping[str, Tensor], worker: Tensor, server: Tensor) -> bool:
    return (owed["worker_error"].numel(), owed["server_error"].numel()) == (worker.numel(), server.numel())
