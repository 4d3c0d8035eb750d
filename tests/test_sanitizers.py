"""The C++ strings built with AddressSanitizer and UndefinedBehaviorSanitizer: the first fault of memory or arithmetic ends the process.

And how sanitize.py, which needs a GPU, reads its tools.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import sanitize
from cases import ROOT, STEMS
from processes import finish, start_python

# The flags are added by a compiler of another name, so the file is built as it always is. Not optimised: no access is optimised away.
COMPILER = """#!/bin/sh
unset LD_PRELOAD
exec c++ "$@" -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -g1 -O0
"""
RUN_ALL = """
sys.path.insert(0, "tests")
from cases import CASES, DTYPES, LAYOUTS, build, runs
ran = 0
for case in CASES:
    if case.stem == sys.argv[1] and case.values < 1e5:
        for dtype in [dtype for dtype in DTYPES if runs(dtype, "cpu")]:
            _, new, inputs = build(case, "cpu", dtype)
            for layout in ("contiguous", "offset by one element", "transposed"):
                with torch.no_grad():
                    out = new(*[LAYOUTS[layout](t) for t in inputs])
                gradient = LAYOUTS[layout](torch.ones_like(out))
                new(*[LAYOUTS[layout](t).requires_grad_() for t in inputs]).backward(gradient)
                ran += 1
print(f"ran {ran}")
"""


def sanitizer_libraries() -> list[str]:
    """Those of the compiler; what it does not have it prints back without a folder."""
    names = ("libasan.so", "libubsan.so")
    gcc = shutil.which("gcc")
    if gcc is None:
        return []
    paths = [subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip() for name in names]
    return paths if all(Path(path).is_absolute() for path in paths) else []


def run_all_with_sanitizers() -> tuple[list[tuple[int, str, str]], list[bytes]] | None:
    """What the processes, one for each pair, ended with, and the libraries that they built."""
    libraries = sanitizer_libraries()
    if not libraries or shutil.which("c++") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        compiler, built = Path(folder, "c++-with-sanitizers"), Path(folder, "built")
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        environment = {
            "CXX": compiler,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0",  # Python leaks at exit; CUDA's libraries want the gap
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": built,
        }
        ended = [finish(start_python(RUN_ALL, stem, cwd=ROOT, **environment), timeout=300) for stem in STEMS]
        return ended, [path.read_bytes() for path in built.rglob("*.so")]


def test_no_fault_of_memory_or_arithmetic():
    """Forward and gradients of small cases of every pair, in every dtype, also at odd offsets, also empty.

    The CPU's strings only, whatever devices there are.
    """
    ran = run_all_with_sanitizers()
    if ran is None:
        pytest.skip("needs g++ with libasan and libubsan")
    ended, built = ran
    for code, out, err in ended:
        assert code == 0 and int(out.removeprefix("ran ")) > 100, f"exit code {code}:\n{out}\n{err}"
    assert len(built) == len(STEMS) and all(b"__asan_report_load" in text and b"__ubsan_handle" in text for text in built)


def test_what_is_a_librarys_own_is_told_by_name_and_the_rest_is_ours():
    """As compute-sanitizer prints it. A library's kernel that reads what nobody wrote may read a tensor of ours."""
    built = {"sums<float,1"}
    sites = "void sums<float, (int)1>(float *)+0x40", "void at::reduce<double>(T1)+0x80", "void at::reduce<double>(T1)+0x90"
    ours, known, other = (f"========= Uninitialized read\n=========     at {site}\n=========     by thread (0,0,0)\n" for site in sites)
    without_ours = sanitize.found_in(known)
    dropped = "========= Warning: Error buffer overflow has been detected. Some records have been dropped\n"
    faults = sanitize.found_in(3 * known + dropped + other + ours + dropped)
    assert sorted(faults.values()) == [1, 2, 4]
    assert [count for fault, count in faults.items() if sanitize.is_a_librarys(fault, built, without_ours)] == [4]
    assert "4 times Uninitialized read in at::reduce<double+0x80" in map(sanitize.told, faults, faults.values())
    race = "========= Error: Race reported between Read access at {}+0x10\n=========     and Write access at {}+0x20 [48 hazards]\n"
    library, mixed = (sanitize.found_in(race.format("nvjet_sm90", other)) for other in ("nvjet_sm90", "void sums<float, 1>(float *)"))
    assert all(sanitize.is_a_librarys(fault, built, without_ours) for fault in library)
    assert not any(sanitize.is_a_librarys(fault, built, without_ours) for fault in mixed)
    assert len(library) == len(mixed) == 1


def test_a_few_calls_launch_every_kernel():
    launched, us = [["a"], ["a", "b"], ["c"], ["a", "b", "c"], ["b"]], [1.0, 2.0, 3.0, 9000.0, 4.0]
    assert sanitize.in_order(launched, us) == [2, 1, 0, 4, 3]
