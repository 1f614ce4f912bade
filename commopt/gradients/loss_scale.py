"""The scale of the loss: what a GradScaler multiplies gradients by before they are compressed, and so residuals too.

    scaler.scale(loss).backward()      gradients come as S g, and what is lost of them stays as S e
    scaler.update()                    S <- 2 S now and then, S / 2 after an overflow

The next gradients are S' g. What stayed is e of the same step only as S' e: residuals are multiplied by S' / S.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from commopt.ddp_models import instances_of, with_subclasses


class LossScale:
    """Follows the scale of a GradScaler.

    Args:
        scaler: it; None: the one that has scaled a loss when the first backward comes, if there is one, or the first
            after a load, or after that one has gone.

    Attributes:
        value: the scale that residuals have; None for that of the next backward, whatever it is.
    """

    def __init__(self, scaler: Any = None) -> None:
        self.value: float | None = 1.0
        self._given = scaler
        self._found: weakref.ref[Any] | None = None
        self._looks = True

    def loaded(self, value: float | None) -> None:
        """Residuals were loaded that have the scale ``value``."""
        self.value, self._looks = value, True

    def change(self) -> float:
        """The factor that residuals are to be multiplied by, 1.0 in most steps; :attr:`value` is the scale after that.

        Raises:
            ValueError: no scaler was given, and several have scaled a loss.
        """
        scaler = self._in_use() if self._given is None else self._given
        now = 1.0 if scaler is None else float(scaler.get_scale())
        if now == self.value or not 0 < now < math.inf:
            return 1.0
        factor, self.value = 1.0 if self.value is None else now / self.value, now
        return factor

    def _in_use(self) -> Any:
        """The scaler that was found. Looks for it if it has to, or if that one has gone."""
        if self._looks or (self._found is not None and self._found() is None):
            scaler = find_scaler()
            self._found, self._looks = None if scaler is None else weakref.ref(scaler), False
        return None if self._found is None else self._found()


def rescale_(residual: Tensor, factor: float) -> None:
    """Multiplies a residual; what would leave the range of its dtype stays at the end of it: infinity would stay for
    ever, but a mean that overflows is skipped, and the scale falls."""
    residual.mul_(factor)
    if factor > 1:
        end = torch.finfo(residual.dtype).max
        residual.clamp_(-end, end)


def check_scaler(scaler: Any) -> None:
    """Raises ValueError unless ``scaler`` is None, or has a scale as a GradScaler has."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise ValueError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")


def find_scaler() -> Any:
    """The GradScaler that has scaled a loss; None if there is none. Raises ValueError if several have."""
    used = _that_have_scaled()
    if len(used) > 1:
        used.clear()
        gc.collect()  # those that nobody has any more
        used = _that_have_scaled()
    if len(used) > 1:
        raise ValueError(
            f"compress_gradients: {len(used)} GradScalers are in use: say whose scale the residuals of this model "
            "follow, by compress_gradients(..., scaler=scaler)"
        )
    return used[0] if used else None


def _that_have_scaled() -> list[Any]:
    """The GradScalers that have scaled a loss. Looks at all objects."""
    scalers = instances_of(with_subclasses(torch.amp.GradScaler))
    return [scaler for scaler in scalers if scaler.is_enabled() and getattr(scaler, "_scale", None) is not None]
