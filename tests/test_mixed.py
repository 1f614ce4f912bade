"""Several optimizers as one base, as in MuLoCo: every step against torch's optimizers by hand and an outer step on
lists; resuming, copies, schedules, and bad input."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_outer import OuterOracle
from oracle_streaming import StreamingOracle
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook
from worlds import Toy, Used, on_threads, params_of, same_bits, tensors_in, through_a_file, train

import commopt
from commopt import DiLoCo, Mixed, Streaming
from commopt.comm import LocalBackend
from commopt.compress import Int4, Sign
from commopt.optim import join_state_dict, split_state_dict

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")

SIZES = {"hidden": [(4, 6), (7, 3)], "rest": [(9,), (), (3, 5)]}
BASES: dict[str, Any] = {
    "hidden": lambda params: torch.optim.Muon(params, lr=0.02),
    "rest": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1),
}
SCHEDULES = {"hidden": lambda step: 1 / (1 + step), "rest": lambda step: 0.5 + step % 3}


def made(which: str) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(len(which))
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES[which]]


def gradient(which: str, step: int, rank: int, i: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 * step + 100 * rank + 10 * i + len(which))
    return torch.randn(SIZES[which][i], generator=g, dtype=torch.float64)


def in_order(tensors: list[Tensor]) -> list[float]:
    """All elements as a bucket packs them, of the last tensor first."""
    return [v for t in reversed(tensors) for v in t.detach().flatten().tolist()]


class ByHand:
    """One of torch's optimizers as the base of a rank of the oracle, which has lists."""

    def __init__(self, which: str, only: slice = slice(None)) -> None:
        self.params = made(which)[only]
        self.optimizer = BASES[which](self.params)

    def step(self, x: list[float], grad: list[float], lr: float) -> None:
        at = 0
        for p in reversed(self.params):
            part = slice(at, at + p.numel())
            p.data = torch.tensor(x[part], dtype=torch.float64).view(p.shape)
            p.grad = torch.tensor(grad[part], dtype=torch.float64).view(p.shape)
            at += p.numel()
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        x[:] = in_order(self.params)


def oracle_of(which: str, world_size: int, block: int) -> OuterOracle:
    """DiLoCo on the parameters of one optimizer: the groups have nothing to do with each other."""
    oracle = OuterOracle("diloco", in_order(made(which)), world_size, 3, "sgd", {"lr": 0.7, "momentum": 0.6}, block)
    oracle.bases = [ByHand(which) for _ in range(world_size)]  # type: ignore[misc]
    return oracle


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_muloco_is_muon_and_adamw_by_hand_and_an_outer_step_on_lists(world_size: int, block: int) -> None:
    expected: dict[str, list[list[list[float]]]] = {}
    for which in SIZES:
        oracle, lr = oracle_of(which, world_size, block), BASES[which](made(which)).param_groups[0]["lr"]
        expected[which] = []
        for step in range(10):
            grads = [
                in_order([gradient(which, step, rank, i) for i in range(len(SIZES[which]))])
                for rank in range(world_size)
            ]
            oracle.step(grads, lr * SCHEDULES[which](step))
            expected[which].append([list(x) for x in oracle.x])

    def run(backend: Any) -> None:
        params = {which: made(which) for which in SIZES}
        base = Mixed(*(BASES[which](params[which]) for which in SIZES))
        compressor = Sign(block) if block else None
        optimizer = DiLoCo(
            base, period=3, outer_lr=0.7, outer_momentum=0.6, compressor=compressor, backend=backend, bucket_mb=1
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, list(SCHEDULES.values()))
        for step in range(10):
            for which in SIZES:
                for i, p in enumerate(params[which]):
                    p.grad = gradient(which, step, backend.rank, i)
            optimizer.step()
            schedule.step()
            for which in SIZES:
                found, right = in_order(params[which]), expected[which][step][backend.rank]
                assert max(abs(a - b) for a, b in zip(found, right)) <= 1e-12, (step, which)

    on_threads(world_size, run)


