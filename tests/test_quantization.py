"""What tools that rewrite a module see of ModelNew: the Model's layers, or the operator in an exported program."""

import pytest
import torch
from accuracy import assert_same_form
from cases import COMPILED, FIRST, build, first_cases, problem_of
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
compiled_cases = pytest.mark.parametrize("case", [case for case in FIRST if case.stem in COMPILED], ids=str)


@first_cases
def test_torch_fx_sees_the_models_layers(case):
    model, new, _ = build(case)
    graphs = [torch.fx.symbolic_trace(module).graph for module in (model, new)]
    ours, theirs = ({node.target for node in graph.nodes if node.op == "call_module"} for graph in graphs)
    assert ours == theirs


@first_cases
def test_quantized_by_torch_fx(case):
    quantization = pytest.importorskip("torch.ao.quantization")
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    model, new, inputs = build(case)
    results = []
    for module in (model, new):
        mapping = quantization.get_default_qconfig_mapping("x86")
        prepared = quantize_fx.prepare_fx(module.eval(), mapping, tuple(inputs))
        prepared(*inputs)
        results.append(quantize_fx.convert_fx(prepared)(*inputs))
    torch.testing.assert_close(*results, rtol=0.1, atol=0.1)
    assert not torch.equal(results[1], new(*inputs))  # it is quantized, not passed by


@compiled_cases
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@torch.no_grad()
def test_an_exported_program_holds_the_operator(case, strict, device):
    """Also with torch.export's defaults, of strictness; where no gradients are asked for."""
    _, new, inputs = build(case, device)
    program = torch.export.export(new, tuple(inputs), strict=strict)
    called = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert any(name.startswith(problem_of(case.stem)) for name in called), called


CONV = "conv_sigmoid_group_norm"
with_a_convolution = pytest.mark.parametrize("case", [case for case in FIRST if case.stem == CONV], ids=str)


@with_a_convolution
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_exported_with_gradients_on_a_cpu_a_program_holds_the_models_layers(case, strict):
    """As torch.export is called without torch.no_grad, for instance to quantize the program."""
    model, new, inputs = build(case)
    programs = [torch.export.export(module, tuple(inputs), strict=strict) for module in (model, new)]
    nodes = ([node for node in program.graph.nodes if node.op == "call_function"] for program in programs)
    theirs, ours = ([str(node.target) for node in called] for called in nodes)
    assert ours == theirs


@with_a_convolution
def test_quantized_as_an_exported_program(case):
    quantize = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    model, new, inputs = build(case)
    results = []
    for module in (model, new):
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = quantize.prepare_pt2e(torch.export.export(module.eval(), tuple(inputs)).module(), quantizer)
        prepared(*inputs)
        results.append(quantize.convert_pt2e(prepared)(*inputs))
    assert torch.equal(*results) and not torch.equal(results[1], new(*inputs))


SIDES = {"of a range": {"min": 4, "max": 512}, "found by PyTorch": None}


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(
    "case", [c for c in FIRST if "conv" in c.stem or problem_of(c.stem) == "instance_norm"], ids=str
)
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
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@first_cases
def test_scripted_by_torch_jit(case):
    model, new, inputs = build(case)
    torch.testing.assert_close(torch.jit.script(new)(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@first_cases
@torch.no_grad()
def test_a_norm_told_to_use_statistics_that_it_has_not(case):
    """PyTorch refuses that in evaluation, and so must ModelNew."""
    norms = []
    model, new, inputs = build(case)
    for module in (model.eval(), new.eval()):
        norms = [layer for layer in module.modules() if isinstance(layer, nn.InstanceNorm2d)]
        for norm in norms:
            norm.track_running_stats = True
    if not norms:
        pytest.skip("has no norm with statistics")
    for module in (model, new):
        with pytest.raises(RuntimeError, match="running_mean"):
            module(*inputs)
