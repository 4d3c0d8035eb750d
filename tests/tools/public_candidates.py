"""Judges a folder of public candidates and writes what became of each as a table.

    python tests/tools/public_candidates.py FOLDER [--out RECORDS.json] [--processes N] [--limit SECONDS] [NAME ...]
    python tests/tools/public_candidates.py FOLDER --out RECORDS.json --table      the table of what is recorded

FOLDER holds L_TTT_ref.py, L_TTT_new.py and published.json, the factors that were claimed. Each pair is judged in
float32 against eager and torch.compile; what is recorded already is left out. With several processes the verdicts hold;
the times, which the others disturb, are not kept. None of the candidates' code is kept.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from harness import Judge, Options  # noqa: E402
from judge.roofline import Ceilings  # noqa: E402
from judge.source import Pair  # noqa: E402


def judge(folder: Path, out: Path, names: list[str], limit: float, baselines: tuple, timed: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ceilings = Ceilings(device, ("float32",))
    ceilings.measure()
    options = Options(device=device, require="right", baselines=baselines, seconds=0.3 if timed else 0.02, timeout=30.0)
    judge, begin = Judge(options, ceilings, lambda text: None), time.monotonic()
    records = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        if time.monotonic() - begin > limit:
            break
        try:
            (run,) = judge.judge(Pair(name, folder / f"{name}_ref.py", folder / f"{name}_new.py"))
        except Exception as error:
            records[name] = {"status": "the judge failed", "why": [f"{type(error).__name__}: {error}"], "speedup": {}}
        else:
            why = run.reasons or run.no_dropin
            speedup = run.speedup if timed else {}
            records[name] = {"status": run.status, "why": why, "speedup": speedup, "notes": run.notes, "ms": run.ms}
        records[name]["seconds"] = round(time.monotonic() - begin, 1)
        print(name, json.dumps(records[name]), flush=True)
        out.write_text(json.dumps(records, indent=1) + "\n")
    judge.close()


def table(folder: Path, out: Path) -> list[str]:
    published = json.loads((folder / "published.json").read_text())
    records = json.loads(out.read_text())
    lines = ["| task | verdict | x eager | x compile | published | why |", "| --- | --- | --- | --- | --- | --- |"]
    for name in sorted(published):
        run = records.get(name, {"status": "not judged", "why": [], "speedup": {}})
        factors = [f"{run['speedup'][each]:.2f}" if each in run["speedup"] else "-" for each in ("eager", "compile")]
        claimed = ", ".join(f"{published[name][each]:.2f}" for each in ("eager", "compile") if published[name][each])
        why = "; ".join(run["why"])[:300].replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {run['status']} | {' | '.join(factors)} | {claimed} | {why} |")
    counts = Counter(records.get(name, {"status": "not judged"})["status"] for name in published)
    return [", ".join(f"{count} {status}" for status, count in counts.most_common()), "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("public.json"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS", help="begin no other after so many")
    parser.add_argument("--baselines", default="eager,compile")
    parser.add_argument("--untimed", action="store_true")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    if asked.table:
        print("\n".join(table(asked.folder, asked.out)))
        return
    known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    every = sorted(path.name.removesuffix("_new.py") for path in asked.folder.glob("*_new.py"))
    names = [name for name in asked.names or every if name not in known]
    if asked.processes == 1:
        judge(asked.folder, asked.out, names, asked.limit, tuple(asked.baselines.split(",")), not asked.untimed)
        return
    parts = [asked.out.with_suffix(f".{i}.json") for i in range(asked.processes)]
    command = [
        sys.executable,
        __file__,
        str(asked.folder),
        "--limit",
        str(asked.limit),
        "--untimed",
        "--baselines",
        "eager",
    ]
    shares = [names[i :: asked.processes] for i in range(asked.processes)]
    started = [
        subprocess.Popen([*command[:3], *share, *command[3:], "--out", part], stdout=subprocess.DEVNULL)
        for part, share in zip(parts, shares)
        if share
    ]
    for process in started:
        process.wait()
    for part in parts:
        known |= json.loads(part.read_text()) if part.exists() else {}
        part.unlink(missing_ok=True)
    asked.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
