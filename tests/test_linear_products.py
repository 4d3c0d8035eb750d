"""Float32 products on fp16 tensor cores, of both linear pairs: as accurate as cuBLAS's float32 whatever the scales.

Where three products on tensor cores are faster than one of SGEMM (compute capability 8.0, 9.0 and 10.x) they take most
of the shapes here; elsewhere the same tests hold ATen's product to the same bounds.
"""

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, forward
from cases import ON_HOPPER, STEMS, Case, build, for_each_file, solution
from test_gradients import assert_several_at_once_are_the_models, both_ways, gradients
from torch import nn

PAIRS = [stem for stem in ("linear_instance_norm_residual", "linear_swish_group_norm") if stem in STEMS]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(PAIRS) < 2, reason="the two linear pairs are not both here")]

on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="for sm_90")
tf32 = pytest.mark.parametrize("tf32", [False, True], ids=["strict", "TF32 allowed"])

M, N, K = 1536, 1024, 1024  # tiles for most SMs of any GPU


def rows(m: int, n: int, k: int) -> Case:
    name = f"{m} rows, {k} features to {n}"
    return Case("linear_instance_norm_residual", name, (k, n), ((m, k), (m, n)))


def groups(m: int, n: int, k: int, group: int = 64) -> Case:
    name = f"{m} rows, {k} features to {n} in groups of {group}"
    return Case("linear_swish_group_norm", name, (k, n, n // group, (n,)), ((m, k),))


SMALL = groups(7, 192, 1001)

# fmt: off
CASES = for_each_file([rows(M, N, K), groups(M, N, K)])
ODD = for_each_file([
    rows(1, 4096, 1024), rows(37, 2112, 1032), rows(1000, 1032, 1100), rows(4097, 2056, 132), rows(129, 8192, 1028),
    rows(2000, 640, 9000), rows(300, 264, 1001), groups(3, 2112, 2056), groups(1000, 1088, 1100),
    groups(4097, 2112, 132), groups(129, 8192, 1028), groups(640, 192, 9000), groups(1500, 1024, 1024, 32),
    groups(1500, 1024, 1024, 128), groups(300, 256, 1001), groups(2048, 1024, 1024, 1024),
])
LARGE = for_each_file([  # one product pays beside cuBLAS's TF32, in the portable file only in the last two
    rows(4000, 4096, 1024), groups(4000, 4096, 1024), groups(4100, 4096, 1024), groups(4100, 4096, 1024, 32),
])
TRAINED = for_each_file([  # the backward's product is ours, or just not
    rows(1500, 1288, 1100), rows(1024, 8192, 260), groups(1100, 1024, 1028), groups(4099, 2112, 260),
    groups(1100, 4160, 516), groups(1100, 1024, 1028, 128), SMALL, groups(1000, 8192, 132), groups(4099, 4160, 132),
    groups(4099, 4160, 132, 32),
])
# fmt: on
SMALLEST = for_each_file([rows(1024, 1024, 1024), groups(1024, 1024, 1024)])  # that kernels/hopper takes
BENCHMARKS = for_each_file([rows(1024, 8192, 8192), groups(32768, 4096, 1024)])
trained = pytest.mark.parametrize("case", TRAINED, ids=str)


@pytest.mark.parametrize("stem", PAIRS)
def test_outputs_of_few_tiles_are_left_to_pytorch(stem):
    fits = solution(f"hopper/{stem}")._product_fits
    assert fits(2**20, 128, 128, 4) and fits(512, 512, 2**13, 4)
    assert not fits(128, 128, 2**16, 4) and not fits(512, 512, 2**13, 2)


@pytest.mark.parametrize("case", SMALLEST, ids=str)
def test_several_gradients_at_once(case, device):
    assert_several_at_once_are_the_models(case, device)


def of_rows(t, most: int):
    """A power of two for each row."""
    return 2.0 ** torch.randint(-most, most + 1, (t.shape[0], 1), device=t.device)


def of_features(t):
    return 2.0 ** (torch.arange(t.shape[1], device=t.device) % 81 - 40)


def outliers(x, w):
    """One in each row of x, small ones and huge ones."""
    sizes = 10.0 ** torch.randint(3, 31, (x.shape[0],), device=x.device)
    x[torch.arange(x.shape[0]), torch.randint(x.shape[1], (x.shape[0],))] = sizes


def vanishing(x, w):
    """Of each row of x all values but one are so small that they are 0 when scaled; and W ignores the one."""
    x.mul_(2.0**-91)[:, 0] = 2.0**74
    w.sign_().mul_(2.0**74)[:, 0] = 0


KINDS = {  # normal x and W, changed in place
    "uniform": lambda x, w: (x.uniform_(), w.uniform_(-(K**-0.5), K**-0.5)),
    "normal": lambda x, w: None,
    "far from zero": lambda x, w: x.add_(100),
    "rows of many sizes": lambda x, w: (x.mul_(of_rows(x, 40)), w.mul_(of_rows(w, 40))),
    "balanced": lambda x, w: (x.mul_(of_features(x)), w.div_(of_features(w))),
    "zero rows": lambda x, w: (x[::3].zero_(), w[::5].zero_()),
    "denormals": lambda x, w: x[::2].mul_(2.0**-140),
    "tiny rows": lambda x, w: (x.mul_(2.0**-100), w[::2].mul_(2.0**-20)),
    "near the largest": lambda x, w: (x.sign_().mul_((0.5 + 0.5 * torch.rand_like(x)) * 3.4e38), w.mul_(1e-3)),
    "mostly zeros": lambda x, w: (x.mul_(torch.rand_like(x) < 0.05), w.mul_(torch.rand_like(w) < 0.5)),
    "heavy-tailed": lambda x, w: (x.mul_(3).exp_(), w.mul_((2 * torch.randn_like(w)).exp())),
    "outliers": outliers,
    "vanishing beside the largest": vanishing,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def product(kind, m: int = M, n: int = N, k: int = K):
    """Ours, eager's, the right one, and the sum of the magnitudes of its terms."""
    torch.manual_seed(3)
    x, w = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda") * k**-0.5
    kind(x, w)
    b = torch.zeros(n, device="cuda")
    operators = getattr(torch.ops, solution("linear_instance_norm_residual").NAMESPACE)
    eager = nn.functional.linear(x, w, b)
    ours = operators.forward(x, w, b)
    return ours, eager, x.double() @ w.double().T, x.double().abs() @ w.double().abs().T


def worst(out, right, terms) -> float:
    """The error in units of 2^-24 of the sum of magnitudes: what float32's own bound counts in."""
    error = ((out.double() - right).abs() - 2.0**-148).clamp(min=0) / (2.0**-24 * terms).clamp(min=2.0**-149)
    return error[out.isfinite() & terms.isfinite() & (right.abs() < 3.4e38)].max().item()


def largest_and_rms(out, right) -> torch.Tensor:
    error = (out.double() - right)[right.abs() < 3.3e38]
    return torch.stack([error.abs().max(), error.square().mean().sqrt()]).cpu()


@kinds
def test_no_scale_costs_accuracy(kind):
    ours, eager, right, terms = product(KINDS[kind])
    assert bool(ours[right.abs() < 3.3e38].isfinite().all())
    assert worst(ours, right, terms) <= 2 * max(worst(eager, right, terms), 1)


@kinds
@pytest.mark.parametrize(("m", "n", "k"), [(M, N, K), (1024, 2048, 8192), (4096, 4096, 128), (2048, 512, 20000)])
def test_comes_out_no_worse_than_eagers(kind, m, n, k):
    """Not below where both are right to the last bit. Where few products count, eager hardly rounds: see the bound."""
    ours, eager, right, _ = product(KINDS[kind], m, n, k)
    ours, eager = largest_and_rms(ours, right), largest_and_rms(eager, right)
    if kind in ("mostly zeros", "heavy-tailed", "outliers"):  # few products count: to the norm of the result
        assert bool(ours[1] <= 2 * eager[1] + 2.0**-23 * right.square().mean().sqrt().cpu())
    else:
        assert bool((ours <= eager).all())
    if kind in ("uniform", "normal"):
        assert bool((ours < eager).all())


def test_integers_are_exact():
    ours, _, right, _ = product(lambda x, w: (x.random_(-300, 301), w.random_(-8, 9)))
    assert torch.equal(ours.double(), right)


def test_one_bad_row_spoils_no_other():
    def one_bad(x, w):
        x[7] *= of_features(x)
        x[500, 3], x[600, 5] = torch.inf, torch.nan

    ours, eager, right, terms = product(one_bad)
    assert torch.equal(ours.isfinite(), eager.isfinite())
    assert worst(ours, right, terms) <= 2 * worst(eager, right, terms)


@on_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_the_tensor_cores_run(case):
    """The product's kernel is ours, not a library's."""
    _, new, inputs = build(case, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        new(*inputs)
        torch.cuda.synchronize()
    assert any("multiply<" in event.name for event in profile.events())


@pytest.mark.parametrize("case", CASES + ODD + LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@tf32
def test_networks_are_as_accurate_as_eager(case, dtype, tf32, matmul_tf32):
    matmul_tf32(tf32)
    assert_as_accurate_as_eager(forward, [build(case, "cuda", dtype)])


@pytest.mark.parametrize("case", LARGE, ids=str)
@torch.no_grad()
def test_sums_in_fp16_may_be_allowed_after_compiling(case, matmul_tf32, monkeypatch):
    """PyTorch then refuses an fp16 product with a float32 result, and does not compile anew."""
    matmul_tf32(True)
    _, new, inputs = build(case, "cuda")
    compiled = torch.compile(new, backend="eager")
    before = compiled(*inputs)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True)
    torch.testing.assert_close(compiled(*inputs), before, rtol=0, atol=1e-4)


@torch.no_grad()
def near_4_and_cancelled(model, new, inputs):
    """x is near 4, and the linear bias is about minus the product: what is rounded before it is added is lost."""
    for module in (model, new):
        linear = next(m for m in module.modules() if isinstance(m, nn.Linear))
        linear.weight.add_(0.05)
        linear.bias.copy_(-4 * linear.weight.double().sum(1))
    return [4 + inputs[0] / 100, *inputs[1:]]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_bias_that_cancels_the_product_costs_no_accuracy(case, dtype):
    assert_as_accurate_as_eager(forward, draws(case, "cuda", dtype, near_4_and_cancelled))


@pytest.mark.parametrize("case", [*CASES, SMALL], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_what_is_not_finite_stays_where_the_model_has_it(case, dtype, value):
    """In the output; and its gradients are finite where the Model's are."""
    for place in ("x", "weight", "bias"):
        model, new, inputs = build(case, "cuda", dtype)
        for module in (model, new):
            linear = next(m for m in module.modules() if isinstance(m, nn.Linear))
            tensors = {"x": inputs[0], "weight": linear.weight.data, "bias": linear.bias.data[None]}
            tensors[place][::100, 3] = value
        expected, found = (both_ways(module, inputs) for module in (model, new))
        for name, own in found.items():
            assert torch.equal(own.isfinite(), expected[name].isfinite()), f"{name}, {place}"
        assert torch.equal(found["output"].isnan(), expected["output"].isnan()), place


def ours_eagers_and_right(case: Case, change=lambda x, w: None) -> tuple[dict, dict, dict]:
    model, new, inputs = build(case, "cuda")
    with torch.no_grad():
        change(inputs[0], next(p for p in model.parameters() if p.dim() == 2))
    new.load_state_dict(model.state_dict())
    found, eager = (both_ways(module, inputs) for module in (new, model))
    return found, eager, both_ways(model.double(), [t.double() for t in inputs])


@trained
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@tf32
def test_gradients_are_as_accurate_as_eager(case, dtype, tf32, matmul_tf32):
    matmul_tf32(tf32)
    assert_as_accurate_as_eager(both_ways, draws(case, "cuda", dtype))


BADLY_SCALED = {  # x and the weights, in place
    "many sizes": lambda x, w: x.mul_(of_rows(x, 20)),
    "an outlier": lambda x, w: x[3, 5].fill_(1e6),
    "three columns": lambda x, w: x[:, 3:].zero_(),
    "one-hot rows": lambda x, w: x.zero_().fill_diagonal_(1, wrap=True),
    "one-hot weights": lambda x, w: w.zero_().fill_diagonal_(1, wrap=True),
    "large weights of a feature": lambda x, w: (x.abs_(), w[5].abs_().mul_(1e6)),
    "large weights of a feature that Swish shuts": lambda x, w: (x.abs_(), w[5].abs_().mul_(-1e6)),
}


@trained
@pytest.mark.parametrize("change", BADLY_SCALED.values(), ids=BADLY_SCALED)
def test_no_scale_costs_gradients_accuracy(case, change):
    """To the norm of each gradient: twice eager's error at most."""
    found, eager, right = ours_eagers_and_right(case, change)
    for name, true in right.items():
        own, theirs = ((values[name] - true).norm() for values in (found, eager))
        assert own <= 2 * theirs + 2.0**-23 * true.norm(), name


def test_a_gradient_of_0_by_the_largest_y_is_0():
    _, new, (x, y) = build(BENCHMARKS[0], "cuda")
    y.fill_(torch.finfo(y.dtype).max).requires_grad_()
    (found,) = torch.autograd.grad(new(x, y), y, torch.zeros_like(y))
    assert not found.any()


@trained
def test_gradients_of_a_part_of_the_network(case, deterministic):
    """Frozen layers get none, the others what they get without them; the same bits every time."""
    _, new, inputs = build(case, "cuda")

    def output_and(part: list | None = None) -> dict[str, torch.Tensor]:
        found = gradients(new, inputs, wanted=part)
        return found | forward(new, inputs)  # with the same parameters frozen

    every, again = output_and(), output_and()
    assert all(torch.equal(every[name], again[name]) for name in every)
    names = [name for name in every if name != "output"]
    for part in [[name] for name in names] + [[name for name in names if "bmm" not in name and "matmul" not in name]]:
        found = output_and(part)
        assert [*found] == [*part, "output"]
        for name, own in found.items():
            torch.testing.assert_close(own, every[name], rtol=1e-4, atol=1e-4 * every[name].abs().max().item())


@pytest.mark.parametrize("case", BENCHMARKS, ids=str)
def test_the_benchmarks_sums_over_the_batch_are_no_worse_than_eagers(case):
    """What all rows' gradients have in common adds up: a product a few units of 2^-24 too small shows here."""
    found, eager, right = ours_eagers_and_right(case)
    for name in [name for name in right if right[name].dim() == 1]:
        for measure in (lambda e: e.abs().max(), lambda e: e.square().mean().sqrt()):
            assert measure(found[name] - right[name]) <= measure(eager[name] - right[name])
