"""What scripts/time_to_loss.py trains with: the methods, each with its settings, and where those come from.

A method keeps its settings at every rate, number of hosts and seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Share:
    """A number of steps, as a share of those of the method's own schedule."""

    of: float


@dataclass(frozen=True)
class Method:
    """A method with its settings.

    Attributes:
        label: its name in tables.
        optim: the ``optim`` section of a config, but for :data:`SCHEDULE`.
        source: where the settings come from.
        sent: bytes over those of an fp32 all-reduce in every step, about; for the estimate of how long a run takes.
        compress: the key ``comm.compress``.
        hook: of torch, see time_to_loss_rank.py.
        stretch: steps of its schedule over those of DDP with AdamW: more, where a step learns less.
        network: False for a run over unshaped loopback.
    """

    label: str
    optim: dict[str, Any]
    source: str
    sent: float = 1.0
    compress: dict[str, Any] | None = None
    hook: dict[str, Any] | None = None
    stretch: float = 1.0
    network: bool = True


QUICK = "configs/gpt_quick.yaml"
TASKS = "scripts/convergence_tasks.py"
SCHEDULE = {"warmup_steps": Share(0.08), "decay": "cosine", "min_lr_ratio": 0.1, "max_grad_norm": 1.0}
"""Of all methods; from configs/gpt_quick.yaml (40 of 500 steps)."""

FREEZE = Share(0.25)
"""Of 1-bit Adam and 1-bit LAMB, and of 0/1 Adam's refreshes: 120 of 500 steps in configs/gpt_quick.yaml."""
ADAM: dict[str, Any] = {"lr": 1.5e-3, "weight_decay": 0.1}
SLOW: dict[str, Any] = {"betas": [0.9, 0.999]}
LAMB: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01}
FAST: dict[str, Any] = {"betas": [0.9, 0.98]}
NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
LOCAL: dict[str, Any] = {"base": "AdamW", "base_args": SLOW, "period": 16}
"""Rounds end where evaluations are: the mean model is there, and need not be made."""
MUON_ARGS: dict[str, Any] = {"adamw": SLOW}
SIGN_STEP = 2e-3
"""Of SignMomentum: outer_lr lr, at which a step of its signs is best on the GPT, see scripts/convergence_tasks.py."""
LIONS = 0.2
"""Of Adam's learning rate, and its inverse of the weight decay: Lion's steps are signs, see scripts/tuned.py."""

HALF = {"variance": {"kappa": 16, "stop": Share(0.5)}}
"""Of 0/1 Adam: refreshes for as long as they bring something, where they cost little."""
FOURTH = {"sync": {"first": 1, "double_every": Share(1 / 6), "longest": 4}}
"""Of 0/1 Adam: rounds in every second step, and then in every 4th."""

ADAMW = {"name": "AdamW", **ADAM, "args": SLOW}
ROUNDS = {
    "variance": {"kappa": 16, "stop": FREEZE},
    "sync": {"first": 1, "double_every": FREEZE, "longest": 16},
}


def own(name: str, given: dict[str, Any], args: dict[str, Any], **further: Any) -> dict[str, Any]:
    return {"name": name, **given, "args": args, **further}


def gradients(name: str, label: str, sent: float, source: str, stretch: float = 1.0, **args: Any) -> Method:
    """AdamW as DDP has it, on compressed means of gradients."""
    return Method(f"DDP, AdamW on {label}", ADAMW, source, sent, {"name": name, "args": args}, stretch=stretch)


def random_blocks(ratio: float) -> dict[str, Any]:
    return {"name": "RandomBlocks", "args": {"ratio": ratio, "block": 32}}


