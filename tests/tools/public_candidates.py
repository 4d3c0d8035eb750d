"""Judges a folder of public candidates by harness.py, one after the other, and writes what became of each as a table.

    python tests/tools/public_candidates.py FOLDER --out RECORDS [--each SECONDS] [NAME ...]
    python tests/tools/public_candidates.py FOLDER --out RECORDS --table        the table of what is recorded

FOLDER holds L_TTT_ref.py, L_TTT_new.py and published.json, the factors that were claimed. RECORDS is a folder: each
candidate's verdict is a file of its own, written as soon as it is known, and one that is there is not judged again.
Each pair is judged in float32 against eager and torch.compile. A candidate that takes more than --each is given up,
without a record. None of the candidates' code is kept.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HARNESS = Path(__file__).resolve().parent.parent.parent / "harness.py"
OPTIONS = ["--seconds", "0.1", "--timeout", "60"]  # two hundred candidates are many: less is timed than by default
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


def copied(name: str, folder: Path, to: Path) -> list[Path]:
    """Both files. Candidates that call their extensions alike are not to build in one folder."""
    model, text = ((folder / f"{name}_{which}.py").read_text() for which in ("ref", "new"))
    if name in KEEPS_ITS_STATE:
        model += FROM_THE_START + "begin_anew(Model, in_place=False)\n"
        text += FROM_THE_START + "begin_anew(ModelNew, in_place=True)\n"
    if "load_inline" in text:
        builds = Path(os.environ.get("TORCH_EXTENSIONS_DIR", tempfile.gettempdir())) / "public" / name
        builds.mkdir(parents=True, exist_ok=True)
        text = f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = {str(builds)!r}\n{text}"
    paths = [to / f"{name}_ref.py", to / f"{name}_new.py"]
    for path, content in zip(paths, (model, text)):
        path.write_text(content)
    return paths


def judge(name: str, folder: Path, seconds: float) -> dict | None:
    """The record; None if the time was over."""
    if "class " not in (folder / f"{name}_new.py").read_text():
        return {"status": "no code published", "why": [], "speedup": {}}
    with tempfile.TemporaryDirectory() as to:
        written = Path(to, "record.json")
        command = [sys.executable, HARNESS, *copied(name, folder, Path(to)), *OPTIONS, "--json", written]
        try:
            done = subprocess.run(command, timeout=seconds, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode == 4 or not written.exists():
            return {"status": "the judge failed", "why": [done.stderr[-MOST_WORDS:]], "speedup": {}}
        (run,) = json.loads(written.read_text())["runs"]
    kept = ("status", "speedup", "batch", "ms", "notes", "interference", "roof")
    return {key: run[key] for key in kept} | {"why": run["reasons"] or run["no_dropin"]}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, metavar="RECORDS")
    parser.add_argument("--each", type=float, default=600.0, metavar="SECONDS", help="of one candidate")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_intermixed_args()
    if asked.table:
        print("\n".join(table(asked.folder, asked.out)))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    every = sorted(path.name.removesuffix("_new.py") for path in asked.folder.glob("*_new.py"))
    for name in asked.names or every:
        path = asked.out / f"{name}.json"
        record = None if path.exists() else judge(name, asked.folder, asked.each)
        if record:
            path.write_text(json.dumps(record, indent=1) + "\n")
        print(name, json.dumps(record) if record else "recorded before" if path.exists() else "given up", flush=True)


if __name__ == "__main__":
    main()
