"""LAMB: Adam whose step is, tensor by tensor, a fixed share of the weights (You et al., arXiv 1904.00962, Algorithm 2).

Read first: tests/oracle_lamb.py, the same on plain lists of floats.

    m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2;   u = m / (sqrt(v) + eps) + wd x
    x = x - lr c u,        c = ||x|| / ||u|| of each tensor, kept in [min_coeff, max_coeff]; 1 if one of them is 0

For one process, or under DistributedDataParallel; and what :class:`commopt.OneBitLamb` is measured by.

Where this differs from the paper:

* No bias correction, as in 1-bit LAMB (arXiv 2104.06069). It would divide m / sqrt(v) by (1-b1^t) / sqrt(1-b2^t), with
  the default betas 3.2 at the first step, 6.5 at the tenth and 1.3 at the thousandth. Without decay the trust ratio
  takes that out again (but for eps), as long as it is within its bounds. With decay, wd x weighs by so much less beside
  m / sqrt(v) at first; and where c is at a bound, or 1 because x is 0, the step is larger by as much.
* The identity is phi, between two bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.bucket import buffer_dtype
from commopt.optim import checks
from commopt.optim.rules import lamb_, scaled_gradient
from commopt.sharding import is_sharded


def refuse_sharded(params: Sequence[Tensor]) -> None:
    """Raises ValueError if one of ``params`` is a DTensor."""
    for i, p in enumerate(params):
        if is_sharded(p):
            raise ValueError(
                f"parameter {i} is a DTensor, placed as {getattr(p, 'placements', ())}: Lamb takes the norms of whole "
                "tensors; commopt.OneBitLamb(params, process_group=mesh) takes those of sharded ones too, and is LAMB "
                "up to its freeze_step"
            )


class Lamb(torch.optim.Optimizer):
    """LAMB, a plain torch optimizer.

    ::

        optimizer = commopt.Lamb(model.parameters(), lr=1e-3, weight_decay=0.01)

    State per parameter: exp_avg and exp_avg_sq, of its shape, in float32 whatever its dtype (float64 for float64), that
    is 8 bytes an element; and how many steps it took. A step needs about 8 bytes an element of a parameter group
    besides (4 more for parameters of half precision).

    The trust ratio is that of every tensor. Put what shall not decay (biases, normalisations) in a group with
    ``weight_decay=0``, as with AdamW; it still has a trust ratio.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a 0-d tensor, read at each step.
        betas: decay of exp_avg and exp_avg_sq, each in [0, 1).
        eps: added to the square root, > 0.
        weight_decay: >= 0; the decay is part of u, and so of the trust ratio.
        min_coeff, max_coeff: bounds of the trust ratio, 0 <= min_coeff <= max_coeff, max_coeff > 0.
        maximize: go up instead of down.

    Raises:
        ValueError: for an argument out of range, for sharded or complex parameters, and in step() for sparse
            gradients.
    """

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
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            refuse_sharded(self.param_groups[-1]["params"])
            checks.check_params(self.param_groups[-1]["params"])
            checks.check_lamb(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise
        self._make_state()

    def _make_state(self) -> None:
        """Makes the state of parameters that have none, and moves it after those that were moved or cast."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p in (p for p in params if p.requires_grad or p.grad is not None):
            like = {"dtype": buffer_dtype(p.dtype), "device": p.device}
            state = self.state[p]
            state.setdefault("step", torch.zeros(()))
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].to(**like)
                else:
                    state[name] = torch.zeros_like(p, **like, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on the gradients there are; a parameter without one does not move.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        checks.check_gradients([p for group in self.param_groups for p in group["params"]])
        self._make_state()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            for state in states:
                state["step"] += 1
            sign = -1.0 if group["maximize"] else 1.0
            grads = [scaled_gradient(p, p.grad, s["exp_avg"].dtype, sign) for p, s in zip(params, states)]
            lamb_(params, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave, or the state of a ``torch.optim.Adam``; copies it, and keeps its dtype."""

        def keep(_: Any, given: dict[str, Any]) -> None:  # torch would cast state to the dtype of the parameters
            self._incoming = given

        hook = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.__dict__.pop("_incoming", None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and it would get into the groups
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        incoming: Mapping[str, Any] | None = self.__dict__.get("_incoming")
        if incoming is None:
            return
        ids = [i for group in incoming["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params):
            for name, value in incoming["state"].get(i, {}).items():
                self.state[p][name] = value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else value
        self._make_state()
