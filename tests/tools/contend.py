"""What the tools here share: contenders of one Model timed by the judge's clock, without its checks."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from judge import bench, check  # noqa: E402
from judge.problem import DTYPES, Options, Problem  # noqa: E402
from judge.worker import Arena, Worker, has_ipc  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Contest:
    """The Model and files with a ModelNew, at one shape."""

    def __init__(self, problem: Problem, batch: int | None, dtype: str = "float32", direction: str = "forward"):
        self.options = Options(device=DEVICE)
        self.arena = Arena(DEVICE, ipc=DEVICE == "cuda" and has_ipc())
        self.case = check.Case(problem, None, self.arena, DEVICE, DTYPES[dtype], "highest", batch, 0)
        self.case.model = problem.model(0).to(DEVICE, DTYPES[dtype])
        self.direction, self.dtype = direction, dtype

    @contextlib.contextmanager
    def workers(self, files: dict[str, Path | None]) -> Iterator[dict[str, Worker]]:
        """Processes of their own, with the same weights; None stands for the Model."""
        workers = {name: Worker("eager" if path is None else "new", DEVICE, 600.0) for name, path in files.items()}
        try:
            problem = self.case.problem
            for name, worker in workers.items():
                made = {"level": "highest", "dtype": self.dtype, "seed": 0}
                if files[name] is None:
                    worker.ask("make", path=problem.path, constants=problem.constants, **made)
                else:
                    worker.ask("load", path=files[name])
                    worker.ask("make", arguments=problem.arguments(0), **made)
                check.give_weights(self.case, worker=worker)
            self.ring = check.Ring(self.case, self.direction)
            for worker in workers.values():
                worker.see(self.arena)
            yield workers
        finally:
            for worker in workers.values():
                worker.kill()

    def measure(self, workers: dict[str, Worker], seconds: float) -> bench.Samples:
        return bench.measure(workers, self.ring, DEVICE, seconds, self.options.flush_bytes)