def muloco(model: nn.Module, backend: Any = None, **settings: Any) -> DiLoCo:
    hidden, rest = commopt.sort_parameters(model, head=["embedding"], rest=["pos*", "unused"])
    base = Mixed(torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-2))
    return DiLoCo(base, **{"period": 3, "outer_momentum": 0.6, "backend": backend or LocalBackend(), **settings})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_equals_one_never_stopped(world_size: int, dtype: torch.dtype) -> None:
    stops = (2, 3, 4)

    def straight(backend: Any) -> Any:
        model, saved = Toy(dtype), {}
        optimizer = muloco(model, backend, compressor=Sign(16))
        for step in range(8):
            if step in stops:
                saved[step] = through_a_file([model.state_dict(), *split_state_dict(optimizer.state_dict())])
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
        return params_of(model), tensors_in(optimizer.state_dict()), saved

    results = on_threads(world_size, straight)
    for step in stops:
        parts = [saved[step][2] for _, _, saved in results]

        def resumed(backend: Any, step: int = step, parts: Any = parts) -> Any:
            model = Toy(dtype, seed=5)
            weights, replicated, _ = results[0][2][step]
            model.load_state_dict(weights)
            optimizer = muloco(model, backend, compressor=Sign(16))
            optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, world_size))
            train(model, optimizer, range(step, 8), backend.rank, world_size)
            return params_of(model), tensors_in(optimizer.state_dict())

        for (params, state, _), found in zip(results, on_threads(world_size, resumed)):
            assert same_bits(params, found[0])
            assert same_bits(state, found[1])


def test_at_another_world_size_the_bases_have_the_mean_of_all_ranks() -> None:
    def first(backend: Any) -> Any:
        model = Toy()
        optimizer = muloco(model, backend)
        train(model, optimizer, range(5), backend.rank, 2)
        buffers = [entry.get("momentum_buffer", entry.get("exp_avg")) for entry in optimizer.base.state.values()]
        return model.state_dict(), split_state_dict(optimizer.state_dict()), [b.clone() for b in buffers]

    ranks = on_threads(2, first)
    model = Toy()
    model.load_state_dict(ranks[0][0])
    optimizer = muloco(model)
    optimizer.load_state_dict(join_state_dict(ranks[0][1][0], [mine for _, (_, mine), _ in ranks], 0, 1))
    found = [entry.get("momentum_buffer", entry.get("exp_avg")) for entry in optimizer.base.state.values()]
    assert len(found) > 4
    for mean, a, b in zip(found, ranks[0][2], ranks[1][2]):
        torch.testing.assert_close(mean, (a + b) / 2)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_as_the_original_would(how: Any) -> None:
    model = Toy()
    optimizer = muloco(model)
    train(model, optimizer, range(4))
    other, second = how((model, optimizer))
    assert second.base.parts[0].param_groups[0]["params"][0] is other.weight
    train(other, second, range(4, 8))
    untouched = params_of(model)
    train(model, optimizer, range(4, 8))
    assert same_bits(params_of(model), params_of(other))
    assert not same_bits(untouched, params_of(model))


def test_each_optimizer_steps_as_it_does_by_itself_and_hooks_are_called_once() -> None:
    """Without an outer step, too: a mixture is an optimizer."""
    models = [Toy(), Toy()]
    sorted_ones = [commopt.sort_parameters(model, head=["embedding"], rest=["pos*"]) for model in models]
    alone, parts = ([torch.optim.Muon(hidden), torch.optim.AdamW(rest, lr=1e-2)] for hidden, rest in sorted_ones)
    mixed, calls = Mixed(*parts), []
    handles = [
        parts[0].register_step_post_hook(lambda *_: calls.append("part")),
        mixed.register_step_post_hook(lambda *_: calls.append("mixed")),
        register_optimizer_step_post_hook(lambda *_: calls.append("any")),
    ]
    try:
        train(models[1], mixed, range(3))
    finally:
        for handle in handles:
            handle.remove()
    assert calls.count("part") == calls.count("mixed") == calls.count("any") == 3
    train(models[0], _Both(alone), range(3))
    assert same_bits(params_of(models[0]), params_of(models[1]))
    before = params_of(models[1])

    def closure() -> float:
        assert same_bits(before, params_of(models[1]))  # it is called first
        return 3.5

    assert mixed.step(closure) == 3.5
    assert not same_bits(before, params_of(models[1]))


