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
        self.case = check.Case(problem, DEVICE, DEVICE == "cuda", DTYPES[dtype], "highest", batch, 0)
        self.case.model = problem.model(0).to(DEVICE, DTYPES[dtype])

    @contextlib.contextmanager
    def workers(self, files: dict[str, Path | None]) -> Iterator[dict[str, Worker]]:
        """Processes of their own, with the same weights; None stands for the Model."""
        problem, workers = self.case.problem, {}
        try:
            for name, path in files.items():
                worker = workers[name] = Worker("eager" if path is None else "new", DEVICE, 600.0)
                cls, constants = ("ModelNew", {}) if path else ("Model", problem.constants)
                made = check.make_asked(self.case)
                worker.send("load", path=path or problem.path, name=cls, constants=constants, made=made)
            for worker in workers.values():
                check.give_weights(self.case, worker=worker)
            self.ring = check.Ring(self.case, self.direction)
            yield workers
        finally:
            for worker in workers.values():
                worker.kill()

    def measure(self, workers: dict[str, Worker], seconds: float) -> bench.Samples:
        return bench.measure(workers, self.ring, self.case, seconds)
