"""Local steps, and an outer step now and then: what all optimizers of this kind share.

Each rank lets a base optimizer of its own take ``period`` steps on its own gradients, without a word to the others.
Then the ranks average how far they have come, and a subclass says what to make of that:

    round:    x_i <- x, on every rank i;   period local steps of the base on x_i
              D = mean_i (x - x_i), in float32 or compressed
              x <- outer_step(x, D), the same bits on every rank

x, the **anchor**, is kept in float32 (float64 for float64 parameters), so bfloat16 parameters have a master copy; what
counts as a rank's pseudo-gradient is the distance from the rounded anchor it has started from. The base's own state is
a rank's own, but for tensors of it that ``state_period`` names (:mod:`commopt.outer.base_state`).

A subclass says ``check_group``, ``outer_step``, and what it needs: ``momentum``, ``uses_lr``, ``own_settings``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from commopt.bucket import buffer_dtype
from commopt.comm import Backend, Topology, refuse_if_left_out, resolve_backend
from commopt.compress import Compressor
from commopt.outer import ending, groups, joining, local_steps, member_rounds, stream_state, streams
from commopt.outer.flight import Flights
from commopt.outer.loading import BASE, MOVED, adopt_groups, load, refuse_uncuttable, state_of_base
from commopt.outer.means import Entry, Means
from commopt.outer.members import Members
from commopt.outer.mixed import Mixed, check_names, name_of, names_loaded, parts_of
from commopt.outer.rounds import Round
from commopt.outer.streaming import OF_A_PART, STILL, Streaming, came_from, count_step, in_flight
from commopt.outer.wrap import Where, check_base, follow_casts, make_base
from commopt.sharding import as_cut, largest_piece, local
from commopt.state import binding, comparing, following, pickling, wrapped
from commopt.state.foreign import OUTER
from commopt.state.guard import Guard
from commopt.state.host import as_numbers
from commopt.state.lifetime import forget_frames, import_what_torch_imports_late
from commopt.state.loading import OWN
from commopt.state.model_buffers import HowBuffers
from commopt.state.own import Origin, cloned
from commopt.state.own_tensor import OwnTensor
from commopt.state.packed import PackedOptimizer
from commopt.state.saving import PARAMETER, Entries
from commopt.state.state_bucket import StateBucket
from commopt.step.closure import loss_of

logger = logging.getLogger("commopt")


POSITION = {"round_step": 0, "rounds": 0, "round_lr": 0.0, "pseudo_gradient_norm": 0.0}
"""Position of a parameter group: local steps since the last synchronisation, how many of these there were, the sum
of the learning rate over the former; and the 2-norm of the last mean pseudo-gradient, if it was compressed."""


class OuterOptimizer(PackedOptimizer):
    """A base optimizer with an outer step every ``period`` steps; see the module's docstring for what a subclass adds.

    Its ``param_groups`` are those of the base, so learning-rate schedules act on the base; the outer hyper-parameters
    are there too (``outer_...``), and ``period``, which may change between rounds, and the position: ``round_step``
    local steps since the last of ``rounds`` synchronisations. ``state`` has the outer state; ``base.state`` is the
    base's.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups, for the class ``base``; or a base optimizer.
        base: class (or any callable) of the base optimizer; None is torch.optim.AdamW, or ``params`` is the optimizer:
            :class:`commopt.Mixed` is one of several.
        base_args: arguments of that class.
        outer: outer hyper-parameters of the groups.
        period: local steps between two synchronisations, >= 1.
        compressor: compresses the pseudo-gradients that are sent; None is full precision.
        max_grad_norm: clip this rank's gradient to this norm in each local step, or None.
        bucket_mb: MB (2**20 bytes) of float32 per bucket; None for an 8th of the group, 1 to 25 (GPU: to 100).
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None. Digests are compared at
            synchronisations, about every ``check_every`` steps.
        streaming: how parameters are sent in fragments while training goes on; None: all at the end of a round.
        state_period: at every how many synchronisations which tensor of the base's state is averaged, by name; None is
            never.
        reduction, process_group, backend: as for every optimizer of commopt.
        members: ranks that may come and go, in place of a process group.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, for a base optimizer that communicates
            itself or has no such state, or if ranks differ in parameters or settings.
    """

    base: torch.optim.Optimizer
    compressor: Compressor | None  # type: ignore[assignment]
    skipped_rounds: int
    members: Members | None
    _where: dict[Tensor, Where]  # of each parameter, where the state of the base is

    step_counters = ()
    group_counters = ("rounds", "round_step")
    owns_alone = True  # the state of the base

    momentum = False
    """True if the outer step keeps ``outer_momentum``, a flat buffer like the anchor."""

    uses_lr = False
    """True if the outer step divides by the learning rate of the base."""

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None,
        base_args: dict[str, Any],
        outer: dict[str, Any],
        *,
        period: int,
        compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        guard: Guard | None = None,
        streaming: Streaming | None = None,
        state_period: Mapping[str, int] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        members: Members | None = None,
    ) -> None:
        import_what_torch_imports_late()
        params = binding.in_a_list(params)
        member_rounds.check_members(members, params, streaming, state_period, process_group, backend)
        self.members = members
        self.topology = Topology(resolve_backend(process_group, members.begin() if members else backend, params))
        self.compressor, self.max_grad_norm, self.bucket_mb = compressor, max_grad_norm, bucket_mb
        self.guard = Guard() if guard is None else guard
        self.reduction = reduction
        self.streaming = streaming
        self.state_period: Any = {} if state_period is None else state_period
        self.buckets = []
        self.skipped_steps = self.skipped_rounds = 0
        self._restart()

        def construct() -> None:
            groups.check_settings(self)
            self.state_period = dict(sorted(self.state_period.items()))
            self.base = make_base(params, base, base_args, type(self))
            for group in self.base.param_groups:
                binding.take_mesh(self, group)
            check_base(self.base)
            groups.check_state_period(self)
            ours, whose = {**outer, "period": period, **self.position()}, {OUTER: self.saved_as()}
            check_names(self.base, ours)
            super(OuterOptimizer, self).__init__(self.base.param_groups, {**self.base.defaults, **ours, **whose})
            self.param_groups = self.base.param_groups
            for group in self.param_groups:
                group.update(whose)
            groups.check_fragments(self)

        with joining.beginning(self):
            self.register_new(construct)  # the groups of the base all at once
            self._ready = True
        self._where = follow_casts(parts_of(self.base), self.params, {})

    def position(self) -> dict[str, Any]:
        """Position of a parameter group before its first step."""
        return dict(POSITION) if self.streaming is None else {**POSITION, **self.streaming.position()}

    def _restart(self) -> None:
        super()._restart()
        self._skipped_in_a_row: Counter[int | None] = Counter()  # rounds, by fragment; None: of all
        self._moved = self._loaded_anchors = False
        self._where = {}
        self._local_skips = 0
        self._square = 0.0
        self.flights = Flights(self.topology)
        self.sent: dict[Tensor, Tensor] = {}

    # what a subclass says ---------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError if an outer hyper-parameter of ``group`` is out of range."""

    def own_settings(self) -> dict[str, Any]:
        """Settings of ``self`` that must be the same on all ranks, by name, with a repr that says so. Raises ValueError
        if one is out of range."""
        return {}

    def means_of(self, entries: Sequence[Entry], flats: list[Tensor]) -> Means:
        """The means over all ranks of how far they have come: of ``flats``, one of each entry."""
        return Means(entries, flats, self.compressor)

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        """Moves ``bucket.buffers["anchor"]``.

        Args:
            bucket: its flat buffers, of ``padded`` elements; what lies behind ``numel`` is 0 and stays 0.
            group: of its parameters.
            pseudo_gradient: D, the mean over the ranks of anchor - x_i, like the anchor; may be overwritten.
            ctx: the round.
        """
        raise NotImplementedError

    def to_mean(self, anchor: Tensor, mean: Tensor) -> None:
        """Makes the ``anchor`` of a parameter that is frozen the mean over the ranks; ``mean``: as :meth:`outer_step`
        is given it."""
        anchor.sub_(mean)

    def capacity_of(self, params: Sequence[Tensor]) -> int:
        """So that there are as many buckets as fragments, at least, unless a parameter alone is too large."""
        most = super().capacity_of(params)
        if self.fragments == 1:
            return most
        total = sum(largest_piece(p) * buffer_dtype(p.dtype).itemsize for p in params)
        return max(1, min(most, total // self.fragments))

    def make_buckets(self, groups: Sequence[dict[str, Any]]) -> None:
        before = self.packed() | {*self._kept_packed}
        super().make_buckets(groups)
        if self.streaming is not None:
            streams.note_joined(self, groups, before)

    def init_bucket(self, bucket: StateBucket) -> None:
        if self.fragments > 1:
            loads = [0] * self.fragments
            for other in self.buckets:
                loads[other.fragment] += other.numel * other.dtype.itemsize
            bucket.fragment = loads.index(min(loads))
        bucket.buffers["anchor"] = bucket.pack_params()
        if self.momentum:
            bucket.buffers["outer_momentum"] = bucket.zeros()

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        """Makes residuals that stay what they were until a synchronisation is complete."""
        if self.compressor is not None:
            bucket.add_residuals(double_buffered=True)

    # groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base. All ranks must add the same one at the same time; it joins the round under way."""
        if not self._ready:
            super().add_param_group(param_group)
            groups.check_new(self, self.param_groups[-1])
            return
        self.refuse_here("add_param_group()")
        if not following.exchanged(self):  # else some are to be in the new group, which may be refused
            streams.heed_digests(self)
        groups.add(self, param_group)

    def _register(self, new: list[dict[str, Any]], error: Exception | None, differ: bool = False) -> None:
        apart = ("params", "param_names", *OF_A_PART)
        settings: list[Any] = [as_numbers(g, [k for k in g if k not in apart]) for g in new]
        binding.register_groups(self, new, settings + groups.fixed_settings(self, error), error, differ)
        self.topology.traffic.end_step()

    @torch.no_grad()
    def adopt_values(self) -> None:
        """Make parameters the anchor where a round begins, if they were changed since the last synchronisation, such as
        those of a model that was loaded after the optimizer was made."""
        for bucket, _ in self.entries([p for p in range(self.fragments) if self.at_rest(p)]):
            if bucket.adopt("anchor"):
                self._moved = True

    def rebound(self, new: Mapping[Tensor, Tensor]) -> None:
        if isinstance(self.base, PackedOptimizer):
            return self.base.rebind()
        moved = {new.get(p, p): entry for p, entry in self.base.state.items()}
        self.base.state.clear()
        for p, entry in moved.items():
            self.base.state[p] = {name: as_cut(t, p) if isinstance(t, Tensor) else t for name, t in entry.items()}

    # the step ---------------------------------------------------------------------------------------------------------

    # so that a GradScaler never skips step() on one rank alone, which would leave the ranks at different places
    _step_supports_amp_scaling = True

    @torch._disable_dynamo  # torch.compile leaves it as it is, as other optimizers of commopt
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One local step; every ``period``-th one is followed by a synchronisation, which all ranks must reach.

        If a gradient of this rank is inf or NaN, its base does not step, but the round continues: other ranks know
        nothing of it. A GradScaler's scale is taken out of the gradients, in place; so is what clipping takes.

        Args:
            closure: reevaluates the model and returns the loss; called once.

        Returns:
            what the closure returned, or None.

        Raises:
            ValueError: for a ``period`` that was changed to what is not allowed, and under a GradScaler where
                gradients are float16; nothing is done then.
            RuntimeError: within :meth:`averaged`, within ``join()`` of an attached DDP model, and on one rank that is
                alone because the optimizer was made before ``init_process_group()``.
            commopt.agreement.calls.StepRefused: the ranks stand at different places, or one has failed.
            commopt.comm.CollectiveError: a collective failed. In both cases the local step has been taken and nothing
                else has changed: this rank's parameters are its own.
        """
        self.begin_change("step()")
        refuse_if_left_out(self.topology.backend, type(self).__name__)
        binding.rebind_if_new(self)
        for group in self.param_groups:  # it may have been changed
            groups.check_period(self, group)
        wrapped.attach_if_wrapped(self)
        if self._attachment is not None:
            self._attachment.before_step()
        error = None
        loss = loss_of(closure)
        self.flights.progress()
        try:
            local_steps.step(self)
        except Exception as caught:
            if not self._ends_with_next_step():
                raise
            error = caught  # the other ranks are about to wait for this one
        try:
            self._end_step(error)
        except Exception as raised:
            forget_frames(raised)
            raise
        except BaseException:  # KeyboardInterrupt: wherever it was, and elsewhere on each rank
            self._check_next = True
            raise
        finally:
            error = None
            if self._attachment is not None:
                self._attachment.clear()
            self.topology.receipt.clear()
            wrapped.count_others(self)
            self.topology.traffic.end_step()
        return loss

    def _end_step(self, error: Exception | None) -> None:
        """Counts a local step, and ends what ends with it."""
        for group in self.param_groups:
            lr = groups.lr_of(group, failed=error is not None)
            group["round_step"] += 1
            group["round_lr"] += lr
            if self.streaming is not None:
                count_step(group, lr)
        if self.streaming is not None:
            streams.step(self, error)
        elif error is not None or self.param_groups[0]["round_step"] >= self.param_groups[0]["period"]:
            self.end_round(error or local_steps.too_many_skipped(self))

    # rounds -----------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Follows what was done to parameters, and to the base behind our back."""
        self.follow_base()
        following.refuse_exchanged(self)
        following.refuse_regrouped(self)
        for bucket in self.buckets:
            bucket.check_shapes()
        following.follow_parameters(self)
        self._where = follow_casts(parts_of(self.base), self.params, self._where)

    def follow_base(self) -> None:
        """Follows the groups of the base, which somebody may have loaded."""
        if isinstance(self.base, Mixed):
            self.base.follow()
        if self.param_groups is not self.base.param_groups:
            adopt_groups(self, self.param_groups)

    @property
    def replicas_differ(self) -> bool:
        several = self.topology.copies > 1 or self.members is not None or came_from(self.param_groups[0]) > 1
        return several and self._under_way()

    def _under_way(self) -> bool:
        """True if some round has begun."""
        group = self.param_groups[0]
        return bool(group["round_step"]) or any(not self.at_rest(p) for p in range(self.fragments))

    def at_rest(self, fragment: int) -> bool:
        """True if parameters of a fragment are their anchors, unless somebody has changed them."""
        group = self.param_groups[0]
        if self.streaming is None:
            return bool(group["round_step"] == 0)
        moving = group["fragment_steps"][fragment] or group["sent_steps"][fragment]
        return not moving and not (self.is_eager and group["started"])

    def synchronize_replicas(self) -> None:
        """Ends all rounds now. If some rank's parameters are inf or NaN, all skip that, and replicas stay different."""
        self.follow()
        if self.streaming is None:
            self.end_round(None)
        else:
            streams.synchronize(self)

    def refuse_here(self, what: str) -> None:
        member_rounds.refuse(self, what)

    @binding.on_itself
    def averaged(self, model: nn.Module | None = None, buffers: HowBuffers = "mean") -> AbstractContextManager[None]:
        self.flights.land_all()  # all ranks are here
        if model is not None:
            self.refuse_here("averaged(model)")
        return super().averaged(model, buffers)

    averaged.__doc__ = PackedOptimizer.averaged.__doc__

    def agree_to(self, what: str) -> None:
        if self.members is None:  # members meet, and agree there
            super().agree_to(what)

    def take_mean(self) -> None:
        if self.members is None:
            super().take_mean()
        else:
            member_rounds.take_mean(self, self.members)

    def end_round(self, error: Exception | None) -> None:
        """Ends the round of all parameters."""
        if self.members is None:
            ending.end_round(self, error, [0])
        else:
            member_rounds.end_round(self, self.members, error)

    def anchors_moved(self, device: torch.device, where: str) -> None:
        """Hook for when anchors were taken over anew from parameters, on any rank. All ranks call it."""
        ending.equalize_anchors(self, device, where)

    def before_sending_again(self) -> None:
        """Hook for when fragments are sent on, or once more, after a load, or with buckets made anew. All ranks call
        it."""

    def count_round(self, fragments: Sequence[int], whole: bool, squares: ending.Squares) -> None:
        """Counts that the rounds of fragments have ended; ``whole``: and that all replicas are equal."""
        if self.streaming is not None:
            streams.count_round(self, fragments, whole, squares)
            return
        (of_groups,) = ending.of_all_parts(self, squares, [0])
        for group, square in zip(self.param_groups, of_groups):
            group.update(round_step=0, round_lr=0.0, rounds=group["rounds"] + 1, pseudo_gradient_norm=square**0.5)

    # fragments: one, with all parameters, unless they are streamed ----------------------------------------------------

    @property
    def fragments(self) -> int:
        """Number of fragments; 1 if it does not stream."""
        return 1 if self.streaming is None else self.streaming.fragments

    @property
    def is_eager(self) -> bool:
        """True if fragments are merged eagerly."""
        return self.streaming is not None and self.streaming.is_eager

    @property
    def own_anchors(self) -> bool:
        """True if anchors and outer momenta are each rank's own between two synchronisations."""
        return self.is_eager

    def entries(self, fragments: Sequence[int] | None = None) -> list[Entry]:
        """The buckets of some fragments with their groups; of all if it is None."""
        every = self.grouped_buckets()
        return [(bucket, group) for bucket, group in every if fragments is None or bucket.fragment in fragments]

    def round_of(self, fragment: int) -> int:
        """Number of rounds of a fragment that have ended."""
        group = self.param_groups[0]
        return int(group["rounds"] if self.streaming is None else group["fragment_rounds"][fragment])

    def place_of(self, bucket: StateBucket, group: dict[str, Any], sent: bool) -> tuple[int, float]:
        """The number of the round of ``bucket`` that ends now, and its mean learning rate; ``sent``: of the one that
        is in flight."""
        if self.streaming is None:
            return group["rounds"], group["round_lr"] / group["round_step"]
        p, which = bucket.fragment, "sent" if sent else "fragment"
        return group["fragment_rounds"][p], group[f"{which}_lr"][p] / group[f"{which}_steps"][p]

    def _compare(self, table: list[list[int]], where: str) -> None:
        """Says what follows from the digests of all ranks: of anchors and outer momenta.

        Raises:
            commopt.optim.ReplicasDiffer: they differ, and cannot be repaired, or shall not.
        """
        right = comparing.right_replicas(self, table, where, "all have what rank %d has now")
        self._check_next = bool(right)
        comparing.copy_replicas(self, right)

    # saving and loading -----------------------------------------------------------------------------------------------

    @property
    def ever_rank_local(self) -> tuple[str, ...]:  # type: ignore[override]
        return (PARAMETER, *self._own_buffers())

    def rank_local(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (PARAMETER, *self._own_buffers()) if self._under_way() else ()

    def _own_buffers(self) -> tuple[str, ...]:
        """Names of flat buffers that are each rank's own between two synchronisations."""
        return ("anchor", "outer_momentum")[: 1 + self.momentum] if self.own_anchors else ()

    def own_tensors(self, bucket: StateBucket, group: dict[str, Any]) -> list[dict[str, OwnTensor]]:
        """As of every optimizer; and the state of the base."""
        out = super().own_tensors(bucket, group)
        for i, (p, x) in enumerate(zip(bucket.params, bucket.values)):
            for name, value in state_of_base(self.base, p, x).items():
                out[i][BASE + name] = bucket.own(i, value, True)
        if self.streaming is not None:
            sent = stream_state.what_is_sent(self)
            for i, (p, nothing) in enumerate(zip(bucket.params, bucket.zero_views())):
                out[i][OWN + stream_state.SENT] = bucket.own(i, sent.get(p, nothing), True)
        return out

    def own_part(self) -> dict[str, Any]:
        base = {key: value for key, value in self.base.state_dict().items() if key != "param_groups"}
        own, sent = super().own_part(), stream_state.what_is_sent(self)
        for i, p in enumerate(self.params):
            if p in sent:
                own["state"].setdefault(i, {})[stream_state.SENT] = sent[p].clone()
        if self.streaming is not None:
            own[STILL] = [list(group[STILL]) for group in self.param_groups]
        return {**own, MOVED: self._moved, "base": cloned(base)}

    def all_state(self) -> dict[Any, Any]:
        out = super().all_state()
        for p, flat in stream_state.what_is_sent(self).items():
            out[p] = {**out[p], stream_state.SENT: flat}
        return out

    def check_loaded(self, given: dict[str, Any]) -> None:
        super().check_loaded(given)
        stream_state.check_loaded(self, given["param_groups"])

    def forget_skips(self) -> None:
        self._skipped_in_a_row.clear()
        self._local_skips = 0

    def loaded(self, entries: Entries, origin: Origin | None) -> None:
        if self.streaming is not None:
            stream_state.take_over(self, entries)

    @binding.on_itself
    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as copies. Communicates nothing.

        ``state`` (anchors and outer momenta) and ``param_groups`` are the same on every rank. ``residuals`` is this
        rank's own: the state of its base, between two synchronisations its parameters, and its residuals, with
        its rank, the world size, the layout of the buckets and a digest. :mod:`commopt.state.split` has how to save
        that of all ranks, and the rest once.

        Raises:
            ValueError: where parameters are sharded, and the base has state that is not cut as they are.
        """
        self.follow_base()
        if self.own_in_state:
            refuse_uncuttable(self.base)
        return super().state_dict()

    def saved_as(self) -> str:
        """With the name of its base."""
        return f"{super().saved_as()}({name_of(self.base)})"

    def loads_of(self) -> tuple[str, ...]:
        """Also those whose state its base loads, alone."""
        return self.saved_as(), *names_loaded(self.base)

    @binding.on_itself
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or ``join_state_dict`` gave, or the state of the base optimizer alone.

        Also sets the parameters: to this rank's own, where the state was saved between two synchronisations, else to
        the anchor. So load the model first. Without the part of any rank (``split_state_dict``), or with a mixture of
        several ranks', parameters are the anchor's and the base starts anew, with one warning; with that of another
        rank they are too, and the base has what that rank's had. The state of the base alone leaves the parameters as
        they are, and makes them the anchor. What is in flight of a streamed one is waited for, and dropped: all ranks
        call this at the same point then.

        Raises:
            ValueError: if groups, parameters or shapes do not match; nothing is changed then.
            RuntimeError: within :meth:`averaged`.
            commopt.comm.CollectiveError: what was in flight has failed.
        """
        self.flights.land_all()  # what has failed there is raised before anything changes
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what unpickling or copying brings; of what is loaded, the groups are the base's."""
        if pickling.is_whole(state):
            self._unpickle(state)

    def moments_of(self, p: Tensor) -> Iterable[str]:
        """The names of the base's state of ``p``."""
        return state_of_base(self.base, p, local(p.detach()))

    @torch.no_grad()
    def _load(self, given: dict[str, Any]) -> None:
        load(self, given)
        self._where = follow_casts(parts_of(self.base), self.params, {})  # where the state of the base is now

    def prepare(self, entries: Entries, origin: Origin | None) -> Entries:
        """An anchor that is lacking is the parameter."""
        params = [p for bucket in self.buckets for p in bucket.params]
        return {**entries, **{p: {"anchor": p.detach(), **entries.get(p, {})} for p in params}}

    def residual_expected(self, p: Tensor) -> bool:
        return False  # it may be of a run without a compressor

    def fold_residual_into(self, p: Tensor, residual: Tensor) -> None:
        for x in (local(self.state[p]["anchor"]), local(p.detach())):  # both, or it would be taken for local steps
            x.sub_(residual)

    _SETTINGS: tuple[str, ...] = (
        "base", "compressor", "max_grad_norm", "bucket_mb", "guard", "reduction", "state_period", "streaming",
    )  # fmt: skip
    _KEPT: tuple[str, ...] = ("skipped_steps", "skipped_rounds", "defaults", "_moved")

    def __getstate__(self) -> dict[str, Any]:
        self._where = follow_casts(parts_of(self.base), self.params, self._where)
        return super().__getstate__()

    def _unpickle(self, state: dict[str, Any]) -> None:
        check_base(state["base"])
        self.members = None  # it is the original that goes on with them
        super()._unpickle({**state, "param_groups": state["base"].param_groups})
        self._moved |= state.get("_moved", False)  # of a pickle from before it was kept
        self._where = follow_casts(parts_of(self.base), self.params, {})

    # what is it doing? ------------------------------------------------------------------------------------------------

    def lets_average(self, group: dict[str, Any]) -> bool:
        """True if DDP averages the gradients of the group's next step: never."""
        return False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context of every backward of a step but the last, as other optimizers have it: nothing is sent in any."""
        return contextlib.nullcontext()

    @property
    def phase(self) -> str:
        """Of the next step: "plain" on one rank, "local", or "synchronizing" if it ends a round."""
        if self.topology.copies == 1 and self.members is None:
            return "plain"
        return "synchronizing" if self._ends_with_next_step() else "local"

    def steps_locally(self) -> bool:
        """True if ranks tell each other nothing in the next step."""
        return not self._ends_with_next_step()

    def _ends_with_next_step(self) -> bool:
        """True if ranks may have to wait for each other at the end of the next step."""
        group = self.param_groups[0]
        if self.streaming is not None:
            return streams.due_after(self.streaming, group)
        return bool(group["round_step"] + 1 >= group["period"])

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of this rank. Local: communicates nothing.

        Returns:
            phase, step, total, fp32_bytes, ratio: as of :meth:`commopt.optim.CommOptimizer.comm_stats`; ``step`` is the
                last step: nothing is sent between two rounds.
            residual_norm, pseudo_gradient_norm: 2-norms of this rank's worker residual and of the last mean
                pseudo-gradient; 0 without a compressor.
            residual_ratio: the one over the other; None if the latter is 0.
            round_step, rounds: local steps since the last synchronisation, and how many there were.
            skipped_steps: local steps that this rank skipped because of inf or NaN.
            skipped_rounds: synchronisations that all ranks skipped because of inf or NaN.
            in_flight: numbers of the fragments in flight, oldest first; where parameters are streamed.
            epoch, members: how often members have met, and their names; where ranks come and go.
        """
        group = self.param_groups[0]
        residual = self.residual_norm()
        norm = sum(g["pseudo_gradient_norm"] ** 2 for g in self.param_groups) ** 0.5
        return {
            "phase": self.phase,
            **self.traffic(),
            "residual_norm": residual,
            "pseudo_gradient_norm": norm,
            "residual_ratio": residual / norm if norm else None,
            "round_step": group["round_step"],
            "rounds": group["rounds"],
            "skipped_steps": self.skipped_steps,
            "skipped_rounds": self.skipped_rounds,
            **({} if self.streaming is None else {"in_flight": in_flight(group)}),
            **({} if self.members is None else self.members.stats()),
        }
