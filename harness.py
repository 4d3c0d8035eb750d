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
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from judge import bench, check, record, roofline
from judge.record import Result, tidy
from judge.source import (
    BUILD,
    DIRECTIONS,
    DTYPES,
    PRECISIONS,
    RAISED,
    Pair,
    Problem,
    code_sha256,
    discover,
    last_line,
    set_precision,
)
from judge.worker import Rejected, Worker, start_server

ROOT = Path(__file__).resolve().parent
ALL_RIGHT, ANY_WRONG, USAGE, NOT_BUILT = 0, 1, 2, 3
BASELINES = ("eager", "compile", "max-autotune", "cudagraph")
SECONDS_EACH = {"cuda": 1.0, "cpu": 1.0}


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
    seconds: float = 1.5  # of timing, for each contender in each direction
    timeout: float = 120.0  # seconds that one call may take; an import or a compilation ten times as long
    profile: Path | None = None
    json: Path | None = None
    list: bool = False


class UsageError(Exception):
    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- one pair


class Judge:
    """The worker processes, for as long as the harness runs."""

    def __init__(self, options: Options, ceilings: roofline.Ceilings, tell: Callable[[str], None] = say):
        self.options, self.ceilings, self._tell = options, ceilings, tell
        self.workers: dict[str, Worker] = {}  # by role; those of baselines serve pair after pair
        # The candidate's clock is held against eager's.
        self.roles = () if options.profile else tuple(dict.fromkeys(["eager", *options.baselines]))
        self.by_ipc = options.device == "cuda" and self._worker("eager").has_ipc()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()

    def judge(self, pair: Pair, constants: dict | None = None) -> Iterator[Result]:
        """All records of one pair. Never raises for what a pair does wrong."""
        options, problem, failed, self.pair = self.options, None, None, pair
        if "new" in self.workers:
            self.workers.pop("new").kill()
        try:
            problem = Problem(pair.model_path, constants)
        except RAISED as error:  # whatever a file does at import
            failed = Rejected(f"{pair.model_path.name} cannot be used: {last_line(error)}")
        if problem and options.batch and problem.benchmark_batch is None:
            raise UsageError(f"{pair.name}: --batch has no effect: get_inputs takes none and reads no batch_size")
        default = problem and (problem.benchmark_batch if options.device == "cuda" else problem.cpu_batch)
        batch = options.batch or default
        for dtype, level in itertools.product(options.dtype, options.precision):
            what = {"model": pair.name, "source_sha256": code_sha256(pair.new_path), "device": options.device}
            what |= {"dtype": dtype, "precision": level, "seed": options.seed, "batch": batch}
            runs = [Result(direction=way, constants=constants or {}, **what) for way in options.directions]
            self.case = check.Case(problem, options.device, self.by_ipc, DTYPES[dtype], level, batch, options.seed)
            try:
                if failed:
                    raise failed
                set_precision(level)
                self._judge({run.direction: run for run in runs})
            except RAISED as error:
                itself = Rejected(f"the Model itself raised {last_line(error)}")
                reject(runs, error if isinstance(error, Rejected) else itself)
            for run in runs:
                run.notes += [note for note in self.case.notes if note not in run.notes]
            set_precision("highest")
            yield from runs

    def tell(self, text: str) -> None:
        case = self.case
        batch = "" if case.batch is None else f", batch {case.batch}"
        self._tell(f"{self.pair.name}: {str(case.dtype).removeprefix('torch.')} {case.precision}{batch}: {text}")

    def _judge(self, runs: dict[str, Result]) -> None:
        """Right, how fast, how far from the limit, by direction. The speed of a wrong answer is not measured."""
        right = []  # the directions that are, so far
        for role in self.roles:
            self._load_rival(role)
        for direction in (*DIRECTIONS, "after"):
            run = runs.get(direction)
            if not (run and run.ok or direction == "forward" or direction == "after" and right):
                continue
            try:
                self._begin(runs)
                must_be_empty(check.check(self.case, direction, self.tell))
                if run and self.options.profile:
                    self._profile(direction)
                elif run:
                    self._time(run)
                right += [run] if run else []
            except Rejected as rejected:  # what builds upon it is wrong too
                reject([run for run in runs.values() if run not in right], rejected)
                if direction == "after":
                    reject(right, rejected)
                    right = []
                if direction == "forward":
                    return
        for run in right:
            run.set_errors({name: errors.as_dict(self.case.dtype) for name, errors in self.case.errors.items()})

    def _worker(self, role: str) -> Worker:
        if not (role in self.workers and self.workers[role].alive()):
            self.workers[role] = Worker(role, self.options.device, self.options.timeout)
        return self.workers[role]

    def _begin(self, runs: dict[str, Result]) -> None:
        """A process for the candidate, where there is none or it has ended, and the module in it."""
        case = self.case
        if case.worker and case.worker.alive():
            return
        loaded = "new" in self.workers and self.workers["new"].alive()
        case.worker = self._worker("new")
        if not loaded:
            self.tell(f"importing {self.pair.new_path.name}")
            reply = case.worker.ask("load", path=self.pair.new_path, name="ModelNew", constants={})
            case.worker.import_seconds = round(reply["seconds"], 3)
        must_be_empty(check.start(case))
        for run in runs.values():
            run.import_seconds = case.worker.import_seconds
            run.shapes = [list(x.shape) for x in case.inputs(0) if isinstance(x, torch.Tensor)]

    def _time(self, run: Result) -> None:
        case, rivals = self.case, {}
        for role in self.roles:
            try:
                if not self.workers[role].alive():
                    self._load_rival(role)
                check.give_weights(case, worker=self.workers[role])
                rivals[role] = self.workers[role]
            except Rejected as failed:
                if role == "eager":
                    raise Rejected(f"the Model itself {failed}") from failed
                case.note(f"no {role} baseline: {failed}")
        contenders = {"new": case.worker, **rivals}
        self.tell(f"timing {run.direction}: {', '.join(contenders)}")
        clocks_before, measured = record.clocks(case.device), []
        for _ in range(3):  # again where time seems to be hidden, which a disturbance may look like
            check.give_weights(case)
            ring = check.Ring(case, run.direction)
            measured.append(bench.measure(contenders, ring, case, self.options.seconds))
            must_be_empty(ring.reasons or check.seeds(case, run.direction, self.tell, check.SEEDS))
            hidden, certain = bench.hidden_time(measured, case.device)
            if not hidden:
                break
        if hidden and certain:
            raise Rejected(hidden)
        if case.worker.strays():
            raise Rejected("starts a process in a session of its own, which goes on while others are timed")
        run.interference = bench.interference(measured[-1]) + ([hidden] if hidden else [])
        if clocks_before:
            run.clocks = {"before": clocks_before, "after": record.clocks(case.device)}
            if held := run.clocks["after"]["throttle"]:
                run.interference.append(f"the GPU's clocks are held down: {held}")
        run.set_times(measured[-1], self.options.baselines)
        self._set_roof(run)

    def _load_rival(self, role: str) -> None:
        """Has its process load the Model, or for CUDA graphs the candidate. Nobody waits for that here."""
        path, name, constants = self.pair.model_path, "Model", self.case.problem.constants
        if role == "cudagraph":
            path, name, constants = self.pair.new_path, "ModelNew", {}
        made = check.make_asked(self.case)
        self._worker(role).send("load", path=path, name=name, constants=constants, made=made)

    def _set_roof(self, run: Result) -> None:
        case = self.case
        try:
            work = roofline.count_work(case.problem, case.batch, case.dtype, run.direction == "forward_backward")
        except Exception as error:
            run.notes.append(f"no floor: the Model does not run on the meta device: {last_line(error)}")
            return
        for _ in range(2):
            floor = self.ceilings.floor_ms(work, run.dtype, run.precision)
            share = floor / run.ms["new"]
            if share <= 1:
                break
            self.ceilings.measure()
        cached = work.bytes <= 2 * roofline.cache_bytes(run.device)
        if share > roofline.IMPOSSIBLE[run.device] and not cached:
            least = f"what this machine was measured to reach allows {floor:.4g} ms or more"
            raise Rejected(f"takes {run.ms['new']:.4g} ms, which is not possible: {least}")
        run.roof = {"bytes": work.bytes, "flops": work.flops, "floor_ms": tidy(floor), "percent": tidy(100 * share)}
        if share > 1:
            run.notes.append(record.ABOVE_FLOOR)

    def _profile(self, direction: str) -> None:
        """Prints the kernels of a call by time; the trace is for https://ui.perfetto.dev."""
        ring = check.Ring(self.case, direction)
        ring.renew(len(ring.slots))
        self.case.worker.ask("ready", seconds=0.2, **ring.ready)
        self.options.profile.mkdir(parents=True, exist_ok=True)
        path = self.options.profile.resolve() / f"{self.pair.name}_{direction}.json"
        rows = sorted(self.case.worker.ask("profile", path=str(path))["rows"], key=lambda row: -row[2])
        total = sum(us for _, _, us in rows)
        print(f"\n{self.pair.name} {direction}: {total:.1f} us a call; trace: {path}")
        for name, count, us in rows[:20]:
            print(f"{us:10.1f} us {100 * us / total:5.1f}%  {count:4.1f} x  {name[:100]}", flush=True)


