"""The build: clear about what is missing, safe from whatever happens around it; every CUDA string compiles."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases import KNOWN, PORTABLE, QUICKEST, ROOT, STEMS, build, solution
from processes import QUICKLY, compiler, finish, run_python, start_python
from sources import strings
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

# All files build by the same function, which test_copying holds equal. This one is the quickest to build.
FILE = ROOT / "kernels" / f"{QUICKEST.stem}.py"

IMPORT = 'load(sys.argv[1], "fresh")'
IMPORT_AND_CHECK = 'check(load(sys.argv[1], "fresh").ModelNew, sys.argv[2])'


@pytest.fixture
def saved(tmp_path):
    """A file with inputs of FILE's Model and what the Model makes of them."""
    model, _, inputs = build(QUICKEST, "cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        case = {"init": QUICKEST.init, "inputs": inputs, "expected": model(*inputs), "state": model.cpu().state_dict()}
    torch.save(case, tmp_path / "case.pt")
    return tmp_path / "case.pt"


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    return shutil.which("nvcc") or next((path for home in homes if (path := shutil.which(f"{home}/bin/nvcc"))), None)


@pytest.mark.slow
@pytest.mark.parametrize("stem", STEMS)
def test_cuda_compiles_without_warnings_and_spills(stem, tmp_path):
    nvcc = find_nvcc()
    if nvcc is None:
        assert not os.environ.get("CI"), "no nvcc, which continuous integration must have"
        pytest.skip("no nvcc on this machine")
    (tmp_path / "kernels.cu").write_text(strings(stem)["CUDA_SOURCE"])
    flags = ["-O3", "-Xptxas=-v", "-diag-suppress=177", *COMMON_NVCC_FLAGS]  # 177: constants an architecture leaves out
    architectures = ("80", "120") if stem in PORTABLE else ("90a",)  # a Hopper file is for that alone
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    command = [nvcc, "--threads=2", "-c", "kernels.cu", "-o", "kernels.o", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    report = done.stdout + done.stderr
    assert done.returncode == 0 and "warning" not in report, report
    spills = re.findall(r"(\d+) bytes spill stores", report)
    assert spills
    if stem in KNOWN or stem not in PORTABLE:  # a new pair may spill
        assert max(map(int, spills)) == 0, report


def folder_of_tools(folder: Path, *names: str) -> Path:
    """A PATH with these programs alone."""
    folder.mkdir()
    for name in names:
        path = shutil.which(name) or shutil.which(Path(sys.executable).parent / name)
        assert path, f"the test itself needs {name}"
        (folder / name).symlink_to(path)
    return folder


def python_without_ninja(folder: Path) -> Path:
    """A virtual environment with this one's packages, but no programs of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(torch.__file__).parent.parent
    next(folder.glob("lib/python*/site-packages")).joinpath("shared.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


COMPILER_TOOLS = ["c++", "g++", "gcc", "as", "ld"]

# Tries the import in each of the environments, one after another, and prints what it raises: what is missing or, as
# nothing is built, the folder that load_inline is to build in and the architectures it is told. `gpu` stands for a
# machine with one GPU, as far as the build asks, and this CUDA_HOME; `torch` for a version of PyTorch.
TRY_EACH = """
import json
import torch.utils.cpp_extension

def note(*arguments, build_directory, extra_cuda_cflags, **options):
    raise RuntimeError(f"{build_directory} {[flag for flag in extra_cuda_cflags if 'arch' in flag]}")

torch.utils.cpp_extension.load_inline = note
before = dict(os.environ)
for changes in json.loads(sys.argv[2]):
    torch.__version__ = changes.pop("torch", "9.9.9")
    if "gpu" in changes:
        torch.version.cuda = "13.0"
        torch.cuda.device_count = lambda: 1
        capability = tuple(changes.pop("capability", (9, 0)))
        torch.cuda.get_device_capability = lambda device=None: capability
        torch.utils.cpp_extension.CUDA_HOME = changes.pop("gpu")
    os.environ.clear()
    os.environ.update({name: text for name, text in (before | changes).items() if text is not None})
    try:
        load(sys.argv[1], "fresh")
    except RuntimeError as error:
        print(error)
"""


def answers(environments: list[dict], cwd: Path, **options) -> list[str]:
    return run_python(TRY_EACH, FILE, json.dumps(environments, default=str), cwd=cwd, **options).splitlines()


def test_what_is_missing_is_named_with_what_to_do(tmp_path):
    """A folder that cannot be made has a file for its parent: so it is for root too, whom no permission bits stop."""
    (tmp_path / "file").touch()
    compilers = {"PATH": folder_of_tools(tmp_path / "compilers", *COMPILER_TOOLS)}
    ninja = {"PATH": folder_of_tools(tmp_path / "ninja alone", "ninja")}
    both = {"PATH": folder_of_tools(tmp_path / "both", *COMPILER_TOOLS, "ninja")}
    folder = tmp_path / "file" / "folder"
    not_writable = rf"^{re.escape(str(folder))}\S* cannot be written: set TORCH_EXTENSIONS_DIR"
    no_toolkit = "bin/nvcc, which is not there: install the CUDA toolkit, and set CUDA_HOME"
    cases = [
        (ninja | {"CXX": tmp_path / "clang++"}, r"clang\+\+, which is not there: install g\+\+, or set CXX"),
        (ninja | {"CXX": None}, r"c\+\+, which is not there: install g\+\+, or set CXX"),
        (compilers, "ninja, which is not there: pip install ninja"),
        (both | {"TORCH_EXTENSIONS_DIR": folder}, not_writable),
        (both | {"TORCH_EXTENSIONS_DIR": None, "HOME": folder}, not_writable),
        (both | {"gpu": None}, no_toolkit),
        (both | {"gpu": "/nowhere"}, f"/nowhere/{no_toolkit}"),
        (both | {"gpu": None, "capability": (6, 1)}, "needs GPUs of compute capability 7.5 or more"),
    ]
    options = {"TORCH_EXTENSIONS_DIR": tmp_path / "built", "TORCH_CUDA_ARCH_LIST": None}
    options["python"] = python_without_ninja(tmp_path / "venv")
    said = answers([environment for environment, _ in cases], tmp_path, **options)
    assert len(said) == len(cases)
    for (_, expected), line in zip(cases, said):
        assert re.search(expected, line), said


def test_a_compiler_error_is_shown_and_the_build_is_tried_again(saved, tmp_path):
    """With the file's name and the line of its string. In one process, as in a notebook, until it is mended."""
    text, changed = re.subn(r'(?m)^(#line 1 "CPP_SOURCE in .*\n)', r'\1#include "a_header.h"\n', FILE.read_text())
    assert changed == 1
    (tmp_path / "wrong.py").write_text(text)
    script = """
for _ in range(2):  # and again, where a half-built library could now be found
    try:
        load("wrong.py", "first")
    except RuntimeError as error:
        print(error)
open("a_header.h", "w").close()
check(load("wrong.py", "second").ModelNew, sys.argv[1])
"""
    options = {"CPATH": tmp_path, "CXX": compiler(tmp_path, QUICKLY), "TORCH_EXTENSIONS_DIR": tmp_path / "built"}
    said = run_python(script, saved, cwd=tmp_path, **options)
    assert len(re.findall(rf"CPP_SOURCE in {FILE.name}:1:\d+: .*a_header.h", said)) == 2, said


# Stands for the compiler. Beside every compilation a line in the file `calls`. The first one also leaves half an object
# and waits to be killed, if it is told to. An object that the library of this PyTorch was made of is copied from there,
# which is quicker than to make it again; ninja calls compilers in a folder of the library's name.
COMPILER = """for last; do test "$before" = -o && out="$last"; before="$last"; done
case "$*" in *" -c "*)
    echo "$@" >> "$CALLS"
    test -n "$WAIT" && mkdir "$WAIT" 2> /dev/null && echo "half an object" > "$out" && exec sleep 600
    made="{cache}/$(basename "$PWD")/$(basename "$out")"
    test -f "$made" && exec cp "$made" "$out"
esac
exec {compiler} "$@"
"""


def slow_compiler(folder: Path, program: str) -> Path:
    solution(QUICKEST.stem)
    cache = os.environ.get("TORCH_EXTENSIONS_DIR", os.path.expanduser("~/.cache/torch_extensions"))
    return compiler(folder, COMPILER.format(compiler=program, cache=cache))


@pytest.fixture
def counted(tmp_path):
    """Options of a process that builds anew, by a compiler that counts its calls."""
    counting = slow_compiler(tmp_path, shutil.which("c++"))
    return {"CXX": counting, "CALLS": tmp_path / "calls", "TORCH_EXTENSIONS_DIR": tmp_path / "built", "cwd": tmp_path}


def test_odd_paths_and_a_python_that_is_not_activated(saved, counted, tmp_path):
    """Ninja is beside python alone; spaces and letters of other alphabets."""
    folder = tmp_path / "research, ein Ordner mit Leerzeichen und Ümläuten"
    folder.mkdir()
    shutil.copy(FILE, folder / "eine Kopie.py")
    python = python_without_ninja(folder / "venv")
    (python.parent / "ninja").symlink_to(shutil.which("ninja") or Path(sys.executable).parent / "ninja")
    options = counted | {"TORCH_EXTENSIONS_DIR": folder / "gebaut"}
    if not torch.cuda.is_available():
        options["PATH"] = folder_of_tools(tmp_path / "tools", *COMPILER_TOOLS, "cp", "basename")
    run_python(IMPORT_AND_CHECK, folder / "eine Kopie.py", saved, python=python, **options)


def test_an_empty_cxx_is_none(saved, counted, tmp_path):
    """The compiler is the c++ on PATH then."""
    (tmp_path / "c++").symlink_to(counted["CXX"])
    run_python(IMPORT_AND_CHECK, FILE, saved, **counted | {"CXX": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert counted["CALLS"].exists()


def built_once(saved: Path, options: dict) -> Path:
    """The library, in a cache of its own."""
    run_python(IMPORT_AND_CHECK, FILE, saved, **options)
    (library,) = options["TORCH_EXTENSIONS_DIR"].glob("*/*.so")
    return library


@pytest.mark.parametrize("left", [0, 4096], ids=["nothing", "the beginning"])
def test_a_library_of_which_little_is_left_is_built_again(left, saved, counted):
    """As after a power cut, or on a full disk."""
    library = built_once(saved, counted)
    os.truncate(library, left)
    assert built_once(saved, counted).stat().st_size > 4096


def test_what_is_built_is_loaded_without_tools_and_without_writing(saved, counted, tmp_path):
    """A cache of another user in the group, a read-only one, one in an image without compilers: no file is touched."""
    library = built_once(saved, counted)
    for path in (library.parent, *library.parent.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in library.parent.iterdir()}
    empty = folder_of_tools(tmp_path / "no tools")
    assert built_once(saved, counted | {"PATH": empty, "CXX": "/nowhere/c++"}) == library
    assert before == {path: path.stat().st_mtime_ns for path in library.parent.iterdir()}


# A file system without flock answers so.
NO_FLOCK = """
import fcntl
def refuse(*arguments):
    raise OSError(38, "Function not implemented")
fcntl.flock = refuse
"""


def test_a_file_system_without_flock(saved, counted):
    run_python(NO_FLOCK + IMPORT_AND_CHECK, FILE, saved, **counted)


def test_versions_of_pytorch_and_architectures_share_a_cache(tmp_path):
    """Each has a build of its own, and finds it again. TORCH_CUDA_ARCH_LIST is left to PyTorch: a flag of ours would
    make load_inline ignore it."""
    (tmp_path / "bin").mkdir()
    shutil.copy(shutil.which("true"), tmp_path / "bin" / "nvcc")
    environments = [{"gpu": tmp_path, "TORCH_CUDA_ARCH_LIST": target} for target in ("", "8.0+PTX", "9.0")]
    environments += [environments[0] | {"torch": version} for version in ("9.9.8", "9.9.9")]
    *lines, again = answers(environments, tmp_path, TORCH_EXTENSIONS_DIR=tmp_path / "built")
    assert len(set(lines)) == 4 and again == lines[0]
    assert all(line.endswith(" []") for line in lines)


@pytest.mark.slow
def test_processes_at_once_build_once_and_a_later_one_finds_it(saved, counted, tmp_path):
    processes = [start_python(IMPORT_AND_CHECK, FILE, saved, **counted) for _ in range(3)]
    results = [finish(process, 240) for process in processes]
    assert [code for code, _, _ in results] == [0] * 3, results
    run_python(IMPORT_AND_CHECK, FILE, saved, **counted)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["everything", "the compiler", "python and ninja"])
@pytest.mark.parametrize("program", ["g++", pytest.param("nvcc", marks=pytest.mark.gpu)])
def test_a_killed_build_does_not_stop_the_next_one(program, killed, saved, counted, tmp_path):
    """PyTorch's lock and half an object are left behind; the next import builds, and waits for nobody's lock."""
    options = counted | {"WAIT": tmp_path / "waits"}
    if program == "nvcc":
        del options["CXX"]
        options["PYTORCH_NVCC"] = slow_compiler(tmp_path, find_nvcc())
    first = start_python(IMPORT, FILE, **options)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("built/*/*.o")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any(tmp_path.glob("built/*/lock")) and first.poll() is None, "it did not begin to build"
    time.sleep(0.5)  # until the compiler sleeps
    kill(first, {"everything": "", "the compiler": "sleep", "python and ninja": "python|ninja"}[killed])
    code, _, err = finish(first) if killed == "the compiler" else (first.wait(), "", "")
    assert code != 0, err
    run_python(IMPORT_AND_CHECK, FILE, saved, timeout=120, **options)
    kill(first, "")


def kill(process: subprocess.Popen, names: str) -> None:
    """Those of the process's session that are called so; ninja gives each compiler a process group of its own."""
    subprocess.run(["pkill", f"-{signal.SIGKILL}", "-s", str(process.pid), names], check=False)
