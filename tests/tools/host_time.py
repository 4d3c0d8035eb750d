"""What a call costs the host, and what of that shows where every call is waited for. In float32, on a GPU.

    python tests/tools/host_time.py [NAME ...]      NAME as harness.py has it; without one, all files of kernels/

Host: at the small sizes of the Model's `on_cpu`, microseconds from one call to the next. The GPU is waited for before
50 calls and not among them, so that neither it nor a full queue holds the host up; the median of 20 such rows.

Alone: at the benchmark shape, milliseconds by events around a call while the GPU is idle, as KernelBench times. What
the host does before its last launch is in it. Busy: the same with the GPU kept busy until the call has been launched:
what the GPU needs. Medians of 20 of each, in turns, and by how much alone exceeds busy. The GPU is kept busy as long
before a call alone, too, and waited for: it draws little power meanwhile. Without that a call of 1.2 ms was seen to
take 13% longer among its like, for want of power, which is not the host's time. The first 40 turns are left out: in
the first tenths of a second a call alone of 1.1 ms took 1.3, as the GPU's clock was still low.

Three kinds of a call: forward without gradients, forward that records for a backward, and forward with backward.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from contend import ROOT, Problem, calls_of, milliseconds

from judge.source import discover, load, set_precision

ROWS, CALLS = 20, 50
TURNS_LEFT_OUT = 40
BUSY = 4_000_000  # clock cycles of the GPU, which does nothing: some 2 ms, longer than the host takes for a call


def host_microseconds(call: Callable) -> float:
    found = []
    for _ in range(ROWS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(found[1:])


def gpu_milliseconds(call: Callable) -> tuple[float, float]:
    """Of a call alone, and of one while the GPU is busy."""
    alone, busy = [], []
    for _ in range(TURNS_LEFT_OUT + ROWS):
        torch.cuda._sleep(BUSY)
        alone.append(milliseconds(call, 0))
        busy.append(milliseconds(call, BUSY))
    return statistics.median(alone[TURNS_LEFT_OUT:]), statistics.median(busy[TURNS_LEFT_OUT:])


def measure(model_path: Path, files: dict[str, Path]) -> None:
    """Prints two tables of the Model and of these files' ModelNew."""
    benchmark, small = Problem(model_path), Problem(model_path, Problem(model_path).on_cpu)
    classes = {"eager": None, **{name: load(path).ModelNew for name, path in files.items()}}

    def calls(problem: Problem, name: str) -> dict[str, Callable]:
        module = problem.make(classes[name] or problem.module.Model, 0)
        return calls_of(module.cuda(), problem.inputs(problem.batch, "cuda", torch.float32, 0))

    print(f"{model_path.stem}: host, us a call at {small.constants}")
    for name in classes:
        row = {kind: host_microseconds(call) for kind, call in calls(small, name).items()}
        print(f"  {name:40}" + "".join(f"{kind} {us:6.1f}   " for kind, us in row.items()), flush=True)
    print(f"{model_path.stem}: alone / busy, ms a call at the benchmark shape")
    for name in classes:
        print(f"  {name:40}", end="")
        for kind, call in calls(benchmark, name).items():
            alone, busy = gpu_milliseconds(call)
            print(f"{kind} {alone:.3f} / {busy:.3f} ({alone / busy - 1:+.0%})   ", end="", flush=True)
        print()
        torch.cuda.empty_cache()


def main(argv: list[str]) -> None:
    pairs = discover(ROOT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="as hopper/linear_swish_group_norm")
    chosen = parser.parse_args(argv).names or list(pairs)
    if unknown := [name for name in chosen if name not in pairs]:
        parser.error(f"unknown pair '{unknown[0]}': there are: {', '.join(pairs)}")
    set_precision("highest")
    for model_path in dict.fromkeys(pairs[name].model_path for name in chosen):
        measure(model_path, {name: pairs[name].new_path for name in chosen if pairs[name].model_path == model_path})


if __name__ == "__main__":
    main(sys.argv[1:])
