"""The operators that the autograd Functions run backward: every path forced by shape, right in float64 and as accurate as eager's."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from accuracy import assert_as_accurate_as_eager
from cases import DTYPES, LAYOUTS, in_dtype, solution
from torch import nn
from torch.nn import functional

EPS = 1e-5


class Swish(nn.Module):
    """The Model after its matrix product."""

    stem, function = "linear_swish_group_norm", "SwishGroupNorm"

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.groups = groups
        self.bias, self.weight, self.group_bias = (nn.Parameter(torch.randn(channels)) for _ in range(3))

    def per_channel(self, vector: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return vector.view(-1, *[1] * (h.dim() - 2))

    def activated(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(h) * h + self.per_channel(self.bias, h)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(self.activated(h), self.groups, self.weight, self.group_bias, EPS)

    def arguments(self, h: torch.Tensor) -> tuple:
        return h, self.bias, self.weight, self.group_bias, self.groups, EPS


class Sigmoid(Swish):
    stem, function = "conv_sigmoid_group_norm", "SigmoidGroupNorm"

    def __init__(self, channels: int, groups: int):
        super().__init__(channels, groups)
        self.scale = nn.Parameter(torch.randn(channels))

    def activated(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid((h + self.per_channel(self.bias, h)) * self.per_channel(self.scale, h))

    def arguments(self, h: torch.Tensor) -> tuple:
        return h, self.bias, self.scale, self.weight, self.group_bias, self.groups, EPS


class RowNorm(nn.Module):
    stem, function = "linear_instance_norm_residual", "RowNormResidual"

    def forward(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (functional.instance_norm(h[:, None], eps=EPS)[:, 0] + y) * y

    def arguments(self, h: torch.Tensor, y: torch.Tensor) -> tuple:
        return h, y, EPS


class Ours(nn.Module):
    """The same through our autograd Function."""

    def __init__(self, tail: nn.Module):
        super().__init__()
        self.tail, self.apply_function = tail, getattr(solution(tail.stem), tail.function).apply

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.apply_function(*self.tail.arguments(*inputs))


@dataclass(frozen=True)
class Tail:
    kind: type
    name: str
    shape: tuple
    groups: int = 0  # of a GroupNorm

    def __str__(self) -> str:
        return f"{self.kind.__name__} of {self.name}"

    def build(self, device, dtype=torch.float32, seed: int = 0) -> tuple[nn.Module, nn.Module, list]:
        """Plain PyTorch, ours with the same parameters, and the inputs; the last of them is the output's gradient."""
        torch.manual_seed(seed)
        model = (self.kind(self.shape[1], self.groups) if self.groups else self.kind()).to(device, dtype)
        inputs = [torch.randn(self.shape).to(device, dtype) for _ in range(2 if self.groups else 3)]
        return model, Ours(model), inputs


GROUP_NORMS = [
    ("groups of 64 features", (37, 1024), 16),
    ("groups of 63 features", (5, 252), 4),
    ("groups of two features", (9, 14), 7),
    ("many rows of four features", (50001, 4), 1),
    ("groups of 520 features", (3, 1040), 2),
    ("groups of 3000 features", (3, 6000), 2),
    ("groups of 1100 odd features", (3, 2202), 2),
    ("groups of 5001 features", (2, 10002), 2),
    ("one row", (1, 32), 2),
    ("no rows", (0, 32), 2),
    ("sequences of three", (4, 6, 3), 2),
    ("images of 6x8", (3, 8, 6, 8), 4),
    ("images of 7x7", (3, 96, 7, 7), 2),
    ("images of 33x33", (2, 4, 33, 33), 2),
    ("images of 70x71", (3, 6, 70, 71), 3),
    ("images of 94x90", (2, 4, 94, 90), 1),
    ("large odd images", (1, 3, 301, 303), 1),
    ("many images of two pixels", (20001, 2, 1, 2), 1),
]
ROWS = [
    ("64 features", (9, 64)),
    ("73 features", (5, 73)),
    ("8192 features", (3, 8192)),
    ("8191 features", (2, 8191)),
    ("16400 features", (3, 16400)),
    ("150001 features", (2, 150001)),
    ("two features in many rows", (50001, 2)),
]
TAILS = [Tail(kind, *row) for kind in (Swish, Sigmoid) for row in GROUP_NORMS] + [Tail(RowNorm, *row) for row in ROWS]
FEW = [t for t in TAILS if t.name in ("groups of 64 features", "groups of 5001 features", "images of 33x33", "73 features", "16400 features")]

