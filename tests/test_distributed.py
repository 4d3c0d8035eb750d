"""Several processes: training in parallel, the harness under torchrun, and tensors that are spread over a mesh."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import FIRST, ROOT, WITH_PARAMETERS, build
from processes import finish, start_python
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import harness
from judge import distributed, trial
from judge.pairs import Pair, Problem

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch is built without torch.distributed")

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs(batch_size=7):
    return [torch.rand(batch_size, 64)]

def get_init_inputs():
    return [64]
"""
NEW = MODEL.partition("def get_inputs")[0].replace("class Model(", "class ModelNew(")
ON_RANK_1 = """
import os, signal

class ModelNew(ModelNew):
    def forward(self, x):
        out = super().forward(x)
        if os.environ["RANK"] == "1":
            {}
        return out
"""


# The harness in a hurry: its ceilings are of no meaning, its medians of few rounds.
HARNESS = """
import sys
from pathlib import Path

import harness

def measure(self):
    self.copy_bandwidth, self.matrix_rate = 1e9, {"float32": 1e9}

harness.Ceilings.measure = measure
harness.timing.SECONDS_EACH["cpu"] = 0.1
code = harness.main(sys.argv[1:])
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
sys.exit(f"alive after the harness: {threads}" if any("gloo" in name for name in threads) else code)
"""


def torchrun(*arguments, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess:
    """Two processes, of one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout)


def on_the_pair(folder: Path, new: str) -> list:
    """The harness's arguments for MODEL and this candidate."""
    (folder / "model.py").write_text(MODEL)
    (folder / "new.py").write_text(new)
    return [folder / "model.py", folder / "new.py", "--device", "cpu", "--baselines", "eager"]


def two_ranks(folder: Path, new: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of two ranks that no torchrun watches over."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"cwd": folder, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    arguments = on_the_pair(folder, new)
    processes = [start_python(HARNESS, *arguments, RANK=rank, LOCAL_RANK=rank, **options) for rank in range(2)]
    return [finish(process) for process in processes]


def test_losses_in_parallel_are_the_models_alone():
    """By gloo on the CPU; by NCCL it is run by hand."""
    done = torchrun(ROOT / "tests" / "parallel_training.py", "cpu", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(": same:", done.stdout)) == 3 * len(FIRST)


# ---- the harness


def test_the_harness_splits_the_batch_and_reports_the_scaling(tmp_path):
    arguments = [*on_the_pair(tmp_path, NEW), "--backward", "--json", tmp_path / "record.json"]
    (tmp_path / "harness_in_a_hurry.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{HARNESS}")
    done = torchrun(tmp_path / "harness_in_a_hurry.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("error new / eager") == done.stdout.count("efficiency") == 1  # rank 0 alone speaks
    runs = json.loads((tmp_path / "record.json").read_text())["runs"]
    assert [(run["direction"], run["batch"], run["ok"]) for run in runs] == [("forward", 4, True), ("forward_backward", 4, True)]
    for run in runs:
        scaling = run["scaling"]
        assert (scaling["processes"], scaling["batch"], len(scaling["samples_per_second_each"])) == (2, 7, 2)
        assert scaling["samples_per_second"] == pytest.approx(7e3 / scaling["ms"])
        assert scaling["speedup"] == pytest.approx(scaling["ms_whole_alone"] / scaling["ms"])
        assert scaling["efficiency"] == pytest.approx(scaling["ms_share_alone"] / scaling["ms"])


def test_wrong_on_one_rank_is_wrong(tmp_path):
    (code, out, err), (other_code, other_out, other_err) = two_ranks(tmp_path, NEW + ON_RANK_1.format("out = out + 1"))
    assert code == other_code == harness.ANY_WRONG and "alive" not in err + other_err, err + other_err
    assert re.search("WRONG.*rank 1: .*not close to the Model's", out, re.DOTALL) and "rank 0:" not in out
    assert "WRONG" not in other_out  # PyTorch 2.8 says a word of its own there


def test_a_dead_rank_ends_the_other(tmp_path):
    (code, _, err), (killed, _, _) = two_ranks(tmp_path, NEW + ON_RANK_1.format("os.kill(os.getpid(), signal.SIGKILL)"))
    assert killed == -signal.SIGKILL
    assert code != 0 and "closed by peer" in err, err


def test_a_batch_smaller_than_the_processes_is_refused(tmp_path, monkeypatch):
    on_the_pair(tmp_path, NEW)
    pair = Pair("model", tmp_path / "model.py", tmp_path / "new.py")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for batch, words in ((1, "batch 1 cannot be split over 2 processes"), (None, "a fixed batch cannot be split")):
        with pytest.raises(distributed.CannotSplit, match=words):
            distributed.judge_pair(trial.Entry(pair, Problem(pair.model_path), batch), None, None, print)


# ---- DTensor


@pytest.fixture
def mesh(device):
    """Of this process alone: enough to have tensors of the kind."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_dtensors_are_refused_in_words(case, placement, recorded, mesh, device):
    """Our operators have no rule for how a mesh would share their work. fully_shard and DDP need none. Where the plain way takes them, it is
    the Model's own."""
    model, new, inputs = build(case, device)
    spread = [distribute_tensor(t, mesh, [placement]) for t in inputs]
    if case.stem.startswith("linear_"):
        with torch.set_grad_enabled(recorded):
            out, expected = distribute_module(new, mesh)(*spread), model(*inputs)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-4)
        return
    with torch.set_grad_enabled(recorded), pytest.raises((RuntimeError, NotImplementedError), match="sharding strategy|DTensor|tensor parallel"):
        distribute_module(new, mesh)(*spread)


@pytest.mark.parametrize("case", [case for case in FIRST if case.stem in WITH_PARAMETERS], ids=str)
def test_a_norm_sharded_by_itself_is_right_or_refused(case, mesh, device):
    """fully_shard gathers a module's weights when it is called, which a fused norm is not. The whole ModelNew is what to shard."""
    model, new, inputs = build(case, device)
    for child in new.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    try:
        out = fully_shard(new, mesh=mesh)(*inputs)
    except RuntimeError as refusal:
        assert "DTensor" in str(refusal)
        return
    torch.testing.assert_close(out, model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in FIRST if "linear" in case.stem], ids=str)
@pytest.mark.parametrize(
    "style", [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())], ids=["columns", "rows"]
)
def test_a_linear_layer_split_over_the_mesh(case, style, mesh, device):
    """Tensor parallelism of the layer inside: it takes and gives plain tensors."""
    model, new, inputs = build(case, device)
    name = next(name for name, child in new.named_children() if isinstance(child, torch.nn.Linear))
    torch.testing.assert_close(parallelize_module(new, mesh, {name: style})(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
