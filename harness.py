"""Checks that a ModelNew is right and measures how fast it is.

    python harness.py                      every pair of models/ and kernels/, on the best device present
    python harness.py instance_norm        one pair, or several
    python harness.py MODEL.py NEW.py      any two files in this format

Progress goes to stderr, the table to stdout.
Exit codes: 0 all right, 1 a candidate is wrong, 2 usage, 3 a candidate did not build (whatever the others did).
"""

from __future__ import annotations

import multiprocessing.forkserver
import os

given = os.environ.get("OMP_WAIT_POLICY")
if __name__ == "__main__":  # the workers' ancestor loads torch meanwhile
    multiprocessing.set_forkserver_preload(["torch", "judge.worker"])
    multiprocessing.forkserver.ensure_running()
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is loaded: the judge's idle threads leave the cores to the contenders

import argparse  # noqa: E402
import contextlib  # noqa: E402
import difflib  # noqa: E402
import itertools  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from judge import bench, check, record, roofline  # noqa: E402
from judge.problem import DIRECTIONS, DTYPES, PRECISIONS, RAISED, Options, Pair, Problem, discover, last_line, set_precision  # noqa: E402
from judge.record import BUILD, WRONG, Result, tidy  # noqa: E402
from judge.worker import Arena, Rejected, Worker, has_ipc  # noqa: E402

if given is None:
    del os.environ["OMP_WAIT_POLICY"]
else:
    os.environ["OMP_WAIT_POLICY"] = given

ROOT = Path(__file__).resolve().parent
ALL_RIGHT, ANY_WRONG, USAGE, NOT_BUILT = 0, 1, 2, 3
BASELINES = ("eager", "compile", "max-autotune", "cudagraph")
OWN_ALLOCATIONS = ("new", "eager", "compile")  # the others hold memory of their own from capture on
SECONDS = {"cuda": 2.0, "cpu": 1.5}


class UsageError(Exception):
    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the command line


def one_of(value: str, choices, what: str) -> str:
    if value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(choices) or 'none'}"
    raise UsageError(f"unknown {what} '{value}': {hint}")


def list_of(value: str, choices, what: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one_of(part.strip(), choices, what) for part in value.split(",")))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="harness.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pairs to run (all), or the two files of one pair")
    parser.add_argument("--list", action="store_true", help="name the pairs and stop")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--dtype", default="float32", metavar="LIST", help=f"comma separated: {','.join(DTYPES)} (default float32)")
    parser.add_argument("--precision", default="highest", metavar="LIST", help="highest: strict float32 (default); high: TF32 allowed; or both")
    help_ = f"of {','.join(DIRECTIONS)} (default the first two); recorded: with gradients recorded, as in training"
    parser.add_argument("--directions", metavar="LIST", help=help_)
    parser.add_argument("--backward", action="store_true", help="all three directions")
    parser.add_argument("--batch", type=int, metavar="N", help="default: the file's batch_size on a GPU, its cpu_batch_size on a CPU")
    parser.add_argument("--sweep", action="store_true", help="at the shapes listed as `sweep` in the Model's file, each for less time")
    parser.add_argument("--baselines", default="eager,compile", metavar="LIST", help=f"of {','.join(BASELINES)} (default eager,compile)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and inputs (default 0)")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds for a call, ten times that for a build (default 120)")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="time nothing: table and trace (for Perfetto) of the candidate's kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records")
    parser.add_argument("--markdown", action="store_true", help="print the table as GitHub markdown")
    sources = "take the records from an earlier --json, or from several, and run nothing"
    parser.add_argument("--from", type=Path, action="append", dest="sources", metavar="FILE", help=sources)
    asked = parser.parse_args(argv)
    if asked.batch is not None and asked.batch < 1:
        raise UsageError("--batch must be at least 1")
    if asked.sweep and asked.batch:
        raise UsageError("--batch and --sweep: a sweep's shapes have batches of their own")
    if not 0 <= asked.seed < 1 << 32:
        raise UsageError("--seed must be at least 0 and below 2^32")
    if asked.timeout <= 0:
        raise UsageError("--timeout must be above 0")
    if asked.json:
        try:  # known before anything is measured
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            existed = asked.json.exists()
            asked.json.open("a").close()
            existed or asked.json.unlink()
        except OSError as error:
            raise UsageError(f"{asked.json} cannot be written: {error.strerror}") from error
    return asked


