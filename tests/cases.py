"""The suite's own pairs, and the shapes they are tested at.

A pair is models/X.py with kernels/X.py or kernels/hopper/X.py, found by its name and called X or hopper/X. The pairs of
KNOWN are the suite's own. They are tested at the small shapes there, each with a name for what is weird about it.
Without a Hopper, one case of hopper/X is tested, in one layout: it runs the Model's own lines there. Any other pair is
in NEW: what it promises is tested by test_any_pair.py, and nothing here has to be changed for it.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from judge.source import discover, load, reseed

ROOT = Path(__file__).resolve().parent.parent
PAIRS = discover(ROOT)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def problem_of(stem: str) -> str:
    """The Model's file: that of hopper/X is models/X.py."""
    return stem.rpartition("/")[2]


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SINGLE_AND_LOW = DTYPES[1:]


@dataclass(frozen=True)
class Case:
    stem: str
    name: str
    init: tuple  # the constructor's arguments
    shapes: tuple  # of the inputs
    layouts: bool = False  # tested in every layout and dtype on any device

    def __str__(self) -> str:
        return f"{self.stem} of {self.name}"

    @property
    def values(self) -> float:
        return sum(map(math.prod, self.shapes))

    def inputs(self, batch: int | None = None) -> list:
        """Fresh inputs, of another batch size if one is given."""
        return [torch.randn(shape if batch is None else (batch, *shape[1:])) for shape in self.shapes]


