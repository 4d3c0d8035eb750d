"""A kernel file is copied, alone, into another project: it works under another name, as text, twice, and edited."""

import ast
import re
import symtable
import sys

import pytest
import torch
from cases import PAIRS, PORTABLE, QUICKEST, STEMS, build, first_cases
from processes import QUICKLY, compiler, run_python, save_case
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
        other = namespace["ModelNew"](*case.arguments())
        other.load_state_dict(new.state_dict())
        assert torch.equal(other.to(device)(*inputs), expected)
        assert namespace["NAMESPACE"] == again["NAMESPACE"]
    assert as_text["get_inputs"] is get_inputs
    assert torch.equal(new(*inputs), expected)


@pytest.mark.slow
def test_an_edited_copy_beside_the_file_itself(tmp_path):
    """Each runs its own C++: the copy says so when it is loaded, and both go on working."""
    saved = save_case(QUICKEST, tmp_path / "case.pt")
    said = '#include <cstdio>\nstatic const int said = std::puts("this is the copy");\n'
    edited, edits = re.subn(r'(?m)^(CPP_SOURCE = r""")\n', lambda match: match[0] + said, source(QUICKEST.stem))
    assert edits == 1
    (tmp_path / "edited.py").write_text(edited)
    (tmp_path / "original.py").write_text(source(QUICKEST.stem))
    script = """
sys.path.insert(0, "")
import original, edited
for module in (original, edited, original):
    check(module.ModelNew, sys.argv[1])
assert original.NAMESPACE != edited.NAMESPACE
"""
    environment = {"CUDA_VISIBLE_DEVICES": "", "CXX": compiler(tmp_path, QUICKLY)}
    assert run_python(script, saved, cwd=tmp_path, **environment) == "this is the copy\n"


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
