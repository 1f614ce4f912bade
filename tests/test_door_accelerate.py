"""connect() with Hugging Face accelerate: two processes over Gloo."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from example_ranks import on_two_ranks
from listening import listening
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from worlds import Toy, on_processes, on_threads, params_of, same_bits, tensors_in, through_a_file, tokens, train

from commopt import CSER, DiLoCo, LocalSGD, OneBitAdam
from commopt.compress import Int4
from commopt.integrations import common, means, parts
from commopt.optim import join_state_dict, split_state_dict

pytest.importorskip("accelerate")


class Tied(torch.nn.Module):
    """A weight under two names, dropout, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 8)
        self.dropout = torch.nn.Dropout(0.2)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        x = self.norm(self.embedding(inputs).mean(1))
        return torch.nn.functional.cross_entropy(self.head(self.dropout(x)), inputs[:, 0])


class Run:
    """A model and its optimizer in an accelerator, which accumulates the gradients of two batches a step."""

    def __init__(self, make, count=1):
        from accelerate import Accelerator

        from commopt.integrations.accelerate import connect

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.models, self.optimizers = [], []
        for _ in range(count):
            model = Tied()
            model, optimizer = self.accelerator.prepare(model, make(model.parameters()))
            connect(self.accelerator, model, optimizer)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def train(self, steps, rank):
        """The parameters after each step."""
        out = []
        for step in steps:
            for part in range(2):
                with self.accelerator.accumulate(*self.models):
                    for model, optimizer in zip(self.models, self.optimizers):
                        self.accelerator.backward(model(tokens(2 * step + part, rank, 2)))
                        optimizer.step()
                        optimizer.zero_grad()
            out.append(self.params())
        return out

    def params(self):
        return [p for model in self.models for p in params_of(model)]

    def states(self):
        return [t for optimizer in self.optimizers for t in tensors_in(optimizer.state_dict())]


def connect_with(buffers):
    from accelerate import Accelerator

    from commopt.integrations.accelerate import connect

    accelerator, model = Accelerator(cpu=True), Tied()
    connect(accelerator, *accelerator.prepare(model, DiLoCo(model.parameters())), buffers=buffers)


def resumed(folder, rank, make, count=1):
    """What a run of 8 steps has, saved after 5; and what one has that takes it up."""
    torch.manual_seed(rank)
    first = Run(make, count)
    attached = all(optimizer.optimizer._attachment is not None for optimizer in first.optimizers)
    before = first.train(range(5), rank)[-1]
    own = buffers_of(first.models[0])
    first.accelerator.save_state(folder)
    buffers_left = buffers_of(first.models[0])
    first.accelerator.wait_for_everyone()
    expected = first.train(range(5, 8), rank)
    second = Run(make, count)
    second.accelerator.load_state(folder)
    loaded = second.params()
    found = second.train(range(5, 8), rank)
    return {
        "attached": attached,
        "before": before,
        "restored": same_bits(loaded, before),
        "same": [same_bits(a, b) for a, b in zip(expected, found)],
        "same state": same_bits(first.states(), second.states()),
        "after": found[-1],
        "saved": saved_weights(folder, first.models[0]),
        "own buffers": own,
        "saved buffers": saved_buffers(folder, first.models[0]),
        "left": same_bits(buffers_left, own),
        "stats": [optimizer.optimizer.comm_stats() for optimizer in second.optimizers],
    }


class Compressed(Run):
    """AdamW on compressed means."""

    def __init__(self, count=1):
        from accelerate import Accelerator

        from commopt.integrations.accelerate import compress_gradients

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        self.models, self.optimizers, self.handles = [], [], []
        for _ in range(count):
            model = Tied()
            model, optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            self.handles.append(compress_gradients(self.accelerator, model, Int4()))
            self.models.append(model)
            self.optimizers.append(optimizer)