# Name, constructor arguments, input shapes. The first three of each pair are tested in every layout.
KNOWN = {
    "instance_norm": [
        ("whole vectors", (4,), (3, 4, 8, 16)),
        ("odd sizes", (3,), (2, 3, 7, 73)),
        ("slices of 104 KiB", (2,), (2, 2, 104, 256)),
        ("an unbatched image", (3,), (3, 7, 9)),
        ("an empty batch", (3,), (0, 3, 8, 8)),
        ("no rows of pixels", (3,), (2, 3, 0, 8)),
        ("two pixels", (3,), (2, 3, 1, 2)),
        ("1023 pixels", (3,), (1, 3, 1, 1023)),
        ("more channels than num_features", (3,), (2, 5, 4, 4)),
        ("70000 slices", (1,), (70000, 1, 2, 2)),
        ("slices just over 64 KiB", (1,), (2, 1, 129, 128)),
        ("slices of 1 MiB", (1,), (2, 1, 512, 512)),
        ("odd slices of 4 MiB", (1,), (1, 1, 1023, 1025)),
        ("slices of 5 MiB", (1,), (1, 1, 1024, 1280)),
    ],
    "linear_instance_norm_residual": [
        ("whole vectors", (32, 64), (8, 32), (8, 64)),
        ("odd sizes", (7, 73), (3, 7), (3, 73)),
        ("rows of 16400 features", (5, 16400), (3, 5), (3, 16400)),
        ("a single row", (16, 24), (1, 16), (1, 24)),
        ("an empty batch", (5, 24), (0, 5), (0, 24)),
        ("three features from one", (1, 3), (5, 1), (5, 3)),
        ("no input features", (0, 24), (2, 0), (2, 24)),
        ("no features", (8, 0), (4, 8), (4, 0)),
        ("1023 features to 1032", (1023, 1032), (3, 1023), (3, 1032)),
        ("another eps", (16, 32, 0.5, 0.3), (4, 16), (4, 32)),
        ("70001 rows", (2, 8), (70001, 2), (70001, 8)),
        ("rows of 1.2 MiB", (2, 300008), (2, 2), (2, 300008)),
        ("y for all rows", (16, 32), (4, 16), (32,)),
        ("y of one column", (16, 32), (4, 16), (4, 1)),
        ("y without dimensions", (16, 32), (4, 16), ()),
    ],
    "linear_swish_group_norm": [
        ("whole vectors", (32, 256, 4, (256,)), (6, 32)),
        ("odd sizes", (7, 219, 3, (219,)), (3, 7)),
        ("groups of 128", (5, 32768, 256, (32768,)), (2, 5)),
        ("a single row", (16, 48, 3, (48,)), (1, 16)),
        ("an empty batch", (5, 64, 4, (64,)), (0, 5)),
        ("one group", (5, 1023, 1, (1023,)), (3, 5)),
        ("a group for each feature", (5, 8, 8, (8,)), (3, 5)),
        ("groups of 16", (1023, 1024, 64, (1024,)), (3, 1023)),
        ("no input features", (0, 32, 2, (32,)), (2, 0)),
        ("70001 rows", (2, 8, 1, (8,)), (70001, 2)),
        ("a bias of one value", (16, 64, 4, (1,)), (4, 16)),
        ("a bias without dimensions", (16, 64, 4, ()), (4, 16)),
        ("a bias for each row", (16, 64, 4, (4, 1)), (4, 16)),
        ("a bias for each value", (16, 64, 4, (4, 64)), (4, 16)),
    ],
    "conv_sigmoid_group_norm": [
        ("whole vectors", (4, 8, 3, 4, (8, 1, 1), (8, 1, 1)), (2, 4, 10, 18)),
        ("odd sizes", (3, 9, 3, 3, (9, 1, 1), (9, 1, 1)), (2, 3, 9, 13)),
        ("groups of 128 KiB", (2, 4, 3, 2, (4, 1, 1), (4, 1, 1)), (2, 2, 130, 130)),
        ("a single image", (8, 32, 3, 8, (32, 1, 1), (32, 1, 1)), (1, 8, 14, 14)),
        ("an empty batch", (3, 8, 3, 4, (8, 1, 1), (8, 1, 1)), (0, 3, 8, 9)),
        ("one pixel out", (3, 8, 3, 4, (8, 1, 1), (8, 1, 1)), (3, 3, 3, 3)),
        ("one pixel out and a group for each channel", (3, 8, 3, 8, (8, 1, 1), (8, 1, 1)), (2, 3, 3, 3)),
        ("1x1 kernels", (3, 6, 1, 2, (6, 1, 1), (6, 1, 1)), (2, 3, 7, 6)),
        ("3x5 kernels", (3, 6, (3, 5), 3, (6, 1, 1), (6, 1, 1)), (2, 3, 9, 10)),
        ("one group", (1, 7, 3, 1, (7, 1, 1), (7, 1, 1)), (2, 1, 9, 9)),
        ("one channel", (1, 1, 3, 1, (1, 1, 1), (1, 1, 1)), (1, 1, 8, 9)),
        ("70001 images", (1, 2, 1, 2, (2, 1, 1), (2, 1, 1)), (70001, 1, 1, 2)),
        ("groups of 1.1 MiB", (1, 2, 3, 1, (2, 1, 1), (2, 1, 1)), (1, 1, 386, 386)),
        ("a bias and scale without dimensions", (3, 8, 3, 4, (), ()), (2, 3, 8, 9)),
        ("a bias and scale for each value of a sample", (3, 8, 3, 4, (8, 6, 7), (8, 6, 7)), (2, 3, 8, 9)),
        ("a bias for each sample and one scale", (3, 8, 3, 4, (2, 8, 1, 1), (1, 1, 1)), (2, 3, 8, 9)),
    ],
}

PORTABLE = [name for name in PAIRS if name in KNOWN]
STEMS = PORTABLE + [name for name in PAIRS if name not in PORTABLE and problem_of(name) in KNOWN]
COMPILED = STEMS if ON_HOPPER else PORTABLE  # those whose operators are there
NEW = [name for name in PAIRS if name not in STEMS]


def cases_of(stem: str) -> list[Case]:
    rows = KNOWN[problem_of(stem)]
    if stem not in PORTABLE and not ON_HOPPER:
        rows = rows[:1]
    return [Case(stem, name, init, tuple(shapes), layouts=i < 3) for i, (name, init, *shapes) in enumerate(rows)]


def for_each_file(cases: list[Case]) -> list[Case]:
    """These cases of portable files; on a Hopper also of the files in kernels/hopper/."""
    others = [replace(case, stem=stem) for case in cases for stem in COMPILED if problem_of(stem) == case.stem != stem]
    return [*cases, *others]


