"""What scripts/tuned.py tunes: the methods of each task; a counterpart stands before what is compared with it."""

from __future__ import annotations

from typing import Any

from convergence_tasks import TASKS, Method

GPT = TASKS["gpt"].methods
LIONS = 1.0
"""Of AdamW's learning rate: the middle of OneBitLion's, whose steps are shorter than Lion's (docs/onebit_lion.md)."""


def rounds(name: str, base: str = "AdamW", **args: Any) -> dict[str, Any]:
    """The ``optim`` section of an outer optimizer with rounds of 15 steps."""
    betas = {"betas": [0.9, 0.98]}
    of_base = {"adamw": betas} if base == "Muon" else betas
    given = {"base": base, "base_args": of_base, "period": 15, **args}
    return {"name": name, "lr": 2e-3, "weight_decay": 0.1, "args": given}


def outer(name: str, base: str = "AdamW", against: str = "LocalSGD(AdamW) H=15", **args: Any) -> Method:
    return Method(rounds(name, base, **args), against)


MOMENTUM = {"outer_lr": 0.7, "outer_momentum": 0.5}
"""Of DiLoCo: the best of five on the tuning seeds, at its best rate: 4.020; (1, 0.5) 4.222, (0.7, 0.7) 4.216, (1, 0.3)
4.049, (0.5, 0.7) 4.050."""
MUON = {"name": "Muon", "lr": 2e-3, "weight_decay": 0.1, "args": {"adamw": {"betas": [0.9, 0.98]}}}
LION = {"name": "OneBitLion", "lr": LIONS * 2e-3, "weight_decay": 0.1 / LIONS, "args": {}}


def cser(ratio: int) -> Method:
    """1 / (2 R) in every step, and as much on average by a round in every 32nd, as in its paper: R = ``ratio``."""
    of = GPT["CSER(R=8)"].optim

    def blocks(ratio: int) -> dict[str, Any]:
        return {"name": "RandomBlocks", "args": {"ratio": ratio, "block": 32}}

    args = {**of["args"], "period": 32, "reset_compressor": blocks(ratio // 16)}
    return Method({**of, "args": args, "compressor": blocks(2 * ratio)}, "SGD")


def denser(**args: Any) -> Method:
    """SparseLoCo that sends 32 of 256 elements, at 8 bits."""
    top_k = {"name": "TopK", "args": {"k": 32, "chunk": 256, "bits": 8}}
    return Method({**rounds("SparseLoCo", **args), "compressor": top_k}, "DiLoCo(AdamW) H=15")


CONTRIBUTORS = {"mean_over": "contributors", "outer_lr": 0.85, "error_decay": 0.7}
"""Of SparseLoCo: the best of twelve settings on the tuning seeds, at the rate that is best for the defaults. (outer_lr,
error_decay): (1, 0.95), the default, 4.217; (1.4, 0.95) 4.191, (2, 0.95) 4.407, (1.4, 1) 4.179, (1.4, 0.8) 4.159; and
over the contributors (0.5, 0.95) 4.117, (0.7, 0.95) 4.064, (1, 0.95) 4.404, (0.7, 1) 4.161, (0.7, 0.8) 4.021,
(0.7, 0.6) 4.061, (0.85, 0.7) 3.972."""

OF_GPT: dict[str, Method] = {
    name: GPT[name]
    for name in (
        "AdamW", "AdamW + Int4", "AdamW + PowerSGD(4)", "AdamW + ACP(4)", "AdamW + Sign", "AdamW + TopK",
        "OneBitAdam", "ZeroOneAdam", "Lamb", "OneBitLamb", "OneBitLamb(element)",
    )
}  # fmt: skip
OF_GPT |= {
    "Lion": Method({**LION, "compressor": {"name": "Identity", "args": {}}}, "AdamW"),
    "OneBitLion": Method(LION, "Lion"),
    "Muon": Method(MUON),
    **{
        f"Muon + {name}": Method(MUON, "Muon", comm={"compress": {"name": name}})
        for name in ("Int8", "Int4", "Int2", "Sign")
    },
    **{name: GPT[name] for name in ("LocalSGD(AdamW)", "SignMomentum(AdamW)", "SlowMo(AdamW)", "DiLoCo(AdamW)")},
    "LocalSGD(AdamW) H=15": outer("LocalSGD", against="AdamW"),
    "DiLoCo(AdamW) H=15": outer("DiLoCo", **MOMENTUM),
    "DiLoCo(AdamW) H=15 streamed": outer(
        "DiLoCo", against="DiLoCo(AdamW) H=15", streaming={"fragments": 4, "delay": 2}, **MOMENTUM
    ),
    "DES-LOC(AdamW) H=15": outer("LocalSGD", state_period={"exp_avg": 3, "exp_avg_sq": 6}),
    "SparseLoCo(AdamW) H=15": outer("SparseLoCo", against="DiLoCo(AdamW) H=15"),
    "SparseLoCo(AdamW) H=15 k=32": denser(),
    "SparseLoCo(AdamW) H=15 k=32 of contributors": denser(**CONTRIBUTORS),
    "NoLoCo(AdamW) H=15": outer("NoLoCo", against="DiLoCo(AdamW) H=15"),
    "MuLoCo H=15": outer("DiLoCo", base="Muon", against="Muon", **MOMENTUM),
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
SGDS = "SGD", "CSER(R=4)", "CSER(R=8)", "QSparseLocalSGD", "LocalSGD(SGD)"
OF_DIGITS = (
    *ADAMS, *SGDS, "SignMomentum(AdamW)", "SlowMo(AdamW)", "Lans", "CLAN", "AdamW + PowerSGD(4)", "AdamW + ACP(4)",
    "AdamW + Sign", "AdamW + TopK",
)  # fmt: skip


def named(task: str, *names: str) -> dict[str, Method]:
    """These methods with the settings that scripts/convergence_tasks.py has of them."""
    return {name: TASKS[task].methods[name] for name in names}


METHODS = {"gpt": OF_GPT, "bert": named("bert", *ADAMS, *SGDS), "digits": named("digits", *OF_DIGITS)}
