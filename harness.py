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
import difflib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from judge import bench, check, record, roofline
from judge.record import BUILD, WRONG, Result, tidy
from judge.source import (
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
from judge.worker import Arena, Rejected, Worker

ROOT = Path(__file__).resolve().parent
ALL_RIGHT, ANY_WRONG, USAGE, NOT_BUILT = 0, 1, 2, 3
BASELINES = ("eager", "compile", "max-autotune", "cudagraph")
SECONDS_EACH = {"cuda": 2.0, "cpu": 1.5}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    names: tuple[str, ...] = ()
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    precisions: tuple[str, ...] = ("highest",)
    directions: tuple[str, ...] = ("forward",)
    baselines: tuple[str, ...] = ("eager", "compile")
    batch: int | None = None
    sweep: bool = False
    seed: int = 0
    seconds: float = 1.5  # of timing, for each contender in each direction
    timeout: float = 120.0  # seconds that one call may take; an import or a compilation ten times as long
    profile: Path | None = None
    json: Path | None = None
    markdown: bool = False
    earlier: tuple[Path, ...] = ()


class UsageError(Exception):
    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- one pair


class Judge:
    """The worker processes and the memory they share, for as long as the harness runs."""

    def __init__(self, options: Options, ceilings: roofline.Ceilings, tell: Callable[[str], None] = say):
        self.options, self.ceilings, self.tell = options, ceilings, tell
        self.arena = Arena(options.device)
        self.workers: dict[str, Worker] = {}  # by role; those of baselines serve pair after pair

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()

    def judge(self, pair: Pair, constants: dict | None = None) -> Iterator[Result]:
        """All records of one pair. Never raises for what a pair does wrong."""
        options, problem, batch, failure = self.options, None, None, ""
        if "new" in self.workers:
            self.workers.pop("new").kill()
        try:
            problem = Problem(pair.model_path, constants)
            batch = options.batch or (problem.benchmark_batch if options.device == "cuda" else problem.cpu_batch)
        except RAISED as error:  # whatever a file does at import
            failure = f"{pair.model_path.name} cannot be used: {last_line(error)}"
        if problem and options.batch and problem.benchmark_batch is None:
            raise UsageError(f"{pair.name}: --batch has no effect: get_inputs takes no batch size, reads no batch_size")
        what = {"model": pair.name, "source_sha256": code_sha256(pair.new_path), "device": options.device}
        what |= {"seed": options.seed, "batch": batch, "constants": constants or {}}
        for dtype, level in itertools.product(options.dtypes, options.precisions):
            new = {"dtype": dtype, "precision": level, **what}
            runs = {direction: Result(direction=direction, **new) for direction in options.directions}
            case = check.Case(problem, None, self.arena, DTYPES[dtype], level, batch, options.seed)
            try:
                if failure:
                    raise Rejected(failure)
                set_precision(level)
                self._judge_case(pair, case, runs)
            except Rejected as rejected:
                reject(runs.values(), rejected)
            except RAISED as error:
                reject(runs.values(), Rejected(f"the Model itself raised {last_line(error)}"))
            for run in runs.values():
                run.notes += [note for note in case.notes if note not in run.notes]
            set_precision("highest")
            yield from runs.values()

    def _judge_case(self, pair: Pair, case: check.Case, runs: dict[str, Result]) -> None:
        """Right, how fast, how far from the limit, by direction. The speed of a wrong answer is not measured."""

        def tell(text: str) -> None:
            batch = "" if case.batch is None else f", batch {case.batch}"
            self.tell(f"{pair.name}: {str(case.dtype).removeprefix('torch.')} {case.precision}{batch}: {text}")

        right = []  # the directions that are, so far
        for direction in DIRECTIONS:
            if direction != "forward" and direction not in runs:
                continue
            try:
                self._begin(pair, case, runs, tell)
                must_be_empty(check.check(case, direction, tell))
                if direction in runs and self.options.profile:
                    self._profile(pair, case, direction)
                elif direction in runs:
                    self._time(runs[direction], pair, case, tell)
                right += [runs[direction]] if direction in runs else []
            except Rejected as rejected:  # what builds upon it is wrong too
                reject([run for run in runs.values() if run not in right], rejected)
                break
        try:
            if right:
                self._begin(pair, case, runs, tell)
                must_be_empty(check.check(case, "after", tell))
        except Rejected as rejected:
            reject(right, rejected)
        for run in right:
            run.set_errors({name: errors.as_dict(case.dtype) for name, errors in case.errors.items()})

    def _begin(self, pair: Pair, case: check.Case, runs: dict[str, Result], tell: Callable[[str], None]) -> None:
        """A process for the candidate, where there is none or it has ended, and the module in it."""
        if case.worker and case.worker.alive():
            return
        case.worker = self.workers.get("new")
        if not (case.worker and case.worker.alive()):
            tell(f"importing {pair.new_path.name}")
            case.worker = self.workers["new"] = Worker("new", self.arena, self.options.timeout)
            loaded = case.worker.ask("load", path=pair.new_path, name="ModelNew", constants={})
            case.worker.import_seconds = round(loaded["seconds"], 3)
            must_be_empty(loaded["changed"])
        must_be_empty(check.start(case))
        for run in runs.values():
            run.import_seconds = case.worker.import_seconds
            run.shapes = [list(x.shape) for x in case.draw(0)() if isinstance(x, torch.Tensor)]

    def _time(self, run: Result, pair: Pair, case: check.Case, tell: Callable[[str], None]) -> None:
        rivals = {}
        for role in dict.fromkeys(["eager", *self.options.baselines]):  # the candidate's clock is held against eager's
            try:
                rivals[role] = self._rival(role, pair, case)
            except Rejected as failed:
                if role == "eager":
                    raise Rejected(f"the Model itself {failed}") from failed
                case.note(f"no {role} baseline: {failed}")
        contenders = {"new": case.worker, **rivals}
        tell(f"timing {run.direction}: {', '.join(contenders)}")
        clocks_before, measured = record.clocks(case.device), []
        for _ in range(4):  # again where time seems to be hidden, which a disturbance may look like
            check.give_weights(case)
            ring = check.Ring(case, run.direction)
            measured.append(bench.measure(contenders, ring, case, self.options.seconds))
            must_be_empty(ring.reasons or check.seeds(case, run.direction, tell, check.SEEDS))
            hidden, certain = bench.hidden_time(measured, case.device)
            if not hidden:
                break
        if hidden and certain:
            raise Rejected(hidden)
        if case.worker.strays():
            raise Rejected("starts a process in a session of its own, which goes on while others are timed")
        samples = measured[-1]
        run.interference = bench.interference(samples) + ([hidden] if hidden else [])
        if clocks_before:
            run.clocks = {"before": clocks_before, "after": record.clocks(case.device)}
            if held := run.clocks["after"]["throttle"]:
                run.interference.append(f"the GPU's clocks are held down: {held}")
        run.set_times(samples, self.options.baselines)
        self._set_roof(run, case)

    def _rival(self, role: str, pair: Pair, case: check.Case) -> Worker:
        """The Model, or the candidate in a CUDA graph, in a process of its own."""
        if not (role in self.workers and self.workers[role].alive()):
            self.workers[role] = Worker(role, self.arena, self.options.timeout)
        worker, dtype = self.workers[role], str(case.dtype).removeprefix("torch.")
        path, name = (pair.new_path, "ModelNew") if role == "cudagraph" else (pair.model_path, "Model")
        worker.ask("load", path=path, name=name, constants=case.problem.constants if name == "Model" else {})
        arguments = case.problem.arguments(case.seed)
        worker.ask("make", arguments=arguments, level=case.precision, dtype=dtype, seed=case.seed)
        check.give_weights(case, worker=worker)
        return worker

    def _set_roof(self, run: Result, case: check.Case) -> None:
        backward = run.direction == "forward_backward"
        try:
            work = roofline.count_work(case.problem, case.batch, case.dtype, backward)
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
            run.notes.append("above 100% of the floor, whose bandwidth is that of a copy")

    def _profile(self, pair: Pair, case: check.Case, direction: str) -> None:
        """Prints the kernels of a call by time; the trace is for https://ui.perfetto.dev."""
        ring = check.Ring(case, direction)
        ring.renew(len(ring.slots))
        case.worker.ask("ready", seconds=0.2, **ring.ready)
        self.options.profile.mkdir(parents=True, exist_ok=True)
        path = self.options.profile / f"{pair.name}_{direction}.json"
        rows = sorted(case.worker.ask("profile", path=str(path))["rows"], key=lambda row: -row[2])
        total = sum(us for _, _, us in rows)
        print(f"\n{pair.name} {direction}: {total:.1f} us a call; trace: {path}")
        for name, count, us in rows[:20]:
            print(f"{us:10.1f} us {100 * us / total:5.1f}%  {count:4.1f} x  {name[:100]}", flush=True)


def must_be_empty(reasons: list[str]) -> None:
    if reasons:
        raise Rejected(*reasons)


def reject(runs, rejected: Rejected) -> None:
    for run in runs:
        run.reject(list(rejected.args), BUILD if rejected.kind == BUILD else WRONG)


# ---- all of it


def run_all(pairs: list[Pair], options: Options, argv: list[str]) -> list[Result]:
    ceilings, runs = roofline.Ceilings(options.device, options.dtypes), []
    clocks_before = record.clocks(options.device)
    Worker.start_server()
    say(f"device: {record.device_name(options.device)}; measuring its copy bandwidth and matrix rate")
    ceilings.measure()
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings.matrix_rate.items())
    say(f"copy {ceilings.copy_bandwidth / 1e9:.4g} GB/s, matrix {rates}")
    table = record.Table(options.baselines, options.markdown)
    judge = Judge(options, ceilings)
    if options.device == "cuda" and not judge.arena.on_gpu:
        say("no CUDA IPC between processes here: tensors go through the host's memory, outside the clock")
    try:
        shapes = [(pair, constants) for pair in pairs for constants in shapes_of(pair, options.sweep)]
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
    if not sweep:
        return [{}]
    try:
        shapes = Problem(pair.model_path).sweep
    except RAISED:  # the run says what is wrong with the file
        return [{}]
    if not shapes:
        raise UsageError(f"{pair.name}: no shapes to sweep: {pair.model_path.name} has no list of constants `sweep`")
    return shapes


