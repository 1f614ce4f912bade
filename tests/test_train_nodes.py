"""The trainer with nodes of several ranks: comm.ranks_per_node."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from trainer_pair import Pair, run
from trainer_runs import saved, train_all
from worlds import needs_mpi, on_mpi, same_bits

from commopt.train.backend import ranks_per_node
from commopt.train.config import CommConfig, Config, OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.optimizer import check_plan

Make = Callable[..., Config]


@pytest.mark.long
@needs_mpi
def test_gloo_and_mpi_train_alike_and_resume_to_the_bit_and_from_other_nodes(tiny: Make, tmp_path: Path) -> None:
    def config(name: str, backend: str, places: int, overlap: bool, resume: str = "none") -> Config:
        optim = {"args": {"freeze_step": 5, "overlap": overlap}, "max_grad_norm": None}
        comm = {"backend": backend, "ranks_per_node": places}
        return tiny(tmp_path / name, comm=comm, optim=optim, resume=resume)

    at_8 = str(tmp_path / "mpi/checkpoints/step-00000008")
    configs = [
        config("mpi", "mpi", 2, True),
        config("gloo", "gloo", 2, False),
        config("resumed", "gloo", 2, True, resume=at_8),
        config("flat", "gloo", 1, True, resume=at_8),
        config("one", "mpi", 0, True, resume=at_8),  # all of this machine
    ]
    path = tmp_path / "configs"
    path.write_bytes(pickle.dumps([(config, free_port()) for config in configs]))
    for mpi, gloo, resumed, flat, one in on_mpi(4, train_all, str(path)):
        assert mpi["heldout_loss"] == gloo["heldout_loss"] == resumed["heldout_loss"]
        for other in (flat, one):
            assert other["heldout_loss"] == pytest.approx(mpi["heldout_loss"], rel=0.02)
            assert other["heldout_loss"] != mpi["heldout_loss"]
    for rank in range(4):
        # the sum of two is the same in any order: here MPI and Gloo agree even with 4 ranks
        assert same_bits(saved(tmp_path / "gloo", rank=rank), saved(tmp_path / "mpi", rank=rank))
        assert same_bits(saved(tmp_path / "resumed", rank=rank), saved(tmp_path / "mpi", rank=rank))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (3, "comm.ranks_per_node=3 is not allowed with 2 ranks: it must divide them"),
        (0, r"comm.ranks_per_node=0 needs a launcher .* here they run \[None, None\]: give the number"),
    ],
)
def test_nodes_that_cannot_be_are_refused_on_both_ranks(
    pair: Pair, tiny: Make, tmp_path: Path, places: int, message: str
) -> None:
    for kind, text in pair.errors(run, tiny(tmp_path / "run", comm={"ranks_per_node": places})):
        assert kind == "ConfigError"
        assert re.search(message, text)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("compress", [None, {"name": "Int4", "inside": "Int8"}], ids=["optimizer", "gradients"])
def test_one_node_of_all_ranks_compresses_nothing(
    pair: Pair, tiny: Make, tmp_path: Path, compress: dict[str, str] | None
) -> None:
    given: dict[str, Any] = {} if compress is None else {"optim": {"name": "AdamW", "lr": 1e-3, "args": {}}}
    comm = {"ranks_per_node": 2, "compress": compress}
    first, second = pair.run(run, tiny(tmp_path / "run", comm=comm, **given))
    assert first["heldout_loss"] == second["heldout_loss"]
    lines = (tmp_path / "run/metrics.jsonl").read_text()
    assert '"plain"' in lines
    assert '"compressed"' not in lines


def test_how_many_ranks_make_a_node() -> None:
    assert ranks_per_node(CommConfig(), 6, [None] * 6) == 1
    assert ranks_per_node(CommConfig(ranks_per_node=3), 6, [None] * 6) == 3
    assert ranks_per_node(CommConfig(ranks_per_node=0), 6, [2] * 6) == 2
    assert ranks_per_node(CommConfig(ranks_per_node=0), 6, [6] * 6) == 6
    with pytest.raises(ConfigError, match=r"here they run \[4, 4, 4, 4, 2, 2\]"):
        ranks_per_node(CommConfig(ranks_per_node=0), 6, [4, 4, 4, 4, 2, 2])
    with pytest.raises(ConfigError, match=r"comm.ranks_per_node=-1 is not allowed: it must be >= 0"):
        CommConfig(ranks_per_node=-1)


def test_what_has_no_nodes_refuses_them() -> None:
    with pytest.raises(ConfigError, match=r"comm.ranks_per_node=2 is not allowed with optim.name=AdamW.*has 1"):
        check_plan(Config(optim=OptimConfig(name="AdamW"), comm=CommConfig(ranks_per_node=2)))
    own = CommConfig(backend="commopt.comm.ThreadBackend", args={}, ranks_per_node=2)
    with pytest.raises(ConfigError, match=r"ranks_per_node=2 is not allowed with comm.backend=commopt.comm.Thread"):
        check_plan(Config(comm=own))
