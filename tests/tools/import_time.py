"""How long an import takes: cold (compilers run) and warm (load_inline finds its work done). Wall-clock seconds.

    python tests/tools/import_time.py

Cold is measured for each kernel file alone and for all at once, each time in an empty TORCH_EXTENSIONS_DIR. All figures
are what the import adds to `import torch`, in a fresh process; warm, the median of three.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted((ROOT / "kernels").glob("*.py"))

# Prints the seconds of `import torch` and those of the kernel file after it.
IMPORT = """
import sys, time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import importlib.util
spec = importlib.util.spec_from_file_location("imported", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(middle - begin, time.perf_counter() - middle)
"""


def start(file: Path, cache: str) -> subprocess.Popen:
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": cache}
    command = [sys.executable, "-c", IMPORT, str(file)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def seconds(process: subprocess.Popen) -> float:
    """What the kernel file's import took, without that of torch."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"an import ended with exit code {process.returncode}")
    return float(out.split()[1])


def main() -> None:
    alone, warm, together = {}, {}, {}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        seconds(start(FILES[0], first + "/unused"))  # what the disk has to read is read
        for file in FILES:
            alone[file.stem] = seconds(start(file, first))
        for file in FILES:
            warm[file.stem] = statistics.median(seconds(start(file, first)) for _ in range(3))
        begin = time.perf_counter()
        processes = {file.stem: start(file, second) for file in FILES}
        together = {stem: seconds(process) for stem, process in processes.items()}
        wall = time.perf_counter() - begin
    for stem in alone:
        print(f"{stem:32} cold {alone[stem]:5.1f} s alone, {together[stem]:5.1f} s at once; warm {warm[stem]:.2f} s")
    print(f"all at once, with import torch: {wall:.1f} s")


if __name__ == "__main__":
    main()