def compressed(folder, rank):
    """Two models, each with residuals of its own, resumed after 5 of 8 steps; the handle of a third is removed."""
    from accelerate import Accelerator

    from commopt.integrations.accelerate import compress_gradients

    torch.manual_seed(rank)
    first = Compressed(2)
    first.train(range(5), rank)
    first.accelerator.save_state(folder)
    first.accelerator.wait_for_everyone()
    expected, second = first.train(range(5, 8), rank), Compressed(2)
    second.accelerator.load_state(folder)
    found = second.train(range(5, 8), rank)
    second.handles[1].remove()
    second.accelerator.save_state(f"{folder} later")
    accelerator, model = Accelerator(cpu=True), Tied()
    model, _ = accelerator.prepare(model, OneBitAdam(model.parameters(), lr=1e-2))
    with pytest.raises(ValueError, match="OneBitAdam averages by itself"):
        compress_gradients(accelerator, model, Int4())
    second.accelerator.wait_for_everyone()
    saved = [sorted(path.name for path in Path(at).glob("commopt-*")) for at in (folder, f"{folder} later")]
    states = [
        same_bits(*(tensors_in(h.state_dict()) for h in handles)) for handles in zip(first.handles, second.handles)
    ]
    return [same_bits(a, b) for a, b in zip(expected, found)], states[0], found[-1], saved


def compressed_again(folder, rank):
    """As another try does, with a model of its own: its residuals are the first, and nothing holds the old handle."""
    from accelerate import Accelerator

    from commopt.integrations.accelerate import compress_gradients

    run = Compressed()
    run.train(range(2), rank)
    old = weakref.ref(run.handles[0])
    run.models, run.optimizers, run.handles = [], [], []
    run.accelerator.free_memory()
    gc.collect()
    left = old()
    model = Tied()
    model, optimizer = run.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    run.models, run.optimizers = [model], [optimizer]
    compress_gradients(run.accelerator, model, Int4()).remove()
    run.handles = [compress_gradients(run.accelerator, model, Int4())]
    run.train(range(3), rank)
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()
    run.accelerator.free_memory()  # run.models still has this one
    other = Tied()
    other, _ = run.accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    compress_gradients(run.accelerator, other, Int4())
    run.accelerator.save_state(f"{folder} held")
    run.accelerator.wait_for_everyone()
    assert sorted(path.name for path in Path(f"{folder} held").glob("commopt-*")) == [
        f"commopt-gradients-0-rank-0000{r}.pt" for r in range(2)
    ]
    with pytest.raises(ValueError, match="prepare\\(\\) has not given this Tied"):
        compress_gradients(Accelerator(cpu=True), Tied(), Int4())
    resumed = Compressed()
    resumed.accelerator.load_state(folder)
    states = [tensors_in(one.handles[0].state_dict()) for one in (run, resumed)]
    return left is None, sorted(path.name for path in Path(folder).glob("commopt-*")), same_bits(*states)


def saved_weights(folder, model):
    from safetensors.torch import load_file

    saved = load_file(Path(folder, "model.safetensors"))
    return [saved[name] for name, _ in getattr(model, "module", model).named_parameters()]


def saved_buffers(folder, model):
    from safetensors.torch import load_file

    saved = load_file(Path(folder, "model.safetensors"))
    return [saved[name] for name, _ in model.module.named_buffers()]


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
            max_position_embeddings=8, tie_word_embeddings=False,
        )
    )  # fmt: skip


def loss(model, step, rank):
    batch = tokens(step, rank, 2)
    return model(input_ids=batch, labels=batch).loss


