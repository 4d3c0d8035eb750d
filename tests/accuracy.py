"""How wrong a result may be: measured against the Model run in float64, and against eager's own error there."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from cases import Case, build, converted, in_float64


def worst_error(out: torch.Tensor, right: torch.Tensor) -> float:
    """The largest absolute error among the elements whose right value is finite; a NaN there is an error of NaN."""
    error = (out.double() - right).abs()[right.isfinite()]
    return error.max().item() if error.numel() else 0.0


def largest(right: torch.Tensor) -> float:
    finite = right[right.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def allowed_error(eager_error: float, scale: float, dtype: torch.dtype, roundings: int = 1) -> float:
    """Twice eager's own error, and half an ulp of the largest value for each time that the value is rounded.

    Ours and eager's are sums in different orders: neither is closer everywhere, but an algorithm as good as eager's stays within a
    small factor of its worst case. The half ulp is the rounding of the result itself, which eager may escape by luck.
    """
    half_ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(scale)) / 2 if scale else 0.0
    return 2 * eager_error + roundings * half_ulp


def draws(case: Case, device, dtype, change: Callable = lambda model, new, inputs: inputs) -> Iterable[tuple]:
    """Model, ModelNew and inputs, of several seeds."""
    for seed in range(24):
        model, new, inputs = build(case, device, dtype, seed)
        yield model, new, change(model, new, inputs)


def moved_in_the_last_bit(module: torch.nn.Module, inputs: list) -> tuple[torch.nn.Module, list]:
    """A copy of both with every value an ulp larger or smaller, at random."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t * (1 + torch.finfo(t.dtype).eps * (2 * torch.rand_like(t).round() - 1)) if t.is_floating_point() else t

    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = moved(parameter.data)
    return module, [moved(t) if isinstance(t, torch.Tensor) else t for t in inputs]


def assert_as_accurate_as_eager(
    run: Callable[[torch.nn.Module, list], dict[str, torch.Tensor]], samples: Iterable[tuple], roundings: int = 1
) -> None:
    """`run` gives named results of a module on inputs; each, over all samples, must be within `allowed_error`.

    Nothing here is finer than float64, so eager's error there is not known. What stands for it is how far the result moves when every
    input and parameter moves by an ulp, as it would in a good algorithm, times the square root of the number of values: eager itself,
    our measure, adds float64 numbers one by one, and the roundings of n sums drift that far.
    """
    ours, eagers, scales, dtypes = defaultdict(list), defaultdict(list), defaultdict(list), {}

    def too_large() -> list[str]:
        found = []
        for name, dtype in dtypes.items():
            error, eager_error, scale = (torch.tensor(v).max().item() for v in (ours[name], eagers[name], scales[name]))
            allowed = allowed_error(eager_error, scale, dtype, roundings)
            if not error <= allowed:
                found.append(f"{name} in {dtype}: error {error:.3g}, eager's {eager_error:.3g}, allowed {allowed:.3g}")
        return found

    for taken, (model, new, inputs) in enumerate(samples, 1):
        got, right = run(new, inputs), run(in_float64(model), converted(inputs, dtype=torch.float64))
        in_doubles = all(out.dtype is torch.float64 for out in got.values())
        eager = run(*moved_in_the_last_bit(model, inputs)) if in_doubles else run(model, inputs)
        assert got.keys() == eager.keys()
        for name, out in got.items():
            ours[name].append(worst_error(out, right[name]))
            drift = max(t.numel() for t in (*inputs, *got.values())) ** 0.5 if in_doubles else 1
            eagers[name].append(drift * worst_error(eager[name], right[name]))
            scales[name].append(largest(right[name]))
            dtypes[name] = out.dtype
        # The worst of a few values in one sample is luck, on both sides: tensors of a few are judged by several samples. More are taken
        # only while something small among the results, such as the gradient of one bias, looks bad.
        if (taken >= 6 or max(t.numel() for t in (*inputs, *got.values())) > 5000) and not too_large():
            return
    assert not too_large(), "\n".join(too_large())


def assert_same_form(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Type, dtype, device, shape and, where it has a meaning, stride."""
    assert type(out) is type(expected)
    assert (out.dtype, out.device, out.shape) == (expected.dtype, expected.device, expected.shape)
    if out.numel():
        assert [s for s, n in zip(out.stride(), out.shape) if n > 1] == [s for s, n in zip(expected.stride(), expected.shape) if n > 1]
