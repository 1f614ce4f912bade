"""What needs a GPU: the checks of cuda_checks.py on it, streams, graphs, and steps of the optimizer.

Tests with "small" in their name are those that scripts/gpu_check.sh runs under compute-sanitizer.
"""

from __future__ import annotations

import cuda_checks as checks
import integer_checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import BLOCKS, FLAVOURS, bits_equal, new_payload, same
from torch import nn
from worlds import on_threads

import commopt
from commopt import ops
from commopt.ops import cuda_module

SERVED = cuda_module.provider() == "cupy"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not SERVED, reason=f"no CuPy: install {cuda_module.extra()}"),
]

F64 = torch.float64
RUN, GPU = torch.ops.commopt, torch.device("cuda", 0)
MASKS = ["none", "none", "some", "blocks", "all", "inactive"]
LENGTHS = st.one_of(st.integers(1, 40), st.integers(41, 400), st.sampled_from([2049, 4096, 8193, 40_007, 300_001]))
ALL_BLOCKS = st.sampled_from([*BLOCKS, 264, 4096, 8192, 8200, 100_000])
SIZES = st.sampled_from([[1, 5, 16, 700, 30_000], [300, 5000]])
many = settings(max_examples=80, deadline=None, derandomize=True)
rows, seeds, norms = st.integers(1, 4), st.integers(0, 2**32 - 1), st.sampled_from([1, 2])
flavours, masks = st.sampled_from(FLAVOURS), st.sampled_from(MASKS)


def test_the_providers_are_those_of_cupy():
    casts = {"bf16_compress_momentum", "bf16_reduce", "bf16_decompress_to"}  # torch's own do, on a GPU
    assert {name for name, by_device in ops.report().items() if by_device.get("cuda") != "cupy"} == casts


@many
@given(rows=rows, n=LENGTHS, block=ALL_BLOCKS, norm=norms, flavour=flavours, mask=masks, seed=seeds)
def test_sign(**case):
    checks.check_sign(RUN, GPU, **case)


@many
@given(rows=rows, n=LENGTHS, block=ALL_BLOCKS, norm=norms, flavour=flavours, mask=masks, seed=seeds, sizes=SIZES)
def test_momentum_and_compression_in_one(**case):
    checks.check_momentum(RUN, GPU, **case)


@many
@given(rows=rows, n=LENGTHS, block=ALL_BLOCKS, mask=masks, seed=seeds, sizes=SIZES, layouts=st.booleans())
def test_decompression_and_frozen_adam(**case):
    checks.check_adam(RUN, GPU, **case)


@many
@given(**integer_checks.ANY)
def test_integers(**case):
    integer_checks.check(RUN, GPU, **case)


@many
@given(**integer_checks.COLUMNS)
def test_columns_of_integers(**case):
    integer_checks.check_columns(RUN, GPU, **case)


