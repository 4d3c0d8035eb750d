"""Training conv_sigmoid_group_norm: its operators `record` and `record_backward`, of the whole network, and `convolution` and
`convolution_backward`, of what it begins with, against PyTorch's own."""

import itertools
from collections.abc import Callable

import pytest
import torch
from accuracy import allowed_error, largest, same_kinds, worst_error
from cases import LAYOUTS, solution
from torch.nn.functional import conv2d, group_norm

NAMES = ("output", "input", "weight", "bias")
OF_NETWORK = (*NAMES[:3], "convolution's bias", "bias", "scale", "norm's weight", "norm's bias")

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]

# samples, in_channels, out_channels, height, width, kernel size
SHAPES = {
    "the benchmark's images": (2, 8, 32, 256, 256, 3),
    "images a strip wide": (3, 8, 32, 20, 130, 3),
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
BENCHMARK, ODD = SHAPES["the benchmark's images"], SHAPES["an odd size"]


def operators():
    namespace = getattr(torch.ops, solution("conv_sigmoid_group_norm").NAMESPACE)
    return namespace.convolution, namespace.convolution_backward


def problem(shape: tuple, device, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """x, weight, bias, and the output's gradient."""
    samples, inside, outside, height, width, size = shape
    generator = torch.Generator().manual_seed(seed)
    reach = (inside * size * size) ** -0.5
    x = torch.rand((samples, inside, height, width), generator=generator)
    weight, bias = (reach * (2 * torch.rand(s, generator=generator) - 1) for s in ((outside, inside, size, size), (outside,)))
    grad = torch.randn((samples, outside, height - size + 1, width - size + 1), generator=generator)
    return [t.to(device, dtype) for t in (x, weight, bias, grad)]


def ours(x, weight, bias, grad, needs=(True, True, True)) -> dict[str, torch.Tensor]:
    forward, backward = operators()
    return dict(zip(NAMES, (forward(x, weight, bias), *backward(grad, x, weight, needs)), strict=True))


def eager(*tensors) -> dict[str, torch.Tensor]:
    x, weight, bias, grad = tensors
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = conv2d(*leaves)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


def groups_of(channels: int) -> int:
    return next(groups for groups in (8, 7, 5, 3, 1) if channels % groups == 0)


def network(shape: tuple, device, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """x, the convolution's weight and bias, bias, scale, the norm's weight and bias, and the output's gradient."""
    *tensors, grad = problem(shape, "cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    tensors += [torch.randn(shape[2], generator=generator) for _ in range(4)]
    return [t.to(device, dtype) for t in (*tensors, grad)]


def our_network(*tensors, needs=(True,) * 7) -> dict[str, torch.Tensor]:
    *arguments, grad = tensors
    x, weight, _, *vectors, _ = arguments
    namespace = getattr(torch.ops, solution("conv_sigmoid_group_norm").NAMESPACE)
    numbers = groups_of(weight.shape[0]), 1e-5
    out, h = namespace.record(*arguments, *numbers)
    return dict(zip(OF_NETWORK, (out, *namespace.record_backward(grad, h, x, weight, *vectors, *numbers, needs)), strict=True))


def eager_network(*tensors) -> dict[str, torch.Tensor]:
    *arguments, grad = tensors
    leaves = [t.detach().requires_grad_() for t in arguments]
    x, weight, conv_bias, bias, scale, *norm = leaves
    v = torch.sigmoid((conv2d(x, weight, conv_bias) + bias.view(-1, 1, 1)) * scale.view(-1, 1, 1))
    out = group_norm(v, groups_of(weight.shape[0]), *norm)
    return dict(zip(OF_NETWORK, (out.detach(), *torch.autograd.grad(out, leaves, grad)), strict=True))


NETWORK = {"of": (network, our_network, eager_network), "names": OF_NETWORK}


def assert_right(
    shape: tuple, change: Callable = lambda *tensors: tensors, roundings: int = 1, of=(problem, ours, eager), names: tuple = NAMES
) -> None:
    """NaN and the infinities as eager's or float64's; the errors of several seeds within `allowed_error`: that of one is luck."""
    problem, ours, eager = of
    errors = {name: [0.0, 0.0, 0.0] for name in names}  # ours, eager's, the largest right value
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
        too_large = [name for name, (error, *allowed) in errors.items() if not error <= allowed_error(*allowed, torch.float32, roundings)]
        if seed >= 2 and not too_large:
            return
    assert not too_large, {name: errors[name] for name in too_large}


@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_agree_with_pytorchs_on_the_cpu(shape, dtype):
    if shape is BENCHMARK:
        pytest.skip("the CPU's is PyTorch's at any size")
    tensors = problem(shape, "cpu", dtype)
    for name, out in ours(*tensors).items():
        torch.testing.assert_close(out, eager(*tensors)[name])


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_what_is_not_needed_has_no_elements(needs, device):
    tensors = problem(ODD, device)
    everything = ours(*tensors)
    got = ours(*tensors, needs)
    for name, needed in zip(NAMES[1:], needs):
        torch.testing.assert_close(got[name], everything[name] if needed else everything[name].new_empty(0), rtol=1e-5, atol=1e-5)


def test_opcheck(device):
    """Shapes that the kernels take: those of the other tests of operators are small."""
    x, weight, bias, grad = problem(ODD, device)
    forward, backward = operators()
    torch.library.opcheck(forward, (x, weight, bias))
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(backward, (grad, x, weight, needs))


def test_second_derivatives_are_pytorchs(device):
    tensors = problem(ODD, device, torch.float64)
    function = solution("conv_sigmoid_group_norm").Convolution.apply

    def second(convolution) -> list[torch.Tensor]:
        x, weight, bias, grad = (t.detach().requires_grad_() for t in tensors)
        first = torch.autograd.grad(convolution(x, weight, bias), (x, weight), grad, create_graph=True)
        return torch.autograd.grad([f.square().sum() for f in first], (x, weight, grad))

    for ours, theirs in zip(second(function), second(conv2d), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-3)], ids=str)
def test_the_network_agrees_with_pytorchs_on_the_cpu(dtype, bound):
    tensors = network(ODD, "cpu", dtype)
    for name, out in our_network(*tensors).items():
        torch.testing.assert_close(out, eager_network(*tensors)[name], rtol=bound, atol=bound)


@pytest.mark.parametrize("needed", range(7), ids=OF_NETWORK[1:])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "alone not"])
def test_the_network_gives_what_is_needed(needed, alone, device):
    tensors = network(ODD, device)
    needs = [alone == (i == needed) for i in range(7)]
    everything, got = our_network(*tensors), our_network(*tensors, needs=needs)
    for name, need in zip(OF_NETWORK[1:], needs):
        torch.testing.assert_close(got[name], everything[name] if need else everything[name].new_empty(0), rtol=1e-5, atol=1e-5)


