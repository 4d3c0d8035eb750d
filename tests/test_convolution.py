"""conv_sigmoid_group_norm on a GPU, in both directions: every way through its kernels."""

import functools
import itertools

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, forward, in_both, poisoned, same_kinds
from cases import COMPILED, STEMS, Case, build, for_each_file, in_float64
from test_gradients import ROUNDINGS, both_ways, gradients

STEM = "conv_sigmoid_group_norm"
HOPPER = f"hopper/{STEM}"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(STEM not in STEMS, reason="the pair is not here")]


def case(name: str, samples: int, channels: int, height: int, width: int, size, groups: int, of_group: int) -> Case:
    out = groups * of_group
    init = (channels, out, size, groups, (out, 1, 1), (out, 1, 1))
    return Case(STEM, name, init, ((samples, channels, height, width),))


SHAPES = for_each_file(
    [
        case("groups of four channels", 2, 8, 34, 36, 3, 8, 4),
        case("an odd size", 2, 8, 35, 37, 3, 8, 4),
        case("the benchmark's images", 3, 8, 256, 256, 3, 8, 4),
        case("images 260 wide", 2, 8, 40, 260, 3, 8, 4),
        case("images 131 wide", 1, 8, 17, 131, 3, 8, 4),
        case("more samples than teams", 70, 8, 130, 130, 3, 8, 4),
        case("many small samples", 300, 8, 34, 34, 3, 4, 4),
        case("narrow images", 2, 8, 200, 20, 3, 2, 4),
        case("shared memory used to its last bytes", 128, 3, 62, 62, 3, 2, 2),  # of 227 KiB, on 132 SMs
        case("low images", 2, 8, 3, 400, 3, 8, 4),
        case("groups of three channels from three", 2, 3, 63, 67, 3, 3, 3),
        case("a group for each of seven channels", 2, 5, 130, 130, 3, 7, 1),
        case("one channel to one", 3, 1, 40, 42, 3, 1, 1),
        case("images too large for the kernels", 1, 8, 520, 516, 3, 8, 4),
        case("such images of odd width", 1, 8, 600, 601, 3, 8, 4),
        case("images seven pixels wide", 2, 8, 300, 7, 3, 8, 4),
        case("images too small for the kernels", 2, 8, 10, 10, 3, 8, 4),
        case("64 channels to 128", 2, 64, 56, 56, 3, 32, 4),
        case("40 channels to 75, and pixels by eights", 2, 40, 29, 66, 3, 15, 5),
        case("1x1 kernels of an odd size", 2, 20, 57, 59, 1, 4, 6),
        case("5x5 kernels", 2, 8, 37, 70, 5, 8, 4),
        case("a group of 96 channels from 40, in more tiles than run at once", 1, 40, 400, 515, 3, 1, 96),
        case("groups that two tiles of channels share", 2, 20, 29, 66, 3, 15, 5),
        case("one group of 96 channels, in more tiles than run at once", 1, 3, 400, 516, 3, 1, 96),
    ]
)
NAMED = {case.name: case for case in SHAPES if case.stem == STEM}
FEW, MANY = NAMED["groups of four channels"], NAMED["64 channels to 128"]
BENCHMARK, ODD = NAMED["the benchmark's images"], NAMED["an odd size"]
shapes = pytest.mark.parametrize("case", SHAPES, ids=str)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_is_as_accurate_as_eager(case, dtype):
    assert_as_accurate_as_eager(forward, draws(case, "cuda", dtype))


@shapes
def test_gradients_are_as_accurate_as_eagers(case):
    assert_as_accurate_as_eager(gradients, draws(case, "cuda", torch.float32))


@shapes
def test_gives_the_same_bits_each_time_and_whether_gradients_are_recorded_or_not(case, deterministic):
    """The last where one kernel takes the sizes: elsewhere the forward that records is the Model's own lines."""
    _, new, inputs = build(case, "cuda")
    first = both_ways(new, inputs)
    for _ in range(10):
        again = both_ways(new, inputs)
        assert all(torch.equal(again[name], first[name]) for name in first)
    recorded = new(*inputs).detach()
    torch.testing.assert_close(recorded, first["output"], rtol=1e-4, atol=1e-4)
    if case in (FEW, BENCHMARK):
        assert torch.equal(recorded, first["output"])


