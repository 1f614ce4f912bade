"""1-bit LAMB: LAMB whose momentum travels as signs (Li et al., arXiv 2104.06069, Algorithm 1).

Read first: tests/oracle_lamb.py, the same on plain lists of floats.

LAMB gives every tensor a step in proportion to its weights. With a variance that stands and a momentum of signs, as in
1-bit Adam, that ratio goes wrong. So it is averaged while LAMB still runs, and later only corrected, by a variance that
is rebuilt from what the momentum has done.

    warm-up, t <= T_w:     LAMB on g = mean_i g_i (see :mod:`commopt.optim.lamb`), with its trust ratio c of each tensor
                           c_avg = b3 c_avg + (1-b3) c
    at the switch:         v = max(v, 0.01 mean(v)) of each tensor
                           k = 1 / rms(m) of each tensor, for the rest of the run;   f = v
    compressed, t > T_w:   m_i = k (b1 m' + (1-b1) g_i);   m = compressed_mean_of(m_i) / k      (m' is the last m)
                           g = (m - b1 m') / (1-b1);       f = b2 f + (1-b2) g^2;   v as at T_w
                           u0 = m / (sqrt(v) + eps);       u = u0 + wd x
                           r = max_j (sqrt(v_j) + eps) / (sqrt(f_j) + eps);   w = min(1, ||u0|| / ||u||)
                           r = w r + (1-w), kept in [factor_min, factor_max], then within 1 +- factor_threshold of the
                           last r (1 at first)
                           x = x - lr c_avg r u

k makes tensors that share a scale in the compression equally large; elements of one tensor that differ in v stay as
they are, and a momentum of signs moves those with a small v by many times what LAMB does. With ``scaling="element"``,

                           k = 1 / (sqrt(v) + eps) of each element

the signs are those of u0, all equally large: it takes LAMB's learning rates, where the paper's k needs lower ones.

Where this differs from the paper and its usual implementation:

* The common magnitude is 1, where the paper takes the mean over all tensors: compressing a multiple gives the multiple,
  so only the ratios between tensors count. So k depends on nothing but its tensor.
* ``scaling="element"`` is ours.
* Elements of v that are not 0 stand as 0.01 of the mean in their tensor, at least (:mod:`commopt.optim.floor`);
  ``min_variance=0`` is the paper's.
* A momentum that has vanished, to less than a tenth of the root mean square of sqrt(v), counts with that tenth: there
  is no division by 0, and no k that makes a tensor with a vanishing momentum drown its neighbours.
* c_avg is divided by 1 - b3^n, n being how often a ratio was averaged: it starts at 0 and would be too small after a
  short warm-up. A tensor without any ratio by then (its weights were 0, or the state was that of another optimizer)
  takes the first one it has in the compressed phase.
* A ratio of exactly 1 is averaged like any other; what is not, is a tensor where a norm is 0.
* Masks as in :class:`commopt.OneBitAdam`: elements with v = 0 at the switch keep a momentum of 0, and are left out of k
  and of r, which one of them would otherwise keep from falling below 1.
* A tensor without a gradient on any rank is left alone: m, f, r, c_avg and residuals stay, and it is in no scale.
* Scales by block; one rank or node alone is plain LAMB; nodes of several ranks, and ``freeze_step="auto"``: as in 1-bit
  Adam.
* Residuals are kept in the units of the momentum, that is divided by k: their sum over a run, and what they are worth
  at another world size, do not depend on k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.comm import Backend, Work
from commopt.compress import Compressor
from commopt.optim import floor
from commopt.optim.exchange import compressed_mean_of, local_momentum
from commopt.optim.rules import frozen_lamb_, lamb_, scaling_coeffs
from commopt.optim.warmup import WarmupOptimizer, warmup_defaults
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket
from commopt.step.in_flight import StepContext
from commopt.step.torch_options import OF_LAMB


class OneBitLamb(WarmupOptimizer):
    """LAMB that sends one bit per parameter once its variance has settled.

    ::

        optimizer = commopt.OneBitLamb(model.parameters(), lr=1e-3, weight_decay=0.01)  # was commopt.Lamb(...)

    Give it a bare module: it does all communication itself, in ``step()``. A DistributedDataParallel around it is found
    by the first step, or connected before by :func:`commopt.attach`. All ranks must call ``step()`` equally often.

    State per parameter and rank: exp_avg, exp_avg_sq, fresh_exp_avg_sq, one residual of the same size and 1/W of one,
    in float32 (float64 for float64 parameters), that is 16 + 4/W bytes an element; residuals only with more than one
    rank. With nodes of L ranks the residuals are 1/L and 1/W of its size. A compressed step needs 16 bytes an element
    of one bucket besides. Each tensor has four numbers: scaling_coeff (k; 0 before it is known), trust_ratio (c_avg,
    not yet divided by the other), trust_ratio_weight (1 - b3^n), and factor (r).

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a 0-d tensor, read at each step.
        betas: decay of exp_avg and exp_avg_sq, each in [0, 1).
        eps: added to the square root, > 0.
        weight_decay: >= 0; the decay is part of u, and so of the trust ratio.
        min_coeff, max_coeff: bounds of the trust ratio in warm-up, 0 <= min_coeff <= max_coeff, max_coeff > 0.
        coeff_beta: decay b3 of the averaged trust ratio, in [0, 1).
        factor_min, factor_max: bounds of r, 0 < factor_min <= 1 <= factor_max.
        factor_threshold: by how much of itself r may change in a step, in [0, 1).
        scaling: what compression sees as equally large: "tensor" for the momenta of all tensors, as in the paper;
            "element" for all elements over what they are divided by, sqrt(v) + eps.
        maximize: go up instead of down.
        freeze_step: steps of warm-up T_w, an int >= 1; or "auto", when all ranks agree that the variance has settled:
            the number then replaces "auto" in the group.
        thaw: whether a variance that was frozen too early moves again (:mod:`commopt.optim.thaw`): "auto" if
            freeze_step was "auto", "always", or "never". A warning says that it was, in any case.
        min_variance: c in [0, 1): of the mean of its tensor, what an element's variance stands as at least, unless it
            is 0 (:mod:`commopt.optim.floor`). 0 is the paper's, and loses runs.
        compressor: what is sent in the compressed phase; ``Sign()`` if None.
        warmup_compressor: what the gradients of the warm-up are sent by, with error feedback, such as ``Int8()``; None
            for full precision, as in the paper.
        max_grad_norm: clip to this norm, > 0, or None; as for :class:`commopt.OneBitAdam`.
        bucket_mb: MB (2**20 bytes) of float32 per bucket, > 0; None for an 8th of the group, 1 to 25 (GPU: to 100).
        overlap: send while backward runs, to the same bits; as for :class:`commopt.OneBitAdam`. Costs both residuals
            once more; and neither eps nor scaling may change between backward() and step().
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None.
        reduction: "mean" if a step goes by the mean of the ranks' gradients, as losses that are means need; "sum" if by
            their sum, as where each rank divides its loss by what all ranks have.
        process_group: a ProcessGroup; or a DeviceMesh: averages are over its dimensions that a parameter's own mesh
            lacks (:mod:`commopt.comm.mesh`). None is the mesh that sharded parameters are on a slice of, or else the
            default process group, or one rank where there is none.
        backend: a :class:`commopt.comm.Backend` instead.
        torch_options: ``foreach`` and ``fused``; ``amsgrad``, ``capturable``, ``differentiable`` if False, and
            ``decoupled_weight_decay=True``: as :class:`torch.optim.Adam` has them, and without effect.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, or if ranks differ in parameters or
            settings.
    """

    known_options = OF_LAMB
    hyperparams_used_in_backward = (*WarmupOptimizer.hyperparams_used_in_backward, "scaling", "eps")
    scalars = {  # noqa: RUF012
        "scaling_coeff": 0.0, "trust_ratio": 0.0, "trust_ratio_weight": 0.0, "factor": 1.0, **WarmupOptimizer.scalars
    }  # fmt: skip
    corrects_bias, measures_updates = False, True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        scaling: Literal["tensor", "element"] = "tensor",
        maximize: bool = False,
        freeze_step: int | Literal["auto"] = "auto",
        thaw: Literal["auto", "always", "never"] = "auto",
        min_variance: float = floor.LEAST,
        compressor: Compressor | None = None,
        warmup_compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = False,
        guard: Guard | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        **torch_options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "coeff_beta": coeff_beta,
            "factor_min": factor_min,
            "factor_max": factor_max,
            "factor_threshold": factor_threshold,
            "scaling": scaling,
            "maximize": maximize,
            **warmup_defaults(freeze_step, thaw, min_variance),
        }
        super().__init__(
            params,
            defaults,
            compressor=compressor,
            warmup_compressor=warmup_compressor,
            max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb,
            overlap=overlap,
            guard=guard,
            reduction=reduction,
            process_group=process_group,
            backend=backend,
            torch_options=torch_options,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_lamb(group)
        checks.check_onebit_lamb(group)

    def loads_of(self) -> tuple[str, ...]:
        return (*super().loads_of(), "Lamb")

    def init_bucket(self, bucket: StateBucket) -> None:
        for name in ("exp_avg", "exp_avg_sq", "fresh_exp_avg_sq"):
            bucket.buffers[name] = bucket.zeros()

    def warmup(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """LAMB on the mean gradient."""
        g = yield from self.mean_gradients(bucket, group, ctx)  # g = mean_i g_i
        moving = self.increment(bucket, group, ctx, variance_moves=True)
        x, m, v, _ = bucket.operands(moving)
        ratios = lamb_(x, g, m, v, group, bucket.total)
        for i, c in zip(moving, ratios):
            _average(self.state[bucket.params[i]], c, group["coeff_beta"])  # c_avg = b3 c_avg + (1-b3) c
        bucket.numbers["scaling_coeff"].zero_()  # there is a switch to come, maybe not the first

    def compressed(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """LAMB with a variance rebuilt from what the momentum has done."""
        m = bucket["exp_avg"]
        raised = floor.raised_in_tensors(bucket, group, self.compressor)  # v = max(v, c mean of its tensor), once
        k = self._scaling(bucket, group, raised)
        m_i = yield from local_momentum(bucket, m, group, ctx)  # m_i = b1 m + (1-b1) g_i
        scaled = compressed_mean_of(m_i, bucket, self.compressor, ctx, scaling=_of_elements(bucket, k, group, raised))
        means = bucket.views((yield from scaled).values())  # compress k m_i;  m = what comes back / k
        floor.set_variance(bucket, raised)
        self._switch(bucket, k)
        moving = self.increment(bucket, group, ctx, variance_moves=False)
        x, before, v, _ = bucket.operands(moving)
        f = bucket.tensors("fresh_exp_avg_sq", moving)
        states = [self.state[bucket.params[i]] for i in moving]
        c, r = [_averaged(state) for state in states], [state["factor"].item() for state in states]
        used, factors = frozen_lamb_(  # x = x - lr c_avg r u
            x, [means[i] for i in moving], before, v, f, c, r, group, bucket.total, bucket.highest
        )
        for state, average, ratio, factor in zip(states, c, used, factors):
            state["factor"].fill_(factor)
            if average is None:
                _average(state, ratio, group["coeff_beta"])

    def idle(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        yield from super().idle(bucket, group, ctx)
        if not self._compresses(bucket, group):
            bucket.numbers["scaling_coeff"].zero_()

    def stand(self, bucket: StateBucket, group: dict[str, Any]) -> None:
        raised = floor.raised_in_tensors(bucket, group, self.compressor)
        k = self._scaling(bucket, group, raised)
        floor.set_variance(bucket, raised)
        self._switch(bucket, k)

    def _scaling(self, bucket: StateBucket, group: dict[str, Any], v: Tensor) -> list[float]:
        """k of each parameter, 1 where each element has its own; not stored yet where it is new."""
        known: list[float] = bucket.numbers["scaling_coeff"].tolist()
        if all(known):
            return known
        if group["scaling"] == "element":
            fresh = [1.0] * len(known)
        else:
            fresh = scaling_coeffs(bucket.tensors("exp_avg"), bucket.views(v), bucket.total)
        return [old or new for old, new in zip(known, fresh)]

    def _switch(self, bucket: StateBucket, ks: list[float]) -> None:
        """Stores k where it is new, and starts the fresh variance there, and with it r, anew."""
        fresh, standing = bucket.tensors("fresh_exp_avg_sq"), bucket.tensors("exp_avg_sq")
        for p, k, f, v in zip(bucket.params, ks, fresh, standing):
            state = self.state[p]
            if state["scaling_coeff"] == 0:
                state["scaling_coeff"].fill_(k)
                f.copy_(v)
                state["factor"].fill_(1.0)


def _of_elements(bucket: StateBucket, ks: Sequence[float], group: dict[str, Any], v: Tensor) -> Tensor:
    """k of each element, (padded,)."""
    if group["scaling"] == "element":
        return v.sqrt().add_(group["eps"]).reciprocal_()
    out = torch.ones_like(v)
    for x, k in zip(bucket.views(out), ks):
        x.fill_(k)
    return out


def _average(state: dict[str, Tensor], ratio: float | None, beta: float) -> None:
    """Takes a trust ratio into the average, if there is one."""
    if ratio is not None:
        state["trust_ratio"].mul_(beta).add_((1 - beta) * ratio)
        state["trust_ratio_weight"].mul_(beta).add_(1 - beta)


def _averaged(state: dict[str, Tensor]) -> float | None:
    """The average of the trust ratios; None if there was none."""
    weight = state["trust_ratio_weight"].item()
    return state["trust_ratio"].item() / weight if weight > 0 else None
