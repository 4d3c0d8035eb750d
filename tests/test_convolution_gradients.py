"""Training conv_sigmoid_group_norm: outputs and gradients of its ModelNew against PyTorch's own."""

from collections.abc import Callable

import pytest
import torch
from accuracy import allowed_error, largest, same_kinds, worst_error
from cases import LAYOUTS, solution
from torch import library
from torch.nn.functional import conv2d, group_norm

NAMES = ("output", "input", "weight", "convolution's bias", "bias", "scale", "norm's weight", "norm's bias")

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]

# samples, in_channels, out_channels, height, width, kernel size
SHAPES = {
    "the benchmark's images": (2, 8, 32, 256, 256, 3),
    "images a strip wide": (3, 8, 32, 20, 130, 3),
    "a small even size": (2, 8, 32, 34, 36, 3),
    "an odd size": (2, 8, 32, 35, 37, 3),
    "a column beyond a strip": (1, 8, 32, 17, 131, 3),
    "narrow images": (2, 8, 32, 300, 4, 3),
    "low images": (2, 8, 32, 3, 400, 3),
    "three channels to seven": (2, 3, 7, 63, 67, 3),
    "one channel to one": (3, 1, 1, 40, 41, 3),
    "nine channels to nine": (2, 9, 9, 31, 34, 3),
    "20 channels to 33": (1, 20, 33, 29, 150, 3),
    "64 channels to 128": (2, 64, 128, 30, 31, 3),
    "1x1 kernels": (2, 8, 24, 64, 64, 1),
    "1x1 kernels of 33 channels, an odd size": (2, 33, 65, 29, 131, 1),
    "many small images": (300, 4, 8, 20, 20, 3),
    "images too small for the kernels": (2, 8, 32, 10, 10, 3),
    "more channels than the kernels take": (2, 65, 130, 20, 20, 3),
    "5x5 kernels": (2, 8, 32, 24, 24, 5),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
BENCHMARK, EVEN = SHAPES["the benchmark's images"], SHAPES["a small even size"]


def groups_of(channels: int) -> int:
    return next(groups for groups in (8, 7, 5, 3, 1) if channels % groups == 0)


def problem(shape: tuple, device, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """x, the convolution's weight and bias, bias, scale, the norm's weight and bias, and the output's gradient."""
    samples, inside, outside, height, width, size = shape
    generator = torch.Generator().manual_seed(seed)
    reach = (inside * size * size) ** -0.5
    x = torch.rand((samples, inside, height, width), generator=generator)
    weight, bias = (reach * (2 * torch.rand(s, generator=generator) - 1) for s in ((outside, inside, size, size), (outside,)))
    vectors = [torch.randn(outside, generator=generator) for _ in range(4)]
    grad = torch.randn((samples, outside, height - size + 1, width - size + 1), generator=generator)
    return [t.to(device, dtype) for t in (x, weight, bias, *vectors, grad)]


def ours(*tensors, needs=(True,) * 7) -> dict[str, torch.Tensor]:
    """The output and those gradients that are needed."""
    *arguments, grad = tensors
    leaves = [t.detach().requires_grad_(need) for t, need in zip(arguments, needs, strict=True)]
    x, weight, conv_bias, bias, scale, gamma, beta = leaves
    out_channels, in_channels, size, _ = weight.shape
    vectors = (out_channels, 1, 1)
    module = solution("conv_sigmoid_group_norm").ModelNew(
        in_channels, out_channels, size, groups_of(out_channels), vectors, vectors
    )
    parameters = {"conv.weight": weight, "conv.bias": conv_bias, "bias": bias.view(vectors), "scale": scale.view(vectors)}
    parameters |= {"group_norm.weight": gamma, "group_norm.bias": beta}
    out = torch.func.functional_call(module, parameters, x)
    wanted = [i for i, need in enumerate(needs) if need]
    found = torch.autograd.grad(out, [leaves[i] for i in wanted], grad)
    return {"output": out.detach()} | {NAMES[1 + i]: t for i, t in zip(wanted, found, strict=True)}


def eager(*tensors) -> dict[str, torch.Tensor]:
    *arguments, grad = tensors
    leaves = [t.detach().requires_grad_() for t in arguments]
    x, weight, conv_bias, bias, scale, *norm = leaves
    v = torch.sigmoid((conv2d(x, weight, conv_bias) + bias.view(-1, 1, 1)) * scale.view(-1, 1, 1))
    out = group_norm(v, groups_of(weight.shape[0]), *norm)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


def assert_right(shape: tuple, change: Callable = lambda *tensors: tensors) -> None:
    """NaN and the infinities as eager's or float64's; the errors of several seeds within `allowed_error`: that of one is luck."""
    errors = {name: [0.0, 0.0, 0.0] for name in NAMES}  # ours, eager's, the largest right value
    too_large = []
    for seed in range(12):
        tensors = change(*problem(shape, "cuda", seed=seed))
        got, expected, right = ours(*tensors), eager(*tensors), eager(*[t.double() for t in tensors])
        for name, out in got.items():
            assert (out.shape, out.dtype) == (expected[name].shape, expected[name].dtype)
            assert out.is_contiguous()
            assert same_kinds(out, expected[name], right[name]), f"{name}: NaN or Inf where neither eager nor float64 has it"
            finite = right[name].masked_fill(~(expected[name].isfinite() & (2 * right[name]).to(out.dtype).isfinite()), torch.nan)
            of_seed = worst_error(out, finite), worst_error(expected[name], finite), largest(finite)
            assert of_seed[0] == of_seed[0], f"{name}: NaN"
            errors[name] = [max(pair) for pair in zip(errors[name], of_seed)]
        too_large = [name for name, (error, *allowed) in errors.items() if not error <= allowed_error(*allowed, torch.float32)]
        if seed >= 2 and not too_large:
            return
    assert not too_large, {name: errors[name] for name in too_large}


@shapes
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
def test_agree_with_pytorchs_on_the_cpu(shape, dtype, bound):
    if shape is BENCHMARK:
        pytest.skip("the CPU's convolution is PyTorch's at any size")
    tensors = problem(shape, "cpu", dtype)
    for name, out in ours(*tensors).items():
        torch.testing.assert_close(out, eager(*tensors)[name], rtol=bound, atol=bound * largest(out))


def test_roundings_do_not_add_up_over_an_image(device):
    """Where the norm's weight is 1, `grad - mean` is rounded by the same amount for each gradient of a binade."""
    if device.type == "cpu":
        pytest.skip("training on a CPU is PyTorch's own")
    tensors = problem(BENCHMARK, device)
    tensors[5].fill_(1)
    got, right = ours(*tensors), eager(*(t.double() for t in tensors))
    for name in ("convolution's bias", "bias", "scale", "norm's weight", "norm's bias"):
        error, scale = ((t.square().mean().sqrt()).item() for t in (got[name] - right[name], right[name]))
        assert error < 1e-6 * scale, f"{name}: {error / scale:.1e}"


@pytest.mark.parametrize("needed", range(7), ids=NAMES[1:])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "alone not"])
@pytest.mark.parametrize("shape", [EVEN, SHAPES["20 channels to 33"]], ids=str)
def test_some_of_the_gradients(shape, needed, alone, device):
    tensors = problem(shape, device)
    needs = [alone == (i == needed) for i in range(7)]
    everything, got = ours(*tensors), ours(*tensors, needs=needs)
    for name, t in got.items():
        torch.testing.assert_close(t, everything[name], rtol=1e-5, atol=1e-5)


