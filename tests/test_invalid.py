"""Inputs and parameters that make no sense: the Model's exception or one as clear, never a wrong answer or a crash."""

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from accuracy import assert_same_form
from cases import FIRST, ROOT, STEMS, Case, build, solution
from processes import finish, start_python

# What is done to one input, or to one parameter, of a right call.
SPOILERS: dict[str, Callable] = {
    "of no dimensions": lambda t: t.new_ones(()),
    "of one dimension": lambda t: t.flatten(),
    "of a dimension less": lambda t: t[0],
    "of a dimension more": lambda t: t[None],
    "of seven dimensions": lambda t: t[(None,) * (7 - t.dim())],
    "of one channel more": lambda t: torch.cat([t, t.narrow(min(1, t.dim() - 1), 0, 1)], min(1, t.dim() - 1)),
    "of no channels": lambda t: t.narrow(min(1, t.dim() - 1), 0, 0),
    "without a value": lambda t: t.new_empty([0] * t.dim()),
    "of a single value": lambda t: t[(slice(0, 1),) * t.dim()],
    "cut in the last dimension": lambda t: t[..., :1],
    "longer in the last dimension": lambda t: torch.cat([t, t], -1),
    "of more samples": lambda t: torch.cat([t, t]),
    "of 2^40 elements in the room of one": lambda t: t.flatten()[:1].as_strided((2**20, 2**20), (0, 0)),
    "in float64": lambda t: t.double(),
    "in float16": lambda t: t.half(),
    "in bfloat16": lambda t: t.bfloat16(),
    "of int64": lambda t: t.long(),
    "of int8": lambda t: t.to(torch.int8),
    "of booleans": lambda t: t > 0,
    "of complex numbers": lambda t: t.to(torch.complex64),
    "of complex numbers, conjugated lazily": lambda t: t.to(torch.complex64).conj(),
    "of integers that require a gradient": lambda t: t.long().requires_grad_(),
    "in float8": lambda t: t.to(torch.float8_e4m3fn),
    "quantized": lambda t: torch.quantize_per_tensor(t.cpu(), 0.1, 0, torch.quint8),
    "sparse": lambda t: t.to_sparse(),
    "sparse in compressed rows": lambda t: t.flatten(1).to_sparse_csr() if t.dim() > 1 else t.to_sparse(),
    "in MKL-DNN's layout": lambda t: t.cpu().to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[0]]) if t.dim() > 1 else t.to_sparse(),
    "masked": lambda t: torch.masked.masked_tensor(t, t > 0),
    "on the meta device": lambda t: t.to("meta"),
    "that is None": lambda t: None,
    "that is a list": lambda t: t.tolist(),
    "that is an array": lambda t: t.detach().cpu().numpy(),
    "that is a number": lambda t: 1.0,
}


def outcome(function: Callable) -> torch.Tensor | Exception:
    try:
        out = function()
        return out.detach() if out.is_meta else out.detach().clone()
    except Exception as error:  # whatever it is, it is what is judged
        return error


def complaint(ours: torch.Tensor | Exception, models: torch.Tensor | Exception, tolerance: float = 1e-2) -> str | None:
    """What is wrong with ModelNew's outcome beside the Model's, if anything."""
    if isinstance(ours, Exception):
        as_the_models = isinstance(ours, type(models)) or isinstance(models, type(ours))
        clear = isinstance(ours, (RuntimeError, ValueError, TypeError, AttributeError)) and len(str(ours)) > 20
        fine = isinstance(models, Exception) and (as_the_models or clear)
        return None if fine else f"raises {ours!r}, where the Model has {models!r}"
    if isinstance(models, Exception):
        return f"returns {tuple(ours.shape)} of {ours.dtype}, where the Model raises {models!r}"
    try:
        assert_same_form(ours, models)
        if not models.is_meta:
            torch.testing.assert_close(ours, models, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as difference:
        return f"another result than the Model's: {difference}"
    return None


def judge_all(device: str) -> None:
    """Every spoiler on every input and parameter of every pair, with and without gradients; its name before it runs."""
    warnings.simplefilter("ignore")
    for case in FIRST:
        model, new, inputs = build(case, device)
        right = {f"input {i}": t for i, t in enumerate(inputs)}
        right |= {name: p.detach() for name, p in model.named_parameters()}
        for name, (how, spoil), grad in itertools.product(right, SPOILERS.items(), (False, True)):
            if how == "on the meta device" and not name.startswith("input"):
                continue  # PyTorch's own linear and convolution then read whatever stands in memory
            print(f"{case.stem}, {name} {how}, gradients {'on' if grad else 'off'}", flush=True)

            def call(module):
                spoilt = {n: t.clone().requires_grad_(grad) for n, t in right.items()}
                spoilt[name] = spoil(spoilt[name])
                arguments = tuple(spoilt[f"input {i}"] for i in range(len(inputs)))
                parameters = {n: value for n, value in spoilt.items() if not n.startswith("input")}
                with torch.set_grad_enabled(grad):
                    return torch.func.functional_call(module, parameters, arguments)

            if found := complaint(outcome(lambda: call(new)), outcome(lambda: call(model))):
                print(f"WRONG: {found}", flush=True)


def test_nonsense_is_refused_as_by_the_model(device):
    """In a process of its own, which must live."""
    script = 'sys.path.insert(0, "tests")\nfrom test_invalid import judge_all\njudge_all(sys.argv[1])'
    code, out, err = finish(start_python(script, device, cwd=ROOT), timeout=300)
    lines = out.splitlines()
    assert code == 0, f"exit code {code} in: {lines[-1:]}\n{err}"
    wrong = [f"{before}: {line}" for before, line in itertools.pairwise(lines) if line.startswith("WRONG")]
    assert len(lines) > 100 and not wrong, "\n".join(wrong)


REFUSED = [  # the norm of a single value, and a convolution to nothing
    Case("instance_norm", "one pixel", (3,), ((2, 3, 1, 1),)),
    Case("linear_instance_norm_residual", "one feature", (3, 1), ((2, 3), (2, 1))),
    Case("linear_swish_group_norm", "a row of groups of one", (3, 8, 8, (8,)), ((1, 3),)),
    Case("conv_sigmoid_group_norm", "a pixel of groups of one", (3, 8, 3, 8, (8, 1, 1), (8, 1, 1)), ((1, 3, 3, 3),)),
    Case("conv_sigmoid_group_norm", "no channels", (3, 0, 3, 1, (0, 1, 1), (0, 1, 1)), ((2, 3, 6, 6),)),
    Case("conv_sigmoid_group_norm", "no channels of an image", (3, 0, 3, 1, (0, 1, 1), (0, 1, 1)), ((2, 3, 20, 20),)),
]


@pytest.mark.parametrize("case", [case for case in REFUSED if case.stem in STEMS], ids=str)
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_sizes_are_refused_in_the_models_words(case, recorded, device):
    errors = []
    for module in build(case, device)[:2]:
        with torch.set_grad_enabled(recorded), pytest.raises((RuntimeError, ValueError)) as raised:
            module(*build(case, device)[2])
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_an_operator_refuses_rows_of_another_shape():
    """A program that torch.export or AOTInductor saved calls it without what Python checks."""
    finish = getattr(torch.ops, solution("linear_instance_norm_residual").NAMESPACE).finish
    with pytest.raises(RuntimeError, match="h and y"):
        finish(torch.randn(4, 64), torch.randn(1, 64), 1e-5)
