"""Judges the candidates of tests/candidates/: every wrong one must be rejected for the reason it names, every honest one accepted.

    python tests/attack.py                      all of them, once, with the reason each is rejected for
    python tests/attack.py --repeats 100 --processes 16 honest
                                                the honest ones, each with 100 seeds, shared by 16 processes
    python tests/attack.py pairs                the suite's own four, at a batch of 4
    python tests/attack.py wrong/zeros          one

One of them alone, as anybody would: python harness.py tests/candidates/model.py tests/candidates/wrong/zeros.py
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch
from processes import pool

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = ROOT / "tests" / "candidates"
sys.path.insert(0, str(ROOT))

from judge import machine, timing, trial  # noqa: E402
from judge.pairs import Pair, Problem, discover  # noqa: E402
from judge.roof import Ceilings, Load  # noqa: E402


def named(folder: str) -> list[str]:
    if folder == "pairs":
        return [f"pairs/{stem}" for stem in discover(ROOT)]
    return sorted(f"{folder}/{path.stem}" for path in (CANDIDATES / folder).glob("*.py"))


def pair_of(name: str) -> Pair:
    folder, _, stem = name.partition("/")
    return discover(ROOT)[stem] if folder == "pairs" else Pair(name, CANDIDATES / "model.py", CANDIDATES / f"{name}.py")


def text_of(name: str) -> str:
    return pair_of(name).new_path.read_text()


def expected_reason(name: str) -> str | None:
    """Words of the reason that the candidate must be rejected for; None for an honest one."""
    found = re.search(r"^Rejected: (.+)$", text_of(name), re.MULTILINE)
    return found and found[1]


def needs_gpu(name: str) -> bool:
    return "Needs a GPU." in text_of(name)


def fake_ceilings(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Ceilings:
    """Far above any machine, so that no floor is crossed and nothing is measured."""
    ceilings = Ceilings(device, [dtype])
    ceilings.copy_bandwidth = 1e15
    ceilings.matrix_rate = {name: 1e18 for name in machine.DTYPES}
    return ceilings


def judge_pair(
    pair: Pair,
    device="cpu",
    dtype="float32",
    backward=False,
    baselines=("eager",),
    precision="highest",
    seed=0,
    batch=None,
) -> list[trial.Run]:
    problem = Problem(pair.model_path)
    settings = trial.Settings(
        Load(device, [machine.DTYPES[dtype]], [precision], backward), list(baselines), seed, seconds_each=0.02
    )
    ceilings = fake_ceilings(device, machine.DTYPES[dtype])
    return trial.judge_pair(
        trial.Entry(pair, problem, batch or problem.benchmark_batch), settings, ceilings, lambda text: None
    )


def judge_in_another_process(name: str, device: str, seed: int) -> tuple[bool, str]:
    files = str(CANDIDATES / "model.py"), str(pair_of(name).new_path)
    command = [
        sys.executable,
        str(ROOT / "harness.py"),
        *files,
        "--device",
        device,
        "--baselines",
        "eager",
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    return done.returncode == 1 and expected_reason(name) in said, said


def judge_candidate(name: str, device: str = "cpu", seed: int = 0) -> tuple[bool, str]:
    """Whether judging ended as it must, and what was said. What is wrong with a gradient shows in the second direction only."""
    if name.startswith("ends_the_process/"):
        return judge_in_another_process(name, device, seed)
    batch = 4 if name.startswith("pairs/") else None
    runs = judge_pair(pair_of(name), device, backward=not name.startswith("wrong/"), seed=seed, batch=batch)
    *before, last = ([reason for reason in run.reasons] for run in runs)
    expected = expected_reason(name)
    said = next((reason for reason in last if expected and expected in reason), "; ".join(last) or "accepted")
    as_expected = any(expected in reason for reason in last) if expected else not last
    return as_expected and not any(before), said


def judge_task(task: tuple[str, str, int]) -> tuple[bool, str]:
    timing.FLUSH_BYTES["cpu"] = 1 << 20  # this is about the judgement, not the figures
    return judge_candidate(*task)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders or files of tests/candidates (all)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="with the seeds 0 to N - 1 (default 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds, and take the GPUs in turn")
    options = parser.parse_args()
    given = options.names or ("wrong", "wrong_gradient", "ends_the_process", "honest")
    names = [
        name
        for folder in given
        for name in named(folder) or [folder]
        if options.device == "cuda" or not needs_gpu(name)
    ]
    seeds, failures = range(options.repeats), 0
    tasks = [(name, options.device, seed) for name in names for seed in seeds]
    if options.processes > 1:
        results = pool(options.processes).imap(judge_task, tasks)
    else:
        results = map(judge_task, tasks)
    for name in names:
        outcomes = [next(results) for _ in seeds]
        failed = [(seed, said) for seed, (as_expected, said) in zip(seeds, outcomes, strict=True) if not as_expected]
        failures += len(failed)
        counts = f"{len(seeds) - len(failed)} of {len(seeds)}"
        print(
            f"{'FAILED' if failed else 'ok':6} {counts}  {name:38} {failed[0] if failed else outcomes[0][1]}",
            flush=True,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
