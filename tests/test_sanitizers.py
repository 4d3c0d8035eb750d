"""The C++ strings with AddressSanitizer and UndefinedBehaviorSanitizer; for the CUDA strings: tools/sanitize.py."""

import shutil
import subprocess
from pathlib import Path

import pytest
from cases import PORTABLE, ROOT
from processes import compiler, finish, start_python

# The flags are added by a compiler of another name, so the file is built as it always is. Not optimised: no access is.
COMPILER = """unset LD_PRELOAD
exec c++ "$@" -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -g1 -O0
"""
RUN_ALL = """
sys.path.insert(0, "tests")
from cases import CASES, LAYOUTS, build
ran = 0
for case in CASES:
    if case.values < 1e5:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in ("contiguous", "offset by one element", "transposed"):
                _, new, inputs = build(case, "cpu", dtype)
                with torch.no_grad():
                    new(*[LAYOUTS[layout](t) for t in inputs])
                ran += 1
print(f"ran {ran}")
"""


def sanitizer_libraries() -> list[str]:
    """Those of the compiler; what it does not have it prints back without a folder."""
    if not shutil.which("gcc") or not shutil.which("c++"):
        return []
    commands = [["gcc", f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    paths = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in commands]
    return paths if all(Path(path).is_absolute() for path in paths) else []


@pytest.mark.slow
def test_no_fault_of_memory_or_arithmetic(tmp_path):
    """Forward of small cases of every pair, also at odd offsets, also empty. The CPU's strings, whatever devices."""
    libraries = sanitizer_libraries()
    if not libraries:
        pytest.skip("needs g++ with libasan and libubsan")
    built = tmp_path / "built"
    environment = {
        "CXX": compiler(tmp_path, COMPILER),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0",  # Python leaks at exit; CUDA's libraries want the gap
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": built,
    }
    code, out, err = finish(start_python(RUN_ALL, cwd=ROOT, **environment), timeout=300)
    assert code == 0 and int(out.removeprefix("ran ")) > 200, f"exit code {code}:\n{out}\n{err}"
    libraries = [path.read_bytes() for path in built.rglob("*.so")]
    assert len(libraries) == len(PORTABLE)  # the others build nothing on a CPU
    assert all(b"__asan_report_load" in text and b"__ubsan_handle" in text for text in libraries)
