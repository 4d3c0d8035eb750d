"""What any pair promises, also one that was just added as two files: it is right, a drop-in, and it trains.

What else the suite's own pairs promise, by their names in cases.py, is tested by the other files.
"""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from attack import HURRY, LastTimed, ceilings_of
from cases import NEW, PAIRS
from test_training import losses_of
from torch.utils._pytree import tree_leaves

import harness
from judge import bench
from judge.record import DROP_IN
from judge.source import Problem

BATCH = 2  # where the file lets it be chosen; its shapes are the benchmark's otherwise
any_pair = pytest.mark.parametrize("name", [*NEW, *[name for name in PAIRS if name == "instance_norm"]])


@any_pair
@pytest.mark.slow
def test_the_judge_calls_it_a_drop_in(name, device, monkeypatch):
    """In each direction. What it names is what has to be mended."""
    monkeypatch.setattr(bench, "MOST_KEPT", 2)  # of the timed answers few are compared with float64: seconds each
    options = replace(HURRY, device=device.type, batch=BATCH, timeout=120.0)
    with contextlib.closing(LastTimed(options, ceilings_of(device.type), lambda text: None)) as judge:
        runs = list(judge.judge(PAIRS[name]))
    failing = [run for run in runs if run.status != DROP_IN]
    said = [f"{run.direction}: {run.status}: {'; '.join([*run.reasons, *run.no_dropin])}" for run in failing]
    if said:
        pytest.fail("\n".join(said), pytrace=False)


def loss_of_all(outputs) -> torch.Tensor:
    found = [x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    return sum((x - 0.5).square().mean() for x in found)


@any_pair
def test_losses_are_the_models_step_by_step(name, device):
    pair = PAIRS[name]
    problem = Problem(pair.model_path)
    if device.type == "cpu":
        problem = Problem(pair.model_path, problem.on_cpu)
    model = problem.model(seed=0).to(device)
    if not any(True for _ in model.parameters()):
        pytest.skip("it has no parameters")
    new = harness.source.load(pair.new_path).ModelNew(*copy.deepcopy(problem.arguments(0)))
    new.load_state_dict(model.state_dict())
    batch, sgd = problem.batch and BATCH, torch.optim.SGD

    def losses(module) -> list[float]:
        steps = (problem.inputs(batch, device.type, torch.float32, seed) for seed in range(4))
        return losses_of(module.train(), steps, sgd(module.parameters(), lr=1e-3), loss_of_all)

    assert losses(new.to(device)) == pytest.approx(losses(model), rel=1e-3)
