"""Times a Model against itself, again and again, each time in two new processes: how many of the intervals hold 1.0.

    python tests/tools/a_against_a.py [RUNS] [SECONDS_EACH] [NAME]     100 runs of 0.1 seconds, linear_swish_group_norm

The processes of AT_ONCE runs start together, since to begin to use a GPU takes seconds; then the runs are timed one
after the other, while all other processes are stopped.
"""

import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from contend import DEVICE, ROOT, Contest, Problem, bench

AT_ONCE = 8
bench.MOST_KEPT = 1  # of the answers: this is about the times


def main(runs: int = 100, seconds: float = 0.1, name: str = "linear_swish_group_norm") -> int:
    problem = Problem(ROOT / "models" / f"{name}.py")
    batch = problem.on_cpu["batch_size"] * 4 if DEVICE == "cuda" else problem.on_cpu["batch_size"] // 4
    verdicts, disturbed, ratios, start_of_all = Counter(), 0, [], time.perf_counter()
    for begin in range(0, runs, AT_ONCE):
        contests = [Contest(problem, batch) for _ in range(begin, min(runs, begin + AT_ONCE))]
        contenders = [contest.contenders({"new": None, "eager": None}) for contest in contests]
        with ThreadPoolExecutor(AT_ONCE) as pool, ExitStack() as started:
            list(pool.map(started.enter_context, contenders))
            for run, contest in enumerate(contests, begin + 1):
                samples = contest.measure(seconds)
                ratio, (low, high) = bench.speedup(samples, "eager", DEVICE)
                verdict = bench.verdict(low, high, False)
                verdicts[verdict] += 1
                disturbed += bool(bench.interference(samples))
                ratios.append(abs(ratio - 1))
                hidden = bench.hidden_time(samples, DEVICE) or ""
                print(f"{run:4} {ratio:.4f} [{low:.4f}, {high:.4f}] {verdict} {hidden}", file=sys.stderr, flush=True)
    ratios.sort()
    held, most = verdicts[bench.AMBIGUOUS], ratios[int(0.95 * runs) - 1]
    print(f"{held} of {runs} intervals hold 1.0 ({dict(verdicts)});")
    print(f"the ratio is off by {statistics.median(ratios):.4f} in the median, by {most:.4f} in 95 of 100;")
    seconds_a_run = (time.perf_counter() - start_of_all) / runs
    print(f"{disturbed} of {runs} runs say that they were disturbed; a run took {seconds_a_run:.1f} s")
    return 0 if held >= 0.95 * runs else 1


if __name__ == "__main__":
    sys.exit(main(*(kind(value) for kind, value in zip((int, float, str), sys.argv[1:]))))
