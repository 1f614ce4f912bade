"""Residuals of compressed gradients in the files that the doors of frameworks write beside their own."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from listening import listening
from worlds import on_threads, same_bits, seeded, tensors_in

from commopt import OneBitAdam, compress_gradients
from commopt.compress import Int4, PowerSGD, Sign
from commopt.integrations import residuals
from commopt.optim import join_state_dict, split_state_dict


def model():
    with seeded():
        return torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 3))


def backward(net, step, rank):
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))
    net.zero_grad()
    net(x).square().sum().backward()


def saved_by(world_size, folder, compressor):
    """The states of all ranks after five means, which are in ``folder``, too."""

    def rank(backend):
        net = model()
        handle = compress_gradients(net, compressor, backend=backend)
        for step in range(5):
            backward(net, step, backend.rank)
        residuals.save(handle, folder)
        return handle.state_dict()

    return on_threads(world_size, rank)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("compressor", [Int4(), Sign(), PowerSGD(2, min_compression=1)], ids=str)
def test_each_rank_has_its_own_again_or_its_share(compressor, world_size, tmp_path):
    states = saved_by(2, tmp_path, compressor)
    own = [split_state_dict(state)[1] for state in states]

    def rank(backend):
        found, wanted = (compress_gradients(model(), compressor, backend=backend) for _ in range(2))
        residuals.load(found, tmp_path)
        common = split_state_dict(states[0])[0]
        wanted.load_state_dict(join_state_dict(common, own, backend.rank, world_size, nodes=wanted.nodes))
        loaded = found.state_dict()
        return same_bits(tensors_in(loaded), tensors_in(wanted.state_dict())), loaded

    results = on_threads(world_size, rank)
    assert all(same for same, _ in results)
    if world_size == 2:
        for (_, loaded), state in zip(results, states):
            assert tensors_in(state)
            assert same_bits(tensors_in(loaded), tensors_in(state))


def test_what_one_rank_has_not_given_out_yet_is_shared_by_several(tmp_path):
    """Residuals that one rank has loaded, and saved before its first mean."""
    saved_by(2, tmp_path / "two", Sign())

    def alone(backend):
        handle = compress_gradients(model(), Sign(), backend=backend)
        residuals.load(handle, tmp_path / "two")
        residuals.save(handle, tmp_path / "one")
        return handle.state_dict()["residuals"]["state"]

    def rank(backend):
        handle = compress_gradients(model(), Sign(), backend=backend)
        residuals.load(handle, tmp_path / "one")
        return handle.state_dict()["residuals"]["state"]

    (owed,) = on_threads(1, alone)
    shares = on_threads(2, rank)
    for i, entry in owed.items():
        assert entry["worker_error"].any()
        mean = (shares[0][i]["worker_error"] + shares[1][i]["worker_error"]) / 2
        torch.testing.assert_close(mean.flatten(), entry["worker_error"].flatten())


def test_without_any_they_begin_at_0_and_a_warning_says_so(tmp_path):
    def rank(backend):
        net = model()
        handle = compress_gradients(net, Int4(), backend=backend)
        residuals.load(handle, tmp_path)
        backward(net, 0, backend.rank)

    with listening() as said:
        on_threads(2, rank)
    assert [text for text in said if f"gradients from {tmp_path}: there are none; they begin at 0" in text]


def test_what_is_missing_on_one_rank_is_refused_on_all(tmp_path):
    saved_by(3, tmp_path, Int4())
    for place in ("0", "1"):
        (tmp_path / place).mkdir()
    shutil.copy(tmp_path / "commopt-gradients-0-rank-00000.pt", tmp_path / "0")

    def rank(backend):
        handle = compress_gradients(model(), Int4(), backend=backend)
        mine = (
            r"lacks the residuals of ranks \[1, 2\] of 3: the save was interrupted",
            r"ranks \[0\] cannot have theirs",
        )
        with pytest.raises(ValueError, match=mine[backend.rank]):
            residuals.load(handle, tmp_path / str(backend.rank))
        with pytest.raises(ValueError, match=r"ranks \[1\] of 2 find none there, the others do"):
            residuals.load(handle, tmp_path if backend.rank == 0 else tmp_path / "1")

    on_threads(2, rank)


def test_a_save_over_fewer_ranks_leaves_nothing_of_one_over_more(tmp_path):
    saved_by(3, tmp_path, Int4())
    saved_by(2, tmp_path, Int4())
    assert [path.name[-8:] for path in sorted(tmp_path.iterdir())] == ["00000.pt", "00001.pt"]


@pytest.mark.parametrize("other", [2, 3])
def test_what_ranks_have_of_several_saves_is_refused(other, tmp_path):
    saved_by(2, tmp_path / "two", Int4())
    saved_by(other, tmp_path / "other", Int4())

    def rank(backend):
        handle = compress_gradients(model(), Int4(), backend=backend)
        with pytest.raises(ValueError, match="ranks have found those of several saves: one was interrupted"):
            residuals.load(handle, tmp_path / ("two" if backend.rank == 0 else "other"))

    on_threads(2, rank)


def test_a_folder_that_has_files_of_several_saves_is_refused(tmp_path):
    """The second save was over before its other rank had written."""
    saved_by(2, tmp_path, Int4())
    saved_by(2, tmp_path / "later", Int4())
    name = "commopt-gradients-0-rank-00000.pt"
    shutil.copy(tmp_path / "later" / name, tmp_path / name)

    def rank(backend):
        handle = compress_gradients(model(), Int4(), backend=backend)
        with pytest.raises(
            ValueError, match="the residuals of several saves" if backend.world_size == 3 else "those of"
        ):
            residuals.load(handle, tmp_path)

    on_threads(2, rank)
    on_threads(3, rank)


def test_a_file_that_was_written_in_part_is_named(tmp_path):
    saved_by(2, tmp_path, Int4())
    file = tmp_path / "commopt-gradients-0-rank-00001.pt"
    file.write_bytes(file.read_bytes()[:100])

    def rank(backend):
        handle = compress_gradients(model(), Int4(), backend=backend)
        said = (r"ranks \[1\] cannot have theirs", f"{re.escape(str(file))} cannot be read: the save was interrupted")
        with pytest.raises(ValueError, match=said[backend.rank]):
            residuals.load(handle, tmp_path)

    on_threads(2, rank)


def test_an_optimizer_that_averages_by_itself_is_refused():
    net = model()
    residuals.refuse_own(torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="OneBitAdam averages by itself"):
        residuals.refuse_own(OneBitAdam(net.parameters()))
