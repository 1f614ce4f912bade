"""Configs: values are checked, unknown keys are answered, and every shipped file is complete, commented and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
import yaml
from shipped import ROOT, shipped
from trainer_pair import Pair, run, run_and_stop
from trainer_runs import assert_same, content, records

import commopt
from commopt.compress import Int8
from commopt.train.config import (
    CommConfig,
    CompressorConfig,
    Config,
    DataConfig,
    GradientsConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from commopt.train.errors import ConfigError
from commopt.train.loop import learning_rate
from commopt.train.optimizer import check_plan, plan_optimizer
from commopt.train.parse import from_dict, keys, parse, to_yaml
from commopt.train.yamlfile import read_yaml

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
Make = Callable[..., Config]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
class TestShipped:
    def test_every_key_is_there_and_commented(self, path: Path) -> None:
        def walk(tree: dict[str, Any], prefix: str = "") -> set[str]:
            found = set()
            for name, value in tree.items():
                found.add(prefix + name)
                if value is None:  # a section that is not there has no keys
                    found |= {key for key in keys() if key.startswith(f"{prefix}{name}.")}
                if isinstance(value, dict) and f"{prefix}{name}" in keys():
                    found |= walk(value, f"{prefix}{name}.")
            return found

        text = path.read_text()
        missing = set(keys()) - walk(yaml.safe_load(text))
        assert not missing
        bare = [
            line for line in text.splitlines() if line.strip() and "#" not in line and not line.rstrip().endswith(":")
        ]
        assert not bare

    def test_every_optimizer_fits_its_run(self, path: Path) -> None:
        for name in optimizers(path):
            config = shipped(path, name)
            check_plan(config)
            args, warmup = config.optim.args, config.optim.warmup_steps
            settled = args.get("freeze_step") or args.get("variance", {}).get("stop")
            assert (settled is not None) == (name in SOON and "period" not in args)
            assert settled is None or warmup <= settled < config.train.steps / 2, name
            assert learning_rate(config, warmup) == config.optim.lr > learning_rate(config, config.train.steps - 1) > 0

    @pytest.mark.long(but="gpt_quick")
    def test_runs_two_steps(
        self, path: Path, pair: Pair, cache: Path, corpus: Path, first_runs: dict[str, Path], tmp_path: Path
    ) -> None:
        """With its share of the optimizers of all configs that are trained alike, on a mesh or not: small as the runs
        are, configs differ in their models only."""
        more: dict[str, Any] = {}
        if path in SECOND:
            more = {"seq_len": 32, "init": str(first_runs[path.stem])}
        for name in share_of(path):
            for summary in pair.run(run, shrunk(shipped(path, name), corpus, cache, tmp_path / name, **more)):
                assert summary["finished"]
                assert 0 < summary["heldout_loss"] < 6  # a guess among 300 tokens is 5.7
                # almost 2: all of the second step compressed, or nothing sent in the first
                assert (summary["ratio"] > 1.5) == (name in SOON)


SECOND = [path for path in SHIPPED if path.stem.endswith("_512")]
SOON: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 1},
    "OneBitLamb": {"freeze_step": 1},
    "ZeroOneAdam": {"variance": {"stop": 1}, "sync": {"first": 1}},
    "LocalSGD": {"period": 2},
    "SignMomentum": {"period": 2},
}
"""Arguments with which an optimizer compresses in its second step, or first sends in it."""


def optimizers(path: Path) -> list[str]:
    """That a config has settings for."""
    optim = yaml.safe_load(path.read_text())["optim"]
    return [optim["name"], *optim["settings"]]


def share_of(path: Path) -> list[str]:
    """Its turn of all :func:`optimizers`, which alternate between the configs on a mesh, and between the others."""

    def on_mesh(path: Path) -> bool:
        return shipped(path, optimizers(path)[0]).parallel.on_mesh

    alike = [other for other in SHIPPED if on_mesh(other) == on_mesh(path)]
    names = sorted({name for other in alike for name in optimizers(other)})
    able = [[other for other in alike if name in optimizers(other)] for name in names]
    turn = [name for i, name in enumerate(names) if able[i][i % len(able[i])] == path]
    return turn or optimizers(path)[:1]


def shrunk(
    config: Config, corpus: Path, cache: Path, run_dir: Path, seq_len: int = 16, init: str | None = None, shard: int = 1
) -> Config:
    """The same with a model and a corpus for a run of milliseconds on two ranks: two steps, the second one compressed.
    A run on a mesh is one on a mesh of these."""
    args, soon = config.optim.args, SOON.get(config.optim.name, {})
    args = {**args, **{key: {**args[key], **new} if isinstance(new, dict) else new for key, new in soon.items()}}
    lr = config.optim.lr / 100  # a variance that is frozen after one step is no good one
    few = {"kv_heads": config.model.kv_heads and 1, "mlp_width": config.model.mlp_width and 40}
    data = {"corpus": str(corpus), "cache_dir": str(cache), "vocab_size": 300, "seq_len": seq_len, "heldout": 0.2}
    train = {"run_dir": str(run_dir), "steps": 2, "batch_size": 8, "accumulate": 2, "eval_samples": 4}
    return replace(
        config,
        model=replace(config.model, layers=1, heads=2, width=16, **few),  # type: ignore[arg-type]
        data=replace(config.data, **data),  # type: ignore[arg-type]
        optim=replace(config.optim, lr=lr, warmup_steps=0, args=args),
        parallel=ParallelConfig(shard, replicate=2 // shard) if config.parallel.on_mesh else config.parallel,
        train=replace(config.train, **train),  # type: ignore[arg-type]
        init=init,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: they read the same tokens."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.long
def test_the_sharded_recipe_runs_on_pieces_and_is_resumed(
    pair: Pair, cache: Path, corpus: Path, tmp_path: Path
) -> None:
    """Four steps, stopped after two, are those of a run that was never stopped."""

    def config(name: str, resume: str = "none") -> Config:
        made = shrunk(shipped(ROOT / "configs/llama_1b.yaml", "OneBitAdam"), corpus, cache, tmp_path / name, shard=2)
        return replace(made, resume=resume, train=replace(made.train, steps=4, log_every=1))

    pair.run(run, config("whole"))
    for summary in pair.run(run_and_stop, config("parts"), 2, 1):
        assert not summary["finished"]
    for summary in pair.run(run, config("parts", "auto")):
        assert summary["finished"]
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    for one, other in zip(content(tmp_path / "parts", 4, 2), content(tmp_path / "whole", 4, 2)):
        assert_same(one, other)
    assert content(tmp_path / "parts", 4, 2)[0]["mesh"] == [1, 2, 1]
    pieces = [sorted((tmp_path / name).rglob("step-00000004/sharded/*.distcp")) for name in ("parts", "whole")]
    assert [len(paths) for paths in pieces] == [2, 2]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*pieces))


@pytest.fixture(scope="module")
def first_runs(pair: Pair, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the config with samples of 512 tokens: the checkpoint of a run of the one with 128."""
    folder = tmp_path_factory.mktemp("first")
    for path in SECOND:
        pair.run(run, shrunk(shipped(first_of(path), "AdamW"), corpus, cache, folder / path.stem))
    return {path.stem: folder / path.stem / "checkpoints" / "step-00000002" for path in SECOND}


