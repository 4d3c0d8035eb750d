"""torch.compile without a graph break, torch.export, fake tensors, and PyTorch's own checks of our operators."""

import copy
import logging

import pytest
import torch
from accuracy import assert_same_form, forward
from cases import CASES, COMPILED, FIRST, LAYOUTS, PORTABLE, Recorder, build, converted, each, first_cases, solution
from processes import finish, start_python
from test_linear_products import SMALLEST
from test_training import output_and_gradients
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map_only

SINGLE = [torch.float32]
COMPILED_CASES = [case for case in FIRST if case.stem in COMPILED]
compiled_cases = pytest.mark.parametrize("case", COMPILED_CASES, ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").propagate = False  # or pytest shows its hundreds of empty lines with a failure


def compiled(module, backend="aot_eager"):
    return torch.compile(copy.deepcopy(module), fullgraph=True, backend=backend)


def close(ours, theirs, tolerance: float = 1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# Dynamo cannot trace the Model where it warns, of no features; a file of kernels/hopper runs its lines there.
TRACED = [case for case in CASES if case.values < 1e4 and (case.stem in PORTABLE or case.name != "no features")]


@each(TRACED, SINGLE)
def test_forward_in_one_graph(case, dtype, device):
    """Also where dynamo cannot trace the Model: it warns of an InstanceNorm2d of one channel."""
    _, new, inputs = build(case, device)
    close(forward(compiled(new), inputs), forward(new, inputs))


@each(FIRST)
def test_forward_and_backward_in_one_graph(case, dtype, device):
    _, new, inputs = build(case, device, dtype)
    torch.testing.assert_close(output_and_gradients(compiled(new), inputs), output_and_gradients(new, inputs))


@first_cases
@torch.no_grad()
def test_a_forward_put_on_a_layer_compiles_anew(case, device):
    _, new, inputs = build(case, device)
    traced, layer = torch.compile(new, backend="aot_eager"), next(new.children())
    traced(*inputs)
    layer.forward = lambda x, was=layer.forward: was(x).sin()
    torch.testing.assert_close(traced(*inputs), new(*inputs), rtol=1e-5, atol=1e-5)


@compiled_cases
def test_inductor(case, device):
    """On a GPU also the backward, which on a CPU is PyTorch's own lines."""
    _, new, inputs = build(case, device)
    for step in (forward, output_and_gradients)[: 1 + (device.type == "cuda")]:
        close(step(compiled(new, "inductor"), inputs), step(new, inputs), 1e-4)


@each(COMPILED_CASES, SINGLE, [name for name in LAYOUTS if name != "negated lazily"])
@torch.no_grad()
def test_compiled_output_has_eagers_strides(case, dtype, layout, device):
    """A fake kernel that promises other strides than the real one gives wrong answers in the graph around it. What is
    negated lazily dynamo itself does not take."""
    _, new, inputs = build(case, device)
    inputs = [LAYOUTS[layout](t) for t in inputs]
    traced = torch.compile(lambda *tensors: new(*tensors) * 1, fullgraph=True, backend="aot_eager")
    expected, out = new(*inputs), traced(*inputs)
    assert_same_form(out, expected)
    close(out, expected)


def batch_dimensions(case, most: int = 1024) -> tuple[dict, ...]:
    """For torch.export: of each input, the dimensions that grow with the batch."""
    batch, pairs = torch.export.Dim("batch", min=2, max=most), zip(case.inputs(2), case.inputs(3), strict=True)
    return tuple({d: batch for d in range(a.dim()) if a.shape[d] != b.shape[d]} for a, b in pairs)


@compiled_cases
@pytest.mark.parametrize("recorded", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("marked", [False, True], ids=["nothing marked", "marked as dynamic"])
def test_another_batch_size_needs_no_other_compilation(case, recorded, marked, device):
    """Unmarked, the first is for its own size and the second for all others."""
    _, new, _ = build(case, device)
    counter = CompileCounterWithBackend("aot_eager")
    module = torch.compile(new, fullgraph=True, backend=counter)
    for batch in (6, 7, 9, 5):
        inputs = [t.requires_grad_(recorded) for t in converted(case.inputs(batch), device)]
        for t, dimensions in zip(inputs, batch_dimensions(case), strict=True):
            if marked:
                torch._dynamo.mark_dynamic(t, [*dimensions])
        with torch.set_grad_enabled(recorded):
            out = module(*inputs)
        close(out.detach(), new(*inputs).detach())
        if recorded:
            out.sum().backward()
    assert counter.frame_count <= 2 - marked


def called_by(program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


strict_or_not = pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])


@first_cases
@strict_or_not
@pytest.mark.parametrize("how", ["without gradients", "with gradients", "to ONNX"])
def test_an_exported_program_goes_through_a_file(case, strict, how, device, tmp_path, monkeypatch):
    """Without gradients it holds our operator, where there is one: kernels/hopper has none for a CPU, nor for products
    as small as these. With gradients it can be trained: it holds the Model's operators, and so it does for ONNX."""
    model, new, inputs = build(case, device)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: how == "to ONNX")
    with torch.set_grad_enabled(how == "with gradients"):
        program = torch.export.export(new, tuple(inputs), dynamic_shapes=batch_dimensions(case), strict=strict)
        models = torch.export.export(model, tuple(inputs), dynamic_shapes=batch_dimensions(case))
    taken = case.stem in PORTABLE or case.stem in COMPILED and device.type == "cuda" and "linear" not in case.stem
    if how != "without gradients":
        assert called_by(program) == called_by(models)
        output_and_gradients(program.module(), inputs)
    elif taken:
        assert any(name.startswith(solution(case.stem).NAMESPACE) for name in called_by(program))
    torch.export.save(program, tmp_path / "program.pt2")
    exported = torch.export.load(tmp_path / "program.pt2").module()
    for size in (2, 5):
        inputs = converted(case.inputs(size), device)
        close(forward(exported, inputs), forward(new, inputs))


@first_cases
@torch.no_grad()
def test_exported_to_onnx(case, tmp_path):
    pytest.importorskip("onnxscript")
    _, new, inputs = build(case)
    torch.onnx.export(new, tuple(inputs), tmp_path / "new.onnx", dynamo=True, verbose=False)


SIDES = {"of a range": {"min": 4, "max": 512}, "found by PyTorch": None}


@strict_or_not
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("case", [case for case in COMPILED_CASES if len(case.shapes[0]) == 4], ids=str)
@torch.no_grad()
def test_exported_with_any_height_and_width(case, sides, strict, device):
    """No shape that the Model takes is refused: how the work is done is decided when the program runs."""
    model, new, (x,) = build(case, device)
    dims = [torch.export.Dim(name, **SIDES[sides]) if SIDES[sides] else torch.export.Dim.AUTO for name in ("h", "w")]
    large = torch.randn(*x.shape[:2], 34, 34, device=device)
    program = torch.export.export(new, (large,), dynamic_shapes=({2: dims[0], 3: dims[1]},), strict=strict).module()
    for shape in ((5, 5), (4, 9), (35, 34), (60, 41)):
        x = torch.randn(*x.shape[:2], *shape, device=device)
        out, expected = program(x), model(x)
        assert_same_form(out, expected)
        close(out, expected, 1e-4)


AOT_SCRIPT = """
load(sys.argv[1], "copied")  # registers the operators that the package calls
run = torch._inductor.aoti_load_package(sys.argv[2])
for inputs, expected in torch.load(sys.argv[3], weights_only=False):
    torch.testing.assert_close(run(*inputs), expected, rtol=1e-5, atol=1e-5)
"""

# To build sooner what runs once.
AOT_OPTIONS = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.parametrize("case", FIRST[1:2], ids=str)  # one is enough
@torch.no_grad()
def test_a_package_of_aot_inductor_runs_in_another_process(case, device, tmp_path):
    model, new, inputs = build(case, device)

    def run(module):
        program = torch.export.export(module, tuple(inputs))
        options = {"package_path": str(tmp_path / "package.pt2"), "inductor_configs": AOT_OPTIONS}
        package = torch._inductor.aoti_compile_and_package(program, **options)
        torch.save([(inputs, module(*inputs))], check := tmp_path / "check.pt")
        return finish(start_python(AOT_SCRIPT, solution(case.stem).__file__, package, check, cwd=tmp_path))

    code, _, err = run(new)
    if code < 0 and run(model)[0] == code:
        pytest.skip("this PyTorch crashes when it loads the Model's package, too")
    assert code == 0, err


LINEAR = [case for case in COMPILED_CASES if case.stem.startswith("linear")]
ANY_BATCH = [pytest.param(case, "cuda", torch.float32, 2048, marks=pytest.mark.gpu) for case in SMALLEST]
ANY_BATCH += [(case, "cpu", torch.bfloat16, 64) for case in LINEAR]  # 16 bits that a CPU lacks


@strict_or_not
@pytest.mark.parametrize(("case", "device", "dtype", "large"), ANY_BATCH, ids=str)
@torch.no_grad()
def test_exported_with_any_batch(case, device, dtype, large, strict, monkeypatch):
    """Where the operator takes some batches only, no batch is refused."""
    monkeypatch.setattr(solution(case.stem), "_CPU_UPCASTS", {dtype}, raising=False)
    _, new, inputs = build(case, device, dtype)
    shapes = batch_dimensions(case, most=4096)
    exported = torch.export.export(new, tuple(inputs), dynamic_shapes=shapes, strict=strict).module()
    for size in (2, large):
        inputs = converted(case.inputs(size), device, dtype)
        close(exported(*inputs), new(*inputs), 1e-3 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("stem", [case.stem for case in LINEAR])
def test_whether_a_product_is_large_leaves_the_batch_free(stem):
    """Also where the batch may be smaller or larger than the other sizes."""

    class Asks(torch.nn.Module):
        def forward(self, x):
            return x + solution(stem)._is_large(x.shape[0], 4096, 1024)

    x = torch.zeros(8192, 2)
    batch = torch.export.Dim("batch", min=2048, max=65536)
    exported = torch.export.export(Asks(), (x,), dynamic_shapes=({0: batch},), strict=False).module()
    assert exported(x[:2048]).all()


def recorded_calls(stem: str, device) -> list[tuple]:
    """The operator calls of a forward and backward of every small case of this file, with its plain and odd layouts."""
    cases = [case for case in CASES if case.stem == stem and case.values < 2e4]
    if stem not in PORTABLE:
        cases += [case for case in SMALLEST if case.stem == stem]
    with Recorder(stem) as recorder:
        for case in cases:
            for layout in ("contiguous", "transposed", "channels_last"):
                _, new, inputs = build(case, device)
                for step in (output_and_gradients, forward):
                    step(new, [LAYOUTS[layout](t) for t in inputs])
    return recorder.calls


@pytest.mark.parametrize("stem", COMPILED)
def test_operators_satisfy_opcheck(stem, device):
    if stem not in PORTABLE and device.type == "cpu":
        pytest.skip("has no operator for a CPU")
    seen = {}
    for function, args, kwargs in recorded_calls(stem, device):
        args = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)
        form = tree_map_only(torch.Tensor, lambda t: (t.shape, t.stride()), args)
        size = max(t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        seen.setdefault(function, {})[str(form)] = (size, args, kwargs)
    assert seen, "the kernels were not called"
    for function, calls in seen.items():
        smallest = sorted(calls.values(), key=lambda call: call[0])[:8]
        for _, args, kwargs in smallest:
            library.opcheck(function, args, kwargs)
        _, args, kwargs = smallest[-1]  # whoever differentiates the bare operator is told that he cannot
        leaves = tree_map_only(torch.Tensor, lambda t: t.requires_grad_(t.is_floating_point()), args)
        with pytest.raises(RuntimeError, match="not implemented"):
            sum(t.sum() for t in tree_leaves(function(*leaves, **kwargs))).backward()
