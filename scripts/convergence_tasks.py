"""What scripts/convergence.py trains: tasks, and the methods that are compared on each, with their settings.

A method and its counterpart have the same learning rate, schedule, momenta and weight decay. What compression adds
is set once for a task, not by seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """An optimizer on a task, and what it communicates.

    Attributes:
        optim: the ``optim`` section of a config, but for what the task sets.
        counterpart: name of the uncompressed method that it is to learn as much as; None for those.
        why: why it learns less on this task, where it does.
        comm: the ``comm`` section, but for what is as always.
        parallel: the ``parallel`` section likewise: how the ranks hold the model.
    """

    optim: dict[str, Any]
    counterpart: str | None = None
    why: str | None = None
    comm: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What is learnt.

    Attributes:
        steps: of a run.
        batch: samples per step, over all ranks.
        optim: the schedule and clipping: what all methods share of the ``optim`` section of a config.
        methods: by name, which has no comma.
        config: arguments of ``commopt train`` for a language model; None for the digits.
    """

    steps: int
    batch: int
    optim: dict[str, Any]
    methods: dict[str, Method]
    config: list[str] | None = field(default=None)


SDP4BIT = {
    "name": "Int4",
    "args": {"rotate": True, "rounding": "stochastic"},
    "feedback": False,
    "inside": {"name": "Int8", "args": {"rounding": "stochastic"}},
}
"""Of a model on two machines of two ranks: 8 bits inside, rotated 4 bits between."""

OVER_ALL = {"compress": {**SDP4BIT, "weights": "Differences"}, "ranks_per_node": 2}
"""The same of a model cut over all ranks of both machines, and weights as 4-bit differences."""

DIFFERENCES = {"name": "Int4", "weights": "Differences"}
"""Of a model cut over all ranks: both of FSDP2's exchanges."""


def blocks(ratio: float, block: int) -> dict[str, Any]:
    return {"name": "RandomBlocks", "args": {"ratio": ratio, "block": block}}


LOCAL = "each rank takes 4 steps on a quarter of the batch; Adam makes the noise of that as large as the signal"
LATE = "what is not sent at once acts later; a lower lr does not help"
SHORTER = "Adam's variance has the residual in it, so that its steps are shorter; the digits want twice the lr"
FASTER = "the digits want 2.5 times Lamb's lr here, and at that it is ahead of Lamb"
NOISY = "a quarter of the momentum's direction is lost, and Adam's variance has that noise in it"
RARELY = "1 or 2 of 100 elements a step: in 200 to 600 steps an element moves 2 to 10 times"
COARSE = "2 bits lose a third of a message; on the digits Adam's variance has that noise in it"
ONE_SIZE = "a sign step has one size; of six settings tried on the digits none comes near in 50 of them"


def adam_family(
    lr: float, lamb_lr: float, weight_decay: float, warmup: int, freeze: int, kappa: int, sign: dict[str, Any]
) -> dict[str, Method]:
    """AdamW, LAMB, local AdamW, and what is to learn as much.

    Args:
        lr, lamb_lr: peaks, of Adam's kind and of LAMB's.
        weight_decay: of all of them.
        warmup: first steps that coarse compressors of gradients leave exact, where they have a warm-up: those in which
            lr rises.
        freeze: steps of warm-up of 1-bit Adam and 1-bit LAMB, and those in which 0/1 Adam refreshes its variance.
        kappa: of 0/1 Adam: its first refreshes, before they become rarer.
        sign: arguments of SignMomentum.
    """
    adam = {"lr": lr, "weight_decay": weight_decay}
    lamb = {"lr": lamb_lr, "weight_decay": weight_decay}
    betas = {"betas": [0.9, 0.98]}
    rounds = {"variance": {"kappa": kappa, "stop": freeze}, "sync": {"first": 1, "double_every": freeze, "longest": 4}}
    local = {"base": "AdamW", "base_args": betas, "period": 4}
    momentum = {"outer_lr": 0.7, "outer_momentum": 0.5}
    plain, lans = {"name": "AdamW", **adam, "args": betas}, {"name": "Lans", **lamb, "args": betas}
    one_bit = {**betas, "freeze_step": freeze}
    return {
        "AdamW": Method(plain),
        **on_gradients(plain, warmup),
        "OneBitAdam": Method({"name": "OneBitAdam", **adam, "args": one_bit}, "AdamW"),
        "OneBitAdam + Int8 warm-up": Method(
            {"name": "OneBitAdam", **adam, "args": {**one_bit, "warmup_compressor": {"name": "Int8"}}}, "AdamW"
        ),
        "ZeroOneAdam": Method({"name": "ZeroOneAdam", **adam, "args": {**betas, **rounds}}, "AdamW"),
        **{
            f"ZeroOneAdam + {name} refreshes": Method(
                {"name": "ZeroOneAdam", **adam, "args": {**betas, **rounds, "refresh_compressor": {"name": name}}},
                "AdamW",
            )
            for name in ("Int8", "Int4")
        },
        "Lamb": Method({"name": "Lamb", **lamb, "args": betas}),
        "Lans": Method(lans),
        "CLAN": Method(lans, "Lans", NOISY, {"compress": {"name": "Sign", "args": {"norm": "l1"}}}),
        "OneBitLamb": Method({"name": "OneBitLamb", **lamb, "args": one_bit}, "Lamb"),
        "OneBitLamb(element)": Method(
            {"name": "OneBitLamb", **lamb, "args": {**one_bit, "scaling": "element"}}, "Lamb", FASTER
        ),
        "LocalSGD(AdamW)": Method({"name": "LocalSGD", **adam, "args": local}, "AdamW", LOCAL),
        "SignMomentum(AdamW)": Method(
            {"name": "SignMomentum", **adam, "args": {**local, "outer_weight_decay": weight_decay, **sign}},
            "LocalSGD(AdamW)",
            ONE_SIZE,
        ),
        "SlowMo(AdamW)": Method(
            {"name": "SlowMo", **adam, "args": {**local, "outer_momentum": 0.2}}, "LocalSGD(AdamW)"
        ),
        "DiLoCo(AdamW)": Method({"name": "DiLoCo", **adam, "args": {**local, **momentum}}, "LocalSGD(AdamW)"),
    }


