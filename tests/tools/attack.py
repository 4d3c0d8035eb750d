"""Judges the candidates of tests/candidates.txt: every wrong one must be rejected for the reason it names.

python tests/tools/attack.py                          all of them, once, with the reason each is rejected for
python tests/tools/attack.py --repeats 100 honest     the honest ones, each with 100 seeds
python tests/tools/attack.py --processes 4 wrong      shared by four
python tests/tools/attack.py --write FOLDER           writes them out, as files to judge one by one or to read
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from candidates import CANDIDATES, model_of, names, source

from harness import Judge, Options
from judge import bench
from judge.record import Result
from judge.roofline import Ceilings
from judge.source import DIRECTIONS, DTYPES, Pair

# In a hurry: this is about the judgement, not the figures. On a CPU the flushes would take a quarter of the time.
bench.MIN_ROUNDS, bench.MOST_CALLS, bench.CPU_FLUSHES = 8, 4, 0
ELSEWHERE = {"cpu": "gpu", "cuda": "cpu"}  # a candidate that needs the other one
HURRY = Options(baselines=("eager",), directions=DIRECTIONS, seconds=0.02, timeout=60.0, require="right")


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


class LastTimed(Judge):
    """Times the last direction alone: a timing takes as long as all that is asked."""

    def _time(self, case, pair, run) -> None:
        if run.direction == self.options.directions[-1]:
            super()._time(case, pair, run)


class Judges:
    """A judge for each set of options, whose baselines' processes serve many candidates."""

    def __init__(self):
        self.made: dict[tuple[type[Judge], Options], Judge] = {}

    def __call__(self, pair: Pair, kind: type[Judge] = Judge, **asked) -> list[Result]:
        options = replace(HURRY, **asked)
        key = kind, replace(options, seed=0)
        if key not in self.made:
            self.made[key] = kind(options, ceilings_of(options.device), lambda text: None)
        self.made[key].options = options
        return list(self.made[key].judge(pair))

    def close(self) -> None:
        for judge in self.made.values():
            judge.close()


def how_judged(name: str) -> dict:
    """What is wrong with a gradient shows in a later direction only; with gradients recorded few answers differ."""
    candidate, particular = CANDIDATES[name], CANDIDATES[name].particular
    last = 0 if candidate.rejected or candidate.no_dropin else len(DIRECTIONS) - 1
    last = next((i for i, direction in enumerate(DIRECTIONS) if direction in particular), last)
    dtype = next((dtype for dtype in DTYPES if dtype in particular), "float32")
    timeout = next((float(words[8:]) for words in particular if words.startswith("timeout ")), HURRY.timeout)
    wanted = [each for each in DIRECTIONS[: last + 1] if each != "forward_recorded" or each in particular]
    return {"directions": tuple(wanted), "dtype": (dtype,), "timeout": timeout}


def is_as_expected(name: str, runs: list[Result]) -> bool:
    rejected, no_dropin = CANDIDATES[name].rejected, CANDIDATES[name].no_dropin
    if no_dropin:
        right = all(run.ok for run in runs) and runs[-1].status == "right"
        return right and any(no_dropin in why for why in runs[-1].no_dropin)
    if not rejected:
        return all(run.status == "drop-in" for run in runs)
    return all(run.ok for run in runs[:-1]) and rejected in "".join(runs[-1].reasons[:1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="candidates, or wrong, or honest (all)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="with the seeds 0 to N - 1 (default 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    kinds = {"wrong": names("wrong"), "honest": names("honest")}
    chosen = list(dict.fromkeys(name for given in options.names or kinds for name in kinds.get(given, [given])))
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            write(options.write, name)
        return 0
    chosen = [name for name in chosen if ELSEWHERE[options.device] not in CANDIDATES[name].particular]
    failures = 0
    if options.processes > 1:
        command = [sys.executable, __file__, "--repeats", str(options.repeats), "--device", options.device]
        shared = [name for name in chosen if "by clock" not in CANDIDATES[name].particular]
        shares = [shared[i :: options.processes] for i in range(options.processes)]
        started = [subprocess.Popen([*command, *share]) for share in shares if share]
        failures = sum(process.wait() != 0 for process in started)
        chosen = [name for name in chosen if "by clock" in CANDIDATES[name].particular]
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Judges()) as judges:
        for name in chosen:
            failed, said = [], ""
            for seed in range(options.repeats):
                asked = {"kind": LastTimed, "device": options.device, "seed": seed} | how_judged(name)
                runs = judges(write(Path(folder), name), **asked)
                said = "; ".join(
                    [reason for run in runs for reason in run.reasons + run.no_dropin] or runs[-1].notes or ["accepted"]
                )
                failed += [] if is_as_expected(name, runs) else [(seed, said)]
            failures += len(failed)
            right = f"{options.repeats - len(failed)} of {options.repeats}"
            print(f"{'FAILED' if failed else 'ok':6} {right}  {name:32} {(failed or [said])[0]}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