def options_of(asked: argparse.Namespace) -> Options:
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no GPU here")
    directions = DIRECTIONS if asked.backward else DIRECTIONS[:2]
    if asked.directions:
        chosen = list_of(asked.directions, DIRECTIONS, "direction")
        directions = tuple(direction for direction in DIRECTIONS if direction in chosen)
    return Options(
        device=device,
        dtypes=list_of(asked.dtype, DTYPES, "dtype"),
        precisions=list_of(asked.precision, PRECISIONS, "precision"),
        directions=directions,
        baselines=list_of(asked.baselines, BASELINES, "baseline"),
        batch=asked.batch,
        seed=asked.seed,
        seconds=SECONDS[device] / (8 if asked.sweep else 1),
        timeout=asked.timeout,
        profile=asked.profile,
    )


def pairs_of(names: list[str]) -> list[Pair]:
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


# ---- one pair


class Judge:
    """The worker processes and the memory they share, for as long as the harness runs."""

    def __init__(self, options: Options, ceilings: roofline.Ceilings, tell: Callable[[str], None] = say):
        self.options, self.ceilings, self.tell = options, ceilings, tell
        roles = dict.fromkeys(["eager", *options.baselines])  # eager is timed in any case: a worker's clock is held against its
        self.workers = {role: Worker(role, options.device, options.timeout) for role in roles if not options.profile}
        self.arena = Arena(options.device, ipc=options.device == "cuda" and has_ipc())

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *raised) -> None:
        for worker in self.workers.values():
            worker.kill()

    def judge(self, pair: Pair, constants: dict | None = None) -> Iterator[Result]:
        """All records of one pair. Never raises for what a pair does wrong."""
        options, failure, batch, problem = self.options, "", None, None
        if "new" in self.workers:
            self.workers.pop("new").kill()
        try:
            problem = Problem(pair.model_path, constants)
            batch = options.batch or (problem.benchmark_batch if options.device == "cuda" else problem.cpu_batch)
        except RAISED as error:  # whatever a file does at import
            failure = f"{pair.model_path.name} cannot be used: {last_line(error)}"
        if problem and options.batch and problem.benchmark_batch is None:
            raise UsageError(f"{pair.name}: --batch has no effect: get_inputs takes no batch size and reads no batch_size")
        for dtype, level in itertools.product(options.dtypes, options.precisions):
            what = {"model": pair.name, "source_sha256": pair.source_sha256(), "device": options.device, "dtype": dtype, "precision": level}
            what |= {"seed": options.seed, "batch": batch, "constants": constants or {}}
            runs = {direction: Result(direction=direction, **what) for direction in options.directions}
            case = check.Case(problem, None, self.arena, options.device, DTYPES[dtype], level, batch, options.seed)
            way = f"{pair.name}: {dtype} {level}" + ("" if batch is None else f", batch {batch}")
            try:
                if failure:
                    raise Rejected(failure)
                set_precision(level)
                self._judge(pair, case, runs, lambda text, way=way: self.tell(f"{way}: {text}"))
            except Rejected as rejected:
                reject(runs.values(), rejected)
            except RAISED as error:
                reject(runs.values(), Rejected(f"the Model itself raised {last_line(error)}"))
            for run in runs.values():
                run.notes += [note for note in case.notes if note not in run.notes]
            set_precision("highest")
            yield from runs.values()

    def _judge(self, pair: Pair, case: check.Case, runs: dict[str, Result], tell: Callable[[str], None]) -> None:
        """Right, how fast, how far from the limit: direction by direction. A wrong answer's speed has no meaning and is not measured."""
        rivals = self._prepare(case)
        for direction in [direction for direction in DIRECTIONS if direction == "forward" or direction in runs]:
            behind = [run for name, run in runs.items() if DIRECTIONS.index(name) >= DIRECTIONS.index(direction)]
            try:
                self._begin(pair, case, runs, tell)
                must_be_empty(check.check(case, direction, tell))
                if direction in runs and self.options.profile:
                    self._profile(pair, case, direction)
                elif direction in runs:
                    rivals = self._finish(rivals, case, tell)
                    self._time(runs[direction], pair, case, rivals, tell)
            except Rejected as rejected:
                reject(behind, rejected)
                break
        right = [run for run in runs.values() if run.ok]
        if right:
            try:
                self._begin(pair, case, runs, tell)
                must_be_empty(check.check(case, "after", tell))
            except Rejected as rejected:
                reject(right, rejected)
        for run in right:
            set_errors(run, case)

    def _begin(self, pair: Pair, case: check.Case, runs: dict[str, Result], tell: Callable[[str], None]) -> None:
        """A process for the candidate, where there is none or it has ended, and the module in it."""
        if case.worker and case.worker.alive():
            return
        case.worker = self.workers.get("new")
        if not (case.worker and case.worker.alive()):
            tell(f"importing {pair.new_path.name}")
            case.worker = self.workers["new"] = Worker("new", self.options.device, self.options.timeout)
            loaded = case.worker.ask("load", path=pair.new_path)
            case.worker.import_seconds = round(loaded["seconds"], 3)
            must_be_empty(loaded["changed"])
        for run in runs.values():
            run.import_seconds = case.worker.import_seconds
        must_be_empty(check.start(case))
        for run in runs.values():
            run.shapes = [list(x.shape) for x in case.draw(0)() if isinstance(x, torch.Tensor)]

    def _prepare(self, case: check.Case) -> dict[str, Worker]:
        """Sets the baselines up; compilers begin to work while the candidate is checked."""
        rivals = {}
        for role in self.workers.keys() - {"new", "cudagraph"}:
            if not self.workers[role].alive():
                self.workers[role] = Worker(role, self.options.device, self.options.timeout)
            try:
                self._make_rival(self.workers[role], case)
                rivals[role] = self.workers[role]
            except Rejected as failed:  # a baseline that fails is no fault of the candidate's
                case.note(f"no {role} baseline: {failed}")
        return rivals

    def _make_rival(self, worker: Worker, case: check.Case) -> None:
        with contextlib.suppress(Rejected):  # what was compiled for a candidate that was wrong before it was to be timed
            worker.pending and worker.hear()
        dtype, path, constants = str(case.dtype).removeprefix("torch."), case.problem.path, case.problem.constants
        worker.ask("make", level=case.precision, dtype=dtype, seed=case.seed, path=path, constants=constants)
        worker.send("prepare", batch=case.batch, dtype=dtype, directions=self.options.directions, seed=case.seed)

    def _finish(self, rivals: dict[str, Worker], case: check.Case, tell: Callable[[str], None]) -> dict[str, Worker]:
        """Waits for the compilers. On a GPU they compile again, alone, and find most of it done: what they choose by timing is chosen now."""
        ready = {}
        for role, worker in rivals.items():
            try:
                if worker.pending:
                    tell(f"waiting for {role}")
                    worker.hear()
                    if case.device == "cuda" and role != "eager":
                        self._make_rival(worker, case)
                        worker.hear()
                ready[role] = worker
            except Rejected as failed:  # a baseline that fails is no fault of the candidate's
                case.note(f"no {role} baseline: {failed}")
                worker.kill()
        return ready

    def _captured(self, pair: Pair, case: check.Case) -> Worker:
        """The candidate once more, to be replayed from a CUDA graph."""
        worker = self.workers["cudagraph"]
        worker.ask("load", path=pair.new_path)
        dtype, arguments = str(case.dtype).removeprefix("torch."), case.problem.arguments(case.seed)
        worker.ask("make", level=case.precision, dtype=dtype, seed=case.seed, arguments=arguments)
        return worker

    def _time(self, run: Result, pair: Pair, case: check.Case, rivals: dict[str, Worker], tell: Callable[[str], None]) -> None:
        contenders = {"new": case.worker, **rivals}
        if "cudagraph" in self.workers:
            contenders["new_cudagraph"] = self._captured(pair, case)
        for worker in contenders.values():
            check.give_weights(case, worker=worker)
        ring = check.Ring(case, run.direction)
        for worker in contenders.values():
            worker.see(self.arena)
        tell(f"timing {run.direction}: {', '.join(contenders)}")
        clocks_before = record.clocks(case.device)
        measured: list[bench.Samples] = []
        try:
            for _ in range(4):  # what disturbed the first may look like time that the candidate hides
                measured.append(bench.measure(contenders, ring, case.device, self.options.seconds, self.options.flush_bytes))
                hidden, certain = bench.hidden_time(measured, case.device)
                if ring.reasons or not hidden:
                    break
        finally:
            for worker in contenders.values():
                if worker.alive():
                    worker.ask("release")
                    worker.see(None)
        must_be_empty(ring.reasons)
        samples = measured[-1]
        if hidden and certain:
            raise Rejected(hidden)
        if case.worker.strays():
            raise Rejected("starts a process in a session of its own, which goes on while others are timed")
        if case.device == "cuda":
            run.clocks = {"before": clocks_before, "after": record.clocks("cuda")}
        run.interference = bench.interference(samples) + self._foreign_load(run) + ([hidden] if hidden else [])
        run.rounds, run.calls = len(samples.ms["new"]), samples.calls
        for name, values in samples.ms.items():
            if name != "eager" or "eager" in self.options.baselines:
                run.ms[name], run.spread[name] = tidy(statistics.median(values)), [tidy(q) for q in bench.quartiles(values)]
        for name, said in samples.ready.items():
            if case.device == "cuda" and name in run.ms:
                run.host_us[name] = tidy(said["host_us"])
                if name in OWN_ALLOCATIONS:
                    run.peak_memory[name] = said["peak"]
        for name in run.ms:
            if not name.startswith("new"):
                ratio, (low, high) = bench.speedup(samples, name, case.device)
                run.speedup[name], run.speedup_ci[name] = tidy(ratio), [tidy(low), tidy(high)]
                run.verdict[name] = bench.verdict(low, high, bool(run.interference))
        if run.host_us and run.host_us["new"] > 1e3 * run.ms["new"]:
            times = ", ".join(f"{name} {us:.0f}" for name, us in run.host_us.items())
            run.notes.append(f"the host takes longer to launch a call than the GPU for its work; the host's microseconds: {times}")
        self._set_roof(run, case)

    def _foreign_load(self, run: Result) -> list[str]:
        """What the GPU itself says of others on it, and of clocks held down."""
        if run.device != "cuda":
            return []
        others = record.gpu_processes() - 1 - sum(worker.alive() for worker in self.workers.values())
        signs = [f"{others} other processes compute on this GPU"] if others > 0 else []
        throttle = (run.clocks["after"] or {}).get("throttle")
        return signs + ([f"the GPU's clocks are held down: {throttle}"] if throttle else [])

    def _set_roof(self, run: Result, case: check.Case) -> None:
        try:
            work = roofline.count_work(case.problem, case.batch, case.dtype, run.direction == "forward_backward")
        except Exception as error:  # noqa: BLE001 - a record without a floor is still one
            run.notes.append(f"no floor: the Model does not run on the meta device: {last_line(error)}")
            return
        for _ in range(2):
            floor = self.ceilings.floor_ms(work, run.dtype, run.precision)
            share = floor / run.ms["new"]
            if share <= 1:
                break
            self.ceilings.measure()
        if share > roofline.IMPOSSIBLE[run.device] and work.bytes > 2 * roofline.cache_bytes(run.device):
            raise Rejected(f"takes {run.ms['new']:.4g} ms, which is not possible: what this machine reaches allows {floor:.4g} ms or more")
        run.roof = {"bytes": work.bytes, "flops": work.flops, "floor_ms": tidy(floor), "percent": tidy(100 * share)}
        if share > 1:
            run.notes.append("above 100% of the floor, whose bandwidth is that of a copy")

    def _profile(self, pair: Pair, case: check.Case, direction: str) -> None:
        """Prints the kernels of a call by time; the trace is for https://ui.perfetto.dev."""
        ring = check.Ring(case, direction)
        case.worker.see(self.arena)
        ring.renew()
        case.worker.ask("ready", seconds=0.2, flush_bytes=1 << 20, **ring.ready)
        self.options.profile.mkdir(parents=True, exist_ok=True)
        path = self.options.profile / f"{pair.name}_{direction}.json"
        rows = sorted(case.worker.ask("profile", path=str(path))["rows"], key=lambda row: -row[2])
        total = sum(us for _, _, us in rows)
        print(f"\n{pair.name} {direction}: {total:.1f} us a call; trace: {path}")
        for name, count, us in rows[:20]:
            print(f"{us:10.1f} us {100 * us / total:5.1f}%  {count:4.1f} x  {name[:100]}")


