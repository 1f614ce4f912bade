"""timm: the optimizers by name.

    commopt.integrations.timm.register()
    optimizer = timm.optim.create_optimizer_v2(model, opt="onebitadam", lr=1e-3, weight_decay=0.05, layer_decay=0.75)

timm's own groups come along: no decay of biases and norms, ``lr_scale`` by layer, which its schedulers apply.
"""

from __future__ import annotations

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry  # where its documentation says that one registers

import commopt

ADAPTIVE = {
    "onebitadam": (commopt.OneBitAdam, "1-bit Adam: a warm-up of Adam, then one bit an element"),
    "onebitlamb": (commopt.OneBitLamb, "1-bit LAMB: a warm-up of LAMB, then one bit an element"),
    "zerooneadam": (commopt.ZeroOneAdam, "0/1 Adam: one bit an element, and local steps"),
    "commoptlamb": (commopt.Lamb, "LAMB, what 1-bit LAMB warms up with"),
    "commoptlans": (commopt.Lans, "LANS: LAMB with Nesterov's momentum on normalised gradients"),
}
"""With betas and eps, of their own or of their base. timm has a LAMB of its own, so ours have another name."""
WITHOUT_EPS = {"onebitlion": (commopt.OneBitLion, "1-bit Lion: one bit an element from the first step on")}
"""With betas alone."""
MOMENTUM = {
    "cser": (commopt.CSER, "CSER: SGD with momentum that averages a part of each update, and resets errors"),
    "qsparselocalsgd": (commopt.QSparseLocalSGD, "QSparse-local-SGD: local steps, compressed"),
}
"""With momentum."""
OUTER = {
    "diloco": (commopt.DiLoCo, "DiLoCo: local steps of AdamW, then Nesterov's momentum on the mean of all"),
    "gossip": (commopt.Gossip, "local steps of AdamW, then the mean of three neighbours on a ring"),
    "localsgd": (commopt.LocalSGD, "local steps of AdamW, then the mean of all"),
    "noloco": (commopt.NoLoCo, "NoLoCo: local steps of AdamW, then an outer step with one other rank"),
    "signmomentum": (commopt.SignMomentum, "local steps of AdamW, then a step by the sign of the momentum of all"),
    "slowmo": (commopt.SlowMo, "SlowMo: local steps of AdamW, then momentum on the mean of all"),
    "sparseloco": (
        commopt.SparseLoCo,
        "SparseLoCo: local steps of AdamW, then the largest elements of all",
    ),
}
"""Local steps of a base: AdamW, or what is given as ``base``."""


def register() -> None:
    """Registers all optimizers of commopt with timm, by the names in ``ADAPTIVE``, ``WITHOUT_EPS``, ``MOMENTUM`` and
    ``OUTER``. May be called again."""
    for optimizers, has_betas, has_eps in (
        (ADAPTIVE, True, True), (WITHOUT_EPS, True, False), (MOMENTUM, False, False), (OUTER, True, True),
    ):  # fmt: skip
        for name, (opt_class, description) in optimizers.items():
            info = OptimInfo(
                name, opt_class, f"commopt: {description}", has_eps=has_eps, has_momentum=not has_betas,
                has_betas=has_betas,
            )  # fmt: skip
            if name not in default_registry.list_optimizers():  # timm warns of names that it has
                default_registry.register(info)
