"""How fast could it be? The work of a pair, what the machine can do, and the floor the two set.

Bytes: every input, parameter and buffer read once, every output written once. With the backward pass: inputs, parameters and the
incoming gradients are read once more, and a gradient is written for each floating input and each parameter.
FLOPs: PyTorch's own FlopCounterMode over the Model, on the meta device: no memory, no time, so any pair has a floor at any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from judge.machine import DTYPE_NAMES, free_memory, precision
from judge.pairs import Problem
from judge.timing import Stopwatch

GIB = 1 << 30

# By default a CPU run takes the largest batch whose floor stays under this: the pair's own cost, not a long wait.
CPU_FLOOR_MS = 40.0

# Strict float32 on tensor cores takes at least three half-precision products (hi*hi + hi*lo + lo*hi of operands split in two): the
# fewest known to keep float32's accuracy. Where TF32 is allowed, one is enough.
PRODUCTS_PER_FLOAT32 = {"highest": 3, "high": 1}


MATRIX_SIDES = {"cuda": (4096, 8192), "cpu": (256, 512, 1024, 2048)}
LONG_PRODUCT_SECONDS = 0.05


@dataclass(frozen=True)
class Work:
    bytes: int
    flops: int
    input_bytes: int
    state_bytes: int
    output_bytes: int
    largest_bytes: int  # the largest tensor any one operation of the Model makes
    produced_bytes: int  # all tensors its operations make: what autograd may keep


class _Ledger(TorchDispatchMode):
    """Adds up what operations allocate; views and in-place results are not new memory."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not any(returned.alias_info is not None for returned in func._schema.returns):
            for size in map(nbytes, _tensors(result)):
                self.largest = max(self.largest, size)
                self.total += size
        return result


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def count_work(problem: Problem, batch: int | None, dtype: torch.dtype, backward: bool) -> Work:
    with torch.device("meta"):
        model = problem.make(problem.model_class, seed=0)
    model = model.to(dtype)
    inputs = problem.inputs(batch, "meta", dtype, seed=0)
    state = [*model.parameters(), *model.buffers()]
    differentiable = [x.requires_grad_() for x in _tensors(inputs) if x.is_floating_point()] if backward else []

    with FlopCounterMode(display=False) as counter, _Ledger() as ledger, torch.set_grad_enabled(backward):
        outputs = _tensors(model(*inputs))
        if backward:
            # Not autograd.grad: FlopCounterMode cannot follow it to leaf tensors.
            roots = [out for out in outputs if out.requires_grad]
            torch.autograd.backward(roots, [torch.empty_like(out) for out in roots])

    read = sum(map(nbytes, _tensors(inputs)))
    held = sum(map(nbytes, state))
    written = sum(map(nbytes, outputs))
    moved = read + held + written
    if backward:
        moved += read + held + written + sum(map(nbytes, [*differentiable, *model.parameters()]))
    return Work(moved, counter.get_total_flops(), read, held, written, ledger.largest, ledger.total)


def memory_needed(work: Work, dtype: torch.dtype, backward: bool) -> int:
    """Bytes that judging one pair takes at the widest of four points, by the tensors alive there: 1.4 to 2.4 times what was seen.

    Always: inputs twice (a copy to hold them against, or a second set), state four times (Model's, ModelNew's, copies). An answer is the
    outputs and, with the backward pass, a gradient for each input and parameter; that pass also needs what the Model made on its way,
    incoming gradients, and room to work. The points: the float64 reference at work; its answer and three others being compared; four
    answers while calls are repeated; new inputs drawn between timed calls. A tenth on top, and a GiB for what libraries, comparing and the
    flush buffer take.
    """
    widening = 8 / torch.empty((), dtype=dtype).element_size()
    answer, making = work.output_bytes, 0
    working = min(3 * work.largest_bytes, work.produced_bytes)
    if backward:
        answer += work.input_bytes + work.state_bytes
        making = work.output_bytes + work.produced_bytes
        working = making + answer
    reference = widening * (work.input_bytes + work.state_bytes + working)
    comparing = widening * answer + 3 * answer + making
    repeating = 4 * answer + making
    timing = work.input_bytes + working + answer
    need = 2 * work.input_bytes + 4 * work.state_bytes + max(reference, comparing, repeating, timing)
    return int(1.1 * need) + GIB


