"""torchtitan's container of optimizers, meshes and checkpoints, with ours in them, over four processes.

Its models need Triton, for kernels of experts: here a small one stands in for them, sharded as they are.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from worlds import on_processes, same_bits, tensors_in

import commopt
from commopt.sharding import local

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan", allow_module_level=True)

pytestmark = pytest.mark.long  # what it needs of torchtitan is pinned
STEPS = 4


def parallelize(model: nn.Module, *, parallel_dims: Any, parallelism: str) -> nn.Module:
    """As torchtitan's parallelize_llama chooses the mesh."""
    assert parallelism == "as given"
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    return sharded(model, parallel_dims.get_mesh(names))


def parallelize_as_flux(model: nn.Module, *, parallel_dims: Any) -> nn.Module:
    return sharded(model, parallel_dims.get_activated_mesh(["dp_replicate", "fsdp"]))


def parallelize_regardless(model: nn.Module, *, parallel_dims: Any) -> nn.Module:
    return sharded(model, parallel_dims.get_mesh(["dp_replicate", "fsdp"]))


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # Gloo can do no other
    return model


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    """The loss is a sum over tokens, divided by those of all ranks."""
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (model(x).square().sum() / 16).backward()
        optimizer.step()


def params_of(model: nn.Module) -> list[torch.Tensor]:
    return [local(p.detach()).clone() for p in model.parameters()]


class Model(Stateful):
    """As torchtitan's ModelWrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class Fused(nn.Linear):
    """As torchtitan's FusedQKVLinear: copies of its halves are saved, and merged where they are loaded."""

    def __init__(self) -> None:
        super().__init__(9, 4, bias=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        if isinstance(weight, DTensor):
            weight = weight.redistribute(weight.device_mesh, [Replicate()])
        state[f"{prefix}upper"], state[f"{prefix}lower"] = weight[:2].clone(), weight[2:].clone()

    @staticmethod
    def _merge(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}upper"), state.pop(f"{prefix}lower")])


class Trainer:
    """What of torchtitan's Trainer matters here, with its own checkpoints."""

    def __init__(self, dims: Any, folder: str, config: Any, seed: int = 0, **checkpoint: Any) -> None:
        from torchtitan.components.checkpointer import CheckpointManager

        from commopt.integrations.torchtitan import within_a_replica

        model = nn.Sequential(net(seed), nn.Linear(3, 9), Fused())
        self.model = within_a_replica(parallelize)(model, parallel_dims=dims, parallelism="as given")
        self.optimizers = config.build(model_parts=[self.model])
        self.checkpointer = CheckpointManager.Config(enable=True, folder="kept", interval=STEPS, **checkpoint).build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=None,
            states={"train_state": self}, sd_adapter=None, base_folder=folder,
        )  # fmt: skip
        self.validator = Validator()
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, rank: int, steps: int) -> Trainer:
        self.checkpointer.load()
        while self.step < steps:
            train(self.model, self.optimizers, rank, range(self.step, self.step + 1))
            self.step += 1
            self.checkpointer.save(self.step, last_step=self.step == steps)
            self.validator.validate([self.model], self.step)
        return self