def test_opcheck_of_the_network(device):
    *arguments, grad = network(ODD, device)
    x, weight, _, *vectors, _ = arguments
    namespace = getattr(torch.ops, solution("conv_sigmoid_group_norm").NAMESPACE)
    h = torch.library.opcheck(namespace.record, (*arguments, 8, 1e-5)) and namespace.record(*arguments, 8, 1e-5)[1]
    for needs in ([True] * 7, [False, True, False, True, False, True, False]):
        torch.library.opcheck(namespace.record_backward, (grad, h, x, weight, *vectors, 8, 1e-5, needs))


class TestTheNetworkOnTheGPU:
    pytestmark = gpu

    @shapes
    def test_as_accurate_as_eager(self, shape):
        assert_right(shape, **NETWORK)

    @pytest.mark.parametrize("shape", [BENCHMARK, ODD, SHAPES["three channels to seven"]], ids=str)
    def test_repeated_calls_give_the_same_bits(self, shape):
        tensors = network(shape, "cuda")
        first = our_network(*tensors)
        for _ in range(5):
            again = our_network(*tensors)
            assert all(torch.equal(again[name], first[name]) for name in OF_NETWORK)

    @pytest.mark.parametrize("what", [0, 7], ids=["input", "gradient"])
    @pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-3, 1e3])
    def test_any_magnitude(self, what, magnitude):
        assert_right(ODD, lambda *tensors: [t * magnitude if i == what else t for i, t in enumerate(tensors)], **NETWORK)

    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
    @pytest.mark.parametrize("what", [0, 1, 2, 7], ids=["input", "weight", "bias", "gradient"])
    def test_what_is_not_finite(self, what, value):
        def change(*tensors):
            tensors[what].view(-1)[tensors[what].numel() // 3] = value
            tensors[what].view(-1)[-1] = value
            return tensors

        assert_right(ODD, change, **NETWORK)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_in_any_layout(self, layout):
        assert_right(ODD, lambda *tensors: (*tensors[:-1], LAYOUTS[layout](tensors[-1])), **NETWORK)

    def test_in_a_graph(self):
        tensors = network(ODD, "cuda")
        expected = our_network(*tensors)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = our_network(*tensors)
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(out[name], expected[name]) for name in OF_NETWORK)


class TestOnTheGPU:
    pytestmark = gpu

    @shapes
    def test_as_accurate_as_eager(self, shape):
        assert_right(shape)

    @pytest.mark.parametrize("shape", [BENCHMARK, ODD, SHAPES["20 channels to 33"], SHAPES["1x1 kernels"]], ids=str)
    def test_repeated_calls_give_the_same_bits(self, shape):
        tensors = problem(shape, "cuda")
        first = ours(*tensors)
        for _ in range(5):
            again = ours(*tensors)
            assert all(torch.equal(again[name], first[name]) for name in NAMES)

    @pytest.mark.parametrize("what", range(4), ids=["input", "weight", "bias", "gradient"])
    @pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-3, 1e4, 1e9, 1e30])
    def test_any_magnitude(self, what, magnitude):
        assert_right(ODD, lambda *tensors: [t * magnitude if i == what else t for i, t in enumerate(tensors)])

    @pytest.mark.parametrize("magnitude", [1e-6, 1e-3])
    def test_deviations_from_a_large_mean(self, magnitude):
        """Long sums of one sign: an accumulator that rounds towards zero would drift."""
        assert_right(BENCHMARK, lambda x, weight, bias, grad: (1 + magnitude * x, weight.abs(), bias, 1 + magnitude * grad))

    @pytest.mark.parametrize("shape", [ODD, SHAPES["20 channels to 33"], SHAPES["1x1 kernels"]], ids=str)
    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4e38], ids=str)
    @pytest.mark.parametrize("what", [0, 1, 2, 3], ids=["input", "weight", "bias", "gradient"])
    def test_what_is_not_finite(self, what, value, shape):
        """Infinities stay infinities, though a difference of two is in every product of halves."""

        def change(*tensors):
            tensors[what].view(-1)[tensors[what].numel() // 3] = value
            tensors[what].view(-1)[-1] = value
            return tensors

        # One large product is the whole sum, and nothing averages out: lo * lo and the rounding of each lo are some half ulps of it.
        assert_right(shape, change, 6)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_in_any_layout(self, layout):
        assert_right(ODD, lambda x, weight, bias, grad: (x, weight, bias, LAYOUTS[layout](grad)))

    def test_in_a_graph(self):
        tensors = problem(ODD, "cuda")
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
