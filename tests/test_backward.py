"""The operators that the autograd Functions run backward: every path forced by shape, right in float64 and as accurate as eager's."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws
from cases import DTYPES, LAYOUTS, STEMS, Case, build, in_dtype, solution
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
TAILS = [Tail(Swish, *row) for row in GROUP_NORMS] + [Tail(RowNorm, *row) for row in ROWS]
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
        return [100 + inputs[0], *inputs[1:]]

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


# ---- The linear layer's, where the product is ours.

LINEAR = [stem for stem in ("linear_swish_group_norm", "linear_instance_norm_residual") if stem in STEMS]
linear_pairs = pytest.mark.parametrize("stem", LINEAR)
NEEDS = [needs for needs in itertools.product((False, True), repeat=3) if any(needs)]
# On Hopper all but the first are for the tensor cores.
LINEAR_SHAPES = [(7, 12, 20), (1100, 1032, 1028), (4099, 516, 1028), (128, 8192, 1028), (33000, 132, 260), (600, 260, 9000)]


def operands(m: int, n: int, k: int, device) -> list[torch.Tensor]:
    """The output's gradient, x and W."""
    torch.manual_seed(m + n + k)
    return [torch.randn(size, device=device) for size in ((m, n), (m, k), (n, k))]


def linear_gradients(stem: str, grad, x, w, needs=(True, True, True)) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(solution(stem)._linear_gradients(grad, x, w, list(needs)))


def plain_linear_gradients(grad, x, w) -> list[torch.Tensor]:
    return [grad @ w, grad.t() @ x, grad.sum(0)]


def units_of_error(found: list, grad, x, w) -> list[float]:
    """The largest errors in units of 2^-24 of the sum of the terms' magnitudes, which float32's own bound counts in."""
    wide = [t.double() for t in (grad, x, w)]
    right, terms = plain_linear_gradients(*wide), plain_linear_gradients(*[t.abs() for t in wide])
    errors = []
    for one, true, size in zip(found, right, terms, strict=True):
        error = ((one.double() - true).abs() - 2.0**-148).clamp(min=0) / (2.0**-24 * size).clamp(min=2.0**-149)
        errors.append(error[size < 3e38].max().item())
    return errors


def rows_of_many_sizes(grad, x, w):
    return grad * 2.0 ** torch.randint(-40, 41, (grad.shape[0], 1), device=grad.device), x, w


def columns_of_many_sizes(grad, x, w):
    def sized(t):
        return t * 2.0 ** torch.randint(-30, 31, (1, t.shape[1]), device=t.device)

    return sized(grad), sized(x), sized(w)


def balanced(grad, x, w):
    """Rows that are large in one factor and small in the other."""
    sizes = 2.0 ** torch.randint(-20, 21, (grad.shape[0], 1), device=grad.device)
    return grad * sizes, x / sizes, w


def one_large_row(grad, x, w):
    grad[5] *= 1e12
    return grad, x, w


def an_outlier_in_each(grad, x, w):
    grad[3, 4], x[5, 6], w[7, 8] = 1e7, 1e7, 1e7
    return grad, x, w


def mostly_zeros(grad, x, w):
    return grad * (torch.rand_like(grad) < 0.01), x * (torch.rand_like(x) < 0.3), w * (torch.rand_like(w) < 0.3)


def one_hot_rows(grad, x, w):
    hot = functional.one_hot(torch.randint(x.shape[1], (x.shape[0],), device=x.device), x.shape[1])
    return grad, x * hot, w


def zero_rows_and_columns(grad, x, w):
    grad[::3], grad[:, ::5], x[::4], x[:, ::7], w[::2], w[:, ::3] = 0, 0, 0, 0, 0, 0
    return grad, x, w


def no_gradient_at_all(grad, x, w):
    return 0 * grad, x, w


def denormal_rows(grad, x, w):
    grad[::2] *= 2.0**-135
    return grad, x, w


def tiny_everywhere(grad, x, w):
    return grad * 1e-30, x, w


def huge_everywhere(grad, x, w):
    return grad * 1e30, x * 1e-3, w * 1e-3


def far_from_zero(grad, x, w):
    return grad + 10, x + 100, w


KINDS = [
    rows_of_many_sizes, columns_of_many_sizes, balanced, one_large_row, an_outlier_in_each, mostly_zeros, one_hot_rows, zero_rows_and_columns,
    no_gradient_at_all, denormal_rows, tiny_everywhere, huge_everywhere, far_from_zero,
]  # fmt: skip


def infinite_gradients(grad, x, w):
    grad[::100, 3], grad[7, 9], grad[8, 9] = torch.inf, -torch.inf, torch.inf
    return grad, x, w


def infinite_inputs(grad, x, w):
    x[5, 3], x[6, 4], x[7, 4], w[8, 3], w[9, 5] = torch.inf, torch.inf, -torch.inf, -torch.inf, torch.inf
    return grad, x, w


