"""The two gates an answer must pass, and the figures they are about.

Gate 1: close to the Model in the run's dtype, or to the Model in float64 (and no NaN elsewhere). With inputs or weights
of a request's making, or where the Model itself misses that in a few elements, no more than 16 times as far off as the
Model. Gate 2: against the Model in float64, the largest and the root-mean-square error are at most twice the Model's
own; in both gates 16 times where all that the Model has is rounding, as the gradient of a bias before a norm. A
tolerance alone passes kernels that lost half the digits; an error ratio alone has no meaning in float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ERROR_RATIO = 2.0
# Of gate 1, where the Model itself is far off: with odd inputs PyTorch's attention errs 9 times as much as one that is
# written out. At the task's own inputs gate 2 is asked, too.
ODD_RATIO = 16.0
ULPS = 4  # of the output's scale that gate 2 allows in any case: sums in another order, another library's tanh
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 17}  # elements compared at a time
LEAST_VALUES = 1000  # of what is drawn at random: of fewer nothing is said
ENOUGH_VALUES = 1 << 21  # no more answers are gathered
FEW_ROWS, MANY_ROWS_SHARE = 16, 0.6  # seen from few rows, a standard error may itself be far off
# By so many the mean of what is drawn at random may differ from that of the Model's; from so many answers on, whose
# means tell the error well, by so many.
STANDARD_ERRORS, MANY_ANSWERS, STANDARD_ERRORS_OF_MANY = 10.0, 64, 6.0

# Gate 1, as both rtol and atol. Under `high` two different roundings to TF32 meet. The half types are loose because the
# Model rounds after each of its operations and the norm behind them enlarges that: 0.15 was seen between a bfloat16
# Model and the exact result. There gate 2 is the sharp one.
HIGHEST = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}
TOLERANCE = {"highest": HIGHEST, "high": HIGHEST | {torch.float32: 5e-3}}


@dataclass
class Errors:
    """Errors of one output or gradient; `+` pools those of several answers.

    `most`: the largest |new - exact|, |eager - exact|, |exact|, and |new - eager| beyond gate 1. `squares`: their sums
    of squares.
    """

    most: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    count: int = 0  # of elements
    far: int = 0  # beyond gate 1
    worst: int = 0  # the index of the one that is farthest from the Model's
    example: str = ""  # the one that is farthest from the exact result: where, and what both are

    def __add__(self, other: Errors) -> Errors:
        most, squares = torch.maximum(self.most, other.most), self.squares + other.squares
        worst = other.worst if other.most[3] > self.most[3] else self.worst
        example = other.example if other.most[0] > self.most[0] else self.example
        return Errors(most, squares, self.count + other.count, self.far + other.far, worst, example)

    def figures(self) -> dict[str, list[float]]:
        """Of the candidate, of eager and of the exact result itself."""
        return {"max": self.most[:3].tolist(), "rms": (self.squares[:3] / max(1, self.count)).sqrt().tolist()}

    def or_as_far(self, other: Errors) -> None:
        """The Model's error is that of another answer of its own, `other`, where that is larger."""
        for mine, theirs in ((self.most, other.most), (self.squares, other.squares)):
            mine[1] = torch.maximum(mine[1], theirs[0])

    def cancels(self) -> bool:
        """No digit of the Model's is right, as where the terms of a sum cancel."""
        return bool(self.squares[1] > self.squares[2])

    def over_limit(self, eps: float, ratio: float = ERROR_RATIO) -> Iterator[str]:
        """Gate 2. A few ulps at the output's scale are allowed: where the Model is exact, rounding is no error."""
        for kind, (new, eager, scale) in self.figures().items():
            times = ODD_RATIO if self.cancels() else ratio
            limit = max(times * eager, ULPS * eps * scale)
            if not new <= limit:
                place = f" ({self.example})" if kind == "max" and self.example else ""
                allowed = f"the limit is {limit:.2e} (eager's is {eager:.2e})"
                yield f"{kind} error against float64 {new:.2e}{place}, {allowed}"


