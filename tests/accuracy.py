"""How wrong a result may be: measured against the Model run in float64, and against eager's own error there."""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from cases import LAYOUTS, Case, build, converted, in_float64


class Inaccurate(AssertionError):
    """An error larger than eager's own allows."""


@torch.no_grad()
def forward(module, inputs) -> dict[str, torch.Tensor]:
    return {"output": module(*inputs)}


def worst_error(out: torch.Tensor, right: torch.Tensor) -> float:
    """The largest absolute error among the elements whose right value is finite; a NaN there is an error of NaN."""
    error = (out.double() - right).abs()[right.isfinite()]
    return error.max().item() if error.numel() else 0.0


def allowed_error(eager_error: float, scale: float, dtype: torch.dtype, roundings: int = 1) -> float:
    """Twice eager's own error, and half an ulp of the largest value for each time that the value is rounded.

    Ours and eager's are sums in different orders: neither is closer everywhere, but an algorithm as good as eager's
    stays within a small factor of its worst case. The half ulp is the rounding of the result itself, which eager may
    escape by luck; below the smallest normal number an ulp is no smaller than there.
    """
    info = torch.finfo(dtype)
    half_ulp = info.eps * max(2.0 ** math.floor(math.log2(scale)), info.tiny) / 2 if scale else 0.0
    return 2 * eager_error + roundings * half_ulp


def same_kinds(out: torch.Tensor, eager: torch.Tensor, right: torch.Tensor, of_gradients: bool = False) -> bool:
    """Whether each element is finite, NaN, or an infinity, as eager's there or as the float64 result is in the dtype.

    Either is right, because eager's own are an accident of the algorithm: in 16 bits cuDNN multiplies infinities by the
    zeros that fill up its tiles. Within a factor of two of the dtype's largest number it is rounding that decides on
    overflow: there both are right. Where eager overflowed on its way to a finite result, nothing is asked. Of gradients
    NaN and the infinities are alike: the order of operations decides between them.
    """

    def kind(t: torch.Tensor) -> torch.Tensor:
        return t.isfinite() if of_gradients else 2 * t.isnan() + t.isposinf().int() - t.isneginf().int()

    ours, *others = map(kind, (out, eager, (right / 2).to(out.dtype), (right * 2).to(out.dtype)))
    lost = right.isfinite() & ~eager.isfinite()
    return bool(torch.stack([lost, *(ours == other for other in others)]).any(0).all())


def draws(
    case: Case, device, dtype, change: Callable = lambda model, new, inputs: inputs, first_seed: int = 0
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, list]]:
    """Model, ModelNew and inputs, of several seeds."""
    for seed in range(first_seed, first_seed + 24):
        model, new, inputs = build(case, device, dtype, seed)
        yield model, new, change(model, new, inputs)


def poisoned(which: int, value: float, *positions: float) -> Callable:
    """For `draws`: the value stands at these positions, 0 to 1, of an input or, counted on, of a parameter."""

    def change(model, new, inputs):
        for module in (model, new):
            values = [*inputs, *module.parameters()][which].data.view(-1)
            values[[int(position * (len(values) - 1)) for position in positions]] = value
        return inputs

    return change


def in_both(change: Callable) -> Callable:
    """For `draws`: this is done to either module, in place."""

    @torch.no_grad()
    def change_both(model, new, inputs):
        for module in (model, new):
            change(module)
        return inputs

    return change_both


def laid(layout: str) -> Callable:
    """For `draws`: the inputs lie so in memory."""
    return lambda model, new, inputs: [LAYOUTS[layout](t) for t in inputs]


def moved_in_the_last_bit(module: torch.nn.Module, inputs: list) -> tuple[torch.nn.Module, list]:
    """A copy of both with every value an ulp larger or smaller, at random; also those that a layer inside is given."""

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t * (1 + torch.finfo(t.dtype).eps * (2 * torch.rand_like(t).round() - 1)) if t.is_floating_point() else t

    module = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = moved(parameter.data)
    for layer in [*module.modules()][1:]:
        layer.register_forward_pre_hook(lambda layer, inputs: tuple(map(moved, inputs)))
    return module, [moved(t) if isinstance(t, torch.Tensor) else t for t in inputs]


def is_double(results: dict[str, torch.Tensor]) -> bool:
    return all(out.dtype is torch.float64 for out in results.values())


