"""What scripts/tuned.py tunes: the methods of each task; a counterpart stands before what is compared with it."""

from __future__ import annotations

from typing import Any

from convergence_tasks import TASKS, Method

GPT = TASKS["gpt"].methods
LIONS = 1.0
"""Of AdamW's learning rate: the middle of OneBitLion's, whose steps are shorter than Lion's (docs/onebit_lion.md)."""
MOMENTUM = {"outer_lr": 0.7, "outer_momentum": 0.5}
"""Of DiLoCo: the best of five on the tuning seeds, at its best rate: 4.020; (1, 0.5) 4.222, (0.7, 0.7) 4.216, (1, 0.3)
4.049, (0.5, 0.7) 4.050."""
MUON = {"name": "Muon", "lr": 2e-3, "weight_decay": 0.1, "args": {"adamw": {"betas": [0.9, 0.98]}}}


def cser(ratio: int) -> Method:
    """1 / (2 R) in every step, and as much on average by a round in every 32nd, as in its paper: R = ``ratio``."""
    of = GPT["CSER(R=8)"].optim

    def blocks(ratio: int) -> dict[str, Any]:
        return {"name": "RandomBlocks", "args": {"ratio": ratio, "block": 32}}

    args = {**of["args"], "period": 32, "reset_compressor": blocks(ratio // 16)}
    return Method({**of, "args": args, "compressor": blocks(2 * ratio)}, "SGD")


CONTRIBUTORS = {"mean_over": "contributors", "outer_lr": 0.85, "error_decay": 0.7}
"""Of SparseLoCo: the best of twelve settings on the tuning seeds, at the rate that is best for the defaults. (outer_lr,
error_decay): (1, 0.95), the default, 4.217; (1.4, 0.95) 4.191, (2, 0.95) 4.407, (1.4, 1) 4.179, (1.4, 0.8) 4.159; and
over the contributors (0.5, 0.95) 4.117, (0.7, 0.95) 4.064, (1, 0.95) 4.404, (0.7, 1) 4.161, (0.7, 0.8) 4.021,
(0.7, 0.6) 4.061, (0.85, 0.7) 3.972."""


def lions(lr: float, weight_decay: float) -> dict[str, Method]:
    """Lion and its one bit, by the settings of a task's AdamW."""
    lion = {"name": "OneBitLion", "lr": LIONS * lr, "weight_decay": weight_decay / LIONS, "args": {}}
    exact = {**lion, "compressor": {"name": "Identity", "args": {}}}
    return {"Lion": Method(exact, "AdamW"), "OneBitLion": Method(lion, "Lion")}


def rounds(lr: float, weight_decay: float) -> dict[str, Method]:
    """Outer optimizers with rounds of 15 steps, Gossip of 4, by the settings of a task's AdamW."""

    def outer(
        name: str, against: str = "DiLoCo(AdamW) H=15", base: str = "AdamW", compressor: Any = None, **args: Any
    ) -> Method:
        betas = {"betas": [0.9, 0.98]}
        given = {"base": base, "base_args": {"adamw": betas} if base == "Muon" else betas, "period": 15, **args}
        optim = {"name": name, "lr": lr, "weight_decay": weight_decay, "args": given}
        return Method(optim if compressor is None else {**optim, "compressor": compressor}, against)

    local = "LocalSGD(AdamW) H=15"
    denser = {"name": "TopK", "args": {"k": 32, "chunk": 256, "bits": 8}}
    return {
        local: outer("LocalSGD", "AdamW"),
        "DiLoCo(AdamW) H=15": outer("DiLoCo", local, **MOMENTUM),
        "DiLoCo(AdamW) H=15 streamed": outer("DiLoCo", streaming={"fragments": 4, "delay": 2}, **MOMENTUM),
        "DES-LOC(AdamW) H=15": outer("LocalSGD", local, state_period={"exp_avg": 3, "exp_avg_sq": 6}),
        "SparseLoCo(AdamW) H=15": outer("SparseLoCo"),
        "SparseLoCo(AdamW) H=15 k=32": outer("SparseLoCo", compressor=denser),
        "SparseLoCo(AdamW) H=15 k=32 of contributors": outer("SparseLoCo", compressor=denser, **CONTRIBUTORS),
        "NoLoCo(AdamW) H=15": outer("NoLoCo"),
        "Gossip(AdamW)": outer("Gossip", "LocalSGD(AdamW)", period=4),
        "Gossip(AdamW) Int8": outer("Gossip", "LocalSGD(AdamW)", compressor={"name": "Int8"}, period=4),
        "MuLoCo H=15": outer("DiLoCo", "Muon", base="Muon", **MOMENTUM),
    }


REFRESHES = "ZeroOneAdam + Int8 refreshes", "ZeroOneAdam + Int4 refreshes"
OF_GPT: dict[str, Method] = {
    name: GPT[name]
    for name in (
        "AdamW", "AdamW + Int4", "AdamW + PowerSGD(4)", "AdamW + ACP(4)", "AdamW + Sign", "AdamW + TopK",
        "OneBitAdam", "ZeroOneAdam", *REFRESHES, "Lamb", "OneBitLamb", "OneBitLamb(element)",
    )
}  # fmt: skip
OF_GPT |= {
    **lions(2e-3, 0.1),
    "Muon": Method(MUON),
    **{
        f"Muon + {name}": Method(MUON, "Muon", comm={"compress": {"name": name}})
        for name in ("Int8", "Int4", "Int2", "Sign")
    },
    **{name: GPT[name] for name in ("LocalSGD(AdamW)", "SignMomentum(AdamW)", "SlowMo(AdamW)", "DiLoCo(AdamW)")},
    **rounds(2e-3, 0.1),
    "SGD": GPT["SGD"],
    "CSER(R=4)": GPT["CSER(R=4)"],
    "CSER(R=8)": GPT["CSER(R=8)"],
    "CSER(R=256)": cser(256),
    "CSER(R=1024)": cser(1024),
    "QSparseLocalSGD": GPT["QSparseLocalSGD"],
    "LocalSGD(SGD)": GPT["LocalSGD(SGD)"],
}


ADAMS = (
    "AdamW", "AdamW + Int4", "OneBitAdam", "ZeroOneAdam", "Lamb", "OneBitLamb", "OneBitLamb(element)",
    "LocalSGD(AdamW)", "DiLoCo(AdamW)",
)  # fmt: skip
OUTER = "SignMomentum(AdamW)", "SlowMo(AdamW)"
SGDS = "SGD", "CSER(R=4)", "CSER(R=8)", "QSparseLocalSGD", "LocalSGD(SGD)"
OF_DIGITS = (
    *ADAMS, *REFRESHES, *SGDS, *OUTER, "Lans", "CLAN",
    "AdamW + PowerSGD(4)", "AdamW + ACP(4)", "AdamW + Sign", "AdamW + TopK",
)  # fmt: skip


def named(task: str, *names: str) -> dict[str, Method]:
    """These methods with the settings that scripts/convergence_tasks.py has of them."""
    return {name: TASKS[task].methods[name] for name in names}


def far(lr: float) -> dict[str, Method]:
    """Lion, Gossip, and a method of each optimizer with long rounds, whose settings are those found on the GPT."""
    of = rounds(lr, 0.01)
    names = (
        "LocalSGD(AdamW) H=15", "DiLoCo(AdamW) H=15", "SparseLoCo(AdamW) H=15 k=32 of contributors",
        "NoLoCo(AdamW) H=15", "Gossip(AdamW)", "Gossip(AdamW) Int8",
    )  # fmt: skip
    return lions(lr, 0.01) | {name: of[name] for name in names}


METHODS = {
    "gpt": OF_GPT,
    "bert": named("bert", *ADAMS, *SGDS, *OUTER) | far(1e-3),
    "digits": named("digits", *OF_DIGITS) | far(3e-3),
}
