"""Measures what a step of each optimizer costs on a GPU without any network, beside torch.optim.AdamW.

    python scripts/bench_gpu_step.py [--ranks 8] [--json benchmarks/gpu_step.json]

One process. The other ranks are copies of this one: a collective copies on the GPU what would come from them, so that
every kernel and every line of Python of a step of ``--ranks`` ranks runs. Models: GPT-2 (124 M parameters in 148
tensors), and 2,000 tensors of 256 elements. "host" is the time until step() returns, "step" that until the GPU has done
it; of compressed gradients it is backward() (of a sum, so nearly nothing else) and AdamW(fused=True) together.
Then GPT-2 as it trains: forward, backward and step together, in bfloat16 by autocast.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_step import gpt_shapes
from torch import Tensor, nn

import commopt
from commopt.comm.backend import Done, Work
from commopt.comm.receipt import Receipt
from commopt.compress import ACP, Int4, Int8, PowerSGD, Sign, TopK

Step = Callable[[], object]


class Echo:
    """Ranks that all have what this one has; only that sums of what they sent come to nothing is not so."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size

    def all_reduce(self, x: Tensor) -> Work:
        return Done()

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        out.copy_(inp[:1].expand_as(out))
        return Done()

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        out.copy_(inp.expand_as(out))
        return Done()

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return Done()

    def channels(self, n: int) -> list[Echo]:
        return [self] * n

    def control(self) -> Echo:
        return self


def believe() -> None:
    """Receipts are made out and added up, but not looked at."""
    balance = Receipt.balance

    def nothing(receipt: Receipt) -> int:
        balance(receipt)
        return 0

    Receipt.balance = nothing  # type: ignore[method-assign]


SAMPLES = 8
TRAINED = f"GPT-2, {SAMPLES} samples of 1024 tokens"
MODELS = {"GPT-2": gpt_shapes(768, 12, 50257, 1024), "2,000 tensors of 256": [(256,)] * 2000}


class Given(nn.Module):
    """Parameters of these shapes; its value is a sum, whose gradients cost one pass."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape, device="cuda") * 0.02 for shape in shapes)
        self.given = [torch.randn(shape, device="cuda") * 1e-2 for shape in shapes]

    def gradients(self) -> None:
        for p, g in zip(self.all, self.given):
            p.grad = g

    def backward(self) -> None:
        torch.autograd.backward(list(self.all), self.given)


def steps(shapes: list[tuple[int, ...]], ranks: int) -> dict[str, Callable[[], Step]]:
    """What is measured, by name; each is made when its turn comes, because of the memory."""

    def optimizer(make: Callable[..., Any], **more: Any) -> Callable[[], Step]:
        def made() -> Step:
            model = Given(shapes)
            model.gradients()
            return make(model.parameters(), lr=1e-4, **more).step

        return made

    def ours(make: Callable[..., Any], **more: Any) -> Callable[[], Step]:
        return optimizer(make, backend=Echo(ranks), **more)

    def gradients(compressor: Any) -> Callable[[], Step]:
        def made() -> Step:
            model = Given(shapes)
            if compressor is not None:
                commopt.compress_gradients(model, compressor, backend=Echo(ranks))
            end = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

            def step() -> None:
                end.zero_grad()
                model.backward()
                end.step()

            return step

        return made

    quick = {"freeze_step": 2, "betas": (0.9, 0.5)}
    return {
        "AdamW(fused=True)": optimizer(torch.optim.AdamW, fused=True),
        "AdamW(foreach=True)": optimizer(torch.optim.AdamW, foreach=True),
        "OneBitAdam, warm-up": ours(commopt.OneBitAdam, freeze_step=10**6),
        "OneBitAdam": ours(commopt.OneBitAdam, **quick),
        "OneBitLamb": ours(commopt.OneBitLamb, **quick),
        "ZeroOneAdam": ours(commopt.ZeroOneAdam),
        "backward, AdamW(fused=True)": gradients(None),
        **{f"  means by {c!r}": gradients(c) for c in (Sign(), Int8(), Int4(), TopK(), PowerSGD(4), ACP(4))},
    }


def trainings(ranks: int) -> dict[str, Callable[[], Step]]:
    """Whole steps of GPT-2, by name."""
    from commopt.train.config import ModelConfig
    from commopt.train.models import GPT

    length, vocabulary = 1024, 50304

    def trained(make: Callable[..., Any], compressor: Any = None, **more: Any) -> Callable[[], Step]:
        def made() -> Step:
            model = GPT(ModelConfig(layers=12, heads=12, width=768), vocabulary, length).cuda()
            if compressor is not None:
                commopt.compress_gradients(model, compressor, backend=Echo(ranks))
            optimizer = make(model.parameters(), lr=1e-5, **more)
            inputs, labels = torch.randint(0, vocabulary, (2, SAMPLES, length), device="cuda")

            def step() -> None:
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(inputs, labels)
                loss.backward()
                optimizer.step()

            return step

        return made

    def ours(make: Callable[..., Any], **more: Any) -> Callable[[], Step]:
        return trained(make, backend=Echo(ranks), **more)

    quick = {"freeze_step": 2, "betas": (0.9, 0.5)}
    return {
        "AdamW(fused=True)": trained(torch.optim.AdamW, fused=True),
        "OneBitAdam, warm-up": ours(commopt.OneBitAdam, freeze_step=10**6),
        "OneBitAdam": ours(commopt.OneBitAdam, **quick),
        "OneBitAdam(overlap=True)": ours(commopt.OneBitAdam, overlap=True, **quick),
        "OneBitLamb": ours(commopt.OneBitLamb, **quick),
        "ZeroOneAdam": ours(commopt.ZeroOneAdam),
        "DiLoCo, local steps": ours(commopt.DiLoCo, fused=True),
        **{f"  means by {c!r}": trained(torch.optim.AdamW, c, fused=True) for c in (Sign(), Int4(), PowerSGD(4))},
    }


def measured(step: Step, repeats: int) -> tuple[float, float]:
    """Milliseconds of the host, and until the GPU has done it: medians."""
    for _ in range(6):
        step()
    host, whole = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return 1e3 * statistics.median(host), 1e3 * statistics.median(whole)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="ranks, of which this is one (default: 8)")
    parser.add_argument("--repeats", type=int, default=20, help="steps of which the median is taken (default: 20)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    arguments = parser.parse_args()
    logging.getLogger("commopt").setLevel(logging.ERROR)  # all ranks have the same gradients, indeed
    believe()
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": arguments.ranks}
    print(facts)
    tables: dict[str, Any] = {}
    all_steps = {model: steps(shapes, arguments.ranks) for model, shapes in MODELS.items()}
    for model, of_model in {**all_steps, TRAINED: trainings(arguments.ranks)}.items():
        print(f"\n{model}\n{'':<34}{'host ms':>9}{'step ms':>9}")
        rows = tables[model] = {}
        for name, make in of_model.items():
            host, whole = measured(make(), arguments.repeats)
            rows[name] = {"host_ms": host, "step_ms": whole}
            print(f"{name:<34}{host:>9.2f}{whole:>9.2f}", flush=True)
            torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(facts | {"models": tables}, file, indent=1)


if __name__ == "__main__":
    main()
