"""What the tools here share: contenders of one Model timed by the judge's clock, without its checks."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from judge import bench, check  # noqa: E402
from judge.source import DTYPES, Problem  # noqa: E402
from judge.worker import Worker  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Contest:
    """The Model and files with a ModelNew, at one shape."""

    def __init__(self, problem: Problem, batch: int | None, dtype: str = "float32", direction: str = "forward"):
        self.direction = direction
        self.case = check.Case(problem, DEVICE, DTYPES[dtype], "highest", batch, 0, {})
        self.case.model = problem.model(0).to(DEVICE, DTYPES[dtype])

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
