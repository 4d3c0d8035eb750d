"""Fresh Python processes: what a test of importing, copying or building has to happen in."""

import os
import subprocess
import sys
from pathlib import Path

import torch

# What the process has to do: load a kernel file given by its path, run its ModelNew on the saved case, compare.
PRELUDE = """
import importlib.util
import os
import sys
import time

import torch


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(ModelNew, case):
    case = torch.load(case, weights_only=False)
    new = ModelNew(*case["init"])
    new.load_state_dict(case["state"])
    with torch.no_grad():
        out = new.to(case["expected"].device)(*case["inputs"])
    torch.testing.assert_close(out, case["expected"])
"""


def compiler(folder: Path, script: str) -> Path:
    """A shell script to be taken for c++, by CXX."""
    path = folder / "a-compiler"
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


QUICKLY = 'exec c++ "$@" -O0\n'  # where only what is computed matters: to build takes half as long


def start_python(script: str, *arguments, cwd: Path, python=sys.executable, **environment) -> subprocess.Popen:
    """PRELUDE and the script in a session of its own, in the folder `cwd`. An environment variable of None is unset."""
    env = {k: v for k, v in {**os.environ, "PYTHONPATH": None, **environment}.items() if v is not None}
    return subprocess.Popen(
        [str(python), "-X", "faulthandler", "-c", PRELUDE + script, *map(str, arguments)],  # where it dies, if it does
        cwd=cwd,
        env={k: str(v) for k, v in env.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = 120) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; a process that hangs is killed and is an error."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"hung for {timeout} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def run_python(script: str, *arguments, timeout: float = 120, **options) -> str:
    """stdout of a process that must succeed."""
    code, out, err = finish(start_python(script, *arguments, **options), timeout)
    assert code == 0, f"exit code {code}:\n{out}\n{err}"
    return out


def visible_gpus() -> list[str]:
    everything = ",".join(map(str, range(torch.cuda.device_count())))
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or everything).split(",")
