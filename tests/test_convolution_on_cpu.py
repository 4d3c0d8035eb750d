"""The direct convolution of conv_sigmoid_group_norm on a CPU, at its edges, and 16 bits there."""

import itertools
from functools import partial

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, forward, in_both, poisoned
from cases import PORTABLE, SINGLE_AND_LOW, Case, build, solution
from test_convolution import STEM, case, channels_of_almost_one_value
from test_gradients import gradients
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(STEM not in PORTABLE, reason="the pair is not here")

SHAPES = [
    case("whole tiles", 2, 8, 34, 50, 3, 8, 4),
    case("an odd size", 3, 5, 37, 41, 3, 3, 5),
    case("bands of a last row", 1, 8, 33, 130, 3, 2, 4),
    case("rows longer than a band", 1, 3, 5, 1100, 3, 2, 4),
    case("one row", 2, 4, 3, 70, 3, 2, 4),
    case("as few columns as are taken", 2, 4, 9, 18, 3, 2, 4),
    case("a band that ends within a tile", 2, 2, 65, 18, 3, 1, 4),
    case("1x1 kernels", 2, 20, 17, 19, 1, 4, 6),
    case("3x5 kernels", 2, 3, 21, 40, (3, 5), 2, 4),
    case("7x7 kernels of 147 taps", 1, 3, 40, 45, 7, 2, 4),
    case("more taps than are taken", 1, 20, 20, 40, 3, 2, 4),
    case("32 groups of three channels", 1, 4, 20, 24, 3, 32, 3),
    case("groups of one channel", 2, 4, 20, 24, 3, 5, 1),
    case("slices of two groups, the last of one", 2, 4, 20, 24, 3, 3, 2),
    case("slices of two groups of six channels", 2, 4, 20, 24, 3, 4, 6),
    case("an empty batch", 0, 4, 20, 24, 3, 2, 4),
    case("many small samples", 150, 3, 10, 20, 3, 2, 4),
    case("columns too few", 2, 4, 40, 7, 3, 2, 4),
    case("more input channels than are taken", 2, 33, 12, 14, 1, 2, 4),
]
WHOLE, ODD = SHAPES[:2]

WHOLE_OPERAND = (8, 1, 1)
OPERANDS = [
    Case(STEM, f"operands of {bias} and {scale}", (3, 8, 3, 4, bias, scale), ((2, 3, 20, 26),))
    for shape in ((), (1,), (24,), (18, 24), (8, 18, 24), (2, 8, 1, 1), (1, 8, 1, 1))
    for bias, scale in ((shape, WHOLE_OPERAND), (WHOLE_OPERAND, shape), (shape, shape))
]
ACCURATE = [*itertools.product(SHAPES, SINGLE_AND_LOW), *((case, torch.float32) for case in OPERANDS)]


@pytest.mark.parametrize(("case", "dtype"), ACCURATE, ids=str)
def test_is_as_accurate_as_eager(case, dtype):
    assert_as_accurate_as_eager(forward, draws(case, "cpu", dtype))


LARGE = {  # sizes of x, output channels, rows of the convolution's kernel, groups: whether a GPU is to run our kernels
    "an ordinary image": ((2, 8, 64, 64), 32, 3, 8, True),
    "a large image": ((1, 8, 4096, 4096), 32, 3, 1, True),
    "a large image of 32 groups": ((1, 8, 4096, 4096), 32, 3, 32, True),
    "few images of 2 x 2": ((64, 8, 4, 4), 32, 3, 8, True),
    "many images of 2 x 2": ((4096, 8, 4, 4), 32, 3, 8, False),
    "many images of 16 x 16": ((4096, 8, 18, 18), 32, 3, 8, True),
    "many images of three columns": ((128, 8, 300, 5), 32, 3, 8, False),
    "many images of two channels": ((128, 8, 130, 130), 2, 3, 1, False),
    "channels beyond 32 bits": ((1, 1, 2, 2), 1 << 26, 1, 1, False),
    "columns beyond 32 bits": ((1, 1, 1, 2**31 - 40), 1, 1, 1, False),
    "partial sums that would be larger than the output": ((1 << 20, 3, 3, 3), 1024, 3, 8, False),
}


