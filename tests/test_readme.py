"""What a reader copies from the README works, and its tables say what the committed records say."""

import ast
import json
import os
import re
import shutil
import warnings

import mutate
import pytest
import summary
import torch
from cases import ROOT, problem
from processes import run_python

from judge.source import code_of, code_sha256, kernels_of


def only_ci_fails(said: str) -> None:
    """For what a change of a kernel file makes stale: elsewhere a warning, as there may be no GPU to measure it on."""
    if os.environ.get("CI"):
        pytest.fail(said)
    warnings.warn(said, stacklevel=2)


RECORDS = sorted(path.relative_to(ROOT / "results").as_posix() for path in (ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize("name", summary.tables())
def test_the_tables_are_the_records(name):
    assert (ROOT / name).read_text() == summary.filled(name)


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_of_the_files_as_they_are(name):
    runs = json.loads((ROOT / "results" / name).read_text())["runs"]
    for model, kernels, whole in {(run["model"], run["kernels_sha256"], run["source_sha256"]) for run in runs}:
        path = ROOT / "kernels" / f"{model}.py"
        if not path.exists():
            pytest.fail(f"results/{name} is a record of kernels/{model}.py, which is not there: delete it")
        if code_sha256(path, kernels_of) != kernels:
            only_ci_fails(f"results/{name} is a record of other kernels than kernels/{model}.py has: measure it again")
        elif code_sha256(path) != whole:
            warnings.warn(f"Python of kernels/{model}.py has changed since results/{name}", stacklevel=1)
    assert all(run["ok"] for run in runs)


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("kernels/README.md", 120), ("results/README.md", 150)])
def test_is_read_in_a_quarter_of_an_hour(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_what_the_ladder_names_is_in_the_files():
    code = "\n".join(path.read_text() for path in (ROOT / "kernels").rglob("*.py"))
    names = set(re.findall(r"`(\w+)`", (ROOT / "kernels" / "README.md").read_text()))
    known = {*summary.PAIRS, "NAME"}
    assert len(names) > 10 and not [name for name in names - known if not re.search(rf"\b{name}\b", code)]


def test_what_mutations_change_is_there():
    if gone := [f"{old}: {said}" for path, old, *_ in mutate.rows() if (said := mutate.lost(path, old))]:
        only_ci_fails("\n".join(gone))


CODE = '''"""A file."""
X = 1  # one
S = r"""
int i = 2;  // two
const char* s = "//";
"""

def f():
    "What f does."
    return "#"
'''

COMMENTS = {"# one": "# eins", "// two": "// zwei", "A file.": "Two\nlines.", "What f does.": "Nothing.", "\n\n": "\n"}
CHANGES = {"X = 1": "X = 2", "int i = 2": "int i = 3", '"//"': '"/"', '"#"': '""'}


@pytest.mark.parametrize("old", COMMENTS | CHANGES)
def test_a_changed_comment_is_no_changed_code(old):
    assert CODE.count(old) == 1
    same = code_of(CODE) == code_of(CODE.replace(old, (COMMENTS | CHANGES)[old]))
    assert same == (old in COMMENTS)


def test_its_training_loop_learns(tmp_path):
    """As a new user has it: the code of the README in one file, the copied ModelNew beside it."""
    (loop,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "loop.py").write_text(loop)
    (stem,) = re.findall(r"from (\w+) import ModelNew", loop)
    shutil.copy(ROOT / "kernels" / f"{stem}.py", tmp_path)
    printed = run_python("sys.path.insert(0, '')\nimport loop", cwd=tmp_path, OMP_NUM_THREADS=2)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.05, printed
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"loop.py", f"{stem}.py", "weights.pt"}  # and what is built is elsewhere
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    arguments = ast.literal_eval(re.search(r"ModelNew(\(.*\)),", loop)[1])
    model = problem(stem).Model(*arguments)  # what was trained there can go on here
    own = {name.removeprefix("0."): value for name, value in weights.items() if name.startswith("0.")}
    model.load_state_dict(own, strict=True)
