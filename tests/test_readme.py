"""The README says what the committed records say."""

import ast
import hashlib
import json
import re
import shutil

import harness
import pytest
import torch
from cases import ROOT, problem
from processes import run_python

README = (ROOT / "README.md").read_text()
RECORDS = sorted((ROOT / "results").glob("*/*.json"))


def test_the_table_is_the_records(capsys):
    table = re.search(r"<!-- results: make chart -->\n(.*?)\n<!-- end results -->", README, re.S).group(1)
    sources = [word for path in RECORDS if path.parent.name == "h200" for word in ("--from", str(path))]
    assert harness.main([*sources, "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == table


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_records_are_of_the_files_as_they_are(path):
    for run in json.loads(path.read_text())["runs"]:
        source = (ROOT / "kernels" / f"{run['model']}.py").read_bytes()
        assert run["source_sha256"] == hashlib.sha256(source).hexdigest(), f"{run['model']} has changed since {path.name} was measured"
        assert run["ok"]


def test_files_it_names_exist():
    named = re.findall(r"`((?:models|kernels|judge|tests|results)/[\w./]*)`", README)
    missing = [name for name in named if not (ROOT / name).exists() and "NAME" not in name]
    assert named and not missing


def test_its_commands_are_the_makefiles():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"make ([a-z]+)", README)) - {"is"} <= set(targets)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_make_measure_takes_the_records_as_they_were_taken(path):
    command = json.loads(path.read_text())["environment"]["command"]
    options, (option, _) = command[2:-2], command[-2:]
    assert command[0] == "harness.py" and option == "--json"
    assert f"$(RECORD) {' '.join(options)} --json" in (ROOT / "Makefile").read_text()


def test_its_training_loop_learns(tmp_path):
    """As a new user has it: the code of the README in one file, the copied ModelNew beside it."""
    (loop,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "loop.py").write_text(loop)
    (stem,) = re.findall(r"from (\w+) import ModelNew", loop)
    shutil.copy(ROOT / "kernels" / f"{stem}.py", tmp_path)
    printed = run_python("sys.path.insert(0, '')\nimport loop", cwd=tmp_path, OMP_NUM_THREADS=2)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.05, printed
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    arguments = ast.literal_eval(re.search(r"ModelNew(\(.*\)),", loop)[1])
    model = problem(stem).Model(*arguments)  # what was trained there can go on here
    model.load_state_dict({name.removeprefix("0."): value for name, value in weights.items() if name.startswith("0.")}, strict=True)