def must_be_empty(reasons: list[str]) -> None:
    if reasons:
        raise Rejected(*reasons)


def reject(runs, rejected: Rejected) -> None:
    for run in runs:
        run.reject(list(rejected.args), BUILD if rejected.kind == BUILD else WRONG)


def set_errors(run: Result, case: check.Case) -> None:
    """Of several outputs the largest of each figure, and each gradient's."""
    known = {name: errors.as_dict(case.dtype) for name, errors in case.errors.items()}
    outputs = [errors for name, errors in known.items() if not name.startswith("gradient")]
    run.error = {key: max(each[key] for each in outputs) if outputs[0][key] is not None else None for key in outputs[0]} if outputs else {}
    if run.direction == "forward_backward":
        run.gradient_error = {name.removeprefix("gradient of "): errors for name, errors in known.items() if name.startswith("gradient")}



# ---- all of it


def run_all(pairs: list[Pair], options: Options, asked: argparse.Namespace, argv: list[str]) -> list[Result]:
    clocks_before = record.clocks(options.device)
    ceilings = roofline.Ceilings(options.device, options.dtypes)
    runs: list[Result] = []
    with Judge(options, ceilings) as judge:
        say(f"device: {record.device_name(options.device)}; measuring its copy bandwidth and matrix rate")
        ceilings.measure()
        rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings.matrix_rate.items())
        say(f"copy {ceilings.copy_bandwidth / 1e9:.4g} GB/s, matrix {rates}")
        table = None if options.profile else record.Table(list(options.baselines), asked.markdown)
        for pair in pairs:
            for constants in shapes_of(pair, asked.sweep):
                for run in judge.judge(pair, constants):
                    runs.append(run)
                    if table:
                        table.row(run)
                    if asked.json:  # after every row: what is measured is not lost
                        surroundings = record.environment(options.device, ceilings, ["harness.py", *argv], ROOT, clocks_before)
                        record.save(asked.json, runs, surroundings)
        if table:
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
        raise UsageError(f"{pair.name}: no shapes to sweep: {pair.model_path.name} has no list of constants named `sweep`")
    return shapes


