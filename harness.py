"""Checks that a ModelNew is right and measures how fast it is.

    python harness.py                      every pair of models/ and kernels/, on the best device present
    python harness.py instance_norm        one pair, or several
    python harness.py MODEL.py NEW.py      any two files in this format
    torchrun --nproc-per-node=N harness.py instance_norm
                                           the batch split over N GPUs (or processes on a CPU), and how that scales

Progress goes to stderr, the table to stdout.
Exit codes: 0 all right, 1 a candidate is wrong, 2 usage, 3 a candidate did not build (whatever the others did).
"""

from __future__ import annotations

import argparse
import difflib
import sys
import warnings
from pathlib import Path

import torch

from judge import ahead, distributed, machine, record, report, timing, trial
from judge.pairs import RAISED, Pair, Problem, discover, last_line
from judge.roof import Ceilings, DoesNotFit, Load, choose_batch
from judge.watch import in_a_child

ROOT = Path(__file__).resolve().parent
ALL_RIGHT, ANY_WRONG, USAGE, NOT_BUILT = 0, 1, 2, 3


class UsageError(Exception):
    pass


def say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def must_be_writable(path: Path) -> None:
    """Known before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def one_of(value: str, choices, what: str) -> str:
    if value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(choices) or 'none'}"
    raise UsageError(f"unknown {what} '{value}': {hint}")


def list_of(value: str, choices, what: str) -> list[str]:
    return list(dict.fromkeys(one_of(part.strip(), choices, what) for part in value.split(",")))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="harness.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="pairs to run (all), or the two files of one pair")
    parser.add_argument("--list", action="store_true", help="name the pairs and stop")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="LIST",
        help=f"comma separated: {','.join(machine.DTYPES)} (default float32)",
    )
    parser.add_argument(
        "--precision",
        default="highest",
        metavar="LIST",
        help="highest: strict float32 (default); high: TF32 allowed; or both",
    )
    parser.add_argument("--backward", action="store_true", help="also with gradients recorded, and forward + backward")
    parser.add_argument(
        "--frozen", action="store_true", help="call ModelNew's freeze_weight(), where it has that: forward only"
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="default: the benchmark batch on a GPU, one that takes little time on a CPU",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="at the shapes listed as `sweep` in the Model's file, each for less time"
    )
    parser.add_argument(
        "--baselines",
        default="eager,compile",
        metavar="LIST",
        help=f"of {','.join(trial.BASELINES)} (default eager,compile)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights, inputs and the order of rounds (default 0)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the chart, SVG or PNG by suffix (needs matplotlib)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as GitHub markdown")
    sources = "take the records from an earlier --json, or from several, and run nothing"
    parser.add_argument("--from", type=Path, action="append", dest="sources", metavar="FILE", help=sources)
    options = parser.parse_args(argv)
    if options.batch is not None and options.batch < 1:
        raise UsageError("--batch must be at least 1")
    if options.frozen and options.backward:
        raise UsageError("--frozen and --backward: a frozen weight is for inference")
    if options.sweep and options.batch:
        raise UsageError("--batch and --sweep: a sweep's shapes have batches of their own")
    if not 0 <= options.seed < 1 << 32:
        raise UsageError("--seed must be at least 0 and below 2^32")
    if options.plot and options.plot.suffix not in (".svg", ".png"):
        raise UsageError("--plot takes a file that ends in .svg or .png")
    for path in filter(None, (options.json, options.plot)):
        must_be_writable(path)
    return options


def chosen_pairs(names: list[str]) -> list[Pair]:
    if any(name.endswith(".py") for name in names):
        if len(names) != 2:
            raise UsageError("files come in twos: MODEL.py NEW.py")
        model, new = map(Path, names)
        for path in (model, new):
            if not path.is_file():
                raise UsageError(f"no file {path}")
        return [Pair(model.stem, model.resolve(), new.resolve())]
    pairs = discover(ROOT)
    if not pairs:
        raise UsageError("no pair here: a pair is models/NAME.py and kernels/NAME.py")
    return [pairs[one_of(name, list(pairs), "pair")] for name in dict.fromkeys(names)] or list(pairs.values())


def chosen_settings(options: argparse.Namespace) -> trial.Settings:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch sees no GPU here")
    dtypes = [machine.DTYPES[name] for name in list_of(options.dtype, machine.DTYPES, "dtype")]
    load = Load(device, dtypes, list_of(options.precision, machine.PRECISIONS, "precision"), options.backward)
    seconds_each = timing.SECONDS_EACH[device] / (8 if options.sweep else 1)
    return trial.Settings(
        load, list_of(options.baselines, trial.BASELINES, "baseline"), options.seed, seconds_each, options.frozen
    )


def shapes_of(pair: Pair, sweep: bool) -> list[dict]:
    """The module constants to replace, a run of the pair for each: none, or those of the file's sweep."""
    if not sweep:
        return [{}]
    try:
        shapes = Problem(pair.model_path).sweep
    except RAISED:  # `prepare` says what is wrong with the file
        return [{}]
    if not shapes:
        raise UsageError(
            f"{pair.name}: no shapes to sweep: {pair.model_path.name} has no list of constants named `sweep`"
        )
    return shapes


