"""Predictions -> one plain recommendation.

What is recommended is the fastest whole run, but what loses more of the gradients must gain 5 % (:data:`WORTH`) on the
choice among all that loses less. By what they lose:

    1. exact means: DistributedDataParallel, or HSDP
    2. 16 or 8 bits: torch's bf16 hook; compressors of gradients that lose less than 5 % of a message, by their errors
    3. OneBitAdam: of the momentum, and after a warm-up, which counts as 20 % of the run at DDP's price; then with a
       warm-up by 8 bits; then ZeroOneAdam, of which nearly all steps are compressed
    4. compressors of gradients that lose 5 to 30 % of a message, by their errors: coarse from the first step on

OneBitLamb costs what OneBitAdam does. What loses more than 30 %, rounds of local steps, and SGD by CSER or
QSparseLocalSGD learn less in a step, and how much less no probe can say: they are named beside, where they are faster.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from commopt.gradients.method import OfGradients
from commopt.probe.clock import Step
from commopt.probe.compressors import FINE, error, label
from commopt.probe.figures import figure
from commopt.probe.fit import Line
from commopt.probe.measure import FACTOR
from commopt.probe.options import MOST_MB
from commopt.probe.predict import whole_run
from commopt.probe.rounds import Round

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
    "onebit_adam_int8": "OneBitAdam, warm-up by Int8()",
    "zero_one_adam": "ZeroOneAdam",
    "cser": "CSER",
    "qsparse": "QSparseLocalSGD",
}
SPELT = {
    "onebit_adam_int8": "OneBitAdam(warmup_compressor=Int8())",
    "zero_one_adam": "ZeroOneAdam(variance=VariancePolicy(stop=steps // 5))",
}
"""Spelling in code of those whose names are not that."""
SHARDED = {
    **NAMES,
    "none": "none between machines",
    "ddp": "HSDP, float32",
    "ddp_bf16": "HSDP, reduce_dtype bf16",
}
"""Names where FSDP2 cuts the model: it averages over machines by itself, as HSDP, where nobody else does."""
HALVED = {"DDP": "DDP with bf16_compress_hook", "HSDP": "HSDP with reduce_dtype=torch.bfloat16"}
OURS = ("onebit_adam", "onebit_adam_overlap", "onebit_adam_int8", "zero_one_adam")
OF_SGD = ("cser", "qsparse")
"""Those that are SGD, of which nobody can say what they learn where AdamW was to be used."""
WARM = "warm_up_int8"
"""A step of the warm-up by Int8(), where it is none of ``steps["gradients_int8"]``."""
STEPS = OURS[:2]
"""Those of which all compressed steps are alike, and are no other's."""


def over_run(steps: Mapping[str, Step], name: str) -> tuple[float, float]:
    """Speed of a whole run over that with DDP, with the longer and with the shorter warm-up."""
    ddp, mine = steps["ddp"].seconds, steps[name].seconds
    if name == "zero_one_adam":  # the mean of a whole run
        return ddp / mine, ddp / mine
    warm = steps.get(WARM, steps["gradients_int8"]).seconds if name == "onebit_adam_int8" else ddp
    longer, shorter = (whole_run(ddp, mine, share, warm) for share in WARM_UP)
    return longer, shorter


def rival(shard: int) -> str:
    """Method that the others are compared with, where FSDP2 cuts the model over ``shard`` ranks."""
    return "DDP" if shard == 1 else "HSDP"


CRITERION = (
    "the fastest whole run, but what loses more of the gradients must be 5 % faster than the choice among all that "
    "loses less, in this order: exact means; 16 and 8 bits; OneBitAdam, with 20 % warm-up, in full or by Int8(), then "
    "ZeroOneAdam; compressors of 4 bits. What is faster, and learns less in a step, is named beside."
)
"""Rule by which the recommendation is found, in words."""


@dataclass(frozen=True)
class Choice:
    """A method, and how many times as fast as DDP's its run is.

    Attributes:
        name: of the method.
        words: what to use, in words.
        gain: over a whole run.
        lost: error of the compressor of gradients; 0 for all others.
    """

    name: str
    words: str
    gain: float
    lost: float = 0.0

    @property
    def coarse(self) -> bool:
        """True if it is one of the last kind above, or loses more."""
        return self.lost >= FINE

    @property
    def too_coarse(self) -> bool:
        """True if it is not recommended."""
        return self.lost >= TOO_COARSE