def first_of(path: Path) -> Path:
    """The config of the run that comes before."""
    return path.with_name(path.name.replace("_512", "_128"))


@pytest.mark.parametrize("path", SECOND, ids=lambda path: path.stem)
class TestLongerSamples:
    def test_the_second_run_goes_on_where_the_first_ends(self, path: Path) -> None:
        assert optimizers(path) == optimizers(first_of(path))
        for name in optimizers(path):
            before, after = shipped(first_of(path), name), shipped(path, name)
            assert after.init == f"{before.train.run_dir}/checkpoints/step-{before.train.steps:08d}"
            assert before.model == after.model
            assert replace(before.data, seq_len=512) == after.data
            assert (before.data.seq_len, after.data.seq_len, after.model.positions) == (128, 512, 512)
            if name in ("OneBitAdam", "AdamW", "ZeroOneAdam"):  # LAMB warms up again
                assert after.optim.lr == pytest.approx(learning_rate(before, before.train.steps - 1), rel=0.05)

    @pytest.mark.long(but="bert_base_512")
    def test_the_second_run_starts_from_the_weights_of_the_first(
        self, path: Path, pair: Pair, cache: Path, corpus: Path, first_runs: dict[str, Path], tmp_path: Path
    ) -> None:
        first = first_runs[path.stem]
        config = shrunk(shipped(path, "OneBitAdam"), corpus, cache, tmp_path, seq_len=512, init=str(first))
        pair.run(run, replace(config, optim=replace(config.optim, lr=1e-30)))  # too small to change a bit
        before, after = (
            torch.load(folder / "shared.pt", weights_only=True)["weights"]
            for folder in (first, tmp_path / "checkpoints" / "step-00000002")
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_defaults_are_valid_and_documented() -> None:
    assert from_dict(asdict(Config())) == Config()
    import ast

    tree = ast.parse((ROOT / "commopt/train/config.py").read_text())
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, after in zip(cls.body, [*cls.body[1:], None]):
            if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).endswith("Config"):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{cls.name}.{ast.unparse(node.target)} has no docstring"


