"""Judges a folder of public candidates and writes what became of each as a table.

    python tests/tools/public_candidates.py FOLDER --out RECORDS [--processes N] [--limit SECONDS] [NAME ...]
    python tests/tools/public_candidates.py FOLDER --out RECORDS --build [NAME ...]    builds them, and judges none
    python tests/tools/public_candidates.py FOLDER --out RECORDS --table               the table of what is recorded

FOLDER holds L_TTT_ref.py, L_TTT_new.py and published.json, the factors that were claimed. RECORDS is a folder: each
candidate's verdict is a file of its own, written as soon as it is known, and one that is there is not judged again.
Each pair is judged in float32 against eager and torch.compile by a process of its own, with a folder of its own for
what it builds. Several are judged at a time on one GPU; while one is timed, the others' requests wait (`Turns`). None
of the candidates' code is kept.
"""

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from harness import Judge, Options  # noqa: E402
from judge import bench, check  # noqa: E402
from judge.roofline import Ceilings  # noqa: E402
from judge.source import Pair, Problem, load, make  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS, TIMEOUT = 0.3, 30.0
# Of each turn fewer calls than the harness makes: two hundred candidates are many.
bench.MOST_CALLS = 3


class Turns:
    """Who is timed has the GPU alone; any number may put requests to their modules at the same time.

    Whoever wants the GPU passes a gate first. The one who is timed keeps the gate, so that no new request begins, and
    waits until those that have begun are through.
    """

    def __init__(self, folder: Path):
        self.gate, self.gpu, self.depth = (folder / "gate").open("w"), (folder / "gpu").open("w"), 0

    @contextlib.contextmanager
    def with_others(self) -> Iterator[None]:
        self.depth += 1
        if self.depth == 1:  # a request may put another one
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.gpu, fcntl.LOCK_SH)
            fcntl.flock(self.gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                fcntl.flock(self.gpu, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        fcntl.flock(self.gate, fcntl.LOCK_EX)
        fcntl.flock(self.gpu, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.gpu, fcntl.LOCK_UN)
            fcntl.flock(self.gate, fcntl.LOCK_UN)


def within(turn, function):
    def call(*arguments):
        with turn():
            return function(*arguments)

    return call


def pair_of(folder: Path, name: str) -> Pair:
    return Pair(name, folder / f"{name}_ref.py", folder / f"{name}_new.py")


def build(folder: Path, name: str) -> None:
    """Imports a candidate and calls it once, which builds what it builds."""
    pair = pair_of(folder, name)
    problem = Problem(pair.model_path)
    module = make(load(pair.new_path).ModelNew, problem.arguments(0), 0).to(DEVICE)
    with torch.no_grad():
        module(*problem.inputs(problem.batch, DEVICE, torch.float32, 0))


def judge(folder: Path, name: str, out: Path, baselines: tuple[str, ...]) -> None:
    if "class " not in (folder / f"{name}_new.py").read_text():
        (out / f"{name}.json").write_text(json.dumps({"status": "no code published", "why": [], "speedup": {}}))
        return
    turns, begin = Turns(out), time.monotonic()
    check.put = within(turns.with_others, check.put)
    bench.take_rounds = within(turns.alone, bench.take_rounds)
    ceilings = Ceilings(DEVICE, ("float32",))
    vars(ceilings).update(json.loads((out / "ceilings").read_text()))
    options = Options(device=DEVICE, require="right", baselines=baselines, seconds=SECONDS, timeout=TIMEOUT)
    with contextlib.closing(Judge(options, ceilings, lambda text: None)) as judging:
        try:
            (run,) = judging.judge(pair_of(folder, name))
            record = {"status": run.status, "why": run.reasons or run.no_dropin, "speedup": run.speedup}
            record |= {"ms": run.ms, "notes": run.notes, "interference": run.interference, "roof": run.roof}
        except Exception as error:
            record = {"status": "the judge failed", "why": [f"{type(error).__name__}: {error}"], "speedup": {}}
    record["seconds"] = round(time.monotonic() - begin, 1)
    print(name, json.dumps(record), flush=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def table(folder: Path, out: Path) -> list[str]:
    published = json.loads((folder / "published.json").read_text())
    lines = ["| task | verdict | x eager | x compile | published | why |", "| --- | --- | --- | --- | --- | --- |"]
    counts = Counter()
    for name in sorted(published):
        path = out / f"{name}.json"
        record = json.loads(path.read_text()) if path.exists() else {"status": "not judged", "why": [], "speedup": {}}
        counts[record["status"]] += 1
        factors = [f"{record['speedup'][each]:.2f}" if each in record["speedup"] else "-" for each in published[name]]
        claimed = ", ".join(f"{factor:.2f}" for factor in published[name].values() if factor)
        why = "; ".join(record["why"])[:300].replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {record['status']} | {' | '.join(factors)} | {claimed} | {why} |")
    return [", ".join(f"{count} {status}" for status, count in counts.most_common()), "", *lines]


def in_own_process(name: str, asked: argparse.Namespace, deadline: float) -> None:
    """One candidate; what it builds and writes lies in a folder of its own."""
    if time.monotonic() > deadline:
        return
    builds = Path(os.environ.get("TORCH_EXTENSIONS_DIR", tempfile.gettempdir())) / "public" / name
    builds.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(builds), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    command = [sys.executable, __file__, asked.folder.resolve(), name, "--out", asked.out.resolve(), "--one"]
    command += ["--baselines", asked.baselines] + ["--build"] * asked.build
    subprocess.run(command, env=environment, cwd=builds, timeout=max(1.0, deadline - time.monotonic() + 60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, metavar="RECORDS")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e6, metavar="SECONDS", help="begin no other after so many")
    parser.add_argument("--baselines", default="eager,compile")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_intermixed_args()
    if asked.table:
        print("\n".join(table(asked.folder, asked.out)))
    elif asked.one and asked.build:
        build(asked.folder, asked.names[0])
    elif asked.one:
        judge(asked.folder, asked.names[0], asked.out, tuple(asked.baselines.split(",")))
    else:
        deadline = time.monotonic() + asked.limit
        asked.out.mkdir(parents=True, exist_ok=True)
        if not asked.build:
            ceilings = Ceilings(DEVICE, ("float32",))
            ceilings.measure()
            figures = {"copy_bandwidth": ceilings.copy_bandwidth, "matrix_rate": ceilings.matrix_rate}
            (asked.out / "ceilings").write_text(json.dumps(figures))
        # The largest networks, of the highest level, first: the last to end are then short ones.
        every = sorted((path.name.removesuffix("_new.py") for path in asked.folder.glob("*_new.py")), reverse=True)
        left = [name for name in asked.names or every if asked.build or not (asked.out / f"{name}.json").exists()]
        with ThreadPoolExecutor(asked.processes) as pool:
            list(pool.map(partial(in_own_process, asked=asked, deadline=deadline), left))


if __name__ == "__main__":
    main()
