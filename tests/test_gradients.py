"""Gradients of inputs and parameters: right in float64, as accurate as eager's in the others, and no more saved than is needed."""

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws
from cases import CASES, FIRST, LAYOUT_CASES, LAYOUTS, build, in_dtypes, in_layouts, solution
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

# A backward in elementwise steps rounds its values at each of them; eager's, in one kernel, only when it writes them.
ROUNDINGS = 8

first_cases = pytest.mark.parametrize("case", FIRST, ids=str)
small_cases = pytest.mark.parametrize("case", [c for c in CASES if c.values <= 400 or c.shapes is None], ids=str)


def differentiable(module, inputs) -> dict[str, torch.Tensor]:
    """Everything a gradient is taken of, by name: the inputs as leaves, then the parameters."""
    leaves = {f"input {i}": t.detach().requires_grad_() for i, t in enumerate(inputs) if t.is_floating_point()}
    return {**leaves, **dict(module.named_parameters())}


def output_of(module, tensors: dict[str, torch.Tensor], inputs: list) -> torch.Tensor:
    """The module as a function of `tensors`."""
    arguments = tuple(tensors.get(f"input {i}", t) for i, t in enumerate(inputs))
    return torch.func.functional_call(module, {n: t for n, t in tensors.items() if not n.startswith("input ")}, arguments)


def weights_of_the_sum(out: torch.Tensor) -> torch.Tensor:
    """A fixed gradient of the output, the same numbers for every dtype and device."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)


def gradients(module, inputs, lay=lambda grad: grad) -> dict[str, torch.Tensor]:
    tensors = differentiable(module, inputs)
    arguments = [tensors.get(f"input {i}", t) for i, t in enumerate(inputs)]
    out = module(*arguments)
    grads = torch.autograd.grad(out, list(tensors.values()), lay(weights_of_the_sum(out)))
    return {name: grad.detach() for name, grad in zip(tensors, grads, strict=True)}


@small_cases
def test_gradcheck(case, device):
    _, new, inputs = build(case, device, torch.float64)
    tensors = differentiable(new, inputs)

    def function(*values):
        return output_of(new, dict(zip(tensors, values)), inputs)

    assert gradcheck(function, tuple(tensors.values()), fast_mode=sum(t.numel() for t in tensors.values()) > 400, nondet_tol=1e-10)


@in_dtypes(CASES)
def test_gradients_are_as_accurate_as_eagers(case, dtype, device):
    assert_as_accurate_as_eager(gradients, draws(case, device, dtype), ROUNDINGS)


@in_dtypes(CASES)
def test_gradients_have_the_form_of_what_they_are_of(case, dtype, device):
    _, new, inputs = build(case, device, dtype)
    tensors = differentiable(new, inputs)
    for name, grad in gradients(new, inputs).items():
        assert (grad.shape, grad.dtype, grad.device) == (tensors[name].shape, tensors[name].dtype, tensors[name].device)


@in_layouts(LAYOUT_CASES, LAYOUTS)
@pytest.mark.parametrize("what", ["of inputs", "of the output's gradient"])
def test_gradients_in_any_layout(case, layout, what, device):
    lay, ours = LAYOUTS[layout], solution(case.stem).ModelNew

    def change(model, new, inputs):
        return [lay(t) for t in inputs] if what == "of inputs" else inputs

    def run(module, inputs):
        if what == "of inputs":
            return gradients(module, inputs)
        # The Model gets the same values contiguous: PyTorch 2.13's batch_norm on the CPU misreads a transposed gradient.
        return gradients(module, inputs, lay if isinstance(module, ours) else lambda grad: lay(grad).contiguous())

    assert_as_accurate_as_eager(run, draws(case, device, torch.float32, change), ROUNDINGS)


@first_cases
def test_only_the_gradients_asked_for_are_computed(case, device):
    """Each input and parameter alone requires a gradient: it gets the right one, the others none."""
    model, new, inputs = build(case, device, torch.float64)
    names = list(differentiable(model, inputs))
    expected = gradients(model, inputs)
    for wanted in names:
        tensors = {n: t.detach().requires_grad_(n == wanted) for n, t in differentiable(new, inputs).items()}
        out = output_of(new, tensors, inputs)
        out.backward(weights_of_the_sum(out))
        assert [n for n in names if tensors[n].grad is not None] == [wanted]
        torch.testing.assert_close(tensors[wanted].grad, expected[wanted])


@first_cases
def test_nothing_is_saved_where_no_gradient_can_be_asked_for(case, device):
    _, new, inputs = build(case, device)
    saved = []

    def count(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        with torch.no_grad():
            assert not new(*[t.clone().requires_grad_() for t in inputs]).requires_grad
        with torch.inference_mode():
            new(*inputs)
        new.requires_grad_(False)
        assert not new(*inputs).requires_grad
        assert not saved
        assert new(*[t.clone().requires_grad_() for t in inputs]).requires_grad
        assert saved


class Counted(nn.Module):
    """A parametrisation that notes each look at its parameter."""

    def __init__(self, seen: list, name: str):
        super().__init__()
        self.seen, self.name = seen, name

    def forward(self, value):
        self.seen.append(self.name)
        return value


@pytest.mark.parametrize("of_the_layer", [False, True], ids=["beside the layer", "of the layer too"])
@pytest.mark.parametrize("case", [c for c in FIRST if c.stem.startswith("linear")], ids=str)
def test_a_parametrised_parameter_is_made_once_a_call(case, of_the_layer, device):
    _, new, inputs = build(case, device)
    seen, names = [], []
    for prefix, owner in list(new.named_modules()):
        for name, _ in list(owner.named_parameters(recurse=False)):
            if of_the_layer or not isinstance(owner, nn.Linear):
                names.append(f"{prefix}.{name}")
                parametrize.register_parametrization(owner, name, Counted(seen, names[-1]))
    for grad in (True, False):
        seen.clear()
        with torch.set_grad_enabled(grad):
            new(*inputs)
        assert sorted(seen) == sorted(names)


@first_cases
def test_second_derivatives_are_right_or_refused(case, device):
    _, new, inputs = build(case, device, torch.float64)
    tensors = differentiable(new, inputs)

    def function(*values):
        return output_of(new, dict(zip(tensors, values)), inputs)

    out = function(*tensors.values())
    first = torch.autograd.grad(out, list(tensors.values()), weights_of_the_sum(out).requires_grad_(), create_graph=True)
    try:
        torch.autograd.grad([grad.square().sum() for grad in first], list(tensors.values()), allow_unused=True)
    except RuntimeError as refusal:
        assert "twice" in str(refusal) or "not implemented" in str(refusal)
        return
    fast = sum(t.numel() for t in tensors.values()) > 400
    assert gradgradcheck(function, tuple(tensors.values()), fast_mode=fast, nondet_tol=1e-10)


@first_cases
def test_forward_mode_is_right_or_refused(case, device):
    """A lost tangent would be a gradient of zero that nobody notices."""
    model, new, inputs = build(case, device, torch.float64)
    tangents = tuple(torch.randn_like(t) for t in inputs)
    _, expected = torch.func.jvp(model, tuple(inputs), tangents)
    try:
        _, tangent = torch.func.jvp(new, tuple(inputs), tangents)
    except RuntimeError as refusal:
        assert len(str(refusal)) > 20
        return
    torch.testing.assert_close(tangent, expected)


@first_cases
def test_function_transforms(case, device):
    """torch.func.grad, and per-sample gradients with vmap: the Model's."""
    model, new, inputs = build(case, device, torch.float64)
    weights = weights_of_the_sum(model(*inputs))

    def gradient(module):
        return torch.func.grad(lambda *tensors: (module(*tensors) * weights).sum(), argnums=tuple(range(len(inputs))))(*inputs)

    def per_sample(module):
        def loss(*sample):
            return (module(*[t.unsqueeze(0) for t in sample]) ** 2).sum()

        return torch.func.vmap(torch.func.grad(loss))(*inputs)

    torch.testing.assert_close(gradient(new), gradient(model))
    expected = per_sample(model)
    try:
        out = per_sample(new)
    except RuntimeError as refusal:
        assert "vmap" in str(refusal)
        return
    torch.testing.assert_close(out, expected)


