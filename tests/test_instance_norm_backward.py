"""The gradient of instance_norm: every kernel of both directions, forced by the slice's size, against the Model's in float64."""

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws
from cases import DTYPES, LAYOUTS, Case, build, in_dtype, solution
from torch.autograd.graph import saved_tensors_hooks

STEM = "instance_norm"

# fmt: off
SMALL = [  # samples, height, width; three channels
    (301, 1, 2), (300, 1, 3), (301, 2, 2), (301, 2, 4), (300, 3, 3), (100, 4, 4), (100, 5, 5), (50, 7, 7), (50, 8, 8),
    (33, 11, 11), (20, 14, 14), (20, 15, 17), (20, 16, 16), (9, 31, 31), (9, 32, 32), (9, 33, 33), (5, 32, 64), (5, 45, 45), (3, 64, 64),
    (3, 71, 73),
]
LARGE = [
    (300, 33, 33), (50, 64, 64), (20, 90, 90), (20, 127, 129), (9, 128, 128), (9, 181, 181), (5, 256, 256), (5, 255, 257), (50, 256, 256),
    (13, 512, 512), (3, 511, 513), (3, 724, 724), (3, 768, 1024), (2, 1024, 1024), (1, 1023, 1025), (1, 2048, 2048), (1, 2047, 2049),
    (2, 1448, 1448), (1, 3001, 3001),
]
# fmt: on


def case_of(images: int, height: int, width: int) -> Case:
    return Case(STEM, f"{3 * images} slices of {height} x {width}", (3,), ((images, 3, height, width),))


small_cases = pytest.mark.parametrize("case", [case_of(*shape) for shape in SMALL], ids=str)
large_cases = pytest.mark.parametrize("case", [case_of(*shape) for shape in LARGE], ids=str)
SOME = [(7, 3, 3), (3, 8, 8), (3, 33, 31), (3, 64, 64), (2, 130, 130)]
some_cases = pytest.mark.parametrize("case", [case_of(*shape) for shape in SOME], ids=str)
in_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=in_dtype)


def fixed_gradient(out: torch.Tensor) -> torch.Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)


def gradient_of_input(module, inputs, grad_of=fixed_gradient) -> dict[str, torch.Tensor]:
    x = inputs[0].detach().requires_grad_()
    out = module(x)
    return {"gradient": torch.autograd.grad(out, x, grad_of(out))[0].detach()}


def is_plain(device, dtype: torch.dtype, recorded: bool) -> bool:
    """Whether it is PyTorch's own instance_norm that computes."""
    return dtype is torch.float64 or device.type == "cpu" and (recorded or dtype is not torch.float32)


def operators():
    module = solution(STEM)
    return getattr(torch.ops, module.NAMESPACE)


@small_cases
@in_dtypes
def test_small_slices_are_as_accurate_as_eager(case, dtype, device):
    assert_as_accurate_as_eager(gradient_of_input, draws(case, device, dtype))


