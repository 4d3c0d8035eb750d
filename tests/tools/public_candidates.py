"""Judges a folder of public candidates and writes what became of each as a table.

    python tests/tools/public_candidates.py FOLDER --out RECORDS [--processes N] [--limit SECONDS] [NAME ...]
    python tests/tools/public_candidates.py FOLDER --out RECORDS --build [NAME ...]    builds them, and judges none
    python tests/tools/public_candidates.py FOLDER --out RECORDS --table               the table of what is recorded

FOLDER holds L_TTT_ref.py, L_TTT_new.py and published.json, the factors that were claimed. RECORDS is a folder: each
candidate's verdict is a file of its own, written as soon as it is known, and one that is there is not judged again.
Each pair is judged in float32 against eager and torch.compile. Several judges share one GPU; while one of them times a
candidate, the others compile and import, and their requests wait (`Turns`). A candidate that takes more than --each is
given up, without a record. None of the candidates' code is kept.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
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
from judge.worker import COMPILE_MODES, Rejected  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Two hundred candidates are many: less is timed than the harness times.
SECONDS, TIMEOUT, bench.MOST_CALLS = 0.05, 60.0, 2
BASELINES, MOST_WORDS = ("eager", "compile"), 300
# Their Models begin each call with the hidden state of the call before, so that no answer can be asked for alone. In
# both files each call is made to begin with the state that the module was made with: a small copy, timed with both. The
# Model's goes to new memory, the candidate's to where its own lies, which it may have given as an answer.
KEEPS_ITS_STATE = ("3_033", "3_034")
FROM_THE_START = """


def begin_anew(cls, in_place):
    made, answered = cls.__init__, cls.forward

    def __init__(self, *arguments):
        made(self, *arguments)
        self.start = self.hidden.clone()

    def forward(self, x):
        self.start = self.start.to(x.device)
        memory = self.hidden.detach().to(x.device) if in_place else torch.empty_like(self.start)
        self.hidden = memory.copy_(self.start)
        return answered(self, x)

    cls.__init__, cls.forward = __init__, forward


"""


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
    """Imports a candidate and makes it, which builds what most build; it is not called, since others are timed."""
    pair = pair_of(folder, name)
    make(load(pair.new_path).ModelNew, Problem(pair.model_path).arguments(0), 0)


def share_the_gpu(turns: Turns) -> None:
    """Timings alone, and whatever else calls a module together with others', except for what compiles."""
    check.put = within(turns.with_others, check.put)
    check.comparable = within(turns.with_others, check.comparable)
    bench.inspect = within(turns.with_others, bench.inspect)
    bench.Ring = within(turns.with_others, bench.Ring)
    bench.rounds = within(turns.alone, bench.rounds)
    get_ready = within(turns.with_others, bench.get_ready)

    def compile_first(case, ring, seconds):
        """Compilers take seconds in which others may be timed; a dozen calls end them."""
        for name in COMPILE_MODES.keys() & case.workers.keys():
            with contextlib.suppress(Rejected):  # it will say so again
                case.workers[name].ask("ready", seconds=0, **ring.ready)
        return get_ready(case, ring, seconds)

    bench.get_ready = compile_first


def judge(judging: Judge, pair: Pair) -> dict:
    if "class " not in pair.new_path.read_text():
        return {"status": "no code published", "why": [], "speedup": {}}
    try:
        (run,) = judging.judge(pair)
    except Exception as error:
        return {"status": "the judge failed", "why": [f"{type(error).__name__}: {error}"], "speedup": {}}
    record = {"status": run.status, "why": run.reasons or run.no_dropin, "speedup": run.speedup, "batch": run.batch}
    return record | {"ms": run.ms, "notes": run.notes, "interference": run.interference, "roof": run.roof}


