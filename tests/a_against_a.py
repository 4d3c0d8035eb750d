"""Times a Model against itself, again and again: how many of the intervals hold 1.0, and what the verdicts are.

python tests/a_against_a.py [RUNS] [SECONDS_EACH]       100 runs, 0.3 seconds for each contender
"""

import functools
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from judge import timing  # noqa: E402
from judge.observe import relocate  # noqa: E402
from judge.pairs import Problem  # noqa: E402


def main(runs: int = 100, seconds_each: float = 0.3) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = Problem(ROOT / "models" / "linear_swish_group_norm.py")
    inputs = problem.inputs(32, device, torch.float32, 0)
    first, second = (problem.make(problem.model_class, 0).to(device) for _ in range(2))
    contenders = {"new": lambda: first(*inputs), "eager": lambda: second(*inputs)}
    move = functools.partial(relocate, first, second)
    verdicts, disturbed, widths = Counter(), 0, []
    for seed in range(runs):
        with torch.no_grad():
            samples = timing.measure(contenders, lambda factor: None, device, seconds_each, seed, move=move)
        interval = samples.speedup_interval("new", over="eager", seed=seed)
        verdicts[timing.verdict(interval)] += 1
        disturbed += bool(samples.interference())
        widths.append(interval[1] - interval[0])
        print(
            f"{seed + 1:4} [{interval[0]:.3f}, {interval[1]:.3f}] {timing.verdict(interval)}",
            file=sys.stderr,
            flush=True,
        )
    print(
        f"{verdicts[timing.AMBIGUOUS]} of {runs} intervals hold 1.0 ({dict(verdicts)}), median width {sorted(widths)[runs // 2]:.3f};"
    )
    print(f"{disturbed} of {runs} runs say that they were disturbed")
    return 0 if verdicts[timing.AMBIGUOUS] >= 0.95 * runs else 1


if __name__ == "__main__":
    sys.exit(main(*(kind(value) for kind, value in zip((int, float), sys.argv[1:]))))
