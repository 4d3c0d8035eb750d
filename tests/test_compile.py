"""torch.compile without a graph break, torch.export, fake tensors, and PyTorch's own checks of our operators."""

import copy
import logging
import os
import shutil
import subprocess

import pytest
import torch
from accuracy import assert_same_form
from cases import CASES, FIRST, LAYOUTS, SOLUTIONS, STEMS, build, converted, in_dtype, in_dtypes, in_layouts, operators, solution
from processes import run_python
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

first_cases = pytest.mark.parametrize("case", FIRST, ids=str)
light_cases = pytest.mark.parametrize("case", [c for c in CASES if c.values < 2e5 or c.shapes is None], ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").propagate = False  # or pytest shows its hundreds of empty lines with every failure


def compiled(module, backend="aot_eager", **options):
    return torch.compile(copy.deepcopy(module), fullgraph=True, backend=backend, **options)


def train_step(module, inputs) -> list[torch.Tensor]:
    """The output, then the gradients of inputs and parameters."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    out = module(*leaves)
    tensors = [*(t for t in leaves if t.requires_grad), *module.parameters()]
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out) + out.detach())]


def close(ours, theirs, tolerance: float = 1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@light_cases
def test_forward_in_one_graph(case, device):
    _, new, inputs = build(case, device)
    with torch.no_grad():
        expected = new(*inputs)
        out = compiled(new)(*inputs)
    assert_same_form(out, expected)
    close(out, expected)


@in_dtypes(FIRST)
def test_forward_and_backward_in_one_graph(case, dtype, device):
    _, new, inputs = build(case, device, dtype)
    module = compiled(new)
    for ours, theirs in zip(train_step(module, inputs), train_step(new, inputs), strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs)


@first_cases
def test_inductor(case, device):
    _, new, inputs = build(case, device)
    for ours, theirs in zip(train_step(compiled(new, "inductor"), inputs), train_step(new, inputs), strict=True):
        close(ours, theirs, 1e-4)  # inductor adds up gradients in an order of its own


@in_layouts(FIRST, [name for name in LAYOUTS if name != "negated lazily"])  # which dynamo itself does not take
def test_compiled_output_has_eagers_strides(case, layout, device):
    """A fake kernel that promises other strides than the real one gives wrong answers in the graph around it."""
    _, new, inputs = build(case, device)
    inputs = [LAYOUTS[layout](t) for t in inputs]
    with torch.no_grad():
        expected = new(*inputs)
        out = torch.compile(lambda *tensors: new(*tensors) * 1, fullgraph=True, backend="aot_eager")(*inputs)
    assert_same_form(out, expected)
    close(out, expected)


def batch_dimensions(case) -> list[list[int]]:
    """Of each input, the dimensions that grow with the batch."""
    return [[d for d in range(a.dim()) if a.shape[d] != b.shape[d]] for a, b in zip(case.inputs(2), case.inputs(3), strict=True)]


@first_cases
@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward and backward"])
def test_another_batch_size_needs_no_second_compilation(case, training, device):
    _, new, _ = build(case, device)
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(new, fullgraph=True, backend=counter)
    for batch in (2, 3, 5):
        inputs = converted(case.inputs(batch), device)
        for t, dimensions in zip(inputs, batch_dimensions(case), strict=True):
            torch._dynamo.mark_dynamic(t.requires_grad_(training), dimensions)
        with torch.set_grad_enabled(training):
            out = module(*inputs)
        close(out.detach(), new(*inputs).detach())
        if training:
            out.sum().backward()
    assert counter.frame_count == 1


@first_cases
@pytest.mark.parametrize("training", [False, True], ids=["forward", "forward and backward"])
def test_batch_sizes_in_a_row_take_two_compilations(case, training, device):
    """With nothing marked: the first for its own size, the second for all others."""
    _, new, _ = build(case, device)
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(new, fullgraph=True, backend=counter)
    for batch in (6, 7, 9, 12, 5):
        inputs = [t.requires_grad_(training) for t in converted(case.inputs(batch), device)]
        with torch.set_grad_enabled(training):
            out = module(*inputs)
        close(out.detach(), new(*inputs).detach())
        if training:
            out.sum().backward()
    assert counter.frame_count <= 2


@first_cases
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=in_dtype)
def test_autocast_in_one_graph(case, low, device):
    _, new, inputs = build(case, device)
    results = []
    for module in (compiled(new), new):
        with torch.autocast(device.type, dtype=low):
            results.append(train_step(module, inputs))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype is theirs.dtype
        close(ours, theirs, 1e-2)


@first_cases
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_export(case, strict, device):
    _, new, inputs = build(case, device)
    batch = torch.export.Dim("batch", min=2, max=1024)
    shapes = tuple(dict.fromkeys(dimensions, batch) for dimensions in batch_dimensions(case))
    exported = torch.export.export(new, tuple(inputs), dynamic_shapes=shapes, strict=strict).module()
    for size in (2, 5):
        inputs = converted(case.inputs(size), device)
        with torch.no_grad():
            close(exported(*inputs), new(*inputs))


@first_cases
def test_exported_program_survives_a_file(case, device, tmp_path):
    _, new, inputs = build(case, device)
    with torch.no_grad():
        torch.export.save(torch.export.export(new, tuple(inputs)), tmp_path / "program.pt2")
        close(torch.export.load(tmp_path / "program.pt2").module()(*inputs), new(*inputs))


AOT_SCRIPT = """
load(sys.argv[1], "copied")  # registers the operators that the package calls
run = torch._inductor.aoti_load_package(sys.argv[2])
for inputs, expected in torch.load(sys.argv[3], weights_only=False):
    torch.testing.assert_close(run(*inputs), expected, rtol=1e-5, atol=1e-5)
"""


def shares_the_cpp_library(compiler: str, folder) -> bool:
    """Whether what it links uses the process's libstdc++. One linked in beside PyTorch's breaks streams and regular expressions.

    AOTInductor's packages, of whatever model, then die when they are loaded: they read the device's name by a regular expression.
    """
    source, library = folder / "stream.cpp", folder / "stream.so"
    source.write_text("#include <iostream>\nvoid write(int n) { std::cout << n; }\n")
    command = [compiler, "-shared", "-fPIC", source, "-o", library]
    return shutil.which(compiler) is not None and not subprocess.run(command, check=False).returncode and b"libstdc++.so" in library.read_bytes()


@pytest.mark.parametrize("case", FIRST[1:2], ids=str)  # one: the wrapper's build takes seconds
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
def test_a_package_of_aot_inductor_runs_in_another_process(case, device, tmp_path, monkeypatch):
    compilers = [os.environ.get("CXX", "g++"), "g++", "c++"]
    compiler = next((path for path in compilers if shares_the_cpp_library(path, tmp_path)), None)
    if compiler is None:
        pytest.skip(f"no compiler here links PyTorch's C++ library: {compilers}")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, compiler))
    if hasattr(getattr(torch._inductor.config, "aot_inductor", None), "metadata"):  # which the compiler fills, and other tests' cache keys have
        monkeypatch.setattr("torch._inductor.config.aot_inductor.metadata", {})
    _, new, inputs = build(case, device)
    batch = torch.export.Dim("batch", min=2, max=1024)
    shapes = tuple(dict.fromkeys(dimensions, batch) for dimensions in batch_dimensions(case))
    with torch.no_grad():
        exported = torch.export.export(new, tuple(inputs), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "package.pt2"))
        checks = [(inputs, new(*inputs)) for inputs in (converted(case.inputs(size), device) for size in (2, 5))]
    torch.save(checks, tmp_path / "checks.pt")
    run_python(AOT_SCRIPT, SOLUTIONS / f"{case.stem}.py", package, tmp_path / "checks.pt", cwd=tmp_path)


@in_layouts(CASES, ["contiguous", "transposed", "channels_last"])
def test_fake_tensors_have_the_form_of_real_ones(case, layout, device):
    _, new, inputs = build(case, device)
    inputs = [LAYOUTS[layout](t) for t in inputs]
    expected = train_step(new, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = copy.deepcopy(new)
        for name, parameter in list(fake.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(fake.get_submodule(owner), leaf, torch.nn.Parameter(mode.from_tensor(parameter.detach())))
        results = train_step(fake, [mode.from_tensor(t) for t in inputs])
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    out, real = results[0], expected[0]
    if real.numel():
        assert [s for s, n in zip(out.stride(), out.shape) if n > 1] == [s for s, n in zip(real.stride(), real.shape) if n > 1]


@in_dtypes(CASES)
def test_meta_tensors_have_the_models_form(case, dtype):
    model, new, inputs = build(case, "cpu", dtype)
    inputs = converted(inputs, device="meta")
    with torch.no_grad():
        assert_same_form(new.to("meta")(*inputs), model.to("meta")(*inputs))


class Recorder(TorchDispatchMode):
    """Notes the calls of the operators in one namespace."""

    def __init__(self, namespace: str):
        super().__init__()
        self.namespace, self.calls = namespace, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == self.namespace:
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def recorded_calls(stem: str, device) -> list[tuple]:
    """The operator calls of a forward and backward of every small case of this file, with its plain and odd layouts."""
    with Recorder(solution(stem).NAMESPACE) as recorder:
        for case in CASES:
            if case.stem == stem and (case.values < 2e4 or case.shapes is None):
                for layout in ("contiguous", "transposed", "channels_last"):
                    _, new, inputs = build(case, device)
                    train_step(new, [LAYOUTS[layout](t) for t in inputs])
                    with torch.no_grad():
                        new(*inputs)
    return recorder.calls


has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@pytest.mark.parametrize("stem", STEMS)
def test_operators_satisfy_opcheck(stem, device):
    seen = {}
    for function, args, kwargs in recorded_calls(stem, device):
        args = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)
        form = tree_map_only(torch.Tensor, lambda t: (t.shape, t.stride()), args)
        seen.setdefault(function, {})[str(form)] = (args, kwargs)
    here = {name for name in operators(stem) if has_kernel(f"{solution(stem).NAMESPACE}::{name}", device.type.upper())}
    trained_plainly = {"backward"} if stem.startswith("linear_") else set()  # but for large float32 products on sm_90
    assert here - {function.name().split("::")[1] for function in seen} <= trained_plainly
    for function, calls in seen.items():
        by_size = sorted(calls.values(), key=lambda call: max(t.numel() for t in tree_leaves(call[0]) if isinstance(t, torch.Tensor)))
        for args, kwargs in by_size[:8]:
            library.opcheck(function, args, kwargs)
