"""The forward pass, against the Model run in float64, over shapes, dtypes and layouts."""

import itertools

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, assert_same_form, draws, forward, in_both, laid, poisoned
from cases import CASES, LAYOUT_CASES, LAYOUTS, SINGLE_AND_LOW, STEMS, Case, Recorder, build, each, first_cases


def assert_form_and_accuracy(run, samples) -> None:
    """The output has the form of the Model's, in the first sample, and is as accurate as eager's in all."""
    model, new, inputs = first = next(samples)
    assert_same_form(run(new, inputs)["output"], run(model, inputs)["output"])
    assert_as_accurate_as_eager(run, itertools.chain([first], samples))


@each(CASES)
def test_is_as_accurate_as_eager(case, dtype, device):
    assert_as_accurate_as_eager(forward, draws(case, device, dtype))


@each(CASES)
@torch.no_grad()
def test_writes_every_element_of_its_output_and_nothing_else(case, dtype, device, deterministic):
    """Of the Model's form, the same bits each time; inputs and parameters stay as they are."""
    model, new, inputs = build(case, device, dtype)
    before = [t.clone() for t in [*inputs, *new.parameters()]]
    assert torch.empty(3, device=device).isnan().all()
    outputs = [new(*inputs) for _ in range(3)]  # all kept, so that none can find an earlier one's values in its memory
    assert_same_form(outputs[0], model(*inputs))
    assert not outputs[0].isnan().any()
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert all(map(torch.equal, before, [*inputs, *new.parameters()]))


@each(LAYOUT_CASES, SINGLE_AND_LOW, LAYOUTS)
def test_takes_inputs_in_any_layout(case, dtype, layout, device):
    assert_form_and_accuracy(forward, draws(case, device, dtype, laid(layout)))


@each(LAYOUT_CASES, SINGLE_AND_LOW, ["transposed", "offset by one element", "channels_last", "every second element"])
def test_takes_parameters_in_any_layout(case, dtype, layout, device):
    def lay(module):
        for parameter in module.parameters():
            parameter.data = LAYOUTS[layout](parameter.data)

    assert_form_and_accuracy(forward, draws(case, device, dtype, in_both(lay)))


@each(LAYOUT_CASES, [torch.float32])
@torch.no_grad()
def test_takes_one_parameter_in_another_layout(case, dtype, device):
    """A column of a table, say: all the others are contiguous."""
    model, new, inputs = build(case, device)
    expected = model(*inputs)
    for parameter in new.parameters():
        parameter.data, kept = LAYOUTS["every second element"](parameter.data), parameter.data
        torch.testing.assert_close(new(*inputs), expected, rtol=1e-4, atol=1e-4)
        parameter.data = kept


POINTWISE = Case("conv_sigmoid_group_norm", "weights of 1 x 1", (3, 8, 1, 4, (8, 1, 1), (8, 1, 1)), ((2, 3, 8, 8),))
GREY = Case("conv_sigmoid_group_norm", "images of one channel", (1, 8, 3, 4, (8, 1, 1), (8, 1, 1)), ((2, 1, 8, 10),))


@pytest.mark.parametrize("case", [POINTWISE, GREY], ids=str)
@pytest.mark.skipif(GREY.stem not in STEMS, reason="the pair is not here")
@torch.no_grad()
def test_contiguous_and_yet_channels_last(case, device):
    """PyTorch's convolution gives its output their layout."""
    model, new, inputs = build(case, device)
    for t in (new.conv.weight, model.conv.weight) if case is POINTWISE else inputs:
        t.data = t.data.to(memory_format=torch.channels_last)
        assert t.is_contiguous()
    assert_same_form(new(*inputs), model(*inputs))


def biases_of(module) -> list[torch.Tensor]:
    return [parameter for name, parameter in module.named_parameters() if "bias" in name]


def first_element_an_outlier(model, new, inputs):
    """Deviations from the first element instead of the mean would lose all the others."""
    far = 1e5 if torch.finfo(inputs[0].dtype).bits > 16 else 1e3
    for bias in biases_of(model) + biases_of(new):
        bias.data.view(-1)[0] = far
    for t in inputs:
        t[(..., 0, 0) if t.dim() > 2 else (..., 0)] = far
    return inputs