@pytest.mark.parametrize(("shape", "outs", "rows", "groups", "fits"), LARGE.values(), ids=LARGE)
def test_what_a_gpu_leaves_to_pytorch(shape, outs, rows, groups, fits, monkeypatch):
    """Asked without a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeTensorMode():
        make = partial(torch.empty, device="cuda", requires_grad=True)
        tensors = (
            make(shape),
            make(outs, shape[1], rows, rows),
            make(outs),
            *[make(outs, 1, 1)] * 2,
            *[make(outs)] * 2,
        )
    file = solution(STEM)
    assert (file.fits(tensors, groups) and not file._tiles_are_underfilled(*tensors[:2])) == fits


HARD = {
    "saturated sigmoids": in_both(lambda module: module.scale.mul_(300)),  # most of them 0 or 1
    "channels of almost one value": channels_of_almost_one_value(1.0),
    "huge inputs": lambda model, new, inputs: [inputs[0] * 1e30],
    "tiny inputs": lambda model, new, inputs: [inputs[0] * 1e-30],
}
NAMES = "x, bias, scale, W, its bias, gamma, beta".split(", ")
for value, (which, name) in itertools.product((torch.inf, -torch.inf, torch.nan), enumerate(NAMES)):
    HARD[f"{value} in {name}"] = poisoned(which, value, 1 / 3, 1)


@pytest.mark.parametrize("case", [WHOLE, ODD], ids=str)
@pytest.mark.parametrize("change", HARD)
def test_is_as_accurate_as_eager_with(case, change):
    assert_as_accurate_as_eager(forward, draws(case, "cpu", torch.float32, HARD[change]))


@torch.no_grad()
def test_a_channel_whose_gamma_times_rstd_overflows_is_nan():
    """As in PyTorch, where that product is a float; in float64 it is finite."""
    model, new, inputs = build(WHOLE)
    for module in (model, new):
        module.group_norm.weight[1] = torch.finfo(torch.float32).max
    expected = model(*inputs)
    assert expected[:, 1].isnan().all() and not expected[:, 0].isnan().any()
    assert torch.equal(new(*inputs).isnan(), expected.isnan())


@pytest.mark.parametrize("case", SHAPES, ids=str)
@torch.no_grad()
def test_the_bits_do_not_depend_on_the_threads(case):
    _, new, inputs = build(case)
    threads = torch.get_num_threads()
    outputs = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        outputs.append(new(*inputs))
    torch.set_num_threads(threads)
    if "than are taken" not in case.name and case.name != "columns too few":  # ATen's
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [WHOLE, ODD], ids=str)
def test_16_bits_are_computed_in_float32(case, dtype, monkeypatch):
    """Wherever the CPU has no instructions for them; then also the gradients are at least as accurate."""
    kernels = solution(STEM)
    monkeypatch.setattr(kernels, "_CPU_DTYPES", kernels._GPU_DTYPES)
    _, new, (x,) = build(case, dtype=dtype)
    with torch.no_grad():
        found = new(x)
        assert found.dtype == dtype and torch.equal(found, new.float()(x.float()).to(dtype))
    assert_as_accurate_as_eager(gradients, draws(case, "cpu", dtype))


@torch.no_grad()
def test_an_output_for_which_huge_pages_are_asked():
    model, new, (x,) = build(case("more than 32 MiB", 3, 1, 1002, 1002, 3, 1, 3))
    torch.testing.assert_close(new(x), model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_small_image_and_gradients_are_left_to_the_models_lines(monkeypatch):
    """Where our checks, or in 16 bits conversions, would take longer than the kernel saves."""
    kernels = solution(STEM)
    called = []
    monkeypatch.setattr(kernels, "fits", lambda *arguments: called.append(arguments) and False)
    half, single = torch.float16, torch.float32
    for dtype, samples, height, asked in ((half, 1, 8, 0), (half, 40, 8, 1), (single, 1, 8, 0), (single, 1, 40, 1)):
        called.clear()
        model, new, (x,) = build(case("images", samples, 3, height, 12, 3, 2, 4), dtype=dtype)
        assert torch.equal(new(x), model(x)) and bool(called) == asked
    called.clear()
    with torch.enable_grad():
        assert torch.equal(new(x), model(x)) and not called
