"""The judge's medians against other clocks: each pair at its benchmark shapes, ModelNew and Model.

    python tests/agreement.py [NAME ...]

Each is timed by the judge, by triton.testing.do_bench, and by the judge as the replay of a CUDA graph, in turns of a few milliseconds: a
GPU at its power cap is the slower the less it rests, and how much it rests depends on who is timing. So all meet the same clocks. Exit code 1
if two of the three differ by more than 3%. Needs a GPU.
"""

import statistics
import sys
from pathlib import Path

import torch
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from judge import timing  # noqa: E402
from judge.machine import precision  # noqa: E402
from judge.pairs import Problem, discover, load_new  # noqa: E402

ALLOWED = 0.03
TURNS = 15
CALLS = 20  # of do_bench in a turn


@torch.no_grad()
def compare(name: str) -> float:
    """The largest relative difference of the pair's figures, which are printed."""
    pair = discover(ROOT)[name]
    problem = Problem(pair.model_path)
    inputs = problem.inputs(problem.benchmark_batch, "cuda", torch.float32, 0)
    differences = []
    for label, module_class in (("ModelNew", load_new(pair.new_path)[0]), ("Model", problem.model_class)):
        module = problem.make(module_class, 0).to("cuda")

        def call(module=module):
            return module(*inputs)

        replay, _ = timing.in_cuda_graph(call)
        stopwatch, turns = timing.Stopwatch("cuda"), []
        once = min(stopwatch(call) for _ in range(5))
        for turn in range(TURNS):
            samples = timing.measure({"call": call, "graph": replay}, lambda factor: None, "cuda", 0.0, turn)
            bench = do_bench(call, warmup=once, rep=CALLS * once, return_mode="median")
            turns.append((samples.median("call"), bench, samples.median("graph")))
        figures = [*map(statistics.median, zip(*turns))]
        differences.append(max(figures) / min(figures) - 1)
        judges, benches, replays = (f"{ms:.4f}" for ms in figures)
        print(f"{name}, {label}: {judges} ms, do_bench {benches}, graph {replays}: within {100 * differences[-1]:.1f}%", flush=True)
    return max(differences)


def main(names: list[str]) -> int:
    with precision("highest"):
        return int(max(compare(name) for name in names or discover(ROOT)) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
