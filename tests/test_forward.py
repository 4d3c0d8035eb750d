"""The forward pass, against the Model run in float64, over shapes, dtypes and layouts."""

import contextlib
import glob

import pytest
import torch
from accuracy import allowed_error, assert_as_accurate_as_eager, assert_same_form, draws, largest, same_kinds, worst_error
from cases import (
    CASES,
    DTYPES,
    FIRST,
    LAYOUT_CASES,
    LAYOUTS,
    ROOT,
    STEMS,
    build,
    converted,
    in_dtype,
    in_dtypes,
    in_dtypes_and_layouts,
    in_float64,
    problem,
    runs,
    solution,
)
from processes import run_python

cases = pytest.mark.parametrize("case", CASES, ids=str)
first_cases = pytest.mark.parametrize("case", FIRST, ids=str)


@torch.no_grad()
def forward(module, inputs) -> dict[str, torch.Tensor]:
    return {"output": module(*inputs)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=in_dtype)
def test_is_as_accurate_as_eager(case, dtype, device):
    assert_as_accurate_as_eager(forward, draws(case, device, dtype))


@in_dtypes(CASES)
def test_output_has_the_models_form(case, dtype, device):
    model, new, inputs = build(case, device, dtype)
    with torch.no_grad():
        assert_same_form(new(*inputs), model(*inputs))


@in_dtypes_and_layouts(LAYOUT_CASES, LAYOUTS)
def test_takes_inputs_in_any_layout(case, layout, dtype, device):
    def lay(model, new, inputs):
        return [LAYOUTS[layout](t) for t in inputs]

    model, new, inputs = build(case, device, dtype)
    with torch.no_grad():
        assert_same_form(new(*lay(model, new, inputs)), model(*lay(model, new, inputs)))
    assert_as_accurate_as_eager(forward, draws(case, device, dtype, lay))


@in_dtypes_and_layouts(LAYOUT_CASES, ["transposed", "offset by one element", "channels_last"])
def test_takes_parameters_in_any_layout(case, layout, dtype, device):
    def lay(model, new, inputs):
        for parameter in [*model.parameters(), *new.parameters()]:
            parameter.data = LAYOUTS[layout](parameter.data)
        return inputs

    model, new, inputs = build(case, device, dtype)
    lay(model, new, inputs)
    with torch.no_grad():
        assert_same_form(new(*inputs), model(*inputs))
    assert_as_accurate_as_eager(forward, draws(case, device, dtype, lay))