def earlier_runs(sources: list[Path], names: list[str]) -> list[Result]:
    runs = []
    for path in sources:
        if not path.is_file():
            raise UsageError(f"no file {path}")
        try:
            runs += record.read(path)[0]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no record of the harness's: {last_line(error)}") from error
    models = list(dict.fromkeys(run.model for run in runs))
    wanted = [one_of(name, models, "pair in that file") for name in names] or models
    return [run for run in runs if run.model in wanted]


def main(argv: list[str]) -> int:
    warnings.filterwarnings("ignore")  # PyTorch's remarks about a Model's own code are not the harness's to repeat
    try:
        try:
            asked = parse(argv)
        except SystemExit as leaving:  # argparse has said all
            return leaving.code
        if asked.list:
            print("\n".join(discover(ROOT)))
            return ALL_RIGHT
        if asked.sources:
            runs = earlier_runs(asked.sources, asked.names)
            table = record.Table(sorted({name for run in runs for name in run.ms} - {"new"}), asked.markdown)
            for run in runs:
                table.row(run)
            table.end()
        else:
            runs = run_all(pairs_of(asked.names), options_of(asked), asked, argv)
    except UsageError as error:
        say(f"harness.py: {error}")
        return USAGE
    if any(run.status == BUILD for run in runs):
        return NOT_BUILT
    return ALL_RIGHT if all(run.ok for run in runs) else ANY_WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
