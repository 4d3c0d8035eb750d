"""How long an import takes, in seconds of fresh processes: cold (compilers run) and warm (nothing is to be done).

    python tests/tools/import_time.py [--json results/imports.json]

Cold is measured for each kernel file alone and for all at once, each time in an empty TORCH_EXTENSIONS_DIR. Warm is the
median of five processes. Both are what the import adds to `import torch`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = sorted((Path(__file__).resolve().parent.parent.parent / "kernels").glob("*.py"))
IMPORT = """
import sys, time
import torch
begin = time.perf_counter()
import importlib.util
spec = importlib.util.spec_from_file_location("imported", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(time.perf_counter() - begin)
"""


def start(file: Path, cache: str) -> subprocess.Popen:
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": cache}
    return subprocess.Popen([sys.executable, "-c", IMPORT, file], env=environment, stdout=subprocess.PIPE, text=True)


def seconds(process: subprocess.Popen) -> float:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"an import ended with exit code {process.returncode}")
    return float(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        seconds(start(FILES[0], f"{first}/unused"))  # what the disk has to read is read
        cold = {file.stem: seconds(start(file, first)) for file in FILES}
        warm = {file.stem: statistics.median(seconds(start(file, first)) for _ in range(5)) for file in FILES}
        processes = {file.stem: start(file, second) for file in FILES}
        together = {stem: seconds(process) for stem, process in processes.items()}
    for stem in cold:
        print(f"{stem:32} cold {cold[stem]:.1f} s, beside the others {together[stem]:.1f} s; warm {warm[stem]:.2f} s")
    if options.json:
        options.json.write_text(json.dumps({"cold": cold, "cold_at_once": together, "warm": warm}, indent=1) + "\n")


if __name__ == "__main__":
    main()
