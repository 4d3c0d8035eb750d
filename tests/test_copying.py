"""A kernel file is copied, alone, into somebody else's project: it works under another name, as text, twice, and beside an edited copy."""

import ast
import re
import shutil
import symtable
import sys

import pytest
import torch
from cases import FIRST, ROOT, SOLUTIONS, STEMS, build, load
from processes import finish, run_python, save_case, start_python
from sources import definitions, source

first_cases = pytest.mark.parametrize("case", FIRST, ids=lambda case: case.stem)
stems = pytest.mark.parametrize("stem", STEMS)


def loaded_from_text(text: str, namespace: dict) -> dict:
    exec(compile(text, "<string>", "exec"), namespace)  # noqa: S102
    return namespace


@first_cases
def test_copied_alone_into_an_empty_folder(case, device, tmp_path):
    saved = save_case(case, tmp_path / "case.pt", device)
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(SOLUTIONS / f"{case.stem}.py", folder / "copied.py")
    run_python("sys.path.insert(0, '')\nimport copied\ncheck(copied.ModelNew, sys.argv[1])", saved, cwd=folder)
    assert [p.name for p in folder.iterdir() if p.name != "__pycache__"] == ["copied.py"]  # and it left nothing there


@first_cases
def test_executed_as_text_in_a_fresh_process(case, device, tmp_path):
    """As KernelBench does: no file, no __name__, no source for `inspect` to find; then again, as a notebook does."""
    saved = save_case(case, tmp_path / "case.pt", device)
    (tmp_path / "text").write_text(source(case.stem))
    script = """
text = open("text").read()
for namespace in ({}, {"__name__": "builtins"}, {"__name__": "__main__"}):
    exec(compile(text, "<string>", "exec"), namespace)
    check(namespace["ModelNew"], sys.argv[1])
"""
    run_python(script, saved, cwd=tmp_path)


@first_cases
def test_loaded_twice_in_one_process(case, device):
    _, new, inputs = build(case, device)
    expected = new(*inputs)
    again = load(SOLUTIONS / f"{case.stem}.py", f"{case.stem}_again")
    as_text = loaded_from_text(source(case.stem), {})
    for cls in (again.ModelNew, as_text["ModelNew"]):
        other = cls(*case.arguments())
        other.load_state_dict(new.state_dict())
        assert torch.equal(other.to(device)(*inputs), expected)
    assert torch.equal(new(*inputs), expected)
    assert as_text["NAMESPACE"] == again.NAMESPACE


@pytest.mark.parametrize("stem", STEMS[1:2])
def test_two_edited_copies_side_by_side(stem, tmp_path):
    """Each runs its own C++: both say so when they are loaded, and both go on working."""
    case = next(c for c in FIRST if c.stem == stem)
    saved = save_case(case, tmp_path / "case.pt")
    for letter in "AB":
        said = f'#include <cstdio>\nstatic const int said = std::puts("this is copy {letter}");\n'
        edited, edits = re.subn(r'(?m)^(CPP_SOURCE = r?""")\\?\n?', lambda match, said=said: f"{match[0]}{said}", source(stem))
        assert edits == 1
        (tmp_path / f"copy_{letter}.py").write_text(edited)
    options = {"cwd": tmp_path, "TORCH_EXTENSIONS_DIR": tmp_path / "built"}
    alone = 'check(load(sys.argv[1], "alone").ModelNew, sys.argv[2])'
    builds = [start_python(alone, f"copy_{letter}.py", saved, **options) for letter in "AB"]  # at once, which halves the wait
    assert [finish(build)[:2] for build in builds] == [(0, "this is copy A\n"), (0, "this is copy B\n")]
    script = """
sys.path.insert(0, "")
import copy_A, copy_B
for module in (copy_A, copy_B, copy_A):
    check(module.ModelNew, sys.argv[1])
print(copy_A.NAMESPACE, copy_B.NAMESPACE)
"""
    *said, namespaces = run_python(script, saved, **options).strip().splitlines()
    assert sorted(said) == ["this is copy A", "this is copy B"]
    a, b = namespaces.split()
    assert a != b


@stems
def test_imports_nothing_but_torch_and_the_standard_library(stem):
    for node in ast.walk(ast.parse(source(stem))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
        names = {ast.Import: lambda n: [a.name for a in n.names], ast.ImportFrom: lambda n: [n.module]}.get(type(node), lambda n: [])(node)
        for name in names:
            assert name.split(".")[0] in {"torch", *sys.stdlib_module_names} - {"__future__"}, name


@stems
@pytest.mark.parametrize(
    "word",
    [r"\btry\s*:", r"\bexcept\s*:", r"\bexcept\s+\w+", r"\bpass\b", r"\bthreading\b", r"\bmultiprocessing\b", r"concurrent\.futures"]
    + [r"torch\.cuda\.Stream\(", r"_make_subclass", r"\(\s*(?:torch\.)?Tensor\):", r"Tensor\.__new__", r"(?:Thread|Process)PoolExecutor"]
    + [r"cuda\.Event(?:\.\w+)?\s*=", r"cuda\.synchronize\s*=", r"time\.(?:perf_counter|time)\s*=", r"__file__", r"__future__"],
)
def test_holds_no_word_that_kernelbench_or_a_bare_exec_rejects(stem, word):
    """Not in comments, docstrings or the C++ either: KernelBench's checker reads the text, not the code."""
    lines = [line for line in source(stem).splitlines() if re.search(word, line)]
    assert not lines


def top_level_names(text: str) -> set[str]:
    symbols = symtable.symtable(text, "<string>", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


@stems
def test_shares_no_name_with_its_problem_file(stem):
    """Both may end up in one namespace."""
    problem_names = top_level_names((ROOT / "models" / f"{stem}.py").read_text())
    assert {"Model", "get_inputs"} <= problem_names
    assert not top_level_names(source(stem)) & problem_names - {"torch", "nn"}


# ---- what several files repeat

PAIRS_OWN = {"ModelNew", "fits", "_fits", "_plain", "_finish_plainly"}  # one in each file, of its own Model


@stems
def test_what_has_the_same_name_in_two_files_has_the_same_text(stem):
    """Functions and structs of the top level; of functions, those with the same parameters."""
    own, differing = definitions(stem), []
    for other in STEMS:
        theirs = definitions(other)
        for name in own.keys() & theirs.keys() - PAIRS_OWN:
            heads = own[name].keys() & theirs[name].keys()
            differing += [f"{name} in {other}" for head in heads if own[name][head] != theirs[name][head]]
    assert not differing
