"""The judge's medians against other clocks: each pair at its benchmark shapes, ModelNew and Model.

    python tests/agreement.py [NAME ...]

Three clocks time the same call: the judge, the judge as the replay of a CUDA graph, and triton.testing.do_bench. They take turns, in a new
order every time, of a few calls each, the first of which are for nobody: a GPU at its power cap is the slower the less it has rested, and how
much it rests depends on who is timing. Each turn gives a median, and of those the median counts. Exit code 1 if two of the three differ by
more than 3%. Needs a GPU.
"""

import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from judge import timing  # noqa: E402
from judge.machine import precision  # noqa: E402
from judge.pairs import Problem, discover, load_new  # noqa: E402

ALLOWED = 0.03
SECONDS = 2.5  # of each module
LEAD, CALLS = 7, 8  # calls of a turn: do_bench makes one, five that tell it how long they take, and one to warm up


def clocks(call: Callable[[], object]) -> dict[str, Callable[[], float]]:
    """By name: a turn, which gives its median in milliseconds."""
    stopwatch, flush = timing.Stopwatch("cuda"), timing.CacheFlush("cuda")
    flush.hide(timing.host_us(call))
    replay, _ = timing.in_cuda_graph(call)
    once = min(stopwatch(call) for _ in range(LEAD))

    def judge(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(LEAD + CALLS):
            flush()
            taken.append(stopwatch(call))
        return statistics.median(taken[LEAD:])

    return {
        "judge": lambda: judge(call),
        "do_bench": lambda: do_bench(call, warmup=0, rep=CALLS * once, return_mode="median"),
        "graph": lambda: judge(replay),
    }


@torch.no_grad()
def compare(name: str) -> float:
    """The largest relative difference of the pair's figures, which are printed."""
    pair = discover(ROOT)[name]
    problem = Problem(pair.model_path)
    inputs = problem.inputs(problem.benchmark_batch, "cuda", torch.float32, 0)
    differences = []
    for label, module_class in (("ModelNew", load_new(pair.new_path)[0]), ("Model", problem.model_class)):
        module = problem.make(module_class, 0).to("cuda")
        turns = clocks(lambda module=module: module(*inputs))
        taken = {clock: [] for clock in turns}
        deadline = timing.perf_counter() + SECONDS
        while timing.perf_counter() < deadline or len(taken["judge"]) < timing.MIN_ROUNDS:
            for clock in random.sample(list(turns), len(turns)):
                taken[clock].append(turns[clock]())
        figures = {clock: statistics.median(medians) for clock, medians in taken.items()}
        differences.append(max(figures.values()) / min(figures.values()) - 1)
        shown = ", ".join(f"{clock} {ms:.4f}" for clock, ms in figures.items())
        print(
            f"{name}, {label}: ms by {shown}: within {100 * differences[-1]:.1f}%, {len(taken[clock])} turns",
            flush=True,
        )
    return max(differences)


def main(names: list[str]) -> int:
    with precision("highest"):
        return int(max(compare(name) for name in names or discover(ROOT)) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
