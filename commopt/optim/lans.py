"""LANS: LAMB with Nesterov's momentum, on gradients normalised tensor by tensor (Zheng et al., arXiv 2006.13484).

Read first: tests/oracle_lans.py, the same on plain lists of floats.

    g = g / (||g|| + eps)                                       unless normalize_grad=False
    m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2;               s = sqrt(v / (1-b2^t)) + eps
    r = m / (1-b1^t) / s + wd x;                                c = g / s + wd x
    x = x - lr (b1 ||x|| / ||r|| r + (1-b1) ||x|| / ||c|| c)    of each tensor; a ratio is 1 if one of its norms is 0

For one process, or under DistributedDataParallel.

Where this differs from the paper:

* eps in the first line, which makes 0 of a gradient of zeros, and the ratio of 1 where a norm is 0: as in the code of
  its authors.
* phi is the identity, and has bounds only if they are given.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commopt.agreement import checks
from commopt.optim.plain import PlainOptimizer, moments
from commopt.optim.rules import lans_


class Lans(PlainOptimizer):
    """LANS, a plain torch optimizer.

    ::

        optimizer = commopt.Lans(model.parameters(), lr=1e-3)

    State per parameter: exp_avg and exp_avg_sq, of its shape, in float32 whatever its dtype (float64 for float64), that
    is 8 bytes an element; and how many steps it took. A step needs about 12 bytes an element of a parameter group
    besides (8 more for parameters of half precision).

    Without bounds, a step of weights that are not 0 is at most lr times as long as they are, whatever the gradient.

    The trust ratios are those of every tensor. Put what shall not decay (biases, normalisations) in a group with
    ``weight_decay=0``, as with AdamW; it still has trust ratios.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a 0-d tensor, read at each step.
        betas: decay of exp_avg and exp_avg_sq, each in [0, 1); the first is also the share of r in a step.
        eps: added to the square root, and to the norm of the gradient, > 0.
        weight_decay: >= 0; the decay is part of r and c, and so of the trust ratios.
        normalize_grad: whether each gradient is divided by its norm, as in the paper; the script with which its authors
            train BERT passes False.
        min_coeff, max_coeff: bounds of the trust ratios, 0 <= min_coeff <= max_coeff, max_coeff > 0; a max_coeff of
            None is no bound.
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
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        normalize_grad: bool = True,
        min_coeff: float = 0.0,
        max_coeff: float | None = None,
        maximize: bool = False,
        **torch_options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "normalize_grad": normalize_grad,
            "min_coeff": min_coeff,
            "max_coeff": max_coeff,
            "maximize": maximize,
        }
        super().__init__(params, defaults, torch_options)

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_lans(group)

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
    ) -> None:
        lans_(params, grads, *moments(states), [float(s["step"]) for s in states], group)