class _Both:
    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_one_that_is_loaded_by_itself_is_followed() -> None:
    model = Toy()
    optimizer = muloco(model)
    train(model, optimizer, range(2))
    muon = optimizer.base.parts[0]
    muon.load_state_dict({**muon.state_dict(), "param_groups": [{**muon.state_dict()["param_groups"][0], "lr": 0.5}]})
    train(model, optimizer, range(2, 3))
    assert optimizer.param_groups[0] is muon.param_groups[0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-2]
    assert optimizer.param_groups[0]["rounds"] == 1
    muon.load_state_dict(muon.state_dict())
    assert optimizer.base.param_groups[0] is not muon.param_groups[0]
    optimizer.base.step()  # without an outer step, too
    assert optimizer.base.param_groups[0] is muon.param_groups[0]


def test_a_parameter_without_state_has_an_empty_one_as_torch_has_it() -> None:
    mixed = of_two(Toy(), torch.optim.Muon, torch.optim.AdamW)
    for group, part in zip(mixed.param_groups, mixed.parts):
        p = group["params"][0]
        assert p not in mixed.state
        assert mixed.state.get(p) is None
        mixed.state[p]["note"] = 1
        assert part.state[p] == {"note": 1}


def test_groups_have_nothing_of_each_others_defaults() -> None:
    optimizer = muloco(Toy())
    of_muon, of_adamw = optimizer.param_groups
    assert of_adamw.keys() - of_muon.keys() >= {"betas", "amsgrad"}
    assert of_muon.keys() - of_adamw.keys() >= {"ns_steps", "nesterov"}
    assert of_muon["period"] == of_adamw["period"] == 3


def test_a_state_is_loaded_as_each_optimizer_does_it() -> None:
    """Lamb keeps float32 for bfloat16 parameters, which torch's loading would round."""

    def mixed(model: Toy) -> Mixed:
        hidden, rest = commopt.sort_parameters(model, head=["embedding"])
        return Mixed(torch.optim.Muon(hidden), commopt.Lamb(rest, lr=1e-2))

    model, other = Toy(torch.bfloat16), Toy(torch.bfloat16)
    first, second = mixed(model), mixed(other)
    train(model, first, range(3))
    first.state["note"] = {"by": "somebody"}
    state = through_a_file(first.state_dict())
    second.load_state_dict(state)
    assert second.state["note"] == {"by": "somebody"}
    other.load_state_dict(model.state_dict())
    assert {entry["exp_avg"].dtype for entry in second.parts[1].state.values()} == {torch.float32}
    assert same_bits(tensors_in(first.state_dict()), tensors_in(second.state_dict()))
    train(model, first, range(3, 5))
    train(other, second, range(3, 5))
    assert same_bits(params_of(model), params_of(other))


def of_two(model: Toy, *classes: Any) -> Mixed:
    """A mixture of an optimizer for hidden matrices and one for the rest."""
    return Mixed(*(cls(p, lr=1e-2) for cls, p in zip(classes, commopt.sort_parameters(model, head=["embedding"]))))


MUON = getattr(torch.optim, "Muon", None)


@pytest.mark.parametrize("classes", [(MUON, commopt.Lamb), (MUON, commopt.Lans), (commopt.Lamb, commopt.Lans)])
def test_the_state_of_a_mixture_alone_is_loaded_by_an_outer_step_around_one(classes: Any) -> None:
    model, other = Toy(), Toy()
    base = of_two(model, *classes)
    train(model, base, range(3))
    optimizer = DiLoCo(of_two(other, *classes), backend=LocalBackend())
    optimizer.load_state_dict(through_a_file(base.state_dict()))
    assert same_bits(tensors_in(base.state_dict()), tensors_in(optimizer.base.state_dict()))
    again = DiLoCo(of_two(Toy(), *classes), backend=LocalBackend())
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same_bits(tensors_in(base.state_dict()), tensors_in(again.base.state_dict()))


