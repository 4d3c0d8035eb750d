"""Checks that a ModelNew is right and measures how fast it is.

    python harness.py                      every pair of models/ and kernels/, on the best device present
    python harness.py instance_norm        one pair, or several
    python harness.py MODEL.py NEW.py      any two files in this format

Progress goes to stderr, the table to stdout.
Exit codes: 0 all right, 1 a candidate is wrong, 2 usage, 3 a candidate did not build (whatever the others did).
"""

from __future__ import annotations

import os

# Read when torch is loaded, here and in the processes to come: threads that wait leave the cores to others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch

from judge import bench, check, record, roofline, source
from judge.record import Result
from judge.source import BUILD, DIRECTIONS, DTYPES, PRECISIONS, RAISED, Pair, Problem
from judge.worker import Rejected, Worker

ROOT = Path(__file__).resolve().parent
ALL_RIGHT, ANY_WRONG, USAGE, NOT_BUILT = 0, 1, 2, 3
BASELINES = ("eager", "compile", "max-autotune", "cudagraph")
SECONDS_EACH = 1.0  # of timing, for each contender in each direction; in a sweep an eighth


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    names: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: tuple[str, ...] = ("float32",)
    precision: tuple[str, ...] = ("highest",)
    directions: tuple[str, ...] = ("forward",)
    baselines: tuple[str, ...] = ("eager", "compile")
    batch: int | None = None
    sweep: bool = False
    seed: int = 0
    seconds: float = SECONDS_EACH
    timeout: float = 120.0  # seconds that one call may take; an import or a compilation ten times as long
    profile: Path | None = None
    json: Path | None = None
    list: bool = False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    say(f"harness.py: {text}")
    raise SystemExit(USAGE)


