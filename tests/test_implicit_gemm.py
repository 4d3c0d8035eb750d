"""The convolution of conv_sigmoid_group_norm on the tensor cores: every way through it, and what must not go through it."""

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, same_kinds
from cases import Case, build, in_float64, solution
from torch.utils._python_dispatch import TorchDispatchMode

STEM = "conv_sigmoid_group_norm"

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]


def case(name: str, samples: int, channels: int, height: int, width: int, size: int, groups: int, of_group: int) -> Case:
    out = groups * of_group
    return Case(STEM, name, (channels, out, size, groups, (out, 1, 1), (out, 1, 1)), ((samples, channels, height, width),))


SHAPES = [
    case("groups of four channels", 2, 8, 34, 36, 3, 8, 4),
    case("an odd size", 2, 8, 35, 37, 3, 8, 4),
    case("the benchmark's images", 3, 8, 256, 256, 3, 8, 4),
    case("images 260 wide", 2, 8, 40, 260, 3, 8, 4),
    case("more units than teams", 70, 8, 130, 130, 3, 8, 4),
    case("a team for each unit", 300, 8, 34, 34, 3, 4, 4),
    case("narrow images", 2, 8, 200, 20, 3, 2, 4),
    case("groups of three channels from three", 2, 3, 63, 67, 3, 3, 3),
    case("a group for each of seven channels", 2, 5, 130, 130, 3, 7, 1),
    case("one group of 24 channels", 2, 20, 56, 57, 3, 1, 24),
    case("groups of 20 channels", 2, 8, 100, 100, 3, 2, 20),
    case("groups of 13 channels", 1, 9, 50, 52, 3, 3, 13),
    case("nine of the benchmark's images", 9, 8, 256, 256, 3, 8, 4),
    case("images too large for 32 channels at once", 1, 8, 520, 516, 3, 8, 4),
    case("images of odd width in two launches", 1, 8, 600, 601, 3, 8, 4),
    case("20 channels in two launches", 2, 20, 300, 500, 3, 1, 40),
    case("one group of 40 channels", 3, 8, 66, 66, 3, 1, 40),
    case("a group of 35 channels and an odd size", 2, 3, 51, 53, 3, 2, 35),
    case("narrow images of an odd width", 5, 8, 300, 9, 3, 4, 4),
    case("images seven pixels wide", 2, 8, 300, 7, 3, 8, 4),
    case("images four pixels wide of twelve channels", 2, 12, 300, 4, 3, 8, 4),
    case("64 channels to 128", 2, 64, 56, 56, 3, 32, 4),
    case("33 channels to 128 in one group", 2, 33, 30, 31, 3, 1, 128),
    case("48 channels to 40 in one group", 3, 48, 40, 42, 3, 1, 40),
    case("40 channels to 75", 2, 40, 29, 64, 3, 15, 5),
    case("1x1 kernels", 2, 8, 128, 128, 1, 6, 4),
    case("1x1 kernels and an odd size", 2, 20, 57, 59, 1, 4, 6),
    case("1x1 kernels and an odd width", 2, 20, 58, 57, 1, 4, 6),
    case("1x1 kernels from 64 channels to 128", 3, 64, 56, 56, 1, 1, 128),
    case("1x1 kernels from 56 channels, an odd size", 2, 56, 31, 33, 1, 8, 6),
]
NAMED = {case.name: case for case in SHAPES}
# 3x3 kernels from up to 8 channels to up to 32, of an even width, of whole fours of outputs, that fit into shared memory.
RECORDED = [
    NAMED[name]
    for name in (
        "groups of four channels",
        "the benchmark's images",
        "images 260 wide",
        "more units than teams",
        "a team for each unit",
        "narrow images",
        "a group for each of seven channels",
    )
]
FEW, MANY = NAMED["groups of four channels"], NAMED["64 channels to 128"]  # input channels: kernels of their own
ways = pytest.mark.parametrize("case", [FEW, MANY], ids=["few channels", "many channels"])
shapes = pytest.mark.parametrize("case", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])


@torch.no_grad()
def forward(module, inputs) -> dict[str, torch.Tensor]:
    return {"output": module(*inputs)}


