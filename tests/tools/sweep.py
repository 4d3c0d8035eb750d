"""Times kernel files beside eager and, if wanted, torch.compile over the shapes of the Model file's list `sweep`.

    python tests/tools/sweep.py [--dtype float32,bfloat16] [--compile] [--json FILE] NAME ...

Forward without gradients, and forward with backward, x's gradient included. All contenders are in one process and take
turns. On a GPU a call is timed by events, behind a flush of the L2 cache, while the GPU is busy for some 0.5 ms. What
the host takes to launch a call beyond these is in its time, as in some small backward passes. A factor is the median of
the rounds' ratios. harness.py --sweep also checks every answer, but takes minutes for what this does in seconds. Where
memory is short the batch is halved until all fit; the line says which batch it was. Exit code 1 if a row is slower than
eager by over 3%.
"""

import argparse
import json
import random
import statistics
import sys
from pathlib import Path

import torch
from contend import DEVICE, ROOT, Problem, calls_of, milliseconds

from judge.record import environment
from judge.roofline import Ceilings
from judge.source import DTYPES, code_sha256, discover, kernels_of, load, set_precision

SECONDS = 0.1  # of timing, of each contender in each direction, if that gives LEAST rounds or more
LEAST, MOST = 10, 60  # rounds
BUSY = 1_000_000  # clock cycles, some 0.5 ms: longer than the host takes to launch a forward
SLOWER = 0.97


def rows_of(name: str, constants: dict, dtype: str, batch: int, compiled: bool, flush: torch.Tensor) -> list[dict]:
    pair = discover(ROOT)[name]
    problem = Problem(pair.model_path, constants)
    inputs = problem.inputs(batch, DEVICE, DTYPES[dtype], 0)
    classes = {"new": load(pair.new_path).ModelNew, "eager": problem.module.Model}
    modules = {of: problem.make(cls, 0).to(DEVICE, DTYPES[dtype]) for of, cls in classes.items()}
    if compiled:
        torch._dynamo.reset()
        modules["compile"] = torch.compile(problem.model(0).to(inputs[0]), dynamic=False)
    calls = {of: calls_of(module, inputs) for of, module in modules.items()}
    rows = []
    for direction in ("forward", "forward_backward"):
        for _ in range(2):
            first = {of: milliseconds(each[direction], BUSY, flush) for of, each in calls.items()}
        rounds = int(max(LEAST, min(MOST, SECONDS * 1e3 / max(first.values()))))
        times = {of: [] for of in calls}
        for _ in range(rounds):
            for of in random.sample(list(calls), len(calls)):
                times[of].append(milliseconds(calls[of][direction], BUSY, flush))
        row = {"model": name, "constants": constants, "dtype": dtype, "direction": direction, "ok": True}
        row["shapes"] = [list(x.shape) for x in inputs]
        row["ms"] = {of: statistics.median(each) for of, each in times.items()}
        row["speedup"] = {
            of: statistics.median(a / b for a, b in zip(times[of], times["new"])) for of in times if of != "new"
        }
        hashes = {"source_sha256": code_sha256(pair.new_path), "kernels_sha256": code_sha256(pair.new_path, kernels_of)}
        rows.append(row | {"rounds": rounds} | hashes)
    return rows


def sweep(name: str, dtype: str, compiled: bool, flush: torch.Tensor) -> list[dict]:
    found = []
    for constants in Problem(discover(ROOT)[name].model_path).sweep:
        batch, rows = constants["batch_size"], []
        while not rows:
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            try:
                rows = rows_of(name, constants, dtype, batch, compiled, flush)
            except torch.OutOfMemoryError:
                batch //= 2  # outside this block, after which the answers are freed
        for row in rows:
            shape = ", ".join(f"{key} {value}" for key, value in (constants | {"batch_size": batch}).items())
            factors = ", ".join(f"{factor:.3f}x {of}" for of, factor in row["speedup"].items())
            print(f"{name} {dtype} {row['direction']}, {shape}: {row['ms']['new']:.4g} ms, {factors}", flush=True)
        found += rows
    return found


def main(argv: list[str]) -> int:
    pairs = discover(ROOT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=pairs, metavar="NAME")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    set_precision("highest")
    flush, rows = torch.empty(2**27 if DEVICE == "cuda" else 2**25, dtype=torch.uint8, device=DEVICE), []
    for name in options.names:
        for dtype in options.dtype.split(","):
            rows += sweep(name, dtype, options.compile, flush)
            if options.json:
                command = [Path(__file__).name, *argv]
                machine = environment(DEVICE, Ceilings(DEVICE, ()), command, ROOT, None)
                options.json.write_text(json.dumps({"runs": rows, "environment": machine}, indent=1))
    for other in rows[0]["speedup"]:
        factors = [row["speedup"][other] for row in rows]
        print(f"{len(rows)} rows: {min(factors):.3f}x to {max(factors):.3f}x {other}")
    return int(any(row["speedup"]["eager"] < SLOWER for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
