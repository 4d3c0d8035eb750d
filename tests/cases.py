"""The pairs, and the shapes they are tested at.

A pair is models/X.py with kernels/X.py beside it, found by its name. The known ones are tested at the small shapes below, each with a
name for what is weird about it; a pair that has no entry is tested at its own benchmark shapes with a batch of 2, so that two new files
are tested as soon as they are there.
"""

import copy
import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = ROOT / os.environ.get("KERNELS", "kernels")  # KERNELS=FOLDER pytest: another folder's files
STEMS = sorted(p.stem for p in SOLUTIONS.glob("*.py") if (ROOT / "models" / p.name).exists())

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _takes_half(function: Callable, *shapes: tuple) -> bool:
    try:
        function(*(torch.ones(shape, dtype=torch.float16) for shape in shapes))
    except RuntimeError:
        return False
    return True


# PyTorch 2.0's Models do not run in float16 on a CPU.
HALF_ON_CPU = _takes_half(torch.sigmoid, (2,)) and _takes_half(torch.nn.functional.linear, (2, 2), (2, 2), (2,))


def runs(dtype: torch.dtype, device) -> bool:
    """Whether this PyTorch's Models run in the dtype on the device."""
    return HALF_ON_CPU or dtype is not torch.float16 or torch.device(device).type != "cpu"


@dataclass(frozen=True)
class Case:
    stem: str
    name: str
    init: tuple | None = None  # None: what the problem file says
    shapes: tuple | None = None
    layouts: bool = False  # tested in every layout: whole vectors, odd sizes and a slice too large for one block

    def __str__(self) -> str:
        return f"{self.stem} of {self.name}"

    @property
    def values(self) -> float:
        return sum(map(math.prod, self.shapes)) if self.shapes else math.inf

    def arguments(self) -> list:
        return list(self.init) if self.init is not None else problem(self.stem).get_init_inputs()

    def inputs(self, batch: int | None = None) -> list:
        """Fresh inputs, of another batch size if one is given."""
        if self.shapes is None:
            return problem(self.stem).get_inputs(2 if batch is None else batch)
        return [torch.randn(shape if batch is None else (batch, *shape[1:])) for shape in self.shapes]


def _table(stem: str, *rows: tuple) -> list[Case]:
    return [Case(stem, name, init, shapes, layouts=i < 3) for i, (name, init, *shapes) in enumerate(rows) for shapes in [tuple(shapes)]]