BAD = [
    (ModelConfig, {"kind": "cnn"}, "model.kind='cnn' .* gpt, bert or llama"),
    (ModelConfig, {"mlp_width": 0}, "model.mlp_width=0 .* >= 1 or null"),
    (ModelConfig, {"kind": "bert", "kv_heads": 2}, "model.kv_heads=2 .* null with model.kind=bert"),
    (ModelConfig, {"kv_heads": 4}, "model.kv_heads=4 .* null with model.kind=gpt"),
    (ModelConfig, {"tied": False}, "model.tied=False .* true with model.kind=gpt"),
    (ModelConfig, {"kind": "llama", "kv_heads": 3}, "model.kv_heads=3 .* null or a divisor of model.heads=4"),
    (ModelConfig, {"kind": "llama", "kv_heads": 0}, "model.kv_heads=0 .* null or a divisor of model.heads=4"),
    (ModelConfig, {"kind": "llama", "width": 12}, "model.width=12 .* an even multiple of model.heads=4"),
    (ModelConfig, {"kind": "llama", "dropout": 0.1}, "model.dropout=0.1 .* 0 with model.kind=llama"),
    (ModelConfig, {"kind": "llama", "positions": 512}, "model.positions=512 .* null with model.kind=llama"),
    (ModelConfig, {"layers": 0}, "model.layers=0 .* >= 1"),
    (ModelConfig, {"width": 10, "heads": 3}, "model.width=10 .* multiple of model.heads=3"),
    (ModelConfig, {"dropout": 1.0}, r"model.dropout=1.0 .* in \[0, 1\)"),
    (DataConfig, {"corpus": []}, "data.corpus"),
    (DataConfig, {"vocab_size": 260}, r"data.vocab_size=260 .* in \[261"),
    (DataConfig, {"seq_len": 7}, "data.seq_len=7 .* >= 8"),
    (DataConfig, {"heldout": 0.0}, r"data.heldout=0.0 .* in \(0, 0.5\]"),
    (OptimConfig, {"lr": 0.0}, "optim.lr=0.0 .* > 0"),
    (OptimConfig, {"lr": float("nan")}, "optim.lr=nan"),
    (OptimConfig, {"weight_decay": -1.0}, "optim.weight_decay=-1.0 .* >= 0"),
    (OptimConfig, {"max_grad_norm": 0.0}, "optim.max_grad_norm=0.0 .* > 0 or null"),
    (OptimConfig, {"max_skipped": 0}, "optim.max_skipped=0 .* >= 1 or null"),
    (CommConfig, {"timeout": 0.0}, r"comm.timeout=0.0 .* in \(0, 604800\]"),
    (CommConfig, {"timeout": float("nan")}, "comm.timeout=nan"),
    (OptimConfig, {"warmup_steps": -1}, "optim.warmup_steps=-1 .* >= 0"),
    (OptimConfig, {"warmup_power": 0.0}, "optim.warmup_power=0.0 .* > 0"),
    (OptimConfig, {"min_lr_ratio": 1.5}, r"optim.min_lr_ratio=1.5 .* in \[0, 1\]"),
    (OptimConfig, {"decay": "cubic"}, "optim.decay='cubic' .* cosine, linear or exponential"),
    (OptimConfig, {"decay_rate": 0.9}, "optim.decay_rate=0.9 .* null with optim.decay=cosine"),
    (OptimConfig, {"decay": "linear", "decay_every": 5}, "optim.decay_every=5 .* null with optim.decay=linear"),
    (OptimConfig, {"decay": "exponential", "decay_every": 5}, r"optim.decay_rate=None .* in \(0, 1\] with exp"),
    (
        OptimConfig,
        {"decay": "exponential", "decay_rate": 0.9, "decay_every": 0},
        "optim.decay_every=0 .* >= 1 with exponential decay",
    ),
    (Config, {"model": ModelConfig(positions=64)}, "model.positions=64 .* null or >= data.seq_len=128"),
    (Config, {"init": ""}, "init='' .* null or the folder of a checkpoint"),
    (TrainConfig, {"steps": 0}, "train.steps=0 .* >= 1"),
    (TrainConfig, {"keep": 0}, "train.keep=0 .* >= 1"),
    (TrainConfig, {"precision": "fp8"}, "train.precision='fp8' .* fp32 or bf16"),
    (TrainConfig, {"seed": -1}, "train.seed=-1"),
    (TrainConfig, {"run_dir": ""}, "train.run_dir"),
    (Config, {"resume": ""}, "resume"),
]