class Validator:
    """Its losses are of the same batch on all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        (model,) = model_parts
        model.eval()
        self.losses.append(float(model(torch.ones(2, 7)).square().sum()))
        model.train()


def between_rounds(rank: int, dims: Any, folder: str) -> dict[str, Any]:
    """Checkpoints of replicas that differ."""
    from torchtitan.components.checkpointer.base import ModelWrapper

    from commopt.integrations.torchtitan import optimizers

    config = optimizers(commopt.DiLoCo, lr=1e-2, period=30)
    never = Trainer(dims, f"{folder}/never", config).train(rank, STEPS + 1)
    Trainer(dims, f"{folder}/stopped", config, last_save_model_only=False).train(rank, STEPS)
    resumed = Trainer(dims, f"{folder}/stopped", config, seed=1).train(rank, STEPS + 1)
    unwatched = Trainer(dims, f"{folder}/unwatched", config, load_only=True)
    train(unwatched.model, unwatched.optimizers, rank, range(STEPS + 1))
    saved = ModelWrapper(Trainer(dims, f"{folder}/saved", config, seed=1).model)
    dcp.load(state := saved.state_dict(), checkpoint_id=f"{folder}/never/kept/step-{STEPS + 1}")
    saved.load_state_dict(state)
    own = params_of(never.model)
    with next(iter(never.optimizers)).averaged():
        mean = params_of(never.model)
        Validator.validate(never.validator, [never.model], STEPS + 1)
    return {
        "never": own,
        "resumed": params_of(resumed.model),
        "unwatched": params_of(unwatched.model),
        "mean": mean,
        "saved": params_of(saved.model[0]),
        "losses": never.validator.losses,
    }


def by_another_manager(rank: int, dims: Any, folder: str) -> dict[str, Any]:
    """What a checkpoint manager saves that is not torchtitan's own, and nobody knows when."""
    from torchtitan.components.checkpointer import BaseCheckpointManager

    from commopt.integrations.torchtitan import optimizers

    class Manager(BaseCheckpointManager):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseCheckpointManager.Config):
            pass

        enable, save_future = True, None

        def __init__(self, model: nn.Module) -> None:
            self.model, self.saved = model, list[list[torch.Tensor]]()

        def _save(self, curr_step: int, last_step: bool = False) -> bool:
            self.saved.append(params_of(self.model))
            return True

        def _load(self, *_: Any) -> bool:
            return False

        _wait_for_saving = _maybe_wait_for_staging = _close = _load

    trainer = Trainer(dims, folder, optimizers(commopt.DiLoCo, lr=1e-2, period=30))
    trainer.checkpointer = manager = Manager(trainer.model)  # type: ignore[assignment]
    trainer.train(rank, 2)
    own = params_of(trainer.model)
    with next(iter(trainer.optimizers)).averaged():
        return {"own": own, "mean": params_of(trainer.model), "saved": manager.saved}


def scenes(rank: int, world: int) -> dict[str, Any]:
    from torchtitan.distributed import ParallelDims, parallel_dims

    from commopt.integrations.torchtitan import optimizers, within_a_replica

    parallel_dims.device_type = "cpu"
    dims = ParallelDims(
        dp_replicate=2, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=world, spmd_backend="partial_dtensor"
    )
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    out: dict[str, Any] = {}
    for opt_class, few in ((commopt.OneBitAdam, {"freeze_step": 2}), (commopt.DiLoCo, {"period": 3})):
        name, given = opt_class.__name__, {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, **few}
        config = optimizers(opt_class, **given)

        def begin(seed: int, config: Any = config) -> tuple[nn.Module, Any]:
            model = within_a_replica(parallelize)(net(seed), parallel_dims=dims, parallelism="as given")
            return model, config.build(model_parts=[model])

        plain = sharded(net(), dims.get_mesh("fsdp"))
        by_hand = opt_class(
            plain.parameters(), process_group=dims.get_mesh(["dp_replicate", "fsdp"]), reduction="sum", **given
        )
        train(plain, by_hand, rank, range(2 * STEPS))
        model, container = begin(0)
        train(model, container, rank, range(STEPS))
        where = f"{folder[0]}/{name}"
        dcp.save({"model": Model(model), "optimizer": container}, checkpoint_id=where)
        train(model, container, rank, range(STEPS, 2 * STEPS))
        again, resumed = begin(1)
        dcp.load({"model": Model(again), "optimizer": resumed}, checkpoint_id=where)
        train(again, resumed, rank, range(STEPS, 2 * STEPS))
        ours = [next(iter(one)) for one in (container, resumed)]
        out[name] = {
            "by hand": [params_of(plain), own(by_hand)],
            "never": [params_of(model), own(ours[0])],
            "resumed": [params_of(again), own(ours[1])],
            "sent": [one.comm_stats()["total"]["bytes"] for one in (by_hand, ours[0])],
        }
    out["refused"] = refused(model, dims)
    out["as flux"] = within_a_replica(parallelize_as_flux)(net(), parallel_dims=dims)[
        0
    ].weight.device_mesh.mesh_dim_names
    out["between rounds"] = between_rounds(rank, dims, folder[0])
    out["another manager"] = by_another_manager(rank, dims, folder[0])
    return out


def own(optimizer: Any) -> list[torch.Tensor]:
    """All that it keeps of what this rank holds, residuals included."""
    flats = [flat for bucket in optimizer.buckets for flat in bucket.buffers.values()]
    residuals = [t for entry in optimizer.residuals.values() for t in entry.values()]
    assert tensors_in(optimizer.state_dict())
    return [t.clone() for t in (*flats, *residuals)]


