"""The command line: a mistake is one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from forks import python

import commopt
from commopt.cli import main
from commopt.train.config import Config
from commopt.train.parse import parse, to_yaml

Make = Callable[..., Config]


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what ranks have said to each other is forgotten
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian'; valid: train"),
        (["train", "--optim.lrr=1"], "unknown key 'optim.lrr' on the command line; did you mean optim.lr?"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml: No such file or directory"),
        (["train", "--optim.lr=-1"], "optim.lr=-1.0 is not allowed: it must be > 0"),
        (["train", "--optim.lr=3e38"], "optim.lr=3e+38 is not allowed: it must be > 0, and less than 1e30"),
        (["train", "--optim.args={1: 2}"], "optim.args has the key 1, and keys must be words"),
        (["train", "--optim.settings=null"], "optim.settings=null is not allowed"),
        (["train", "--train=sub.yaml"], "train='sub.yaml' on the command line is not allowed: it must be keys and "),
        (["train", "--train={stepz: 3}"], "unknown key 'train.stepz' on the command line; did you mean train.steps?"),
        (["train", "--train={steps: "], "train='{steps: ' is not valid YAML: "),
        (
            ["train", "--optim.name=AdamV"],
            "optim.name='AdamV' is no Optimizer of commopt.optim or commopt.outer or torch.optim; did you mean ",
        ),
        (["train", "--data.corpus=/nowhere", "--train.run_dir=/tmp/none"], "corpus /nowhere: no such file or folder"),
        (["train", "--data.cache_dir="], "data.cache_dir='' is not allowed: it must be null or a folder"),
        (
            ["train", "--resume=/nowhere"],
            "checkpoint /nowhere: no such folder; resume must be none, auto or the folder of a checkpoint",
        ),
        (
            ["train", "--init=/nowhere", "--data.corpus=/nowhere", "--train.run_dir=/tmp/none"],
            "checkpoint /nowhere: no such folder; init must be null or the folder of a checkpoint",
        ),
        (["train", "--resume=Auto"], "resume='Auto' is not allowed: it must be none, auto or the folder of a "),
        (
            ["train", "--optim.settings.OneBitAdm={lr: 1}"],
            "optim.settings='OneBitAdm' is no Optimizer of commopt.optim or commopt.outer or torch.optim; ",
        ),
        (["train", "--optim.name=Optimizer"], "optim.name='Optimizer' is not allowed: it is what others are made of"),
        (["train", "--optim.name=CommOptimizer"], "optim.name='CommOptimizer' is not allowed: it is what others are "),
        (["train", "--optim.name=Mixed"], "optim.name='Mixed' is not allowed: it is of several optimizers; "),
        (["train", "--optim.name=LBFGS"], "optim.name='LBFGS' is not allowed: it evaluates the loss several times in "),
        (
            ["train", "--optim.name=AdamW", "--optim.args.betas=0.9", "--optim.weight_decay=0"],
            "optim: AdamW(lr=0.001, betas=0.9): 'float' object is not subscriptable",
        ),
        (
            ["train", "--optim.name=QSparseLocalSGD", "--optim.args={reset_compressor: Sign}"],
            "optim: QSparseLocalSGD: QSparseLocalSGD has no reset_compressor, got Sign(block=2048, norm='l2'): what a ",
        ),
        (["train", "--optim.name=ZeroOneAdam", "--optim.args.variance=3"], "optim: ZeroOneAdam: variance must be a "),
        (["report"], "the following arguments are required: run"),
        (["report", "run", "--lables=a"], "--lables: there is no such option; did you mean --labels?"),
        (["report", "run", "--out="], "--out: '' is not allowed: it must be a folder"),
        (["train", "--optim.args.params=3"], "optim.args.params is not allowed: they are the model's"),
        (["train", "--optim.args.betas=[0.9,1.2]"], "optim: OneBitAdam: betas must be two numbers in [0, 1), got "),
        (["train", "--optim.name=DiLoCo", "--optim.args.period=0"], "optim: DiLoCo: period must be an int >= 1, got 0"),
        (
            ["train", "--optim.name=DiLoCo", "--optim.args={base: SGD, base_args: {momentum: -1}}"],
            "optim: DiLoCo: Invalid momentum value: -1",
        ),
        (
            ["train", "--optim.name=SparseAdam", "--optim.weight_decay=0"],
            "optim.name=SparseAdam does not step as it must here: SparseAdam",
        ),
        (
            ["train", "--optim.name=AdamW", "--optim.args={fused: true, foreach: true}"],
            "optim: AdamW: `fused` and `foreach` cannot be `True` together",
        ),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"commopt: error: {message}")


def test_other_ranks_do_not_repeat_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, lines in ((0, 1), (1, 0), (2, 0), (0, 1)):  # the last is of another job: each rank says a thing once
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert main(["train", "--optim.lrr=1"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_whichever_rank_comes_first_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be the one that has died."""
    for rank, lines in ((3, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert main(["train", "--optim.lrr=1"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines
    monkeypatch.setenv("RANK", "2")
    assert main(["train", "--optim.lrrr=1"]) == 2
    assert "optim.lrrr" in capsys.readouterr().err  # something else


@pytest.mark.parametrize("what", ["gone", "none", "full", "no locks"])
def test_it_is_said_again_where_nobody_can_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Of the folder for temporary files: it is gone, there is none, its disk is full, or locks nothing."""

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if what == "gone":
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    else:
        name = {"none": "tempfile.gettempdir", "full": "os.pwrite", "no locks": "fcntl.flock"}[what]
        monkeypatch.setattr(f"commopt.train.say.{name}", fails)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "--optim.lrr=1"]) == 2
        assert "optim.lrr" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "abc"), ("WORLD_SIZE", ""), ("RANK", "x")])
def test_a_launchers_word_that_is_no_number_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """And no run goes on alone for it."""
    for key, there in {"RANK": "0", "WORLD_SIZE": "2", name: value}.items():
        monkeypatch.setenv(key, there)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    assert main(["train", "--train.steps=1", f"--train.run_dir={tmp_path / 'run'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert repr(value) in line


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "commopt COMMAND" in capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("--optim.lr LR", "Peak learning rate, > 0.", "--train.accumulate", "--resume"):
        assert words in text


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--train.steps=3", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 3


OWN = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
class Thing:
    pass
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--optim.name=own_module.Thing"],
        ["--comm.backend=own_module.Thing"],
        ["--optim.compressor.name=own_module.Thing"],
        ["--optim.name=DiLoCo", "--optim.args.base=own_module.Thing"],
    ],
    ids=lambda words: words[-1].split("=")[0],
)
def test_print_config_runs_nobodys_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    assert main(["train", *words, "--print_config"]) == 0
    assert "own_module.Thing" in capsys.readouterr().out
    assert main(["train", "--comm.backend=own_module.Thing", "--comm.ranks_per_node=2"]) == 2  # known without it
    assert not (tmp_path / "imported").exists()
    assert main(["train", *words]) == 2
    assert "own_module.Thing" in capsys.readouterr().err
    assert (tmp_path / "imported").exists()


def test_print_config_still_checks_what_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--optim.name=own.Thing", "--comm.backend=gloo", "--comm.args.x=1"], "comm.backend=gloo takes none"),
        (["--optim.name=AdamV"], "did you mean"),
        (["--optim.name=torch.nn.Linear"], "is no Optimizer"),
    ):
        assert main(["train", *words, "--print_config"]) == 2
        assert message in capsys.readouterr().err


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("train: {run_dir: ~/run}\n")
    config = parse(["--config=~/c.yaml", "--resume=~/a", "--init=~/b"])
    assert (config.train.run_dir, config.resume, config.init) == tuple(f"{tmp_path}/{x}" for x in ("run", "a", "b"))


def test_python_m_commopt_trains(tiny: Make, tmp_path: Path) -> None:
    """Without torchrun, from another folder, on no terminal: plain log lines and a finished run."""
    config = tmp_path / "c.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run")))
    done = subprocess.run(
        [python(), "-m", "commopt", "train", str(config), "--train.steps=4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "arning" not in line] == []
    assert "step 4 | loss" in done.stdout
    assert "finished: held-out loss" in done.stdout
    assert "\x1b[" not in done.stdout


def test_a_missing_extra_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "commopt.train.parse", raising=False)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == (
        "commopt: error: yaml is not installed, and training needs it: pip install 'commopt[train]'\n"
    )


ENDED = """
import os, signal, sys
import commopt.cli
say = commopt.cli.say
def late(*words, **more):
    os.kill(os.getpid(), signal.SIGTERM)
    say(*words, **more)
commopt.cli.say = late
sys.exit(commopt.cli.main(sys.argv[1:]))
"""


def test_a_mistake_is_said_though_the_launcher_ends_this_rank(tmp_path: Path) -> None:
    """When the first rank has ended, a launcher ends the others, which may be the ones that know why."""
    argv = ["train", "--data.corpus=/nowhere", f"--train.run_dir={tmp_path}/run"]
    done = subprocess.run([python(), "-c", ENDED, *argv], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "commopt: error: corpus /nowhere: no such file or folder\n")


@pytest.mark.parametrize("words", [["--help"], ["train", "--print_config"]])
def test_an_output_that_is_full_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([python(), "-m", "commopt", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    said = "the disk is full: [Errno 28] No space left on device"
    assert done.stderr == f"commopt: error: standard output cannot be written: {said}\n"


def test_a_reader_that_has_gone_has_seen_enough() -> None:
    end, start = os.pipe()
    os.close(end)
    words = [python(), "-m", "commopt", "train", "--print_config"]
    done = subprocess.run(words, stdout=start, stderr=subprocess.PIPE, text=True)
    os.close(start)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"commopt {commopt.__version__}\n"
