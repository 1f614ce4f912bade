"""CommoptCallback in Hugging Face's Trainer: two processes over Gloo, and a GPT-2 of one block."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from example_ranks import on_two_ranks
from listening import listening
from worlds import on_processes, params_of, same_bits, tensors_in

from commopt import DiLoCo, LocalSGD, Mixed, OneBitAdam, sort_parameters
from commopt.compress import Int4
from commopt.gradients.handle import handles_of

pytest.importorskip("accelerate")


def gpt2():
    """With dropout, tied weights and buffers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.register_buffer("steps", torch.zeros(()))
    return model


def samples(count):
    tokens = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in tokens]


def recorder():
    """A callback that keeps the parameters after each step and of each evaluation, what is logged, and who was attached
    before step 1."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self):
            self.stepped, self.evaluated, self.buffers, self.attached = {}, {}, {}, None
            self.logged = []

        def on_step_begin(self, args, state, control, optimizer=None, **_):
            if self.attached is None:
                self.attached = getattr(optimizer.optimizer, "_attachment", None) is not None

        def on_step_end(self, args, state, control, model=None, **_):
            self.stepped[state.global_step] = params_of(model)
            model.steps += 1 + torch.distributed.get_rank()

        def on_log(self, args, state, control, logs=None, **_):
            self.logged.append(dict(logs))

        def on_prediction_step(self, args, state, control, model=None, **_):
            self.evaluated[state.global_step] = params_of(model)
            self.buffers[state.global_step] = float(model.steps)

    return Recorder()


def trained(folder, resume=None, callbacks=None, model=None, quiet=True, buffers="mean", **settings):
    """The trainer after its training, and what the recorder has."""
    from transformers import Trainer, TrainingArguments

    from commopt.integrations.transformers import CommoptCallback

    arguments = ("optimizers", "optimizer_cls_and_kwargs")
    given = {name: settings.pop(name) for name in arguments if name in settings}
    if quiet:
        settings |= {"max_grad_norm": 0, "average_tokens_across_devices": False, "ddp_broadcast_buffers": False}
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=2, save_strategy="steps",
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, weight_decay=0.1, learning_rate=1e-2,
        **{"logging_strategy": "no", **settings},
    )  # fmt: skip
    recorded = recorder()
    mine = [CommoptCallback(buffers)] if callbacks is None else callbacks
    trainer = Trainer(
        model or gpt2(), args, train_dataset=samples(48), eval_dataset=samples(4), callbacks=[*mine, recorded], **given
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorded


def saved_weights(folder, model):
    """The parameters of a checkpoint, in the order of the model's."""
    from safetensors.torch import load_file

    saved = load_file(Path(folder, "model.safetensors"))
    return [saved[name] for name, _ in model.named_parameters()]


def saved_buffer(folder):
    from safetensors.torch import load_file

    return float(load_file(Path(folder, "model.safetensors"))["steps"])


def one_bit(folder):
    """OneBitAdam by its class, in the compressed phase from step 4 on; of the checkpoints two are kept."""
    settings = {"optimizer_cls_and_kwargs": (OneBitAdam, {"lr": 1e-2, "freeze_step": 3}), "max_steps": 10,
                "save_steps": 4, "save_total_limit": 2, "gradient_accumulation_steps": 2, "logging_strategy": "steps",
                "logging_steps": 5}  # fmt: skip
    first, whole = trained(folder, **settings)
    state, stats = first.optimizer.optimizer.state_dict(), first.optimizer.optimizer.comm_stats()
    history = [entry for entry in first.state.log_history if "loss" in entry]
    kept = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("checkpoint-"))
    assert not list(Path(folder).rglob("*.tmp"))
    again, resumed = trained(folder, resume=f"{folder}/checkpoint-8", **settings)
    assert sorted(resumed.stepped) == [9, 10]
    same = all(same_bits(whole.stepped[step], resumed.stepped[step]) for step in (9, 10))
    same_state = same_bits(tensors_in(state), tensors_in(again.optimizer.optimizer.state_dict()))
    again.train()  # once more, from step 0 of Trainer
    assert again.optimizer.param_groups[0]["step"] == 20
    return {
        "attached": whole.attached and resumed.attached,
        "kept": kept,
        "decay": [group["weight_decay"] for group in first.optimizer.param_groups],
        "phase": first.optimizer.optimizer.phase,
        "same": same,
        "same state": same_state,
        "residuals": stats["residual_norm"],
        "stats": stats,
        "history": history,
        "logged": [logs for logs in whole.logged if "loss" in logs],
        "params": whole.stepped[10],
        "wrapped": [name for name in ("evaluate", "save_model") if name in vars(first)],
    }


