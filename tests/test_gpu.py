"""What only a GPU has: streams, CUDA graphs, several devices, every kernel's reach, tensors beyond 2^31 elements."""

from dataclasses import replace

import pytest
import test_convolution as convolution
import test_linear_products as products
import torch
from accuracy import assert_as_accurate_as_eager, draws, forward
from cases import CASES, LAYOUT_CASES, STEMS, Case, build, captured, each, first_cases, for_each_file, learning_cases
from test_instance_norm import EVERY_SIZE as SLICES
from test_training import output_and_gradients

pytestmark = pytest.mark.gpu

# Rows and groups that the tests of products leave out: they end in a kernel of their own.
ROWS = [(300, 32, 16), (300, 200, 16), (128, 4096, 512), (64, 8192, 256), (32, 16384, 8), (16, 65536, 8)]
GROUPS = [(300, 64, 16, 8), (200, 4096, 64), (128, 4096, 512, 128), (64, 128, 64, 16), (32, 32, 8, 32), (64, 65536, 8)]
TAILS = [products.rows(3, 2**20, 4), *(products.rows(*sizes) for sizes in ROWS)]
TAILS += [products.groups(*sizes) for sizes in GROUPS]
# Every kernel of every pair is launched by one of these; tests/tools/sanitize.py runs them too.
LARGE = [case for case in [*SLICES, *convolution.SHAPES, *TAILS, *products.CASES, *products.ODD] if case.stem in STEMS]
# These take the fast path with and without gradients.
FAST = [*SLICES[::6], convolution.FEW, convolution.BENCHMARK, *products.CASES, *products.TRAINED[:3:2], products.SMALL]
FAST = [(case, torch.float32) for case in FAST if case.stem in STEMS]
FAST += [(case, torch.bfloat16) for case, _ in FAST if "linear_swish_group_norm" in case.stem]


@pytest.mark.parametrize("case", LAYOUT_CASES + products.CASES, ids=str)
@torch.no_grad()
def test_runs_on_the_current_stream(case, deterministic):
    """The inputs become right after a long wait on a side stream: a launch on any other stream reads them too early."""
    _, new, inputs = build(case, "cuda")
    expected = new(*inputs)
    late = [torch.full_like(t, torch.nan) for t in inputs]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for t, value in zip(late, inputs, strict=True):
            t.copy_(value)
        out = new(*late)
    assert not side.query()  # and the call did not wait for it
    side.synchronize()
    assert torch.equal(out, expected)