# name, constructor arguments, input shapes. The first three of each pair are those tested in every layout.
KNOWN = {
    "instance_norm": _table(
        "instance_norm",
        ("whole vectors", (4,), (3, 4, 8, 16)),
        ("odd sizes", (3,), (2, 3, 7, 73)),
        ("slices of 104 KiB", (2,), (2, 2, 104, 256)),
        ("a single small image", (5,), (1, 5, 3, 3)),
        ("an unbatched image", (3,), (3, 7, 9)),
        ("an empty batch", (3,), (0, 3, 8, 8)),
        ("no rows of pixels", (3,), (2, 3, 0, 8)),
        ("two pixels", (3,), (2, 3, 1, 2)),
        ("three pixels in a column", (3,), (2, 3, 3, 1)),
        ("1023 pixels", (3,), (1, 3, 1, 1023)),
        ("1025 pixels", (1,), (2, 1, 1025, 1)),
        ("more channels than num_features", (3,), (2, 5, 4, 4)),
        ("1023 channels", (1023,), (2, 1023, 2, 3)),
        ("70000 slices", (1,), (70000, 1, 2, 2)),
        ("slices of 64 KiB", (2,), (1, 2, 128, 128)),
        ("slices just over 64 KiB", (1,), (2, 1, 129, 128)),
        ("odd slices of 67 KiB", (2,), (1, 2, 131, 131)),
        ("slices of 1 MiB", (1,), (2, 1, 512, 512)),
        ("slices of 3 MiB", (1,), (1, 1, 768, 1024)),
        ("odd slices of 4 MiB", (1,), (1, 1, 1023, 1025)),
        ("slices of 5 MiB", (1,), (1, 1, 1024, 1280)),
    ),
    "linear_instance_norm_residual": _table(
        "linear_instance_norm_residual",
        ("whole vectors", (32, 64), (8, 32), (8, 64)),
        ("odd sizes", (7, 73), (3, 7), (3, 73)),
        ("rows of 16400 features", (5, 16400), (3, 5), (3, 16400)),
        ("a single row", (16, 24), (1, 16), (1, 24)),
        ("an empty batch", (5, 7), (0, 5), (0, 7)),
        ("two features", (3, 2), (5, 3), (5, 2)),
        ("three features from one", (1, 3), (5, 1), (5, 3)),
        ("no input features", (0, 7), (2, 0), (2, 7)),
        ("1023 features to 1025", (1023, 1025), (3, 1023), (3, 1025)),
        ("1025 features to 1023", (1025, 1023), (2, 1025), (2, 1023)),
        ("another eps", (16, 32, 0.5, 0.3), (4, 16), (4, 32)),
        ("70001 rows", (2, 8), (70001, 2), (70001, 8)),
        ("odd rows of 1.2 MiB", (2, 300001), (2, 2), (2, 300001)),
        ("y for all rows", (16, 32), (4, 16), (32,)),
        ("y of one row", (16, 33), (4, 16), (1, 33)),
        ("y of one column", (16, 32), (4, 16), (4, 1)),
        ("y of one value", (16, 32), (4, 16), (1,)),
        ("y without dimensions", (16, 32), (4, 16), ()),
    ),
    "linear_swish_group_norm": _table(
        "linear_swish_group_norm",
        ("whole vectors", (32, 256, 4, (256,)), (6, 32)),
        ("odd sizes", (7, 219, 3, (219,)), (3, 7)),
        ("groups of 16400 features", (5, 32800, 2, (32800,)), (2, 5)),
        ("a single row", (16, 24, 4, (24,)), (1, 16)),
        ("an empty batch", (5, 8, 4, (8,)), (0, 5)),
        ("one group", (5, 1023, 1, (1023,)), (3, 5)),
        ("a group for each feature", (5, 8, 8, (8,)), (3, 5)),
        ("groups of two", (1, 14, 7, (14,)), (5, 1)),
        ("groups of 64", (1023, 1024, 16, (1024,)), (3, 1023)),
        ("groups of 63", (17, 1008, 16, (1008,)), (3, 17)),
        ("groups of 205", (1025, 1025, 5, (1025,)), (2, 1025)),
        ("no input features", (0, 8, 2, (8,)), (2, 0)),
        ("70001 rows", (2, 8, 2, (8,)), (70001, 2)),
        ("a group of 1.2 MiB", (2, 300001, 1, (300001,)), (2, 2)),
        ("a bias of one value", (16, 32, 4, (1,)), (4, 16)),
        ("a bias without dimensions", (16, 32, 4, ()), (4, 16)),
        ("a bias of one row", (16, 36, 4, (1, 36)), (4, 16)),
        ("a bias for each row", (16, 32, 4, (4, 1)), (4, 16)),
        ("a bias for each value", (16, 36, 4, (4, 36)), (4, 16)),
    ),
    "conv_sigmoid_group_norm": _table(
        "conv_sigmoid_group_norm",
        ("whole vectors", (4, 8, 3, 4, (8, 1, 1), (8, 1, 1)), (2, 4, 10, 18)),
        ("odd sizes", (3, 9, 3, 3, (9, 1, 1), (9, 1, 1)), (2, 3, 9, 13)),
        ("groups of 128 KiB", (2, 4, 3, 2, (4, 1, 1), (4, 1, 1)), (2, 2, 130, 130)),
        ("a single image", (8, 32, 3, 8, (32, 1, 1), (32, 1, 1)), (1, 8, 14, 14)),
        ("an empty batch", (3, 8, 3, 4, (8, 1, 1), (8, 1, 1)), (0, 3, 6, 7)),
        ("one pixel out", (3, 8, 3, 4, (8, 1, 1), (8, 1, 1)), (3, 3, 3, 3)),
        ("one pixel out and a group for each channel", (3, 8, 3, 8, (8, 1, 1), (8, 1, 1)), (2, 3, 3, 3)),
        ("1x1 kernels", (3, 6, 1, 2, (6, 1, 1), (6, 1, 1)), (2, 3, 7, 5)),
        ("5x5 kernels", (3, 6, 5, 3, (6, 1, 1), (6, 1, 1)), (2, 3, 11, 9)),
        ("3x5 kernels", (3, 6, (3, 5), 3, (6, 1, 1), (6, 1, 1)), (2, 3, 8, 9)),
        ("one group", (1, 7, 3, 1, (7, 1, 1), (7, 1, 1)), (2, 1, 9, 9)),
        ("a group for each channel", (3, 7, 3, 7, (7, 1, 1), (7, 1, 1)), (2, 3, 8, 9)),
        ("one channel", (1, 1, 3, 1, (1, 1, 1), (1, 1, 1)), (1, 1, 7, 7)),
        ("rows of 1023", (1, 2, 1, 1, (2, 1, 1), (2, 1, 1)), (1, 1, 3, 1023)),
        ("rows of 1025", (1, 2, 3, 2, (2, 1, 1), (2, 1, 1)), (1, 1, 3, 1027)),
        ("70001 images", (1, 2, 1, 2, (2, 1, 1), (2, 1, 1)), (70001, 1, 1, 2)),
        ("groups of 1.1 MiB", (1, 2, 3, 1, (2, 1, 1), (2, 1, 1)), (1, 1, 386, 386)),
        ("odd groups of 4.5 MiB", (1, 1, 1, 1, (1, 1, 1), (1, 1, 1)), (1, 1, 1085, 1087)),
        ("a bias and scale of one value", (3, 8, 3, 4, (1,), (1,)), (2, 3, 6, 7)),
        ("a bias and scale without dimensions", (3, 8, 3, 4, (), ()), (2, 3, 6, 7)),
        ("a bias and scale for each value of a sample", (3, 8, 3, 4, (8, 4, 5), (8, 4, 5)), (2, 3, 6, 7)),
        ("a bias for each column and a scale for each row", (3, 8, 3, 4, (5,), (4, 1)), (2, 3, 6, 7)),
        ("a bias for each sample and one scale", (3, 8, 3, 4, (2, 8, 1, 1), (1, 1, 1)), (2, 3, 6, 7)),
        ("a bias for each value of each sample", (3, 8, 3, 4, (2, 8, 4, 5), (8, 1, 1)), (2, 3, 6, 7)),
    ),
}
CASES = [case for stem in STEMS for case in KNOWN.get(stem, [Case(stem, "its own shapes", layouts=True)])]
FIRST = [next(case for case in CASES if case.stem == stem) for stem in STEMS]  # one plain case a pair
LAYOUT_CASES = [case for case in CASES if case.layouts]


