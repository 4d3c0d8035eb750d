"""instance_norm: every kernel of both directions, forced by the slice's size, and sums that are hard on a norm."""

import functools

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, laid
from cases import SINGLE_AND_LOW, Case, build, each, solution
from test_gradients import both_ways, gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

STEM = "instance_norm"

# fmt: off
SIZES = [  # samples, height, width; three channels
    (301, 1, 2), (300, 1, 3), (301, 2, 4), (300, 3, 3), (100, 4, 4), (50, 7, 7), (33, 11, 11), (20, 14, 14),
    (20, 15, 17), (20, 16, 16), (9, 31, 31), (9, 32, 32), (5, 32, 64), (5, 45, 45), (3, 71, 73), (300, 33, 33),
    (50, 64, 64), (20, 90, 90), (20, 127, 129), (3, 126, 126), (9, 181, 181), (50, 256, 256), (5, 255, 257),
    (13, 512, 512), (3, 511, 513), (3, 768, 1024), (2, 1024, 1024), (1, 1023, 1025), (1, 2048, 2048), (1, 2047, 2049),
    (2, 1448, 1448), (1, 3001, 3001), (301, 5, 5), (33, 2, 33), (50, 10, 10), (20, 7, 37),
    (20, 15, 15), (9, 1, 239), (9, 7, 73), (1, 4399, 4401),  # of the last no chip holds a slice
]
# By what holds a slice: registers of one warp, of more, shared memory, nothing; whole packs of 16 bytes and not.
KINDS = [
    (7, 2, 2), (9, 7, 7), (2, 6, 33), (3, 63, 64), (2, 64, 65), (1, 90, 90), (1, 182, 182), (1, 512, 512),
    (1, 1100, 1000), (1, 255, 257), (5, 14, 14), (3, 15, 15),
]
# fmt: on


def case_of(images: int, height: int, width: int) -> Case:
    shape = (images, 3, height, width)
    return Case(STEM, f"{3 * images} slices of {height} x {width}", (3,), (shape,), layouts=height * width < 5000)


EVERY_SIZE = [case_of(*shape) for shape in SIZES]
EVERY_KIND = [case_of(*shape) for shape in KINDS]


@each(EVERY_SIZE, SINGLE_AND_LOW, ["contiguous", "offset by one element"], most_on_cpu=2e4)
def test_every_kernel_is_as_accurate_as_eager(case, dtype, layout, device):
    assert_as_accurate_as_eager(both_ways, draws(case, device, dtype, laid(layout)))


def test_slices_of_32_gib_are_pytorchs(monkeypatch):
    """Our kernels count the packs of a slice in 32 bits."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    file = solution(STEM)
    with FakeTensorMode():
        small, large = (torch.empty(1, 3, rows, 1 << 16, device="cuda") for rows in (1 << 10, 1 << 17))
        a_little_less = torch.empty(1, 3, 1, (1 << 33) - 14335, device="cuda")  # whose last tile ends beyond 2^31 packs
    norm = file.ModelNew(3).inorm
    assert file.fits(small, norm)
    assert not file.fits(large, norm) and not file.fits(a_little_less, norm)


# Of the input and of the output's gradient, in place. With the second and third rstd^3 * covariance is no float32.
CHANGES = {
    "x far from zero": lambda x, grad: x.add_(1e3),
    "large values, small gradients": lambda x, grad: (x.mul_(torch.finfo(x.dtype).max ** 0.3), grad.mul_(1e-20)),
    "small values, large gradients": lambda x, grad: (x.mul_(3e-3), grad.mul_(torch.finfo(x.dtype).max ** 0.88)),
    "an outlier in x": lambda x, grad: x[..., 0, 0].fill_(1e3),
    "a border far from the rest": lambda x, grad: (x[..., 0, :].add_(300), x[..., 0].add_(300)),
    "a gradient far from zero": lambda x, grad: grad.add_(100),
    "an outlier in the gradient": lambda x, grad: grad[..., -1, -1].fill_(1e3),
    "the smallest numbers": lambda x, grad: x.mul_(torch.finfo(x.dtype).tiny / 4),
    "no variance": lambda x, grad: x.fill_(5.25),  # dx = (g - mean(g)) / sqrt(eps)
    "few values": lambda x, grad: x.round_(),  # sums of equal terms, whose roundings all go one way
}


@each(EVERY_KIND, SINGLE_AND_LOW, most_on_cpu=3e4)
@pytest.mark.parametrize("change", CHANGES)
def test_badly_scaled_values(case, dtype, change, device):
    def changed(model, new, inputs):
        CHANGES[change](inputs[0], torch.zeros_like(inputs[0]))
        return inputs

    def lay(grad):
        CHANGES[change](torch.zeros_like(grad), grad)
        return grad

    assert_as_accurate_as_eager(functools.partial(both_ways, lay=lay), draws(case, device, dtype, changed), roundings=2)


@each(EVERY_KIND, SINGLE_AND_LOW)
def test_equal_values_leave_nothing(case, dtype, device):
    """Their mean is one of them, to the last bit."""
    if device.type == "cpu" and dtype is not torch.float32:
        pytest.skip("PyTorch's own leaves something")
    _, new, inputs = build(case, device, dtype)
    slices = inputs[0].flatten(0, 1)
    sizes = 10 ** torch.linspace(-4, 3, len(slices), device=device)
    slices.copy_(slices[:, :1, :1] * sizes[:, None, None])
    assert not new(inputs[0]).any()


@each(EVERY_KIND, [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_not_a_number_stays_in_its_slice(case, dtype, where, value, device):
    """In its own slice nothing is finite, as with the Model; the others are as they were."""
    model, new, inputs = build(case, device, dtype)
    (x,) = inputs

    def lay(grad):
        if where == "gradient":
            grad[-1, -1, -1, 1] = value
        return grad

    clean = gradients(new, inputs)["input 0"]
    if where == "input":
        x[-1, -1, -1, 1] = value
    got, expected = (gradients(module, [x], lay)["input 0"] for module in (new, model))
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert not got[-1, -1].isfinite().any()
    clean[-1, -1] = got[-1, -1] = 0
    assert torch.equal(got, clean)


@torch.no_grad()
def test_warns_of_another_number_of_channels(device):
    with pytest.warns(UserWarning, match="does not match num_features"):
        solution(STEM).ModelNew(3)(torch.randn(2, 5, 4, 4, device=device))


@pytest.mark.gpu
def test_the_input_alone_is_saved():
    _, new, inputs = build(case_of(3, 8, 8), "cuda")
    x, saved = inputs[0].requires_grad_(), []

    with saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda tensor: tensor):
        new(x)
    assert saved == [x.data_ptr()]