@pytest.mark.parametrize(("cls", "values", "message"), BAD, ids=[message.split(" ")[0] for *_, message in BAD])
def test_a_value_out_of_range_is_named_with_the_range(cls: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**values)


def test_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "optim: {lr: 3e-4, args: {eps: 1e-6}, compressor: {name: Sign, args: {block: 64}}}\ntrain: {steps: 7}\n"
    )
    config = parse(["--optim.args.betas=[0.8, 0.9]", str(path), "--train.steps", "9", "--data.corpus=[a, b]"])
    assert config.optim.lr == 3e-4
    assert config.optim.args == {"eps": 1e-6, "betas": [0.8, 0.9]}
    assert config.optim.compressor is not None
    assert config.optim.compressor.args == {"block": 64}
    assert (config.train.steps, config.data.corpus) == (9, ["a", "b"])
    assert parse([str(path), "--optim.compressor=null", "--optim.max_grad_norm=null"]).optim.compressor is None
    assert from_dict(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    "words", [["{a}", "{b}"], ["--config={a}", "{b}"], ["{a}", "--config", "{b}"], ["--config={a}", "--config={b}"]]
)
def test_of_several_files_the_later_one_holds_however_they_are_given(tmp_path: Path, words: list[str]) -> None:
    paths = {name: str(tmp_path / f"{name}.yaml") for name in "ab"}
    Path(paths["a"]).write_text("optim: {lr: 1e-4, args: {freeze_step: 3}}\ntrain: {steps: 7}\n")
    Path(paths["b"]).write_text("optim: {lr: 2e-4, args: {freeze_step: 4}}\n")
    config = parse([word.format(**paths) for word in words])
    assert (config.optim.lr, config.optim.args, config.train.steps) == (2e-4, {"freeze_step": 4}, 7)