def infinities_against_zeros(grad, x, w):
    grad[5], grad[:, 6], x[:, 9], w[:, 10] = 0, 0, 0, 0
    grad[20, 30], x[5, 3], w[6, 4] = torch.inf, torch.inf, torch.inf
    return grad, x, w


def infinities_and_nans(grad, x, w):
    grad[5, 6], grad[5, 7], x[8, 9], w[10, 11] = torch.inf, torch.nan, torch.inf, -torch.inf
    x[12, 13], w[14, 15] = torch.nan, torch.nan
    return grad, x, w


def infinities_and_many_sizes(grad, x, w):
    grad, x, w = balanced(grad, x, w)
    return infinite_inputs(grad * 1e-20, x, w)


def nothing_but_infinities(grad, x, w):
    return torch.full_like(grad, torch.inf), x, w.abs()


NOT_FINITE = [
    infinite_gradients, infinite_inputs, infinities_against_zeros, infinities_and_nans, infinities_and_many_sizes, nothing_but_infinities,
]  # fmt: skip


def rows(m: int, n: int, k: int) -> Case:
    return Case("linear_instance_norm_residual", f"{m} rows, {k} features to {n}", (k, n), ((m, k), (m, n)))


def groups(m: int, n: int, k: int, group: int = 64) -> Case:
    return Case("linear_swish_group_norm", f"{m} rows, {k} features to {n} in groups of {group}", (k, n, n // group, (n,)), ((m, k),))


# On Hopper all for the tensor cores: groups of 64 of up to 4096 features go backward in one kernel.
NETWORKS = [
    rows(1100, 1032, 1028), rows(1024, 8192, 260), groups(1100, 1024, 1028), groups(4099, 2112, 260), groups(300, 4096, 1024),
    groups(1100, 4160, 516), groups(1100, 1024, 1028, 128),
]  # fmt: skip
MANY_FEATURES_IN = [rows(1024, 260, 8192), groups(4096, 128, 4096)]  # x and its gradient are nearly all of the memory
BENCHMARKS = {"linear_instance_norm_residual": rows(1024, 8192, 8192), "linear_swish_group_norm": groups(32768, 4096, 1024)}
networks = pytest.mark.parametrize("case", [case for case in NETWORKS if case.stem in STEMS], ids=str)


def network_gradients(module: nn.Module, inputs: list, wanted: list | None = None) -> dict[str, torch.Tensor]:
    """The output and gradients, all or some, of inputs and parameters, by name."""
    leaves = [t.detach().clone() for t in inputs]
    tensors = {**{f"input {i}": t for i, t in enumerate(leaves)}, **dict(module.named_parameters())}
    for name, t in tensors.items():
        t.requires_grad_(wanted is None or name in wanted)
    out = module(*leaves)
    asked = [name for name, t in tensors.items() if t.requires_grad]
    given = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(7), device=out.device).to(out.dtype)
    found = torch.autograd.grad(out, [tensors[name] for name in asked], given)
    return {"output": out.detach(), **dict(zip(asked, found, strict=True))}


def peak_memory(module: nn.Module, inputs: list) -> int:
    """Bytes on the GPU above those before, of the second of two calls."""
    network_gradients(module, inputs)
    one = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(one.clone(), one)  # autograd's thread keeps a call's gradients until it has another to do
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    network_gradients(module, inputs)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
class TestLinearGradientsOnAGPU:
    @linear_pairs
    @pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
    def test_ordinary_data_come_out_better_than_eagers(self, stem, shape):
        inputs = operands(*shape, "cuda")
        right = plain_linear_gradients(*[t.double() for t in inputs])
        for found, eager, true in zip(linear_gradients(stem, *inputs), plain_linear_gradients(*inputs), right, strict=True):
            for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
                # A few units of 2^-24 of the whole, as with what the tensor cores' truncation takes away, may be more than eager's luck.
                assert measure(found.double() - true) <= measure(eager.double() - true) + 2.0**-23 * measure(true)

    @linear_pairs
    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
    def test_no_scale_costs_accuracy(self, stem, kind):
        inputs = kind(*operands(1100, 1032, 1028, "cuda"))
        ours, eager = (units_of_error(f, *inputs) for f in (linear_gradients(stem, *inputs), plain_linear_gradients(*inputs)))
        for own, theirs in zip(ours, eager, strict=True):
            assert own <= 2 * max(theirs, 4)

    @linear_pairs
    @pytest.mark.parametrize("shape", LINEAR_SHAPES[1:], ids=str)
    def test_tf32_where_it_is_allowed(self, stem, shape, monkeypatch):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        inputs = operands(*shape, "cuda")
        right = plain_linear_gradients(*[t.double() for t in inputs])
        for found, eager, true in zip(linear_gradients(stem, *inputs), plain_linear_gradients(*inputs), right, strict=True):
            assert (found.double() - true).square().mean() <= 2 * (eager.double() - true).square().mean() + 2.0**-46 * true.square().mean()

    @linear_pairs
    @pytest.mark.parametrize("kind", NOT_FINITE, ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize("tf32", [False, True], ids=["float32", "TF32"])
    def test_what_is_not_finite_is_what_it_is_in_float32(self, stem, kind, tf32, monkeypatch):
        """An infinity stays one where all its terms agree, NaN is NaN, and the other outputs are as accurate as ever."""
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
        inputs = kind(*operands(1100, 1032, 1028, "cuda"))
        right = plain_linear_gradients(*[t.double() for t in inputs])
        for found, true in zip(linear_gradients(stem, *inputs), right, strict=True):
            assert torch.equal(found.isnan(), true.isnan())
            assert torch.equal(found.isposinf(), true.isposinf()) and torch.equal(found.isneginf(), true.isneginf())
            finite = true.isfinite()
            error = (found - true)[finite].abs()
            assert (error <= (2.0**-9 if tf32 else 2.0**-18) * true.where(finite, 0).abs().max()).all()

    @linear_pairs
    @pytest.mark.parametrize("shape", [*LINEAR_SHAPES, (20000, 516, 132)], ids=str)
    def test_the_bias_gradient_is_summed_no_worse_than_eagers(self, stem, shape):
        grad, x, w = operands(*shape, "cuda")
        right = grad.double().sum(0)
        found, eager = linear_gradients(stem, grad, x, w)[2], grad.sum(0)
        assert (found - right).square().mean() <= (eager - right).square().mean()

    @linear_pairs
    def test_the_same_bits_every_time(self, stem):
        inputs = balanced(*operands(1100, 1032, 1028, "cuda"))
        first = linear_gradients(stem, *inputs)
        for _ in range(5):
            assert all(torch.equal(own, one) for own, one in zip(linear_gradients(stem, *inputs), first, strict=True))

    @linear_pairs
    def test_nothing_is_written_beside_the_results(self, stem):
        inputs = mostly_zeros(*operands(1100, 1032, 1028, "cuda"))
        expected = linear_gradients(stem, *inputs)
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            blocks = [torch.full((size,), 77, dtype=torch.uint8, device="cuda") for size in 9 * [1100 * 1028 * 4, 1032 * 1028 * 4, 3 << 20, 6 << 20]]
            neighbours = [block for i, block in enumerate(blocks) if i // 4 % 2 == 0]
            del blocks
            found = linear_gradients(stem, *inputs)
        assert all(torch.equal(own, one) for own, one in zip(found, expected, strict=True))
        assert all(bool((block == 77).all()) for block in neighbours)
        del neighbours, found

    @networks
    def test_the_networks_are_as_accurate_as_eager(self, case):
        assert_as_accurate_as_eager(network_gradients, draws(case, "cuda", torch.float32))

    @networks
    def test_where_tf32_is_allowed(self, case, monkeypatch):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        assert_as_accurate_as_eager(network_gradients, draws(case, "cuda", torch.float32))

    @networks
    def test_gradients_of_a_part_of_the_network(self, case):
        """Frozen layers get none, and the others what they get without them."""
        _, new, inputs = build(case, "cuda")
        every = network_gradients(new, inputs)
        names = [name for name in every if name != "output"]
        for part in [[name] for name in names] + [[name for name in names if "bmm" not in name and "matmul" not in name]]:
            found = network_gradients(new, inputs, part)
            assert set(found) == {"output", *part}
            for name, own in found.items():
                torch.testing.assert_close(own, every[name], rtol=1e-4, atol=1e-4 * every[name].abs().max().item())

    @pytest.mark.parametrize("case", [case for case in [*NETWORKS, *MANY_FEATURES_IN] if case.stem in STEMS], ids=str)
    def test_no_more_memory_than_eager(self, case):
        model, new, inputs = build(case, "cuda")
        assert peak_memory(new, inputs) <= 1.25 * peak_memory(model, inputs)  # at these sizes a product's partial sums are no small part

    @linear_pairs
    def test_the_benchmark_takes_no_more_memory_than_eager(self, stem):
        model, new, inputs = build(BENCHMARKS[stem], "cuda")
        assert peak_memory(new, inputs) <= peak_memory(model, inputs)

    @linear_pairs
    def test_the_benchmarks_sums_over_the_batch_are_no_worse_than_eagers(self, stem):
        """What all rows' gradients have in common adds up: a product that makes h a few units of 2^-24 too small shows here."""
        model, new, inputs = build(BENCHMARKS[stem], "cuda")
        found, eager = (network_gradients(module, inputs) for module in (new, model))
        right = network_gradients(model.double(), [t.double() for t in inputs])
        for name in [name for name in right if right[name].dim() == 1]:
            for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
                assert measure(found[name] - right[name]) <= measure(eager[name] - right[name])

    @linear_pairs
    def test_a_captured_graph_replays_on_new_inputs(self, stem):
        inputs = operands(1100, 1032, 1028, "cuda")
        linear_gradients(stem, *inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear_gradients(stem, *inputs)
        for t in inputs:
            t.normal_()
        graph.replay()
        assert all(torch.equal(own, one) for own, one in zip(found, linear_gradients(stem, *inputs), strict=True))


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