def test_hooks_of_loading_are_called_as_torchs_are() -> None:
    """What the first kind returns is loaded."""
    model, other, called = Toy(), Toy(), list[Any]()
    first, second = (of_two(m, torch.optim.Muon, torch.optim.AdamW) for m in (model, other))
    train(model, first, range(2))
    state = first.state_dict()
    second.register_load_state_dict_pre_hook(
        lambda _, given: {**given, "param_groups": [{**group, "lr": 0.25} for group in given["param_groups"]]}
    )
    second.register_load_state_dict_pre_hook(lambda _, given: called.append(given["param_groups"][0]["lr"]))
    second.register_load_state_dict_post_hook(lambda optimizer: called.append(optimizer))
    second.load_state_dict(state)
    assert called == [0.25, second]
    assert [group["lr"] for group in second.param_groups] == [0.25, 0.25]
    assert [group["lr"] for group in state["param_groups"]] == [1e-2, 1e-2]


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(
    ("saved", "loads"),
    [
        ((torch.optim.AdamW, commopt.Lans), (torch.optim.AdamW, commopt.Lamb)),
        ((commopt.Lamb, commopt.Lamb), (commopt.Lamb, commopt.Lans)),
    ],
)
def test_a_state_that_one_optimizer_refuses_changes_none_of_them(saved: Any, loads: Any, outer: bool) -> None:
    model, other = Toy(), Toy()
    base = of_two(model, *saved)
    train(model, base, range(3))
    mixed = of_two(other, *loads)
    optimizer: Any = DiLoCo(mixed, backend=LocalBackend()) if outer else mixed
    train(other, optimizer, range(2))
    base.param_groups[0]["lr"] = 0.5
    before = str(optimizer.state_dict()), str(mixed.state_dict()), [part.param_groups for part in mixed.parts]
    with pytest.raises(ValueError, match=f"is that of {saved[1].__name__}, and this is .*{loads[1].__name__}"):
        optimizer.load_state_dict(base.state_dict())
    assert (str(optimizer.state_dict()), str(mixed.state_dict())) == before[:2]
    assert all(part.param_groups is groups for part, groups in zip(mixed.parts, before[2]))


def test_tools_for_distributed_checkpoints_see_all_of_the_state() -> None:
    model, other = Used(), Used()
    names = [commopt.sort_parameters(m, head=["embedding"], rest=["pos*"]) for m in (model, other)]
    first, second = (Mixed(torch.optim.Muon(hidden), torch.optim.AdamW(rest)) for hidden, rest in names)
    train(model, first, range(3))
    state = get_optimizer_state_dict(model, first)
    assert set(state["state"]["weight"]) == {"momentum_buffer"}
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(state["state"]["bias"])
    set_optimizer_state_dict(other, second, state, options=StateDictOptions(strict=False))  # one is empty
    assert same_bits(tensors_in(first.state_dict()), tensors_in(second.state_dict()))


def test_the_lines_of_the_page_train_a_model_of_transformers() -> None:
    page = (Path(__file__).parent.parent / "docs" / "muloco.md").read_text()
    (block,) = [b for b in re.findall(r"(?ms)^```python\n(.*?)^```$", page) if "Mixed" in b]

    from transformers import GPT2Config, GPT2LMHeadModel

    def run(backend: Any) -> list[Tensor]:
        torch.manual_seed(0)  # ranks that start apart get rank 0's parameters
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=12))
        names: dict[str, Any] = {"commopt": commopt, "torch": torch, "model": model}
        exec(block.replace("period=30", "period=3, backend=backend"), {**names, "backend": backend}, names)
        names["optimizer"].synchronize()
        for step in range(3):
            tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(2 * step + backend.rank))
            names["optimizer"].zero_grad()
            model(tokens, labels=tokens).loss.backward()
            names["optimizer"].step()
        assert [len(group["params"]) for group in names["optimizer"].param_groups] == [4, 12]
        return params_of(model)

    first, second = on_threads(2, run)
    assert same_bits(first, second)


def some(n: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)) for _ in range(n)]


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (list, r"Mixed\(\) has no optimizer"),
        (lambda: [some()], "takes optimizers such as torch.optim.AdamW"),
        (lambda: [Mixed(torch.optim.Muon(some()))], "give it the optimizers of that one"),
        (lambda: [commopt.OneBitAdam(some(), backend=LocalBackend())], "cannot have OneBitAdam, which communicates"),
        (lambda: [torch.optim.LBFGS(some())], "evaluates its closure several times"),
        (lambda: [torch.optim.SGD(p, lr=1) for p in [some()] * 2], "appear in more than one parameter group"),
    ],
)
def test_bad_input(optimizers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixed(*optimizers())


def test_names_of_states_are_checked_without_a_step_of_any_optimizer(caplog: Any) -> None:
    """Of a mixture that is given with gradients, and with hooks."""
    model = {which: made(which) for which in SIZES}
    parts = [BASES[which](model[which]) for which in SIZES]
    params, called = [p for which in SIZES for p in model[which]], []
    for part in parts:
        part.register_step_post_hook(lambda *_: called.append(1))
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in params]
    for which, name in (("rest", "exp_avg"), ("hidden", "momentum_buffer")):
        optimizer = DiLoCo(Mixed(*parts), period=1, state_period={name: 1}, backend=LocalBackend())
        assert optimizer.state_period == {name: 1}, which
    with pytest.raises(
        ValueError, match=r"state of Mixed\(Muon, AdamW\) has no tensor .* allowed are exp_avg, exp_avg_sq"
    ):
        DiLoCo(Mixed(*parts), period=1, state_period={"m": 1}, backend=LocalBackend())
    assert same_bits(before, [p.detach() for p in params])
    assert not called
    assert not any(part.state for part in parts)
    assert not caplog.text