few_tails = pytest.mark.parametrize("tail", FEW, ids=str)
all_tails_and_dtypes = pytest.mark.parametrize(
    ("tail", "dtype"), [pytest.param(tail, dtype, id=f"{tail} {in_dtype(dtype)}") for tail in TAILS for dtype in DTYPES]
)


def gradients(module: nn.Module, inputs: list, lay: Callable = lambda grad: grad) -> dict[str, torch.Tensor]:
    """Of all inputs and parameters, by name."""
    *values, grad = inputs
    tensors = {f"input {i}": t.detach().requires_grad_() for i, t in enumerate(values)}
    out = module(*tensors.values())
    tensors |= {name.removeprefix("tail."): parameter for name, parameter in module.named_parameters()}
    return dict(zip(tensors, torch.autograd.grad(out, list(tensors.values()), lay(grad)), strict=True))


def samples(tail: Tail, device, dtype, change: Callable = lambda inputs: inputs):
    for seed in range(24):
        model, ours, inputs = tail.build(device, dtype, seed)
        yield model, ours, change(inputs)


@all_tails_and_dtypes
def test_as_accurate_as_eager(tail, dtype, device):
    assert_as_accurate_as_eager(gradients, samples(tail, device, dtype))


@few_tails
def test_a_gradient_far_from_zero(tail, device):
    """What all values of a slice share does not reach h: it must not drown what does."""
    assert_as_accurate_as_eager(gradients, samples(tail, device, torch.float32, lambda inputs: [*inputs[:-1], 1000 + inputs[-1]]))


@few_tails
def test_values_far_from_zero(tail, device):
    def shifted(inputs: list) -> list:
        return [100 + inputs[0], *inputs[1:]] if tail.kind is not Sigmoid else [inputs[0] / 8, *inputs[1:]]

    assert_as_accurate_as_eager(gradients, samples(tail, device, torch.float32, shifted))


@few_tails
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_outputs_gradient_in_any_layout(tail, layout, device):
    def run(module, inputs):
        return gradients(module, inputs, LAYOUTS[layout] if isinstance(module, Ours) else lambda grad: LAYOUTS[layout](grad).contiguous())

    assert_as_accurate_as_eager(run, samples(tail, device, torch.float32))


@few_tails
def test_each_gradient_alone_is_the_same(tail, device):
    """Of all combinations: bit for bit what it is among all of them."""
    _, ours, inputs = tail.build(device)
    expected = gradients(ours, inputs)
    *values, grad = inputs
    for mask in range(1, 2 ** len(expected)):
        asked = [name for i, name in enumerate(expected) if mask >> i & 1]
        leaves = {f"input {i}": t.detach().requires_grad_(f"input {i}" in asked) for i, t in enumerate(values)}
        for name, parameter in ours.tail.named_parameters():
            leaves[name] = parameter.requires_grad_(name in asked)
        out = ours(*[leaves[f"input {i}"] for i in range(len(values))])
        for name, found in zip(asked, torch.autograd.grad(out, [leaves[name] for name in asked], grad), strict=True):
            assert torch.equal(found, expected[name]), f"{name} among {asked}"


@few_tails
def test_what_nobody_asked_for_is_not_returned(tail, device):
    _, ours, inputs = tail.build(device)
    *values, grad = inputs
    tensors = [t for t in ours.tail.arguments(*values) if isinstance(t, torch.Tensor)]
    numbers = ours.tail.arguments(*values)[len(tensors) :]
    taken = tensors if tail.kind is RowNorm else tensors[:-1]  # the norm's own bias has no part in any gradient
    for wanted in range(len(tensors)):
        needs = [i == wanted for i in range(len(tensors))]
        with torch.no_grad():
            found = solution(tail.kind.stem)._backward(grad, *taken, *numbers, needs)
        assert [t.numel() > 0 for t in found] == needs