def reporting():
    """A callback that looks at the model as training ends, as one that sends it to a service does."""
    from transformers import TrainerCallback

    class Reporting(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **_):
            self.reported = params_of(model)

    return Reporting()


def stopped(folder, step, callbacks, **settings):
    """Stopped after ``step`` by a SIGTERM, with a checkpoint of no event. Returns which own parts each checkpoint had
    when it was pushed to the Hub."""
    from transformers import Trainer, TrainerCallback, trainer_jit_checkpoint
    from transformers.trainer_jit_checkpoint import CheckpointManager

    managers, pushed = [], []

    class Terminated(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            args.push_to_hub = True

        def on_optimizer_step(self, args, state, control, **_):
            managers[0].is_checkpoint_requested = state.global_step == step - 1

    def push(trainer, checkpoint):
        pushed.append(sorted(path.name for path in Path(checkpoint).glob("commopt-*")))

    def remove(path):  # both ranks look whether Trainer's marker is there, and then remove it
        Path(path).unlink(missing_ok=True)

    its_os = SimpleNamespace(path=os.path, makedirs=os.makedirs, remove=remove)
    with (
        mock.patch.object(trainer_jit_checkpoint, "os", its_os),
        mock.patch.object(CheckpointManager, "setup_signal_handler", autospec=True, side_effect=managers.append),
        mock.patch.object(Trainer, "_push_from_checkpoint", push),
    ):
        trained(folder, enable_jit_checkpoint=True, callbacks=[*callbacks, Terminated()], **settings)
    return pushed


def without_callback(folder):
    """What the above is against: the optimizer's state of rank 0 alone."""
    settings = {"optimizer_cls_and_kwargs": (OneBitAdam, {"lr": 1e-2, "freeze_step": 3}), "max_steps": 6,
                "save_steps": 4, "callbacks": []}  # fmt: skip
    _, whole = trained(folder, **settings)
    _, resumed = trained(folder, resume=f"{folder}/checkpoint-4", **settings)
    return same_bits(whole.stepped[6], resumed.stepped[6])


def in_groups(model, period):
    """What door_transformers.md has as a factory, with an optimizer for hidden matrices that every torch has."""
    hidden, rest = sort_parameters(model)
    base = Mixed(torch.optim.SGD(hidden, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2))
    return DiLoCo(base, period=period)


def diloco(folder):
    """Saved and evaluated after step 4, in the middle of a round of 3, and stopped after 5."""
    from commopt.integrations.transformers import CommoptCallback

    settings = {"max_steps": 8, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    settings |= {"optimizer_cls_and_kwargs": (lambda: in_groups, {"period": 3})}

    def run(**more):
        trainer, recorded = trained(folder, **settings, **more)
        assert trainer.optimizer.optimizer.base.name == "Mixed(SGD, AdamW)"
        return trainer, recorded

    reports = reporting()
    first, whole = run(callbacks=[reports, CommoptCallback()])
    second, resumed = run(resume=f"{folder}/checkpoint-4")
    pushed = stopped(folder, 5, [CommoptCallback()], **settings)
    _, after = run(resume=f"{folder}/checkpoint-5")
    return {
        "reported": reports.reported,
        "pushed": pushed,
        "same after a stop": [same_bits(whole.stepped[step], after.stepped[step]) for step in range(6, 9)],
        "at 4": whole.stepped[4],
        "evaluated": whole.evaluated[4],
        "saved": saved_weights(f"{folder}/checkpoint-4", first.model),
        "buffers": [whole.buffers[4], saved_buffer(f"{folder}/checkpoint-4"), float(first.model.steps)],
        "same": [same_bits(whole.stepped[step], resumed.stepped[step]) for step in range(5, 9)],
        "same end": same_bits(params_of(first.model), params_of(second.model)),
        "end": params_of(first.model),
        "at 8": whole.stepped[8],
    }


def best(folder):
    """The best of mean models, and what is left at the end."""
    settings = {
        "max_steps": 5,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    model = gpt2()
    optimizer = LocalSGD(model.parameters(), lr=1e-2, period=4)
    trainer, recorded = trained(folder, model=model, optimizers=(optimizer, None), buffers="broadcast", **settings)
    step = trainer.state.best_global_step
    saved = saved_weights(trainer.state.best_model_checkpoint, trainer.model)
    assert recorded.buffers[step] == saved_buffer(trainer.state.best_model_checkpoint) == step  # rank 0's
    return same_bits(saved, params_of(trainer.model)) and same_bits(saved, recorded.evaluated[step])


def compressed(folder):
    """AdamW on compressed means, clipped, of two batches each."""
    from commopt.integrations.transformers import CompressGradients

    settings = {"max_steps": 10, "save_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
                "logging_strategy": "steps", "logging_steps": 5}  # fmt: skip

    def run(callbacks, **more):
        trainer, recorded = trained(folder, callbacks=callbacks, quiet=False, **settings, **more)
        return trainer, recorded.stepped

    first, whole = run([CompressGradients(Int4())])
    second, resumed = run([mine := CompressGradients(Int4())], resume=f"{folder}/checkpoint-8")
    handles = len(handles_of(list(second.model.parameters())))
    states = sorted(path.name for path in Path(folder, "checkpoint-8").glob("commopt-*"))
    torch.distributed.barrier()
    for path in Path(folder, "checkpoint-8").glob("commopt-*"):
        with contextlib.suppress(FileNotFoundError):  # of two ranks
            path.unlink()
    torch.distributed.barrier()
    with listening() as said:
        _, without = run([mine], resume=f"{folder}/checkpoint-8")
    _, exact = run([])
    with pytest.raises(ValueError, match="OneBitAdam averages by itself"):
        run([CompressGradients(Int4())], optimizer_cls_and_kwargs=(OneBitAdam, {"lr": 1e-2}))
    return {
        "params": whole[10],
        "saved": states,
        "same": [same_bits(whole[step], resumed[step]) for step in (9, 10)],
        "without": same_bits(whole[10], without[10]),
        "said": said,
        "exact": exact[10],
        "history": [entry for entry in first.state.log_history if "loss" in entry],
        "left": [mine.handle, handles, [name for name in vars(second) if name == "_save_optimizer_and_scheduler"]],
    }


def refused(folder):
    """An optimizer that sends nothing, and another word for the buffers."""
    with pytest.raises(ValueError, match="buffers must be 'mean' or 'broadcast', got 'own'"):
        trained(folder, max_steps=1, buffers="own")
    with pytest.raises(ValueError, match=r"got AdamW; for any other there is commopt.compress_gradients\(\)"):
        trained(folder, max_steps=1, save_steps=4)


def scenes(folder, rank, world_size):
    os.environ["LOCAL_RANK"] = str(rank)
    out = {"one bit": one_bit(f"{folder}/one_bit"), "without": without_callback(f"{folder}/without")}
    with listening() as out["said"]:
        out["diloco"] = diloco(f"{folder}/diloco")
    out["best"] = best(f"{folder}/best")
    refused(f"{folder}/refused")
    out["compressed"] = compressed(f"{folder}/compressed")
    out["advice"] = {}
    for cls, arguments in ((OneBitAdam, {}), (LocalSGD, {"period": 4})):
        kwargs = {"optimizer_cls_and_kwargs": (cls, {"lr": 1e-2, **arguments}), "max_steps": 1, "save_steps": 4}
        with listening() as out["advice"][cls.__name__]:
            trained(f"{folder}/advice", quiet=False, **kwargs)
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_processes(2, functools.partial(scenes, str(tmp_path_factory.mktemp("runs"))))


def test_one_bit_adam_trains_and_resumes_to_the_bit(ranks):
    for rank in ranks:
        seen = rank["one bit"]
        assert seen["attached"]
        assert seen["kept"] == ["checkpoint-10", "checkpoint-8"]
        assert seen["decay"] == [0.1, 0.0]
        assert seen["phase"] == "compressed"
        assert seen["same"]
        assert seen["same state"]
        assert seen["wrapped"] == []
    mine, other = (rank["one bit"] for rank in ranks)
    assert same_bits(mine["params"], other["params"])
    assert mine["residuals"] != other["residuals"]


def test_what_is_sent_is_logged_beside_each_loss(ranks):
    seen = ranks[0]["one bit"]
    stats, names = seen["stats"], {"bytes", "bytes_total", "ratio", "residual_ratio"}
    assert [entry["step"] for entry in seen["history"]] == [5, 10]
    for entry, logs in zip(seen["history"], seen["logged"], strict=True):
        found = {name.removeprefix("commopt/"): entry[name] for name in entry if name.startswith("commopt/")}
        assert found.pop("phase") == "compressed"
        assert {f"commopt/{name}": value for name, value in found.items()}.items() <= logs.items()
        assert found.keys() == names
        assert 0 < found["bytes"] < found["bytes_total"]
    last = {name.removeprefix("commopt/"): value for name, value in seen["logged"][-1].items() if "commopt" in name}
    assert last == {
        "bytes": stats["step"]["bytes"], "bytes_total": stats["total"]["bytes"],
        "ratio": stats["ratio"], "residual_ratio": stats["residual_ratio"],
    }  # fmt: skip
    assert not [name for logs in ranks[1]["one bit"]["logged"] for name in logs if "commopt" in name]


def test_without_the_callback_residuals_are_lost(ranks):
    assert not all(rank["without"] for rank in ranks)


def test_local_steps_resume_within_a_round_to_the_bit(ranks):
    assert not same_bits(ranks[0]["diloco"]["at 8"], ranks[1]["diloco"]["at 8"])
    for rank in ranks:
        assert all(rank["diloco"]["same"])
        assert rank["diloco"]["same end"]
    assert same_bits(ranks[0]["diloco"]["end"], ranks[1]["diloco"]["end"])


def test_a_checkpoint_at_a_sigterm_has_every_ranks_own_part(ranks):
    for number, rank in enumerate(ranks):
        assert rank["diloco"]["same after a stop"] == [True] * 3
        both = ["commopt-0-rank-00000.pt", "commopt-0-rank-00001.pt"]
        assert rank["diloco"]["pushed"] == [both, both] or number == 1


def test_the_mean_model_is_what_is_reported_at_the_end(ranks):
    for rank in ranks:
        assert same_bits(rank["diloco"]["reported"], ranks[0]["diloco"]["end"])


def test_the_mean_model_is_evaluated_and_saved(ranks):
    mine, other = (rank["diloco"]["at 4"] for rank in ranks)
    assert not same_bits(mine, other)
    mean = [(a + b) / 2 for a, b in zip(mine, other)]
    for rank in ranks:
        assert same_bits(rank["diloco"]["evaluated"], mean)
        assert same_bits(rank["diloco"]["saved"], mean)
        assert not [text for text in rank["said"] if "is evaluated" in text]


def test_buffers_of_the_mean_model_are_the_mean_too(ranks):
    for rank in ranks:  # 1 a step on rank 0, 2 on rank 1: after step 4 two times, and what is left at the end
        assert rank["diloco"]["buffers"] == [6.0, 6.0, 12.0]


def test_the_best_model_is_left_at_the_end(ranks):
    assert all(rank["best"] for rank in ranks)


def test_settings_that_work_against_the_optimizer_are_warned_of_once(ranks):
    bit, local = ranks[0]["advice"]["OneBitAdam"], ranks[0]["advice"]["LocalSGD"]
    assert [text for text in bit if "Arguments" in text or "every step" in text] == [
        "TrainingArguments(max_grad_norm=1.0) clips what each rank has, averaged or not, by its own norm: set it to 0, "
        "and give OneBitAdam a max_grad_norm"
    ]
    tokens, buffers = (text for text in local if "every step, local steps of LocalSGD too" in text)
    assert tokens.startswith("average_tokens_across_devices=True ")
    assert buffers.endswith("set ddp_broadcast_buffers=False")
    assert not [text for advice in ranks[1]["advice"].values() for text in advice if "set " in text]


def test_any_optimizer_trains_on_compressed_means_and_resumes_to_the_bit(ranks):
    for rank in ranks:
        seen = rank["compressed"]
        assert seen["same"] == [True, True]
        assert seen["saved"] == [f"commopt-gradients-0-rank-0000{r}.pt" for r in range(2)]
        assert not seen["without"]  # residuals that begin at 0
        assert seen["left"] == [None, 0, []]
    mine, other = (rank["compressed"] for rank in ranks)
    assert same_bits(mine["params"], other["params"])
    assert [text for text in mine["said"] if "there are none; they begin at 0" in text]
    assert not same_bits(mine["params"], mine["exact"])
    assert [entry["commopt/ratio"] > 6 for entry in mine["history"]] == [True, True]


@pytest.mark.long
def test_the_example_learns():
    loss, phase, ratio = re.fullmatch(
        r"loss ([\d.]+), phase (\w+), sends 1/(\d+) of what DDP does", on_two_ranks("hf_trainer.py").splitlines()[-1]
    ).groups()
    assert float(loss) < 3
    assert phase == "compressed"
    assert int(ratio) > 20