class Judge:
    """Judges pair after pair. The processes of the baselines serve all of them."""

    def __init__(self, options: Options, ceilings: roofline.Ceilings, tell: Callable[[str], None] = say):
        self.options, self.ceilings, self.tell = options, ceilings, tell
        self.workers: dict[str, Worker] = {}  # by role
        # The candidate's clock is held against eager's.
        self.roles = () if options.profile else tuple(dict.fromkeys(["eager", *options.baselines]))
        self.by_ipc = options.device == "cuda" and self._worker("eager").has_ipc()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()

    def judge(self, pair: Pair, constants: dict | None = None) -> Iterator[Result]:
        """All records of one pair. Never raises for what a pair does wrong."""
        options = self.options
        if "new" in self.workers:
            self.workers.pop("new").kill()
        for dtype, level in itertools.product(options.dtype, options.precision):
            what = {"model": pair.name, "source_sha256": source.code_sha256(pair.new_path), "device": options.device}
            what |= {"dtype": dtype, "precision": level, "seed": options.seed, "constants": constants or {}}
            runs, notes = [Result(direction=way, **what) for way in options.directions], []
            try:
                source.set_precision(level)
                problem = Problem(pair.model_path, constants)
                batch = options.batch or (problem.benchmark_batch if options.device == "cuda" else problem.cpu_batch)
                for run in runs:
                    run.batch = batch
                told = f"{pair.name}: {dtype} {level}" + ("" if batch is None else f", batch {batch}")
                form = DTYPES[dtype], level, batch, options.seed
                case = check.Case(problem, options.device, self.by_ipc, *form, self.workers, notes)
                case.tell = lambda text: self.tell(f"{told}: {text}")
                self._judge(case, pair, runs)
            except RAISED as error:
                for run in runs:
                    run.reject(Rejected(f"the Model itself raised {source.last_line(error)}"))
            for run in runs:
                run.notes += [note for note in notes if note not in run.notes]
            source.set_precision("highest")
            yield from runs

    def _judge(self, case: check.Case, pair: Pair, runs: list[Result]) -> None:
        """Right, how fast, how far from the limit, by direction. The speed of a wrong answer is not measured."""
        right = []  # the directions that are, so far
        for role in self.roles:
            with contextlib.suppress(Rejected):  # it fails again where it is to be timed
                case.load(self._worker(role), pair.new_path if role == "cudagraph" else None)
        try:
            for run in runs:
                self._start(case, pair, runs)
                check.check(case, run.direction)
                self._profile(case, run) if self.options.profile else self._time(case, run)
                right.append(run)
        except Rejected as rejected:
            for run in runs[len(right) :]:  # what builds upon it is wrong too
                run.reject(rejected)
        try:
            if right:
                self._start(case, pair, runs)
                check.check(case, "after")
                for run in right:
                    run.set_errors(case.errors, case.dtype)
        except Rejected as rejected:
            for run in right:
                run.reject(rejected)

    def _worker(self, role: str) -> Worker:
        if not (role in self.workers and self.workers[role].alive()):
            self.workers[role] = Worker(role, self.options.device, self.options.timeout)
        return self.workers[role]

    def _start(self, case: check.Case, pair: Pair, runs: list[Result]) -> None:
        """A process for the candidate, where there is none or it has ended, and the module in it."""
        if case.model is None or not case.workers["new"].alive():
            case.tell(f"importing {pair.new_path.name}")
            self._worker("new")
            seconds = check.start(case, pair.new_path)
            for run in runs:
                run.import_seconds = round(seconds, 3)
                run.shapes = [list(x.shape) for x in case.inputs(0) if isinstance(x, torch.Tensor)]

    def _time(self, case: check.Case, run: Result) -> None:
        case.tell(f"timing {run.direction}: {', '.join(case.workers)}")
        clocks_before, measured = record.clocks(case.device), []
        for _ in range(3):  # again where time seems to be hidden, which a disturbance may look like
            measured.append(bench.measure(case, run.direction, self.options.seconds))
            check.seeds(case, run.direction, check.SEEDS)
            hidden, certain = bench.hidden_time(measured, case.device)
            if not hidden:
                break
        if hidden and certain:
            raise Rejected(hidden)
        if case.workers["new"].strays():
            raise Rejected("starts a process in a session of its own, which goes on while others are timed")
        run.interference = bench.interference(measured[-1]) + [hidden] * bool(hidden)
        if clocks_before:
            run.clocks = {"before": clocks_before, "after": record.clocks(case.device)}
            if held := run.clocks["after"]["throttle"]:
                run.interference.append(f"the GPU's clocks are held down: {held}")
        run.set_times(measured[-1], self.options.baselines)
        run.set_roof(self.ceilings, case.problem)

    def _profile(self, case: check.Case, run: Result) -> None:
        """Prints the kernels of a call by time; the trace is for https://ui.perfetto.dev."""
        ring = bench.Ring(case, run.direction)
        case.workers["new"].ask("ready", seconds=0.2, **ring.ready)
        self.options.profile.mkdir(parents=True, exist_ok=True)
        path = self.options.profile.resolve() / f"{run.model}_{run.direction}.json"
        table = case.workers["new"].ask("profile", path=str(path))["table"]
        print(f"\n{run.model} {run.direction}, ten calls; trace: {path}\n{table}", flush=True)


def shapes_of(pair: Pair, options: Options) -> list[dict]:
    """The module constants to replace, a run of the pair for each: none, or those of the file's sweep."""
    try:
        problem = Problem(pair.model_path)
    except RAISED:  # the run says what is wrong with the file
        return [{}]
    if options.batch and problem.benchmark_batch is None:
        refuse(f"{pair.name}: --batch has no effect: get_inputs takes none and reads no batch_size")
    if options.sweep and not problem.sweep:
        refuse(f"{pair.name}: no shapes to sweep: {pair.model_path.name} has no list of constants `sweep`")
    return problem.sweep if options.sweep else [{}]


def pairs_of(names: tuple[str, ...]) -> list[Pair]:
    if any(name.endswith(".py") for name in names):
        if len(names) != 2:
            refuse("files come in twos: MODEL.py NEW.py")
        if missing := [name for name in names if not Path(name).is_file()]:
            refuse(f"no file {missing[0]}")
        model, new = (Path(name).resolve() for name in names)
        return [Pair(model.stem, model, new)]
    pairs = source.discover(ROOT)
    if unknown := [name for name in names if name not in pairs]:
        refuse(f"unknown pair '{unknown[0]}': there are: {', '.join(pairs)}")
    if not pairs:
        refuse("no pair here: a pair is models/NAME.py and kernels/NAME.py")
    return [pairs[name] for name in dict.fromkeys(names or pairs)]


