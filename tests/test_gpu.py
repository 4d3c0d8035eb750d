"""What only a GPU has: streams, CUDA graphs, several devices, every kernel's reach, tensors beyond 2^31 elements."""

from dataclasses import replace

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, largest, worst_error
from cases import (
    CASES,
    FIRST,
    LAYOUT_CASES,
    LAYOUTS,
    STEMS,
    WITH_PARAMETERS,
    Case,
    build,
    converted,
    in_dtypes,
    in_dtypes_and_layouts,
    in_float64,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]

cases = pytest.mark.parametrize("case", CASES, ids=str)
first_cases = pytest.mark.parametrize("case", FIRST, ids=str)
layout_cases = pytest.mark.parametrize("case", LAYOUT_CASES, ids=str)


@torch.no_grad()
def forward(module, inputs) -> dict[str, torch.Tensor]:
    return {"output": module(*inputs)}


# ---- streams and graphs


@layout_cases
@torch.no_grad()
def test_runs_on_the_current_stream(case):
    """The inputs become right only after a long wait on a side stream: a launch on any other stream reads them too early."""
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


@cases
@torch.no_grad()
def test_no_call_waits_for_the_device(case):
    _, new, inputs = build(case, "cuda")
    new(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        new(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@in_dtypes(LAYOUT_CASES)
@torch.no_grad()
def test_a_captured_graph_replays_on_new_inputs(case, dtype):
    _, new, inputs = build(case, "cuda", dtype)
    static = [t.clone() for t in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        new(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = new(*static)
    for seed in (1, 2):
        fresh = build(case, "cuda", dtype, seed)[2]
        for t, value in zip(static, fresh, strict=True):
            t.copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out, new(*fresh))


@first_cases
def test_a_captured_training_step(case):
    """make_graphed_callables captures forward and backward."""
    _, new, inputs = build(case, "cuda")
    samples = tuple(t.clone().requires_grad_() for t in inputs)
    plain = [t.clone().requires_grad_() for t in inputs]
    new(*plain).square().sum().backward()
    expected = [t.grad for t in plain] + [p.grad.clone() for p in new.parameters()]
    new.zero_grad()
    graphed = torch.cuda.make_graphed_callables(new, samples)
    new.zero_grad()
    leaves = [t.clone().requires_grad_() for t in inputs]
    graphed(*leaves).square().sum().backward()
    for ours, theirs in zip([t.grad for t in leaves] + [p.grad for p in new.parameters()], expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---- devices


@first_cases
@torch.no_grad()
def test_agrees_with_the_cpu(case):
    """Both within eager's own distance of the float64 result."""
    model, new, inputs = build(case, "cpu")
    right = in_float64(model)(*converted(inputs, dtype=torch.float64))
    on_cpu = new(*inputs)
    on_gpu = new.cuda()(*converted(inputs, device="cuda")).cpu()
    assert worst_error(on_gpu, right) <= 1e-5 * max(1, largest(right))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-4, atol=1e-5 * max(1, largest(right)))


@first_cases
@torch.no_grad()
def test_runs_on_the_inputs_device_while_another_is_current(case):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    _, new, inputs = build(case, "cuda:1")
    with torch.cuda.device(1):
        expected = new(*inputs)
    assert torch.cuda.current_device() == 0
    out = new(*inputs)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("stem", WITH_PARAMETERS)
@pytest.mark.parametrize(("weights", "data"), [("cpu", "cuda"), ("cuda", "cpu")], ids=["weights on the cpu", "inputs on the cpu"])
def test_inputs_on_another_device_are_refused_in_words(stem, weights, data):
    _, new, inputs = build(next(c for c in FIRST if c.stem == stem))
    with pytest.raises(RuntimeError, match="device|cpu|cuda"):
        new.to(weights)(*converted(inputs, device=data))


# ---- every kernel: slices from two values to many times what fits on chip

# fmt: off
IMAGES = [  # samples, height, width; three channels
    (300, 4, 8), (300, 5, 7), (50, 32, 32), (1000, 32, 32), (1000, 32, 64), (50, 33, 31), (20, 64, 64), (20, 127, 129), (9, 128, 128),
    (9, 181, 181), (5, 256, 256), (5, 255, 257), (100, 256, 256), (13, 512, 512), (3, 511, 513), (2, 724, 724), (7, 768, 1024),
    (2, 1024, 1024), (1, 1023, 1025), (1, 2048, 2048), (1, 2047, 2049),
]
ROWS = [  # rows, input features, output features
    (300, 16, 32), (300, 17, 33), (300, 16, 200), (200, 64, 1024), (128, 512, 4096), (128, 256, 4097), (64, 256, 8192), (64, 8, 8191),
    (32, 8, 16384), (16, 8, 32768), (16, 8, 65536), (16, 8, 65537), (3, 4, 1 << 20), (3, 4, (1 << 20) + 1),
]
GROUPED_ROWS = [  # rows, input features, groups, features of a group
    (300, 16, 8, 4), (300, 17, 3, 11), (300, 16, 64, 1), (200, 64, 64, 64), (128, 512, 32, 128), (128, 64, 62, 66), (64, 64, 8, 1024),
    (64, 8, 1, 8191), (32, 8, 1, 16384), (16, 8, 2, 32768), (16, 8, 1, 65537), (3, 4, 1, 1 << 20),
]
CONVOLVED = [  # samples, input channels, height, width, kernel size, groups, channels of a group
    (300, 3, 6, 6, 3, 4, 2), (50, 8, 34, 34, 3, 8, 4), (20, 8, 66, 66, 3, 8, 4), (9, 8, 130, 130, 3, 8, 4), (4, 8, 256, 256, 3, 8, 4),
    (4, 8, 255, 257, 3, 8, 4), (4, 8, 256, 256, 3, 1, 32), (3, 8, 256, 256, 3, 32, 1), (3, 4, 512, 512, 5, 2, 8), (2, 3, 1024, 1023, 1, 3, 2),
    (20, 8, 256, 256, 3, 8, 4), (2, 64, 56, 56, 3, 32, 4),
]
# fmt: on
LARGE = [
    *(Case("instance_norm", f"{3 * n} slices of {h} x {w}", (3,), ((n, 3, h, w),)) for n, h, w in IMAGES),
    Case("instance_norm", "300000 slices of 2 x 4", (30,), ((10000, 30, 2, 4),)),
    Case("instance_norm", "5 slices of 1448 x 1448", (5,), ((1, 5, 1448, 1448),)),
    # Read twice. Of even sizes: beyond 2^24 values ATen's float64, the judge here, counts them in float32.
    *(Case("instance_norm", f"1 slice of {h} x {w}", (1,), ((1, 1, h, w),)) for h, w in [(4244, 4244), (4242, 4245)]),
    *(Case("linear_instance_norm_residual", f"{b} rows of {f}", (k, f), ((b, k), (b, f))) for b, k, f in ROWS),
    *(
        Case("linear_swish_group_norm", f"{b} rows of {g} groups of {size}", (k, g * size, g, (g * size,)), ((b, k),))
        for b, k, g, size in GROUPED_ROWS
    ),
    *(
        Case(
            "conv_sigmoid_group_norm",
            f"{n} samples of {h} x {w}, {k}x{k} kernels and {g} groups of {size} channels",
            (c, g * size, k, g, (g * size, 1, 1), (g * size, 1, 1)),
            ((n, c, h, w),),
        )
        for n, c, h, w, k, g, size in CONVOLVED
    ),
]
LARGE = [case for case in LARGE if case.stem in STEMS]
large_cases = pytest.mark.parametrize("case", LARGE, ids=str)


@in_dtypes_and_layouts(LARGE, ["contiguous", "offset by one element", "channels_last"])
def test_every_kernel_is_as_accurate_as_eager(case, layout, dtype):
    samples = draws(case, "cuda", dtype, lambda model, new, inputs: [LAYOUTS[layout](t) for t in inputs])
    assert_as_accurate_as_eager(forward, samples)


@large_cases
@torch.no_grad()
def test_repeated_calls_give_the_same_bits(case):
    """Races show as bits that differ now and then."""
    _, new, inputs = build(case, "cuda")
    first = new(*inputs)
    for _ in range(20):
        assert torch.equal(new(*inputs), first)


@in_dtypes([case for case in CASES if case.values < 1e5])
@torch.no_grad()
def test_nothing_is_written_beside_the_output(case, dtype):
    """The output lands in one of several gaps of just its size; what stands between the gaps must keep its value."""
    _, new, inputs = build(case, "cuda", dtype)
    expected = new(*inputs)
    size = max(expected.numel() * expected.element_size(), 1)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.full((size,), 77, dtype=torch.uint8, device="cuda") for _ in range(17)]
        neighbours, places = blocks[::2], {block.data_ptr() for block in blocks[1::2]}
        del blocks
        out = new(*inputs)
        assert out.numel() == 0 or out.data_ptr() in places
    assert all(bool((block == 77).all()) for block in neighbours)
    assert torch.equal(out, expected)
    del neighbours, out  # before their pool


@first_cases
@torch.no_grad()
def test_tf32_is_used_only_where_the_user_allows_it(case, monkeypatch):
    """Allowed, the error may be eager's with TF32; forbidden again, it is float32's."""
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        assert_as_accurate_as_eager(forward, draws(case, "cuda", torch.float32))


# ---- more than 2^31 elements

HUGE = [
    Case("instance_norm", "two slices with 2^31 elements", (1,), ((2, 1, 32768, 32769),)),
    Case("instance_norm", "one slice with 2^31 elements", (1,), ((1, 1, 46341, 46343),)),
    Case("instance_norm", "small slices with 2^31 elements", (16,), ((2097153, 16, 8, 8),)),
    Case("linear_instance_norm_residual", "2^31 elements", (8, 4096), ((524289, 8), (524289, 4096))),
    Case("linear_swish_group_norm", "2^31 elements", (8, 4096, 64, (4096,)), ((524289, 8),)),
    Case("conv_sigmoid_group_norm", "2^31 elements", (1, 32, 3, 8, (32, 1, 1), (32, 1, 1)), ((1025, 1, 258, 258),)),
]


@pytest.mark.parametrize("case", [case for case in HUGE if case.stem in STEMS], ids=str)
@torch.no_grad()
def test_more_than_2_to_the_31_elements(case):
    """In float16, the first and last samples against the same ones alone: an index of 32 bits wraps before it reaches the last."""
    torch.cuda.empty_cache()
    needed = 40 * 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    model, new, _ = build(replace(case, shapes=((1,),)), "cuda", torch.float16)
    inputs = [torch.rand(shape, device="cuda", dtype=torch.float16) for shape in case.shapes]
    out = new(*inputs)
    assert out.numel() > 2**31
    for sample in (slice(0, 1), slice(-1, None)):
        with torch.backends.cudnn.flags(enabled=False):  # PyTorch's own kernels count in 64 bits
            alone = in_float64(model).float()(*[t[sample].float() for t in inputs])
        torch.testing.assert_close(out[sample].float(), alone, rtol=1e-2, atol=1e-2)