def test_from_python_names_stand_for_compressors_and_settings_are_refused() -> None:
    assert OptimConfig(compressor="Int4").compressor == CompressorConfig("Int4")  # type: ignore[arg-type]
    assert CommConfig(compress="Int4").compress == GradientsConfig("Int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"optim.settings=.* is of config files"):
        check_plan(Config(optim=OptimConfig(name="AdamW", settings={"AdamW": {"lr": 5.0}})))


@pytest.mark.parametrize("name", ["CSER", "QSparseLocalSGD", "NoLoCo", "Gossip"])
def test_optimizers_that_know_no_nodes_say_so_before_a_corpus_is_read(name: str) -> None:
    config = Config(optim=OptimConfig(name=name), comm=CommConfig(ranks_per_node=2))
    with pytest.raises(ConfigError, match=f"comm.ranks_per_node=2 is not allowed with optim.name={name}.*must be 1"):
        check_plan(config)


@pytest.mark.parametrize(("name", "args"), [("Adafactor", {}), ("Rprop", {}), ("DiLoCo", {"base": "Adafactor"})])
def test_optimizers_of_torch_that_fail_of_pieces_are_refused_on_a_mesh(name: str, args: dict[str, Any]) -> None:
    config = Config(optim=OptimConfig(name=name, args=args), parallel=ParallelConfig(shard=2))
    with pytest.raises(ConfigError, match=r"(Adafactor|Rprop) is not allowed with parallel\.\*"):
        check_plan(config)


def test_a_compressor_is_a_name_or_name_and_args(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "optim: {lr: 3e-4, compressor: {name: TopK, args: {k: 8}}, settings: {AdamW: {comm.compress: Sign}}}\n"
    )
    for compressor in ("Int4", "commopt.compress.Int4"):
        optim = parse([str(path), f"--optim.compressor={compressor}"]).optim
        assert optim.compressor == CompressorConfig(compressor)  # nothing is left of the other one's
        for word in (f"compressor={{name: {compressor}}}", f"={{compressor: {compressor}}}"):
            optim = parse([str(path), f"--optim.{word}".replace(".=", "=")]).optim
            assert (optim.compressor, optim.lr) == (CompressorConfig(compressor), 3e-4)
    assert parse([str(path), "--optim.name=AdamW"]).comm.compress == GradientsConfig("Sign")
    path.write_text("optim: {lr: 3e-4, compressor: Int4}\ncomm: {compress: Int8, timeout: 1e2}\n")
    config = parse([str(path), "--comm.compress.feedback=false"])
    assert (config.optim.compressor, config.optim.lr) == (CompressorConfig("Int4"), 3e-4)
    assert (config.comm.compress, config.comm.timeout) == (GradientsConfig("Int8", feedback=False), 100.0)
    assert parse([str(path), "--comm.compress=null"]).comm.compress is None


def test_what_may_be_left_out_may_be_null(tmp_path: Path) -> None:
    """So one of a file can be unset from the command line."""
    path = tmp_path / "c.yaml"
    path.write_text("optim: {name: OneBitAdam, args: {freeze_step: 5, warmup_compressor: Int8}}")
    words = [str(path), "--optim.args.warmup_compressor=null"]
    assert plan_optimizer(parse(words[:1]).optim)[1]["warmup_compressor"] == Int8()
    assert plan_optimizer(parse(words).optim)[1]["warmup_compressor"] is None
    check_plan(parse(words))
    check_plan(parse(["--optim.name=SignMomentum", "--optim.args={sign: null}"]))
    with pytest.raises(ConfigError, match=r"CSER: reset_compressor must be a RandomBlocks or .*got None"):
        check_plan(parse(["--optim.name=CSER", "--optim.args={reset_compressor: null}"]))


WRONG = [
    (
        ["--optim.name=DiLoCo", "--optim.args.base_args.amsgrad=false"],
        "",
        r"optim.args.base_args.amsgrad on the command line is not allowed: give optim.args.base_args whole, as "
        r"optim.args.base_args='\{amsgrad: ...\}'",
    ),
    (["--config"], "", "--config needs a value: --config=VALUE"),
    (["--optim.lrr=1"], "", "unknown key 'optim.lrr' on the command line; did you mean optim.lr"),
    (["--steps=1"], "", "unknown key 'steps' .*; did you mean train.steps"),
    (["--train.out=x"], "", "unknown key 'train.out' on the command line; valid: train.run_dir, train.steps, "),
    (["--train.lr=1"], "", "unknown key 'train.lr' on the command line; did you mean optim.lr"),
    (["--optm.lr", "1"], "", "unknown key 'optm.lr' .*; did you mean optim.lr"),
    (["--qqqq=1"], "", "unknown key 'qqqq' on the command line; valid: comm, data, init, model"),
    ([], "trian: {steps: 3}", r"unknown key 'trian' in .*c.yaml; did you mean train"),
    ([], "train: {stesp: 3}", r"unknown key 'train.stesp' in .*c.yaml; did you mean train.steps"),
    (
        [],
        "optim: {compressor: {nam: Sign}}",
        "unknown key 'optim.compressor.nam' in .*; did you mean optim.compressor.name",
    ),
    ([], "optim: {lr: fast}", "^optim.lr=fast is not allowed: it must be a number$"),
    ([], "optim: {lr: fast, compressor: Int4}", "^optim.lr=fast is not allowed: it must be a number$"),
    ([], "train: {steps: 1.5}", "^train.steps=1.5 is not allowed: it must be a whole number$"),
    (["--train.precision=fp8"], "", "^train.precision=fp8 is not allowed: it must be fp32 or bf16$"),
    (["--optim.decay=cubic"], "", "^optim.decay=cubic is not allowed: it must be cosine, linear or exponential$"),
    (["--optim.max_grad_norm=big"], "", "^optim.max_grad_norm=big is not allowed: it must be a number or null$"),
    (["--model.tied=maybe"], "", "^model.tied=maybe is not allowed: it must be true or false$"),
    (["--optim.args=3"], "", "^optim.args=3 is not allowed: it must be keys and values$"),
    ([], "data: {corpus: {a: 1}}", "^data.corpus={'a': 1} is not allowed: it must be a string or a list of strings$"),
    (["--optim.compressor.args=3"], "", "^optim.compressor.args=3 is not allowed: it must be keys and values$"),
    (["--optim.compressor={name: 3}"], "", "^optim.compressor.name=3 is not allowed: it must be a string$"),
    (
        [],
        "comm: {compress: {name: Int8, feedback: 3}}",
        "^comm.compress.feedback=3 is not allowed: it must be true or false, a string or keys and values$",
    ),
    (["--comm.compress=3"], "", "comm.compress=3 .* it must be a name, or keys and values below comm.compress$"),
    ([], "optim: [1", "c.yaml: not valid YAML"),
    ([], "train: {steps: 3}\nmodel: {}\ntrain: {batch_size: 8}", "c.yaml: line 3 gives 'train' once more"),
    ([], "train: {steps: 3, steps: 4}", "c.yaml: line 1 gives 'steps' once more"),
    ([], "train.steps: 3\ntrain: {batch_size: 8}", "c.yaml: line 1 gives 'train.steps' beside 'train': put it below"),
    ([], "train:", "train=None in .*c.yaml is not allowed: it must be keys and values below train"),
    ([], "model: {layers: 1}\ntrain: [1, 2]", r"train=\[1, 2\] in .*c.yaml is not allowed: it must be keys and values"),
    ([], "train: other.yaml", "train='other.yaml' in .*c.yaml is not allowed: it must be keys and values"),
    ([], "comm: false", "comm=False in .*c.yaml is not allowed"),
    ([], "train: {steps: null}", "train.steps=null is not allowed: it must be a whole number; leave it out"),
    (
        ["--train.run_dir=runs/\udcff"],
        "",
        r"train.run_dir='runs/\\udcff' is not allowed: it must be a folder, in UTF-8",
    ),
    (["--train.run_dir=runs/\0"], "", r"train.run_dir='runs/\\x00' is not allowed"),
    (["--train.run_dir=null"], "", "train.run_dir=null is not allowed"),
    (
        ["--data.corpus=hf:"],
        "",
        "data.corpus='hf:' is not allowed: it must be stdlib, a path, a list of paths or hf:NAME",
    ),
    ([], "optim: {args: }", "optim.args=null is not allowed: it must be keys and values; leave it out"),
    ([], "optim: {compressor: {name: Int4, args: null}}", "optim.compressor.args=null is not allowed"),
    ([], "data: {corpus: null}", "data.corpus=null is not allowed"),
    ([], "optim: {on_difference: null}", "optim.on_difference=null .*must be raise or repair; leave it out"),
    ([], "[1, 2]", "must hold keys and values, not list"),
    ([], "model: !!python/object/apply:os.getcwd []", "not valid YAML.*python/object"),
    (["--resume"], "", "--resume needs a value"),
    (
        [],
        "optim.args.freeze_step: 5",
        "optim.args.freeze_step in .*c.yaml is not allowed: put freeze_step below optim.args",
    ),
    (
        [],
        "optim: {args.freeze_step: 5}",
        "optim.args.freeze_step in .* is not allowed: put freeze_step below optim.args",
    ),
    (["nowhere.yaml"], "", "config file nowhere.yaml: No such file"),
    (["--train.steps=0"], "", "train.steps=0 is not allowed"),
]


@pytest.mark.parametrize(("argv", "text", "message"), WRONG, ids=[" ".join(argv) or text for argv, text, _ in WRONG])
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, argv: list[str], text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        parse([str(path), *argv])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["9e-1", "1.5e3", ".5e+1", "-2E+3", "1_0e2", "0.25"])
def test_a_number_is_one_wherever_it_is_written(tmp_path: Path, number: str) -> None:
    """PyYAML alone takes most of these for words."""
    path, args = tmp_path / "c.yaml", f"{{base_args: {{beta: {number}}}}}"
    path.write_text(f"optim: {{args: {args}}}\ncomm: {{compress: {{name: Int8, feedback: {args}}}}}")
    in_file = parse([str(path)])
    given = parse([f"--optim={{compressor: Int8, args: {args}}}", f"--comm.compress={{name: Int8, feedback: {args}}}"])
    for config in (in_file, given, parse([f"--optim.args.base_args={{beta: {number}}}", str(path)])):
        assert config.optim.args == {"base_args": {"beta": float(number)}}
        assert config.comm.compress == GradientsConfig("Int8", feedback=config.optim.args)