def test_what_cannot_be_done_to_a_mixture_is_refused_and_nothing_changes() -> None:
    model = Toy()
    optimizer = muloco(model)
    train(model, optimizer, range(2))
    with pytest.raises(ValueError, match=r"Mixed\(Muon, AdamW\) cannot tell which of its optimizers"):
        optimizer.add_param_group({"params": some()})
    before = tensors_in(optimizer.base.state_dict())
    state = optimizer.base.state_dict()
    state["param_groups"].reverse()
    with pytest.raises(ValueError, match=r"groups of \[6, 2\] parameters, and Mixed\(Muon, AdamW\) has groups of \[2"):
        optimizer.base.load_state_dict(state)
    assert same_bits(before, tensors_in(optimizer.base.state_dict()))
    plain = DiLoCo(Toy().parameters(), period=3, backend=LocalBackend())
    with pytest.raises(ValueError, match=r"is that of DiLoCo\(Mixed\(Muon, AdamW\)\), and this is DiLoCo\(AdamW\)"):
        plain.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="AdamW has a hyper-parameter 'period' of its own"):
        DiLoCo(Mixed(torch.optim.Muon(some()), _with_a_period()), period=3)


def _with_a_period() -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(some())
    optimizer.defaults["period"] = 3
    return optimizer


class Another(torch.optim.AdamW):
    """AdamW by another name, with the same hyper-parameters."""


@pytest.mark.parametrize("classes", [(torch.optim.SGD, torch.optim.AdamW), (Another, torch.optim.AdamW)])
def test_ranks_with_other_optimizers_are_told(classes: Any) -> None:
    def run(backend: Any) -> str:
        hidden, rest = commopt.sort_parameters(Toy(), head=["embedding"])
        with pytest.raises(ValueError, match="differ between ranks") as caught:
            DiLoCo(Mixed(torch.optim.Muon(hidden), classes[backend.rank](rest, lr=0.01)), backend=backend)
        return str(caught.value)

    assert all("rank 1" in text for text in on_threads(2, run))


# streamed -------------------------------------------------------------------------------------------------------------

LATE = [Streaming(2, 2), Streaming(3, 2, "mix"), Streaming(2, merge="eager")]
every_late = pytest.mark.parametrize("streaming", LATE, ids=["corrected", "mix", "eager"])


def ours(model: nn.Module, backend: Any, streaming: Streaming | None) -> DiLoCo:
    """MuLoCo of Muon as it is here, compressed, in several buckets."""
    hidden, rest = commopt.sort_parameters(model, head=["embedding"], rest=["pos*", "unused"])
    base = Mixed(commopt.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-2))
    settings = {"period": 6, "outer_momentum": 0.6, "compressor": Int4(64), "bucket_mb": 2e-4}
    return DiLoCo(base, backend=backend, streaming=streaming, **settings)


def test_one_fragment_without_a_delay_is_muloco_as_it_is_to_the_bit() -> None:
    def run(backend: Any) -> None:
        models = [Toy(), Toy()]
        pair = [ours(model, backend, streaming) for model, streaming in zip(models, (None, Streaming(1, 0)))]
        for step in range(14):
            for model, optimizer in zip(models, pair):
                train(model, optimizer, range(step, step + 1), backend.rank, 2)
            assert same_bits(*map(params_of, models)), step
            assert same_bits(*(tensors_in(optimizer.state_dict()) for optimizer in pair)), step

    on_threads(2, run)


Run = tuple[str, slice]
"""Whose parameters are in a bucket, and which of them."""