# ---- parametrisations


def in_dtype(dtype: torch.dtype) -> str:
    """For the names of tests."""
    return f"in {str(dtype).removeprefix('torch.')}"


def in_dtypes(cases: list[Case], dtypes: list[torch.dtype] = DTYPES) -> pytest.MarkDecorator:
    """Every case in every dtype; but float32 alone at a problem's own shapes, which may be large."""
    rows = [(case, dtype) for dtype in dtypes for case in cases if case.shapes or dtype is torch.float32]
    return pytest.mark.parametrize(("case", "dtype"), [pytest.param(*row, id=f"{row[0]} {in_dtype(row[1])}") for row in rows])


def in_layouts(cases: list[Case], layouts: Iterable[str]) -> pytest.MarkDecorator:
    rows = [(case, layout) for case in cases for layout in layouts if fits(case, layout)]
    return pytest.mark.parametrize(("case", "layout"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in rows])


def in_dtypes_and_layouts(cases: list[Case], layouts: Iterable[str]) -> pytest.MarkDecorator:
    rows = [(c, d, layout) for d in DTYPES for c in cases for layout in layouts if fits(c, layout) and (c.shapes or d is torch.float32)]
    return pytest.mark.parametrize(
        ("case", "dtype", "layout"), [pytest.param(*row, id=f"{row[0]} {in_dtype(row[1])} {row[2]}") for row in rows]
    )