def inputs_of(magnitude):
    return lambda model, new, inputs: [inputs[0] * magnitude]


def weights_of(magnitude):
    def change(model, new, inputs):
        for module in (model, new):
            module.conv.weight.data.mul_(magnitude)
        return [inputs[0] / min(magnitude, 1e6)]

    return change


def a_few_beyond_half_precision(model, new, inputs):
    x = inputs[0].clone()
    x[0, 3, 17, 11], x[1, 0, 0, 0], x[1, -1, -1, -1] = 1e6, -7e5, 1e9
    return [x]


def channels_of_almost_one_value(scale):
    """Sigmoids close to 1, which differ in their last bits: the norm magnifies what the statistics get wrong."""
    return in_both(lambda module: (module.bias.fill_(9.0), module.scale.fill_(scale)))


def first_column_of(size):
    return lambda model, new, inputs: [torch.cat([size * inputs[0][..., :1], inputs[0][..., 1:]], -1)]


HARD = {  # on fp16
    **{f"inputs of {magnitude:g}": inputs_of(magnitude) for magnitude in (1e-30, 1e-6, 1e-3, 1e3, 1e6, 1e30)},
    **{f"weights of {magnitude:g}": weights_of(magnitude) for magnitude in (1e-30, 1e-6, 1e3, 1e20)},
    "a few inputs beyond half precision": a_few_beyond_half_precision,
    "channels of almost one value": channels_of_almost_one_value(1.0),
    "one huge scale": in_both(lambda module: (module.bias[5].fill_(9.0), module.scale[5].fill_(3e38))),  # sigmoids of 1
    **{f"a first column of {size:g}": first_column_of(size) for size in (100.0, 1e6)},
}


@pytest.mark.parametrize("case", [FEW, MANY], ids=["few channels", "many channels"])
@pytest.mark.parametrize("change", HARD)
def test_is_as_accurate_as_eager_with(case, change):
    assert_as_accurate_as_eager(forward, draws(case, "cuda", torch.float32, HARD[change]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_groups_of_one_value_give_beta_in_16_bits(dtype):
    _, new, (x,) = build(NAMED["one channel to one"], "cuda", dtype)
    new.group_norm.bias.data.zero_()  # any other would hide an error of 1e-5 in 16 bits
    assert new(torch.zeros_like(x)).abs().max().item() < 1e-8  # float16 has none between 0 and 6e-8


@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-3, 1e3])
def test_gradients_of_any_magnitude(magnitude):
    scaled = functools.partial(gradients, lay=lambda grad: grad * magnitude)
    assert_as_accurate_as_eager(scaled, draws(FEW, "cuda", torch.float32))


@pytest.mark.parametrize("case", [FEW, ODD, NAMED["one channel to one"]], ids=str)
def test_the_gradient_of_beta_where_large_values_cancel(case):
    """It is the sum of what comes in, without another rounding than its own. The next sums are 1e-4 of the values."""
    _, new, inputs = build(case, "cuda")
    out = new(*inputs)
    values = torch.randn_like(out)
    grad = values - values.flip(2, 3) + 1e-4 * torch.randn_like(out)
    out.backward(grad)
    right = grad.double().sum((0, 2, 3))
    assert ((new.group_norm.bias.grad - right).abs() <= 2**-23 * right.abs()).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("case", [FEW, ODD, NAMED["one channel to one"]], ids=str)