SETTINGS = """
optim:
  lr: 1.0
  args: {betas: [0.8, 0.9], freeze_step: 5}
  settings:
    AdamW: {args: {betas: [0.8, 0.9]}, weight_decay: 0.5, compressor: null}
    OneBitAdam: {lr: 3.0}
    Lamb: {decay: linear, train.batch_size: 64, train.steps: 7, init: runs/first}
"""


def test_settings_of_an_optimizer_come_between_file_and_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(SETTINGS)
    mine, other = parse([str(path)]).optim, parse(["--optim.name=AdamW", str(path), "--optim.weight_decay=0.25"]).optim
    assert (mine.lr, mine.weight_decay, mine.args) == (3.0, 0.0, {"betas": [0.8, 0.9], "freeze_step": 5})
    assert (other.lr, other.weight_decay, other.args) == (1.0, 0.25, {"betas": [0.8, 0.9]})
    assert parse([str(path), "--optim.name=AdamW", "--optim.args.eps=1e-3"]).optim.args == {
        "betas": [0.8, 0.9],
        "eps": 1e-3,
    }
    config = parse([str(path), "--optim.lr=7"])
    assert config.optim.lr == 7
    more = parse([str(path), "--optim.name=Lamb", "--train.steps=9"])  # keys of other sections, by their whole names
    assert (more.optim.decay, more.train.batch_size, more.train.steps, more.init) == ("linear", 64, 9, "runs/first")
    path.write_text(to_yaml(config))  # what a run writes down is what it does, whoever reads it
    assert parse([str(path)]) == config


