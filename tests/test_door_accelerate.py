"""connect() with Hugging Face accelerate: two processes over Gloo."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from worlds import Toy, on_processes, on_threads, params_of, same_bits, tensors_in, through_a_file, tokens, train

from commopt import CSER, DiLoCo, LocalSGD, OneBitAdam
from commopt.integrations import parts

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


def resumed(folder, rank, make, count=1):
    """What a run of 8 steps has, saved after 5; and what one has that takes it up."""
    torch.manual_seed(rank)
    first = Run(make, count)
    attached = all(optimizer.optimizer._attachment is not None for optimizer in first.optimizers)
    before = first.train(range(5), rank)[-1]
    first.accelerator.save_state(folder)
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
        "stats": [optimizer.optimizer.comm_stats() for optimizer in second.optimizers],
    }


def saved_weights(folder, model):
    from safetensors.torch import load_file

    saved = load_file(Path(folder, "model.safetensors"))
    return [saved[name] for name, _ in model.module.named_parameters()]


def scenes(folder, rank, world_size):
    os.environ["LOCAL_RANK"] = str(rank)
    return {
        "one bit": resumed(f"{folder}/bit", rank, lambda params: OneBitAdam(params, lr=1e-2, freeze_step=2), 2),
        "diloco": resumed(f"{folder}/diloco", rank, lambda params: DiLoCo(params, lr=1e-2, period=3)),
    }


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
