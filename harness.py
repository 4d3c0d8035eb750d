"""Checks that a ModelNew is right and measures how fast it is.

    python harness.py                    every pair of models/ and kernels/, on the best device
    python harness.py instance_norm      one pair, or several
    python harness.py hopper/NAME        the file of kernels/hopper, for compute capability 9.0
    python harness.py MODEL.py NEW.py    any two files in KernelBench's format

For each candidate, direction and dtype a block is printed: verdict, times, errors, reasons; in the
end a table of all. On a terminal the last line says what is being done.
wrong: wrong numbers, shapes or dtypes, an error, inputs written, time hidden or impossible, a
crash, a hang. right: the numbers are right and timed, but it is no drop-in, for the reasons given.
drop-in: right, and it behaves as the Model does in all else that the judge asks. build failed: the
file with ModelNew did not build. not judged: the Model itself fails, or cannot be compared.
Exit codes: 0 if all are what --require asks for (default: drop-in; right when you give two files),
1 if not, 2 usage, 3 if one did not build, 4 if the judge itself failed.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import warnings


def stopped(kind, error, trace) -> None:
    """Ctrl-C ends in one line, also while torch is still being loaded; so does who reads a part of the output only."""
    if kind is BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is printed when Python ends
    if kind in (KeyboardInterrupt, BrokenPipeError):
        print("\r\x1b[K" * sys.stderr.isatty() + "harness.py: stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    sys.excepthook = stopped
# PyTorch's remarks, about a missing NumPy or a Model's own code, are not the harness's to repeat.
os.environ.setdefault("PYTHONWARNINGS", "ignore")
warnings.filterwarnings("ignore")
if __name__ == "__main__":  # contenders are forked from a server; it loads what judge/worker.py asks for, meanwhile
    multiprocessing.set_forkserver_preload(["torch", "torch.fx.experimental.symbolic_shapes", "judge.worker"])
    # The server inherits that Ctrl-C is blocked: only this process is to tell of it, also of one that comes meanwhile.
    # (The tracker comes first, since it unblocks Ctrl-C when it has started.) It stays blocked while torch is loaded: a
    # library that is stopped in its import may raise an error of its own.
    multiprocessing.resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    multiprocessing.forkserver.ensure_running()
# Read when torch is loaded: the judge's own threads sleep while they wait, and leave the cores to the contender whose
# turn it is. A contender's wait as they do for its user: where they sleep, they begin a loop one after the other, which
# hides a race.
passive = "OMP_WAIT_POLICY" not in os.environ
if passive:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import argparse
import contextlib
import difflib
import itertools
import json
import resource
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

if passive:
    del os.environ["OMP_WAIT_POLICY"]

from judge import bench, check, gates, record, roofline, show, source
from judge.answers import bytes_of
from judge.record import Result
from judge.source import BUILD, DIRECTIONS, DTYPES, PRECISIONS, RAISED, Pair, Problem
from judge.worker import Rejected, Worker, as_rejected

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

ROOT = Path(__file__).resolve().parent
ALL_RIGHT, ANY_WRONG, NOT_BUILT, CRASHED = 0, 1, 3, 4  # 2, usage, is argparse's
CPU_BYTES = 32 << 20  # of the inputs, where the Model's file does not say what a CPU should take
Names = tuple[str, ...]
BASELINES = ("eager", "compile")
REQUIRED = (record.RIGHT, record.DROP_IN)
BACKWARD = {"flag": "--backward", "dest": "directions", "action": "store_const", "const": DIRECTIONS}


def option(default, told: str, **how):
    """A field of Options that the command line sets; `how` is for argparse."""
    return field(default=default, metadata={"help": told, **how})


def parts(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


@dataclass(frozen=True)
class Options:
    """What is asked for, and how the command line asks."""

    names: Names = option((), "pairs to run (all), or the two files of one pair", flag="names", nargs="*")
    device: str = option("cpu", "default: cuda if there is a GPU", choices=("cuda", "cpu"))
    dtype: Names = option(("float32",), f"comma separated, of {','.join(DTYPES)} (float32)", type=parts)
    precision: Names = option(("highest",), "comma separated: highest (strict float32), high (TF32)", type=parts)
    baselines: Names = option(BASELINES, f"comma separated, of {','.join(BASELINES)} (both)", type=parts)
    directions: Names = option(DIRECTIONS[:1], "also with gradients recorded, and forward + backward", **BACKWARD)
    batch: int | None = option(None, "default: the file's batch_size; on a CPU on_cpu's, or a smaller one", type=int)
    require: str = option("right", "default: drop-in; right when you give two files", choices=REQUIRED)
    sweep: bool = option(False, "at the shapes of the Model file's list `sweep`, for less time", action="store_true")
    seed: int = option(0, "of weights and inputs (0)", type=int)
    seconds: float = option(1.0, "of timing, of each contender in each direction (1); in a sweep an eighth", type=float)
    timeout: float = option(120.0, "seconds for a request; ten times that to build and warm up (120)", type=float)
    profile: Path | None = option(None, "a folder: time nothing; table and trace of the candidate's kernels", type=Path)
    json: Path | None = option(None, "a file for the records", type=Path)


class Judge:
    """Judges pair after pair."""

    def __init__(self, options: Options, ceilings: roofline.Ceilings, tell: Callable[[str], None]):
        self.options, self.ceilings, self.tell = options, ceilings, tell
        self.workers: dict[str, Worker] = {}  # by role
        self.stdout = sys.stdout
        # The candidate's clock is held against eager's.
        self.baselines = () if options.profile else tuple(dict.fromkeys(["eager", *options.baselines]))
        if "compile" in self.baselines:  # it begins to load the compiler
            self._worker("compile")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()

    def judge(self, pair: Pair) -> Iterator[Result]:
        """All records of one pair. Never raises for what a pair does wrong."""
        options, sha256, of_kernels, shapes, notes, texts = self.options, "", "", [{}], [], {}
        with contextlib.suppress(*RAISED):  # the run says what is wrong with the files
            texts = {path: path.read_bytes() for path in (pair.new_path, pair.model_path)}
            sha256, notes = source.code_sha256(pair.new_path), record.remarks(pair.new_path, options.device)
            of_kernels = source.code_sha256(pair.new_path, source.kernels_of)
            with contextlib.redirect_stdout(sys.stderr):  # what the Model prints is no part of the table
                problem = Problem(pair.model_path, None, texts[pair.model_path])
            if options.sweep and not problem.sweep:
                notes.append(f"--sweep has no effect: {pair.model_path.name} has no list `sweep`")
            shapes = options.sweep and problem.sweep or [problem.on_cpu if options.device == "cpu" else {}]
        for constants, dtype, level in itertools.product(shapes, options.dtype, options.precision):
            what = pair.name, sha256, options.device, dtype, level, options.seed, constants, of_kernels
            runs, batch = [], options.batch
            while not runs:
                with contextlib.redirect_stdout(sys.stderr):
                    runs, batch = self._judge(pair, what, texts, batch)
            for run in runs:
                run.notes = notes + run.notes
                yield run

    def _judge(self, pair: Pair, what: tuple, texts: dict, batch: int | None) -> tuple[list[Result], int | None]:
        """A record for each direction; none, and a smaller batch, where the GPU's memory is too small for this one."""
        runs = [Result(direction, *what) for direction in self.options.directions]
        try:
            case = self._case(pair, runs[0], texts, batch)
        except Rejected as error:
            for run in runs:
                run.reject(error)
            return runs, batch
        if batch and batch < (self.options.batch or case.problem.batch):
            case.notes.append(f"batch {batch}: at a larger one all contenders' answers do not fit the GPU's memory")
        try:
            seconds = self._stages(case, pair, runs)
        except torch.OutOfMemoryError:
            return [], case.batch // 2
        is_halved = batch is None and (case.batch or 0) < (case.problem.batch or 0)
        if is_halved and all("the Model itself raised" in "".join(run.reasons) for run in runs):
            return [], case.problem.batch  # other sizes in its file may be made from this one
        for run in runs:
            run.batch, run.shapes, run.import_seconds = case.batch, case.shapes, seconds
            run.notes += dict.fromkeys(case.notes)  # each once
        return runs, batch

    def _case(self, pair: Pair, run: Result, texts: dict, batch: int | None) -> check.Case:
        with check.of_the_model(run.precision):
            problem = Problem(pair.model_path, run.constants, texts.get(pair.model_path))
        chosen = problem.batch and (batch or problem.batch)  # None where a file does not let it be chosen
        is_for_cpus = problem.on_cpu and run.constants == problem.on_cpu
        if chosen and run.device == "cpu" and not (batch or is_for_cpus):
            with check.of_the_model():
                try:
                    nbytes = bytes_of(problem.inputs(chosen, "meta", torch.float32, 0))
                except Exception:  # it reads values, say
                    nbytes = bytes_of(problem.inputs(chosen, "cpu", torch.float32, 0))
            chosen = check.smaller(chosen, nbytes, CPU_BYTES)
        if chosen:
            problem.choose(chosen)
        form = DTYPES[run.dtype], run.precision, chosen, run.seed
        case = check.Case(problem, run.device, *form, self.workers, texts)
        precision = " with TF32" * (run.precision == "high")
        case.tell = lambda text: self.tell(f"{pair.name}, {run.dtype}{precision}: {text}")
        if not chosen:
            effect = "--batch has no effect" if batch else "no other batch was asked"
            case.notes.append(f"{effect}: the Model's file has no batch_size")
        if chosen and chosen < (batch or problem.batch):
            said = f"batch_size {chosen} instead of {problem.batch}, since the inputs are large for a CPU"
            case.notes.append(f"{said}; a dict `on_cpu` in the Model's file chooses other sizes")
        return case

    def _stages(self, case: check.Case, pair: Pair, runs: list[Result]) -> float | None:
        """Direction by direction the checks and the timing, and then what is asked after the timing. What builds upon a
        wrong direction is wrong, too, and the speed of what is wrong is not measured. The seconds of the import.

        Raises torch.OutOfMemoryError where a smaller batch may fit.
        """
        directions, seconds = self.options.directions, None
        measure = self._profile if self.options.profile else self._time
        stages = [(direction, runs[i:], False) for i, direction in enumerate(directions)]
        backward = [run for run in runs if run.direction == DIRECTIONS[2]]
        stages += [(DIRECTIONS[2], backward, True), (DIRECTIONS[0], runs, True)]
        for direction, runs_at_stake, after in stages:
            at_stake = [run for run in runs_at_stake if run.status in (record.RIGHT, record.DROP_IN)]
            if not at_stake:
                continue
            case.no_dropin = []
            try:
                if case.model is None or not self.workers["new"].alive():  # none yet, or it ended in another direction
                    case.tell(f"building and importing {pair.new_path.name}")
                    self._worker("new")
                    imported = check.start(case, pair.new_path)
                    seconds = seconds or imported
                check.check(case, direction, after, gradients=DIRECTIONS[2] not in directions)
                if not after:
                    measure(case, pair, at_stake[0])
            except (Rejected, torch.OutOfMemoryError) as raised:
                error = as_rejected(raised)
                if error.kind == "memory" and case.may_be_smaller():
                    raise torch.OutOfMemoryError from None
                for run in at_stake:
                    run.reject(error)
                if direction == DIRECTIONS[2] and error.kind not in ("model", "memory"):
                    for run in runs:  # as where --backward is not asked for
                        run.lack(["it is wrong in forward + backward"], self.options.require)
            case.listen()
            for run in at_stake:
                run.lack(case.no_dropin, self.options.require)
        return seconds

    def _worker(self, role: str) -> Worker:
        """Starts the contender's process anew; one that compiles is kept while it lives.

        What a process has done before, checks for example, was seen to add a microsecond to each kernel behind a
        flush. Loading a compiler takes seconds.
        """
        if role in self.workers and not (role == "compile" and self.workers[role].alive()):
            self.workers.pop(role).kill()
        if role not in self.workers:
            self.workers[role] = Worker(role, self.options.device, self.options.timeout)
        return self.workers[role]

    def _load(self, case: check.Case, pair: Pair) -> None:
        """Makes the modules that are timed, in new processes."""
        case.listen()  # to the candidate's last one
        for role in ("new", *self.baselines):
            try:
                case.load(self._worker(role), pair.new_path if role == "new" else None)
            except Rejected as failed:
                case.drop(role, failed)
        if changed := case.problem.changed():
            raise Rejected(f"changes {', '.join(changed)}, which the Model's file imports")

    def _time(self, case: check.Case, pair: Pair, run: Result) -> None:
        seconds, checked = self.options.seconds / (8 if self.options.sweep else 1), case.errors
        # A busy machine or unlucky inputs may fail a right candidate once, but hardly each time. Each time in new
        # processes, since how long a flush takes depends on the memory a process was given, and in more rounds.
        for attempt in range(bench.ATTEMPTS):
            more = bench.MORE_ROUNDS**attempt
            self._load(case, pair)
            case.tell(f"timing {show.WORDS[run.direction]}")
            case.errors, before = {}, record.clocks(case.device)
            samples = bench.measure(case, run.direction, more * seconds, more)
            if case.workers["new"].strays():  # asked before the clocks, whose difference they may have caused
                raise Rejected(bench.ESCAPED)
            hidden = bench.hidden_time(samples, case.device)
            if hidden and (size := case.workers["new"].size()) > bench.MANY_PROCESSES:
                samples.ms["new"], hidden = bench.by_the_judges_clock(samples), None
                case.notes.append(f"timed by the judge's clock, which includes the time to resume its {size} processes")
            if hidden and attempt == bench.ATTEMPTS - 1 and bench.is_overloaded():
                samples.ms["new"], hidden = bench.by_the_judges_clock(samples), None
                case.notes.append("timed by the judge's clock, as its own cannot be checked: too much else runs here")
            wrong = check.over_limit(case) + ([hidden] if hidden else [])
            if not wrong:
                break
        else:
            raise Rejected(*wrong)
        if bench.may_hide_its_gain(samples, case.device):
            case.notes.append("its gain is too short for the judge's clock to check")
        for name, errors in case.errors.items():
            checked[name] = checked.get(name, gates.Errors()) + errors
        case.errors = checked
        run.interference = bench.interference(samples)
        if before:
            run.clocks = {"before": before, "after": record.clocks(case.device)}
            if held := run.clocks["after"]["throttle"]:
                run.interference.append(f"the GPU's clocks are held down: {held}")
        run.set_figures(samples, case.errors)
        run.set_roof(self.ceilings, case, samples)

    def _profile(self, case: check.Case, pair: Pair, run: Result) -> None:
        """Prints the kernels of a call by time; the trace is for https://ui.perfetto.dev."""
        self._load(case, pair)
        ring = bench.Ring(case, run.direction)
        ring.hand_out("new", 0.2)
        form = f"{run.dtype}_{run.precision}_{case.batch}_{run.direction}"
        path = self.options.profile.resolve() / f"{run.model.replace('/', '_')}_{form}.json"
        table = case.workers["new"].ask("profile", path=str(path))["table"]
        case.workers["new"].ask("rest")
        print(f"\n{run.model} {run.direction}, ten calls; trace: {path}\n{table}", file=self.stdout, flush=True)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """In a line or two, without the options, which --help lists."""
        said = textwrap.fill(f"{self.prog}: {message}", show.COLUMNS)
        self.exit(2, f"{said}\n{self.prog} --help lists all options\n")