def prepare(pair: Pair, constants: dict, asked: int | None, load: Load, ceilings: Ceilings) -> trial.Entry:
    """Loads the Model and settles the batch, before anything large is allocated."""
    try:
        problem = Problem(pair.model_path, constants)
    except RAISED as error:  # whatever a file does at import
        return trial.Entry(pair, failure=f"{pair.model_path.name} cannot be used: {last_line(error)}")
    if asked and problem.benchmark_batch is None:
        raise UsageError(f"{pair.name}: --batch has no effect: get_inputs takes no batch size and reads no batch_size")
    try:
        batch = choose_batch(problem, asked, load, ceilings)
    except DoesNotFit as error:
        raise UsageError(str(error)) from error
    except RAISED:  # no meta device for this Model: its record says so, and its size is taken on trust
        batch = asked or problem.benchmark_batch
    if not asked and batch != problem.benchmark_batch:
        benchmark = problem.benchmark_batch
        say(
            f"{pair.name}: batch {batch} instead of the benchmark's {benchmark}, which takes too long or too much memory here"
        )
    return trial.Entry(pair, problem, distributed.agreed(batch))


def run_all(
    pairs: list[Pair], settings: trial.Settings, options: argparse.Namespace, argv: list[str]
) -> tuple[list[trial.Run], dict]:
    load = settings.load
    distributed.join(load.device)
    judge_pair = distributed.judge_pair if distributed.launched() else trial.judge_pair
    say(f"device: {machine.device_name(load.device)}; measuring its copy bandwidth and matrix rate")
    clocks_before = machine.clocks(load.device)
    ceilings = Ceilings(load.device, load.dtypes)
    ceilings.measure()
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in ceilings.matrix_rate.items())
    say(f"copy {ceilings.copy_bandwidth / 1e9:.4g} GB/s, matrix {rates}")
    shapes = [(pair, constants) for pair in pairs for constants in shapes_of(pair, options.sweep)]
    entries = [prepare(pair, constants, options.batch, load, ceilings) for pair, constants in shapes]
    if options.sweep and not distributed.launched():
        say("compiling the Models ahead")
        ahead.compile_ahead(entries, settings)
    runs: list[trial.Run] = []
    surroundings: dict = {}
    for entry in entries:
        if machine.is_lost(load.device):
            entry.failure = "not judged: a kernel before it ended this process's use of the GPU"
        runs += judge_pair(entry, settings, ceilings, lambda text, name=entry.pair.name: say(f"{name}: {text}"))
        for run in runs:
            trial.update_floor(run, ceilings)
        surroundings = record.environment(load.device, ceilings, ["harness.py", *argv], ROOT, clocks_before)
        if options.json and distributed.rank() == 0:  # after every pair: what is measured is not lost
            record.save(options.json, runs, surroundings)
    return runs, surroundings


def record_of(path: Path) -> tuple[list[trial.Run], dict]:
    try:
        return record.load(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no record of the harness's: {last_line(error)}") from error


def main(argv: list[str]) -> int:
    warnings.filterwarnings("ignore")  # PyTorch's remarks about a Model's own code are not the harness's to repeat
    try:
        try:
            options = parse(argv)
        except SystemExit as leaving:  # argparse has said all; nobody else may end the harness so
            return leaving.code
        if options.list:
            print("\n".join(discover(ROOT)))
            return ALL_RIGHT
        if options.plot:
            report.plotting()  # or it would be missed after all has been measured
        if options.sources:
            missing = [path for path in options.sources if not path.is_file()]
            if missing:
                raise UsageError(f"no file {missing[0]}")
            earlier = [record_of(path) for path in options.sources]
            runs, surroundings = [run for runs, _ in earlier for run in runs], earlier[0][1]
            models = list(dict.fromkeys(run.model for run in runs))
            wanted = [one_of(name, models, "pair in that file") for name in options.names] or models
            runs = [run for run in runs if run.model in wanted]
        else:
            runs, surroundings = run_all(chosen_pairs(options.names), chosen_settings(options), options, argv)
        print(report.table(runs, options.markdown), flush=True)
        distributed.leave()
        if options.plot and distributed.rank() == 0:
            report.plot(runs, surroundings, options.plot)
    except (UsageError, distributed.CannotSplit, report.PlotUnavailable) as error:
        say(f"harness.py: {error}")
        return USAGE
    if any(run.status == trial.BUILD for run in runs):
        return NOT_BUILT
    return ALL_RIGHT if all(run.ok for run in runs) else ANY_WRONG


def watched(argv: list[str]) -> int:
    """`main`, and a word where a candidate ended its process; with --json the pairs before it are on record."""
    code = in_a_child(lambda: main(argv))
    if code is None:
        say("harness.py: what was judged last ended the process, without a verdict: it counts as wrong")
        return ANY_WRONG
    return code


if __name__ == "__main__":
    sys.exit(watched(sys.argv[1:]))