@pytest.mark.parametrize("n", [1, 40, 2049, 9001])
@pytest.mark.parametrize("block", [0, 8, 2048])
def test_small_operators(n, block):
    case = {"rows": 2, "n": n, "block": block, "mask": "some", "seed": n}
    checks.check_sign(RUN, GPU, norm=2, flavour="normal", **case)
    checks.check_momentum(RUN, GPU, norm=1, flavour="sparse", sizes=[1, 16, 700], **case)
    checks.check_adam(RUN, GPU, sizes=[1, 16, 700], **case)
    checks.check_masks(RUN, GPU, n)


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (64, 72), (1000, 3005), (200, 2704)])
def test_small_columns(start, stop):
    for block in (0, 64, 2048):
        for sizes in ([1, 60, 700, 2000], [20]):
            checks.check_columns(RUN, GPU, block, 2, start, stop, seed=block + start, sizes=sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_small_square_sum(dtype):
    checks.check_square_sum(RUN, GPU, dtype)


@pytest.mark.parametrize("block", [16, 128, 256, 1024])
def test_small_integers(block):
    for bits, rotated in ((8, False), (4, True), (2, True)):
        case = {"rows": 2, "n": 1300, "bits": bits, "block": block, "flavour": "normal", "mask": "some", "bad": None}
        integer_checks.check(RUN, GPU, **case, rotated=rotated, stochastic=bits == 8, seed=3)


@pytest.mark.parametrize("shape", [(4, 256), (40, 2048), (100, 16384)])
def test_small_top_k(shape):
    checks.check_top_k(RUN, GPU, 2, 17_001, shape, 2, "normal", "some", 1)


def test_small_threshold():
    checks.check_threshold(RUN, GPU, 2, 70_001, 0.01, 20, "normal", "some", 1)


@pytest.mark.parametrize("bits", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("shape", [(4, 256), (3, 16), (40, 2048), (100, 65536)])
def test_top_k(shape, bits):
    for seed, (flavour, mask, n) in enumerate(
        [("normal", "some", 70_001), ("ties", "none", 3000), ("sparse", "blocks", 999)]
    ):
        checks.check_top_k(RUN, GPU, 2, n, shape, bits, flavour, mask, seed)


@pytest.mark.parametrize("part", [0.001, 0.01, 0.5])
def test_threshold(part):
    for seed, (flavour, mask, n) in enumerate(
        [("normal", "some", 270_001), ("ties", "none", 3000), ("sparse", "blocks", 999), ("wild", "none", 70_000)]
    ):
        for rounds in (3, 20, 32):
            checks.check_threshold(RUN, GPU, 2, n, part, rounds, flavour, mask, seed)


def test_more_ranks_than_lanes():
    checks.check_many_ranks(RUN, GPU)


def compressed_step(x):
    """Every operator that a compressed step calls, on what :func:`state` gave; the results."""
    ops.sign_compress_momentum(x["m"], [x["g"]], [0], 0.9, 0.1, x["error"], x["error"], x["payloads"], 2048, 2)
    ops.sign_reduce(x["payloads"], x["server"], x["server"], x["own"], 2048, 2)
    x["payloads"].copy_(x["own"].expand_as(x["payloads"]))
    ops.sign_decompress_adam_(x["payloads"], x["m"], x["v"], [x["p"]], [0], [0.1], [0.5], 1e-8, 0.99, 2048)
    ops.sign_compress_with_feedback(x["m"].view(2, -1), x["error"].view(2, -1), x["whole"], 0, 2)
    x["norm"].copy_(ops.square_sum([x["m"], x["error"]]))


def state(device):
    generator, n = torch.Generator().manual_seed(0), 20_000
    x = {name: torch.rand(n, generator=generator) - 0.3 for name in ("m", "v", "p", "g", "error")}
    x |= {"v": x["v"].abs(), "g": x["g"].bfloat16(), "server": torch.zeros(n // 2), "norm": torch.zeros((), dtype=F64)}
    x |= {
        "payloads": new_payload(2, n // 2, 2048),
        "own": new_payload(1, n // 2, 2048)[0],
        "whole": new_payload(2, n // 2, 0),
    }
    return {name: tensor.to(device) for name, tensor in x.items()}


def results_of(x):
    return {name: tensor.cpu() for name, tensor in x.items()}


def equal(a, b):
    return all(same(a[name], b[name]) for name in a)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    x = state(GPU)
    compressed_step(x)  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        compressed_step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_repeats_the_step():
    x, y = state(GPU), state(GPU)
    for _ in range(4):
        compressed_step(x)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # once before a capture, as torch asks for
        compressed_step(y)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        compressed_step(y)
    for _ in range(3):
        graph.replay()
    assert equal(results_of(x), results_of(y))


def test_kernels_run_on_the_current_stream():
    x, y, side = state(GPU), state(GPU), torch.cuda.Stream()
    compressed_step(x)
    later = y["m"].clone()
    y["m"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        y["m"].copy_(later)
        compressed_step(y)
    side.synchronize()
    assert equal(results_of(x), results_of(y))


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, y = state(GPU), state(torch.device("cuda", 1))
    compressed_step(x)
    compressed_step(y)
    assert equal(results_of(x), results_of(y))


def test_a_block_of_more_tiles_than_one_thread_adds_up():
    checks.check_many_tiles(RUN, GPU, 30_000_001)


def test_wrong_arguments_are_named():
    payload, x = torch.empty(1, 16, dtype=torch.uint8), torch.ones(1, 8, device=GPU)
    with pytest.raises(ValueError, match=r"payload must be .* on cuda:0, got .* on cpu"):
        ops.sign_compress(x, payload, 0, 2)
    with pytest.raises(ValueError, match=r"active must be .* on cuda:0, got .* on cpu"):
        ops.sign_compress(x, payload.to(GPU), 0, 2, torch.ones(1, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="x must be float32 or float64"):
        ops.sign_compress(x.half(), payload.to(GPU), 0, 2)
    with pytest.raises(ValueError, match="grads must be floating and on cuda:0"):
        ops.momentum(x[0], [torch.ones(8)], [0], 0.9, 0.1, x[0])


def train(rank, device, **arguments):
    """The parameters after 12 steps, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 200), nn.Tanh(), nn.Linear(200, 7)).to(device)
    model[2].bfloat16()
    optimizer = commopt.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=4, **arguments)
    generator, losses = torch.Generator().manual_seed(rank), []
    target = torch.randn(33, 7, generator=torch.Generator().manual_seed(9)).to(device)
    for _ in range(12):
        x = torch.randn(64, 33, generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model[2](model[1](model[0](x)).bfloat16()).float(), x @ target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.phase == "compressed"
    return [p.detach().clone() for p in model.parameters()], losses


@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_train_on_one_gpu(overlap):
    (first, losses), (second, _) = on_threads(
        2, lambda backend: train(backend.rank, GPU, backend=backend, overlap=overlap)
    )
    assert all(bits_equal(a.cpu(), b.cpu()) for a, b in zip(first, second))
    assert losses[-1] < losses[0]