def pretending_fsdp2():
    """An accelerator with FSDP2, which accelerate has for GPUs alone: on a CPU it leaves the plugin out without a
    word."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        for state in (PartialState, accelerator.state):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2
    return accelerator


ONE_BIT = functools.partial(OneBitAdam, freeze_step=3)


def fsdp2(folder, rank, mesh=None, both=False, make=ONE_BIT):
    """8 steps, saved after 5, and what takes them up. With a ``mesh`` of replicas and shards the model is cut before it
    is prepared, inside replicas or, where it is on ``both`` dimensions, as accelerate does it; without one, accelerate
    cuts it over all ranks, after the optimizer was made."""
    from accelerate.utils import load_fsdp_model
    from torch.distributed.fsdp import fully_shard

    from commopt.integrations.accelerate import connect

    def prepared():
        accelerator, model = pretending_fsdp2(), llama()
        if mesh is not None:
            fully_shard(model, mesh=mesh if both else mesh["shard"])
        optimizer = make(model.parameters(), lr=1e-2, process_group=mesh)
        model, optimizer = accelerator.prepare(model, optimizer)
        if mesh is None:
            with pytest.raises(ValueError, match=r"call optimizer.rebind\(\) after that"):
                optimizer.state_dict()
        connect(accelerator, model, optimizer)
        return accelerator, model, optimizer

    def steps(which, accelerator, model, optimizer):
        for step in which:
            accelerator.backward(loss(model, step, rank))
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().clone() for p in model.parameters()]

    first = prepared()
    before = steps(range(5), *first)
    first[0].save_state(folder)
    expected = steps(range(5, 8), *first)
    second = prepared()
    second[0].load_state(folder)
    found = steps(range(5, 8), *second)
    accelerator, model, optimizer = prepared()
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)
    return {
        "before": before,
        "saved": steps((), accelerator, model, optimizer),
        "params": expected,
        "same": same_bits(expected, found),
        "stats": first[2].optimizer.comm_stats(),
    }


def tried_again(folder, rank):
    """The first model does not fit. Whether it and its optimizer are gone then, the files of a save, and whether a run
    that fits at once takes it up."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    from commopt.integrations.accelerate import connect

    tried = []

    def prepared(accelerator):
        model = Tied()
        model, optimizer = accelerator.prepare(model, OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2))
        connect(accelerator, model, optimizer)
        return model, optimizer

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size, accelerator):
        accelerator.free_memory()
        model, optimizer = prepared(accelerator)
        tried.append([weakref.ref(model), weakref.ref(optimizer.optimizer)])
        for step in range(4):
            accelerator.backward(model(tokens(step, rank, 2)[:batch_size]))
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and len(tried) == 1:
                raise RuntimeError("CUDA out of memory.")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        return optimizer

    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    optimizer = train(first)
    _, again = prepared(second)
    second.load_state(folder)
    return {
        "gone": [ref() is None for ref in tried[0]],
        "files": sorted(path.name for path in Path(folder).glob("commopt-*")),
        "same": same_bits(tensors_in(optimizer.state_dict()), tensors_in(again.state_dict())),
    }


def after_a_load_that_failed(folder):
    """The errors of a load whose model is missing, and of one of a state dict after it."""
    from accelerate import Accelerator

    from commopt.integrations.accelerate import connect

    accelerator, model = Accelerator(cpu=True), Tied()
    model, optimizer = accelerator.prepare(model, OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2))
    connect(accelerator, model, optimizer)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for file in (*Path(folder).glob("model*"), *Path(folder).glob("commopt-*")):
            file.unlink() if file.name.startswith("model") else file.write_bytes(b"damaged")
    accelerator.wait_for_everyone()
    errors = []
    for load in (lambda: accelerator.load_state(folder), lambda: optimizer.load_state_dict(optimizer.state_dict())):
        try:
            load()
        except Exception as error:
            errors.append(str(error))
    return errors