HARD = {  # on a norm
    # 1e4 + noise: E[x^2] - E[x]^2 loses the variance, deviations from the mean do not.
    "far from zero": lambda model, new, inputs: [t + 1e4 for t in inputs],
    "biases far from zero": in_both(lambda module: [bias.add_(1e4) for bias in biases_of(module)]),
    "first element an outlier": first_element_an_outlier,
}


@each(LAYOUT_CASES)
@pytest.mark.parametrize("change", HARD)
def test_is_as_accurate_where_values_are(case, dtype, change, device):
    assert_as_accurate_as_eager(forward, draws(case, device, dtype, HARD[change]))


@each(LAYOUT_CASES, SINGLE_AND_LOW)  # nothing is finer than float64, which takes the Model's lines
@pytest.mark.parametrize("value", [0.0, 0.1, 100.0])
def test_slices_without_variance(case, dtype, value, device):
    def flatten(model, new, inputs):
        for name, parameter in [*model.named_parameters(), *new.named_parameters()]:
            if "norm" not in name:
                parameter.data.fill_(value / 7)
        return [torch.full_like(t, value) for t in inputs]

    assert_as_accurate_as_eager(forward, draws(case, device, dtype, flatten))


@pytest.mark.skipif("linear_instance_norm_residual" not in STEMS, reason="no such pair")
@torch.no_grad()
def test_huge_rows_without_variance_are_finite(device):
    """There the mean's rounding is larger than the deviations; a variance below zero would give NaN."""
    case = Case("linear_instance_norm_residual", "rows of 1000", (4, 1000), ((50, 4), (50, 1000)))
    _, new, (x, y) = build(case, device, torch.float32)
    new.bmm.weight.zero_()
    for value in torch.linspace(1e9, 1e10, 50).tolist():
        new.bmm.bias.fill_(value)
        assert new(x, y).isfinite().all(), value


@each(LAYOUT_CASES, SINGLE_AND_LOW)
@pytest.mark.parametrize(
    ("value", "position"), [(torch.nan, 0.5), (torch.inf, 0), (torch.inf, 1), (-torch.inf, 0.5)], ids=str
)
def test_not_a_number_stays_in_its_slice(case, dtype, position, value, device):
    """In each input and parameter in turn: NaN and Inf come out where they do from the Model or from it in float64."""
    model, _, inputs = build(case, device, dtype)
    for which in range(len(inputs) + sum(1 for _ in model.parameters())):
        assert_as_accurate_as_eager(forward, draws(case, device, dtype, poisoned(which, value, position)))


@each(CASES, [torch.float32])
@torch.no_grad()
def test_neighbours_in_memory_do_not_matter(case, dtype, device, deterministic):
    """The inputs and parameters lie in larger buffers: what stands before and after them must not reach the result."""

    def surrounded(t, value):
        return torch.nn.functional.pad(t.flatten(), (64, 64), value=value)[64 : 64 + t.numel()].view(t.shape)

    _, new, inputs = build(case, device)
    outputs = []
    for value in (torch.nan, 1.0):
        for parameter in new.parameters():
            parameter.data = surrounded(parameter.data, value)
        outputs.append(new(*[surrounded(t, value) for t in inputs]))
    assert torch.equal(*outputs) and not outputs[0].isnan().any()


@pytest.mark.skipif("linear_swish_group_norm" not in STEMS, reason="no such pair")
@pytest.mark.parametrize(("rows", "ours"), [(100, True), (200, False), (8000, False), (9000, True)])
@torch.no_grad()
def test_groups_of_16_are_left_to_pytorch_where_it_is_faster_on_a_cpu(rows, ours):
    _, new, inputs = build(Case("linear_swish_group_norm", "groups of 16", (8, 64, 4, (64,)), ((rows, 8),)))
    with Recorder("linear_swish_group_norm") as recorder:
        new(*inputs)
    assert bool(recorder.calls) == ours


@first_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(case, dtype, device):
    def under_autocast(module, inputs):
        with torch.autocast(device.type, dtype=dtype, enabled=inputs[0].dtype is not torch.float64):
            return forward(module, inputs)

    assert_form_and_accuracy(under_autocast, draws(case, device, torch.float32))