def pairs_of(names: tuple[str, ...]) -> list[Pair]:
    if any(name.endswith(".py") for name in names):
        if len(names) != 2:
            raise UsageError("files come in twos: MODEL.py NEW.py")
        for path in map(Path, names):
            if not path.is_file():
                raise UsageError(f"no file {path}")
        model, new = map(Path, names)
        return [Pair(model.stem, model.resolve(), new.resolve())]
    pairs = discover(ROOT)
    if not pairs:
        raise UsageError("no pair here: a pair is models/NAME.py and kernels/NAME.py")
    return [pairs[one_of(name, list(pairs), "pair")] for name in dict.fromkeys(names)] or list(pairs.values())


# ---- the command line


def one_of(value: str, choices, what: str) -> str:
    if value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(choices) or 'none'}"
    raise UsageError(f"unknown {what} '{value}': {hint}")


def list_of(value: str, choices, what: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one_of(part.strip(), choices, what) for part in value.split(",")))


def parse(argv: list[str]) -> tuple[Options, bool]:
    """The options, and whether only the pairs' names are asked for."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="harness.py", description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="pairs to run (all), or the two files of one pair")
    add("--list", action="store_true", help="name the pairs and stop")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--dtype", default="float32", metavar="LIST", help=f"comma separated: {','.join(DTYPES)} (default float32)")
    add("--precision", default="highest", metavar="LIST", help="highest: strict float32 (default); high: TF32; or both")
    add("--backward", action="store_true", help="also with gradients recorded, and forward + backward")
    add("--batch", type=int, metavar="N", help="default: the file's batch_size on a GPU, cpu_batch_size on a CPU")
    add("--sweep", action="store_true", help="at the shapes listed as `sweep` in the Model's file, each for less time")
    add("--baselines", default="eager,compile", metavar="LIST", help=f"of {','.join(BASELINES)} (eager,compile)")
    add("--seed", type=int, default=0, metavar="N", help="of weights and inputs (default 0)")
    add("--timeout", type=float, default=120, metavar="S", help="seconds for a call, ten times that for a build (120)")
    add("--profile", type=Path, metavar="FOLDER", help="time nothing: table and trace of the candidate's kernels")
    add("--json", type=Path, metavar="FILE", help="write the records")
    add("--markdown", action="store_true", help="print the table as GitHub markdown")
    add("--from", type=Path, action="append", dest="earlier", metavar="FILE", help="print these records, run nothing")
    asked = vars(parser.parse_args(argv))
    device = asked.pop("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    only_list, batch, path = asked.pop("list"), asked["batch"], asked["json"]
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no GPU here")
    if batch is not None and batch < 1:
        raise UsageError("--batch must be at least 1")
    if asked["sweep"] and batch:
        raise UsageError("--batch and --sweep: a sweep's shapes have batches of their own")
    if not 0 <= asked["seed"] < 1 << 32:
        raise UsageError("--seed must be at least 0 and below 2^32")
    if asked["timeout"] <= 0:
        raise UsageError("--timeout must be above 0")
    if path:
        try:  # known before anything is measured
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    asked["dtypes"] = list_of(asked.pop("dtype"), DTYPES, "dtype")
    asked["precisions"] = list_of(asked.pop("precision"), PRECISIONS, "precision")
    asked["baselines"] = list_of(asked.pop("baselines"), BASELINES, "baseline")
    asked["directions"] = DIRECTIONS if asked.pop("backward") else DIRECTIONS[:1]
    asked["seconds"] = SECONDS_EACH[device] / (8 if asked["sweep"] else 1)
    asked["names"], asked["earlier"] = tuple(asked["names"]), tuple(asked["earlier"] or ())
    return Options(device=device, **asked), only_list


def earlier_runs(options: Options) -> list[Result]:
    """Prints the table of records that were made before."""
    try:
        runs = [run for path in options.earlier for run in record.read(path)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--from takes records of the harness's: {last_line(error)}") from error
    table = record.Table({name for run in runs for name in run.ms}, options.markdown)
    for run in runs:
        table.row(run)
    table.end()
    return runs


def main(argv: list[str]) -> int:
    warnings.filterwarnings("ignore")  # PyTorch's remarks about a Model's own code are not the harness's to repeat
    try:
        options, only_list = parse(argv)
        if only_list:
            print("\n".join(discover(ROOT)))
            return ALL_RIGHT
        runs = earlier_runs(options) if options.earlier else run_all(pairs_of(options.names), options, argv)
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
