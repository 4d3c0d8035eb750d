"""The judge's medians against triton.testing.do_bench: each pair at its benchmark shapes and the smallest of its sweep.

    python tests/tools/agreement.py [NAME ...]

The two take turns. do_bench calls for 10 ms after a rest, as the judge does, and then for 200 ms, in which a GPU may
reach its power limit. Its buffer against the cache is made larger: while that is cleared the host can launch a short
call's kernels, as with the judge. Exit code 1 if the judge's figure and the one for 10 ms differ by more than 2% at the
benchmark shapes, or by more than 5% and 2 microseconds at the smallest. Needs a GPU.
"""

import statistics
import sys
import time
from functools import partial

import torch
from contend import ROOT, Contest, Problem
from triton.runtime import driver
from triton.testing import do_bench

from judge.source import discover, load, set_precision

TURNS, SECONDS, REST = 3, 0.25, 0.2
RESTED, BUSY = {"warmup": 1, "rep": 10}, {"warmup": 50, "rep": 150}  # milliseconds


@torch.no_grad()
def compare(name: str, constants: dict) -> bool:
    pair = discover(ROOT)[name]
    problem = Problem(pair.model_path, constants)
    contest = Contest(problem, problem.batch)
    inputs = problem.inputs(problem.batch, "cuda", torch.float32, 0)
    new = problem.make(load(pair.new_path).ModelNew, 0).to("cuda")
    calls, figures = {"new": partial(new, *inputs), "eager": partial(contest.case.model, *inputs)}, {}
    with contest.contenders({"new": pair.new_path, "eager": None}):
        for _ in range(TURNS):
            samples = contest.measure(SECONDS)
            for which, call in calls.items():
                judge, rested, busy = figures.setdefault(which, ([], [], []))
                judge.append(statistics.median(samples.ms[which]))
                for times, how in ((rested, RESTED), (busy, BUSY)):
                    time.sleep(REST)
                    times.append(do_bench(call, **how, return_mode="median"))
    agree = True
    for which, clocks in figures.items():
        judge, rested, busy = map(statistics.median, clocks)
        apart = abs(judge / rested - 1)
        agree &= apart <= 0.02 or bool(constants) and (apart <= 0.05 or abs(judge - rested) <= 2e-3)
        said = f"judge {judge:.4f} ms, do_bench {rested:.4f}, {100 * apart:.1f}% apart; for 200 ms {busy:.4f}"
        print(f"{name} {constants or ''} {which}: {said}", flush=True)
    return agree


def main(names: list[str]) -> int:
    set_precision("highest")
    driver.active.get_empty_cache_for_benchmark = partial(torch.empty, 2**30, dtype=torch.uint8, device="cuda")
    pairs = {name: Problem(discover(ROOT)[name].model_path) for name in names or discover(ROOT)}
    return int(not all([compare(name, shape) for name, pair in pairs.items() for shape in ({}, pair.sweep[0])]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