@in_dtypes(LAYOUT_CASES, [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["inputs", "biases"])
def test_values_far_from_zero(case, what, dtype, device):
    """1e4 + noise: E[x^2] - E[x]^2 loses the variance, deviations from the mean do not."""

    def shift(model, new, inputs):
        if what == "inputs":
            return [t + 1e4 if t.is_floating_point() else t for t in inputs]
        with torch.no_grad():
            for name, parameter in [*model.named_parameters(), *new.named_parameters()]:
                if "bias" in name:
                    parameter += 1e4
        return inputs

    assert_as_accurate_as_eager(forward, draws(case, device, dtype, shift))


@in_dtypes(LAYOUT_CASES, [torch.float64, torch.float32])
def test_first_element_is_an_outlier(case, dtype, device):
    """Deviations from the first element instead of the mean would lose all the others."""

    def stick_out(model, new, inputs):
        with torch.no_grad():
            for name, parameter in [*model.named_parameters(), *new.named_parameters()]:
                if "bias" in name:
                    parameter.view(-1)[0] = 1e5
            for t in inputs:
                t[(..., 0, 0) if t.dim() > 2 else (..., 0)] = 1e5
        return inputs

    assert_as_accurate_as_eager(forward, draws(case, device, dtype, stick_out))


@in_dtypes(LAYOUT_CASES)
@pytest.mark.parametrize("value", [0.0, 0.1, 5.3, 100.0])
def test_slices_without_variance(case, value, dtype, device):
    def flatten(model, new, inputs):
        with torch.no_grad():
            for name, parameter in [*model.named_parameters(), *new.named_parameters()]:
                if "norm" not in name:
                    parameter.fill_(value / 7)
        return [torch.full_like(t, value) if t.is_floating_point() else t for t in inputs]

    samples = draws(case, device, dtype, flatten)
    if dtype is not torch.float64:
        assert_as_accurate_as_eager(forward, samples)
    else:  # nothing is finer; both multiply the rounding of the mean by 1 / sqrt(eps)
        model, new, inputs = next(samples)
        expected = forward(model, inputs)["output"]
        assert worst_error(forward(new, inputs)["output"], expected) <= 1e-8 * max(1, largest(expected))


@in_dtypes(LAYOUT_CASES, [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["NaN", "Inf", "-Inf"])
@pytest.mark.parametrize("position", [0, 0.5, 1], ids=["first", "in the middle", "last"])
@torch.no_grad()
def test_not_a_number_stays_in_its_slice(case, position, value, dtype, device):
    """In each input and parameter in turn: NaN and Inf come out where they do from the Model or from it in float64, the rest as accurate
    as ever.

    Either is right, value by value, because eager's own are an accident of the algorithm: in 16 bits cuDNN multiplies infinities
    by the zeros that fill up its tiles, and has NaN where the formula has an infinity and, behind the sigmoid, a finite value.
    """
    model, new, inputs = build(case, device, dtype)
    for one, other in [*zip(inputs, inputs, strict=True), *zip(model.parameters(), new.parameters(), strict=True)]:
        index = int(position * (one.numel() - 1))
        kept = one.view(-1)[index].item()
        one.view(-1)[index] = other.view(-1)[index] = value
        out, expected = new(*inputs), model(*inputs)
        right = in_float64(model)(*converted(inputs, dtype=torch.float64))
        one.view(-1)[index] = other.view(-1)[index] = kept
        assert same_kinds(out, expected, right)
        error, eager_error = (worst_error(o, right.masked_fill(~o.isfinite(), torch.nan)) for o in (out, expected))
        assert error <= allowed_error(eager_error, largest(right), dtype)


@in_dtypes(LAYOUT_CASES)
def test_the_same_input_gives_the_same_bits_and_stays_as_it_is(case, dtype, device):
    _, new, inputs = build(case, device, dtype)
    before = [t.clone() for t in [*inputs, *new.parameters()]]
    with torch.no_grad():
        outputs = [new(*inputs) for _ in range(3)]  # all kept, so that none can find an earlier one's values in its memory
    assert same(outputs[0], outputs[1]) and same(outputs[0], outputs[2])
    assert all(map(same, before, [*inputs, *new.parameters()]))


@cases
def test_neighbours_in_memory_do_not_matter(case, device):
    """The inputs and parameters lie in larger buffers: what stands before and after them must not reach the result."""

    def surrounded(t, value):
        room = 64
        buffer = torch.cat([t.new_full((room,), value), t.detach().flatten(), t.new_full((room,), value)])
        return buffer[room : room + t.numel()].view(t.shape)

    _, new, inputs = build(case, device, torch.float32)
    parameters = list(new.parameters())
    outputs = []
    with torch.no_grad():
        for value in (torch.nan, 1.0):
            for parameter in parameters:
                parameter.data = surrounded(parameter.data, value)
            outputs.append(new(*[surrounded(t, value) for t in inputs]))
    assert same(*outputs) and not outputs[0].isnan().any()


@in_dtypes(CASES)
def test_every_element_is_written(case, dtype, device):
    """In deterministic mode PyTorch fills fresh memory with NaN, that of our operators too."""
    if not hasattr(torch.utils, "deterministic"):
        pytest.skip("this PyTorch leaves fresh memory as it is")
    _, new, inputs = build(case, device, dtype)
    with contextlib.ExitStack() as restore, torch.no_grad():
        restore.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.empty(3, device=device).isnan().all()
        assert not new(*inputs).isnan().any()


MALLOC_DEBUG = next((path for folder in ("/lib*", "/lib/*") for path in glob.glob(f"{folder}/libc_malloc_debug.so.0")), None)


@pytest.mark.parametrize("stem", STEMS)
def test_nothing_is_written_outside_the_output(stem):
    """All cases in a process whose malloc guards every block's borders and aborts when one was overwritten."""
    if MALLOC_DEBUG is None:
        pytest.skip("needs glibc's libc_malloc_debug.so.0")
    script = """
sys.path.insert(0, "tests")
from cases import CASES, DTYPES, build, runs
for case in CASES:
    if case.stem == sys.argv[1] and case.values < 1e5:
        for dtype in [dtype for dtype in DTYPES if runs(dtype, "cpu")]:
            _, new, inputs = build(case, "cpu", dtype)
            new(*inputs)
"""
    run_python(script, stem, cwd=ROOT, LD_PRELOAD=MALLOC_DEBUG, MALLOC_CHECK_=3)


@first_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["to bfloat16", "to float16"])
def test_autocast(case, dtype, device):
    if not runs(dtype, device):
        pytest.skip("this PyTorch has no float16 on a CPU")

    def under_autocast(module, inputs):
        with torch.autocast(device.type, dtype=dtype, enabled=inputs[0].dtype is not torch.float64):
            return forward(module, inputs)

    model, new, inputs = build(case, device, torch.float32)
    assert_same_form(under_autocast(new, inputs)["output"], under_autocast(model, inputs)["output"])
    assert_as_accurate_as_eager(under_autocast, draws(case, device, torch.float32))


# Inputs the Model happens to take, though its docstring does not promise them: right, or refused in words.
UNUSUAL = {
    "linear_instance_norm_residual": [
        ("y with a leading dimension", (5, 7), [torch.rand(2, 5), torch.rand(3, 2, 7)]),
        ("more rows in y than in x", (5, 7), [torch.rand(1, 5), torch.rand(3, 7)]),
        ("y in float64", (5, 7), [torch.rand(2, 5), torch.rand(2, 7).double()]),
        ("y in float16", (5, 7), [torch.rand(2, 5), torch.rand(2, 7).half()]),
        ("y of integers", (5, 7), [torch.rand(2, 5), torch.arange(14).view(2, 7)]),
    ],
    "linear_swish_group_norm": [
        ("as many rows as features", (5, 8, 4, (8,)), [torch.rand(2, 8, 5)]),
        ("more rows in the bias than in x", (5, 8, 4, (2, 8)), [torch.rand(1, 5)]),
    ],
    "conv_sigmoid_group_norm": [
        ("an unbatched image as high as channels", (3, 8, 3, 4, (8, 1, 1), (8, 1, 1)), [torch.rand(3, 10, 7)]),
        ("more samples in the bias than in x", (3, 8, 3, 4, (2, 8, 1, 1), (8, 1, 1)), [torch.rand(1, 3, 6, 7)]),
        ("more samples in the scale than in x", (3, 8, 3, 4, (8, 1, 1), (2, 8, 1, 1)), [torch.rand(1, 3, 6, 7)]),
        ("more columns in the bias than in the image", (3, 8, 3, 4, (8, 1, 5), (8, 1, 1)), [torch.rand(2, 3, 6, 3)]),
    ],
}


@pytest.mark.parametrize(
    ("stem", "init", "inputs"),
    [pytest.param(stem, init, inputs, id=f"{stem} of {name}") for stem in STEMS for name, init, inputs in UNUSUAL.get(stem, [])],
)
def test_unusual_input_is_right_or_refused(stem, init, inputs, device):
    model, new = problem(stem).Model(*init), solution(stem).ModelNew(*init)
    new.load_state_dict(model.state_dict())
    inputs = [t.to(device) for t in inputs]
    with torch.no_grad():
        expected = model.to(device)(*inputs)
        try:
            out = new.to(device)(*inputs)
        except (RuntimeError, ValueError, TypeError) as refusal:
            assert len(str(refusal)) > 20  # a sentence
            return
    assert_same_form(out, expected)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