def choices(
    steps: Mapping[str, Step],
    bf16_available: bool,
    shard: int,
    specs: Mapping[str, OfGradients],
    nodes: Container[str] = (),
) -> tuple[list[Choice], list[Choice], list[Choice]]:
    """The methods that lose something, the least first: of 16 and 8 bits; the optimizers; the coarse ones. ``nodes``:
    those with machines as nodes."""

    def words(name: str, text: str) -> str:
        return f"{text}, machines as nodes" if name in nodes else text

    ddp = steps["ddp"].seconds
    ours = list(OURS)
    overlap = steps["onebit_adam"].seconds > WORTH * steps["onebit_adam_overlap"].seconds
    ours.remove("onebit_adam" if overlap else "onebit_adam_overlap")
    if "gradients_int8" not in specs:
        ours.remove("onebit_adam_int8")
    halved = Choice("ddp_bf16", HALVED[rival(shard)], ddp / steps["ddp_bf16"].seconds)
    errors = {name: error(spec) for name, spec in specs.items()}
    compressed = [
        Choice(name, words(name, f"AdamW on {label(name, specs)}"), ddp / steps[name].seconds, errors[name])
        for name in sorted(specs, key=lambda name: errors[name])
    ]
    fine = [halved] * bf16_available + [choice for choice in compressed if not choice.coarse]
    optimizers = [Choice(name, words(name, SPELT.get(name, NAMES[name])), over_run(steps, name)[0]) for name in ours]
    return fine, optimizers, [choice for choice in compressed if choice.coarse]


def cannot_tell(link: Mapping[str, Line], largest: float, bucket: float) -> str | None:
    """Text in place of a recommendation where messages of up to ``largest`` bytes did not take longer than small
    ones, so that nothing is known of the ``bucket`` of bytes that a model sends at once; None where that is known."""
    unknown = [verb.replace("_", "-").removeprefix("fsdp-") for verb, line in link.items() if not line.per_byte]
    if not unknown or largest >= bucket:
        return None
    enough = largest
    while enough < bucket:
        enough *= FACTOR
    most = MOST_MB * 2**20
    again = f"; run it again with --max-mb={figure(min(enough, most) / 2**20, 6)}" if largest < most else ""
    return (
        f"none: messages of up to {figure(largest / 1e6, 2)} MB were too small to tell the bandwidth of "
        f"{', '.join(unknown)}, and this model sends {figure(bucket / 1e6, 2)} MB at once{again}"
    )


def recommend(
    steps: Mapping[str, Step],
    bf16_available: bool,
    shard: int = 1,
    specs: Mapping[str, OfGradients] | None = None,
    rounds: Mapping[str, Round] | None = None,
    nodes: Container[str] = (),
    mesh: str = "",
) -> str:
    """Recommends what to do, and says what it brings.

    Args:
        steps: a step with each method.
        bf16_available: whether torch's bf16 hook can be used.
        shard: ranks over which FSDP2 cuts the model.
        specs: the compressors of gradients among the methods, by name.
        rounds: of local steps, by name.
        nodes: methods that have machines as nodes.
        mesh: how one writes these.
    """
    text = _recommended(steps, bf16_available, shard, specs, rounds, nodes)
    return f"{text} Machines as nodes: process_group={mesh}." if "machines as nodes" in text else text


