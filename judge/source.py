"""The two files of a pair, joined by their stem: `Model`, `get_inputs`, `get_init_inputs`; and `ModelNew`."""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import importlib.util
import inspect
import io
import logging
import os
import random
import re
import sys
import tokenize
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map_only

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
PRECISIONS = ("highest", "high")
DIRECTIONS = ("forward", "forward_recorded", "forward_backward")

# It warns of a toolkit without a GPU, which is no fault, and would stand in the middle of the line of progress.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
BUILD = "build failed"
RAISED = (Exception, SystemExit)  # what a file may raise: sys.exit() does not end the judgement
LOADED: set[str] = set()  # paths of the files that `load` ran
MODULES: dict[tuple[Path, bytes], tuple] = {}  # of a Model's file, by its text, the first module and what was in it


class Pair(NamedTuple):
    name: str
    model_path: Path
    new_path: Path


def discover(root: Path) -> dict[str, Pair]:
    """Every models/X.py with each of its ModelNew files: kernels/X.py is called X, kernels/hopper/X.py hopper/X."""
    names = {path: path.relative_to(root / "kernels").with_suffix("") for path in (root / "kernels").rglob("*.py")}
    pairs = [Pair(name.as_posix(), root / "models" / path.name, path) for path, name in names.items()]
    found = {pair.name: pair for pair in pairs if pair.model_path.exists()}
    return dict(sorted(found.items(), key=lambda item: (Path(item[0]).name, len(item[0]))))  # a Model's together


