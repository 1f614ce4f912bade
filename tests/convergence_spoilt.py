"""Optimizers with a fault each, which tests/test_convergence.py must notice; run as scripts/convergence_rank.py is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from convergence_tasks import TASKS, Method, sgd_family

from commopt import CSER, OneBitAdam, OneBitLamb, ZeroOneAdam


class Forgetful:
    """What compression loses is lost: residuals are 0 at every step."""

    buckets: list[Any]

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)  # type: ignore[misc]
        for bucket in self.buckets:
            if bucket.feedback is not None:
                bucket.feedback.worker.zero_()
                bucket.feedback.server.zero_()
        return out


class ForgetfulAdam(Forgetful, OneBitAdam):
    """1-bit Adam without error feedback."""


class ForgetfulZeroOneAdam(Forgetful, ZeroOneAdam):
    """0/1 Adam without."""


class ForgetfulLamb(Forgetful, OneBitLamb):
    """1-bit LAMB without."""


class NeverReset(CSER):
    """CSER whose models come apart for ever."""

    def __init__(self, *args: Any, period: int, **others: Any) -> None:
        super().__init__(*args, period=sys.maxsize, **others)


SPOILT: dict[str, tuple[type, str]] = {
    "OneBitAdam without residuals": (ForgetfulAdam, "OneBitAdam"),
    "ZeroOneAdam without residuals": (ForgetfulZeroOneAdam, "ZeroOneAdam"),
    "OneBitLamb without residuals": (ForgetfulLamb, "OneBitLamb"),
    "CSER without resets": (NeverReset, "CSER(R=8)"),
}
"""Classes, and the methods whose settings they have."""

METHODS = TASKS["digits"].methods
METHODS.update(sgd_family(0.1))  # with half that, models of two ranks come apart too little to be noticed
METHODS.update(
    (name, Method({**METHODS[sound].optim, "name": f"convergence_spoilt.{cls.__name__}"}))
    for name, (cls, sound) in SPOILT.items()
)

if __name__ == "__main__":
    import convergence_rank

    convergence_rank.main()