def on_gradients(optim: dict[str, Any], warmup: int) -> dict[str, Method]:
    """AdamW, whose ``optim`` section is given, on compressed means of gradients; the coarse ones also after a
    ``warmup`` of so many exact steps."""

    def on(compress: dict[str, Any], why: str | None = None) -> Method:
        return Method(optim, "AdamW", why, {"compress": compress})

    coarse = {
        "PowerSGD(4)": ({"name": "PowerSGD", "args": {"rank": 4}}, SHORTER),
        "ACP(4)": ({"name": "ACP", "args": {"rank": 4}}, NOISY),
        "Sign": ({"name": "Sign"}, NOISY),
        "TopK": ({"name": "TopK"}, RARELY),
        "ThresholdTopK": ({"name": "ThresholdTopK"}, RARELY),
        "TopBlocks": ({"name": "TopBlocks"}, RARELY),
    }
    late = {
        f"AdamW + {name} with warm-up": on({**of, "warmup_steps": warmup}, why) for name, (of, why) in coarse.items()
    }
    return {
        "AdamW + BFloat16": on({"name": "BFloat16"}),
        "AdamW + Float8": on({"name": "Float8"}),
        "AdamW + Int8": on({"name": "Int8"}),
        "AdamW + Int8 without feedback": on({"name": "Int8", "feedback": False}),
        "AdamW + Int4": on({"name": "Int4"}),
        "AdamW + Int4 without feedback": on({"name": "Int4", "feedback": False}),
        "AdamW + Int4 with LoCo": on({"name": "Int4", "feedback": "LoCo"}),
        "AdamW + Int2": on({"name": "Int2"}, COARSE),
        **{f"AdamW + {name}": on(of, why) for name, (of, why) in coarse.items()},
        **late,
        "AdamW + SDP4Bit": Method(optim, "AdamW", None, {"compress": SDP4BIT}, {"shard": 2}),
        "AdamW + SDP4Bit over all ranks": Method(optim, "AdamW", None, OVER_ALL, {"shard": 4}),
        "AdamW + Int4 and Differences": Method(optim, "AdamW", None, {"compress": DIFFERENCES}, {"shard": 4}),
    }


def sgd_family(lr: float) -> dict[str, Method]:
    """SGD with Nesterov's momentum, and what is to learn as much."""
    momentum = {"momentum": 0.9, "nesterov": True}

    def cser(ratio: int, reset_ratio: int, period: int) -> Method:
        args = {**momentum, "period": period, "reset_compressor": blocks(reset_ratio, 32)}
        return Method({"name": "CSER", "lr": lr, "args": args, "compressor": blocks(ratio, 32)}, "SGD", LATE)

    sign = {"name": "Sign", "args": {"block": 2048}}
    return {
        "SGD": Method({"name": "SGD", "lr": lr, "args": momentum}),
        "CSER(R=4)": cser(8, 2, 4),
        "CSER(R=8)": cser(16, 2, 8),
        "QSparseLocalSGD": Method(
            {"name": "QSparseLocalSGD", "lr": lr, "args": {**momentum, "period": 2}, "compressor": sign},
            "SGD",
            LATE,
        ),
        "LocalSGD(SGD)": Method(
            {"name": "LocalSGD", "lr": lr, "args": {"base": "SGD", "base_args": momentum, "period": 4}}, "SGD", LATE
        ),
    }


SMALL = ["--model.layers=2", "--model.heads=4", "--model.width=64", "--data.vocab_size=512", "--data.seq_len=64"]
SCHEDULE: dict[str, Any] = {"warmup_steps": 20, "decay": "cosine", "min_lr_ratio": 0.05, "max_grad_norm": None}

LANGUAGE = SCHEDULE | {"warmup_steps": 60}
SIGN = {"outer_lr": 1.0, "outer_betas": [0.0, 0.0]}
"""No momentum on top of a base that has one: it would be delay. Best where outer_lr lr is about 2e-3."""
SIGN_ON_BERT = SIGN | {"outer_lr": 3.0}
"""There 3e-3 is, and AdamW's best lr 4e-3."""
SIGN_ON_DIGITS = {"outer_lr": 2.0, "outer_betas": [0.5, 0.8]}

TASKS = {
    "gpt": Task(
        600,
        16,
        LANGUAGE,
        {**adam_family(2e-3, 1e-2, 0.1, LANGUAGE["warmup_steps"], 120, 64, SIGN), **sgd_family(0.1)},
        ["gpt_quick", *SMALL],
    ),
    "bert": Task(
        600,
        16,
        LANGUAGE,
        {**adam_family(1e-3, 1e-2, 0.01, LANGUAGE["warmup_steps"], 300, 128, SIGN_ON_BERT), **sgd_family(0.1)},
        ["bert_quick", *SMALL],
    ),
    "digits": Task(
        200,
        64,
        SCHEDULE,
        {**adam_family(3e-3, 1e-2, 0.01, SCHEDULE["warmup_steps"], 60, 16, SIGN_ON_DIGITS), **sgd_family(0.05)},
    ),
}
