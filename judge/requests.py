"""What every candidate is asked, besides the answers that are timed: what a careless author forgets.

A request changes inputs, but never what all draws of `get_inputs` have in common (`Inputs`): what is sorted, symmetric,
one of a few values, a whole number or a distribution stays so, since a right candidate may rely on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf, nan

import torch

from judge.answers import LAYOUTS, How, Request

secret = random.SystemRandom()  # numbers that no candidate foresees
LOOKED_AT = 1 << 22  # elements of an input, to see what it is
FEW = 8  # values: of more a request makes others


class Inputs:
    """What an input, a tensor, is in all of some draws."""

    def __init__(self, draws: list[torch.Tensor]):
        draws = [part(x) for x in draws]
        first = draws[0]
        kind = first.dtype
        self.floating = first.is_floating_point() and kind.itemsize > 1
        numbers = not first.is_complex() and first.layout == torch.strided and first.numel() and first.dim()
        draws = [x.double() for x in draws] if numbers and (self.floating or kind != torch.bool) else []
        self.low = min((float(x.min()) for x in draws), default=0.0)
        self.high = max((float(x.max()) for x in draws), default=0.0)
        every = lambda holds: bool(draws) and all(holds(x) for x in draws)  # noqa: E731
        ends = bool(draws) and draws[0].shape[-1] > 1
        self.equal = every(lambda x: x.numel() > 1 and bool((x == x.reshape(-1)[0]).all()))
        self.whole = self.floating and not self.equal and every(lambda x: bool((x == x.round()).all()))
        few = lambda x: x.numel() > FEW and len(x.unique()) <= FEW  # noqa: E731
        few_of_some = every(lambda x: few(x.reshape(-1)[: 1 << 12]))  # of all it takes a second to see
        self.few = self.floating and not self.equal and few_of_some and every(few)
        self.sorted = not self.equal and every(lambda x: ends and bool((x.diff(dim=-1) >= 0).all()))
        is_mirrored = lambda x: x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.equal(x, x.mT)  # noqa: E731
        self.symmetric = not self.equal and every(is_mirrored)
        shares = lambda x: ends and float(x.min()) >= 0 and bool(((x.sum(-1) - 1).abs() < 0.02).all())  # noqa: E731
        self.shares = self.floating and every(shares)
        same = bool(draws) and all(torch.equal(x, draws[0]) for x in draws)
        self.order = same and not self.sorted and len(draws[0].unique()) == draws[0].numel()

    def free(self) -> bool:
        """Nothing is known of it that scaling breaks."""
        return self.floating and not (self.whole or self.few or self.shares)

    def changed(self, x: torch.Tensor, change: Callable) -> bool:
        """Changes it in place, as far as it stays what it is; whether it is another now."""
        if change is Inputs.other_integers:
            return self.other_integers(x)
        if not self.floating or self.few or not x.numel():
            return False
        before = x.clone()
        change(x)
        if not x.isfinite().all() and (self.whole or self.shares or self.sorted or self.symmetric or self.equal):
            x.copy_(before)
        if self.whole:
            x.round_().clamp_(self.low, self.high)
        if self.sorted:
            x.copy_(x.sort(-1).values)
        if self.symmetric:
            x.copy_(mirrored(x))
        if self.equal:
            x.fill_(x.reshape(-1)[0].item())
        if self.shares:
            x.abs_().add_(1e-6).div_(x.sum(-1, keepdim=True))
        return not torch.equal(before, x)

    def other_integers(self, x: torch.Tensor) -> bool:
        """Others of the range that is there, and truth values of both kinds; what is sorted keeps its ends. Of few
        numbers in floating point, as those of a mask, each row keeps its own."""
        if x.is_complex() or not x.numel() or x.dim() == 0 or x.is_floating_point() and not self.few:
            return False
        before = x.clone()
        if x.dtype == torch.bool:
            x.copy_(torch.rand(x.shape, device=x.device) < 0.5)
        elif self.floating:
            x.copy_(x if self.sorted else x[..., torch.randperm(x.shape[-1], device=x.device)])
        elif self.order:
            x.copy_(x.reshape(-1)[torch.randperm(x.numel(), device=x.device)].view(x.shape))
        elif not self.equal:
            ends = x[..., :1].clone(), x[..., -1:].clone()
            x.random_(int(self.low), int(self.high) + 1)
            if self.sorted:
                x.copy_(x.sort(-1).values)
                x[..., :1], x[..., -1:] = ends
        if self.symmetric:
            x.copy_(mirrored(x))
        return not torch.equal(before, x)


def mirrored(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.ones_like(x).triu().bool(), x, x.mT.clone())


def part(x: torch.Tensor) -> torch.Tensor:
    """Of a large tensor the first rows."""
    return x[: max(1, LOOKED_AT * len(x) // x.numel())] if x.dim() and x.numel() > LOOKED_AT else x


def signs(model: torch.nn.Module) -> None:
    """About half of the parameters' values get the other sign; buffers, a variance say, keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.mul_(torch.randint_like(parameter, 2) * 2 - 1)


