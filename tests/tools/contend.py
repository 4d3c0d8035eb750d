"""What the tools here share: contenders of one Model timed by the judge's clock, without its checks; and calls of a
module that are timed in this process."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from judge import bench, check
from judge.source import Problem
from judge.worker import Worker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Contest:
    """The Model and files with a ModelNew, at one shape."""

    def __init__(self, problem: Problem, batch: int | None, direction: str = "forward"):
        self.direction = direction
        self.case = check.Case(problem, DEVICE, torch.float32, "highest", batch, 0, {})
        self.case.model = problem.model(0).to(DEVICE)

    @contextlib.contextmanager
    def contenders(self, files: dict[str, Path | None]) -> Iterator[None]:
        """Processes of their own, with the same weights; None stands for the Model."""
        workers = self.case.workers = {}
        try:
            for name, path in files.items():
                workers[name] = Worker("eager" if path is None else "new", DEVICE, 600.0)
                self.case.load(workers[name], path)
            yield
        finally:
            for worker in workers.values():
                worker.kill()

    def measure(self, seconds: float) -> bench.Samples:
        return bench.measure(self.case, self.direction, seconds)


def calls_of(module: torch.nn.Module, inputs: list) -> dict[str, Callable]:
    """A call without gradients, one that records for a backward, and one with it. x's gradient is wanted, too."""
    recorded = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        grad = torch.randn_like(module(*inputs))

    return {
        "forward": torch.no_grad()(lambda: module(*inputs)),
        "forward_recorded": lambda: module(*recorded),
        "forward_backward": lambda: torch.autograd.grad(module(*recorded), [*recorded, *module.parameters()], grad),
    }


def milliseconds(call: Callable, busy: int, flush: torch.Tensor | None = None) -> float:
    """Of one call, behind a write of `flush`. On a GPU by events; before them it works for so many clock cycles, so
    that the call can be launched meanwhile and its own time is what is left."""
    if flush is not None:
        flush.zero_()
    if DEVICE == "cpu":
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if busy:
        torch.cuda._sleep(busy)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