def on_the_host(results: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Small results, by one copy: the host compares them faster, and does not wait for a GPU at each of them."""
    tensors = [t for found in results for t in found.values()]
    sizes = [t.numel() for t in tensors]
    if all(t.is_cpu for t in tensors) or sum(sizes) > 200_000:
        return results
    values = iter(torch.cat([t.double().flatten() for t in tensors]).cpu().split(sizes))  # exact in float64
    return [{name: next(values).to(t.dtype).view(t.shape) for name, t in found.items()} for found in results]


def assert_as_accurate_as_eager(
    run: Callable[[torch.nn.Module, list], dict[str, torch.Tensor]],
    samples: Iterable[tuple],
    roundings: int = 1,
    of_gradients: bool = False,
) -> None:
    """`run` gives named results of a module on inputs: each, over all samples, is within `allowed_error`.

    Where eager or the float64 result overflows there is no error to measure by: only NaN and the infinities are
    compared.

    Nothing here is finer than float64, so eager's error there is not known. What stands for it is how far the result
    moves when every input, parameter and value between layers moves by an ulp, as it would in a good algorithm, times
    the square root of the number of values: eager itself, our measure, adds float64 numbers one by one, and the
    roundings of n sums drift that far.
    """
    figures = defaultdict(list)  # of each name, and the dtype of what has it

    def too_large() -> list[str]:
        found = []
        for (name, dtype), rows in figures.items():
            error, eager_error, scale = torch.tensor(rows, dtype=torch.float64).amax(0).tolist()  # which keeps NaN
            allowed = allowed_error(eager_error, scale, dtype, roundings)
            if not error <= allowed:
                found.append(f"{name} in {dtype}: error {error:.3g}, eager's {eager_error:.3g}, allowed {allowed:.3g}")
        return found

    def results(model, new, inputs) -> list[dict[str, torch.Tensor]]:
        """Ours, eager's and the right ones."""
        got, right = run(new, inputs), run(in_float64(model), converted(inputs, dtype=torch.float64))
        measure = moved_in_the_last_bit(model, inputs) if is_double(got) else (model, inputs)
        return [got, run(*measure), right]

    # The worst of a few values in one sample is luck, on both sides: such tensors are judged by several samples.
    # More are taken only while something small among the results, as the gradient of one bias, looks bad.
    samples, taken = iter(samples), 0
    while group := [(sample, results(*sample)) for sample in itertools.islice(samples, 5 if taken == 1 else 1)]:
        taken += len(group)
        together = on_the_host([found for _, three in group for found in three])
        for (model, _, inputs), got, eager, right in zip([s for s, _ in group], *(together[i::3] for i in range(3))):
            assert got.keys() == eager.keys()
            size = max(t.numel() for t in (*inputs, *got.values()))
            for name, out in got.items():
                assert same_kinds(out, eager[name], right[name], of_gradients), (
                    f"{name}: NaN or Inf where neither eager nor float64 has it"
                )
                decided = eager[name].isfinite() & (2 * right[name]).to(out.dtype).isfinite()
                right[name] = right[name].masked_fill(~decided, torch.nan)
                error, eager_error = worst_error(out, right[name]), worst_error(eager[name], right[name])
                scale = worst_error(torch.zeros_like(out), right[name])
                if is_double(got):
                    eager_error *= size**0.5
                elif not error <= allowed_error(eager_error, scale, out.dtype, roundings):
                    # float64 rounds too: a bias of 1e-39, added to values of 1, is lost there as well.
                    moved = run(*moved_in_the_last_bit(in_float64(model), converted(inputs, dtype=torch.float64)))
                    eager_error += worst_error(moved[name].to(out.device), right[name])
                figures[name, out.dtype].append((error, eager_error, scale))
        if (taken >= 6 or size > 5000) and not too_large():
            return
    if too_large():
        raise Inaccurate("\n".join(too_large()))


def assert_same_form(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Type, dtype, device, shape and, where it has a meaning, stride."""
    ours, theirs = ((type(t), t.dtype, t.device, t.shape) for t in (out, expected))
    assert ours == theirs, f"{ours}, not {theirs}"
    if out.numel() and out.layout is torch.strided:
        ours, theirs = ([s for s, n in zip(t.stride(), t.shape) if n > 1] for t in (out, expected))
        assert ours == theirs, f"strides {ours}, not {theirs}"