def judge_all(asked: argparse.Namespace) -> None:
    """Those that no other judge has claimed."""
    deadline, claims = time.monotonic() + asked.limit, asked.claims
    share_the_gpu(Turns(claims))
    ceilings = Ceilings(DEVICE, ("float32",))
    while not (claims / "ceilings").exists():
        time.sleep(0.1)
    vars(ceilings).update(json.loads((claims / "ceilings").read_text()))
    baselines = tuple(asked.baselines.split(","))
    options = Options(device=DEVICE, require="right", baselines=baselines, seconds=SECONDS, timeout=TIMEOUT)
    with contextlib.closing(Judge(options, ceilings, lambda text: None)) as judging:
        for name in asked.names:
            if time.monotonic() > deadline:
                break
            try:
                (claims / name).touch(exist_ok=False)
            except FileExistsError:
                continue
            begin = time.monotonic()
            limit = threading.Timer(asked.each, lambda: judging.workers["new"].kill())
            limit.start()
            record = judge(judging, pair_of(asked.folder, name)) | {"seconds": round(time.monotonic() - begin, 1)}
            limit.cancel()
            given_up = record["seconds"] >= asked.each
            print(name, "given up" if given_up else "", json.dumps(record), flush=True)
            if not given_up:
                (asked.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def table(folder: Path, out: Path) -> list[str]:
    """A row a candidate; words.json, where there is one, says in words what was found by reading it, of one that is
    right beside the judge's reasons why it is no drop-in."""
    published = json.loads((folder / "published.json").read_text())
    words = json.loads((out / "words.json").read_text()) if (out / "words.json").exists() else {}
    records = {name: record_of(out, name) for name in sorted(published)}
    rows = ["| task | verdict | x eager | x compile | published | why |", "| --- | --- | --- | --- | --- | --- |"]
    for name, record in records.items():
        ours = (f"{record['speedup'][each]:.2f}" if each in record["speedup"] else "-" for each in BASELINES)
        theirs = ", ".join(f"{published[name][each]:.2f}" for each in BASELINES if published[name][each])
        said = "; ".join(record["why"])[:MOST_WORDS]
        why = words.get(name) or said
        if record["status"] == "right" and name in words:
            why += f". No drop-in: {said}"
        why = re.sub(r" at 0x\w+", "", why).replace("|", "/").replace("\n", " ")
        rows.append(f"| {name} | {record['status']} | {' | '.join(ours)} | {theirs} | {why} |")
    return [*totals(records, published), "", *rows]


def record_of(out: Path, name: str) -> dict:
    path = out / f"{name}.json"
    if not path.exists():
        return {"status": "not judged", "why": [], "speedup": {}}
    record = json.loads(path.read_text())
    if record["why"] and record["why"][0].startswith("the Model itself"):
        record["status"] = "not judged"
    return record


def totals(records: dict[str, dict], published: dict[str, dict]) -> list[str]:
    counts = Counter(record["status"] for record in records.values())
    lines = [", ".join(f"{count} {status}" for status, count in counts.most_common()) + "."]
    for over in BASELINES:
        timed = [name for name, record in records.items() if over in record["speedup"] and published[name][over]]
        if timed:
            ours, theirs = [records[name]["speedup"][over] for name in timed], [published[name][over] for name in timed]
            said = f"geometric mean {statistics.geometric_mean(ours):.2f}, median {statistics.median(ours):.2f}"
            said += f"; published {statistics.geometric_mean(theirs):.2f} and {statistics.median(theirs):.2f}"
            faster = sum(factor > 1.05 for factor in ours)
            lines.append(f"Times {over}, of {len(timed)} that are right: {said}. More than 1.05: {faster}.")
    return lines


def copied(pair: Pair, folder: Path) -> None:
    """Both files. Candidates that call their extensions alike are not to build in one folder."""
    path = pair.new_path
    model, text = pair.model_path.read_text(), path.read_text()
    if pair.name in KEEPS_ITS_STATE:
        model += FROM_THE_START + "begin_anew(Model, in_place=False)\n"
        text += FROM_THE_START + "begin_anew(ModelNew, in_place=True)\n"
    (folder / pair.model_path.name).write_text(model)
    if "load_inline" in text:
        builds = Path(os.environ.get("TORCH_EXTENSIONS_DIR", tempfile.gettempdir())) / "public" / path.stem
        builds.mkdir(parents=True, exist_ok=True)
        text = f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = {str(builds)!r}\n{text}"
    (folder / path.name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, metavar="RECORDS")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e6, metavar="SECONDS", help="begin no other after so many")
    parser.add_argument("--each", type=float, default=1e6, metavar="SECONDS", help="of one candidate")
    parser.add_argument("--baselines", default=",".join(BASELINES))
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)  # of the judges that share a GPU
    asked = parser.parse_intermixed_args()
    if asked.table:
        print("\n".join(table(asked.folder, asked.out)))
        return
    if asked.claims and asked.build:
        build(asked.folder, asked.names[0])
        return
    if asked.claims:
        judge_all(asked)
        return
    # The largest networks, of the highest level, first: the last to end are then short ones.
    every = sorted((path.name.removesuffix("_new.py") for path in asked.folder.glob("*_new.py")), reverse=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in asked.names or every if asked.build or not (asked.out / f"{name}.json").exists()]
    # Many processes on few cores: none takes more than two.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder)
        for name in names:
            copied(pair_of(asked.folder, name), claims)
        command = [sys.executable, __file__, claims, "--out", asked.out.resolve(), "--claims", claims]
        if asked.build:
            run = partial(subprocess.run, timeout=asked.limit)
            with ThreadPoolExecutor(asked.processes) as pool:
                list(pool.map(run, [[*command, "--build", name] for name in names]))
            return
        command += ["--limit", str(asked.limit), "--each", str(asked.each), "--baselines", asked.baselines, *names]
        started = [subprocess.Popen(command, env=environment, cwd=claims) for _ in range(asked.processes)]
        ceilings = Ceilings(DEVICE, ("float32",))  # while they load PyTorch
        ceilings.measure()
        figures = {"copy_bandwidth": ceilings.copy_bandwidth, "matrix_rate": ceilings.matrix_rate}
        (claims / "figures").write_text(json.dumps(figures))
        (claims / "figures").rename(claims / "ceilings")
        for process in started:
            process.wait()


if __name__ == "__main__":
    main()