@first_cases
@pytest.mark.parametrize("what", ["an input", "a parameter"])
def test_a_tensor_changed_before_backward_is_noticed(case, what, device):
    """Right (nothing of it was needed any more), or refused; never the gradient at the changed values."""
    _, new, inputs = build(case, device, torch.float64)
    expected = gradients(new, inputs)
    changed = differentiable(new, inputs)
    for name in changed:
        if name.startswith("input") != (what == "an input"):
            continue
        tensors = {n: t.detach().clone().requires_grad_() for n, t in differentiable(new, inputs).items()}
        out = output_of(new, tensors, inputs)
        with torch.no_grad():
            tensors[name].mul_(-0.5)
        try:
            out.backward(weights_of_the_sum(out))
        except RuntimeError as refusal:
            assert "modified by an inplace operation" in str(refusal)
            continue
        for other, t in tensors.items():
            torch.testing.assert_close(t.grad, expected[other])


@first_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["to bfloat16", "to float16"])
def test_gradients_under_autocast(case, dtype, device):
    def under_autocast(module, inputs):
        tensors = differentiable(module, inputs)
        with torch.autocast(device.type, dtype=dtype, enabled=inputs[0].dtype is not torch.float64):
            out = module(*[tensors.get(f"input {i}", t) for i, t in enumerate(inputs)])
        grads = torch.autograd.grad(out, list(tensors.values()), weights_of_the_sum(out))
        return dict(zip(tensors, grads, strict=True))

    assert_as_accurate_as_eager(under_autocast, draws(case, device, torch.float32), ROUNDINGS)


@in_dtypes(FIRST, [torch.float64, torch.float32])
def test_training_follows_the_model(case, dtype, device):
    """Twenty steps on the parameters and the inputs: the losses stay the Model's, and fall."""
    losses = []
    model, new, inputs = build(case, device, dtype)
    target = torch.randn_like(model(*inputs))
    for module in (model, new):
        tensors = [t.detach().clone().requires_grad_() for t in inputs]
        optimizer = torch.optim.SGD([*tensors, *module.parameters()], lr=0.1)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = (module(*tensors) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0]
    # A step multiplies what rounding made different by less than two.
    assert losses[1] == pytest.approx(losses[0], rel=2**20 * torch.finfo(dtype).eps if dtype is torch.float64 else 1e-4)
