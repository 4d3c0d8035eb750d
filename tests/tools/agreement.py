"""The judge's medians against triton.testing.do_bench: each pair at its benchmark shapes and the smallest of its sweep.

    python tests/tools/agreement.py [NAME ...]

The two take turns, so that clocks and temperature are the same for both. Exit code 1 if they differ by more than 2% at
the benchmark shapes, or by more than 5% and 2 microseconds at the smallest. Needs a GPU.
"""

import statistics
import sys
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parent))

from contend import ROOT, Contest, Problem

from judge.source import discover, load, make, set_precision

TURNS, SECONDS = 3, 0.25


@torch.no_grad()
def compare(name: str, constants: dict) -> bool:
    pair = discover(ROOT)[name]
    problem = Problem(pair.model_path, constants)
    contest = Contest(problem, problem.benchmark_batch)
    inputs = problem.inputs(problem.benchmark_batch, "cuda", torch.float32, 0)
    new = make(load(pair.new_path).ModelNew, problem.arguments(0), 0).to("cuda")
    modules, figures = {"new": new, "eager": contest.case.model}, {}
    with contest.contenders({"new": pair.new_path, "eager": None}):
        for _ in range(TURNS):
            samples = contest.measure(SECONDS)
            for which, module in modules.items():
                judge, triton = figures.setdefault(which, ([], []))
                judge.append(statistics.median(samples.ms[which]))
                triton.append(do_bench(lambda module=module: module(*inputs), warmup=50, rep=150, return_mode="median"))
    agree = True
    for which, clocks in figures.items():
        judge, triton = map(statistics.median, clocks)
        apart = abs(judge / triton - 1)
        agree &= apart <= 0.02 or bool(constants) and (apart <= 0.05 or abs(judge - triton) <= 2e-3)
        said = f"judge {judge:.4f} ms, do_bench {triton:.4f} ms, {100 * apart:.1f}% apart"
        print(f"{name} {constants or ''} {which}: {said}", flush=True)
    return agree


def main(names: list[str]) -> int:
    set_precision("highest")
    shapes = [
        (name, shape)
        for name in names or discover(ROOT)
        for shape in ({}, Problem(ROOT / "models" / f"{name}.py").sweep[0])
    ]
    return int(not all([compare(name, shape) for name, shape in shapes]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
