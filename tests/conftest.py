"""How the tests run, and what the trainer's share: a small corpus with its prepared form, and a pair of processes.

Of a test's parameters those combinations run in which each pair of values occurs, with ``--short`` each value
(covering.py); and ``--short`` leaves out what is marked ``long``. Processes are forks of one server, see forks.py.
Files run side by side (pytest -n auto --dist=loadfile): the tests of a file share their worlds of processes, and one
that waits for what is late leaves the cores to another."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from covering import covering, lists_of
from forks import python, rarely_collect
from isas import ISAS

if TYPE_CHECKING:
    from trainer_pair import Pair

# Before anything imports torch. Worlds are ranks on threads or processes, more of them than cores: further threads of
# each would spin for one another. What several threads compute is tested where a test asks for them (test_ops.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What one process compiles of commopt and of the tests serves all others, and the next run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

FIRST = [
    "test_train_sharded",
    "test_mesh",
    "test_convergence",
    "test_train_elastic",
    "test_waiting",
    "test_members_processes",
    "test_train_lost",
    "test_exit",
    "test_netbed",
    "test_mpi",
    "test_cuda_sources",
    "test_onebit_lamb",
    "test_nodes",
    "test_train_mpi",
    "test_local_steps",
    "test_absent",
    "test_gradients",
    "test_cser_state",
    "test_configs",
    "test_cser",
    "test_sharded",
    "test_contract",
    "test_zero_one_adam",
    "test_train_loop",
    "test_onebit_adam",
]
"""Files that take long, first those of which much is waiting: begun last, they would leave cores to nobody."""

WORDS = ("loss", "step", "gradient", "momentum", "sign", "bit", "rank", "world", "bucket", "scale", "residual", "send")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--short``, ``--every-combination``."""
    parser.addoption(
        "--short",
        action="store_true",
        help="nothing that is marked long, and of a test's parameters some combinations, in which each value occurs",
    )
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="all combinations of a test's parameters; by default some, in which each pair of values occurs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist are forks, too, and have one server together."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.option.tx = [f"popen//python={python()}"] * len(config.option.tx)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than cores: now and then each waits."""
    return len(os.sched_getaffinity(0)) + 2 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 2


pytest.register_assert_rewrite("conformance", "cuda_checks", "runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker of pytest-xdist reads all test files, and begins with a part of its own: pytest rewrites the asserts
    of a file where nobody has, which takes longer than to read it."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
        first = int(worker.removeprefix("gw")) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        for name in files[first:] + files[:first]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # raised once more where it is collected
                importlib.import_module(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files. Leave out what is not for now; what -k and -m leave is what counts as all
    combinations."""
    items.sort(key=lambda item: [*FIRST, item.path.stem].index(item.path.stem))
    is_short = config.getoption("short")
    left_out = {item for item in items if is_short and is_long(item)}
    if is_short and not config.getoption("keyword"):
        refuse_unknown_cases(items)
    if not config.getoption("every_combination"):
        by_test: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            if hasattr(item, "callspec") and item not in left_out:
                by_test[item.nodeid.partition("[")[0]].append(item)
        for same in by_test.values():
            kept = covering([lists_of(item) for item in same], size=1 if is_short else 2)
            left_out |= set(same) - {same[i] for i in kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def is_long(item: pytest.Item) -> bool:
    """Whether it is marked ``long``, and not the case that the mark names with ``but``."""
    mark = item.get_closest_marker("long")
    return mark is not None and ("but" not in mark.kwargs or mark.kwargs["but"] != item.nodeid.partition("[")[2][:-1])


def refuse_unknown_cases(items: list[pytest.Item]) -> None:
    """Raises UsageError where a mark names a case that there is not: without a word the whole test would be left
    out."""
    kept = {item.nodeid.partition("[")[0] for item in items if not is_long(item)}
    for item in items:
        mark, test = item.get_closest_marker("long"), item.nodeid.partition("[")[0]
        if mark is not None and "but" in mark.kwargs and test not in kept:
            raise pytest.UsageError(f"long(but={mark.kwargs['but']!r}) names no case of {test}")


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage looks through it again."""
    rarely_collect()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on one instruction set, and restores the best one."""
    from commopt.ops import native

    if not native.use_isa(request.param):
        pytest.skip(f"this machine or build has no native kernels for {request.param}")
    yield request.param
    native.use_isa("")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads; the test's end restores it."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 30 small text files."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(30):
        lines = (" ".join(draw.choices(WORDS, k=9)) for _ in range(40))
        (folder / f"doc{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``tiny(run_dir, **overrides)``: the config of a run of milliseconds; override with ``optim={"lr": 1}`` and so on.

    It is in the warm-up phase up to step 5 of 12 and drops out, so that it cannot be resumed without generators.
    """
    from commopt.train.parse import from_dict

    cache = tmp_path_factory.mktemp("cache")

    def make(run_dir: Path, **overrides: Any) -> Any:
        tree: dict[str, Any] = {
            "model": {"layers": 1, "heads": 2, "width": 16, "dropout": 0.1},
            "data": {
                "corpus": str(corpus), "vocab_size": 300, "seq_len": 16, "heldout": 0.2, "cache_dir": str(cache),
            },
            "optim": {"lr": 3e-3, "warmup_steps": 2, "args": {"freeze_step": 5}},
            "train": {
                "run_dir": str(run_dir), "steps": 12, "batch_size": 8, "log_every": 2, "eval_every": 6,
                "eval_samples": 16, "checkpoint_every": 4, "keep": 3,
            },
        }  # fmt: skip
        for section, values in overrides.items():
            tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
        return from_dict(tree)

    return make


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two Gloo processes."""
    from trainer_pair import Pair

    processes = Pair()
    yield processes
    processes.close()
