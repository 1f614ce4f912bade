"""The trainer with an outer optimizer: named in a config, stopped between synchronisations, evaluated at the mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_pair import Pair, run, run_and_stop
from trainer_runs import Make, assert_same, content, records

import commopt
from commopt.compress import Int8, Sign, TopK
from commopt.outer import RandomSign
from commopt.train.config import OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.loop import Trainer
from commopt.train.metrics import read_metrics
from commopt.train.optimizer import make_optimizer
from commopt.train.parse import from_dict

SIGN = {
    "name": "SignMomentum",
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "args": {
        "base": "AdamW", "base_args": {"betas": [0.8, 0.9]}, "period": 5, "outer_lr": 0.5,
        "state_period": {"exp_avg_sq": 1},
        "sign": {"name": "RandomSign", "args": {"seed": 3}},
    },
}  # fmt: skip
COMPRESSED = {"name": "LocalSGD", "compressor": {"name": "Sign"}, "args": {"base": "SGD", "period": 5}}
SPARSE = {
    "name": "SparseLoCo",
    "args": {"period": 5, "error_decay": 0.9, "clip_to_median": True, "streaming": {"fragments": 2, "delay": 2}},
}
GOSSIP = {"name": "NoLoCo", "args": {"period": 5, "outer_momentum": 0.25, "seed": 3}}
CONFIGS: dict[str, dict[str, Any]] = {"sign": SIGN, "compressed": COMPRESSED, "sparse": SPARSE, "gossip": GOSSIP}


def optimizer(**values: Any) -> Any:
    return make_optimizer(from_dict(values, OptimConfig), torch.nn.Linear(3, 2))


def test_outer_optimizers_by_name() -> None:
    mine = optimizer(**SIGN, lr=0.02, compressor={"name": "Sign", "args": {"block": 64}})
    assert isinstance(mine, commopt.SignMomentum)
    assert isinstance(mine.base, torch.optim.AdamW)
    assert (mine.sign, mine.compressor, mine.max_grad_norm) == (RandomSign(seed=3), Sign(block=64), 0.5)
    assert mine.state_period == {"exp_avg_sq": 1}
    decayed, rest = mine.param_groups
    assert mine.base.param_groups is mine.param_groups
    given = [decayed[name] for name in ("lr", "betas", "weight_decay", "period", "outer_lr")]
    assert given == [0.02, (0.8, 0.9), 0.1, 5, 0.5]
    assert (rest["weight_decay"], rest["outer_weight_decay"], decayed["outer_weight_decay"]) == (0.0, 0.0, 0.1)
    assert isinstance(optimizer(name="LocalSGD").base, torch.optim.AdamW)
    assert isinstance(optimizer(name="SlowMo", args={"base": "torch.optim.SGD"}).base, torch.optim.SGD)
    assert isinstance(optimizer(name="commopt.DiLoCo", args={"base": "Lamb"}).base, commopt.Lamb)
    assert optimizer(name="SignMomentum", args={"sign": "RandomSign"}).sign == RandomSign()
    sparse = optimizer(**SPARSE)
    assert sparse.streaming == commopt.Streaming(2, 2)
    assert (sparse.compressor, sparse.param_groups[1]["error_decay"], sparse.clip_to_median) == (TopK(), 0.9, True)
    gossip = optimizer(**GOSSIP)
    assert (gossip.seed, gossip.param_groups[1]["outer_momentum"]) == (3, 0.25)
    ring = optimizer(name="Gossip", compressor={"name": "Int8"}, args={"base": "SGD"})
    assert (ring.compressor, type(ring.base)) == (Int8(), torch.optim.SGD)
    assert optimizer(name="SparseLoCo", compressor={"name": "TopK", "args": {"k": 8}}).compressor == TopK(8)


WRONG = [
    ({"name": "SignMomentun"}, "optim.name='SignMomentun' .*; did you mean SignMomentum"),
    ({"args": {"perod": 3}}, "optim.args.perod: SignMomentum has no such argument; did you mean period"),
    ({"args": {"betas": [0.9, 0.9]}}, "SignMomentum has no such argument.*those of its base are in .*base_args"),
    ({"args": {"lr": 0.1}}, "optim.args.lr: set optim.lr instead"),
    ({"args": {"base": "AdamV"}}, "optim.args.base='AdamV' is no Optimizer of torch.optim .*; did you mean Adam"),
    ({"args": {"base": "no.such.Thing"}}, "optim.args.base='no.such.Thing': cannot import no.such"),
    ({"args": {"base": "AdamW", "base_args": {"beta": 1}}}, "base_args.beta: AdamW has no such .*; did you mean betas"),
    ({"args": {"base_args": {"lr": 1}}}, "optim.args.base_args.lr: set optim.lr instead"),
    ({"args": {"base_args": {"period": 1}}}, "optim.args.base_args.period: set optim.args.period instead"),
    ({"args": {"base_args": 3}}, "optim.args.base_args=3 is not allowed"),
    ({"args": {"base": "Rprop"}, "weight_decay": 0.1}, "optim.weight_decay: Rprop has no such argument"),
    ({"args": {"base": "LocalSGD"}}, "optim.args.base='LocalSGD' is no Optimizer"),
    ({"args": {"base": "commopt.LocalSGD"}}, "LocalSGD already synchronises the ranks"),
    ({"args": {"streaming": 4}}, "optim.args.streaming=4 is not allowed: it must be arguments of Streaming, or null"),
    ({"args": {"streaming": {"fragment": 4}}}, "optim.args.streaming.fragment: .*; did you mean fragments"),
    ({"args": {"streaming": {"merge": "late"}}}, "merge must be 'mix', 'corrected' or 'eager', got 'late'"),
    (
        {"name": "SparseLoCo", "args": {"mean_over": "all"}},
        "optim: SparseLoCo: mean_over must be 'ranks' or 'contributors', got 'all'",
    ),
    (
        {"args": {"state_period": {"exp_avh": 2}}},
        "the state of AdamW has no tensor of that name .*; allowed are exp_avg",
    ),
    ({"args": {"period": 0}}, "optim: SignMomentum: period must be an int >= 1, got 0"),
    ({"args": {"sign": "RandomSing"}}, "optim.args.sign.name='RandomSing' .*; did you mean RandomSign"),
    (
        {"args": {"sign": {"args": {"seed": 1}}}},
        "optim.args.sign=.* is not allowed: it must be a name, or name and args",
    ),
    ({"args": {"sign": {"name": "RandomSign", "args": {"sed": 1}}}}, "has no such argument; did you mean seed"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_name_or_argument_is_answered(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer(**{"name": "SignMomentum", **values})


def losses_at(config: Any, step: int) -> tuple[float, float]:
    """Held-out loss of the weights in the checkpoint of ``step``, and as the resumed run evaluates it."""
    from commopt.train.checkpoint import load_shared
    from commopt.train.world import open_world

    with open_world(config.comm) as world:
        trainer = Trainer(config, world)
        resumed = trainer.evaluate()
        saved = load_shared(Path(config.train.run_dir, "checkpoints", f"step-{step:08d}"))
        trainer.model.load_state_dict(saved["weights"])
        trainer.engine.averaged = torch.no_grad  # type: ignore[method-assign]
        return trainer.evaluate(), resumed


@pytest.fixture(scope="module")
def unstopped(pair: Pair, tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in folders.items():
        pair.run(run, tiny(folder, optim=CONFIGS[name]))
    return folders


@pytest.mark.long(but="sparse-8")
@pytest.mark.parametrize(("name", "step"), [("sign", 5), ("sign", 7), ("compressed", 8), ("sparse", 8), ("gossip", 8)])
def test_stopped_and_resumed_is_never_stopped(
    pair: Pair, tiny: Make, unstopped: dict[str, Path], tmp_path: Path, name: str, step: int
) -> None:
    """Synchronisations are at 5 and 10 of 12 steps."""
    pair.run(run_and_stop, tiny(tmp_path, optim=CONFIGS[name]), step, 1)
    between = content(tmp_path, step, 2)
    pair.run(run, tiny(tmp_path, optim=CONFIGS[name], resume="auto"))
    assert_same(content(tmp_path, 12, 2), content(unstopped[name], 12, 2))
    assert records(tmp_path) == records(unstopped[name])
    parts = [part["optimizer_state"] for part in between[1:]]
    assert all(("parameter" in entry) == (step != 5) for part in parts for entry in part["state"].values())
    if name == "sign":
        moments = [[entry["exp_avg"] for entry in part["base"]["state"].values()] for part in parts]
        assert any(not torch.equal(a, b) for a, b in zip(*moments))
        averaged = [[entry["exp_avg_sq"] for entry in part["base"]["state"].values()] for part in parts]
        assert all(torch.equal(a, b) for a, b in zip(*averaged)) == (step == 5)


@pytest.mark.parametrize("name", ["sign", "compressed", "gossip"])
def test_a_run_that_ends_between_synchronisations_ends_with_the_mean_model(
    pair: Pair, tiny: Make, unstopped: dict[str, Path], name: str
) -> None:
    shared, *parts = content(unstopped[name], 12, 2)
    own = [part["optimizer_state"]["state"] for part in parts]
    names = [name for group in shared["optimizer_state"]["param_groups"] for name in group["param_names"]]
    assert any(not torch.equal(own[0][i]["parameter"], own[1][i]["parameter"]) for i in own[0])
    for i, parameter in enumerate(names):
        mean = (own[0][i]["parameter"] + own[1][i]["parameter"]) / 2
        torch.testing.assert_close(shared["weights"][parameter], mean, rtol=1e-6, atol=1e-8)
    last = read_metrics(unstopped[name])[-1]["heldout_loss"]
    losses = pair.run(losses_at, tiny(unstopped[name], optim=CONFIGS[name], resume="auto"), 12)
    assert losses == [(last, last)] * 2


def test_records_have_phases_and_bytes(unstopped: dict[str, Path]) -> None:
    for name, folder in unstopped.items():
        lines = read_metrics(folder)
        assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
        if name == "sparse":  # fragments are sent at 2 and 5 of 5, and merged 2 steps later
            phases = ["synchronizing", "synchronizing", "local", "local", "synchronizing", "synchronizing"]
            assert [line["phase"] for line in lines] == phases
            assert [line["bytes"] > 0 for line in lines] == [True, True, False, False, False, True]
            continue
        assert [line["phase"] for line in lines] == ["local"] * 4 + ["synchronizing", "local"]
        assert [line["bytes"] > 0 for line in lines] == [False] * 4 + [True, False]
        totals = [line["bytes_total"] for line in lines]
        assert totals == [0, 0] + [lines[4]["bytes"]] * 2 + [2 * lines[4]["bytes"]] * 2
        if name not in ("sign", "gossip"):
            assert lines[4]["bytes"] < lines[4]["fp32_bytes"] / 8  # some are of the agreement
            assert [line["residual_ratio"] is None for line in lines] == [True] * 2 + [False] * 4
        else:
            assert lines[4]["bytes"] >= lines[4]["fp32_bytes"]
            assert all(line["residual_ratio"] is None for line in lines)


def test_a_run_starts_from_anothers_weights(pair: Pair, tiny: Make, unstopped: dict[str, Path], tmp_path: Path) -> None:
    """They are loaded after the optimizer was made; the first round counts from them."""
    init = str(unstopped["sign"] / "checkpoints" / "step-00000012")
    pair.run(run, tiny(tmp_path, optim={**CONFIGS["sign"], "lr": 1e-9}, init=init, train={"steps": 5}))
    before, after = content(unstopped["sign"], 12, 2)[0]["weights"], content(tmp_path, 5, 2)[0]["weights"]
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)


def test_from_two_ranks_to_one(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    pair.run(run_and_stop, tiny(tmp_path, optim=CONFIGS["sign"]), 7, 0)
    summary = run(tiny(tmp_path, optim=CONFIGS["sign"], resume="auto"))
    assert summary["finished"]
    assert read_metrics(tmp_path)[-1]["phase"] == "plain"