class Calls(TorchDispatchMode):
    """The names of our operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == solution(STEM).NAMESPACE:
            self.names.append(function.name().split("::")[1])
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def calls(module, *inputs) -> list[str]:
    with Calls() as seen:
        module(*inputs)
    return seen.names


class TestOnTheGPU:
    pytestmark = gpu

    @shapes
    @dtypes
    def test_is_as_accurate_as_eager(self, case, dtype):
        assert_as_accurate_as_eager(forward, draws(case, "cuda", dtype))

    @shapes
    @dtypes
    def test_a_forward_that_records_gives_the_same_bits(self, case, dtype):
        """Where the kernels take the sizes: elsewhere it is the Model's own lines."""
        _, new, inputs = build(case, "cuda", dtype)
        with Calls() as seen:
            out = new(*inputs)
        if seen.names:
            assert torch.equal(out, forward(new, inputs)["output"])
        assert bool(seen.names) == (case in RECORDED)

    @shapes
    @torch.no_grad()
    def test_repeated_calls_give_the_same_bits(self, case):
        _, new, inputs = build(case, "cuda")
        first = new(*inputs)
        for _ in range(20):
            assert torch.equal(new(*inputs), first)

    @ways
    @pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e-3, 1e3, 1e6, 1e30])
    def test_inputs_of_any_magnitude(self, magnitude, case):
        """Beyond fp16's range blocks compute in float32; below it, what is lost is below the sigmoid's own rounding."""
        assert_as_accurate_as_eager(forward, draws(case, "cuda", torch.float32, lambda model, new, inputs: [inputs[0] * magnitude]))

    @ways
    @pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e3, 1e6, 1e20])
    def test_weights_of_any_magnitude(self, magnitude, case):
        def change(model, new, inputs):
            for module in (model, new):
                module.conv.weight.data.mul_(magnitude)
            return [inputs[0] / min(magnitude, 1e6)]

        assert_as_accurate_as_eager(forward, draws(case, "cuda", torch.float32, change))

    @ways
    def test_a_few_inputs_beyond_half_precision(self, case):
        def change(model, new, inputs):
            x = inputs[0].clone()
            x[0, 3, 17, 11], x[1, 0, 0, 0], x[1, -1, -1, -1] = 1e6, -7e5, 1e9
            return [x]

        assert_as_accurate_as_eager(forward, draws(case, "cuda", torch.float32, change))

    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
    @dtypes
    @pytest.mark.parametrize("case", [SHAPES[1], MANY], ids=["few channels", "many channels"])
    @torch.no_grad()
    def test_what_is_not_finite_stays_where_eager_or_float64_has_it(self, value, dtype, case):
        model, new, inputs = build(case, "cuda", dtype)
        x = inputs[0].clone()
        x[0, 3, 17, 11] = value
        out, expected = new(x), model(x)
        assert same_kinds(out, expected, in_float64(model)(x.double()))
        torch.testing.assert_close(out[1], new(inputs[0])[1], rtol=0, atol=0)

    @ways
    @torch.no_grad()
    def test_channels_of_almost_one_value(self, case):
        """Sigmoids close to 1, which differ in their last bits: the norm magnifies what the statistics get wrong."""
        model, new, inputs = build(case, "cuda")
        for module in (model, new):
            module.bias.data.fill_(9.0)
            module.scale.data.fill_(1.0)
        right = in_float64(model)(inputs[0].double())
        ours, eager = ((module(*inputs).double() - right).abs().max().item() for module in (new, model))
        assert ours <= 2 * eager

    @torch.no_grad()
    def test_two_streams_at_once(self):
        """Each launch needs all its blocks at once: two launches must not hold half of the GPU each, and wait."""
        _, new, inputs = build(SHAPES[4], "cuda")
        expected = new(*inputs)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        outputs = []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    outputs.append(new(*inputs))
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outputs)

    @torch.no_grad()
    def test_tf32_accuracy_where_the_user_allows_it(self, monkeypatch):
        model, new, inputs = build(SHAPES[2], "cuda")
        right = in_float64(model)(inputs[0].double())
        strict = new(*inputs)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        assert (new(*inputs).double() - right).abs().max().item() <= 2 * (model(*inputs).double() - right).abs().max().item()
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        assert torch.equal(new(*inputs), strict)


def test_inference_and_training_take_our_operators(device):
    """On a CPU training is the plain way."""
    _, new, inputs = build(SHAPES[0], device)
    assert calls(new, *inputs) == ["forward"]
    with Calls() as seen:
        new(*inputs).sum().backward()
    assert seen.names == ([] if device.type == "cpu" else ["record", "backward"])
    assert new.conv.weight.grad is not None


def with_hook(conv):
    conv.register_forward_hook(lambda module, inputs, output: output * 2)
    return conv


def with_weight_norm(conv):
    return torch.nn.utils.parametrizations.weight_norm(conv)


def with_padding(conv):
    conv.padding = (1, 1)
    return conv


def with_stride(conv):
    conv.stride = (2, 1)
    return conv


def without_bias(conv):
    conv.bias = None
    return conv


@pytest.mark.parametrize("change", [with_hook, with_weight_norm, with_padding, with_stride, without_bias], ids=lambda f: f.__name__)
@torch.no_grad()
def test_another_convolution_is_called(change, device):
    model, new, inputs = build(SHAPES[0], device)
    for module in (model, new):
        module.conv = change(module.conv)
    assert calls(new, *inputs) == []
    torch.testing.assert_close(new(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
