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
from judge.source import reseed

secret = random.SystemRandom()  # numbers that no candidate foresees
LOOKED_AT = 1 << 22  # elements of an input, to see what it is
FEW = 8  # values: of more a request makes others
MANY = 16  # times as large a batch, where that is small all the same
SWAPS = 64  # at most, of two numbers
MANY_DRAWS = 64  # answers of a Model that draws random numbers


Kind = tuple[Callable[[torch.Tensor], bool], Callable[[torch.Tensor], torch.Tensor]]


def ordered(dim: int, sign: int) -> Kind:
    """From small to large along a dimension (sign 1), or from large to small (-1)."""

    def holds(x: torch.Tensor) -> bool:
        steps = sign * x.diff(dim=dim)
        return bool((steps >= 0).all() and (steps > 0).any())

    return holds, lambda x: x.sort(dim, descending=sign < 0).values


def normed(nearest: Callable) -> Kind:
    def holds(x: torch.Tensor) -> bool:
        return x.shape[-1] > 1 and bool(((nearest(x) - x).abs() <= 0.02 * x.abs() + 1e-3 * x.abs().max()).all())

    return holds, nearest


def repeated(nearest: Callable) -> Kind:
    return lambda x: x.shape[-1] > 3 and x.shape[-1] % 2 == 0 and torch.equal(nearest(x), x), nearest


def alike(dim: int) -> Kind:
    """All rows (dim 0), or all columns (-1), are the first."""
    nearest = lambda x: x.narrow(dim, 0, 1).expand_as(x).clone()  # noqa: E731
    return lambda x: x.dim() > 1 and x.shape[dim] > 1 and torch.equal(x, nearest(x)), nearest


def is_mirrored(x: torch.Tensor) -> bool:
    return x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.equal(x, x.mT)


def is_orthogonal(x: torch.Tensor) -> bool:
    if (
        x.dim() < 2
        or not 1 < x.shape[-1] <= x.shape[-2] <= 1 << 10
        or bool((x[..., 0].norm(dim=-1) - 1).abs().max() > 0.02)
    ):
        return False
    products = x.mT @ x
    return torch.allclose(products, torch.eye(x.shape[-1]).to(x).expand_as(products), atol=0.02)