def streamed(backend: Any, streaming: Streaming) -> tuple[dict[str, list[nn.Parameter]], DiLoCo]:
    params = {which: made(which) for which in SIZES}
    base = Mixed(*(BASES[which](params[which]) for which in SIZES))
    optimizer = DiLoCo(base, period=4, outer_momentum=0.6, bucket_mb=1, streaming=streaming, backend=backend)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    return params, optimizer


def gradients(run: Run, step: int, rank: int) -> list[Tensor]:
    which, only = run
    return [gradient(which, step, rank, i) for i in range(len(SIZES[which]))[only]]


def streamed_on_lists(streaming: Streaming) -> tuple[list[Run], StreamingOracle]:
    """What each bucket has, and the oracle of two ranks with a piece for each."""
    params, optimizer = streamed(LocalBackend(), streaming)
    places = {id(p): (which, i) for which in SIZES for i, p in enumerate(params[which])}
    at = [[places[id(p)] for p in reversed(bucket.params)] for bucket in optimizer.buckets]
    runs = [(some[0][0], slice(some[0][1], some[-1][1] + 1)) for some in at]
    numbers = [bucket.fragment for bucket in optimizer.buckets]
    assert set(numbers) == set(range(streaming.fragments))
    oracle = StreamingOracle(
        [(p, in_order(made(which)[only]), [0]) for p, (which, only) in zip(numbers, runs)],
        "diloco", 2, 4, "sgd", {"lr": 0.7, "momentum": 0.6}, 0,
        streaming.fragments, streaming.delay, streaming.merge, streaming.alpha,
    )  # fmt: skip
    for piece, run in zip(oracle.pieces, runs):
        piece.bases = [ByHand(*run) for _ in range(2)]
    return runs, oracle


STREAMS = [Streaming(1, 2), Streaming(2, 1, "mix", 0.25), Streaming(2, merge="eager")]


@pytest.mark.parametrize("streaming", STREAMS, ids=["corrected", "mix", "eager"])
def test_streamed_muloco_is_muon_and_adamw_by_hand_and_streams_on_lists(streaming: Streaming) -> None:
    (runs, oracle), expected = streamed_on_lists(streaming), []
    for step in range(14):
        oracle.step([[in_order(gradients(run, step, rank)) for rank in range(2)] for run in runs], 0.01)
        if step == 9:
            oracle.synchronize()
        expected.append([[list(x) for x in piece.x] for piece in oracle.pieces])

    def on_rank(backend: Any) -> None:
        params, optimizer = streamed(backend, streaming)
        for step in range(14):
            for which in SIZES:
                for p, g in zip(params[which], gradients((which, slice(None)), step, backend.rank)):
                    p.grad = g
            optimizer.step()
            if step == 9:
                optimizer.synchronize()
            for (which, only), right in zip(runs, expected[step]):
                found = in_order(params[which][only])
                assert max(abs(a - b) for a, b in zip(found, right[backend.rank])) <= 1e-12, (step, which)

    on_threads(2, on_rank)


@pytest.mark.long(but="corrected")
@every_late
def test_a_streamed_run_is_resumed_in_flight_and_its_replicas_are_equal_in_the_end(streaming: Streaming) -> None:
    stops, last = (3, 4, 7), 11

    def finished(model: nn.Module, optimizer: DiLoCo) -> list[Tensor]:
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        return params_of(model)

    def straight(backend: Any) -> Any:
        model, saved = Toy(), {}
        optimizer = ours(model, backend, streaming)
        for step in range(last):
            if step in stops:
                saved[step] = through_a_file([model.state_dict(), *split_state_dict(optimizer.state_dict())])
                assert optimizer.comm_stats()["in_flight"], step
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
        return params_of(model), tensors_in(optimizer.state_dict()), finished(model, optimizer), saved

    results = on_threads(2, straight)
    assert not same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][2], results[1][2])

    def resumed(backend: Any) -> None:
        params, state, end, _ = results[backend.rank]
        for step in stops:
            model = Toy(seed=5)
            weights, replicated, _ = results[0][3][step]
            model.load_state_dict(weights)
            optimizer = ours(model, backend, streaming)
            parts = [saved[step][2] for *_, saved in results]
            optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, 2))
            train(model, optimizer, range(step, last), backend.rank, 2)
            assert same_bits(params_of(model), params), step
            assert same_bits(tensors_in(optimizer.state_dict()), state), step
            assert same_bits(finished(model, optimizer), end), step

    on_threads(2, resumed)