def parse(argv: list[str]) -> tuple[Options, list[Pair]]:
    """The options, and the pairs they name."""
    layout = argparse.RawDescriptionHelpFormatter
    rule = textwrap.fill(show.RULE, show.COLUMNS)
    parser = Parser("harness.py", description=__doc__, formatter_class=layout, epilog=rule)
    for each in fields(Options):
        how = dict(each.metadata)
        parser.add_argument(how.pop("flag", f"--{each.name}"), default=each.default, **how)
    parser.set_defaults(require=None, device="cuda" if torch.cuda.is_available() else "cpu")
    options, pairs = Options(**vars(parser.parse_args(argv))), source.discover(ROOT)
    two_files = len(options.names) == 2 and all(Path(name).is_file() for name in options.names)
    options = replace(options, require=options.require or REQUIRED[not two_files])
    if two_files:
        model, new = (Path(name).resolve() for name in options.names)
        for path in (model, new):
            if path.suffix != ".py":
                parser.error(f"{path.name} is no Python file")
        name = model.stem if model.stem == new.stem else f"{model.stem} ({new.name})"
        pairs = dict.fromkeys(options.names, Pair(name, model, new))
    asked = {"pair": (options.names, pairs), "dtype": (options.dtype, DTYPES)}
    asked |= {"precision": (options.precision, PRECISIONS), "baseline": (options.baselines, BASELINES)}
    for what, (names, choices) in asked.items():
        if unknown := [name for name in names if name not in choices]:  # of two paths the one without a file is named
            name = min(unknown, key=os.path.isfile)
            if what == "pair" and name.endswith(".py"):
                needs = "give two files, MODEL.py NEW.py, or the name of a pair, as instance_norm"
                parser.error(f"{name}: {needs}" if os.path.isfile(name) else f"{name} is no file")
            files = [path for path in (f"models/{Path(name).name}.py", f"kernels/{name}.py") if (ROOT / path).exists()]
            alone = f" (of its two files only {files[0]} is there)" * (what == "pair") if len(files) == 1 else ""
            near = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name, choices, 1))
            parser.error(f"unknown {what} '{name}'{alone}: there are: {', '.join(choices)}{near}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    for name, least in (("batch", 1), ("seed", 0), ("seconds", 0), ("timeout", 0.1)):
        value = getattr(options, name)
        if value is not None and not least <= value < 1 << 32:
            parser.error(f"--{name} {value} is not at least {least} and below {1 << 32}")
    try:  # known before anything is measured
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()
        if options.profile:
            options.profile.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{error.filename} cannot be written: {error.strerror}")
    return options, list(dict.fromkeys(pairs[name] for name in options.names or pairs))


def write_json(path: Path, runs: list[Result], environment: dict) -> None:
    records = json.dumps({"runs": [asdict(run) for run in runs], "environment": environment}, default=str)
    tidy = json.loads(records, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    path.write_text(json.dumps(tidy, indent=1) + "\n")


def main(argv: list[str]) -> int:
    options, pairs = parse(argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # on a CPU each tensor that is shared is an open file
    runs, crashed, device, ceilings = [], False, options.device, roofline.Ceilings(options.device, options.dtype)
    clocks_before, progress = record.clocks(device), show.Progress()
    print(f"On: {record.device_name(device)}.")
    print("Brackets are 95% confidence intervals; what the verdicts mean is in --help.\n", flush=True)
    progress("measuring the machine's copy bandwidth and matrix rate")
    ceilings.measure()
    with contextlib.closing(Judge(options, ceilings, progress)) as judge:
        for number, pair in enumerate(pairs, 1):
            progress.before = f"{number} of {len(pairs)}: " * (len(pairs) > 1)
            before = None
            try:
                for run in judge.judge(pair):
                    progress()
                    parts = "shapes", "dtype", "precision"
                    continues = before and all(getattr(before, part) == getattr(run, part) for part in parts)
                    print(*show.block(run, before if continues else None), "", sep="\n", flush=True)
                    before = run
                    runs.append(run)
                    if options.json:  # after every row: what is measured is not lost
                        environment = record.environment(device, ceilings, ["harness.py", *argv], ROOT, clocks_before)
                        write_json(options.json, runs, environment)
            except BrokenPipeError:  # of the output's reader; those of contenders are told by their workers
                raise
            except Exception:  # neither the Model's nor the candidate's
                progress()
                print(f"The judge itself failed at {pair.name}:", file=sys.stderr)
                traceback.print_exc()
                crashed = True
    progress()
    if len(runs) > 1:
        print(*show.summary(runs), sep="\n", flush=True)
    if crashed:
        return CRASHED
    if any(run.status == BUILD for run in runs):
        return NOT_BUILT
    return ALL_RIGHT if runs and all(run.ok for run in runs) else ANY_WRONG


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what contenders started is to end, too
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv[1:]))
