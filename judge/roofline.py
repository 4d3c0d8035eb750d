"""How fast could it be? The work of a pair, what the machine can do, and the floor the two set.

Bytes: every input, parameter and buffer read once, every output written once. With the backward pass all of these count
twice, the incoming gradients in the outputs' place, and a gradient is written for each floating input and each
parameter. FLOPs: PyTorch's own FlopCounterMode over the Model, on the meta device: no memory, no time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from judge.answers import bytes_of, roots_of, tensors_of
from judge.source import DTYPES, Problem, cast, set_precision

COPIED_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}
# A time is rejected if the floor is more than this many times as long. A copy on a CPU also reads what it overwrites.
IMPOSSIBLE = {"cuda": 1.1, "cpu": 1.1 * 1.5}


def count_work(problem: Problem, batch: int | None, dtype: torch.dtype, backward: bool) -> tuple[int, int]:
    """Bytes and FLOPs."""
    with torch.device("meta"):
        model = cast(problem.model(seed=0), dtype)
    inputs = problem.inputs(batch, "meta", dtype, seed=0)
    floating = [x for x in tensors_of(inputs) if x.is_floating_point()]
    for x in floating:
        x.requires_grad_(backward)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = model(*inputs)
        if roots := roots_of(outputs):  # not autograd.grad: FlopCounterMode cannot follow it to leaf tensors
            torch.autograd.backward(roots, [torch.empty_like(out) for out in roots])
    parameters = [*model.parameters()]
    moved = bytes_of([inputs, parameters, [*model.buffers()], outputs])
    return 2 * moved + bytes_of([floating, parameters]) if backward else moved, counter.get_total_flops()


class Ceilings:
    """What this machine reached in this run: bytes/s copied, read + written, and matrix FLOP/s by dtype."""

    def __init__(self, device: str, dtypes: tuple[str, ...]):
        self.device, self.copy_bandwidth = device, 0.0
        self.matrix_rate = dict.fromkeys([*dtypes, "float16" if device == "cuda" else "float32"], 0.0)

    def measure(self) -> None:
        """Measures, and keeps the better of this time and any time before. Products are strict, whatever is judged."""
        level = torch.get_float32_matmul_precision()
        set_precision("highest")
        nbytes = COPIED_BYTES[self.device]
        if self.device == "cuda":
            nbytes = min(nbytes, torch.cuda.mem_get_info()[0] // 4)  # of what is free
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self._least_seconds(lambda: target.copy_(source))
        self.copy_bandwidth = max(self.copy_bandwidth, 2 * len(source) / seconds)
        side = MATRIX_SIDE[self.device]
        for name, before in self.matrix_rate.items():
            left, right = (torch.randn(side, side, device=self.device).to(DTYPES[name]) for _ in range(2))
            seconds = self._least_seconds(lambda: torch.mm(left, right))
            self.matrix_rate[name] = max(before, 2 * side**3 / seconds)
        set_precision(level)

    def floor_ms(self, nbytes: int, flops: int, dtype: str, level: str) -> float:
        return 1e3 * max(nbytes / self.copy_bandwidth, flops / self.flop_rate(dtype, level))

    def flop_rate(self, dtype: str, level: str) -> float:
        """FLOP/s of the best known way to multiply in this dtype at this precision."""
        rates = self.matrix_rate
        # Strict float32 takes tensor cores at least three half-precision products, of operands split in two: hi * hi +
        # hi * lo + lo * hi; one is enough for TF32. A CPU without half-precision units does best in float32.
        if self.device == "cuda" and dtype == "float32":
            return max(rates["float32"], rates["float16"] / (3 if level == "highest" else 1))
        if self.device == "cpu" and dtype != "float64":
            return max(rates[dtype], rates["float32"])
        return rates[dtype]

    def _least_seconds(self, call: Callable[[], object]) -> float:
        """Of a call, made twice in a row: the launch and the wait for the end are little beside that."""
        from torch.utils.benchmark import Timer  # here: takes 0.08 s, which contenders' processes need not spend

        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return min(timer.timeit(2).mean for _ in range(4))


def cache_bytes(device: str) -> int:
    """Of the last cache: what is larger than twice as much is not served from there."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().rstrip("K")) << 10 for path in found), default=64 << 20)
