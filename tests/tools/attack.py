"""Judges the candidates of tests/candidates.py: every wrong one must be rejected for the reason it names, every honest one accepted.

    python tests/tools/attack.py                          all of them, once, with the reason each is rejected for
    python tests/tools/attack.py --repeats 100 honest     the honest ones, each with 100 seeds
    python tests/tools/attack.py zeros hangs              some
    python tests/tools/attack.py --write FOLDER           writes them out, as files to judge one by one or to read
"""

import argparse
from multiprocessing.pool import ThreadPool
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from candidates import CANDIDATES, model_of, names, source  # noqa: E402
from harness import Judge  # noqa: E402
from judge.problem import DIRECTIONS, DTYPES, Options, Pair  # noqa: E402
from judge.record import Result  # noqa: E402
from judge.roofline import Ceilings  # noqa: E402


def ceilings_of(device: str) -> Ceilings:
    """Far above any machine: no floor is crossed and nothing is measured."""
    ceilings = Ceilings(device, ())
    ceilings.copy_bandwidth, ceilings.matrix_rate = 1e15, {name: 1e18 for name in DTYPES}
    return ceilings


def write(folder: Path, name: str) -> Pair:
    pair = Pair(name, folder / f"{name}_model.py", folder / f"{name}.py")
    pair.model_path.write_text(model_of(name))
    pair.new_path.write_text(source(name))
    return pair


def judge_pair(pair: Pair, **asked) -> list[Result]:
    """In a hurry: this is about the judgement, not the figures."""
    options = replace(Options(baselines=("eager",), directions=DIRECTIONS, seconds=0.02, flush_bytes=1 << 20), **asked)
    with Judge(options, ceilings_of(options.device), lambda text: None) as judge:
        return list(judge.judge(pair))


def judge_candidate(name: str, device: str = "cpu", seed: int = 0) -> tuple[bool, str]:
    """Whether judging ended as it must, and what was said. What is wrong with a gradient shows in a later direction only."""
    candidate = CANDIDATES[name]
    directions = DIRECTIONS[: DIRECTIONS.index(candidate.shows) + 1] if candidate.rejected else DIRECTIONS
    with tempfile.TemporaryDirectory() as folder:
        pair = write(Path(folder), name)
        *before, last = judge_pair(pair, device=device, seed=seed, directions=directions, timeout=candidate.timeout)
    said = "; ".join(last.reasons or last.notes or ["accepted"])
    as_expected = any(candidate.rejected in reason for reason in last.reasons) if candidate.rejected else last.ok
    return as_expected and all(run.ok for run in before), said


def judge_task(task: tuple[str, str, int]) -> tuple[bool, str]:
    return judge_candidate(*task)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="candidates, or wrong, or honest (all)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="with the seeds 0 to N - 1 (default 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="that share the candidates")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    kinds = {"wrong": names("wrong"), "honest": names("honest")}
    chosen = [name for given in options.names or kinds for name in kinds.get(given, [given])]
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            write(options.write, name)
        return 0
    chosen = [name for name in chosen if options.device == "cuda" or not CANDIDATES[name].needs_gpu]
    tasks = [(name, options.device, seed) for name in chosen for seed in range(options.repeats)]
    failed: dict[str, list] = {name: [] for name in chosen}
    # Not a pool of daemons: each judge starts processes of its own.
    with ThreadPool(options.processes) as pool:
        results = pool.imap(in_a_process if options.processes > 1 else judge_task, tasks)
        for (name, _, seed), (as_expected, said) in zip(tasks, results):
            failed[name] += [] if as_expected else [(seed, said)]
            if seed == options.repeats - 1:
                right = options.repeats - len(failed[name])
                print(f"{'FAILED' if failed[name] else 'ok':6} {right} of {options.repeats}  {name:32} {(failed[name] or [said])[0]}", flush=True)
    return 1 if any(failed.values()) else 0


def in_a_process(task) -> tuple[bool, str]:
    """The judge once more, as a program: `attack.py` with one candidate."""
    import json
    import subprocess

    script = "import json, sys; sys.path.insert(0, sys.argv[1]); import attack; print(json.dumps(attack.judge_task(json.loads(sys.argv[2]))))"
    command = [sys.executable, "-c", script, str(Path(__file__).parent), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return tuple(json.loads(lines[-1])) if lines else (False, (done.stderr.splitlines() or ["nothing said"])[-1])


if __name__ == "__main__":
    sys.exit(main())