@large_cases
@in_dtypes
@pytest.mark.parametrize("layout", ["contiguous", "offset by one element"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_every_kernel_is_as_accurate_as_eager(case, layout, dtype):
    def lay(model, new, inputs):
        return [LAYOUTS[layout](t) for t in inputs]

    assert_as_accurate_as_eager(gradient_of_input, draws(case, "cuda", dtype, lay))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=in_dtype)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_slices_that_no_chip_holds(dtype):
    """In both directions. Of float64 they are above 4 MiB already, and eager's own drift over as many values is larger than ours."""
    case = Case(STEM, "one slice of 4399 x 4401", (1,), ((1, 1, 4399, 4401),))
    assert_as_accurate_as_eager(lambda module, inputs: {"output": module(*inputs).detach()}, draws(case, "cuda", dtype))
    assert_as_accurate_as_eager(gradient_of_input, draws(case, "cuda", dtype))


@some_cases
@in_dtypes
@pytest.mark.parametrize("what", ["x far from zero", "an outlier in x", "a gradient far from zero", "an outlier in the gradient"])
def test_badly_scaled_values(case, what, dtype, device):
    def change(model, new, inputs):
        (x,) = inputs
        if what == "x far from zero":
            x += 1e3
        elif what == "an outlier in x":
            x[..., 0, 0] = 1e3
        return [x]

    def run(module, inputs):
        def grad_of(out):
            grad = fixed_gradient(out)
            if what == "a gradient far from zero":
                grad += 100
            elif what == "an outlier in the gradient":
                grad[..., -1, -1] = 1e3
            return grad

        return gradient_of_input(module, inputs, grad_of)

    assert_as_accurate_as_eager(run, draws(case, device, dtype, change), roundings=2)


@some_cases
@in_dtypes
@pytest.mark.parametrize("layout", ["expanded from one value", "one row for all", "channels_last", "transposed", "every other column"])
def test_gradients_of_any_layout(case, layout, dtype, device):
    """.sum() hands over one value with strides of zero."""

    def grad_of(out):
        if layout == "expanded from one value":
            return torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
        if layout == "one row for all":
            return fixed_gradient(out[..., :1, :]).expand(out.shape)
        if layout == "channels_last":
            return fixed_gradient(out).contiguous(memory_format=torch.channels_last)
        if layout == "transposed":
            return fixed_gradient(out.mT).mT
        return fixed_gradient(torch.cat([out, out], -1))[..., ::2]

    model, new, inputs = build(case, device, dtype)
    got = gradient_of_input(new, inputs, grad_of)["gradient"]
    if is_plain(device, dtype, recorded=True):
        assert torch.equal(got, gradient_of_input(model, inputs, grad_of)["gradient"])
        return
    expected = gradient_of_input(new, inputs, lambda out: grad_of(out).contiguous())["gradient"]
    assert torch.equal(got, expected) and got.is_contiguous()
    if layout == "expanded from one value":
        assert got.abs().max() <= 1e-5


@some_cases
@in_dtypes
def test_slices_without_variance(case, dtype, device):
    """xhat is zero: dx = (g - mean(g)) / sqrt(eps)."""

    def flatten(model, new, inputs):
        return [torch.full_like(inputs[0], 5.25)]

    assert_as_accurate_as_eager(gradient_of_input, draws(case, device, dtype, flatten), roundings=2)


# By what holds a slice: registers, a cluster, nothing.
SUMMED = [(7, 2, 2), (9, 4, 4), (9, 7, 7), (2, 6, 31), (2, 6, 33), (4, 65, 3), (3, 63, 64), (2, 64, 65), (1, 90, 90), (1, 182, 182), (1, 512, 512)]


summed_cases = pytest.mark.parametrize("case", [case_of(*shape) for shape in SUMMED], ids=str)


def of_few_values(model, new, inputs):
    """Sums of equal terms, whose roundings all go one way."""
    return [inputs[0].round()]


@summed_cases
@in_dtypes
def test_a_few_different_values(case, dtype, device):
    def run(module, inputs):
        return {"output": module(inputs[0])}

    assert_as_accurate_as_eager(run, draws(case, device, dtype, of_few_values))


@summed_cases
@in_dtypes
def test_gradients_at_a_few_different_values(case, dtype, device):
    assert_as_accurate_as_eager(gradient_of_input, draws(case, device, dtype, of_few_values))


@summed_cases
@in_dtypes
def test_equal_values_leave_nothing(case, dtype, device):
    """Their mean is one of them, to the last bit."""
    if is_plain(device, dtype, recorded=False):
        pytest.skip("PyTorch's own leaves something")
    _, new, inputs = build(case, device, dtype)
    slices = inputs[0].flatten(0, 1)
    slices.copy_(slices[:, :1, :1] * 10 ** torch.linspace(-4, 3, len(slices), device=device)[:, None, None])
    assert not new(inputs[0]).any()


@some_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=in_dtype)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["NaN", "Inf"])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_not_a_number_stays_in_its_slice(case, where, value, dtype, device):
    """In its own slice nothing is finite, as with the Model; the others are as they were."""
    model, new, inputs = build(case, device, dtype)
    (x,) = inputs

    def grad_of(out):
        grad = fixed_gradient(out)
        if where == "gradient":
            grad[-1, -1, -1, 1] = value
        return grad

    clean = gradient_of_input(new, inputs)["gradient"]
    if where == "input":
        x[-1, -1, -1, 1] = value
    got, expected = gradient_of_input(new, [x], grad_of)["gradient"], gradient_of_input(model, [x], grad_of)["gradient"]
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert not got[-1, -1].isfinite().any()
    clean[-1, -1] = got[-1, -1] = 0
    assert torch.equal(got, clean)


@some_cases
@in_dtypes
def test_neighbours_in_memory_do_not_matter(case, dtype, device):
    """Input and gradient lie in larger buffers of NaN, at every offset from a 16-byte border."""
    _, new, inputs = build(case, device, dtype)
    x, grad = inputs[0], fixed_gradient(inputs[0])
    expected = gradient_of_input(new, [x])["gradient"]

    def surrounded(t, offset):
        buffer = t.new_full((t.numel() + 64,), torch.nan)
        buffer[offset : offset + t.numel()] = t.flatten()
        return buffer[offset : offset + t.numel()].view(t.shape)

    for x_offset, grad_offset in [(16, 16), (17, 16), (16, 19), (23, 18)]:
        got = gradient_of_input(new, [surrounded(x, x_offset)], lambda out, offset=grad_offset: surrounded(grad, offset))
        assert torch.equal(got["gradient"], expected)