METHODS: dict[str, Method] = {
    "none": Method("DDP, AdamW, no network (the bound)", ADAMW, QUICK, network=False),
    "none_fast": Method(
        "DDP, AdamW, short memory, no network",
        own("AdamW", ADAM, FAST),
        f"{QUICK}, with its beta2",
        network=False,
    ),
    "ddp": Method("DDP, AdamW", ADAMW, QUICK),
    "ddp_bf16": Method("DDP, AdamW, bf16 hook", ADAMW, QUICK, 0.5, hook={"name": "bf16"}),
    "ddp_powersgd4": Method(
        "DDP, AdamW, PowerSGD(4) hook",
        ADAMW,
        f"{QUICK}; the hook starts after a 10th of the steps, as torch's documentation advises",
        0.13,
        hook={"name": "PowerSGD", "rank": 4, "start": Share(0.1)},
        stretch=1.25,
    ),
    "gradients_int8": gradients("Int8", "Int8()", 0.26, QUICK),
    "gradients_int4": gradients("Int4", "Int4()", 0.13, QUICK),
    "gradients_powersgd4": gradients("PowerSGD", "PowerSGD(4)", 0.04, f"{QUICK}; {TASKS}", 1.25, rank=4),
    "gradients_acp4": gradients("ACP", "ACP(4)", 0.02, f"{QUICK}; {TASKS}", 1.5, rank=4),
    "gradients_topk": gradients("TopK", "TopK()", 0.005, f"{QUICK}; the class's own", 2.0),
    "onebit_adam": Method("OneBitAdam", own("OneBitAdam", ADAM, {**SLOW, "freeze_step": FREEZE}), QUICK, 0.28),
    "onebit_adam_overlap": Method(
        "OneBitAdam(overlap=True), not clipped",
        own("OneBitAdam", ADAM, {**SLOW, "freeze_step": FREEZE, "overlap": True}, max_grad_norm=None),
        f"{QUICK}; what is sent in backward cannot be clipped",
        0.28,
    ),
    "onebit_adam_early": Method(
        "OneBitAdam, short memory and warm-up",
        own("OneBitAdam", ADAM, {**FAST, "freeze_step": Share(0.125)}),
        f"{QUICK}, but beta2 of {TASKS}, whose memory of 50 steps lets the warm-up end after 64",
        0.155,
    ),
    "onebit_adam_int8": Method(
        "OneBitAdam, warm-up by Int8",
        own("OneBitAdam", ADAM, {**SLOW, "freeze_step": FREEZE, "warmup_compressor": {"name": "Int8"}}),
        QUICK,
        0.09,
    ),
    "onebit_adam_auto": Method(
        'OneBitAdam, freeze_step="auto"',
        own("OneBitAdam", ADAM, SLOW),
        f"{QUICK}, but the class's own freeze_step",
        0.65,
    ),
    "onebit_adam_auto_int8": Method(
        'OneBitAdam, freeze_step="auto", warm-up by Int8',
        own("OneBitAdam", ADAM, {**SLOW, "warmup_compressor": {"name": "Int8"}}),
        f"{QUICK}, but the class's own freeze_step",
        0.18,
    ),
    "onebit_adam_fast_auto_int8": Method(
        'OneBitAdam, short memory, freeze_step="auto", warm-up by Int8',
        own("OneBitAdam", ADAM, {**FAST, "warmup_compressor": {"name": "Int8"}}),
        f"{QUICK}: its beta2, but the class's own freeze_step",
        0.1,
    ),
    "onebit_adam_early_int8": Method(
        "OneBitAdam, short memory, short warm-up by Int8",
        own("OneBitAdam", ADAM, {**FAST, "freeze_step": Share(0.125), "warmup_compressor": {"name": "Int8"}}),
        "as the two above",
        0.06,
    ),
    "onebit_lion": Method(
        "OneBitLion",
        own("OneBitLion", {"lr": LIONS * ADAM["lr"], "weight_decay": ADAM["weight_decay"] / LIONS}, {}),
        "scripts/tuned.py: a 5th of Adam's lr, 5 times its decay",
        0.035,
    ),
    "none_muon": Method(
        "DDP, Muon, no network", own("Muon", ADAM, MUON_ARGS), f"{QUICK}: lr and decay as Adam's", network=False
    ),
    "muon_int4": Method(
        "Muon on Int4()",
        own("Muon", ADAM, MUON_ARGS),
        f"{QUICK}: lr and decay as Adam's, as in scripts/tuned.py",
        0.13,
        {"name": "Int4"},
    ),
    "zero_one_adam": Method("ZeroOneAdam", own("ZeroOneAdam", ADAM, {**SLOW, **ROUNDS}), QUICK, 0.16),
    "zero_one_adam_every": Method(
        "ZeroOneAdam, no local steps",
        own("ZeroOneAdam", ADAM, {**SLOW, "variance": {"kappa": 16, "stop": FREEZE}}),
        "the paper's kappa; the class's own sync",
        0.15,
    ),
    "zero_one_adam_int4": Method(
        "ZeroOneAdam, refreshes by Int4, no local steps",
        own("ZeroOneAdam", ADAM, {**SLOW, **HALF, "refresh_compressor": {"name": "Int4"}}),
        "the paper's kappa, up to half of the steps; the class's own sync",
        0.07,
    ),
    "zero_one_adam_int4_local": Method(
        "ZeroOneAdam, refreshes by Int4",
        own("ZeroOneAdam", ADAM, {**SLOW, **HALF, **FOURTH, "refresh_compressor": {"name": "Int4"}}),
        "as above; rounds every 2 and 4 steps in the last two thirds of what is left",
        0.06,
    ),
    "zero_one_adam_int4_floor": Method(
        "ZeroOneAdam, refreshes by Int4, min_variance=0.3",
        own("ZeroOneAdam", ADAM, {
            **SLOW, **HALF, **FOURTH, "refresh_compressor": {"name": "Int4"}, "min_variance": 0.3,
        }),
        "as above; what docs/onebit_adam.md advises for very small batches",
        0.06,
    ),
    "zero_one_adam_int8": Method(
        "ZeroOneAdam, refreshes by Int8, no local steps",
        own("ZeroOneAdam", ADAM, {**SLOW, **HALF, "refresh_compressor": {"name": "Int8"}}),
        "as above",
        0.09,
    ),
    "zero_one_adam_half": Method(
        "ZeroOneAdam, refreshes in half of the steps, no local steps",
        own("ZeroOneAdam", ADAM, {**SLOW, **HALF}),
        "as above",
        0.2,
    ),
    "zero_one_adam_rare": Method(
        "ZeroOneAdam, rare refreshes, no local steps",
        own("ZeroOneAdam", ADAM, {**SLOW, "variance": {"kappa": 4, "stop": FREEZE}}),
        "a quarter of the paper's kappa: short runs have few steps for refreshes; the class's own sync",
        0.08,
    ),
    "zero_one_adam_rare_local": Method(
        "ZeroOneAdam, rare refreshes",
        own("ZeroOneAdam", ADAM, {**SLOW, **ROUNDS, "variance": {"kappa": 4, "stop": FREEZE}}),
        f"a quarter of the paper's kappa, as above; sync of {QUICK}",
        0.07,
    ),
    "lamb": Method("DDP, Lamb", own("Lamb", LAMB, FAST), QUICK),
    "onebit_lamb": Method("OneBitLamb", own("OneBitLamb", LAMB, {**FAST, "freeze_step": FREEZE}), QUICK, 0.28),
    "lans": Method("DDP, Lans", own("Lans", LAMB, FAST), "as Lamb"),
    "sgd": Method("DDP, SGD", own("SGD", {"lr": 0.1}, NESTEROV), TASKS, stretch=1.25),
    "cser": Method(
        "CSER(R=8)",
        own("CSER", {"lr": 0.1}, {**NESTEROV, "period": 8, "reset_compressor": random_blocks(2)},
            compressor=random_blocks(16)),
        f"{TASKS}; ratio of the compressor 8 times the resets', as in 2007.13221",
        0.125,
        stretch=1.5,
    ),
    "qsparse": Method(
        "QSparseLocalSGD",
        own("QSparseLocalSGD", {"lr": 0.1}, {**NESTEROV, "period": 2},
            compressor={"name": "Sign", "args": {"block": 2048}}),
        TASKS,
        0.016,
        stretch=1.5,
    ),
    "local_sgd": Method(
        "LocalSGD(AdamW), 16 steps", own("LocalSGD", ADAM, LOCAL), "the class's own period", 0.06, stretch=1.5
    ),
    "slowmo": Method(
        "SlowMo(AdamW), 16 steps",
        own("SlowMo", ADAM, {**LOCAL, "outer_momentum": 0.2}),
        f"{TASKS}; momentum for few workers, as its authors advise",
        0.06,
        stretch=1.5,
    ),
    "diloco": Method(
        "DiLoCo(AdamW), 16 steps",
        own("DiLoCo", ADAM, {**LOCAL, "outer_lr": 0.7, "outer_momentum": 0.5}),
        f"{TASKS}; 0.9 is for more rounds",
        0.06,
        stretch=1.5,
    ),
    "diloco_int4": Method(
        "DiLoCo(AdamW), 16 steps, Int4()",
        own("DiLoCo", ADAM, {**LOCAL, "outer_lr": 0.7, "outer_momentum": 0.5}, compressor={"name": "Int4"}),
        "as DiLoCo",
        0.01,
        stretch=1.5,
    ),
    "muloco_int4": Method(
        "DiLoCo(Muon), 16 steps, Int4()",
        own("DiLoCo", ADAM, {**LOCAL, "base": "Muon", "base_args": MUON_ARGS, "outer_lr": 0.7, "outer_momentum": 0.5},
            compressor={"name": "Int4"}),
        "as DiLoCo and Muon",
        0.01,
        stretch=1.5,
    ),
    "sparse_loco": Method(
        "SparseLoCo(AdamW), 16 steps", own("SparseLoCo", ADAM, LOCAL), "as LocalSGD; the class's own", 0.001,
        stretch=1.5,
    ),
    "noloco": Method(
        "NoLoCo(AdamW), 16 steps",
        own("NoLoCo", ADAM, LOCAL),
        "as LocalSGD; the class's own; of two hosts the pair is all",
        0.09,
        stretch=1.5,
    ),
    "gossip_int8": Method(
        "Gossip(AdamW), 16 steps, Int8()",
        own("Gossip", ADAM, LOCAL, compressor={"name": "Int8"}),
        "as LocalSGD; the class's own",
        0.05,
        stretch=1.5,
    ),
    "sign_momentum": Method(
        "SignMomentum(AdamW), 16 steps",
        own("SignMomentum", ADAM, {
            **LOCAL, "outer_lr": SIGN_STEP / ADAM["lr"], "outer_betas": [0.0, 0.0], "outer_weight_decay": 0.1,
        }),
        f"{TASKS}: no second momentum, a step of 2e-3",
        0.06,
        stretch=2.0,
    ),
}  # fmt: skip


def resolved(given: Any, steps: int) -> Any:
    """``given`` with a number of steps for each Share of them, 1 at least."""
    if isinstance(given, Share):
        return max(1, round(given.of * steps))
    if isinstance(given, dict):
        return {key: resolved(value, steps) for key, value in given.items()}
    return given
