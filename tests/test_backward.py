"""The gradients of the linear pairs where the product is ours: large float32 layers on Hopper. Elsewhere they are the Model's own lines."""

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws
from cases import STEMS, Case, build
from torch import nn

LINEAR = [stem for stem in ("linear_swish_group_norm", "linear_instance_norm_residual") if stem in STEMS]
linear_pairs = pytest.mark.parametrize("stem", LINEAR)


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


def rows_of_many_sizes(inputs: list) -> list:
    """x's rows are 2^-20 to 2^20 of what they were."""
    x = inputs[0]
    exponents = torch.randint(-20, 21, (x.shape[0], 1), generator=torch.Generator().manual_seed(1)).to(x.device)
    return [x * 2.0**exponents, *inputs[1:]]


def an_outlier(inputs: list) -> list:
    x = inputs[0].clone()
    x[3, 5] = 1e6
    return [x, *inputs[1:]]


def mostly_zeros(inputs: list) -> list:
    x = inputs[0].clone()
    x[:, 3:] = 0
    return [x, *inputs[1:]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
class TestLinearGradientsOnAGPU:
    @networks
    @pytest.mark.parametrize("change", [rows_of_many_sizes, an_outlier, mostly_zeros], ids=lambda change: change.__name__)
    def test_no_scale_costs_accuracy(self, case, change):
        """To the norm of each gradient: twice eager's error at most."""
        model, new, inputs = build(case, "cuda")
        inputs = change(inputs)
        found, eager = (network_gradients(module, inputs) for module in (new, model))
        right = network_gradients(model.double(), [t.double() for t in inputs])
        for name, true in right.items():
            own, theirs = ((values[name] - true).norm() for values in (found, eager))
            assert own <= 2 * theirs + 2.0**-23 * true.norm(), name

    @networks
    def test_what_is_not_finite_is_not_finite(self, case):
        model, new, inputs = build(case, "cuda")
        inputs[0][2, 1] = torch.inf
        found, eager = (network_gradients(module, inputs) for module in (new, model))
        for name, theirs in eager.items():
            assert torch.equal(found[name].isfinite(), theirs.isfinite()), name

    @networks
    def test_the_same_bits_every_time(self, case):
        _, new, inputs = build(case, "cuda")
        first, again = (network_gradients(new, inputs) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in first)

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