def parts(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


def parse(argv: list[str]) -> Options:
    layout, left_out = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS  # Options has the defaults
    parser = argparse.ArgumentParser("harness.py", None, __doc__, formatter_class=layout, argument_default=left_out)
    add = parser.add_argument
    add("names", nargs="*", default=[], metavar="NAME", help="pairs to run (all), or the two files of one pair")
    add("--list", action="store_true", help="name the pairs and stop")
    gpu = torch.cuda.is_available()
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="default: cuda if there is a GPU")
    add("--dtype", type=parts, metavar="LIST", help=f"comma separated, of {','.join(DTYPES)} (float32)")
    levels = "highest: strict float32 (default); high: TF32 allowed; comma separated"
    add("--precision", type=parts, metavar="LIST", help=levels)
    rivals = f"comma separated, of {','.join(BASELINES)} (eager,compile)"
    add("--baselines", type=parts, metavar="LIST", help=rivals)
    add("--backward", action="store_true", default=False, help="also with gradients recorded, and forward + backward")
    add("--batch", type=int, metavar="N", help="default: the file's batch_size, or cpu_batch_size on a CPU")
    add("--sweep", action="store_true", help="at the shapes listed as `sweep` in the Model's file, each for less time")
    add("--seed", type=int, metavar="N", help="of weights and inputs (0)")
    add("--timeout", type=float, metavar="S", help="seconds for a call; ten times that to build (120)")
    add("--profile", type=Path, metavar="FOLDER", help="time nothing: table and trace of the candidate's kernels")
    add("--json", type=Path, metavar="FILE", help="write the records")
    asked = vars(parser.parse_args(argv))
    for name, choices in (("dtype", DTYPES), ("precision", PRECISIONS), ("baselines", BASELINES)):
        if unknown := [part for part in asked.get(name, ()) if part not in choices]:
            parser.error(f"--{name}: unknown '{unknown[0]}': there are: {', '.join(choices)}")
    for name, least in (("batch", 1), ("seed", 0), ("timeout", 0.1)):
        if name in asked and not least <= asked[name] < 1 << 32:
            parser.error(f"--{name} {asked[name]} is not at least {least} and below {1 << 32}")
    if asked["device"] == "cuda" and not gpu:
        parser.error("--device cuda: PyTorch sees no GPU here")
    if "sweep" in asked and "batch" in asked:
        parser.error("--batch and --sweep: a sweep's shapes have batches of their own")
    if path := asked.get("json"):
        try:  # known before anything is measured
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
    asked["directions"] = DIRECTIONS if asked.pop("backward") else DIRECTIONS[:1]
    return Options(names=tuple(asked.pop("names")), seconds=SECONDS_EACH / (8 if "sweep" in asked else 1), **asked)


def main(argv: list[str]) -> int:
    warnings.filterwarnings("ignore")  # PyTorch's remarks about a Model's own code are not the harness's to repeat
    try:
        options = parse(argv)
        if options.list:
            print("\n".join(source.discover(ROOT)))
            return ALL_RIGHT
        shapes = [(pair, constants) for pair in pairs_of(options.names) for constants in shapes_of(pair, options)]
    except SystemExit as leaving:  # all has been said
        return leaving.code
    runs, device, ceilings = [], options.device, roofline.Ceilings(options.device, options.dtype)
    clocks_before = record.clocks(device)
    say(f"device: {record.device_name(device)}; measuring its copy bandwidth and matrix rate")
    ceilings.measure()
    table, judge = record.Table(options.baselines), Judge(options, ceilings)
    if device == "cuda" and not judge.by_ipc:
        say("no CUDA IPC between processes here: tensors go through the host's memory, outside the clock")
    try:
        for run in (run for pair, constants in shapes for run in judge.judge(pair, constants)):
            runs.append(run)
            table.row(run)
            if options.json:  # after every row: what is measured is not lost
                environment = record.environment(device, ceilings, ["harness.py", *argv], ROOT, clocks_before)
                records = {"runs": [asdict(run) for run in runs], "environment": environment}
                options.json.write_text(json.dumps(records, indent=1) + "\n")
    finally:
        judge.close()
    table.end()
    if any(run.status == BUILD for run in runs):
        return NOT_BUILT
    return ALL_RIGHT if all(run.ok for run in runs) else ANY_WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
