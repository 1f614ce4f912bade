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

from typing import Any

from torch import Tensor

from commopt.agreement import checks
from commopt.optim.plain import PlainOptimizer, moments
from commopt.optim.rules import lamb_


class Lamb(PlainOptimizer):
    """LAMB, a plain torch optimizer.

    ::

        optimizer = commopt.Lamb(model.parameters(), lr=1e-3, weight_decay=0.01)

    State per parameter: exp_avg and exp_avg_sq, of its shape, in float32 whatever its dtype (float64 for float64), that
    is 8 bytes an element; and how many steps it took. A step needs about 8 bytes an element of a parameter group
    besides (8 more for parameters of half precision).

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
        torch_options: ``foreach`` and ``fused``; ``amsgrad``, ``capturable``, ``differentiable`` if False, and
            ``decoupled_weight_decay`` where there is no decay, or if True: as torch.optim.Adam has them, without
            effect.

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
        **torch_options: Any,
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
        super().__init__(params, defaults, torch_options)

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_lamb(group)

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        lamb_(params, grads, *moments(states), group)
