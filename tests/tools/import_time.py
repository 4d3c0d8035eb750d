"""How long an import takes: cold (compilers run) and warm (load_inline finds its work done). Wall-clock seconds.

    python tests/tools/import_time.py

Cold is measured for each kernel file alone and for all at once, each time in an empty TORCH_EXTENSIONS_DIR. All figures
are what the import adds to `import torch`, in a fresh process; warm, the median of three.
"""

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cases import ROOT
from processes import finish, start_python

FILES = sorted((ROOT / "kernels").rglob("*.py"))
IMPORT = """
begin = time.perf_counter()
load(sys.argv[1], "imported")
print(time.perf_counter() - begin)
"""


def seconds(files: list[Path], cache: str) -> list[float]:
    """Of each import, all begun at once."""
    processes = [start_python(IMPORT, file, cwd=ROOT, TORCH_EXTENSIONS_DIR=cache) for file in files]
    return [float(out or sys.exit(err)) for _, out, err in (finish(process, timeout=600) for process in processes)]


def main() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        seconds(FILES[:1], first + "/unused")  # what the disk has to read is read
        alone = [seconds([file], first)[0] for file in FILES]
        warm = [statistics.median(seconds([file], first)[0] for _ in range(3)) for file in FILES]
        together = seconds(FILES, second)
    for file, one, all_at_once, again in zip(FILES, alone, together, warm):
        name = file.relative_to(ROOT / "kernels").with_suffix("").as_posix()
        print(f"{name:36} cold {one:5.1f} s alone, {all_at_once:5.1f} s at once; warm {again:.2f} s")


if __name__ == "__main__":
    main()