def test_the_gradient_of_beta_is_infinite_where_that_of_the_output_is(case, value):
    """Not NaN, though the sum is corrected by a difference of its terms; and the other channels' are as they were."""
    model, new, inputs = build(case, "cuda")
    for module in (model, new):
        out = module(*inputs)
        grad = torch.linspace(-1, 2, out.numel(), device="cuda").view_as(out).clone()
        for pixel in ((0, -1, 5, 7), (0, -1, -1, -1), (-1, -1, 0, 0)):
            grad[pixel] = value
        out.backward(grad)
    ours, eager = (module.group_norm.bias.grad for module in (new, model))
    assert ours[-1].item() == eager[-1].item() == value
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(HOPPER not in COMPILED, reason="for sm_90")
@pytest.mark.parametrize("channels", [1, 2, 3, 8])
def test_inputs_of_all_magnitudes(channels):
    """Large terms cancel, and what fp16 pieces lose of them remains: most of all in a sum of few terms."""
    few = Case(HOPPER, "", (channels, 16, 3, 8, (16, 1, 1), (16, 1, 1)), ((4, channels, 51, 82),))

    def change(model, new, inputs):
        return [inputs[0] * 10 ** (6 * torch.rand(few.shapes[0]) - 3).to(inputs[0])]

    assert_as_accurate_as_eager(both_ways, draws(few, "cuda", torch.float32, change), ROUNDINGS)
    errors = []
    for model, new, (x,) in itertools.islice(draws(few, "cuda", torch.float32, change), 6):
        right = in_float64(model)(x.double())
        errors.append([(module(x) - right).square().mean().item() for module in (new, model)])
    ours, eagers = torch.tensor(errors).mean(0).sqrt()
    assert ours < 1.5 * eagers


def test_gradients_where_rstd_times_scale_overflows():
    assert_as_accurate_as_eager(gradients, draws(FEW, "cuda", torch.float32, channels_of_almost_one_value(1e37)))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("case", [ODD, FEW, MANY], ids=str)
def test_what_is_not_finite_stays_where_eager_or_float64_has_it(value, case):
    """Infinities stay infinities, though a difference of two is in every product of halves. In each tensor in turn."""
    for which in range(5):  # x, bias, scale, the convolution's weight and bias
        samples = draws(case, "cuda", torch.float32, poisoned(which, value, 1 / 3, 1))
        assert_as_accurate_as_eager(both_ways, samples, ROUNDINGS)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf], ids=str)
def test_an_infinite_weight_does_nothing_outside_the_image(value):
    """There the tile's x is 0, and its product with the weight NaN: no gradient may see that."""
    narrow = case("images narrower than a tile", 2, 8, 34, 22, 3, 8, 4)
    for index in (0, 1000, -1):
        model, new, inputs = build(narrow, "cuda")
        for module in (model, new):
            module.conv.weight.data.view(-1)[index] = value
        ours, eager = both_ways(new, inputs), both_ways(model, inputs)
        right = both_ways(in_float64(model), [inputs[0].double()])
        for name in right:
            assert same_kinds(ours[name], eager[name], right[name], of_gradients=True), name


def test_roundings_do_not_add_up_over_an_image():
    """Where the norm's weight is 1, `grad - mean` is rounded by the same amount for each gradient of a binade."""
    model, new, inputs = build(BENCHMARK, "cuda")
    for module in (model, new):
        module.group_norm.weight.data.fill_(1)
    got, right = gradients(new, inputs), gradients(in_float64(model), [inputs[0].double()])
    for name in ("conv.bias", "bias", "scale", "group_norm.weight", "group_norm.bias"):
        error, scale = (t.square().mean().sqrt().item() for t in (got[name] - right[name], right[name]))
        assert error < 1e-6 * scale, f"{name}: {error / scale:.1e}"


@torch.no_grad()
def test_two_streams_at_once():
    """Each launch needs all its blocks at once: two launches must not hold half of the GPU each, and wait."""
    _, new, inputs = build(NAMED["more samples than teams"], "cuda")
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
def test_tf32_accuracy_where_the_user_allows_it(monkeypatch, matmul_tf32):
    """The same bits again where it is allowed in convolutions alone."""
    model, new, inputs = build(BENCHMARK, "cuda")
    right = in_float64(model)(inputs[0].double())
    strict = new(*inputs)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    matmul_tf32(True)
    ours, eager = ((module(*inputs).double() - right).abs().max().item() for module in (new, model))
    assert ours <= 2 * eager
    matmul_tf32(False)
    assert torch.equal(new(*inputs), strict)
