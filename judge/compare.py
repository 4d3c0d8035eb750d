"""How far two answers are apart: gate 1 and gate 2, bits, and form.

Gate 1: allclose with the Model in the run's dtype, within TOLERANCE.
Gate 2: against the Model run in float64, ModelNew's largest and root-mean-square error are at most ERROR_RATIO times the Model's own.
A loose tolerance alone passes kernels that lost half the digits; an error ratio alone has no meaning in float64. Both are hard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ERROR_RATIO = 2.0
APART_RATIO = 16.0  # honest ones have been seen 6 of the Model's errors apart from it, in gradients of 64 values
CHUNK = {
    "cuda": 1 << 22,
    "cpu": 1 << 15,
}  # elements compared at a time: few launches on a GPU, a core's own cache on a CPU

# Gate 1, used as both rtol and atol. Under `high` two different roundings to TF32 meet. The half types are loose because the Model
# rounds after each of its operations and the norm behind them enlarges that: 0.15 was seen between a bfloat16 Model and the exact result.
# There gate 2 is the sharp one.
TOLERANCE = {
    torch.float64: {"highest": 1e-10, "high": 1e-10},
    torch.float32: {"highest": 1e-4, "high": 5e-3},
    torch.float16: {"highest": 4e-2, "high": 4e-2},
    torch.bfloat16: {"highest": 3e-1, "high": 3e-1},
}


@dataclass
class Errors:
    """Errors of one output or gradient against float64, pooled over the seeds."""

    new_max: float = 0.0
    new_squares: float = 0.0
    eager_max: float = 0.0
    eager_squares: float = 0.0
    reference_max: float = 0.0
    reference_squares: float = 0.0
    count: int = 0

    def add(self, whose: str, magnitudes: torch.Tensor) -> None:
        setattr(self, f"{whose}_max", max(getattr(self, f"{whose}_max"), magnitudes.max().item()))
        setattr(
            self,
            f"{whose}_squares",
            getattr(self, f"{whose}_squares") + torch.linalg.vector_norm(magnitudes).item() ** 2,
        )

    def rms(self, squares: float) -> float:
        return (squares / self.count) ** 0.5 if self.count else 0.0

    def as_dict(self, dtype: torch.dtype) -> dict[str, float | None]:
        """For the record. In float64 nothing is higher: what is known is the distance to the Model, and nothing of its own error."""
        known = dtype != torch.float64
        return {
            "new_max": self.new_max,
            "new_rms": self.rms(self.new_squares),
            "eager_max": self.eager_max if known else None,
            "eager_rms": self.rms(self.eager_squares) if known else None,
        }

    def over_limit(self, dtype: torch.dtype) -> list[str]:
        """Gate 2. Half an ulp at the output's scale is always allowed: where the Model is exact, rounding the result is not an error."""
        half_ulp = torch.finfo(dtype).eps / 2
        complaints = []
        for kind, new, eager, scale in (
            ("largest", self.new_max, self.eager_max, self.reference_max),
            ("rms", self.rms(self.new_squares), self.rms(self.eager_squares), self.rms(self.reference_squares)),
        ):
            limit = max(ERROR_RATIO * eager, half_ulp * scale)
            if not new <= limit:
                complaints.append(
                    f"{kind} error against float64 {new:.2e}, the limit is {limit:.2e} (eager's is {eager:.2e})"
                )
        return complaints

    def are_beyond(self, known: Errors, dtype: torch.dtype) -> bool:
        """Whether distances from the Model, pooled here, are above what its own known errors explain by more than luck on few values does."""
        half_ulp = torch.finfo(dtype).eps / 2
        figures = (
            (self.new_max, known.eager_max, known.reference_max),
            (self.rms(self.new_squares), known.rms(known.eager_squares), known.rms(known.reference_squares)),
        )
        return any(apart > APART_RATIO * max(eager, half_ulp * scale) for apart, eager, scale in figures)


@dataclass
class Difference:
    """How far one tensor of the candidate is from the Model's."""

    wrong: int = 0
    largest: float = 0.0
    nan_disagrees: int = 0


def compare(
    new: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor | None,
    tolerance: float,
    scale: float,
    errors: Errors,
) -> Difference:
    """Gate 1, |new - eager| <= tolerance * (scale + |eager|), and the sums of gate 2, in chunks.

    Without a reference what is pooled is the distance to the Model.
    """
    found = Difference()
    flat = [t.reshape(-1) for t in ((new, eager) if reference is None else (new, eager, reference))]
    size = CHUNK[new.device.type]
    for start in range(0, new.numel(), size):
        n, e, *rest = (t[start : start + size].double() for t in flat)
        distance = _distance(n, e)
        largest = distance.max().item()
        found.largest = max(found.largest, largest)
        if largest > tolerance * scale:
            found.wrong += int((distance > tolerance * (scale + _finite(e.abs()))).sum())
            found.nan_disagrees += int((n.isnan() != e.isnan()).sum())
        if rest:
            eager_distance, distance = _distance(e, rest[0]), _distance(n, rest[0])
            if (
                not eager_distance.max().isfinite()
            ):  # where the Model overflows, its error says nothing of what others may have
                distance.masked_fill_(eager_distance.isinf(), 0.0)
                eager_distance.masked_fill_(eager_distance.isinf(), 0.0)
            errors.add("eager", eager_distance)
            errors.add("reference", _finite(rest[0].abs()))
        errors.add("new", distance)
        errors.count += n.numel()
    return found


def _distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    distance = (left - right).abs_()
    if not distance.max().isfinite():
        distance.masked_fill_((left == right) | (left.isnan() & right.isnan()), 0.0)
        distance.nan_to_num_(float("inf"), float("inf"))
    return distance


def _finite(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes if magnitudes.max().isfinite() else magnitudes.nan_to_num(0.0, 0.0)


def same_form(name: str, new, eager, strides: bool = True) -> str | None:
    """Type, dtype, shape, device and stride as the Model's; strides of dimensions of one element mean nothing."""
    if type(new) is not type(eager):
        return f"{name} is a {type(new).__name__}, the Model's is a {type(eager).__name__}"
    if not isinstance(eager, torch.Tensor):
        return None if new == eager or (new != new and eager != eager) else f"{name} is {new}, the Model's is {eager}"
    for what in ("dtype", "shape", "device", "layout"):
        mine, theirs = getattr(new, what), getattr(eager, what)
        if mine != theirs:
            shown = (tuple(mine), tuple(theirs)) if what == "shape" else (mine, theirs)
            return f"{name} has {what} {shown[0]}, the Model's {shown[1]}"
    apart = [n != e for n, e, size in zip(new.stride(), eager.stride(), eager.shape) if size > 1]
    if strides and eager.numel() and any(apart):
        return f"{name} has stride {new.stride()}, the Model's {eager.stride()}"
    return None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point():
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        left, right = left.view(bits), right.view(bits)
    return torch.equal(left, right)


def first_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str | None:
    return next((name for name in before if not same_bits(before[name], after[name])), None)


def is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())
