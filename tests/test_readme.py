"""The README says what the committed records say."""

import hashlib
import json
import re

import harness
import pytest
from cases import ROOT

README = (ROOT / "README.md").read_text()
RECORDS = sorted((ROOT / "results").glob("*.json"))


def test_the_table_is_the_records(capsys):
    table = re.search(r"<!-- results: make chart -->\n(.*?)\n<!-- end results -->", README, re.S).group(1)
    assert harness.main(["--from", str(ROOT / "results" / "h200.json"), "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == table


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
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
