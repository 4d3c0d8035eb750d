"""Times edited copies of a kernel file beside the file itself, and says how exact each is.

    python tests/in_turns.py NAME COPY.py ...               forward, in float32, at the benchmark shape (on a CPU at a batch that fits)
    python tests/in_turns.py --rest 0.02 NAME COPY.py ...   the GPU rests so many seconds before each round: at its power cap it is slower

Of each: the median in milliseconds, how much of the file's time that is, with its 95% interval, and the largest error against the Model in
float64, of a few samples. All take turns in one process, by the harness's clock: an H200 from one hour to the next, and one beside another,
differ by more than most edits do.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from judge import machine, timing  # noqa: E402
from judge.observe import clone_all, observe, relocate  # noqa: E402
from judge.pairs import BuildFailed, CandidateRaised, Problem, discover, load_new  # noqa: E402
from judge.roof import Ceilings, Load, choose_batch  # noqa: E402

SAMPLES = 8  # of those whose error is asked for: float64 takes twice the memory


def largest_errors(modules: list[torch.nn.Module], problem: Problem, batch: int, device: str) -> list[float]:
    inputs = problem.inputs(min(batch, SAMPLES), device, torch.float32, 0)
    right = observe(problem.make(problem.model_class, 0).to(device).double(), [x.double() for x in inputs], False, 0)[
        "output"
    ]
    return [
        (observe(module, clone_all(inputs), False, 0)["output"].double() - right).abs().max().item()
        for module in modules
    ]


def made_by(path: Path, problem: Problem, device: str) -> torch.nn.Module:
    try:
        return problem.make(load_new(path)[0], 0).to(device)
    except (BuildFailed, CandidateRaised) as error:
        sys.exit(f"in_turns.py: {path}: {error}")


@torch.no_grad()
def compare(
    problem: Problem, files: list[Path], batch: int, device: str, seconds_each: float, rest: float = 0.0
) -> list[str]:
    """A line of each file; the first is what the others are held against."""
    modules = [made_by(path, problem, device) for path in files]
    errors = largest_errors(modules, problem, batch, device)
    inputs = problem.inputs(batch, device, torch.float32, 0)
    names = [str(i) for i in range(len(files))]
    contenders = {name: lambda module=module: module(*inputs) for name, module in zip(names, modules)}
    move = functools.partial(relocate, *modules)
    samples = timing.measure(contenders, lambda factor: time.sleep(rest), device, seconds_each, 0, move=move)
    lines = []
    for name, path, error in zip(names, files, errors):
        low, high = samples.speedup_interval(
            "0", over=name, seed=0
        )  # the file's speed over the copy's: the copy's time over the file's
        lines.append(
            f"{samples.median(name):9.4g} ms  {samples.speedup('0', over=name):.3f} [{low:.3f}, {high:.3f}]  error {error:.1e}  {path}"
        )
    return lines + samples.interference()


def main(argv: list[str]) -> int:
    pairs, device = discover(ROOT), "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=pairs, metavar="NAME")
    parser.add_argument("copies", nargs="+", type=Path, metavar="COPY.py")
    parser.add_argument("--rest", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    pair = pairs[options.name]
    with machine.precision("highest"):
        load, problem = Load(device, [torch.float32], ["highest"], False), Problem(pair.model_path)
        ceilings = Ceilings(device, load.dtypes)
        ceilings.measure()
        batch = choose_batch(problem, None, load, ceilings)
        print(f"{pair.name}, batch {batch}, {machine.device_name(device)}", flush=True)
        print(
            "\n".join(
                compare(
                    problem, [pair.new_path, *options.copies], batch, device, timing.SECONDS_EACH[device], options.rest
                )
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
