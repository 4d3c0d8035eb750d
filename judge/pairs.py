"""Pairs: a file with `Model`, `get_inputs` and `get_init_inputs`, and a file with `ModelNew`, joined by their stem.

Both files are loaded by path under module names nobody else uses, so any file can be judged, however it is called, and two pairs
never see each other's modules.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from judge.source import code_sha256

_serial = itertools.count()
_perf_counter = time.perf_counter

# What a candidate may raise: sys.exit() is no way out of being judged.
RAISED = (Exception, SystemExit)

# A message that speaks of the build, in an exception that a build raises. Anything else that goes wrong at import is a wrong candidate.
_BUILD_WORDS = re.compile(r"\b(ninja|nvcc|cuda_home|g\+\+|clang|cl\.exe|compiler|building)(?!\w)", re.IGNORECASE)


@dataclass(frozen=True)
class Pair:
    name: str
    model_path: Path
    new_path: Path

    def source_sha256(self) -> str:
        return code_sha256(self.new_path)


class BuildFailed(Exception):
    """The ModelNew file could not be compiled."""


class CandidateRaised(Exception):
    """The candidate raised, at import or in a call. Its text is the first line of what the exception says."""


def discover(root: Path) -> dict[str, Pair]:
    """Every models/X.py that has a kernels/X.py, by stem."""
    models = {path.stem: path for path in sorted((root / "models").glob("*.py"))}
    kernels = {path.stem: path for path in sorted((root / "kernels").glob("*.py"))}
    return {stem: Pair(stem, models[stem], kernels[stem]) for stem in models if stem in kernels}


def _load(path: Path) -> ModuleType:
    name = f"judged_{next(_serial)}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle, dataclasses and inspect look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class Problem:
    """A loaded model file. `constants` replace some of its module constants: the same networks at another shape."""

    def __init__(self, path: Path, constants: dict | None = None):
        module = _load(path)
        for needed in ("Model", "get_inputs", "get_init_inputs"):
            if not hasattr(module, needed):
                raise AttributeError(f"{path.name} has no {needed}")
        self.path = path
        self.model_class = module.Model
        self.module = module
        self.constants = constants or {}
        for name, value in self.constants.items():
            if not hasattr(module, name):
                raise AttributeError(f"{path.name} has no {name}")
            setattr(module, name, value)
        self.sweep: list[dict] = getattr(module, "sweep", [])  # other shapes worth a measurement
        # The batch size is an optional argument of get_inputs or, in files that take none, the module constant it reads.
        parameter = next(iter(inspect.signature(module.get_inputs).parameters.values()), None)
        self._batch_is_argument = parameter is not None
        default = parameter.default if self._batch_is_argument else getattr(module, "batch_size", None)
        default = self.constants.get("batch_size", default)
        self.benchmark_batch: int | None = default if isinstance(default, int) else None

    def make(self, cls: type, seed: int) -> torch.nn.Module:
        """An instance of Model or ModelNew, in eval mode, from a known state of the random numbers."""
        torch.manual_seed(seed)
        arguments = self.module.get_init_inputs()
        torch.manual_seed(seed)
        return cls(*arguments).eval()

    def inputs(self, batch: int | None, device: str, dtype: torch.dtype, seed: int) -> list:
        """Fresh inputs on the device, floating ones in the run's dtype. `batch` is None where the file's is not adjustable."""
        torch.manual_seed(seed)
        with torch.device(device):
            if batch is None:
                inputs = self.module.get_inputs()
            elif self._batch_is_argument:
                inputs = self.module.get_inputs(batch)
            else:
                self.module.batch_size = batch
                inputs = self.module.get_inputs()
        return [to_device(x, device, dtype) for x in inputs]


def to_device(x, device: str, dtype: torch.dtype):
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype)


def load_new(path: Path) -> tuple[type, float]:
    """ModelNew and the seconds its file took to import, the build included."""
    start = _perf_counter()
    try:
        module = _load(path)
        seconds = _perf_counter() - start
        return module.ModelNew, seconds
    except RAISED as error:
        message = build_failure(error, at_import=True)
        if message:
            raise BuildFailed(message) from error
        raise CandidateRaised(last_line(error)) from error


def last_line(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]


def _causes(error: BaseException | None):
    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _files(error: BaseException) -> list[Path]:
    """Those that the exception, and what led to it, came through."""
    return [Path(frame.filename) for cause in _causes(error) for frame in traceback.extract_tb(cause.__traceback__)]


def raised_in(cls: type, error: BaseException) -> bool:
    """Whether the exception came through the file that the class is from."""
    home = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return home is not None and Path(home) in _files(error)


def build_failure(error: BaseException, at_import: bool = False) -> str | None:
    """The message of a build that failed, or None where it is something else. At import files also say in words that they cannot build."""
    causes = list(_causes(error))
    failed = any(isinstance(cause, subprocess.CalledProcessError) for cause in causes)
    failed = failed or any(path.name == "cpp_extension.py" for path in _files(error))
    spoken = [
        cause
        for cause in causes
        if isinstance(cause, (RuntimeError, ImportError, OSError)) and _BUILD_WORDS.search(str(cause))
    ]
    return _build_message(error) if failed or (at_import and spoken) else None


def _build_message(error: BaseException) -> str:
    """The compiler's first complaint if there is one, otherwise what the exception says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    complaints = [line for line in lines if re.search(r"\berror\b\s*:", line, re.IGNORECASE)]
    return (complaints or lines or [last_line(error)])[0]