OF_CSER = """
max_grad_norm: .inf
lr: 3e-4
args: {few: &few [-.inf, 1, null, true], word: "1e3", again: *few}
compressor: {name: RandomBlocks, args: {ratio: .inf, of: "no: 'one' é"}}
"""


def test_settings_are_what_they_are_in_the_section_itself(tmp_path: Path) -> None:
    """Infinity, too, which is another word in JSON."""
    path = tmp_path / "c.yaml"
    path.write_text("optim:\n  name: CSER" + indent(OF_CSER, "  "))
    plain = parse([str(path)])
    assert plain.optim.compressor is not None
    assert plain.optim.compressor.args["ratio"] == plain.optim.max_grad_norm == float("inf")
    path.write_text("optim:\n  settings:\n    CSER:" + indent(OF_CSER, "      "))
    assert parse([str(path), "--optim.name=CSER"]) == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{AdamW: 3}", "optim.settings.AdamW=3 is not allowed: it must be keys of optim and their values"),
        ("{SGD: {train.stesp: 3}}", "unknown key 'train.stesp' in optim.settings.SGD; did you mean train.steps"),
        ("{OneBitAdam: {train.steps: 0}}", "train.steps=0 is not allowed"),
        ("{SGD: {lrr: 3}}", "unknown key 'optim.lrr' in optim.settings.SGD; did you mean optim.lr"),
        ("{OneBitAdam: {name: AdamW}}", "settings cannot change the name"),
        ("{OneBitAdam: {lr: fast}}", "^optim.lr=fast is not allowed: it must be a number$"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"optim: {{settings: {settings}}}")
    with pytest.raises(ConfigError, match=message):
        parse([str(path)])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_baseline_is_a_value(path: Path) -> None:
    config = parse([str(path), "--optim.name=AdamW"])
    assert config.optim.args["betas"] == parse([str(path)]).optim.args["betas"]


