"""Judges published candidates, and writes the table results/public_candidates.md.

    python tests/tools/public_candidates.py FOLDER --json FILE    judges each FOLDER/NAME_ref.py with FOLDER/NAME_new.py
    python tests/tools/public_candidates.py FOLDER --table FILE   writes the table of such a file to standard output

The candidates are CUDA-L1's for the H100 (github.com/deepreinforce-ai/CUDA-L1, optimized_cuda_code/h100.json: a JSON
object a line, `ref_code` and `custom_code`); FOLDER/published.json maps NAME to the speed-ups that were published.
One harness a GPU at a time, in a process of its own; extensions are built beforehand, many at once.
"""

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORT = "import runpy, sys; runpy.run_path(sys.argv[1])"


def environment(gpu: int, builds: Path, name: str) -> dict:
    """Each candidate builds in a folder of its own: several call their extensions alike."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "TORCH_EXTENSIONS_DIR": str(builds / name), "MAX_JOBS": "2"}


def in_parallel(names: list[str], workers: int, task: Callable[[str, int], None]) -> None:
    """task(name, worker) for each name; a worker has one at a time."""
    free = queue.SimpleQueue()
    for worker in range(workers):
        free.put(worker)

    def work(name: str) -> None:
        worker = free.get()
        task(name, worker)
        free.put(worker)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, names))


def build(folder: Path, builds: Path, names: list[str], seconds: float) -> None:
    """Imports the candidates that compile something; whether that fails, the harness says later."""

    def task(name: str, worker: int) -> None:
        command = [sys.executable, "-c", IMPORT, str(folder / f"{name}_new.py")]
        try:
            subprocess.run(command, env=environment(0, builds, name), capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: not built in {seconds:.0f} s", flush=True)

    compiled = [name for name in names if "cpp_extension" in (folder / f"{name}_new.py").read_text()]
    in_parallel(compiled, max(1, (os.cpu_count() or 2) // 2), task)


def judge(folder: Path, builds: Path, names: list[str], gpus: int, options: argparse.Namespace) -> list[dict]:
    found, deadline = [], time.monotonic() + options.within

    def task(name: str, gpu: int) -> None:
        if time.monotonic() > deadline:
            return
        out = builds / f"{name}.json"
        command = [sys.executable, "harness.py", str(folder / f"{name}_ref.py"), str(folder / f"{name}_new.py")]
        command += ["--json", str(out), "--seconds", str(options.seconds), "--baselines", options.baselines]
        try:
            settings = {"cwd": ROOT, "env": environment(gpu, builds, name), "capture_output": True, "text": True}
            done = subprocess.run(command, timeout=options.each, check=False, **settings)
            code, said = done.returncode, done.stderr[-400:]
        except subprocess.TimeoutExpired:
            code, said = None, f"not judged in {options.each:.0f} s"
        runs = json.loads(out.read_text())["runs"] if out.exists() and out.stat().st_size else []
        row = {"name": name, "exit": code, "said": "" if runs else said}
        for key in ("status", "reasons", "no_dropin", "notes", "ms", "speedup", "speedup_ci"):
            row[key] = runs[0].get(key) if runs else None
        found.append(row)
        print(f"{len(found)}/{len(names)} {name}: {row['status']} {(row['speedup'] or {}).get('eager')}", flush=True)
        options.json.write_text(json.dumps(sorted(found, key=lambda row: row["name"]), indent=1) + "\n")

    in_parallel(names, gpus, task)
    return found


def table(rows: list[dict], published: dict) -> str:
    """One line a candidate, and the totals."""
    lines = ["| task | verdict | × eager | × compile | published × eager, × compile | why |", "| --- " * 6 + "|"]
    for row in rows:
        times = [f"{row['speedup'][b]:.2f}" if b in (row["speedup"] or {}) else "" for b in ("eager", "compile")]
        claimed = ", ".join(f"{v:.2f}" for v in published.get(row["name"], {}).values() if v)
        why = [*(row["reasons"] or []), *(row["no_dropin"] or [])] or [row["said"]]
        words = re.sub(r"\s+", " ", "; ".join(why)).replace("|", "\\|")
        lines.append(
            f"| {row['name']} | {row['status'] or 'not judged'} | {times[0]} | {times[1]} | {claimed} | {words} |"
        )
    totals = Counter(row["status"] or "not judged" for row in rows)
    return "\n".join([", ".join(f"{count} {status}" for status, count in totals.most_common()), "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--table", type=Path, help="of these results")
    parser.add_argument("--only", default="", help="a pattern that names contain")
    parser.add_argument("--baselines", default="eager")
    parser.add_argument("--seconds", type=float, default=0.2, help="of timing, of each contender")
    parser.add_argument("--each", type=float, default=120, help="seconds for a candidate")
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which no further candidate is begun")
    parser.add_argument("--gpus", type=int, default=1)
    options = parser.parse_args()
    if options.table:
        published = json.loads((options.folder / "published.json").read_text())
        print(table(json.loads(options.table.read_text()), published))
        return
    names = sorted(path.name.removesuffix("_ref.py") for path in options.folder.glob("*_ref.py"))
    names = [name for name in names if re.search(options.only, name)]
    with tempfile.TemporaryDirectory() as builds:
        build(options.folder.resolve(), Path(builds), names, options.each)
        judge(options.folder.resolve(), Path(builds), names, options.gpus, options)


if __name__ == "__main__":
    main()