def load(path: Path, text: bytes | None = None, name: str = "") -> ModuleType:
    """The file, of which the judge may have read this text, as a module under a name that no other file has.

    It may import what lies beside it, as it may when Python runs it.
    """
    spec = importlib.util.spec_from_file_location(name or f"judged_{len(sys.modules)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickle, dataclasses and inspect look for it
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.insert(0, beside)
    LOADED.add(str(path))
    code = compile(path.read_bytes() if text is None else text, str(path), "exec")
    exec(code, vars(module))
    return module


OTHER_ARGUMENTS = "half of each number", "another dim"  # of a Model's constructor


class Problem:
    """A loaded model file. `constants` replace some of its module constants: the same network at another shape."""

    def __init__(self, path: Path, constants: dict | None = None, text: bytes | None = None):
        self.path, self.constants = path, constants or {}
        self.text = path.read_bytes() if text is None else text
        # In all processes the same: an input may be of a class of the file's.
        name = f"judged_model_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
        try:
            self.module = load(path, self.text, name)
            MODULES.setdefault((path, self.text), (self.module, dict(vars(self.module))))
        except RAISED:  # a process can run some files once, as one that defines a library of operators
            if (path, self.text) not in MODULES:
                raise
            self.module, first = MODULES[path, self.text]
            vars(self.module).update(first)
            sys.modules[name] = self.module
        if missing := [name for name in ("Model", "get_inputs", "get_init_inputs") if not hasattr(self.module, name)]:
            raise AttributeError(f"{path.name} has no {missing[0]}. The order is MODEL.py NEW.py")
        vars(self.module).update(self.constants)
        files = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
        beside = str(path.resolve().parent)
        imported = [Path(file) for file in files if file.startswith(beside) and os.path.dirname(file) == beside]
        self.imported = {file: file.read_bytes() for file in imported if file.is_file() and file.name != path.name}
        self.sweep = [dict(shape) for shape in getattr(self.module, "sweep", [])]  # the shapes worth a measurement
        self.on_cpu = dict(getattr(self.module, "on_cpu", {}))  # sizes that a CPU computes in well under a second
        self.other: str | None = None  # of OTHER_ARGUMENTS: modules are made with these
        self.batch: int | None = getattr(self.module, "batch_size", None)

    def changed(self) -> list[str]:
        """The files beside the Model's which it imports, and which are no longer what they were."""
        return [file.name for file, text in self.imported.items() if not file.is_file() or file.read_bytes() != text]

    def choose(self, batch: int) -> None:
        """Whoever reads the file's batch_size when a module is made reads this one, in all processes."""
        self.constants = self.constants | {"batch_size": batch}
        self.module.batch_size = batch

    def arguments(self, seed: int) -> list:
        reseed(seed)
        arguments = self.module.get_init_inputs()
        if self.other == "half of each number":
            return tree_map_only(float, lambda x: 0.5 * x, arguments)
        if self.other == "another dim":
            names = [*inspect.signature(self.module.Model).parameters]
            is_dim = [name in ("dim", "axis") and type(x) is int for name, x in zip(names, arguments)]
            return [x - 1 if is_one else x for x, is_one in zip(arguments, is_dim)]
        return arguments

    def model(self, seed: int) -> torch.nn.Module:
        return self.make(self.module.Model, seed)

    def make(self, cls: type, seed: int) -> torch.nn.Module:
        """An instance of this or a candidate's class, in eval mode; lazy layers get their shapes from a call."""
        with torch.no_grad():  # what has a history, as weight_norm's weights, cannot be copied
            arguments = copy.deepcopy(self.arguments(seed))
            reseed(seed)
            made = cls(*arguments)
            made.eval()  # whose own train() may give nothing back
            tensors = [*made.parameters(), *made.buffers()]
            if any(isinstance(x, torch.nn.parameter.UninitializedTensorMixin) for x in tensors):
                inputs = self.inputs(self.batch, "cpu", torch.float32, seed)
                reseed(seed)
                made(*inputs)
        return made

    def inputs(self, batch: int | None, device: str, dtype: torch.dtype, seed: int) -> list:
        """Fresh inputs on the device; float32 ones in this dtype. `batch` is None where it cannot be chosen."""
        reseed(seed)
        chosen = {} if batch is None else {"batch_size": batch}
        vars(self.module).update(chosen)  # get_inputs reads this constant, or takes an argument of its name
        is_argument = "batch_size" in inspect.signature(self.module.get_inputs).parameters
        with torch.device(device):
            inputs = self.module.get_inputs(**chosen if is_argument else {})
        if chosen:
            self.module.batch_size = self.constants.get("batch_size", self.batch)
        return tree_map_only(torch.Tensor, lambda x: to_dtype(x.detach(), dtype, device), list(inputs))


def reseed(seed: int) -> None:
    """torch.manual_seed, but for the kinds of devices that nobody has here: of each that keeps where it was called; and
    the numbers of Python's random and of NumPy, which a file may draw, too."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def to_dtype(x: torch.Tensor, dtype: torch.dtype, device: str | None = None) -> torch.Tensor:
    """float32 in this dtype, and all others as the Model's file made them; in float64 all that is floating."""
    if x.layout == torch.strided and x.untyped_storage().nbytes() < x.nbytes:  # expanded: it is to be written to
        x = x.clone()
    if x.is_complex() and dtype == torch.float64:
        dtype = torch.complex128
    elif not x.is_floating_point() or torch.float64 != dtype and x.dtype != torch.float32:
        dtype = x.dtype
    if x.dtype.itemsize == 1:  # float8 stays what it is
        dtype = x.dtype
    return x.to(device=device or x.device, dtype=dtype).resolve_conj().resolve_neg()


def cast(module: torch.nn.Module, dtype: torch.dtype, device: str | None = None) -> torch.nn.Module:
    """Unlike `module.to` this leaves complex parameters complex."""
    module._apply(lambda x: to_dtype(x, dtype, device))  # whose own may give nothing back
    return module


def set_precision(level: str) -> None:
    """PyTorch's float32 switches, alike for all contenders: `highest` is strict float32, `high` allows TF32."""
    torch.set_float32_matmul_precision(level)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = level == "high"


def last_line(error: BaseException) -> str:
    """What it says, and where in a loaded file; of a lack of memory the first sentence, before ten lines of figures."""
    said = traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return said.partition(". ")[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in LOADED]
    places = [f" [{Path(at.filename).name}, line {at.lineno}, in {at.name}]" for at in frames]
    if isinstance(error, SyntaxError) and error.filename in LOADED:
        places.append(f" [{Path(error.filename).name}, line {error.lineno}]")
    return said + "".join(places[-1:])


def build_failure(error: BaseException) -> str | None:
    """The compiler's first complaint, or None where no build failed."""
    trace = "".join(traceback.format_exception(error))  # with all that caused it
    of_a_tool = re.search(r"CalledProcessError|cpp_extension\.py", trace)
    of_a_build = r"error building extension|\bbuilding \w+ needs\b|\b(ninja|nvcc|cuda_home)\b"
    if not of_a_tool and not re.search(of_a_build, str(error), re.IGNORECASE):
        return None
    complaints = re.findall(r".*\berror\s*:.*", str(error), re.IGNORECASE)
    said = complaints[0].strip() if complaints else last_line(error)
    written = re.match(r"(main\.cpp|cuda\.cu)\b", said)
    if written:
        said += f" ({written[1]} is what load_inline made of the strings: import the file to see all messages)"
    return said


def code_of(text: str) -> str:
    """A kernel file without comments (# and //), docstrings and blank lines, in Python and in multi-line strings."""
    tree, lines = ast.parse(text), text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        elif isinstance(node, ast.Constant) and node.end_lineno > node.lineno:
            for row in range(node.lineno - 1, node.end_lineno):
                lines[row] = re.sub(r'("(?:\\.|[^"\\])*")|//.*', lambda match: match[1] or "", lines[row])
    return "\n".join(line.rstrip() for line in lines if line.strip())


def kernels_of(code: str) -> str:
    """Its CUDA and C++ strings alone: module constants whose names end in _SOURCE."""
    found = [node for node in ast.parse(code).body if isinstance(node, ast.Assign)]
    found = [node.value for node in found if ast.unparse(node.targets[0]).endswith("_SOURCE")]
    return "\n".join(str(value.value) for value in found if isinstance(value, ast.Constant))


def code_sha256(path: Path, part: Callable[[str], str] = str) -> str:
    """What a record calls the file it measured, or a part of it: a changed comment leaves it as it is."""
    code = path.read_bytes()
    with contextlib.suppress(Exception):  # it is no Python text, or too deeply nested: all of it, then
        code = part(code_of(code.decode())).encode()
    return hashlib.sha256(code).hexdigest()