def must_be_empty(reasons: list[str]) -> None:
    if reasons:
        raise Rejected(*reasons)


def reject(runs: list[Result], rejected: Rejected) -> None:
    for run in runs:
        run.reject(rejected.args, rejected.kind)


# ---- all of it


def run_all(pairs: list[Pair], options: Options, argv: list[str]) -> list[Result]:
    ceilings, runs = roofline.Ceilings(options.device, options.dtype), []
    shapes = [(pair, constants) for pair in pairs for constants in shapes_of(pair, options.sweep)]
    clocks_before = record.clocks(options.device)
    start_server()
    say(f"device: {record.device_name(options.device)}; measuring its copy bandwidth and matrix rate")
    ceilings.measure()
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings.matrix_rate.items())
    say(f"copy {ceilings.copy_bandwidth / 1e9:.4g} GB/s, matrix {rates}")
    table, judge = record.Table(options.baselines), Judge(options, ceilings)
    if options.device == "cuda" and not judge.by_ipc:
        say("no CUDA IPC between processes here: tensors go through the host's memory, outside the clock")
    try:
        for pair, constants in shapes:
            for run in judge.judge(pair, constants):
                runs.append(run)
                table.row(run)
                if options.json:  # after every row: what is measured is not lost
                    command = ["harness.py", *argv]
                    surroundings = record.environment(options.device, ceilings, command, ROOT, clocks_before)
                    record.save(options.json, runs, surroundings)
    finally:
        judge.close()
    table.end()
    return runs