def compare(new: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, tolerance: float, scale=1.0) -> Errors:
    """Gate 1, |new - eager| <= tolerance * (scale + |eager|), and the figures of gate 2, a chunk at a time.

    Without the exact result the Model stands in for it.
    """
    total, farthest = Errors(), 0
    for chunk in chunks(new, eager, eager if exact is None else exact):
        n, e, r = (x.double() for x in chunk)
        apart, of_new, of_eager = distance(n, e), distance(n, r), distance(e, r)
        overflows = of_eager == inf  # there the Model's error says nothing of what others may have
        if overflows.any():
            of_new, of_eager = (x.masked_fill(overflows, 0.0) for x in (of_new, of_eager))
        far = apart > size(e).add_(scale).mul_(tolerance) if tolerance else chunk[0] != chunk[1]
        beyond = apart.mul_(far)
        errors = [of_new, of_eager, size(r), beyond]
        most = torch.stack([x.amax() for x in errors]).cpu()
        squares = torch.stack([torch.dot(x, x) for x in errors]).cpu()
        if most[0] > total.most[0]:
            farthest = total.count + int(of_new.argmax())
        total += Errors(most, squares, len(n), int(far.sum()), total.count + int(beyond.argmax()))
    if exact is not None and total.most[0]:
        place, mine, right = values_at(farthest, new, exact)
        total.example = f"at {place} it is {mine:.6g}, in float64 {right:.6g}"
    return total


