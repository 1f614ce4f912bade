"""Predictions -> one plain recommendation."""

from __future__ import annotations

from collections.abc import Mapping

from commopt.probe.predict import Step, whole_run

WORTH = 1.05
"""Least gain of a change that is recommended; predictions are no better than that."""
ACCURACY = 1.25
"""A smaller gain than that is one that the probe cannot be sure of."""
WARM_UP = (0.20, 0.15)
"""Shares of a run that are warm-up, usually."""

NAMES = {
    "none": "no communication",
    "ddp": "DDP, float32",
    "ddp_bf16": "DDP, bf16 hook",
    "onebit_adam": "OneBitAdam",
    "onebit_adam_overlap": "OneBitAdam(overlap=True)",
}
SHARDED = {
    **NAMES,
    "none": "none between machines",
    "ddp": "HSDP, float32",
    "ddp_bf16": "HSDP, reduce_dtype bf16",
}
"""Names where FSDP2 cuts the model: it averages over machines by itself, as HSDP, where nobody else does."""
HALVED = {"DDP": "DDP with bf16_compress_hook", "HSDP": "HSDP with reduce_dtype=torch.bfloat16"}
OURS = ("onebit_adam", "onebit_adam_overlap")


def over_run(steps: Mapping[str, Step], name: str) -> tuple[float, float]:
    """Speed of a whole run over that with DDP, with the longer and with the shorter warm-up."""
    longer, shorter = (whole_run(steps["ddp"].seconds, steps[name].seconds, share) for share in WARM_UP)
    return longer, shorter


def rival(shard: int) -> str:
    """What the methods are compared with, where FSDP2 cuts the model over ``shard`` ranks."""
    return "DDP" if shard == 1 else "HSDP"


def recommend(steps: Mapping[str, Step], bf16_available: bool, shard: int = 1) -> str:
    """Recommends what to do, and says what it brings.

    Args:
        steps: a step with each method.
        bf16_available: whether torch's bf16 hook can be used.
        shard: ranks over which FSDP2 cuts the model.
    """
    ddp, other = steps["ddp"].seconds, rival(shard)
    ours = "onebit_adam"
    if steps[ours].seconds > WORTH * steps["onebit_adam_overlap"].seconds:
        ours = "onebit_adam_overlap"
    gain, most = over_run(steps, ours)
    halved = ddp / steps["ddp_bf16"].seconds if bf16_available else 1.0
    if max(gain, halved) < WORTH:
        share = steps["ddp"].communication / ddp
        return (
            f"do not compress: communication is {share:.0%} of a step of {other}, and a whole run with {NAMES[ours]} "
            f"would be {gain:.2f} x as fast."
        )
    if gain < WORTH * halved:
        return (
            f"do not compress to 1 bit: {HALVED[other]} is {halved:.2f} x as fast as {other} and needs no warm-up; "
            f"a whole run with {NAMES[ours]} would be {gain:.2f} to {most:.2f} x as fast."
        )
    return (
        f"use {NAMES[ours]}: a compressed step takes {steps[ours].seconds:.3g} s where {other} takes {ddp:.3g} s, "
        f"{ddp / steps[ours].seconds:.2f} x as fast; over a run with 15 to 20 % warm-up {gain:.2f} to {most:.2f} x."
        + (" That is little for a prediction: try both." if gain < ACCURACY else "")
    )