CASES = [case for stem in STEMS for case in cases_of(stem)]
LAYOUT_CASES = [case for case in CASES if case.layouts and case.stem in COMPILED]
FIRST = [next(case for case in CASES if case.stem == stem) for stem in STEMS]  # one plain case a pair

first_cases = pytest.mark.parametrize("case", FIRST, ids=str)
learning_cases = pytest.mark.parametrize("case", [case for case in FIRST if case.stem != "instance_norm"], ids=str)
QUICKEST = next((case for case in FIRST if case.stem == "instance_norm"), FIRST[0])  # to build

# How a tensor can lie in memory; each keeps the shape and dtype.
LAYOUTS: dict[str, Callable] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "with the batch innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t,
    "offset by one element": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    # NaN stands between them.
    "every second element": lambda t: torch.stack([t, t.new_full((), torch.nan).expand(t.shape)], dim=-1)[..., 0],
    "one sample repeated": lambda t: t[:1].expand(t.shape) if t.dim() > 1 else t,
    "one value repeated": lambda t: t[..., :1].expand(t.shape) if t.dim() else t,
    "negated lazily": lambda t: torch._neg_view(-t),
}


def fits(case: Case, layout: str) -> bool:
    return layout != "channels_last" or any(len(shape) == 4 for shape in case.shapes)


def each(
    cases: list[Case], dtypes: Iterable = DTYPES, layouts: Iterable = (), most_on_cpu: float = math.inf
) -> pytest.MarkDecorator:
    """Parametrises by case, dtype, layout if there are any, and device: all of them on a GPU.

    On a CPU most dtypes of most cases are the plain path and alike: the cases not meant for all layouts are taken in
    float32 alone. A case of more values than `most_on_cpu` is not taken there.
    """
    rows, devices = [], ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for device, case, dtype, layout in itertools.product(devices, cases, dtypes, layouts or [None]):
        plain_alike = dtype is not torch.float32 and not case.layouts
        if device == "cpu" and (plain_alike or case.values > most_on_cpu) or layout and not fits(case, layout):
            continue
        name = " ".join(filter(None, [str(case), f"in {dtype}", layout, f"on {device}"]))
        row = [case, dtype, *([layout] if layouts else []), torch.device(device)]
        rows.append(pytest.param(*row, id=name))
    return pytest.mark.parametrize(["case", "dtype", *["layout"] * bool(layouts), "device"], rows)


class Recorder(TorchDispatchMode):
    """Notes the calls of a file's own operators."""

    def __init__(self, stem: str):
        super().__init__()
        self.namespace, self.calls = solution(stem).NAMESPACE, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == self.namespace:
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@functools.cache
def loaded(path: Path) -> ModuleType | Exception:
    try:
        return load(path)
    except Exception as error:  # kept, or hundreds of tests would each build again what does not build
        return error


def module_of(path: Path) -> ModuleType:
    if isinstance(found := loaded(path), Exception):
        raise found
    return found


def problem(stem: str) -> ModuleType:
    return module_of(PAIRS[stem].model_path)


def solution(stem: str) -> ModuleType:
    return module_of(PAIRS[stem].new_path)


def converted(inputs: list, device=None, dtype=None) -> list:
    """Inputs on a device and in a dtype; those that are not floating point keep theirs."""
    return [t.to(device, dtype if t.is_floating_point() else None) for t in inputs]


def build(
    case: Case, device="cpu", dtype=torch.float32, seed: int = 0
) -> tuple[torch.nn.Module, torch.nn.Module, list]:
    """The Model, a ModelNew with the same weights, and inputs; all drawn on the CPU, so the same on every device."""
    reseed(seed)
    model = problem(case.stem).Model(*case.init)
    with torch.no_grad():
        for parameter in model.parameters():  # the ones and zeros of an untrained norm would hide that it was left out
            if parameter.numel() and parameter.min() == parameter.max():
                parameter.normal_()
    inputs = case.inputs()
    new = solution(case.stem).ModelNew(*case.init)
    new.load_state_dict(model.state_dict())
    return model.to(device, dtype), new.to(device, dtype), converted(inputs, device, dtype)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).double()


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """A CUDA graph of a call; what the call gave before, on a stream of its own; and what a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, first, out