class Ceilings:
    """What this machine reached in this run: copy bandwidth (bytes/s, read + written) and matrix rates (FLOP/s, by dtype)."""

    def __init__(self, device: str, dtypes: list[torch.dtype]):
        self.device = device
        self.dtypes = dtypes
        self.copy_bandwidth = 0.0
        self.matrix_rate: dict[str, float] = {}

    def measure(self) -> None:
        """Measures, and keeps the better of this time and any time before."""
        self.copy_bandwidth = max(self.copy_bandwidth, _copy_bandwidth(self.device))
        products = {product for dtype in self.dtypes for product in _products_of(self.device, dtype)}
        for dtype in sorted(products, key=str):
            name = DTYPE_NAMES[dtype]
            self.matrix_rate[name] = max(self.matrix_rate.get(name, 0.0), _matrix_rate(self.device, dtype))

    def floor_ms(self, moved: int, flops: int, dtype: torch.dtype, level: str) -> float:
        return 1e3 * max(moved / self.copy_bandwidth, flops / self.flop_rate(dtype, level))

    def flop_rate(self, dtype: torch.dtype, level: str) -> float:
        """FLOP/s of the best known way to multiply in this dtype at this precision."""
        rates = []
        for product in _products_of(self.device, dtype):
            split = self.device == "cuda" and dtype == torch.float32 and product == torch.float16
            rates.append(self.matrix_rate[DTYPE_NAMES[product]] / (PRODUCTS_PER_FLOAT32[level] if split else 1))
        return max(rates)


def _products_of(device: str, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The products a multiplication in this dtype may be made of; the fastest sets the ceiling.

    On CUDA a float32 one is a plain float32 product or several float16 ones on tensor cores. A CPU without half-precision units
    does best to convert and multiply in float32.
    """
    if device == "cuda":
        return (torch.float32, torch.float16) if dtype == torch.float32 else (dtype,)
    return (dtype, torch.float32) if dtype in (torch.float16, torch.bfloat16) else (dtype,)


def _best_seconds(device: str, call, repeats: int) -> float:
    stopwatch = Stopwatch(device)
    return min(stopwatch(call) for _ in range(repeats)) / 1e3


def _copy_bandwidth(device: str) -> float:
    size = 4 * GIB if device == "cuda" else GIB // 4
    size = int(min(size, free_memory(device) // 8))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(device, lambda: target.copy_(source), repeats=10)


def _matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Square products of growing size; they stop growing where one takes long, as float16 does on a CPU without the units for it."""
    best = 0.0
    for side in MATRIX_SIDES[device]:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        with precision("highest"):
            seconds = _best_seconds(
                device, lambda left=left, right=right, out=out: torch.mm(left, right, out=out), repeats=5
            )
        best = max(best, 2 * side**3 / seconds)
        if seconds > LONG_PRODUCT_SECONDS:
            break
    return best


class DoesNotFit(Exception):
    """The batch asked for takes more memory than there is. Its text names one that fits."""


@dataclass(frozen=True)
class Load:
    """Everything one run asks of a pair: the combinations it will be judged in, and where."""

    device: str
    dtypes: list[torch.dtype]
    precisions: list[str]
    backward: bool


def choose_batch(problem: Problem, asked: int | None, load: Load, ceilings: Ceilings) -> int | None:
    """The batch to run at: the one asked for, or the largest sensible one. Raises DoesNotFit before anything is allocated.

    Unasked, a GPU takes the benchmark batch if it fits in free memory. A CPU takes the benchmark batch or the largest power of two below it
    that fits and whose floor is under CPU_FLOOR_MS. None stands for a file whose batch cannot be adjusted.
    """
    free = free_memory(load.device)

    def need(batch):
        return max(
            memory_needed(count_work(problem, batch, dtype, backward), dtype, backward)
            for dtype in load.dtypes
            for backward in {False, load.backward}
        )

    def quick(batch):
        if load.device == "cuda":
            return True
        works = [(dtype, count_work(problem, batch, dtype, load.backward)) for dtype in load.dtypes]
        floors = [
            ceilings.floor_ms(work.bytes, work.flops, dtype, level)
            for dtype, work in works
            for level in load.precisions
        ]
        return max(floors) < CPU_FLOOR_MS

    def too_large(batch, fitting):
        what = "its inputs" if batch is None else f"batch {batch}"
        hint = f"; --batch {fitting} would fit" if fitting else ""
        return DoesNotFit(
            f"{problem.path.stem}: {what} would take about {need(batch) / GIB:.1f} GiB, {free / GIB:.1f} GiB are free{hint}"
        )

    wanted = asked or problem.benchmark_batch
    if wanted is None or asked:
        if need(wanted) > free:
            raise too_large(wanted, None if wanted is None else _largest(lambda batch: need(batch) <= free, wanted))
        return wanted
    sizes = [wanted] + [1 << bit for bit in reversed(range(wanted.bit_length())) if 1 << bit < wanted]
    fitting = [batch for batch in sizes if need(batch) <= free]
    if not fitting:
        raise too_large(sizes[-1], None)
    return next((batch for batch in fitting if quick(batch)), fitting[-1])


def _largest(fits, above: int) -> int:
    """The largest batch under `above` that fits, by bisection; 0 if none does."""
    low, high = 0, above
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
