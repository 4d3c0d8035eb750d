"""A kernel file is copied, alone, into another project: it works under another name, as text, twice, and edited."""

import ast
import os
import re
import symtable
import sys

import pytest
import torch
from cases import PAIRS, PORTABLE, STEMS, build, first_cases
from processes import QUICKLY, compiler, finish, start_python
from sources import definitions, source
from torch._subclasses.fake_tensor import FakeTensorMode

from judge.source import load

stems = pytest.mark.parametrize("stem", STEMS)


@first_cases
def test_loaded_again_and_as_text_in_one_process(case, device, deterministic):
    """As text: no file, no source for `inspect` to find. In a notebook's namespace, and, as KernelBench does it, after
    the problem's text in one that is bare."""
    _, new, inputs = build(case, device)
    expected = new(*inputs)
    with FakeTensorMode():  # as a large model is built without memory
        again = vars(load(PAIRS[case.stem].new_path))
    as_text, as_main = {}, {"__name__": "__main__"}
    exec(compile(PAIRS[case.stem].model_path.read_text(), "<string>", "exec"), as_text)
    get_inputs = as_text["get_inputs"]
    for namespace in (as_text, as_main):
        exec(compile(source(case.stem), "<string>", "exec"), namespace)
    for namespace in (again, as_text, as_main):
        other = namespace["ModelNew"](*case.init)
        other.load_state_dict(new.state_dict())
        assert torch.equal(other.to(device)(*inputs), expected)
        assert namespace["NAMESPACE"] == again["NAMESPACE"]
    assert as_text["get_inputs"] is get_inputs
    assert torch.equal(new(*inputs), expected)


CONVOLUTION = "conv_sigmoid_group_norm"
# Of a hard sigmoid: what a reader puts in three places.
EDITS = {
    "activation": (
        "return reciprocal_approx(1.0f + exp2_approx(-1.44269504f * z));",
        "const float v = z / 6 + 0.5f; return v < 0 ? 0.0f : v > 1 ? 1.0f : v;",
    ),
    "activation_gradient": ("const float v = activation(z);", "return z > -3 && z < 3 ? 1.0f / 6 : 0.0f; float v = 0;"),
    "_activate": ("return torch.sigmoid(values)", "return nn.functional.hardsigmoid(values)"),
}


@pytest.mark.slow
@pytest.mark.skipif(CONVOLUTION not in PORTABLE, reason="the pair is not here")
@pytest.mark.parametrize("edits", ["activation_gradient", "_activate", "all"])
def test_another_activation_is_written_in_three_places_or_told_of(edits, tmp_path):
    """`activation` alone is told of as `_activate` alone is. Beside the file itself, each runs its own C++."""
    text = source(CONVOLUTION)
    (tmp_path / "original.py").write_text(text)
    if any(text.count(old) != 1 for old, _ in EDITS.values()):
        assert not os.environ.get("CI"), "EDITS has other lines than the kernel file"
        pytest.skip("the activation is no longer the sigmoid that EDITS replaces")
    for name in EDITS if edits == "all" else [edits]:
        text = text.replace(*EDITS[name])
    (tmp_path / "edited.py").write_text(text)
    script = """
sys.path.insert(0, "")
import edited, original
x, activations = torch.randn(2, 3, 20, 26), {original: torch.sigmoid, edited: torch.nn.functional.hardsigmoid}
for module in (original, edited, original):
    new = module.ModelNew(3, 8, 3, 4, (8, 1, 1), (8, 1, 1))
    with torch.no_grad():
        expected = new.group_norm(activations[module]((new.conv(x) + new.bias) * new.scale))
        torch.testing.assert_close(new(x), expected, rtol=1e-4, atol=1e-4)
assert original.NAMESPACE != edited.NAMESPACE
"""
    # In a folder of its own: an edit of `_activate` alone has the file's own library, which others would find there.
    environment = {"CUDA_VISIBLE_DEVICES": "", "CXX": compiler(tmp_path, QUICKLY), "TORCH_EXTENSIONS_DIR": tmp_path}
    code, _, err = finish(start_python(script, cwd=tmp_path, **environment))
    assert code == 0 if edits == "all" else "compute different functions" in err, err


@pytest.mark.skipif("linear_swish_group_norm" not in PORTABLE, reason="the pair is not here")
@pytest.mark.parametrize("other", ["nn.functional.mish(h)", "torch.sigmoid(h) * h.clamp_min(0)"])
def test_an_activation_that_is_forgotten_in_cpp_is_told_of(other, tmp_path):
    text = source("linear_swish_group_norm")
    (tmp_path / "edited.py").write_text(text.replace("torch.sigmoid(h) * h", other, 1))
    _, _, err = finish(start_python('sys.path.insert(0, "")\nimport edited', cwd=tmp_path))
    assert "finish_group_cpu and _swish_and_bias compute different functions" in err, err


@stems
def test_imports_nothing_but_torch_and_the_standard_library(stem):
    for node in ast.walk(ast.parse(source(stem))):
        assert not (isinstance(node, ast.ImportFrom) and node.level), "a relative import"
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in {"torch", *sys.stdlib_module_names} - {"__future__"}, name


# What KernelBench's static checker rejects, wherever it stands in the text, and what a bare exec does not have.
REJECTED = re.compile(
    r"\btry\s*:|\bexcept\s*:|\bexcept\s+\w+|\bpass\b|\bthreading\b|\bmultiprocessing\b|concurrent\.futures"
    r"|torch\.cuda\.Stream\(|_make_subclass|\(\s*(?:torch\.)?Tensor\):|Tensor\.__new__|(?:Thread|Process)PoolExecutor"
    r"|cuda\.Event(?:\.\w+)?\s*=|cuda\.synchronize\s*=|time\.(?:perf_counter|time)\s*=|__file__|__future__"
)


@stems
def test_kernelbenchs_checker_takes_its_text(stem):
    assert not [line for line in source(stem).splitlines() if REJECTED.search(line)]


def top_level_names(text: str) -> set[str]:
    symbols = symtable.symtable(text, "<string>", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


@stems
def test_shares_no_name_with_its_problem_file(stem):
    """Both may end up in one namespace."""
    problem_names = top_level_names(PAIRS[stem].model_path.read_text())
    assert {"Model", "get_inputs"} <= problem_names
    assert not top_level_names(source(stem)) & problem_names - {"torch", "nn"}


@stems
def test_what_has_the_same_name_in_two_files_has_the_same_text(stem):
    """Functions and structs of the top level; of functions, those with the same parameters.

    A portable file and a Hopper file are other programs, which share the build alone.
    """
    own, differing = definitions(stem), []
    for other in STEMS:
        theirs = definitions(other)
        of_one_kind = (stem in PORTABLE) == (other in PORTABLE)
        shared = own.keys() & theirs.keys() - {"ModelNew"} if of_one_kind else {"_load", "_is_whole"}
        for name in shared:
            heads = own[name].keys() & theirs[name].keys()
            differing += [f"{name} in {other}" for head in heads if own[name][head] != theirs[name][head]]
    assert not differing