def test_from_dict_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="unknown key 'stps' in TrainConfig; did you mean steps"):
        from_dict({"train": {"stps": 1}})


COMPARED = [
    ({"name": "AdamW", "check_every": 10}, "optim.check_every=10 is not allowed with optim.name=AdamW: .* 100"),
    ({"name": "AdamW", "on_difference": "repair"}, "optim.on_difference=repair is not allowed .* it must be raise"),
    ({"name": "Lamb", "check_every": 1}, "optim.check_every=1 is not allowed with optim.name=Lamb: .* communicate"),
    ({"name": "Muon", "check_every": 99}, "optim.check_every=99 is not allowed with optim.name=Muon"),
]


@pytest.mark.parametrize(("values", "message"), COMPARED, ids=[str(values) for values, _ in COMPARED])
def test_replicas_that_nobody_compares_have_no_settings_of_it(values: dict[str, Any], message: str) -> None:
    optim, compressed = OptimConfig(**values), CommConfig(compress=GradientsConfig("Int4"))
    mesh = ParallelConfig(shard=2)
    for config in (Config(optim=optim), Config(optim=optim, comm=compressed, parallel=mesh)):
        if config.parallel.on_mesh and optim.name == "Lamb":
            continue  # which wants whole tensors
        with pytest.raises(ConfigError, match=message):
            check_plan(config)
    if "check_every" in values:
        check_plan(Config(optim=optim, comm=compressed))  # compares parameters of whole models
    else:
        with pytest.raises(ConfigError, match=message):
            check_plan(Config(optim=optim, comm=compressed))
    check_plan(Config(optim=OptimConfig(name=values["name"], check_every=None)))


def test_settings_of_a_comparison_may_be_of_another_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optim: {settings: {OneBitAdam: {check_every: 10, on_difference: repair}}}")
    check_plan(parse([str(path), "--optim.name=AdamW"]))
    ours = parse([str(path)])
    check_plan(ours)
    assert plan_optimizer(ours.optim)[1]["guard"] == commopt.Guard(25, 10, "repair")


@pytest.mark.parametrize("word", ["12e4", "9e-1", "1.5e3", "0x1F", "null", "1_0e2", "e4"])
def test_a_word_that_looks_like_a_number_is_the_same_word_in_the_config_of_the_run(tmp_path: Path, word: str) -> None:
    config = from_dict({"train": {"run_dir": word}})
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert from_dict(read_yaml(file)) == config
    assert parse([str(file)]) == config
