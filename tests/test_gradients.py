"""Gradients of inputs and parameters: as accurate as eager's, those that are asked for, and no more saved than needed.

On a CPU training is the plain path; what is tested there is that it is taken.
"""

import functools

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, draws, forward, in_both, laid
from cases import CASES, FIRST, LAYOUT_CASES, LAYOUTS, STEMS, Case, build, each, first_cases, in_float64, solution
from torch.autograd.graph import saved_tensors_hooks

# A backward in elementwise steps rounds its values at each of them; eager's, in one kernel, only when it writes them.
ROUNDINGS = 8


def differentiable(module, inputs) -> dict[str, torch.Tensor]:
    """Everything a gradient is taken of, by name: the inputs as leaves, then the parameters."""
    leaves = {f"input {i}": t.detach().requires_grad_() for i, t in enumerate(inputs)}
    return {**leaves, **dict(module.named_parameters())}


def output_of(module, tensors: dict[str, torch.Tensor], inputs: list) -> torch.Tensor:
    """The module as a function of `tensors`."""
    arguments = tuple(tensors[f"input {i}"] for i in range(len(inputs)))
    return torch.func.functional_call(module, {n: t for n, t in tensors.items() if " " not in n}, arguments)


def weights_of_the_sum(out: torch.Tensor) -> torch.Tensor:
    """A fixed gradient of the output, the same numbers for every dtype."""
    generator = torch.Generator(out.device).manual_seed(7)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out)


def gradients(module, inputs, lay=lambda grad: grad, wanted: list | None = None) -> dict[str, torch.Tensor]:
    """Of the inputs and parameters that are wanted, or of all, by name. The others require none."""
    tensors = differentiable(module, inputs)
    for name, t in tensors.items():
        t.requires_grad_(wanted is None or name in wanted)
    out = module(*[tensors[f"input {i}"] for i in range(len(inputs))])
    asked = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(out, list(asked.values()), lay(weights_of_the_sum(out)))
    return {name: grad.detach() for name, grad in zip(asked, grads, strict=True)}


def both_ways(module, inputs, lay=lambda grad: grad) -> dict[str, torch.Tensor]:
    return forward(module, inputs) | gradients(module, inputs, lay)


@each(CASES)
def test_gradients_are_as_accurate_as_eagers(case, dtype, device):
    model, new, inputs = build(case, device, dtype)
    tensors = differentiable(new, inputs)
    for name, grad in gradients(new, inputs).items():
        assert (grad.shape, grad.dtype, grad.device) == (tensors[name].shape, dtype, tensors[name].device)
    assert_as_accurate_as_eager(gradients, draws(case, device, dtype), ROUNDINGS)


@first_cases
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_under_autocast_are_as_accurate_as_eagers(case, low, device):
    """Under autocast is the forward alone, as in PyTorch's manual."""

    def run(module, inputs):
        tensors = differentiable(module, inputs)
        with torch.autocast(device.type, dtype=low, enabled=inputs[0].dtype is not torch.float64):
            out = module(*[tensors[f"input {i}"] for i in range(len(inputs))])
        grads = torch.autograd.grad(out, list(tensors.values()), weights_of_the_sum(out))
        return dict(zip(tensors, grads, strict=True))

    assert_as_accurate_as_eager(run, draws(case, device, torch.float32), ROUNDINGS)


@each(LAYOUT_CASES, [torch.float32], LAYOUTS)
def test_gradients_in_any_layout(case, dtype, layout, device):
    """Of the inputs, then of the output's gradient."""
    assert_as_accurate_as_eager(gradients, draws(case, device, dtype, laid(layout)), ROUNDINGS)
    lay, ours = LAYOUTS[layout], solution(case.stem).ModelNew

    def run(module, inputs):
        # The Model gets the same values contiguous: PyTorch 2.13's batch_norm on a CPU misreads a transposed gradient.
        return gradients(module, inputs, lay if isinstance(module, ours) else lambda grad: lay(grad).contiguous())

    assert_as_accurate_as_eager(run, draws(case, device, dtype), ROUNDINGS)


@pytest.mark.skipif("linear_instance_norm_residual" not in STEMS, reason="no such pair")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_of_one_number_is_no_worse_than_eagers(dtype, device):
    """The gradient of one x is a sum of 4096 terms which cancel: one draw of their roundings says little, 24 do."""
    case = Case("linear_instance_norm_residual", "4096 features from one", (1, 4096), ((1, 1), (1, 4096)))
    errors = []
    for model, new, inputs in draws(case, device, dtype, lambda model, new, inputs: [t + 100 for t in inputs]):
        right = gradients(in_float64(model), [t.double() for t in inputs])["input 0"]
        errors.append([(gradients(module, inputs)["input 0"] - right).item() for module in (new, model)])
    ours, eagers = torch.tensor(errors).square().mean(0)
    assert ours <= eagers


@pytest.mark.skipif("linear_instance_norm_residual" not in STEMS, reason="no such pair")
@pytest.mark.parametrize("features", [32, 33])
def test_sixteen_bits_of_huge_equal_values(features, device, monkeypatch):
    """Their mean, computed in float32, may be a rounding off them, and rstd times that is far from 0."""
    monkeypatch.setattr(solution("linear_instance_norm_residual"), "_CPU_UPCASTS", {torch.bfloat16})
    case = Case("linear_instance_norm_residual", "equal features", (17, features), ((40, 17), (40, features)))
    change = in_both(lambda module: module.bmm.weight.fill_(117248))
    for run in (forward, gradients):
        assert_as_accurate_as_eager(run, draws(case, device, torch.bfloat16, change))