def shapes_of(pair: Pair, sweep: bool) -> list[dict]:
    """The module constants to replace, a run of the pair for each: none, or those of the file's sweep."""
    try:
        shapes = Problem(pair.model_path).sweep if sweep else [{}]
    except RAISED:  # the run says what is wrong with the file
        return [{}]
    if not shapes:
        raise UsageError(f"{pair.name}: no shapes to sweep: {pair.model_path.name} has no list of constants `sweep`")
    return shapes


def pairs_of(names: tuple[str, ...]) -> list[Pair]:
    if any(name.endswith(".py") for name in names):
        if len(names) != 2:
            raise UsageError("files come in twos: MODEL.py NEW.py")
        if missing := [name for name in names if not Path(name).is_file()]:
            raise UsageError(f"no file {missing[0]}")
        model, new = (Path(name).resolve() for name in names)
        return [Pair(model.stem, model, new)]
    pairs = discover(ROOT)
    for name in names:
        if name not in pairs:
            raise UsageError(f"unknown pair '{name}': there are: {', '.join(pairs)}")
    if not pairs:
        raise UsageError("no pair here: a pair is models/NAME.py and kernels/NAME.py")
    return [pairs[name] for name in dict.fromkeys(names or pairs)]


# ---- the command line


def list_of(choices) -> Callable[[str], tuple[str, ...]]:
    def parse(value: str) -> tuple[str, ...]:
        parts = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
        if unknown := [part for part in parts if part not in choices]:
            raise argparse.ArgumentTypeError(f"unknown '{unknown[0]}': there are: {', '.join(choices)}")
        return parts

    return parse


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], int | float]:
    def parse(value: str) -> int | float:
        if not least <= kind(value) < most:
            raise argparse.ArgumentTypeError(f"{value} is not at least {least:g} and below {most:g}")
        return kind(value)

    return parse


def parse(argv: list[str]) -> Options:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="harness.py", description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="pairs to run (all), or the two files of one pair")
    add("--list", action="store_true", help="name the pairs and stop")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    for name, choices, default, said in (
        ("dtype", DTYPES, ("float32",), "float32"),
        ("precision", PRECISIONS, ("highest",), "highest: strict float32; high: TF32 allowed"),
        ("baselines", BASELINES, ("eager", "compile"), "eager,compile"),
    ):
        said = f"comma separated, of {','.join(choices)} ({said})"
        add(f"--{name}", type=list_of(choices), default=default, metavar="LIST", help=said)
    add("--backward", action="store_true", help="also with gradients recorded, and forward + backward")
    add("--batch", type=number(int, 1), metavar="N", help="default: the file's batch_size, or cpu_batch_size on a CPU")
    add("--sweep", action="store_true", help="at the shapes listed as `sweep` in the Model's file, each for less time")
    add("--seed", type=number(int, 0, 2**32), default=0, metavar="N", help="of weights and inputs (0)")
    add(
        "--timeout", type=number(float, 0.1), default=120, metavar="S", help="for a call; ten times that to build (120)"
    )
    add("--profile", type=Path, metavar="FOLDER", help="time nothing: table and trace of the candidate's kernels")
    add("--json", type=Path, metavar="FILE", help="write the records")
    asked = vars(parser.parse_args(argv))
    device = asked.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    if asked["sweep"] and asked["batch"]:
        parser.error("--batch and --sweep: a sweep's shapes have batches of their own")
    if path := asked["json"]:
        try:  # known before anything is measured
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
    asked["directions"] = DIRECTIONS if asked.pop("backward") else DIRECTIONS[:1]
    asked["seconds"] = SECONDS_EACH[device] / (8 if asked["sweep"] else 1)
    asked["names"] = tuple(asked["names"])
    return Options(device=device, **asked)


def main(argv: list[str]) -> int:
    warnings.filterwarnings("ignore")  # PyTorch's remarks about a Model's own code are not the harness's to repeat
    try:
        options = parse(argv)
        if options.list:
            print("\n".join(discover(ROOT)))
            return ALL_RIGHT
        runs = run_all(pairs_of(options.names), options, argv)
    except SystemExit as leaving:  # argparse has said all
        return leaving.code
    except UsageError as error:
        say(f"harness.py: {error}")
        return USAGE
    if any(run.status == BUILD for run in runs):
        return NOT_BUILT
    return ALL_RIGHT if all(run.ok for run in runs) else ANY_WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
