"""Times edited copies of a kernel file beside the file itself, and says how exact each is.

    python tests/tools/in_turns.py NAME COPY.py ...     in float32, at the benchmark shape (on a CPU: on_cpu)
    python tests/tools/in_turns.py --direction forward_backward NAME COPY.py ...

Of each: the median in milliseconds, how much of the file's time that is, with its 95% interval, and the largest error
against the Model in float64, of a few samples. All take turns: an H200 from one hour to the next, and one beside
another, differ by more than most edits do.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from contend import DEVICE, ROOT, Contest, Problem, bench

from judge.source import DIRECTIONS, discover, load

SAMPLES = 8  # of those whose error is asked for


@torch.no_grad()
def largest_error(path: Path, problem: Problem) -> float:
    inputs = problem.inputs(min(problem.batch, SAMPLES), DEVICE, torch.float32, 0)
    exact = problem.model(0).to(DEVICE).double()(*[x.double() for x in inputs])
    return (problem.make(load(path).ModelNew, 0).to(DEVICE)(*inputs).double() - exact).abs().max().item()


def compare(problem: Problem, files: list[Path], seconds: float, direction: str) -> list[str]:
    """A line of each file; the first is what the others are held against."""
    names = ["new", *map(str, range(1, len(files)))]
    contest, lines = Contest(problem, problem.batch, direction=direction), []
    with contest.contenders(dict(zip(names, files))):
        samples = contest.measure(seconds)
    for name, path in zip(names, files):
        # The file's speed over the copy's, which is the copy's time over the file's.
        ratio, (low, high) = bench.speedup(samples, name, DEVICE)
        shown = f"{statistics.median(samples.ms[name]):9.4g} ms  {ratio:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"{shown}  error {largest_error(path, problem):.1e}  {path}")
    return lines + bench.interference(samples)


def main(argv: list[str]) -> None:
    pairs = discover(ROOT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=pairs, metavar="NAME")
    parser.add_argument("copies", nargs="+", type=Path, metavar="COPY.py")
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward")
    options = parser.parse_args(argv)
    path = pairs[options.name].model_path
    problem = Problem(path, {} if DEVICE == "cuda" else Problem(path).on_cpu)
    print("\n".join(compare(problem, [pairs[options.name].new_path, *options.copies], 2.0, options.direction)))


if __name__ == "__main__":
    main(sys.argv[1:])