@first_cases
def test_one_gradient_alone_is_the_models(case, device):
    """Each input and parameter alone requires a gradient, and gets the right one."""
    model, new, inputs = build(case, device)
    for name, expected in gradients(model, inputs).items():
        torch.testing.assert_close(gradients(new, inputs, wanted=[name]), {name: expected}, rtol=1e-4, atol=1e-4)


@first_cases
def test_nothing_is_saved_where_no_gradient_can_be_asked_for(case, device):
    _, new, inputs = build(case, device)
    saved = []

    with saved_tensors_hooks(saved.append, lambda tensor: tensor):
        with torch.no_grad():
            assert not new(*[t.clone().requires_grad_() for t in inputs]).requires_grad
        with torch.inference_mode():
            new(*inputs)
        new.requires_grad_(False)
        assert not new(*inputs).requires_grad
        assert not saved
        assert new(*[t.clone().requires_grad_() for t in inputs]).requires_grad
        assert saved


@first_cases
def test_second_derivatives_are_the_models(case, device):
    """In float32, which the kernels take, against the Model in float64."""
    model, new, inputs = build(case, device)

    def second(module, inputs):
        tensors = differentiable(module, inputs)
        out = output_of(module, tensors, inputs)
        weights = weights_of_the_sum(out).requires_grad_()
        first = torch.autograd.grad(out, list(tensors.values()), weights, create_graph=True)
        total = sum((grad * weights_of_the_sum(grad)).sum() for grad in first)
        return torch.autograd.grad(total, [*tensors.values(), weights], allow_unused=True)

    try:
        expected = second(in_float64(model), [t.double() for t in inputs])
    except RuntimeError as failed:
        assert "is not implemented" in str(failed)
        pytest.skip(f"the Model has no second derivatives: {failed}")
    for ours, right in zip(second(new, inputs), expected, strict=True):
        if ours is not None or right is not None:
            torch.testing.assert_close(ours.double(), right, rtol=1e-3, atol=1e-3 * right.abs().max().item())


# The autograd functions themselves: on a CPU the modules do not take them.
APPLIED = {
    "conv_sigmoid_group_norm": lambda file, m, x: file.ConvSigmoidGroupNorm.apply(
        m.group_norm.num_groups, m.group_norm.eps, x, *m.conv.parameters(), m.bias, m.scale, *m.group_norm.parameters()
    ),
    "linear_instance_norm_residual": lambda file, m, x, y: file.RowNormResidual.apply(
        m.bmm(x), y, m.instance_norm.eps, 0
    ),
    "linear_swish_group_norm": lambda file, m, x: file.LinearSwishGroupNorm.apply(
        x, *m.matmul.parameters(), m.bias, *m.group_norm.parameters(), m.group_norm.num_groups, m.group_norm.eps, 0, 0
    ),
}


def assert_several_at_once_are_the_models(case, device, call=lambda file, new, *inputs: new(*inputs)):
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them."""
    model, new, inputs = build(case, device)
    found = []
    for module, run in ((model, model), (new, functools.partial(call, solution(case.stem), new))):
        tensors = list(differentiable(module, inputs).values())
        out = run(*tensors[: len(inputs)])
        grads = torch.stack([weights_of_the_sum(out) * factor for factor in (1, -2, 0)])
        found.append(torch.autograd.grad(out, tensors, grads, is_grads_batched=True))
    for own, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@first_cases
def test_several_gradients_at_once_are_the_models(case, device):
    assert_several_at_once_are_the_models(case, device)
    if case.stem == "conv_sigmoid_group_norm":  # whose function gives them on a CPU, too, if it is called there
        assert_several_at_once_are_the_models(case, device, APPLIED[case.stem])


@pytest.mark.parametrize("case", [case for case in FIRST if case.stem in APPLIED], ids=str)
def test_an_input_made_of_the_weights_counts_once(case, device):
    """With create_graph, as in a network that applies one layer twice."""
    model, new, inputs = build(case, device)

    def gradients_of(module, call):
        x, *others = (t.detach().requires_grad_() for t in inputs)
        parameters = [*module.parameters()]
        out = call(x * (1 + sum(p.mean() for p in parameters)), *others)
        return torch.autograd.grad(out, [x, *others, *parameters], weights_of_the_sum(out), create_graph=True)

    ours = gradients_of(new, lambda *inputs: APPLIED[case.stem](solution(case.stem), new, *inputs))
    for our, right in zip(ours, gradients_of(model, model), strict=True):
        torch.testing.assert_close(our, right, rtol=1e-3, atol=1e-4)


@first_cases
@pytest.mark.parametrize("what", ["an input", "a parameter"])
def test_a_tensor_changed_before_backward_is_noticed(case, what, device):
    """Right (nothing of it was needed any more), or refused; never the gradient at the changed values."""
    _, new, inputs = build(case, device)
    expected = gradients(new, inputs)
    for name in differentiable(new, inputs):
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