# What all draws of an input may have in common: whether a tensor of float64 has it, and the nearest tensor that does.
ORDERS = {
    "rises in each row": ordered(-1, 1),
    "falls in each row": ordered(-1, -1),
    "rises in each column": ordered(0, 1),
    "falls in each column": ordered(0, -1),
}
KINDS = ORDERS | {
    "symmetric": (is_mirrored, lambda x: torch.where(torch.ones_like(x).triu().bool(), x, x.mT.clone())),
    "equal rows": alike(0),
    "equal columns": alike(-1),
    "two equal halves": repeated(lambda x: torch.cat([x[..., : x.shape[-1] // 2]] * 2, -1)),
    "equal pairs": repeated(lambda x: x[..., ::2].repeat_interleave(2, -1)),
}
NORMED = {  # these scaling breaks
    "shares": normed(lambda x: (x.abs() + 1e-6) / (x.abs() + 1e-6).sum(-1, keepdim=True)),
    "rows of length 1": normed(lambda x: x / x.norm(dim=-1, keepdim=True)),
    "logarithms of shares": normed(lambda x: x.log_softmax(-1)),
    "orthogonal columns": (is_orthogonal, lambda x: torch.linalg.qr(x).Q),
}


class Inputs:
    """What an input, a tensor, is in all of some draws."""

    def __init__(self, draws: list[torch.Tensor]):
        draws = [part(x) for x in draws]
        first = draws[0]
        truths = first.dtype == torch.bool
        self.floating = first.is_floating_point() and first.dtype.itemsize > 1
        numbers = not first.is_complex() and first.layout == torch.strided and first.numel() and first.dim()
        draws = [x.double() for x in draws] if numbers and self.floating == first.is_floating_point() else []
        self.low = min((float(x.min()) for x in draws), default=0.0)
        self.high = max((float(x.max()) for x in draws), default=0.0)
        every = lambda holds: bool(draws) and all(holds(x) for x in draws)  # noqa: E731
        self.equal = not truths and every(lambda x: x.numel() > 1 and bool((x == x.reshape(-1)[0]).all()))
        # Integers 1 in rows, as a mask of all tokens has them: of zeros and ones a candidate may see any.
        self.ones = self.equal and not self.floating and self.low == self.high == 1 and first.dim() > 1
        self.whole = self.floating and not self.equal and every(lambda x: bool((x == x.round()).all()))
        few = lambda x: x.numel() > FEW and len(x.unique()) <= FEW  # noqa: E731
        few_of_some = every(lambda x: few(x.reshape(-1)[: 1 << 12]))  # of all it takes a second to see
        self.few = self.floating and not self.equal and few_of_some and every(few)
        # A mask that is always the same is changed in any way: a candidate may ignore it.
        constant = (truths or self.few) and every(lambda x: torch.equal(x, draws[0]))
        kinds = {} if self.equal or constant else {**KINDS, **NORMED} if self.floating else KINDS
        self.kinds = {name: kind for name, kind in kinds.items() if every(kind[0])}
        self.ordered = bool(ORDERS.keys() & self.kinds.keys())
        row = draws[0].reshape(-1, first.shape[-1])[0].sort().values if draws else []
        self.shuffled = (not self.floating or self.few) and len(row) > 0 and bool(row[0] != row[-1])
        self.shuffled = self.shuffled and every(lambda x: bool((x.sort(-1).values == row).all()))

    def free(self) -> bool:
        """Nothing is known of it that scaling breaks."""
        return self.floating and not (self.whole or self.few or NORMED.keys() & self.kinds.keys())

    def changed(self, x: torch.Tensor, change: Callable) -> bool:
        """Changes it in place, as far as it stays what it is; whether it is another now."""
        if x.layout != torch.strided or not x.numel() or not x.dim() or x.is_complex() and change is not reverse_middle:
            return False
        before = x.clone()
        try:
            if change is Inputs.other_integers:
                self.other_integers(x)
            elif self.floating and not self.few or change in KEEP_INTEGERS:
                change(x)
        except NotImplementedError:  # PyTorch has few operations on unsigned integers
            x.copy_(before)
        if torch.equal(x, before):
            return False
        if not (self.kinds or self.whole or self.equal):
            return True
        if stays := bool(x.isfinite().sum() == before.isfinite().sum()):  # a mask may have infinities
            if self.whole:
                x.round_().clamp_(self.low, self.high)
            for _, nearest in self.kinds.values():
                x.copy_(nearest(x.double()))
            if self.equal and not self.ones:
                x.fill_(x.reshape(-1)[0].item())
            stays = all(holds(x.double()) for holds, _ in self.kinds.values())
        if not stays:
            x.copy_(before)
        return not torch.equal(x, before)

    def other_integers(self, x: torch.Tensor) -> None:
        """Other integers of the range that is there, and truth values of both kinds. What is ordered keeps its ends; of
        an ordered mask, which tells lengths, the rows change places. A row keeps its numbers, in another order, if they
        are the same in all rows, or a few numbers in floating point."""
        if x.is_floating_point() and not self.few:
            return
        if self.equal and not self.ones:  # lengths that are all the longest, say
            x.fill_(int(self.low) // 2 if self.low == self.high > 1 else x.reshape(-1)[0].item())
            return
        mask = self.few or self.ones or x.dtype == torch.bool
        if self.ordered and mask:
            x.copy_(x[torch.randperm(len(x), device=x.device)])
        elif self.shuffled and not self.ordered:
            x.copy_(x.gather(-1, torch.rand(x.shape, device=x.device).argsort(-1)))
        elif self.few:
            x.copy_(x[..., torch.randperm(x.shape[-1], device=x.device)])
        elif mask:
            x.copy_(torch.rand(x.shape, device=x.device) < 0.5)
            if x.shape[-1] > 1:  # each row has both values: an average over nothing is NaN
                x[..., 0] |= ~x.any(-1)
                x[..., -1] &= ~x.all(-1)
        else:
            before = x.clone()
            # Of this draw's range: places in a batch have another in each. (Of one number only all draws' is known.)
            low, high = (before.min(), before.max()) if x.numel() > 1 else (self.low, self.high)
            x.random_(int(low), int(high) + 1)
            for name, (_, nearest) in ORDERS.items():
                if name in self.kinds:
                    dim = 0 if "column" in name else x.dim() - 1
                    ends = before.narrow(dim, 0, 1), before.narrow(dim, x.shape[dim] - 1, 1)
                    x.copy_(nearest(x).clamp(torch.minimum(*ends), torch.maximum(*ends)))
                    x.narrow(dim, 0, 1).copy_(ends[0])
                    x.narrow(dim, x.shape[dim] - 1, 1).copy_(ends[1])


def half(x):
    """Of a number, or of a tensor that is one integer; of 0 and 1 the same, and all else as it is."""
    if type(x) is float:
        return 0.5 * x
    of_integers = isinstance(x, torch.Tensor) and not (x.dim() or x.is_floating_point() or x.is_complex())
    is_one = type(x) is int or of_integers and x.dtype != torch.bool
    return x // 2 or x if is_one else x


def other_truth(x):
    """Of True False, and of a number that is 0 1, and the other way round; of tensors a single truth value is another,
    and integers that are all 0 are 1."""
    if isinstance(x, torch.Tensor):
        of_integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool) and x.numel()
        if of_integers and not x.long().any():  # of unsigned integers a GPU has no `any`
            return torch.ones_like(x)
        return ~x if x.dtype == torch.bool and not x.dim() else x
    return type(x)(not x) if type(x) in (bool, int, float) and x in (0, 1) else x


def part(x: torch.Tensor) -> torch.Tensor:
    """Of a large tensor the first rows."""
    return x[: max(1, LOOKED_AT * len(x) // x.numel())] if x.dim() and x.numel() > LOOKED_AT else x


def is_ordered(x: torch.Tensor) -> bool:
    return not x.is_complex() and bool((x[1:] > x[:-1]).all() or (x[1:] < x[:-1]).all())


def perturb(model: torch.nn.Module, seed: int, which: slice = slice(None)) -> None:
    """New values for what is floating in the state, all or some, of the size it had; for zeros small numbers. A buffer
    of numbers in order, as a table of knots, stays."""
    reseed(-1 - seed)  # inputs have seeds from 0 on
    tables = {name for name, x in model.named_buffers() if x.dim() == 1 and len(x) > 2 and is_ordered(x)}
    floating = [x for name, x in model.state_dict().items() if isinstance(x, torch.Tensor) and name not in tables]
    for tensor in [x for x in floating if x.is_floating_point() or x.is_complex()][which]:
        factors = torch.rand_like(tensor) + 0.5
        tensor.mul_(factors) if tensor.any() else tensor.copy_(factors - 1.0)


def other_buffers(model: torch.nn.Module) -> None:
    """Each integer or truth value of a buffer goes to another place."""
    for x in model.state_dict().values():
        if isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex() or x.is_quantized):
            x.copy_(x.reshape(-1)[torch.randperm(x.numel(), device=x.device)].view_as(x))


every_second = partial(perturb, seed=0, which=slice(0, None, 2))


def all_of_them(model: torch.nn.Module) -> None:
    every_second(model)
    perturb(model, 1, slice(1, None, 2))


def signs(model: torch.nn.Module) -> None:
    """About half of the parameters' values get the other sign; buffers, a variance say, keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.mul_(torch.randint_like(parameter, 2) * 2 - 1)


def larger_norms(model: torch.nn.Module) -> None:
    """Normalised values, a learned number and the slope of a PReLU go beyond bounds, a clamp's say, that they never
    reach with the first weights."""
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            if x.is_floating_point() and "bias" not in name and x.numel() == max(x.shape, default=1):
                x.data.mul_(8.0)


def fill_zeros(model: torch.nn.Module) -> None:
    """Zeros of trained parameters, as an identity has them, do not stay zero; those of a padding row do."""
    for module in model.modules():
        for x in module.parameters(recurse=False) if getattr(module, "padding_idx", None) is None else ():
            if x.is_floating_point() and x.requires_grad:
                x.data.add_((x == 0) * (torch.rand_like(x) - 0.5))


def shift_biases(model: torch.nn.Module, by: float = 100.0) -> None:
    for module in model.modules():
        bias = dict(module.named_parameters(recurse=False)).get("bias")
        if bias is not None and bias.is_floating_point() and "Norm" not in type(module).__name__:
            bias.data.add_(by)


def shiftable(x: torch.Tensor) -> torch.Tensor:
    """The elements that may be changed: not zeros beside other values, which may be those of a triangular matrix."""
    return (x != 0) | ~x.any()


def fill_two(x: torch.Tensor, value: float) -> None:
    for thirds, each in ((1, value), (2, -value)):
        x[tuple(thirds * size // 3 for size in x.shape)].fill_(each)


def to_size_2(x: torch.Tensor) -> None:
    """Neither so small that an approximation around 0 holds, nor so large that functions are saturated."""
    x.mul_(2.0 / (float(x.double().square().mean().sqrt()) or 1.0))


def reverse_middle(x: torch.Tensor) -> None:
    """The sum stays, and so do the first and the last rows, and zeros."""
    middle = x[len(x) // 4 : len(x) - len(x) // 4] if x.dim() else x
    places = shiftable(middle)
    middle[places] = middle[places].flip(0)


def swap_two(x: torch.Tensor, along: int) -> None:
    """Two numbers of a row (-1) or a column (0), one of them in the middle, change places whose swap leaves its sum as
    it is, that of all, and that of squares, to the last bit, since these may be a cache's key: those of
    `reverse_middle` are rounded otherwise. Zeros stay."""
    sums = lambda: (x.sum(), x.sum(along), x.double().sum(), x.double().square().sum())  # noqa: E731
    first, before, quarter = x.contiguous().clone(), sums(), x.numel() // 4
    n, stride = x.shape[along], first.stride(along)
    for _ in range(SWAPS if quarter else 0):
        i, j = torch.randint(quarter, x.numel() - quarter, (2,)).tolist()
        j = i + (j % n - i // stride % n) * stride
        flat = first.reshape(-1).clone()
        flat[[i, j]] = flat[[j, i]]
        x.copy_(flat.view_as(x))
        if flat[i] != flat[j] and flat[i] and flat[j] and all(map(torch.equal, sums(), before)):
            break
        x.copy_(first)


def swap_within(x: torch.Tensor) -> None:
    """Along a dimension between the first and the last."""
    if x.dim() > 2:
        swap_two(x, int(torch.randint(1, x.dim() - 1, ())))


swap_in_a_row, swap_in_a_column = partial(swap_two, along=-1), partial(swap_two, along=0)
KEEP_INTEGERS = (reverse_middle, swap_in_a_row)  # what is one hot, or a permutation, stays so


def swap_in_each(model: torch.nn.Module, along: int) -> None:
    """Neither the first and the last numbers of a parameter, nor its sums, tell of it."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim():
            swap_two(parameter.data, along)


LENIENT = {"may_differ": True, "may_refuse": True}
MAY_REFUSE = {"may_refuse": True}
TRAINS = MAY_REFUSE | {"both_gates": True}
TRAINED = MAY_REFUSE | {"how": How.TRAIN}
FINITE, BOTH = partial(Request, finite=True), partial(Request, direction="forward_backward")
SIGNS = FINITE("values of both signs", change=lambda x: x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3)), weights=signs)
LOWERED = FINITE("inputs lowered by 112", change=lambda x: x.add_(shiftable(x), alpha=-112.0))
INTEGERS = FINITE("other integers and masks, half of each number", change=Inputs.other_integers)
INFERRED = BOTH("gradients in a module whose first call was in inference mode", how=How.INFERRED, **LENIENT)
ONE_OTHER = partial(Request, order=(0, 1), change=reverse_middle, alike=True)
SWAPPED = partial(FINITE, how=How.SPARING)
NORMS = FINITE("weights of norms and scales 8 times as large", weights=larger_norms)

# Asked at the shape and in the layout that is timed.
REQUESTS = {
    "forward": [
        Request("two instances with other weights in turns", how=How.TWIN),
        Request("a second instance, with weights of its own", how=How.TWIN | How.SECOND),
        Request("every second weight changed since the last call", how=How.SPARING, weights=every_second),
        Request("the other weights changed since the last call", how=How.SPARING, weights=all_of_them),
        FINITE("other integers and truth values in the buffers", weights=other_buffers, **LENIENT),
        Request("kept while it was called again", order=(0, *[1] * 8, 0, *[1] * 8)),
        SWAPPED("numbers of each weight changed places since the last call", weights=partial(swap_in_each, along=-1)),
        Request("inputs that differ from the last ones in the middle", order=(0, 1), change=reverse_middle, alike=True),
        Request("inputs with the last ones' sums, and of rows", order=(0, 1), change=swap_in_a_row, alike=True),
        Request("inputs with the last ones' sums, and of columns", order=(0, 1), change=swap_in_a_column, alike=True),
        Request("inputs with the last ones' sums, and within", order=(0, 1), change=swap_within, alike=True),
        SWAPPED("numbers of each weight changed places in its columns", weights=partial(swap_in_each, along=0)),
        ONE_OTHER("the first of two inputs is another than in the last call", laid=0),
        ONE_OTHER("the second of two inputs is another than in the last call", laid=1),
        Request("after the weights moved in memory, as .to moves them", how=How.MOVED, **MAY_REFUSE),
        Request("called again and again", how=How.REPEATED),
        Request("called by two threads at once", order=(0, 1), how=How.THREADS),
        Request("with gradients recorded", direction="forward_recorded", **MAY_REFUSE),
        Request("in inference mode", how=How.INFERENCE, **MAY_REFUSE),
        Request("in training mode", how=How.TRAIN, both_gates=True, **MAY_REFUSE),
        Request("two calls in training mode", how=How.TRAIN, order=(0, 1), both_gates=True, **MAY_REFUSE),
        Request(
            "in eval mode after two calls in training mode",
            how=How.TRAIN | How.THEN_EVAL,
            order=(1, 1, 0),
            **MAY_REFUSE,
        ),
        Request(
            "in training mode, its batch norms and dropouts in eval mode", how=How.TRAIN | How.FROZEN_NORMS, **LENIENT
        ),
        Request("called again with the same inputs", order=(0,) * 5, random=True),
        Request("called again with the same inputs in training mode", how=How.TRAIN, order=(0,) * 5, random=True),
        *[Request("in training mode, where it draws", how=How.TRAIN, random=True)] * MANY_DRAWS,
        SIGNS,
        FINITE("weights without zeros", weights=fill_zeros),
        FINITE("biases whose mean is large", weights=shift_biases),
        FINITE("biases whose mean is far below zero", weights=partial(shift_biases, by=-200.0)),
        NORMS,
        # exp(-112) is 0 in float32, exp(112) infinite.
        FINITE("every second row raised by 112", change=lambda x: x[::2].add_(shiftable(x)[::2], alpha=112.0)),
        FINITE(
            "every second column raised by 112",
            change=lambda x: x[..., ::2].add_(shiftable(x)[..., ::2], alpha=112.0),
            **LENIENT,
        ),
        LOWERED,
        FINITE("small values", change=lambda x: x.mul_(1e-3)),
        FINITE("inputs 20 times as large", change=lambda x: x.mul_(20.0), **LENIENT),
        FINITE("inputs whose root mean square is 2", change=to_size_2, **LENIENT),
        FINITE("inputs that are all equal", change=lambda x: x.masked_fill_(shiftable(x), 0.5)),
        FINITE("inputs that are all zero", change=lambda x: x.zero_()),
        INTEGERS,
        replace(INTEGERS, when="other integers and masks beside the last call's inputs", order=(0, 1), alike=True),
        FINITE("True for False, 1 for 0 and the other way round", change=other_truth, **LENIENT),
        Request("NaN in each input", change=partial(fill_two, value=nan), **LENIENT),
        Request(
            "infinities of both signs in each input", change=partial(fill_two, value=inf), any_infinite=True, **LENIENT
        ),
        *(replace(each, when=f"in training mode, {each.when}", **TRAINED) for each in (SIGNS, LOWERED)),
        FINITE("in training mode, every second weight changed", how=How.SPARING | How.TRAIN, weights=every_second),
    ],
    "forward_backward": [
        BOTH("two forward passes before two backward passes", order=(0, 1)),
        BOTH("a second backward pass of one graph", how=How.REPEATED, **MAY_REFUSE),
        BOTH("the outputs written in place before the backward pass", how=How.WRITTEN, **MAY_REFUSE),
        BOTH("the inputs written in place before the backward pass", how=How.OVERWRITTEN, **LENIENT),
        BOTH("only the parameters' gradients wanted", whose="parameters"),
        BOTH("only the inputs' gradients wanted", whose="inputs"),
        BOTH("only the last output in the loss, every second parameter frozen", how=How.IN_PART),
        BOTH("only the first output in the loss, every other parameter frozen", how=How.OTHER_PART),
        BOTH("only the last input's gradient wanted", whose="the last input's"),
        BOTH("gradients of the gradients", how=How.TWICE, **LENIENT),
        BOTH("in training mode", how=How.TRAIN, both_gates=True, **MAY_REFUSE),
        BOTH("two forward passes in training mode before two backward passes", how=How.TRAIN, order=(0, 1), **TRAINS),
        BOTH(
            "in training mode, its batch norms and dropouts in eval mode", how=How.TRAIN | How.FROZEN_NORMS, **LENIENT
        ),
        replace(SIGNS, direction="forward_backward"),
        # Where a softmax is saturated, the Model's gradient may be exactly 0, and that of a fused kernel a rounding.
        *(
            BOTH(
                f"inputs {how} by 112",
                finite=True,
                change=lambda x, by=by: x.add_(shiftable(x), alpha=by),
                may_differ=True,
                if_vanishing=True,
            )
            for how, by in (("raised", 112.0), ("lowered", -112.0))
        ),
        BOTH("inputs that are all zero", finite=True, change=lambda x: x.zero_(), **LENIENT),
        BOTH("an incoming gradient that is expanded", incoming="expanded", **MAY_REFUSE),
        BOTH("an incoming gradient that is a slice", incoming="a slice", **MAY_REFUSE),
        BOTH("an incoming gradient that is transposed", incoming="transposed", **MAY_REFUSE),
        BOTH("an incoming gradient for some of the channels", incoming="some of the channels", **MAY_REFUSE),
        replace(INTEGERS, direction="forward_backward"),
        replace(NORMS, direction="forward_backward"),
        BOTH("two instances with other weights in turns", how=How.TWIN),
        BOTH("every second weight changed since the last call", how=How.SPARING, weights=every_second),
        BOTH("the other weights changed since the last call", how=How.SPARING, weights=all_of_them),
        replace(SIGNS, when=f"in training mode, {SIGNS.when}", direction="forward_backward", **TRAINED),
        BOTH("in training mode, an incoming gradient that is transposed", incoming="transposed", **TRAINED),
        INFERRED,  # the last: what it keeps by shapes, of another module, would hide what is kept of two in turns
    ],
}


def requests_after(
    device: str, batch: int | None, direction: str, gradients: bool, many: bool = False
) -> Iterator[Request]:
    """Asked when all is timed, since it may make a compiler compile anew. Gradients: where no direction judges them.
    Many: inputs and answer are small, so that a batch of many times as many samples fits."""
    of = partial(Request, direction=direction)
    if gradients:
        yield BOTH("gradients; with --backward it is wrong", **LENIENT)
        yield BOTH("gradients in training mode; with --backward it is wrong", how=How.TRAIN, both_gates=True, **LENIENT)
        yield INFERRED
        yield BOTH("gradients that are expanded, as sum() gives them", incoming="expanded", **LENIENT)
        yield BOTH("gradients of inputs that are transposed", layout="transposed", **LENIENT)
    yield of("after it was timed")
    if direction == "forward":
        yield of("weights that load_state_dict(..., assign=True) made", how=How.ASSIGNED, **LENIENT)
        yield of("other weights, by p.data = ...", how=How.EXCHANGED, weights=all_of_them, **LENIENT)
        yield of("other weights, by p.data.copy_(...)", how=How.UNSEEN, weights=partial(perturb, seed=2), **LENIENT)
        later = partial(Request, direction="forward_recorded", weights=partial(perturb, seed=3), **LENIENT)
        yield later("in a deepcopy made after a call", how=How.COPIED)
        yield of("weights that are slices", how=How.ROWS_APART, **LENIENT)
    if device == "cuda":
        yield of("on another stream", how=How.LATE)  # it leaves a pool of streams behind, which may slow short calls
    for layout in [*LAYOUTS][2:]:
        yield of(f"inputs that are {layout}", layout=layout, **MAY_REFUSE)
    for layout in ("transposed", "channels last"):
        yield of(f"in training mode, inputs that are {layout}", how=How.TRAIN, layout=layout, **MAY_REFUSE)
    for laid, which in enumerate(("first", "second")):
        yield of(f"only the {which} of two inputs transposed", layout="transposed", laid=laid, **MAY_REFUSE)
    if direction == "forward_backward":
        yield of("an incoming gradient that is off any alignment", incoming="off any alignment", **MAY_REFUSE)
    said = "inputs and weights that are channels last"
    yield of(said, how=How.CHANNELS_LAST, layout="channels last", **MAY_REFUSE)
    if batch:
        others = [*range(2, batch), *range(batch + 2, batch + 9)]  # two of them: at least one is not asked in every run
        few = {0, batch - batch // 3} if direction == "forward" else set()
        few |= {1, 2 * batch + 1} | ({MANY * batch + 5} if many else set())
        few |= {max(1, batch - 1), min(15, 2 * batch - 1)}  # one short of what a tile of rows holds
        for other in sorted({batch + 1, *few, *secret.sample(others, 2)} - {batch}):
            # Batch 0 has no numbers that could be wrong, only other forms. What is no number, as a mean of no targets,
            # has no gradient that is right alone.
            finite = direction == "forward_backward"
            yield of(f"batch {other}", batch=other, may_refuse=True, may_differ=other == 0, finite=finite)
        said = f"in training mode, batch {batch + 1}"
        yield of(said, how=How.TRAIN, batch=batch + 1, both_gates=True, **MAY_REFUSE)
        for other in (2 * batch + 1, *[MANY * batch + 5] * many):
            yield of(f"in training mode, batch {other}", batch=other, **TRAINED)
        if gradients:
            yield BOTH(f"gradients, batch {2 * batch + 1}", batch=2 * batch + 1, finite=True, **LENIENT)
    if device == "cuda" and direction == "forward":  # the last, since one that fails may leave the GPU's context unfit
        yield of("captured in a CUDA graph", how=How.CAPTURED, **LENIENT)