class TestOnTheGPU:
    pytestmark = gpu

    @shapes
    def test_as_accurate_as_eager(self, shape):
        assert_right(shape)

    @pytest.mark.parametrize("shape", [BENCHMARK, EVEN, SHAPES["three channels to seven"], SHAPES["20 channels to 33"]], ids=str)
    def test_repeated_calls_give_the_same_bits(self, shape):
        tensors = problem(shape, "cuda")
        first = ours(*tensors)
        for _ in range(5):
            again = ours(*tensors)
            assert all(torch.equal(again[name], first[name]) for name in NAMES)

    def test_opcheck(self):
        """Shapes that the kernels take: those of the other tests of operators are small."""
        x, *parameters, grad = problem(EVEN, "cuda")
        operators = getattr(torch.ops, solution("conv_sigmoid_group_norm").NAMESPACE)
        library.opcheck(operators.record, (x, parameters, 8, 1e-5))
        _, statistics = operators.record(x, parameters, 8, 1e-5)
        for of_x in (True, False):
            library.opcheck(operators.backward, (grad, x, parameters, statistics, of_x))

    @pytest.mark.parametrize("what", [0, 7], ids=["input", "gradient"])
    @pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-3, 1e3])
    def test_any_magnitude(self, what, magnitude):
        assert_right(EVEN, lambda *tensors: [t * magnitude if i == what else t for i, t in enumerate(tensors)])

    @pytest.mark.parametrize("shape", [EVEN, SHAPES["20 channels to 33"], SHAPES["1x1 kernels"]], ids=str)
    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
    @pytest.mark.parametrize("what", [0, 1, 2, 4, 7], ids=["input", "weight", "bias", "scale", "gradient"])
    def test_what_is_not_finite(self, what, value, shape):
        """Infinities stay infinities, though a difference of two is in every product of halves."""

        def change(*tensors):
            tensors[what].view(-1)[tensors[what].numel() // 3] = value
            tensors[what].view(-1)[-1] = value
            return tensors

        assert_right(shape, change)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_in_any_layout(self, layout):
        assert_right(EVEN, lambda *tensors: (*tensors[:-1], LAYOUTS[layout](tensors[-1])))

    def test_in_a_graph(self):
        tensors = problem(EVEN, "cuda")
        expected = ours(*tensors)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = ours(*tensors)
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(out[name], expected[name]) for name in NAMES)

    def test_on_a_stream_of_its_own(self):
        tensors = problem(BENCHMARK, "cuda")
        expected, stream = ours(*tensors), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            out = ours(*tensors)
        stream.synchronize()
        assert all(torch.equal(out[name], expected[name]) for name in NAMES)