def _recommended(
    steps: Mapping[str, Step],
    bf16_available: bool,
    shard: int,
    specs: Mapping[str, OfGradients] | None,
    rounds: Mapping[str, Round] | None,
    nodes: Container[str],
) -> str:
    fine, ours, coarse = choices(steps, bf16_available, shard, specs or {}, nodes)
    every, chosen = [*fine, *ours, *(choice for choice in coarse if not choice.too_coarse)], None
    for choice in every:
        if choice.gain >= WORTH * (chosen.gain if chosen else 1.0):
            chosen = choice
    beside = _beside(chosen.gain if chosen else 1.0, coarse, steps, rounds or {})
    if chosen is None:
        most = max(every, key=lambda choice: choice.gain)
        share = steps["ddp"].communication / steps["ddp"].seconds
        return (
            f"do not compress: communication is {share:.0%} of a step of {rival(shard)}, and a whole run with "
            f"{most.words}, the fastest, would be {most.gain:.2f} x as fast.{beside}"
        )
    fastest = max(ours, key=lambda choice: choice.gain)
    text = _use(chosen, fastest, chosen in ours, steps, shard)
    if chosen.coarse:
        less = [max(fine, key=lambda choice: choice.gain)] * bool(fine) + [fastest]
        others = " and ".join(f"with {choice.words} {choice.gain:.2f} x" for choice in less)
        text += f" It loses some of each gradient, and sends it later: compare losses. Runs that lose less: {others}."
    return text + (" That is little for a prediction: try both." if chosen.gain < ACCURACY else "") + beside


PERIOD = 30
"""Local steps of a round, of those that are compared."""
TOO_COARSE = 0.3
"""Error of a compressor of gradients from which on it is not recommended: 4 bits have less, 2 have more. Under Adam
these are behind by more than another seed makes (docs/gradients_measured.md)."""


def _beside(gain: float, coarse: Sequence[Choice], steps: Mapping[str, Step], rounds: Mapping[str, Round]) -> str:
    """Text on what is faster than a run that is ``gain`` times as fast as DDP's, and learns less in a step."""
    ddp, none = steps["ddp"].seconds, steps["none"].seconds
    rough = {choice.words: choice.gain for choice in coarse if choice.too_coarse}
    per_step = {name: none + each.seconds / PERIOD for name, each in rounds.items()}
    local = {f"rounds of {PERIOD} local steps ({name})": ddp / seconds for name, seconds in per_step.items()}
    sgd = {f"SGD by {NAMES[name]}": ddp / steps[name].seconds for name in OF_SGD}
    return faster(gain, [rough, local, sgd])


def faster(gain: float, kinds: Sequence[Mapping[str, float]]) -> str:
    """The fastest of each of ``kinds``, which learn less in a step, if they are faster than what is ``gain`` times as
    fast as the rival. kinds: gains by words."""
    best = [max(some.items(), key=lambda pair: pair[1]) for some in kinds if some]
    found = [f"{words} {other:.2f} x" for words, other in best if other >= WORTH * gain]
    return f" Faster, and learning less in a step, so that it takes more of them: {', '.join(found)}." if found else ""


def _use(chosen: Choice, fastest: Choice, is_ours: bool, steps: Mapping[str, Step], shard: int) -> str:
    """The recommendation of ``chosen``, and what it brings; ``fastest``: of our optimizers."""
    ddp, other = steps["ddp"].seconds, rival(shard)
    if chosen.name == "ddp_bf16":
        return (
            f"do not compress to 1 bit: {chosen.words} is {chosen.gain:.2f} x as fast as {other} and needs no warm-up; "
            f"a whole run with {fastest.words} would be {over_run_in_words(steps, fastest.name)} x as fast."
        )
    took = f"a compressed step takes {figure(steps[chosen.name].seconds)} s where {other} takes {figure(ddp)} s, "
    took += f"{ddp / steps[chosen.name].seconds:.2f} x as fast"
    if chosen.name == "zero_one_adam":
        took = took.replace("a compressed", "on average, a")
        return f"use {chosen.words}: {took}, from a run's beginning to its end."
    if is_ours:
        over = over_run_in_words(steps, chosen.name)
        return f"use {chosen.words}: {took}; over a run with 15 to 20 % warm-up {over} x."
    beside = "" if chosen.coarse else f"; a whole run with {fastest.words} would be {fastest.gain:.2f} x as fast"
    return f"use {chosen.words} (compress_gradients): {took}, without warm-up{beside}."


def over_run_in_words(steps: Mapping[str, Step], name: str) -> str:
    longer, shorter = over_run(steps, name)
    return f"{longer:.2f}" if longer == shorter else f"{longer:.2f} to {shorter:.2f}"