@first_cases
def test_backward_runs_on_the_forwards_stream(case):
    _, new, inputs = build(case, "cuda")
    expected = [t.clone().requires_grad_() for t in inputs]
    new(*expected).square().sum().backward()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late = [t.clone().requires_grad_() for t in inputs]
        new(*late).square().sum().backward()
    side.synchronize()
    for ours, theirs in zip(late, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
@torch.no_grad()
def test_gives_the_same_bits_each_time_without_waiting_for_the_device(case, deterministic):
    """Races show as bits that differ now and then."""
    _, new, inputs = build(case, "cuda")
    first = new(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [new(*inputs) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(other, first) for other in others)


@products.on_hopper
@pytest.mark.parametrize(("case", "dtype"), FAST, ids=str)
def test_the_forward_is_the_same_to_the_bit_with_and_without_gradients(case, dtype, deterministic):
    """Also in a checkpoint, which runs it without them first, and then once more with them."""
    _, new, inputs = build(case, "cuda", dtype)
    expected = output_and_gradients(new, inputs)
    again = output_and_gradients(new, inputs, reentrant=True)
    assert all(map(torch.equal, again, expected))
    with torch.no_grad():
        assert torch.equal(new(*inputs), expected[0])


@each(LAYOUT_CASES + products.CASES, most_on_cpu=0)
@torch.no_grad()
def test_a_captured_graph_replays_on_new_inputs(case, dtype, device):
    _, new, inputs = build(case, device, dtype)
    static = [t.clone() for t in inputs]
    graph, _, out = captured(lambda: new(*static))
    for seed in (1, 2):
        fresh = build(case, device, dtype, seed)[2]
        for t, value in zip(static, fresh, strict=True):
            t.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, new(*fresh))


@pytest.mark.parametrize(("case", "dtype"), FAST, ids=str)
def test_runs_on_the_inputs_device_while_another_is_current(case, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    _, new, inputs = build(case, "cuda:1", dtype)
    found = output_and_gradients(new, inputs)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = output_and_gradients(new, inputs)
    assert all(x.device == torch.device("cuda:1") for x in found)
    assert all(map(torch.equal, found, expected))


@learning_cases
@pytest.mark.parametrize(("weights", "data"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_inputs_on_another_device_are_refused_in_words(case, weights, data):
    _, new, inputs = build(case)
    with pytest.raises(RuntimeError, match=r"device|cpu|cuda"):
        new.to(weights)(*[t.to(data) for t in inputs])


@each([case for case in CASES if case.values < 1e5] + products.CASES, most_on_cpu=0)
@torch.no_grad()
def test_nothing_is_written_beside_the_output(case, dtype, device, deterministic):
    """The output lands in one of several gaps of just its size; what stands between the gaps must keep its value."""
    _, new, inputs = build(case, device, dtype)
    expected = new(*inputs)
    size = max(expected.numel() * expected.element_size(), 1)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.full((size,), 77, dtype=torch.uint8, device="cuda") for _ in range(33)]
        neighbours = blocks[::2]
        del blocks
        out = new(*inputs)
    assert all(bool((block == 77).all()) for block in neighbours)
    assert torch.equal(out, expected)
    del neighbours, out  # before their pool


def peak_memory(module, inputs, recorded: bool) -> int:
    """Bytes beyond those there were, of the second of two passes: forward, or forward and backward."""

    def run():
        leaves = [t.detach().requires_grad_(recorded) for t in inputs]
        with torch.set_grad_enabled(recorded):
            out = module(*leaves)
        if recorded:
            torch.autograd.grad(out, [*leaves, *module.parameters()], torch.ones_like(out))

    run()
    one = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(one.clone(), one)  # autograd's thread keeps a call's gradients until it has another to do
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


IMAGES = Case("instance_norm", "16 x 64 x 512 x 512", (64,), ((16, 64, 512, 512),))
TINY = Case("conv_sigmoid_group_norm", "6 x 6", (8, 32, 3, 8, (32, 1, 1), (32, 1, 1)), ((65536, 8, 6, 6),))
WEIGHED = [case for case in (IMAGES, TINY, convolution.BENCHMARK, *products.BENCHMARKS) if case.stem in STEMS]


@pytest.mark.parametrize("case", WEIGHED, ids=str)
@pytest.mark.parametrize("recorded", [False, True], ids=["forward", "forward and backward"])
def test_takes_no_more_memory_than_eager(case, recorded):
    """But for what a product's forward makes of its operands, fp16 pieces (four bytes a value) and scales (eight bytes
    a row), and what slices' sums take."""
    model, new, inputs = build(case, "cuda")
    ours, eagers = (peak_memory(module, inputs, recorded) for module in (new, model))
    split = [inputs[0], *(m.weight for m in new.children() if isinstance(m, torch.nn.Linear))]
    pieces = sum(4 * t.numel() + 8 * len(t) for t in split) if len(split) > 1 and not recorded else 0
    assert ours <= 1.001 * eagers + pieces, f"{ours} bytes, {eagers} by eager"


@pytest.mark.parametrize("case", TAILS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_norms_of_any_width_are_as_accurate_as_eager(case, dtype):
    assert_as_accurate_as_eager(forward, draws(case, "cuda", dtype))


HUGE = for_each_file(
    [
        Case("instance_norm", "two slices with 2^31 elements", (1,), ((2, 1, 32768, 32769),)),
        Case("instance_norm", "one slice with 2^31 elements", (1,), ((1, 1, 46341, 46343),)),
        Case("instance_norm", "slices of 1 MiB with 2^31 elements", (1,), ((4097, 1, 512, 1024),)),
        Case("instance_norm", "small slices with 2^31 elements", (16,), ((2097153, 16, 8, 8),)),
        Case("linear_instance_norm_residual", "2^31 elements", (8, 4096), ((524289, 8), (524289, 4096))),
        Case("linear_swish_group_norm", "2^31 elements", (8, 4096, 64, (4096,)), ((524289, 8),)),
        Case("conv_sigmoid_group_norm", "2^31 elements", (1, 32, 3, 8, (32, 1, 1), (32, 1, 1)), ((1025, 1, 258, 258),)),
    ]
)


def skip_without_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.parametrize("case", [case for case in HUGE if case.stem in STEMS], ids=str)
@torch.no_grad()
def test_more_than_2_to_the_31_elements(case):
    """In float16, the first and last samples as if alone: an index of 32 bits wraps before it reaches the last."""
    skip_without_memory(40)
    model, new, _ = build(replace(case, shapes=((1,),)), "cuda", torch.float16)
    inputs = [torch.rand(shape, device="cuda", dtype=torch.float16) for shape in case.shapes]
    out = new(*inputs)
    model.float()
    assert out.numel() > 2**31
    for sample in (slice(0, 1), slice(-1, None)):
        with torch.backends.cudnn.flags(enabled=False):  # PyTorch's own kernels count in 64 bits
            alone = model(*[t[sample].float() for t in inputs])
        torch.testing.assert_close(out[sample].float(), alone, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", [case for case in HUGE if case.stem == "instance_norm"], ids=str)
def test_gradients_of_more_than_2_to_the_31_elements(case):
    """By the formula: PyTorch's own gradient of one such slice reads beyond its end."""
    skip_without_memory(64)
    _, new, _ = build(replace(case, shapes=((1,),)), "cuda", torch.float16)
    x, grad = (torch.rand(case.shapes[0], device="cuda", dtype=torch.float16) for _ in range(2))
    (out,) = torch.autograd.grad(new(x.requires_grad_()), x, grad)

    def mean(values):
        return values.mean((2, 3), keepdim=True, dtype=torch.float64).float()

    for sample in (slice(0, 1), slice(-1, None)):
        deviation, g = x[sample].detach().float(), grad[sample].float()
        deviation -= mean(deviation)
        rstd = (mean(deviation.square()) + 1e-5).rsqrt()
        right = (g - mean(g) - deviation * (rstd.square() * mean(deviation * g))) * rstd
        assert (out[sample] - right).abs().max() <= 1e-2