@few_tails
def test_the_same_bits_every_time(tail, device):
    _, ours, inputs = tail.build(device)
    first, second = gradients(ours, inputs), gradients(ours, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@few_tails
def test_second_derivatives(tail, device):
    """With create_graph the gradient is made of differentiable operators: its gradient is the plain one's."""

    def second(module, inputs):
        *values, grad = inputs
        leaves = [t.detach().requires_grad_() for t in values]
        tensors = [*leaves, *module.parameters()]
        first = torch.autograd.grad(module(*leaves), tensors, grad, create_graph=True)
        sums = [t.square().sum() for t in first if t.requires_grad]  # the norm's own bias gets what depends on nothing
        return torch.autograd.grad(sums, tensors, allow_unused=True, materialize_grads=True)

    model, ours, inputs = tail.build(device, torch.float64)
    for found, expected in zip(second(ours, inputs), second(model, inputs), strict=True):
        torch.testing.assert_close(found, expected)


@few_tails
def test_a_gradient_of_the_operator_itself_is_refused(tail, device):
    _, ours, inputs = tail.build(device)
    *values, grad = inputs
    arguments = ours.tail.arguments(*values)
    taken = arguments if tail.kind is RowNorm else (*arguments[:-3], *arguments[-2:])
    needs = [True] * sum(isinstance(a, torch.Tensor) for a in arguments)
    found = solution(tail.kind.stem)._backward(grad.requires_grad_(), *taken, needs)
    with pytest.raises(RuntimeError, match="not implemented"):
        found[0].sum().backward()


@few_tails
def test_a_gradient_of_another_shape_or_dtype_is_refused(tail, device):
    _, ours, inputs = tail.build(device)
    *values, grad = inputs
    arguments = ours.tail.arguments(*values)
    taken = arguments if tail.kind is RowNorm else (*arguments[:-3], *arguments[-2:])
    needs = [True] * sum(isinstance(a, torch.Tensor) for a in arguments)
    for wrong in (grad[:1], grad.double()):
        with torch.no_grad(), pytest.raises(RuntimeError, match="the gradient must have"):
            solution(tail.kind.stem)._backward(wrong, *taken, needs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
class TestOnlyOnAGPU:
    @few_tails
    def test_no_call_waits_for_the_device(self, tail):
        _, ours, inputs = tail.build("cuda")
        gradients(ours, inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gradients(ours, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @few_tails
    def test_a_captured_graph_replays_on_new_inputs(self, tail):
        _, ours, inputs = tail.build("cuda")
        gradients(ours, inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradients(ours, inputs)
        for t in inputs:
            t.copy_(torch.randn_like(t))
        graph.replay()
        for name, expected in gradients(ours, inputs).items():
            assert torch.equal(found[name], expected)

    @pytest.mark.parametrize(
        "tail",
        [
            Tail(Swish, "2^31 features", (2**21 + 5, 1024), 16),
            Tail(Sigmoid, "2^31 pixels", (3, 7, 10241, 10240), 7),
            Tail(RowNorm, "2^31 features in short rows", (2**18 + 5, 8192)),
            Tail(RowNorm, "2^31 features in long rows", (7, 2**28 + 2**26 + 3)),
        ],
        ids=str,
    )
    def test_more_than_2_to_the_31_values(self, tail):
        if torch.cuda.mem_get_info()[0] < 40e9:
            pytest.skip("needs 40 GB of the device's memory")
        torch.manual_seed(0)
        model = (tail.kind(tail.shape[1], tail.groups) if tail.groups else tail.kind()).to("cuda", torch.float16)
        inputs = [torch.randn(tail.shape, device="cuda", dtype=torch.float16) for _ in range(2 if tail.groups else 3)]
        found = gradients(Ours(model), inputs)
        last = gradients(Ours(model), [t[-1:].clone() for t in inputs])
        for i in range(len(inputs) - 1):
            torch.testing.assert_close(found[f"input {i}"][-1:], last[f"input {i}"])
        if tail.groups:  # the sums, against PyTorch's own
            torch.testing.assert_close(found["group_bias"], inputs[-1].transpose(0, 1).flatten(1).float().sum(1).half(), rtol=2e-3, atol=1)