def values_at(index: int, *tensors: torch.Tensor) -> list:
    """An index of `compare` as a place in the tensors, and the value of each there."""
    at = index // 2 if tensors[0].is_complex() else index
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), tensors[0].shape)]
    return [place, *(as_numbers(x).reshape(-1)[at].item() for x in tensors)]


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same elements of each at a time, of complex numbers the parts."""
    given = map(as_numbers, tensors)
    flat = [(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1) for x in given]
    return zip(*(x.split(CHUNK[x.device.type]) for x in flat if x.numel()))


def as_numbers(x: torch.Tensor) -> torch.Tensor:
    """float8 knows no arithmetic on a CPU, and truth values know none at all."""
    x = x.detach().byte() if x.dtype == torch.bool else x.detach()
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def are_close(new: torch.Tensor, right: torch.Tensor, tolerance: float, scale: float) -> bool:
    """Gate 1 alone: faster than `compare`, and a chunk at a time, too."""
    pairs = zip(*(as_numbers(x).reshape(-1).split(CHUNK[new.device.type]) for x in (new, right)), strict=True)
    return all(close(n.to(r.dtype), r, tolerance, tolerance * scale) for n, r in pairs)


def close(new: torch.Tensor, right: torch.Tensor, relative: float, absolute: float) -> bool:
    """torch.allclose, which knows infinities and NaN, and takes twice as long where there are none."""
    if relative and right.numel():
        apart = (new - right).abs()
        if apart.amax() < inf and bool((apart <= right.abs().mul_(relative).add_(absolute)).all()):
            return True
    return torch.allclose(new, right, relative, absolute, equal_nan=True)


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    apart = (left - right).abs_()
    if not apart.numel() or apart.amax() < inf:
        return apart
    same = (left == right) | (left.isnan() & right.isnan())
    return apart.masked_fill_(same, 0.0).nan_to_num_(inf, inf)


def size(x: torch.Tensor) -> torch.Tensor:
    """|x|, and 0 where that is no number."""
    return x.abs().nan_to_num_(0.0, 0.0)


def scale_of(name: str, x: torch.Tensor) -> float:
    """A gradient is a sum over a batch: where it is large, errors count relative to its size."""
    if not name.startswith("gradient"):
        return 1.0
    norm = torch.linalg.vector_norm(as_numbers(x).nan_to_num(0.0, 0.0, 0.0).abs(), dtype=torch.float64).item()
    return max(1.0, norm / max(1, x.numel()) ** 0.5)


def unlike(name: str, drawn: list[tuple[torch.Tensor, ...]]) -> list[str]:
    """Of what is drawn at random the values are luck; their mean, their size and the share of zeros are not, nor how
    far they are from the Model's (of integers, how often the same): as the Model's are when it draws again.

    `drawn`: of several answers the candidate's and two of the Model's, from three seeds. The values of a row may depend
    on each other, as where whole channels are dropped, so a mean's standard error is also seen from row to row.
    """
    of_values = {
        "mean": lambda x: x,
        "mean square": torch.square,
        "share of zeros": lambda x: x == 0,
        "share of finite numbers": torch.isfinite,
    }
    of_steps = {
        "mean square distance from the Model's": torch.square,
        "mean fourth power of the distance": lambda x: x.square().square(),
        "share within 0.5 of the Model's": lambda x: x.abs() < 0.5,
    }
    for dim in range(drawn[0][0].dim()):
        of_values[f"share of zeros beside a zero along dimension {dim}"] = lambda x, dim=dim: beside(dim, x == 0)
        of_steps[f"product of neighbours' distances along dimension {dim}"] = partial(beside, dim)
    values = [(new, eager) for new, eager, _ in drawn]
    steps = [(new - eager, other - eager) for new, eager, other in drawn]
    figures = [(what, figure, values) for what, figure in of_values.items()]
    figures += [(what, figure, steps) for what, figure in of_steps.items()]
    said = []
    errors_allowed = STANDARD_ERRORS if len(drawn) < MANY_ANSWERS else STANDARD_ERRORS_OF_MANY
    for what, figure, pairs in figures:
        (mine, error), (theirs, other_error) = (mean_of([figure(x).double() for x in each]) for each in zip(*pairs))
        spread = errors_allowed * (error**2 + other_error**2) ** 0.5
        if not abs(mine - theirs) <= spread + 1e-6 * abs(theirs):
            said.append(f"{name}: the {what} is {mine:.4g}, that of the Model's {theirs:.4g}")
    return said


def unlike_repeated(name: str, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[str]:
    """Answers drawn at random for the same inputs one after the other differ, if the Model's do each time: by a mean
    square distance like the Model's. The nearer its four distances are to each other, the nearer this one is to them:
    within a factor of 1.5, where they are equal, and of 4, where the largest is 1.4 times the least or more."""
    steps = [[mean_square(a, b) for a, b in zip(each, each[1:])] for each in (mine, theirs)]
    (least, most), average = (min(steps[1]), max(steps[1])), statistics.fmean(steps[1])
    if not 0 < most <= 4 * least:
        return []
    factor = min(4.0, 1.5 * (most / least) ** 3)
    if average / factor <= statistics.fmean(steps[0]) <= factor * average:
        return []
    said = f"{name}: from one call to the next the mean square distance is {statistics.fmean(steps[0]):.4g}"
    return [f"{said}, that of the Model's {average:.4g}"]


def mean_square(left: torch.Tensor, right: torch.Tensor) -> float:
    if not left.is_floating_point():
        return float((left != right).double().mean())
    return float((left.double() - right.double()).square().nan_to_num(0.0, 0.0, 0.0).mean())


def beside(dim: int, x: torch.Tensor) -> torch.Tensor:
    """The products of neighbours."""
    return x.narrow(dim, 0, x.shape[dim] - 1) * x.narrow(dim, 1, x.shape[dim] - 1)


def mean_of(answers: list[torch.Tensor]) -> tuple[float, float]:
    """The mean of the finite values, and its standard error: of single values, of rows or of answers, the largest. No
    mean, and any error, where there are too few values."""
    answers = [x.masked_fill(~x.isfinite(), math.nan).reshape(len(x), -1) for x in answers if x.numel()]
    values = torch.cat([x.flatten() for x in answers]) if answers else torch.empty(0)
    values = values[~values.isnan()]
    if len(values) < LEAST_VALUES:
        return 0.0, inf
    error = (values.var() / len(values)).sqrt()
    rows = torch.cat([x.nanmean(1) for x in answers])
    rows = rows[~rows.isnan()]
    if len(rows) > 1 and answers[0].shape[1] > 1:
        share = 1.0 if len(rows) < FEW_ROWS else MANY_ROWS_SHARE
        error = torch.maximum(error, share * (rows.var() / len(rows)).sqrt())
    if len(answers) >= FEW_ROWS:  # what is drawn once for all rows
        error = torch.maximum(error, (torch.stack([x.nanmean() for x in answers]).var() / len(answers)).sqrt())
    return float(values.mean()), float(error)


class Coarsest(TorchDispatchMode):
    """Notes the largest eps of what operations give, and whether one of them is a fused attention."""

    eps, attends = 0.0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.attends |= "attention" in str(func)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return result


class WrittenOut(TorchFunctionMode):
    """softmax, log_softmax and logsumexp by their formulas."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name not in ("softmax", "log_softmax", "logsumexp") or kwargs.get("dtype"):
            return func(*args, **kwargs)
        x, dim = args[0], kwargs["dim"] if "dim" in kwargs else args[1]
        most = x.amax(dim, keepdim=True)
        powers = (x - most).exp()
        total = powers.sum(dim, keepdim=True)
        if name == "softmax":
            return powers / total
        if name == "log_softmax":
            return x - most - total.log()
        keeps = kwargs.get("keepdim", args[2:] == (True,))
        return most + total.log() if keeps else (most + total.log()).squeeze(dim)


