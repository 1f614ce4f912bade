"""The outer state in buckets, saved and loaded without loss, with the base's own state beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import Topology
from commopt.compress import Compressor, Feedback
from commopt.optim.own import MIXED, Origin, cloned
from commopt.optim.packed import PackedOptimizer, StateBucket
from commopt.outer.wrap import check_base

logger = logging.getLogger("commopt")

POSITION = {"round_step": 0, "rounds": 0, "round_lr": 0.0, "way_norm": 0.0}
"""Where a parameter group stands: local steps since the last synchronisation, how many of these there were, the sum of
the learning rate over the former; and the 2-norm of the last mean way, if it was compressed."""


class SavedOuter(PackedOptimizer):
    """Anchors, momenta and residuals in buckets, and a base optimizer. Says nothing about steps."""

    topology: Topology
    base: torch.optim.Optimizer
    compressor: Compressor | None  # type: ignore[assignment]
    skipped_rounds: int

    clocks = ()
    sometimes = ("own",)
    owns_alone = True  # the state of the base

    momentum = False
    """Whether the outer step keeps ``outer_momentum``, a flat buffer like the anchor."""

    def init_bucket(self, bucket: StateBucket) -> None:
        bucket.buffers["anchor"] = bucket.pack_params()
        if self.momentum:
            bucket.buffers["outer_momentum"] = bucket.zeros()

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        """Residuals that stay what they were until a synchronisation is complete, and a mask of the padding."""
        nodes = self.topology.inter_node.world_size
        if self.compressor is None or nodes == 1:
            return
        numel = bucket.padded // bucket.places
        bucket.feedback = Feedback.zeros(numel, nodes, bucket.dtype, bucket.device, undoable=True)
        used, live = bucket.zeros(), torch.empty(bucket.padded // 8, dtype=torch.uint8, device=bucket.device)
        used[: bucket.numel] = 1
        ops.pack_nonzero(used, live)
        bucket.active = live

    # saving -----------------------------------------------------------------------------------------------------------

    def local_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"own": self.own_value(p)} if group["round_step"] else {}

    def own_part(self) -> dict[str, Any]:
        base = {key: value for key, value in self.base.state_dict().items() if key != "param_groups"}
        return {**super().own_part(), "base": cloned(base)}

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as copies. Communicates nothing.

        ``state`` (anchors and outer momenta) and ``param_groups`` are the same on every rank. ``residuals`` is this
        rank's own: the state of its base, between two synchronisations its parameters, and what compression owes, with
        its rank, the world size, the layout of the buckets and a digest. :mod:`commopt.optim.state` has how to save
        that of all ranks, and the rest once.
        """
        return super().state_dict()

    # loading ----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or ``join_state_dict`` gave, or the state of the base optimizer alone.

        Also sets the parameters: to this rank's own, where the state was saved between two synchronisations, else to
        the anchor. So load the model first. Without the part of any rank (``split_state_dict``), or with a mixture of
        several ranks', parameters are the anchor's and the base starts anew, with one warning; with that of another
        rank they are too, and the base has what that rank's had. The state of the base alone leaves the parameters as
        they are, and makes them the anchor.

        Raises:
            ValueError: if groups, parameters or shapes do not match; nothing is changed then.
            RuntimeError: within :meth:`averaged`.
        """
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what load_state_dict, unpickling or copying brings."""
        if hasattr(self, "_incoming"):
            with torch.no_grad():
                self._take(self._incoming)
        else:
            self._unpickle(dict(state))

    def _take(self, given: dict[str, Any]) -> None:
        of_base = not any(key in group for group in given["param_groups"] for key in POSITION)
        base, origin, entries = self._what_to_take(given, of_base)
        before = self.param_groups
        # torch would go on with the tensors given
        self.base.load_state_dict({"state": {}, **cloned(base), "param_groups": given["param_groups"]})
        self.adopt_groups(before)
        if of_base:
            for group in self.param_groups:
                group.update(POSITION)
        users = self._forget_users({**given, "state": {}} if of_base else given)
        self._fill(entries, origin)
        self._keep_users(users)
        for p in (p for bucket in self.buckets for p in bucket.params):
            p.copy_(entries.get(p, {}).get("own", self.state[p]["anchor"]))

    def _what_to_take(
        self, given: dict[str, Any], of_base: bool
    ) -> tuple[dict[str, Any], Origin | None, dict[Any, Any]]:
        """The state of the base; whose own part that is of, and the outer state by parameter."""
        if of_base:
            return {"state": given["state"]}, None, {}
        entries, origin = self._incoming_state(given)
        base = (given.get("residuals") or {}).get("base")
        name = type(self.base).__name__
        if base is None and self.topology.rank == 0:
            logger.warning(
                "%s: the loaded state has no rank's own part: every rank starts at the anchor, and its base %s with no "
                "state. Save every rank's (commopt.optim.split_state_dict) to keep them.",
                type(self).__name__, name,
            )  # fmt: skip
        elif base is not None and not self.owns(origin):
            then = "with no state" if origin is None or origin[0] == MIXED else "with that rank's state"
            self.report_not_own(
                origin, f"its parameters and the state of {name}", f"it starts at the anchor, and {name} {then}"
            )
            base = base if then.endswith("that rank's state") else None
        return base or {}, origin, entries

    def adopt_groups(self, before: list[dict[str, Any]]) -> None:
        """Makes the groups of the base ours, after it was loaded; what they lack is as ``before``."""
        self.param_groups = self.base.param_groups
        for old, group in zip(before, self.param_groups):
            for key, default in self.defaults.items():
                group.setdefault(key, old.get(key, default))

    def _fill(self, state: Mapping[Tensor, dict[str, Any]], origin: Origin | None) -> None:
        """Copies ``state`` into the buffers; an anchor that it lacks is the parameter, all else starts from 0."""
        for bucket in self.buckets:
            for p in bucket.params:
                self._fill_one(self.state[p], {"anchor": p.detach(), **state.get(p, {})})
        self._fill_residuals(state, origin)

    def had_residuals(self, p: Tensor) -> bool:
        return False  # it may be of a run without a compressor

    def pay(self, p: Tensor, owed: Tensor) -> None:
        self.state[p]["anchor"].sub_(owed)

    # pickling and copying ---------------------------------------------------------------------------------------------

    _SETTINGS: tuple[str, ...] = (
        "base", "compressor", "max_grad_norm", "bucket_mb", "guard", "skipped_steps", "skipped_rounds", "defaults",
    )  # fmt: skip

    def _unpickle(self, state: dict[str, Any]) -> None:
        check_base(state["base"])
        super()._unpickle({**state, "param_groups": state["base"].param_groups})
