"""Predictions -> one plain recommendation.

What is recommended is the fastest whole run, but what loses more of the gradients must gain 5 % (:data:`WORTH`) on the
choice among all that loses less. By what they lose:

    1. exact means: DistributedDataParallel, or HSDP
    2. 16 or 8 bits: torch's bf16 hook; compressors of gradients that lose less than 5 % of a message, by their errors
    3. OneBitAdam: of the momentum, and after a warm-up, which counts as 20 % of the run at DDP's price
    4. the other compressors of gradients, by their errors: coarse from the first step on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commopt.gradients.method import OfGradients
from commopt.probe.clock import Step
from commopt.probe.compressors import FINE, error, label
from commopt.probe.predict import whole_run

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


CRITERION = (
    "the fastest whole run, but what loses more of the gradients must be 5 % faster than the choice among all that "
    "loses less, in this order: exact means; 16 and 8 bits; OneBitAdam, with 20 % warm-up; coarser compressors without "
    "one, by their errors."
)
"""How the recommendation is found, in words."""


@dataclass(frozen=True)
class Choice:
    """A method, and how many times as fast as DDP's its run is.

    Attributes:
        name: of the method.
        words: what to use, in words.
        gain: over a whole run.
        coarse: whether it is one of the last kind above.
    """

    name: str
    words: str
    gain: float
    coarse: bool = False


def choices(
    steps: Mapping[str, Step], bf16_available: bool, shard: int, specs: Mapping[str, OfGradients]
) -> tuple[list[Choice], Choice, list[Choice]]:
    """The methods that lose something, the least first: of 16 and 8 bits; OneBitAdam; the coarse ones."""
    ddp = steps["ddp"].seconds
    ours = "onebit_adam"
    if steps[ours].seconds > WORTH * steps["onebit_adam_overlap"].seconds:
        ours = "onebit_adam_overlap"
    halved = Choice("ddp_bf16", HALVED[rival(shard)], ddp / steps["ddp_bf16"].seconds)
    errors = {name: error(spec) for name, spec in specs.items()}
    compressed = [
        Choice(name, f"AdamW on {label(name, specs)}", ddp / steps[name].seconds, errors[name] >= FINE)
        for name in sorted(specs, key=lambda name: errors[name])
    ]
    fine = [halved] * bf16_available + [choice for choice in compressed if not choice.coarse]
    onebit = Choice(ours, NAMES[ours], over_run(steps, ours)[0])
    return fine, onebit, [choice for choice in compressed if choice.coarse]


def recommend(
    steps: Mapping[str, Step], bf16_available: bool, shard: int = 1, specs: Mapping[str, OfGradients] | None = None
) -> str:
    """Recommends what to do, and says what it brings.

    Args:
        steps: a step with each method.
        bf16_available: whether torch's bf16 hook can be used.
        shard: ranks over which FSDP2 cuts the model.
        specs: the compressors of gradients among the methods, by name.
    """
    fine, onebit, coarse = choices(steps, bf16_available, shard, specs or {})
    every, chosen = [*fine, onebit, *coarse], None
    for choice in every:
        if choice.gain >= WORTH * (chosen.gain if chosen else 1.0):
            chosen = choice
    if chosen is None:
        most = max(every, key=lambda choice: choice.gain)
        share = steps["ddp"].communication / steps["ddp"].seconds
        return (
            f"do not compress: communication is {share:.0%} of a step of {rival(shard)}, and a whole run with "
            f"{most.words}, the fastest, would be {most.gain:.2f} x as fast."
        )
    text = _use(chosen, onebit, steps, shard)
    if chosen.coarse:
        less = [max(fine, key=lambda choice: choice.gain)] * bool(fine) + [onebit]
        beside = " and ".join(f"with {choice.words} {choice.gain:.2f} x" for choice in less)
        text += f" It loses much of each gradient, and sends it later: compare losses. Runs that lose less: {beside}."
    return text + (" That is little for a prediction: try both." if chosen.gain < ACCURACY else "")


def _use(chosen: Choice, onebit: Choice, steps: Mapping[str, Step], shard: int) -> str:
    """The recommendation of ``chosen``, and what it brings."""
    ddp, other = steps["ddp"].seconds, rival(shard)
    gain, most = over_run(steps, onebit.name)
    if chosen.name == "ddp_bf16":
        return (
            f"do not compress to 1 bit: {chosen.words} is {chosen.gain:.2f} x as fast as {other} and needs no warm-up; "
            f"a whole run with {onebit.words} would be {gain:.2f} to {most:.2f} x as fast."
        )
    took = f"a compressed step takes {steps[chosen.name].seconds:.3g} s where {other} takes {ddp:.3g} s, "
    took += f"{ddp / steps[chosen.name].seconds:.2f} x as fast"
    if chosen == onebit:
        return f"use {chosen.words}: {took}; over a run with 15 to 20 % warm-up {gain:.2f} to {most:.2f} x."
    beside = "" if chosen.coarse else f"; a whole run with {onebit.words} would be {gain:.2f} x as fast"
    return f"use {chosen.words} (compress_gradients): {took}, without warm-up{beside}."