@small_cases
@in_dtypes
def test_the_same_input_gives_the_same_bits_and_stays_as_it_is(case, dtype, device):
    _, new, inputs = build(case, device, dtype)
    x, grad = inputs[0], fixed_gradient(inputs[0])
    before = x.clone(), grad.clone()
    first = gradient_of_input(new, [x], lambda out: grad)["gradient"]
    for _ in range(3):
        assert torch.equal(gradient_of_input(new, [x], lambda out: grad)["gradient"], first)
    assert torch.equal(x, before[0]) and torch.equal(grad, before[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@large_cases
def test_repeated_calls_give_the_same_bits(case):
    """Races show as bits that differ now and then."""
    _, _, inputs = build(case, "cuda")
    x, grad = inputs[0], fixed_gradient(inputs[0])
    first = operators().backward(grad, x, 1e-5)
    for _ in range(20):
        assert torch.equal(operators().backward(grad, x, 1e-5), first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_the_input_alone_is_saved():
    _, new, inputs = build(case_of(3, 8, 8), "cuda")
    x, saved = inputs[0].requires_grad_(), []

    def note(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        new(x)
    assert saved == [x.data_ptr()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@in_dtypes
def test_takes_no_more_memory_than_eager(dtype):
    model, new, inputs = build(case_of(16, 512, 512), "cuda", dtype)

    def peak(module):
        x = inputs[0].detach().requires_grad_()
        grad = torch.ones_like(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x).backward(grad)
        return torch.cuda.max_memory_allocated() - before

    peak(model), peak(new)
    assert peak(new) <= peak(model)


def test_higher_derivatives(device):
    """Two of them, those of the formula in plain operators. (PyTorch's own instance_norm, which gives the second, has a wrong third one.)"""
    _, new, inputs = build(case_of(2, 3, 5), device, torch.float64)

    def plain(x):
        deviation = x - x.mean((-2, -1), keepdim=True)
        return deviation * (deviation.square().mean((-2, -1), keepdim=True) + 1e-5).rsqrt()

    def derivatives(function):
        x = inputs[0].detach().requires_grad_()
        scalar, found = (function(x) ** 3).sum(), []
        for _ in range(2):
            (grad,) = torch.autograd.grad(scalar, x, create_graph=True)
            found.append(grad.detach())
            scalar = (grad * torch.linspace(-1, 2, grad.numel(), dtype=grad.dtype, device=grad.device).view_as(grad)).sum()
        return found

    for ours, theirs in zip(derivatives(new), derivatives(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_per_sample_gradients(device):
    """vmap over the samples, and over weights of one sample's output."""
    _, new, inputs = build(case_of(4, 5, 7), device, torch.float64)
    x, weights = inputs[0], fixed_gradient(inputs[0])

    def gradient(sample, weight):
        return torch.func.grad(lambda t: (new(t) * weight).sum())(sample)

    expected = torch.stack([gradient(sample, weight) for sample, weight in zip(x, weights, strict=True)])
    torch.testing.assert_close(torch.func.vmap(gradient)(x, weights), expected)
    torch.testing.assert_close(torch.func.vmap(gradient, in_dims=(None, 0))(x[1], weights)[1], expected[1])
    torch.testing.assert_close(torch.func.vmap(gradient, in_dims=(1, 1))(x.transpose(0, 1), weights.transpose(0, 1)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_gradient_of_another_form_is_refused():
    x = torch.randn(2, 3, 4, 5, device="cuda")
    for grad in (x[:1], x.double(), x.transpose(2, 3)):
        with pytest.raises(RuntimeError, match="the input's shape, dtype and device"):
            operators().backward(grad, x, 1e-5)


HUGE = [
    ("two slices", (2, 1, 32768, 32769)), ("one slice", (1, 1, 46341, 46343)), ("slices of 1 MiB", (4097, 1, 512, 1024)),
    ("small slices", (2097153, 16, 8, 8)), ("small slices of no whole packs", (2097153, 16, 1, 65)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("shape", [shape for _, shape in HUGE], ids=[name for name, _ in HUGE])
def test_more_than_2_to_the_31_elements(shape):
    """In float16, the first and last samples against the same ones alone: an index of 32 bits wraps before it reaches the last."""
    torch.cuda.empty_cache()
    needed = 64 * 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    x, grad = (torch.rand(shape, device="cuda", dtype=torch.float16) for _ in range(2))
    out = operators().backward(grad, x, 1e-5)
    torch.cuda.synchronize()
    assert out.numel() > 2**31

    def mean(values):
        return values.mean((2, 3), keepdim=True, dtype=torch.float64).float()

    for sample in (slice(0, 1), slice(-1, None)):  # by the formula: PyTorch's own gradient of one such slice reads where nothing is
        deviation, g = x[sample].float(), grad[sample].float()
        deviation -= mean(deviation)
        rstd = (mean(deviation.square()) + 1e-5).rsqrt()
        right = g - mean(g)
        right -= deviation * (rstd.square() * mean(deviation * g))
        right *= rstd
        assert (out[sample] - right).abs().max() <= 1e-2
