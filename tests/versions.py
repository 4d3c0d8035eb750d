"""The CPU tests with other versions of PyTorch, and the CUDA strings with other compilers. Neither is part of `make test`.

    python3.11 tests/versions.py                        PyTorch 2.0.1, 2.4.1 and 2.8.0, each in an environment under .versions/
    python3.11 tests/versions.py 2.4.1 -k forward       one of them, and what pytest is to do
    python3.11 tests/versions.py --shared-cache         all of them import one kernel file at once, into one folder, and again
    python3.11 tests/versions.py --nvcc DIR/bin/nvcc    every CUDA string for sm_80 and sm_90, by that compiler

Python 3.11 is what all these versions have wheels for. Compilers: Debian's nvidia-cuda-toolkit is 11.8 in bookworm and 12.4 in trixie;
pip's nvidia-cuda-nvcc-cu11 and -cu12 hold ptxas and headers, no nvcc.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.0.1", "2.4.1", "2.8.0")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
IMPORT_AND_COMPARE = """
import torch
def load(folder):
    namespace = {}
    exec(open(f"{folder}/instance_norm.py").read(), namespace)
    return namespace
Model, ModelNew = load("models")["Model"], load("kernels")["ModelNew"]
x = torch.rand(2, 3, 8, 9)
torch.testing.assert_close(ModelNew(3)(x), Model(3)(x))
"""


def environment(version: str) -> Path:
    """Its python. PyTorch's own index has wheels for the CPU alone; where it cannot be reached, PyPI's larger ones do as well."""
    folder = ROOT / ".versions" / version
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        if subprocess.run([*pip, f"torch=={version}+cpu", "--extra-index-url", CPU_WHEELS], check=False).returncode:
            subprocess.run([*pip, f"torch=={version}"], check=True)
        subprocess.run([*pip, "ninja==1.13.0", "pytest==9.0.1", "setuptools<81", "numpy<2"], check=True)
        (folder / "installed").touch()
    return python


def run_tests(version: str, arguments: list[str]) -> int:
    python = environment(version)
    paths = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    command = [python, "-m", "pytest", "-q", "-m", "not gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": paths, "CUDA_VISIBLE_DEVICES": ""}, check=False).returncode


def share_a_cache() -> int:
    """How many of the imports went wrong; or 1 if the second time anything was built."""
    pythons = [environment(version) for version in VERSIONS]
    built = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            variables = {**os.environ, "TORCH_EXTENSIONS_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}
            processes = [subprocess.Popen([python, "-c", IMPORT_AND_COMPARE], cwd=ROOT, env=variables) for python in pythons]
            failed = sum(process.wait(timeout=600) != 0 for process in processes)
            if failed:
                return failed
            built.append({path.name: path.stat().st_mtime_ns for path in Path(folder).glob("*.so")})
    same = "the same" if built[0] == built[1] else "others"
    print(f"PyTorch {', '.join(VERSIONS)} in one cache: {len(built[0])} libraries, {same} the second time")
    return int(len(built[0]) != len(VERSIONS) or built[0] != built[1])


def compile_all(nvcc: str) -> int:
    """How many of the strings this nvcc refuses. A host compiler newer than it knows is allowed."""
    release = re.search(r"release (\d+)\.(\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernels.cu")
        for path in sorted((ROOT / "kernels").glob("*.py")):
            source.write_text(re.search(r'CUDA_SOURCE = r"""\n(.*?)\n"""', path.read_text(), re.DOTALL)[1])
            for arch in ("80", "90a" if int(release[1]) >= 12 else "90"):
                options = ["-O3", "-std=c++17", "-allow-unsupported-compiler", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
                done = subprocess.run(
                    [nvcc, *options, "-c", source, "-o", "kernels.o"], cwd=folder, capture_output=True, text=True, check=False
                )
                said = "compiles" if done.returncode == 0 else f"does not compile: {done.stderr.strip()}"
                print(f"nvcc {release[1]}.{release[2]}, sm_{arch}, {path.stem}: {said}", flush=True)
                refused += done.returncode != 0
    return refused


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--nvcc"]:
        return min(1, sum(map(compile_all, arguments[1:])))
    if arguments == ["--shared-cache"]:
        return share_a_cache()
    chosen = arguments[:1] if arguments and arguments[0][0].isdigit() else []
    results = {version: run_tests(version, arguments[len(chosen) :]) for version in chosen or VERSIONS}
    print(", ".join(f"PyTorch {version}: {'passed' if code == 0 else 'FAILED'}" for version, code in results.items()))
    return max(results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