class InFloat64(TorchFunctionMode):
    """float64 where the Model itself asks for float32, or for nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def in_float64(model: torch.nn.Module, *inputs):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            return model(*inputs)
    finally:
        torch.set_default_dtype(usual)


# Operations that choose among equal values, and the place of `dim` among their positional arguments.
PLACE_OF_DIM = {"topk": 2, "kthvalue": 2, "sort": 1, "argsort": 1, "median": 1, "mode": 1}
PLACE_OF_DIM |= {"max": 1, "min": 1, "argmax": 1, "argmin": 1}
OF_ALL = ("max", "min", "median", "argmax", "argmin")  # without `dim` they look at the whole tensor
KINKS = {"relu": inf, "relu_": inf, "relu6": 6, "hardtanh": 1}  # the upper bounds
POOLED = {f"max_pool{n}d_with_indices": n for n in (1, 2, 3)}  # by the dimensions that their places count through


class OtherTies(TorchFunctionMode):
    """Of equal values it chooses others than PyTorch, which promises no order: in the first attempt those that a
    candidate's answer names, `theirs`, where they are equal; in the second the last for the first; then at random."""

    def __init__(self, attempt: int, theirs: list[torch.Tensor]):
        super().__init__()
        self.attempt, self.theirs = attempt, theirs
        self.found = False  # whether there are equal values where something is chosen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in KINKS and args:
            return self._kinked(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.attempt == 0 and name in POOLED | {"cummax": 0, "cummin": 0}:
            return self._named(result, args[0], POOLED.get(name, 0), kwargs.get("dim", args[1] if args[1:] else -1))
        place = PLACE_OF_DIM.get(name)
        if place is None or not args or kwargs.get("stable") or not isinstance(args[0], torch.Tensor):
            return result
        x, dim = args[0], kwargs.get("dim", args[place] if len(args) > place else None if name in OF_ALL else -1)
        if dim is None and name in ("argmax", "argmin"):
            x, dim = x.reshape(-1), 0
        if not isinstance(dim, int) or not x.dim():
            return result
        index = result if isinstance(result, torch.Tensor) else result[1]
        shape = list(x.shape)
        shape[dim] = -1
        unsorted = name == "topk" and not kwargs.get("sorted", args[4] if len(args) > 4 else True)
        places = self._choose(x, index.reshape(shape), dim, unsorted)
        if isinstance(result, torch.Tensor):
            return places.reshape(index.shape)
        return type(result)((x.gather(dim, places).reshape(index.shape), places.reshape(index.shape)))

    def _kinked(self, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
        """Where a value lies on a bound, as those of a channel that is 0, PyTorch's clamp has the slope 1, its ReLU
        and hardtanh have 0."""
        x, low, high = args[0], kwargs.get("min_val", 0), kwargs.get("max_val", KINKS[func.__name__])
        self.found |= bool(((x == low) | (x == high)).any())
        in_place = kwargs.get("inplace") or func.__name__ == "relu_"
        other = torch.clamp_ if in_place else torch.clamp
        return other(x, low, high) if self.attempt == 1 else func(*args, **kwargs)

    def _named(self, result, x: torch.Tensor, pooled: int, dim: int):
        """The places that the candidate's answer names, if the same values lie there."""
        values, index = result
        flat = (lambda t: t.flatten(-pooled)) if pooled else lambda t: t
        dim = -1 if pooled else dim
        for other in (x.reshape(index.shape) for x in self.theirs if x.numel() == index.numel()):
            if other.numel() and 0 <= other.min() and other.max() < flat(x).shape[dim]:
                if equal(flat(x).gather(dim, flat(other)), flat(values)).all():
                    self.found = True
                    return type(result)((values, other)) if type(result) is not tuple else (values, other)
        return result

    def _choose(self, x: torch.Tensor, places: torch.Tensor, dim: int, unsorted: bool) -> torch.Tensor:
        """Other places of the same values, which `unsorted` may stand in any order."""
        n, (ordered, order) = x.shape[dim], x.sort(dim=dim, stable=True)
        self.found |= unsorted or bool(equal(ordered.narrow(dim, 0, n - 1), ordered.narrow(dim, 1, n - 1)).any())
        if self.attempt == 0:
            for other in (x.reshape(places.shape) for x in self.theirs if x.numel() == places.numel()):
                within = bool(((other >= 0) & (other < n)).all())
                pairs = [x.gather(dim, each) for each in (other, places)] if within else []
                pairs = [each.sort(dim).values for each in pairs] if unsorted else pairs
                holds = within and bool(equal(*pairs).all())
                if holds and (other.sort(dim).values.diff(dim=dim) > 0).all():
                    return other
            return places
        generator = torch.Generator(x.device).manual_seed(self.attempt)
        mixed = torch.rand(x.shape, generator=generator, device=x.device).argsort(dim)
        if self.attempt == 1:
            mixed = torch.arange(n, device=x.device).flip(0).expand(x.movedim(dim, -1).shape).movedim(-1, dim)
        # Places in two orders of their values: where the two differ, the values are equal.
        other = mixed.gather(dim, x.gather(dim, mixed).sort(dim=dim, stable=True).indices)
        return torch.empty_like(order).scatter_(dim, order, other).gather(dim, places)


def equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where values are the same; NaN is the same as NaN."""
    return (left == right) | (left.isnan() & right.isnan())