def shift_biases(model: torch.nn.Module) -> None:
    for module in model.modules():
        bias = dict(module.named_parameters(recurse=False)).get("bias")
        if bias is not None and bias.is_floating_point() and "Norm" not in type(module).__name__:
            bias.data.add_(100.0)


def shiftable(x: torch.Tensor) -> torch.Tensor:
    """The elements that may be changed: not zeros beside other values, which may be those of a triangular matrix."""
    return (x != 0) | ~x.any()


def fill_two(x: torch.Tensor, value: float) -> None:
    for thirds, each in ((1, value), (2, -value)):
        x[tuple(thirds * size // 3 for size in x.shape)].fill_(each)


def reverse_middle(x: torch.Tensor) -> None:
    """The sum stays, and so do the first and the last rows, and zeros."""
    middle = x[len(x) // 4 : len(x) - len(x) // 4] if x.dim() else x
    places = shiftable(middle)
    middle[places] = middle[places].flip(0)


LENIENT = {"may_differ": True, "may_refuse": True}
MAY_REFUSE = {"may_refuse": True}
FINITE, BOTH = partial(Request, finite=True), partial(Request, direction="forward_backward")
SIGNS = FINITE("values of both signs", change=lambda x: x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3)), weights=signs)

# Asked at the shape and in the layout that is timed.
REQUESTS = {
    "forward": [
        Request("two instances with other weights in turns", how=How.TWIN),
        Request("kept while it was called again", order=(0, *[1] * 8, 0, *[1] * 8)),
        Request("inputs that differ from the last ones in the middle", order=(0, 1), change=reverse_middle, alike=True),
        Request("after the weights moved in memory, as .to moves them", how=How.MOVED, **MAY_REFUSE),
        Request("called again and again", how=How.REPEATED),
        Request("called by two threads at once", order=(0, 1), how=How.THREADS),
        Request("with gradients recorded", direction="forward_recorded"),
        Request("in inference mode", how=How.INFERENCE),
        Request("in training mode", how=How.TRAIN, both_gates=True, **MAY_REFUSE),
        SIGNS,
        FINITE("biases whose mean is large", weights=shift_biases),
        FINITE("inputs raised by 100", change=lambda x: x.add_(shiftable(x), alpha=100.0)),
        FINITE("inputs lowered by 100", change=lambda x: x.add_(shiftable(x), alpha=-100.0)),
        FINITE("small values", change=lambda x: x.mul_(1e-3)),
        FINITE("inputs that are all equal", change=lambda x: x.masked_fill_(shiftable(x), 0.5)),
        FINITE("inputs that are all zero", change=lambda x: x.zero_()),
        FINITE("other integers and masks, half of each number", change=Inputs.other_integers),
        Request("NaN in each input", change=partial(fill_two, value=nan), **LENIENT),
        Request(
            "infinities of both signs in each input", change=partial(fill_two, value=inf), any_infinite=True, **LENIENT
        ),
    ],
    "forward_backward": [
        BOTH("two forward passes before two backward passes", order=(0, 1)),
        BOTH("a second backward pass of one graph", how=How.REPEATED, **MAY_REFUSE),
        BOTH("only the parameters' gradients wanted", whose="parameters"),
        BOTH("only the inputs' gradients wanted", whose="inputs"),
        BOTH("only the last output in the loss, every second parameter frozen", how=How.IN_PART),
        BOTH("in training mode", how=How.TRAIN, both_gates=True, **MAY_REFUSE),
        replace(SIGNS, direction="forward_backward"),
        BOTH("an incoming gradient that is expanded", incoming="expanded", **MAY_REFUSE),
        BOTH("an incoming gradient that is a slice", incoming="a slice", **MAY_REFUSE),
    ],
}


def requests_after(device: str, batch: int | None, direction: str, gradients: bool) -> Iterator[Request]:
    """Asked when all is timed, since it may make a compiler compile anew. Gradients: where no direction judges them."""
    of = partial(Request, direction=direction)
    if gradients:
        yield BOTH("gradients, which --backward judges", **LENIENT)
    yield of("after it was timed")
    if device == "cuda":
        yield of("on another stream", how=How.LATE)  # it leaves a pool of streams behind, which may slow short calls
    for layout in [*LAYOUTS][2:]:
        yield of(f"inputs that are {layout}", layout=layout, **MAY_REFUSE)
    if batch:
        others = [*range(2, batch), *range(batch + 2, batch + 9)]  # two of them: at least one is not asked in every run
        few = {0, 1, batch - batch // 3, 2 * batch + 1} if direction == "forward" else set()
        for other in sorted({batch + 1, *few, *secret.sample(others, 2)} - {batch}):
            yield of(f"batch {other}", batch=other, **MAY_REFUSE)
    if device == "cuda" and direction == "forward":  # the last, since one that fails may leave the GPU's context unfit
        yield of("captured in a CUDA graph", how=How.CAPTURED, **LENIENT)
