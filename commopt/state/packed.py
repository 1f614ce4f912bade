"""A torch optimizer whose state lives in the flat buffers of buckets.

The buffers are canonical; ``state[p][name]`` are views of them, of the buffers' dtype (float32, or float64 for float64
parameters) whatever the parameter's. State is complete at construction and has the same keys on every rank, because
tools that save and restore optimizers look at fresh ones. Loading copies into the buffers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from commopt import hsdp
from commopt.agreement import checks
from commopt.agreement.decision import Holders
from commopt.agreement.diagnostics import Diagnostics
from commopt.bucket import bucket_bytes
from commopt.comm import (
    CountingBackend,
    Replicas,
    Topology,
    message_device,
    sends_from,
)
from commopt.comm.torch import is_of_processes
from commopt.compress import Compressor
from commopt.sharding import local
from commopt.state import (
    assigned,
    binding,
    consolidate,
    following,
    foreign,
    loading,
    packing,
    pickling,
    replicas,
    saving,
    wrapped,
)
from commopt.state.guard import Guard
from commopt.state.host import square_norm
from commopt.state.lifetime import forget_frames
from commopt.state.loading import OWN
from commopt.state.model_buffers import HowBuffers
from commopt.state.own import Origin, belongs, cloned, digest_of
from commopt.state.own_tensor import OwnTensor
from commopt.state.saving import PARAMETER, Entries
from commopt.state.split import OF_RANKS
from commopt.state.state_bucket import StateBucket, fp32_bytes
from commopt.state.wrapped import Obstacle

logger = logging.getLogger("commopt")


class PackedOptimizer(torch.optim.Optimizer):
    """State in buckets, saved and loaded without loss, of replicas that may differ between two rounds. Says nothing
    about steps.

    Attributes:
        topology: the ranks, and what this one has sent.
        buckets: all state.
    """

    topology: Topology
    compressor: Compressor
    max_grad_norm: float | None
    bucket_mb: float | None
    overlap = False
    guard: Guard
    reduction: str
    skipped_steps: int
    buckets: list[StateBucket]
    _ready = False  # whether it is made
    _attachment: Any
    _diagnostics: Diagnostics
    _registered: Sequence[tuple[dict[str, Any], list[Tensor]]] = ()  # each group, and its parameters as they were
    _check_next: bool  # digests, when the ranks next communicate
    _seen: Sequence[int] = ()  # the ids of what was in state when the buffers had followed it
    _layout: int | None = None  # of the buckets, where it is known
    _in_flight: Any = None  # a step that has begun, with the buckets there were
    _kept_packed: Collection[int] = ()  # ids of those that are packed though they are frozen: in rebind()
    _kept_runs: Sequence[Sequence[Tensor]] = ()  # of buckets that are to be made anew as they were: in rebind()
    _own_values: dict[Tensor, Tensor] | None = None  # of each parameter, while it is the mean
    _warned_in_evaluation = False
    _copies_looked_for: int | None = 0  # how often; None: some were found
    _models: weakref.WeakSet[nn.Module] | None = None  # those that averaged() and synchronize() were given
    _looked: bool  # for a model that averages the gradients
    _obstacle: Obstacle | None = None  # one that cannot be attached
    rows_merged = 0
    """Of how many replicas what a rank has of its own is the mean, since it was loaded; 0 where it is its own."""
    _of_ranks: list[dict[str, Any] | None] | None = None  # the own parts of the others, until anything changes

    ever_rank_local: tuple[str, ...] = ()
    """All names that :meth:`rank_local` may ever give."""

    step_counters: tuple[str, ...] = ("step", "variance_step")
    """0-d float32 CPU tensors in the state of each parameter: how often it, and its second moment, was updated."""

    group_counters: tuple[str, ...] = ("step",)
    """Keys of its parameter groups that are 0 up to the first step."""

    scalars: Mapping[str, float] = {}
    """0-d float64 CPU tensors in the state of each parameter, and what they start from."""

    knows_nodes = True
    """False if it cannot average inside a node first: over a mesh of several dimensions it does not."""

    residual_of = "exp_avg"
    """The flat buffer whose compression leaves the residuals."""

    owns_alone = False
    """True if a rank alone has something of its own to save."""

    # what a subclass says ---------------------------------------------------------------------------------------------

    def init_bucket(self, bucket: StateBucket) -> None:
        """Makes the flat buffers of a new bucket."""
        raise NotImplementedError

    def rank_local(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of what may differ between ranks now, besides residuals, of parameters of ``group``: flat buffers,
        and "parameter" for themselves."""
        return ()

    @property
    def replicas_differ(self) -> bool:
        """True if parameters may differ between ranks now; the same on all ranks."""
        return False

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of this rank, and the residual of compression. Local: communicates nothing."""
        raise NotImplementedError

    def synchronize_replicas(self) -> None:
        """Makes all replicas equal; called while they differ."""
        raise NotImplementedError

    def check_replicas(self, replicas: Replicas) -> None:
        """Raises ValueError, the same on all ranks, if this optimizer cannot average over ``replicas``."""

    def why_not_synchronize(self) -> Exception | None:
        """Error that forbids this rank to take the mean now, if there is one."""
        return None

    @property
    def agrees_over(self) -> CountingBackend:
        """The ranks, on the channel on which they agree on a step, and that they are in one call."""
        return self.topology.world

    def watch_buckets(self) -> None:
        """Hook for when buckets were made anew between two steps."""

    def give_up_step(self) -> None:
        """Hook for when a state is loaded, or parameters are added or exchanged: ends without effect a step that has
        begun in backward."""

    def prepare(self, entries: Entries, origin: Origin | None) -> Entries:
        """Prepares loaded ``entries``, by parameter, of ``origin``, before they are copied into buffers."""
        return entries

    def loaded(self, entries: Entries, origin: Origin | None) -> None:
        """Hook for when ``entries`` have been copied into buffers."""

    def adopt_values(self) -> None:
        """Hook for parameters that somebody may have changed since the last step, as by loading a model: takes over
        what is kept of them besides. Called before that is saved."""

    def put_in_group(self, params: Sequence[Tensor], old: dict[str, Any], new: dict[str, Any]) -> None:
        """Hook for when somebody has put ``params`` from the group ``old``, which may be gone, into ``new``; their
        buckets are the old ones still."""

    def sent_as_another_kind(self, was: Mapping[int, dict[str, Any]], now: Mapping[int, dict[str, Any]]) -> bool:
        """True if a step under way has sent something of a parameter by the group that it ``was`` in, by its id, and
        the step of the one that it is in ``now`` sends nothing, or the other way round."""
        return False

    def rebound(self, new: Mapping[Tensor, Tensor]) -> None:
        """Hook for when parameters were exchanged: ``new`` has the one in place of each."""

    def residual_expected(self, p: Tensor) -> bool:
        """True if loaded state of ``p`` that comes without residuals is of a run that had some."""
        state = self.state[p]
        return "variance_step" in state and bool(state["variance_step"] < state["step"])

    def fold_residual_into(self, p: Tensor, residual: Tensor) -> None:
        """Adds what is left of the residual of ``p`` to what is compressed: one node compresses no more."""
        local(self.state[p][self.residual_of]).add_(residual)

    # groups and buckets -----------------------------------------------------------------------------------------------

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def values(self) -> list[Tensor]:
        """This rank's pieces of the parameters in buckets, as plain tensors without gradient."""
        return [x.detach() for bucket in self.buckets for x in bucket.values]

    def square_norm_of(self, params: Sequence[Tensor]) -> float:
        """The sum of squares of the gradients that this rank has of ``params``, so weighted that the mean over all
        ranks is that over the replicas: what ranks hold in parts counts as if each held the whole."""
        if not self.topology.is_sharded and self.reduction == "mean":
            return square_norm(_dense([p.grad for p in params if p.grad is not None]))
        weights = {id(p): bucket.share * bucket.factor**2 for bucket in self.buckets for p in bucket.params}
        grads: dict[float, list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                grads.setdefault(weights.get(id(p), 1.0), []).append(local(p.grad))
        return sum((weight * square_norm(_dense(mine)) for weight, mine in grads.items()), 0.0)

    def settle(self) -> None:
        """Makes the gradients what they are to the replica that this rank holds with others."""
        for bucket in self.buckets:
            bucket.settle()

    @binding.on_itself
    @torch.no_grad()
    def rebind(self) -> None:
        """Takes over the parameters that are in the groups now, with the state of those that were in their places.

        For frameworks that shard a model, or wrap it, after its optimizer was made, and put the new parameters into the
        groups. The first ``step()``, and :meth:`averaged` before it, call it by themselves. All ranks must call it at
        the same point.

        Raises:
            ValueError: on every rank, if there are more or fewer parameters than before, or what the constructor
                raises. Nothing has changed then, and it may be called again with what is allowed.
            RuntimeError: within :meth:`averaged`.
        """
        self.refuse_here("rebind()")
        self.begin_change("rebind()")
        self.give_up_step()
        binding.rebind(self)

    def holders(self) -> Holders | None:
        """Parts that each rank holds; None where all hold the whole model."""
        topology = self.topology
        return Holders(topology.rank, topology.same_part(), topology.stages) if topology.is_sharded else None

    def group_of(self) -> dict[int, dict[str, Any]]:
        """The parameter group of each parameter, by its id."""
        return {id(p): group for group in self.param_groups for p in group["params"]}

    def grouped_buckets(self) -> Iterator[tuple[StateBucket, dict[str, Any]]]:
        """Each bucket with the parameter group of its parameters."""
        groups = self.group_of()
        for bucket in self.buckets:
            yield bucket, groups[id(bucket.params[0])]

    def packed(self) -> set[int]:
        """The ids of the parameters that are in a bucket, which have state."""
        return {id(p) for bucket in self.buckets for p in bucket.params}

    @property
    def residuals(self) -> dict[Tensor, dict[str, Tensor]]:
        """The residuals of each parameter on this rank, as views of its bucket's; empty with one node."""
        return {p: r for bucket in self.buckets for p, r in zip(bucket.params, bucket.residuals())}

    def register_new(self, add: Callable[[], None]) -> None:
        """Calls ``add()``, which makes parameter groups, and registers these on all ranks, or on none.

        Raises:
            ValueError, TypeError: on every rank, for what ``add()`` raised on any of them; or if ranks differ. The
                groups are not there then.
        """
        self._of_ranks = None
        known = len(getattr(self, "param_groups", ()))
        error: Exception | None = None
        try:
            add()
            if PARAMETER in self.ever_rank_local:
                checks.refuse_shared_memory(type(self).__name__, self.params)
        except (ValueError, TypeError) as caught:
            error = caught
        try:
            self._register(getattr(self, "param_groups", [])[known:], error)
        except Exception as raised:
            if self._ready:  # while it is made, the groups may be those of somebody else's optimizer
                del self.param_groups[known:]
            forget_frames(raised)
            raise
        finally:
            error = None

    def _register(self, groups: list[dict[str, Any]], error: Exception | None, differ: bool = False) -> None:
        """Makes sure that all ranks bring the same new groups, and gives them buckets; ``differ``: but for values of
        parameters, each of which is its rank's own."""
        raise NotImplementedError

    def devices(self) -> tuple[str, ...] | None:
        """Types of devices that parameters may be on; None for all."""
        return sends_from(self.topology.backend) if self.topology.world_size > 1 else None

    def control_device(self, params: Sequence[Tensor]) -> torch.device:
        """Device of what this rank tells the others: where its parameters are, or where it can at all."""
        devices = self.devices()
        for p in params:
            if p.device.type != "meta" and (devices is None or p.device.type in devices):
                return p.device
        return message_device(self.topology.backend)

    def fp32_bytes(self) -> int:
        """Bytes that a float32 all-reduce of all trainable parameters would send on this rank; between nodes, where
        ranks are grouped by them."""
        return fp32_bytes(self.buckets)

    def traffic(self) -> dict[str, Any]:
        """Traffic of this rank: ``step``, ``total``, ``fp32_bytes`` and ``ratio`` of ``comm_stats()``."""
        return self.topology.summary(self.fp32_bytes())

    def residual_norm(self) -> float:
        """2-norm of this rank's worker residual; 0 where nothing is compressed."""
        return square_norm([b.feedback.worker for b in self.buckets if b.feedback is not None]) ** 0.5

    def accumulating(self) -> bool:
        """True if an attached DDP model is in its ``no_sync()``."""
        return self._attachment is not None and self._attachment.accumulating()

    def capacity_of(self, params: Sequence[Tensor]) -> int:
        """Most bytes of flat buffer in a bucket of ``params``."""
        return bucket_bytes(self.bucket_mb, params)

    def make_buckets(self, groups: Sequence[dict[str, Any]]) -> None:
        """Packs the trainable parameters of ``groups`` that are in no bucket yet, and makes their state, all zeros."""
        packing.pack_new(self, groups)

    @property
    def own_in_state(self) -> bool:
        """True if what is a rank's own is in ``state``, as tensors that know their places: where parameters are
        DTensors, whose checkpoints are written by all ranks together."""
        return any(bucket.sharded for bucket in self.buckets)

    def own_tensors(self, bucket: StateBucket, group: dict[str, Any]) -> list[dict[str, OwnTensor]]:
        """This rank's own state of each parameter of ``bucket``, or what may be so at another time, by name."""
        out: list[dict[str, OwnTensor]] = bucket.own_residuals() or [{} for _ in bucket.params]
        now = self.rank_local(group)
        for name in self.ever_rank_local:
            if name == PARAMETER:
                mine = [local(self.own_value(p)) for p in bucket.params]
            else:
                mine = bucket.tensors(name) if name in bucket.buffers else bucket.zero_views()
            for i, tensor in enumerate(mine):
                out[i][OWN + name] = bucket.own(i, tensor, name in now)
        return out

    def chunk_multiple(self) -> int | None:
        """Of how many elements chunks are multiples, but the last; None: nothing can be sent in chunks."""
        return self.compressor.chunk_multiple

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        """Sets in which chunks a new bucket is sent, and makes the residuals of that."""
        bucket.chunks = bucket.split(capacity, self.chunk_multiple())
        bucket.add_residuals(self.overlap)

    # replicas ---------------------------------------------------------------------------------------------------------

    @binding.on_itself
    @torch._disable_dynamo
    @torch.no_grad()
    def synchronize(self, model: nn.Module | None = None, buffers: HowBuffers = "mean") -> None:
        """Makes all replicas equal now, and ends the local steps since the last round for good. All ranks must call it
        at the same point. Does nothing where they are equal: after a round, and for optimizers without local steps.

        Args:
            model: its buffers, such as BatchNorm's running statistics, and parameters of it that the optimizer does not
                hold, are made equal too, in any case, as :meth:`averaged` does for a while.
            buffers: "mean" of the ranks' (of integers, rank 0's), or "broadcast", rank 0's.

        Raises:
            ValueError: for another word; for buffers, or such parameters, of a sharded model, or of which ranks have
                other ones.
            RuntimeError: within :meth:`averaged`; and if another rank cannot take part.
            commopt.comm.CollectiveError: a collective failed or timed out.
        """
        self.refuse_inside_averaged("synchronize()")
        if model is not None:
            self.refuse_here("synchronize(model)")
        rest = replicas.begin_with(self, model, buffers, "synchronize()")
        if self.replicas_differ:
            self._of_ranks = None
            self.agree_to("synchronize()")
            self.synchronize_replicas()
            self.topology.traffic.leave_out()
            hsdp.gather_anew(replicas.fsdp_modules(self))
        rest.make_same()

    @binding.on_itself
    def averaged(self, model: nn.Module | None = None, buffers: HowBuffers = "mean") -> AbstractContextManager[None]:
        """Context in which the parameters are the mean of all replicas, for evaluating or saving the model; they come
        back afterwards, to the bit, and training continues as if nothing had happened. All ranks must enter it at the
        same point.

        ::

            with optimizer.averaged():
                evaluate(model)

        Sends what an all-reduce of the parameters in full precision does, and takes their memory once more; nothing
        where replicas are equal. Inside, ``state_dict()`` is what it is outside; ``step()``, ``synchronize()`` and
        ``load_state_dict()`` are refused.

        Args:
            model: its buffers, such as BatchNorm's running statistics, are the same on all ranks, too, whether or not
                replicas differ. Without it they are each rank's own. So are parameters of it that the optimizer does
                not hold: of a moving average (torch.optim.swa_utils.AveragedModel), which averages what each rank has,
                this is the moving average of the mean. Where they differ they are the ranks' mean.
            buffers: "mean" of the ranks' (of integers, rank 0's), or "broadcast", rank 0's.

        Raises:
            ValueError: for another word; for buffers, or such parameters, of a sharded model, or of which ranks have
                other ones; and if somebody has exchanged the parameters in the groups since the first step, before
                :meth:`rebind`.
            RuntimeError: if another rank cannot take part.
            commopt.comm.CollectiveError: a collective failed or timed out.
        """
        return replicas.averaged(self, model, buffers)

    def join_hook(self, **_: Any) -> Any:
        """For ``torch.distributed.algorithms.Join``. Raises RuntimeError: a rank that has no batches left cannot answer
        what the others send."""
        raise RuntimeError(
            f"Join([...]) with a {type(self).__name__}: a rank that has no batches left cannot answer what it sends. "
            "Give every rank the same number of batches (drop_last=True, or a sampler that pads), or end all "
            "together with Join([ddp_model], throw_on_early_termination=True)"
        )

    def agree_to(self, what: str) -> None:
        """Makes sure that all ranks can take the mean now, with what was assigned to state; see
        :func:`commopt.state.replicas.agree`."""
        error = self.why_not_synchronize()
        try:
            assigned.follow(self)
        except ValueError as caught:
            error = error or caught
        replicas.agree(self.topology, self.agrees_over, error, what, buckets=following.layout_of_all(self))

    @property
    def takes_local_steps(self) -> bool:
        """True if replicas may differ between two rounds, of which there are more than one."""
        return type(self).replicas_differ is not PackedOptimizer.replicas_differ and self.topology.copies > 1

    @property
    def has_parted(self) -> bool:
        """True if replicas have differed in this run, or may have."""
        return self.takes_local_steps

    def take_mean(self) -> None:
        """Makes the parameters the mean of all replicas, and nothing else."""
        with replicas.reaching_others(self.topology, "averaged()"):
            replicas.take_mean(self.topology, self.buckets)

    def own_value(self, p: Tensor) -> Tensor:
        """Value of ``p`` on this rank, also within :meth:`averaged`."""
        return p.detach() if self._own_values is None else self._own_values.get(p, p.detach())

    def refuse_inside_averaged(self, what: str) -> None:
        """Raises RuntimeError within :meth:`averaged`."""
        if self._own_values is not None:
            raise RuntimeError(
                f"{what} within `with optimizer.averaged():`, where the parameters are the mean of all replicas; leave "
                "it first"
            )

    def begin_change(self, what: str) -> None:
        """Refuses ``what`` within :meth:`averaged`; else forgets the own parts of other ranks: they will be stale."""
        self.refuse_inside_averaged(what)
        self._of_ranks = None

    def refuse_here(self, what: str) -> None:
        """Hook: raises ValueError where ranks come and go, and ``what`` would need all of them."""

    def warn_in_evaluation(self, model: nn.Module) -> None:
        """Warns once if ``model`` runs in ``eval()`` mode while replicas differ, and says what to call.

        ``attach()`` does this for a DDP model; call it for a bare one. Nothing to do for optimizers without local
        steps.
        """
        if type(self).replicas_differ is not PackedOptimizer.replicas_differ:
            replicas.warn_in_evaluation(self, model)

    # saving -----------------------------------------------------------------------------------------------------------

    @binding.on_itself
    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as copies. Communicates nothing.

        ``state`` and ``param_groups`` are the same on every rank. With more than one rank, ``residuals`` holds those of
        this one, with its rank, the world size, the buckets and a checksum of their layout, where it stands among the
        nodes, and a digest of all that. They are apart because tools for distributed checkpoints take what is in
        ``state`` for equal on all ranks. Where replicas differ, ``residuals`` also holds what is this rank's own;
        ``state`` has that as well, so it is equal on all ranks only where they do not differ (CSER's momentum:
        never). Such a tool's mixture of ranks is known by the digest when it is loaded.
        :mod:`commopt.state.split` has how to save the residuals of all ranks, and the rest once.

        Raises:
            ValueError: if somebody has exchanged the parameters in the groups, before :meth:`rebind`; or has deleted
                some of the state, or assigned what does not fit there.
        """
        following.refuse_exchanged(self)
        assigned.follow(self)
        if self._own_values is None:
            following.regroup_between_steps(self)
            self.adopt_values()
            if is_of_processes(self.topology.backend):  # of processes: elsewhere all are within reach
                replicas.tell_of_copies(self)
        packing.refresh_own_tensors(self)
        out = super().state_dict()
        out["state"] = cloned(out["state"])  # a view would be saved with the whole flat buffer behind it
        out["param_groups"] = cloned(out["param_groups"])  # a learning rate may be a tensor
        if (self.topology.world_size > 1 or self.owns_alone) and not self.own_in_state:
            out["residuals"] = self._signed_part()
        if self._of_ranks is not None:
            out[OF_RANKS] = [out["residuals"] if part is None else part for part in self._of_ranks]
        return out

    @binding.on_itself
    @torch._disable_dynamo
    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings each rank's own to rank ``to``, so that the one ``state_dict()`` that this rank gives next is that of
        all ranks. All ranks must call it at the same point; :meth:`state_dict` itself communicates nothing.

        ::

            optimizer.consolidate_state_dict()
            if rank == 0:
                torch.save(optimizer.state_dict(), path)

        The state has ``residuals_of_ranks`` then: the own parts (``residuals``) by rank. Whoever loads it on every rank
        of an equal world has each rank's own back, to the bit; in another world, what ``join_state_dict`` makes of it.
        Lightning and Fabric call this by themselves.

        **Memory**: rank ``to`` has the own parts of all other ranks in host memory, until the next step or whatever
        else changes the state: of 1-bit Adam 4 bytes an element of the model for each of them, or a little more. While
        they are sent, every rank has its own once more, as bytes. Each sends its part to all, as it is.

        Args:
            to: the rank that saves.

        Raises:
            ValueError: if there is no rank ``to``; where ranks hold pieces of the model.
            RuntimeError: if another rank cannot take part.
            commopt.comm.CollectiveError: a collective failed or timed out.
        """
        self.refuse_here("consolidate_state_dict()")
        checks.check_rank("to", to, self.topology.world_size)
        consolidate.refuse_pieces(self.topology, self.own_in_state)
        self._of_ranks = None
        if self.topology.world_size == 1:
            return
        where = f"{type(self).__name__}, consolidate_state_dict()"
        self.agree_to("consolidate_state_dict()")
        with replicas.reaching_others(self.topology, where):
            parts = consolidate.gather_parts(self.topology, self._signed_part(), to, where)
        self._of_ranks = parts or None
        self.topology.traffic.leave_out()

    def _signed_part(self) -> dict[str, Any]:
        """This rank's own part, with a digest of what is in it."""
        own = self.own_part()
        return {**own, "digest": digest_of(own)}

    def saved_as(self) -> str:
        """The optimizer's name in what it saves: that of commopt's class."""
        return foreign.name_of_ours(type(self))

    def loads_of(self) -> tuple[str, ...]:
        """The optimizers of commopt whose state it loads."""
        return (self.saved_as(),)

    def own_part(self) -> dict[str, Any]:
        """This rank's own part, as copies, and whose it is."""
        declared = [(bucket, self.rank_local(group)) for bucket, group in self.grouped_buckets()]
        own = saving.own_states(declared, self.params, self.own_value)
        packed: dict[str, Any] = {}
        known = packing.registered(self)
        if following.same_objects(known, self.params):  # else the numbers are others than those of state
            packed = {"buckets": saving.numbers_in(self.buckets, self.params), "bucket_mb": self.bucket_mb}
        return {**saving.whose(packing.origin_here(self), self.topology), **packed, "state": own}

    @binding.on_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or ``join_state_dict`` gave, or the state of a ``torch.optim.Adam``.

        Copies into the buffers and keeps their dtypes. The buckets become those that the state was saved with, if that
        was with the same ``bucket_mb`` in a world like this one, or is of all ranks: whatever was frozen then or now.
        Of a state with the own parts of all ranks (:meth:`consolidate_state_dict`) each rank takes its own; in another
        world, what ``join_state_dict`` makes of them. Residuals of another rank or world size, or of several ranks
        mixed by a tool, start again from zero, with one warning; replicas stay identical in any case. Keys that users
        have added to ``state``, or to a parameter's, are kept as they are.

        Communicates nothing before the first ``step()``, nor without ``overlap=True``. With it, later, all ranks must
        call it at the same point: what a step has begun with in ``backward()``, on any of them, ends without effect.

        Raises:
            ValueError: if groups, parameters or shapes do not match, or if it is the state of another optimizer;
                nothing is changed then.
            RuntimeError: within :meth:`averaged`.
            commopt.comm.CollectiveError: a collective of the step that had begun failed or timed out.
        """
        self.begin_change("load_state_dict()")
        self.give_up_step()
        if not isinstance(state_dict, dict):
            foreign.check_form(state_dict)
        given: dict[str, Any] = {}
        fresh = [] if self.has_stepped() else self.param_groups  # else what is in them is not as a user has set it

        def take_state(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            # Runs after the user's own hooks. torch would cast state to the dtype of the parameters, so it gets none.
            foreign.check_form(state_dict)
            state_dict = consolidate.with_own(state_dict, self.topology)
            self.check_loaded(state_dict)
            given.update(state_dict)
            return {**foreign.corrected_as(state_dict, self.param_groups), "state": {}}

        def load(_: Any) -> None:  # before the user's own hooks
            for group, mine in zip(self.param_groups, fresh):
                for key in self.defaults.keys() & mine.keys():
                    if not key.startswith("local_"):  # what a local step had, which is the group's
                        group.setdefault(key, mine[key])  # what the state of another optimizer lacks
            following.take_groups(self)
            packing.pack_as_saved(self, given)
            self._load(given)

        before = self.register_load_state_dict_pre_hook(take_state)
        after = self.register_load_state_dict_post_hook(load, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
        self._check_next = True
        self.forget_skips()
        wrapped.attach_in_backward(self)

    def forget_skips(self) -> None:
        """Forgets how many steps in a row were skipped: those were of the run before."""

    def check_loaded(self, given: dict[str, Any]) -> None:
        """Raises ValueError if ``given``, the state that is about to be loaded, does not fit."""
        foreign.check_saver(self.saved_as(), given, self.loads_of())
        if not foreign.savers(given):
            foreign.check_family(self.saved_as(), given, self.param_groups, map(self.moments_of, self.params))
            foreign.check_names(self.saved_as(), given, self.scalars)
            for said in foreign.momenta_lost(given, self.param_groups) if self.topology.rank == 0 else ():
                logger.warning("%s: %s", type(self).__name__, said)
        foreign.check_counters(given["param_groups"], self.group_counters)
        saving.check_fits(given, self.params, self.buckets)

    def moments_of(self, p: Tensor) -> Iterable[str]:
        """The names of the state of ``p`` that an optimizer of torch may have, too."""
        return self.state[p]

    @torch.no_grad()
    def _load(self, given: dict[str, Any]) -> None:
        """Loads a state that fits, once the parameter groups are those of it."""
        entries, origin = loading.read(self, given)
        users = loading.forget_users(self, given)
        loading.fill(self, entries, origin)
        loading.keep_users(self, users)

    def owns(self, origin: Origin | None) -> bool:
        """True if an own part of ``origin`` is this rank's to take."""
        return belongs(origin, self.topology.rank, self.topology.world_size)

    def all_state(self) -> dict[Any, Any]:
        """``state`` with the residuals in it; what users have put there besides is as it is."""
        residuals, entries = self.residuals, self.state.items()
        return {k: {**entry, **residuals.get(k, {})} if isinstance(entry, dict) else entry for k, entry in entries}

    def has_stepped(self) -> bool:
        """True if some group has counted a step or a round."""
        return any(group.get(name) for group in self.param_groups for name in ("step", "round_step", "rounds"))

    # pickling and copying ---------------------------------------------------------------------------------------------

    _SETTINGS: tuple[str, ...] = ()
    """Arguments of the constructor that are not of a group, by name, as attributes: a copy has them."""
    _KEPT: tuple[str, ...] = ("skipped_steps", "dropped_gradients", "defaults", "param_groups")
    """Attributes that a copy has besides."""

    def __getstate__(self) -> dict[str, Any]:
        return pickling.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if pickling.is_whole(state):
            self._unpickle(state)
        else:
            loaded = dict(zip(map(id, self.param_groups), state["param_groups"]))
            self._registered = [(loaded.get(id(group), group), params) for group, params in self._registered]
            self.__dict__["param_groups"] = state["param_groups"]

    def _unpickle(self, state: dict[str, Any]) -> None:
        pickling.restore(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedOptimizer:
        return pickling.copy_of(self, memo)

    def _restart(self) -> None:
        """Sets what is neither state nor setting."""
        self._attachment = None
        self._looked = False
        self._diagnostics = Diagnostics(type(self).__name__, self.topology.rank, self.topology.numbers)
        self._check_next = True


def _dense(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad.coalesce().values() if grad.layout == torch.sparse_coo else grad for grad in grads]