def refused(model: nn.Module, dims: Any) -> list[str]:
    """What is said of what does not go together, of which no rank communicates anything."""
    from commopt.integrations.torchtitan import optimizers, within_a_replica

    given = {"pp": 1, "ep": 1, "spmd_backend": "partial_dtensor"}
    other = [types.SimpleNamespace(**given | one) for one in ({"pp": 2}, {"ep": 2}, {"spmd_backend": "spmd_types"})]
    config = optimizers(commopt.OneBitAdam)
    attempts = [lambda dims=dims: within_a_replica(parallelize)(net(), parallel_dims=dims) for dims in other]
    attempts += [
        lambda: config.build(model_parts=[net()]),
        lambda: dataclasses.replace(config, implementation="fused_opt_states_bf16").build(model_parts=[model]),
        lambda: optimizers(torch.optim.AdamW).build(model_parts=[model]),  # type: ignore[arg-type]
        lambda: optimizers(commopt.Lamb).build(model_parts=[model]),  # type: ignore[arg-type]
        lambda: within_a_replica(parallelize_regardless)(net(), parallel_dims=dims),
    ]
    said = []
    for attempt in attempts:
        with pytest.raises(ValueError, match=r"commopt's optimizers") as error:
            attempt()
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_processes(4, scenes)


every = pytest.mark.parametrize("name", ["OneBitAdam", "DiLoCo"])


@every
def test_its_container_trains_as_the_optimizer_alone(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        mine = rank[name]
        assert same_bits(mine["never"][0], mine["by hand"][0])
        assert same_bits(mine["never"][1], mine["by hand"][1])
        assert mine["sent"][0] == mine["sent"][1] > 0


@every
def test_its_checkpoints_resume_to_the_bit(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        mine = rank[name]
        assert same_bits(mine["resumed"][0], mine["never"][0])
        assert same_bits(mine["resumed"][1], mine["never"][1])
    if name == "OneBitAdam":
        assert not same_bits(ranks[0][name]["never"][1][-2:], ranks[2][name]["never"][1][-2:])  # replicas' residuals


def test_a_resume_between_rounds_gives_each_replica_its_own(ranks: list[Any]) -> None:
    """Of what the model saves as copies, too: torchtitan loads the model last."""
    for rank in ranks:
        mine = rank["between rounds"]
        assert same_bits(mine["resumed"], mine["never"])
    assert not same_bits(ranks[0]["between rounds"]["never"][-1:], ranks[2]["between rounds"]["never"][-1:])


def test_the_mean_of_replicas_is_saved_and_validated(ranks: list[Any]) -> None:
    """Else the ranks save parts of several replicas. Training goes on as if there had been neither."""
    for rank in ranks:
        mine = rank["between rounds"]
        assert same_bits(mine["saved"], mine["mean"])
        assert mine["losses"][-2] == mine["losses"][-1]
        assert mine["losses"] == ranks[0]["between rounds"]["losses"]
        assert same_bits(mine["never"], mine["unwatched"])
        assert not same_bits(mine["never"], mine["mean"])


def test_another_manager_saves_the_mean_whenever_it_does(ranks: list[Any]) -> None:
    for rank in ranks:
        mine = rank["another manager"]
        assert len(mine["saved"]) == 2
        assert same_bits(mine["saved"][1], mine["mean"])
        assert not same_bits(mine["own"], mine["mean"])


def test_fsdp_averages_over_no_replicas_however_it_asks_for_its_mesh(ranks: list[Any]) -> None:
    assert [rank["as flux"] for rank in ranks] == [("fsdp",)] * 4


def test_what_does_not_go_together_is_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        for said, words in zip(
            rank["refused"],
            (
                "parallelism.pipeline_parallel_degree=1, got 2",
                "parallelism.expert_parallel_degree=1, got 2",
                "parallelism.spmd_backend='partial_dtensor', got 'spmd_types'",
                "(model_spec.parallelize_fn). For checkpoint.create_seed_checkpoint torchtitan shards nothing",
                "take implementation='fused' or 'foreach' or 'for-loop', got 'fused_opt_states_bf16'",
                "got 'AdamW'",
                "got 'Lamb'",
                "parallelize_fn has FSDP do that",
            ),
            strict=True,
        ):
            assert words in said
