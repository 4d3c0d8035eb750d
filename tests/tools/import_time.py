"""How long an import takes: cold (compilers run) and warm (load_inline finds its work done). Wall-clock seconds.

    python tests/tools/import_time.py

Cold is measured for each kernel file alone and for all at once, each time in an empty TORCH_EXTENSIONS_DIR. All figures
are what the import adds to `import torch`, in a fresh process; warm, the median of three.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cases import ROOT
from processes import finish, start_python

FILES = sorted((ROOT / "kernels").rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT / "kernels").with_suffix("").as_posix()


IMPORT = """
begin = time.perf_counter()
load(sys.argv[1], "imported")
print(time.perf_counter() - begin)
"""


def start(file: Path, cache: str) -> subprocess.Popen:
    return start_python(IMPORT, file, cwd=ROOT, TORCH_EXTENSIONS_DIR=cache)


def seconds(process: subprocess.Popen) -> float:
    """What the kernel file's import took, after that of torch."""
    code, out, err = finish(process, timeout=600)
    if code:
        raise SystemExit(err)
    return float(out)


def main() -> None:
    alone, warm, together = {}, {}, {}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        seconds(start(FILES[0], first + "/unused"))  # what the disk has to read is read
        for file in FILES:
            alone[name_of(file)] = seconds(start(file, first))
        for file in FILES:
            warm[name_of(file)] = statistics.median(seconds(start(file, first)) for _ in range(3))
        processes = {name_of(file): start(file, second) for file in FILES}
        together = {stem: seconds(process) for stem, process in processes.items()}
    for stem in alone:
        print(f"{stem:32} cold {alone[stem]:5.1f} s alone, {together[stem]:5.1f} s at once; warm {warm[stem]:.2f} s")


if __name__ == "__main__":
    main()