def of_one_model(folder, rank):
    """A bare model with two optimizers, saved between two rounds: its parameters then, after that, loaded, and in the
    file."""
    from accelerate import Accelerator

    from commopt.integrations.accelerate import connect

    def prepared():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare_model(Tied(), evaluation_mode=True)  # DDP would take one optimizer alone
        params = list(model.parameters())
        optimizers = [accelerator.prepare(LocalSGD(part, lr=1e-2, period=3)) for part in (params[:1], params[1:])]
        for optimizer in optimizers:
            connect(accelerator, model, optimizer)
        return accelerator, model, optimizers

    accelerator, model, optimizers = prepared()
    for step in range(2):
        accelerator.backward(model(tokens(step, rank, 2)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own = params_of(model)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    second, again, _ = prepared()
    second.load_state(folder)
    return {"own": own, "left": params_of(model), "loaded": params_of(again), "saved": saved_weights(folder, model)}


def refused(mesh):
    """What cannot be connected."""
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard

    from commopt.integrations.accelerate import connect

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(Tied(), evaluation_mode=True)
    params = list(model.parameters())
    with pytest.raises(ValueError, match=r"has not seen this OneBitAdam, and save_state\(\) would leave it out"):
        connect(accelerator, model, OneBitAdam(params))
    first, second = accelerator.prepare(DiLoCo(params[:1]), DiLoCo(params[1:]))
    connect(accelerator, model, first)
    with pytest.raises(ValueError, match="buffers='broadcast': a DiLoCo of the same model was connected with 'mean'"):
        connect(accelerator, model, second, buffers="broadcast")
    cut = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["shard"])
    optimizer = accelerator.prepare(OneBitAdam(cut.parameters(), process_group=mesh))
    with pytest.raises(ValueError, match=r"which save_state\(\) does with FSDP2 only"):
        connect(accelerator, cut, optimizer)


def under_adamw():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(8):
        optimizer.zero_grad()
        (sum(loss(model, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    return params_of(model)


def attached_once():
    """What is attached already is left so; what is wrapped anew, or compiled, is attached."""
    model = Tied()
    optimizer = OneBitAdam(model.parameters(), lr=1e-2)
    attachments = []
    for ddp in [DistributedDataParallel(model) for _ in range(2)]:
        for wrapped in (torch.compile(ddp, backend="eager"), ddp):
            common.attach_once(wrapped, optimizer)
            attachments.append(optimizer._attachment)
    return [attachments.index(one) for one in attachments]


def scenes(folder, rank, world_size):
    os.environ["LOCAL_RANK"] = str(rank)
    with listening() as logged:
        out = {
            "one bit": resumed(f"{folder}/bit", rank, lambda params: OneBitAdam(params, lr=1e-2, freeze_step=2), 2),
            "diloco": resumed(f"{folder}/diloco", rank, lambda params: DiLoCo(params, lr=1e-2, period=3)),
            "said": logged,
        }
    with pytest.raises(ValueError, match="buffers must be 'mean' or 'broadcast', got 'own'"):
        connect_with("own")
    with pytest.raises(ValueError, match="got SGD"):
        Run(lambda params: torch.optim.SGD(params, lr=0.1))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    out["attached"] = attached_once()
    out["tried again"] = tried_again(f"{folder}/again", rank)
    out["after a failed load"] = after_a_load_that_failed(f"{folder}/failed")
    out["of one model"] = of_one_model(f"{folder}/one", rank)
    refused(mesh)
    out["compressed"] = compressed(f"{folder}/compressed", rank)
    out["compressed again"] = compressed_again(f"{folder}/compressed again", rank)
    out["fsdp2"] = fsdp2(f"{folder}/fsdp2", rank)
    out["hybrid"], out["both"] = (fsdp2(f"{folder}/hybrid {both}", rank, mesh, both) for both in (False, True))
    out["local"] = fsdp2(f"{folder}/local", rank, mesh, True, functools.partial(LocalSGD, period=3))
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, functools.partial(scenes, str(tmp_path_factory.mktemp("runs"))))


@pytest.mark.parametrize("which", ["one bit", "diloco"])
def test_resumes_to_the_bit(ranks, which):
    for rank in ranks:
        seen = rank[which]
        assert seen["attached"]
        assert seen["restored"]
        assert seen["same"] == [True] * 3
        assert seen["same state"]
        assert not [text for text in rank["said"] if "own part" in text or "residuals" in text]


def test_any_optimizer_resumes_on_compressed_means_to_the_bit(ranks):
    both = [[f"commopt-gradients-{index}-rank-0000{r}.pt" for r in range(2)] for index in range(2)]
    for rank in ranks:
        same, same_state, after, saved = rank["compressed"]
        assert same == [True] * 3
        assert same_state
        assert same_bits(after, ranks[0]["compressed"][2])
        assert saved == [both[0] + both[1], both[0]]


def test_a_model_that_was_let_go_of_takes_its_residuals_along(ranks):
    for rank in ranks:
        gone, saved, same = rank["compressed again"]
        assert gone
        assert saved == [f"commopt-gradients-0-rank-0000{r}.pt" for r in range(2)]
        assert same


def test_a_model_is_attached_once_compiled_or_not(ranks):
    assert [rank["attached"] for rank in ranks] == [[0, 0, 2, 2]] * 2


def test_every_optimizer_has_its_own_parts(ranks):
    mine, other = (rank["one bit"] for rank in ranks)
    assert same_bits(mine["after"], other["after"])
    for stats in (*mine["stats"], *other["stats"]):
        assert stats["phase"] == "compressed"
    assert len({stats["residual_norm"] for rank in (mine, other) for stats in rank["stats"]}) > 1


def test_the_mean_model_is_saved_while_replicas_differ(ranks):
    mine, other = (rank["diloco"]["before"] for rank in ranks)
    assert not same_bits(mine, other)
    for rank in ranks:
        assert same_bits(rank["diloco"]["saved"], [(a + b) / 2 for a, b in zip(mine, other)])


def test_buffers_of_the_mean_model_are_saved_and_those_of_rank_0_where_replicas_are_equal(ranks):
    for which in ("diloco", "one bit"):
        mine, other = (rank[which]["own buffers"] for rank in ranks)
        assert not same_bits(mine, other)
        mean = [(a + b) / 2 if a.is_floating_point() else a for a, b in zip(mine, other)]
        for rank in ranks:
            assert rank[which]["left"]
            torch.testing.assert_close(rank[which]["saved buffers"], mean if which == "diloco" else mine)


def test_fsdp2_that_accelerate_cuts_is_adamw_and_resumes_to_the_bit(ranks):
    expected = under_adamw()
    for rank in ranks:
        assert rank["fsdp2"]["same"]
        for found, wanted in zip(rank["fsdp2"]["params"], expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_fsdp2_that_is_cut_before_is_compressed_between_replicas(ranks):
    for rank in ranks:
        assert rank["hybrid"]["same"]
        assert rank["hybrid"]["stats"]["phase"] == "compressed"
        assert rank["hybrid"]["stats"]["ratio"] > 10
        assert same_bits(rank["hybrid"]["params"], rank["both"]["params"])
        assert rank["both"]["same"]
        assert rank["hybrid"]["stats"] == rank["both"]["stats"]
    assert same_bits(*(rank["hybrid"]["params"] for rank in ranks))


def test_replicas_that_fsdp2_cuts_are_saved_as_their_mean_and_each_resumes_from_its_own(ranks):
    mine, other = (rank["local"]["before"] for rank in ranks)
    assert not same_bits(mine, other)
    for rank in ranks:
        assert same_bits(rank["local"]["saved"], [(a + b) / 2 for a, b in zip(mine, other)])
        assert rank["local"]["same"]


def test_a_model_that_did_not_fit_is_freed_and_leaves_no_part_of_its_optimizer(ranks):
    for rank in ranks:
        assert rank["tried again"] == {
            "gone": [True, True],
            "files": ["commopt-0-rank-00000.pt", "commopt-0-rank-00001.pt"],
            "same": True,
        }


def test_a_state_that_is_loaded_after_a_load_that_failed_is_not_joined_with_parts_of_that(ranks):
    for rank in ranks:
        (error,) = rank["after a failed load"]
        assert "commopt-" not in error


def test_two_optimizers_of_a_bare_model_resume_each_from_its_own(ranks):
    mine, other = (rank["of one model"]["own"] for rank in ranks)
    assert all(not torch.equal(a, b) for a, b in zip(mine, other))
    for rank, own in zip(ranks, (mine, other)):
        seen = rank["of one model"]
        assert same_bits(seen["left"], own)
        assert same_bits(seen["loaded"], own)
        assert same_bits(seen["saved"], [(a + b) / 2 for a, b in zip(mine, other)])


OPTIMIZERS = {
    "OneBitAdam": lambda params, backend: OneBitAdam(params, lr=1e-2, freeze_step=2, backend=backend),
    "CSER": lambda params, backend: CSER(params, lr=1e-2, period=3, backend=backend),
    "LocalSGD": lambda params, backend: LocalSGD(params, lr=1e-2, period=3, backend=backend),
}


@pytest.mark.parametrize("buffers", ["mean", "broadcast"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_mean_model_has_the_same_buffers_on_all_ranks(name, buffers):
    def rank(backend):
        model = Toy()
        model.register_buffer("statistics", torch.full((3,), 1.0 + 2 * backend.rank))
        first, second = [model.embedding], [model.positions, model.weight, model.bias, model.gain]
        optimizers = [OneBitAdam(first, freeze_step=9, backend=backend), OPTIMIZERS[name](second, backend)]
        for step in range(2):
            model.zero_grad()
            model(tokens(step, backend.rank, 2)).backward()
            for optimizer in optimizers:
                optimizer.step()
        own = params_of(model)
        with means.mean_model(optimizers, model, buffers):
            inside, mean = model.statistics.clone(), params_of(model)
        return own, mean, inside.tolist(), same_bits(own, params_of(model)), model.statistics.tolist()

    (own, mean, *mine), (others, same, *theirs) = on_threads(2, rank)
    assert same_bits(mean, same)
    torch.testing.assert_close(mean, [(a + b) / 2 for a, b in zip(own, others)], rtol=1e-6, atol=1e-7)
    everywhere = [2.0 if buffers == "mean" else 1.0] * 3
    local = name != "OneBitAdam"
    assert mine == [everywhere if local else [1.0] * 3, True, [1.0] * 3]
    assert theirs == [everywhere if local else [3.0] * 3, True, [3.0] * 3]


def saved_by(world_size, make, folder):
    """The state that rank 0 has saved, and the own parts of all ranks, of a run of 5 steps on ``world_size`` ranks."""

    def rank(backend):
        model = Toy()
        optimizer = make(model.parameters(), backend)
        train(model, optimizer, range(5), backend.rank, world_size)
        parts.save(optimizer, folder)
        return through_a_file(optimizer.state_dict())

    states = on_threads(world_size, rank)
    return states[0], [split_state_dict(state)[1] for state in states]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_of_two_ranks_are_joined_as_join_state_dict_does(name, world_size, tmp_path):
    state, own = saved_by(2, OPTIMIZERS[name], tmp_path)

    def rank(backend):
        found, wanted = (OPTIMIZERS[name](Toy().parameters(), backend) for _ in range(2))
        found.load_state_dict(parts.join(found, state, tmp_path))
        wanted.load_state_dict(join_state_dict(split_state_dict(state)[0], own, backend.rank, world_size))
        return same_bits(tensors_in(found.state_dict()), tensors_in(wanted.state_dict())), found.state_dict()

    results = on_threads(world_size, rank)
    assert all(same for same, _ in results)
    if world_size == 2:
        for (_, state_dict), mine in zip(results, own):
            assert same_bits(tensors_in({"state": {}, **state_dict, "residuals": mine}), tensors_in(state_dict))


def test_parts_of_another_save_are_left_alone_and_missing_ones_refused(tmp_path):
    make = OPTIMIZERS["OneBitAdam"]
    state, _ = saved_by(2, make, tmp_path)
    later = {**state, "param_groups": [{**group, "step": group["step"] + 1} for group in state["param_groups"]]}

    def rank(backend):
        optimizer = make(Toy().parameters(), backend)
        assert parts.join(optimizer, later, tmp_path) is later
        assert parts.join(optimizer, state, tmp_path / "empty") is state
        backend.all_reduce(torch.zeros(1)).wait()
        (tmp_path / "commopt-0-rank-00001.pt").unlink(missing_ok=True)
        backend.all_reduce(torch.zeros(1)).wait()
        said = (
            r"ranks \[1\] cannot have theirs; their own errors say why",
            r"own parts of ranks \[0\] of 2: the save was interrupted",
        )
        with pytest.raises(ValueError, match=said[backend.rank]):
            parts.join(optimizer, state, tmp_path)

    on_threads(2, rank)


def test_every_rank_hears_of_one_that_finds_nothing(tmp_path):
    """As where each machine has a folder of its own, and one of them is a new one."""
    make = OPTIMIZERS["OneBitAdam"]
    state, own = saved_by(2, make, tmp_path)
    torch.save(state, tmp_path / "optimizer.pt")
    for place in ("0", "1", "new"):
        (tmp_path / place).mkdir()
    for r in range(2):
        shutil.copy(tmp_path / f"commopt-0-rank-0000{r}.pt", tmp_path / str(r))
    torch.save(state, tmp_path / "0" / "optimizer.pt")

    def rank(backend):
        optimizer, rank = make(Toy().parameters(), backend), backend.rank
        joined = parts.join(optimizer, state, tmp_path / str(rank))
        same = same_bits(tensors_in(joined["residuals"]), tensors_in(own[rank]))
        with pytest.raises(ValueError, match=r"ranks \[1\] of 2 find none there, the others do. Bring the files "):
            parts.join(optimizer, state, tmp_path / ("0" if rank == 0 else "new"))
        with pytest.raises(ValueError, match=r"ranks \[1\] of 2 find none there, the others do. Bring the files "):
            parts.load(optimizer, tmp_path / str(rank) / "optimizer.pt")
        parts.load(optimizer, tmp_path / "new" / "optimizer.pt")
        assert optimizer.param_groups[0]["step"] == 0
        parts.load(optimizer, tmp_path / "optimizer.pt")
        return same and optimizer.param_groups[0]["step"] == 5

    assert on_threads(2, rank) == [True, True]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_part_that_was_written_in_part_is_named(tmp_path, share):
    make = OPTIMIZERS["OneBitAdam"]
    state, _ = saved_by(2, make, tmp_path)
    file = tmp_path / "commopt-0-rank-00001.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])

    def rank(backend):
        optimizer = make(Toy().parameters(), backend)
        with pytest.raises(ValueError, match=f"{re.escape(str(file))} cannot be read: the save was interrupted"):
            parts.join(optimizer, state, tmp_path)

    on_threads(2, rank)


def test_the_example_learns():
    accuracy, rounds, steps = re.fullmatch(
        r"accuracy ([\d.]+), (\d+) rounds, (\d+) steps into the next", on_two_ranks("accelerate_loop.py").strip()
    ).groups()
    assert float(accuracy) > 0.7
    assert (int(rounds), int(steps)) == (9, 3)
