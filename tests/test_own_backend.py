"""A backend from outside the package: the one that the docs show, and ones that cannot work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conformance import conformance, exchanges
from trainer_pair import Pair, run
from worlds import Toy, on_processes, on_threads, params_of, same_bits, tokens, train

from commopt import OneBitAdam, compress_gradients
from commopt.comm import LocalBackend, TorchBackend
from commopt.compress import Int4
from commopt.train.config import CommConfig, Config
from commopt.train.errors import ConfigError
from commopt.train.optimizer import check_plan

Make = Callable[..., Config]
DOCS = Path(__file__).parents[1] / "docs" / "backends.md"


def shown() -> Any:
    """The module of the docs, as if it were a file on the path."""
    (text,) = re.findall(r'```python\n("""pairwise.py""".*?)```', DOCS.read_text(), re.DOTALL)
    module = ModuleType("pairwise")
    exec(compile(text, str(DOCS), "exec"), vars(module))
    sys.modules["pairwise"] = module
    return module


def with_exchange(backend: Any) -> Any:
    """``backend`` with the method that the docs show for messages between two ranks."""
    (text,) = re.findall(r"```python\n(def exchange.*?)```", DOCS.read_text(), re.DOTALL)
    module = sys.modules["pairwise"]
    exec(compile(text, str(DOCS), "exec"), vars(module))
    kind = type("ExchangingPairwiseBackend", (type(backend),), {"exchange": vars(module)["exchange"]})
    return kind()


def train_toy(backend: Any) -> list[torch.Tensor]:
    model = Toy()
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=4, bucket_mb=3e-4, backend=backend)
    train(model, optimizer, range(9), backend.rank, backend.world_size)
    return params_of(model)


def compressed_gradients(backend: Any) -> list[torch.Tensor]:
    model = Toy()
    handle = compress_gradients(model, Int4(), backend=backend, bucket_mb=3e-4)
    model(tokens(0, backend.rank, backend.world_size)).backward()
    assert handle.comm_stats()["steps"] == 1
    return [p.grad for p in model.parameters() if p.grad is not None]


def both(backend: Any) -> list[torch.Tensor]:
    return train_toy(backend) + compressed_gradients(backend)


def on_the_docs_backend(rank: int, world_size: int) -> list[torch.Tensor]:
    backend = shown().PairwiseBackend()
    conformance(backend, pairs=False)
    exchanges(with_exchange(backend))
    return both(backend)


def test_the_backend_of_the_docs_conforms_and_gives_the_bits_of_threads():
    """Both sum in rank order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = on_threads(3, both)
    finally:
        torch.set_num_threads(threads)
    for got in on_processes(3, on_the_docs_backend):
        assert same_bits(got, expected[0])


# in a config ----------------------------------------------------------------------------------------------------------


def run_shown(config: Config) -> Any:
    shown()
    return run(config)


def weights(config: Config) -> list[torch.Tensor]:
    last = max((Path(config.train.run_dir) / "checkpoints").glob("step-*"))
    return list(torch.load(last / "shared.pt", weights_only=True)["weights"].values())


def test_named_in_a_config_it_trains_as_gloo_does(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    """2 ranks: there is one order to add up in."""
    own = tiny(tmp_path / "own", comm={"backend": "pairwise.PairwiseBackend"})
    gloo = tiny(tmp_path / "gloo", comm={"backend": "gloo"})
    assert all(summary["finished"] for summary in pair.run(run_shown, own))
    pair.run(run, gloo)
    assert same_bits(weights(own), weights(gloo))


class Mute(LocalBackend):
    """Lacks a verb."""

    all_gather = None


class Elsewhere(TorchBackend):
    """Has the ranks in another order."""

    def __init__(self, swap: bool = True) -> None:
        super().__init__()
        self.rank = self.world_size - 1 - self.rank


class Nowhere(TorchBackend):
    """Cannot be made on one rank."""

    def __init__(self) -> None:
        super().__init__()
        if self.rank == 1:
            raise ValueError("no card in slot 3")


@pytest.mark.parametrize(
    ("comm", "message"),
    [
        ({"backend": "glo"}, "comm.backend='glo' is none of auto, gloo, nccl, mpi; did you mean gloo?"),
        ({"backend": "no.such.Thing"}, "comm.backend='no.such.Thing': cannot import no.such: No module named 'no'"),
        ({"backend": "test_own_backend.Mite"}, "test_own_backend has no class Mite"),
        ({"backend": "test_own_backend.DOCS"}, "test_own_backend has no class DOCS"),
        ({"backend": "test_own_backend.Mute"}, r"lacks all_gather \(see commopt.comm.Backend\)"),
        (
            {"backend": "test_own_backend.Elsewhere", "args": {"swop": 1}},
            "comm.args.swop: Elsewhere has no such argument; did you mean swap?",
        ),
        ({"backend": "gloo", "args": {"timeout": 1}}, "comm.backend=gloo takes none"),
        (
            {"backend": "mpi", "args": {"timout": 1}},
            "comm.args.timout: MPIBackend has no such argument; did you mean comm.timeout",
        ),
    ],
)
def test_what_cannot_be_a_backend_is_named_before_anything_is_started(comm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plan(Config(comm=CommConfig(**comm)))


@pytest.mark.parametrize("backend", ["mpi", "test_own_backend.Elsewhere"])
def test_a_torch_optimizer_cannot_have_it(tiny: Make, tmp_path: Path, backend: str) -> None:
    config = tiny(tmp_path, optim={"name": "AdamW", "args": {}}, comm={"backend": backend})
    with pytest.raises(ConfigError, match=f"comm.backend={backend} is not allowed with optim.name=AdamW"):
        check_plan(config)


def test_the_key_of_the_backend_is_named_where_it_is_given_as_an_argument(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim.args.backend: set comm.backend instead"):
        check_plan(tiny(tmp_path, optim={"args": {"backend": "mpi"}}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_own_backend.Elsewhere", "says rank 1 of 2 where the run has rank 0 of 2: all of them must be in it"),
        ("test_own_backend.Nowhere", "comm: Nowhere: no card in slot 3 (rank 1)"),
        ("nccl", "comm.backend=nccl is not allowed: there is no GPU"),
    ],
    ids=["ranks disagree", "fails on one rank", "nccl"],
)
def test_ranks_that_it_cannot_join_are_an_error_on_all(
    pair: Pair, tiny: Make, tmp_path: Path, name: str, message: str
) -> None:
    if name == "nccl" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for kind, text in pair.errors(run, tiny(tmp_path / "run", comm={"backend": name})):
        assert kind == "ConfigError"
        assert message in text
    assert not (tmp_path / "run").exists()