# ---- how a tensor can lie in memory; each keeps the shape and dtype


def contiguous(t: torch.Tensor) -> torch.Tensor:
    return t


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def batch_innermost(t: torch.Tensor) -> torch.Tensor:
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t


def offset_by_one(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def every_second(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t.new_full((), torch.nan).expand(t.shape)], dim=-1)[..., 0]


def one_sample_repeated(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand(t.shape) if t.dim() > 1 else t


def one_value_repeated(t: torch.Tensor) -> torch.Tensor:
    return t[..., :1].expand(t.shape) if t.dim() else t


def negated_lazily(t: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-t)


LAYOUTS: dict[str, Callable] = {
    "contiguous": contiguous,
    "transposed": transposed,
    "channels_last": channels_last,
    "with the batch innermost": batch_innermost,
    "offset by one element": offset_by_one,
    "every second element": every_second,
    "one sample repeated": one_sample_repeated,
    "one value repeated": one_value_repeated,
    "negated lazily": negated_lazily,
}


def fits(case: Case, layout: str) -> bool:
    return layout != "channels_last" or case.shapes is None or any(len(shape) == 4 for shape in case.shapes)


# ---- modules


@functools.cache
def load(path: Path, name: str) -> ModuleType | Exception:
    """The file as a module of that name: one of our own, since `kernels` and `models` may be installed packages of somebody else's."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001  kept, or hundreds of tests would each build again what does not build
        return error
    return module


def _loaded(folder: Path, stem: str) -> ModuleType:
    module = load(folder / f"{stem}.py", f"{folder.name}_{stem}")
    if isinstance(module, Exception):
        raise module
    return module


def problem(stem: str) -> ModuleType:
    return _loaded(ROOT / "models", stem)


def solution(stem: str) -> ModuleType:
    return _loaded(SOLUTIONS, stem)


def _has_parameters(case: Case) -> bool:
    with torch.device("meta"):
        return any(True for _ in problem(case.stem).Model(*case.arguments()).parameters())


WITH_PARAMETERS = [case.stem for case in FIRST if _has_parameters(case)]


def operators(stem: str) -> list[str]:
    """The names of the file's operators, without the namespace."""
    prefix = solution(stem).NAMESPACE + "::"
    return sorted(name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))


def converted(inputs: list, device=None, dtype=None) -> list:
    """Inputs on a device and in a dtype; those that are not floating point keep theirs. Skips a test that this PyTorch cannot run."""
    if any(isinstance(t, torch.Tensor) and not runs(dtype, device or t.device) for t in inputs):
        pytest.skip("this PyTorch has no float16 on a CPU")
    return [t.to(device, dtype if t.is_floating_point() else None) if isinstance(t, torch.Tensor) else t for t in inputs]


def build(case: Case, device="cpu", dtype=torch.float32, seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module, list]:
    """The Model, a ModelNew with the same weights, and inputs; all drawn on the CPU, so the same on every device."""
    torch.manual_seed(seed)
    model = problem(case.stem).Model(*case.arguments())
    with torch.no_grad():
        for parameter in model.parameters():  # the ones and zeros of an untrained norm would hide that it was left out
            if parameter.numel() and parameter.min() == parameter.max():
                parameter.normal_()
    inputs = case.inputs()
    new = solution(case.stem).ModelNew(*case.arguments())
    new.load_state_dict(model.state_dict())
    return model.to(device, dtype), new.to(device, dtype), converted(inputs, device, dtype)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).double()
