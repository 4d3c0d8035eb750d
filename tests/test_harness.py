"""The harness: candidates it must reject and for which reason, honest ones it must accept, its parts, its command line."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attack import CANDIDATES, expected_reason, fake_ceilings, judge_candidate, judge_pair, named, needs_gpu, text_of
from in_turns import compare as compare_in_turns

import harness
from judge import correctness, machine, report, roof, timing, trial
from judge.compare import CHUNK, Errors, compare, first_changed, same_bits
from judge.correctness import Case, Examination
from judge.guard import Guard
from judge.observe import perturb, poisoned, random_like
from judge.pairs import Pair, Problem, discover
from judge.roof import Ceilings, Load

ROOT = Path(harness.__file__).resolve().parent

MODEL = (CANDIDATES / "model.py").read_text()
NEW = text_of("honest/plain")  # the right answer that others start from


def candidate(forward="return self.right(x)", at_import="", at_init=""):
    """The plain candidate with lines of its own."""
    text = NEW
    for line, lines in (
        ("        return self.right(x)", textwrap.indent(forward.strip(), " " * 8)),
        ("class ModelNew(nn.Module):", f"{at_import}\n\nclass ModelNew(nn.Module):"),
        ("\n    def right(", textwrap.indent(at_init, " " * 8) + "\n\n    def right("),
    ):
        assert text.count(line) == 1
        text = text.replace(line, lines)
    return text


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS_EACH", {"cuda": 0.05, "cpu": 0.05})
    monkeypatch.setattr(timing, "FLUSH_BYTES", {"cuda": 1 << 20, "cpu": 1 << 20})  # nothing here is about the figures


@pytest.fixture(autouse=True)
def same_process_afterwards():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == precision


@pytest.fixture(scope="module", autouse=True)
def everything_back_in_place():
    """The guard undoes what candidates did, so that the next is judged fairly."""
    guard = Guard()
    yield
    assert guard.check() == []


def write_pair(folder, new, model=MODEL):
    model_path, new_path = folder / "model.py", folder / "new.py"
    model_path.write_text(model)
    new_path.write_text(new)
    return Pair("model", model_path, new_path)


def judge(folder, new, device="cpu", model=MODEL, **options):
    return judge_pair(write_pair(folder, new, model), device, **options)


def tree(folder, **kernels):
    """A suite of its own: the harness as it is, small models, the kernels given."""
    shutil.copy(ROOT / "harness.py", folder)
    shutil.copytree(ROOT / "judge", folder / "judge", ignore=shutil.ignore_patterns("__pycache__"))
    for sub in ("models", "kernels"):
        (folder / sub).mkdir()
    for name, source in kernels.items():
        (folder / "models" / f"{name}.py").write_text(MODEL)
        (folder / "kernels" / f"{name}.py").write_text(source)
    return folder


def run_harness(folder, *arguments, cwd=None):
    command = [sys.executable, str(folder / "harness.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd or folder, timeout=300, check=False)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """`main` over a folder of pairs, in this process, with nothing measured that takes long."""
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(Ceilings, "measure", lambda self: self.__dict__.update(vars(fake_ceilings(self.device))))

    def add(name, new, model=MODEL):
        for sub, source in (("models", model), ("kernels", new)):
            (tmp_path / sub).mkdir(exist_ok=True)
            (tmp_path / sub / f"{name}.py").write_text(source)

    def main(*arguments):
        return harness.main(["--device", "cpu", "--baselines", "eager", *arguments])

    main.add = add
    return main


# Candidates


WRONG, WRONG_GRADIENT, ENDING, HONEST = map(named, ("wrong", "wrong_gradient", "ends_the_process", "honest"))


@pytest.mark.parametrize("name", [*WRONG, *WRONG_GRADIENT, *ENDING])
def test_rejects(name, device):
    if needs_gpu(name) and device.type == "cpu":
        pytest.skip("this one cheats on a GPU")
    if name == "wrong/unwritten_tail" and not hasattr(torch.utils, "deterministic") and device.type == "cpu":
        pytest.skip("this PyTorch cannot fill what torch.empty hands out")
    assert expected_reason(name)
    as_expected, said = judge_candidate(name, device.type)
    assert as_expected, said


@pytest.mark.parametrize("name", HONEST)
def test_accepts(name, device):
    if name == "honest/compiled" and torch.__version__.startswith("2.8."):
        pytest.skip("what PyTorch 2.8 compiles for another batch size ends the process: free(): invalid next size")
    as_expected, said = judge_candidate(name, device.type)
    assert as_expected, said


def test_what_is_wrong_is_not_timed(tmp_path):
    (run,) = judge(tmp_path, text_of("wrong/swapped_operations"))
    assert run.status == trial.WRONG
    assert not (run.ok or run.ms or run.roof)


def test_sees_that_an_answer_is_finished_after_it_was_given(monkeypatch, device):
    """The thread sleeps for 50 ms. Where the judge looks at once it sees zeros; where it looks again, that they have changed."""
    monkeypatch.setattr(correctness, "LATE_SECONDS", 0.5)
    (run,) = judge_pair(Pair("late", CANDIDATES / "model.py", CANDIDATES / "wrong/sleeping_thread.py"), device.type)
    assert correctness.LATE in run.reasons


def test_says_that_a_forward_carries_no_gradient(tmp_path):
    (run,) = judge(tmp_path, text_of("wrong_gradient/no_gradient"))
    assert run.notes == ["outputs carry no gradient, the Model's do"]


@pytest.mark.parametrize("dtype", machine.DTYPES)
def test_accepts_an_honest_one_in(dtype, tmp_path, device):
    runs = judge(tmp_path, candidate(), device.type, dtype=dtype, backward=True)
    assert [run.reasons for run in runs] == [[], [], []]
    for run in runs:
        assert run.rounds >= timing.MIN_ROUNDS
        assert run.ms["new"] > 0
        assert run.ms["eager"] > 0
        assert run.shapes == [[32, 96]]
        assert (run.error["eager_max"] is None) == (dtype == "float64")
    assert set(runs[-1].gradient_error) == {
        "input 0",
        "bias",
        *(f"{m}.{p}" for m in ("matmul", "group_norm") for p in ("weight", "bias")),
    }


def test_accepts_the_model_itself_exactly(tmp_path):
    (run,) = judge(tmp_path, MODEL.replace("class Model(", "class ModelNew("))
    assert run.ok, run.reasons
    assert run.error["new_max"] == run.error["eager_max"] > 0
    assert run.error["new_rms"] == run.error["eager_rms"] > 0


def test_accepts_several_outputs_of_several_types(tmp_path):
    model = MODEL.replace(
        "return self.group_norm(h)", "h = self.group_norm(h)\n        return h, (h.argmax(1), h.mean(1))"
    )
    new = candidate("h = self.right(x)\nreturn h, (h.argmax(1), h.mean(1))")
    runs = judge(tmp_path, new, model=model, backward=True)
    assert [run.reasons for run in runs] == [[], [], []]
    off_by_one = candidate("h = self.right(x)\nreturn h, (h.argmax(1) + 1, h.mean(1))")
    (run,) = judge(tmp_path, off_by_one, model=model)
    assert any("output 1 differs" in reason and "32 of 32" in reason for reason in run.reasons)


def test_kernelbench_files_that_take_no_batch_argument(tmp_path):
    model = MODEL.replace("def get_inputs(batch_size=batch_size)", "def get_inputs()")
    problem = Problem(write_pair(tmp_path, candidate(), model).model_path)
    assert problem.benchmark_batch == 32
    assert problem.inputs(5, "cpu", torch.float32, 0)[0].shape == (5, 96)
    (run,) = judge(tmp_path, candidate(), model=model)
    assert run.ok, run.reasons


def test_a_model_that_cannot_run_on_meta_has_no_floor(tmp_path):
    model = MODEL.replace("h = self.matmul(x)", "h = self.matmul(x) * (2.0 if x.sum().item() > 1e9 else 1.0)")
    (run,) = judge(tmp_path, candidate(), model=model)
    assert run.ok, run.reasons
    assert run.roof == {}
    assert "no floor" in run.notes[0]
    assert "-" in report.table([run])


def test_a_model_that_raises_is_not_the_candidates_fault(tmp_path):
    (run,) = judge(tmp_path, candidate(), model=MODEL.replace("h = self.matmul(x)", "h = self.nothing(x)"))
    assert not run.ok
    assert run.reasons[0].startswith("the Model itself raised AttributeError")


def test_a_baseline_that_fails_is_noted(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        def compiled(*inputs):
            raise RuntimeError("no C++ compiler")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    (run,) = judge(tmp_path, candidate(), baselines=("eager", "compile", "cudagraph"))
    assert run.ok, run.reasons
    assert set(run.ms) == {"new", "eager"}
    assert run.notes == [
        "no compile baseline: RuntimeError: no C++ compiler",
        "no new_cudagraph: there are no CUDA graphs on a CPU",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_times_the_candidate_in_a_cuda_graph(tmp_path):
    runs = judge(tmp_path, candidate(), "cuda", backward=True, baselines=("eager", "cudagraph"))
    for run in runs:
        assert run.ok, run.reasons
        assert all(note.startswith("the host takes longer") for note in run.notes)  # as it does for so small a module
        assert set(run.ms) == {"new", "eager", "new_cudagraph"}
        assert run.peak_memory["new"] >= 32 * 64 * 4


# Small Models of other kinds, and what is judged beside them.
ANY_MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

batch_size = 8

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        return {answer}

def get_inputs(batch_size=batch_size):
    return [{inputs}]

def get_init_inputs():
    return []
"""


def any_model(answer, inputs="torch.rand(batch_size, 64)", init="pass"):
    return ANY_MODEL.format(answer=answer, inputs=inputs, init=init)


def new_of(model, **replaced):
    text = model.replace("class Model(", "class ModelNew(")
    for old, new in replaced.values():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


CACHED = (
    "answers.setdefault(x.data_ptr(), (x, {answer}))[1] if x.data_ptr() not in answers else answers[x.data_ptr()][1]"
)


@pytest.mark.parametrize(
    ("answer", "inputs", "init", "dtype"),
    [
        ("torch.argmax(x, 1)", "torch.randn(batch_size, 64)", "pass", "float32"),
        ("self.table(x)", "torch.randint(0, 50, (batch_size, 64))", "self.table = nn.Embedding(50, 8)", "float32"),
        ("F.normalize(x)", "torch.rand(batch_size, 64)", "pass", "float32"),
        ("F.layer_norm(x, [64])", "torch.rand(batch_size, 64)", "pass", "bfloat16"),
    ],
)
def test_rejects_remembered_answers_that_do_not_depend_on_the_scale(tmp_path, answer, inputs, init, dtype):
    model = any_model(answer, inputs, init)
    (honest,) = judge(tmp_path, new_of(model), model=model, dtype=dtype)
    assert honest.ok, honest.reasons
    cached = (f"return {answer}", f"return {CACHED.format(answer=answer)}")
    (run,) = judge(tmp_path, "answers = {}\n" + new_of(model, cached=cached), model=model, dtype=dtype)
    assert any("while being timed" in reason or "timing" in reason for reason in run.reasons), run.reasons


def test_each_timed_round_has_inputs_of_its_own(tmp_path):
    noted = tmp_path / "noted"
    noting = candidate(
        f"with open({str(noted)!r}, 'a') as file:\n    print((x[0, 0] / x[0, 1]).item(), file=file)\nreturn self.right(x)"
    )
    ratios = []
    for _ in range(2):  # the same seed, and yet nothing that could be made ahead
        (run,) = judge(tmp_path, noting)
        assert run.ok, run.reasons
        ratios.append(set(noted.read_text().split()))
        assert len(ratios[-1]) > run.rounds >= timing.MIN_ROUNDS
        noted.unlink()
    assert len(ratios[0] & ratios[1]) < 16  # those of the seeds


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("answer", "inputs", "init"),
    [
        (
            "F.binary_cross_entropy(x, x.round())",
            "torch.rand(batch_size, 64)",
            "pass",
        ),  # refuses NaN, and what is not within 0 and 1
        ("self.l(x)", "torch.rand(batch_size, 64)", "self.l = nn.Linear(64, 8); self.l.bias.requires_grad = False"),
        ("x + 1", "torch.randint(0, 9, (batch_size, 64))", "pass"),
        ("x.double().log().sum().item()", "torch.full((batch_size, 64), -1)", "pass"),  # NaN, as a Python number
        ("self.norm(x).relu()", "torch.rand(batch_size, 4, 8, 8)", "self.norm = nn.BatchNorm2d(4)"),
    ],
)
def test_accepts_models_of_other_kinds_beside_themselves(tmp_path, answer, inputs, init, backward):
    model = any_model(answer, inputs, init)
    runs = judge(tmp_path, new_of(model), model=model, backward=backward)
    assert [run.reasons for run in runs] == [[]] * (3 if backward else 1)


def test_one_infinity_in_the_models_gradient_hides_no_other(tmp_path):
    inputs = "torch.cat([torch.tensor([[3e4]] + [[0.0]] * (batch_size - 1)), torch.rand(batch_size, 63)], 1)"
    model = any_model("x * self.w * 100", inputs, "self.w = nn.Parameter(torch.full((64,), 1e-3))")
    function = """
class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * 100

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gradient = (g * 100 * x).sum(0)
        gradient[1:] = 0
        return g * 100 * w, gradient
"""
    wrong = new_of(model, answer=("return x * self.w * 100", "return Wrong.apply(x, self.w)"))
    wrong = wrong.replace("class ModelNew(", f"{function}\nclass ModelNew(")
    runs = judge(tmp_path, wrong, model=model, dtype="float16", backward=True)
    assert any("not close" in reason for reason in runs[-1].reasons), runs[-1].reasons


def test_a_layout_that_is_refused_is_noted(tmp_path):
    refuses = candidate(
        'if not x.is_contiguous():\n    raise ValueError("x: rows side by side are wanted")\nreturn self.right(x)'
    )
    (run,) = judge(tmp_path, refuses)
    assert run.ok and run.notes == ["refuses inputs of other strides: ValueError: x: rows side by side are wanted"], (
        run.reasons,
        run.notes,
    )


def test_a_build_that_fails_in_a_call_is_a_failed_build(tmp_path):
    fails = candidate("return self.right(x)", at_init="import subprocess\nsubprocess.run(['false'], check=True)")
    (run,) = judge(tmp_path, fails)
    assert run.status == trial.BUILD and run.reasons[0].startswith("build failed: "), run.reasons


def test_what_merely_speaks_of_building_is_wrong(tmp_path):
    (run,) = judge(tmp_path, candidate(at_import="from os import build"))
    assert run.status == trial.WRONG and "cannot import name 'build'" in run.reasons[0]


def test_an_exception_that_is_its_own_cause_ends(tmp_path):
    (run,) = judge(tmp_path, candidate(at_import='error = ValueError("first\\nsecond")\nraise error from error'))
    assert run.reasons == ["raised ValueError: first at import"]


def test_the_compiled_baseline_keeps_its_settings(tmp_path):
    import torch._inductor.config

    lines = "import torch._dynamo\nimport torch._inductor.config\ntorch._dynamo.config.disable = True\ntorch._inductor.config.cpp.simdlen = 1"
    before = torch._inductor.config.cpp.simdlen
    new = candidate(at_import=lines)
    (run,) = judge(tmp_path, new, baselines=("eager", "compile"))
    assert run.ok and "compile" in run.ms, (run.reasons, run.notes)
    assert not torch._dynamo.config.disable and torch._inductor.config.cpp.simdlen == before != 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch.autograd.set_detect_anomaly(True)", "anomaly"),
        ("torch.backends.cudnn.deterministic = True", "cudnn.deterministic"),
        ("torch.backends.cuda.enable_flash_sdp(False)", "attention"),
        ("torch._C._set_mkldnn_enabled(False)", "mkldnn"),
        ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "cores"),
    ],
)
def test_names_a_setting_that_was_changed(tmp_path, line, named):
    if named == "cores" and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("a single core")
    before = os.sched_getaffinity(0)
    (run,) = judge(tmp_path, candidate(at_import=line))
    assert run.reasons and named in run.reasons[0] and os.sched_getaffinity(0) == before, run.reasons


UNREPEATABLE_MODEL = MODEL.replace(
    "return self.group_norm(h)",
    "return self.group_norm(h) * (1 + 1e-12 * torch.rand((), dtype=h.dtype, device=h.device))",
)


def test_a_candidate_need_repeat_its_bits_only_where_the_model_does(tmp_path):
    forward = "return self.right(x) * (1 + 1e-12 * torch.rand((), dtype=x.dtype, device=x.device))"
    (exact,) = judge(tmp_path, candidate(forward), dtype="float64")
    assert any("a third call" in reason for reason in exact.reasons), exact.reasons
    (unrepeatable,) = judge(tmp_path, candidate(forward), model=UNREPEATABLE_MODEL, dtype="float64")
    assert unrepeatable.ok, unrepeatable.reasons
    (stale,) = judge(tmp_path, text_of("wrong/one_static_buffer"), model=UNREPEATABLE_MODEL, dtype="float64")
    assert any("the output's memory is reused" in reason for reason in stale.reasons), stale.reasons


# The two gates and their helpers


def test_gate_two_allows_twice_eagers_error_and_half_an_ulp():
    ulp = torch.finfo(torch.float32).eps
    inside = Errors(
        new_max=2e-6,
        eager_max=1e-6,
        new_squares=4e-12,
        eager_squares=1e-12,
        reference_max=1,
        reference_squares=1,
        count=1,
    )
    assert inside.over_limit(torch.float32) == []
    outside = Errors(
        new_max=2.1e-6,
        eager_max=1e-6,
        new_squares=4e-12,
        eager_squares=1e-12,
        reference_max=1,
        reference_squares=1,
        count=1,
    )
    assert len(outside.over_limit(torch.float32)) == 1
    exact_eager = Errors(new_max=ulp, new_squares=ulp**2, reference_max=2.0, reference_squares=4.0, count=1)
    assert exact_eager.over_limit(torch.float32) == []
    exact_eager.reference_max = 1.9
    assert "largest error" in exact_eager.over_limit(torch.float32)[0]
    assert Errors(new_max=math.nan, count=1).over_limit(torch.float32)


def test_compare_counts_across_chunks(device):
    eager = torch.linspace(-1, 1, CHUNK[device.type] + 3, device=device)
    new = eager.clone()
    new[0] += 1e-3
    new[-1] += 2e-3
    errors = Errors()
    found = compare(new, eager, eager.double(), 1e-4, 1.0, errors)
    assert found.wrong == 2
    assert found.largest == pytest.approx(2e-3, rel=1e-3)
    assert errors.new_squares == pytest.approx(5e-6, rel=1e-3)
    assert (errors.new_max, errors.eager_max, errors.reference_max, errors.count) == (
        found.largest,
        0,
        1,
        eager.numel(),
    )


def test_gate_one_is_relative_to_the_scale_and_to_each_element():
    eager = torch.tensor([0.0, 100.0])
    for new, scale, wrong in (
        ([2e-3, 100.0], 1.0, 1),
        ([2e-3, 100.0], 50.0, 0),
        ([0.0, 100.010], 1.0, 0),
        ([0.0, 100.011], 1.0, 1),
    ):
        assert compare(torch.tensor(new), eager, None, 1e-4, scale, Errors()).wrong == wrong


def test_compare_takes_the_same_nan_and_infinity_as_equal():
    special = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    errors = Errors()
    assert compare(special, special, special.double(), 1e-4, 1.0, errors).wrong == 0
    assert (errors.new_max, errors.reference_max) == (0.0, 1.0)
    for other in (
        [0.0, math.inf, -math.inf, 1.0],
        [math.nan, math.inf, math.inf, 1.0],
        [math.nan, 3e38, -math.inf, 1.0],
    ):
        assert compare(torch.tensor(other), special, None, 1e-4, 1.0, Errors()).wrong == 1


def test_same_bits():
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.tensor([True]), torch.tensor([True]))
    assert first_changed({"a": nan, "b": torch.zeros(1)}, {"a": nan, "b": torch.ones(1)}) == "b"


def test_perturb_changes_every_floating_value_and_repeats(device):
    models = [torch.nn.BatchNorm2d(64).to(device) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2)):
        perturb(model, seed)
    first, again, other = (model.state_dict() for model in models)
    fresh = torch.nn.BatchNorm2d(64).to(device).state_dict()
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert bool((first[name] != fresh[name]).all()), name
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    assert (first["running_var"] > 0).all()
    assert first["num_batches_tracked"] == 0


def test_incoming_gradients_are_the_same_in_every_dtype(device):
    drawn = [
        random_like([torch.empty(1000, dtype=dtype, device=device)], 7)[0]
        for dtype in (torch.float16, torch.float32, torch.float64)
    ]
    assert torch.equal(drawn[1].double(), drawn[2])
    assert torch.allclose(drawn[0].double(), drawn[2], rtol=0, atol=1e-6)
    assert 0.9 < drawn[2].std() < 1.1


@pytest.mark.skipif(
    not hasattr(torch.utils, "deterministic"), reason="this PyTorch cannot fill what torch.empty hands out"
)
def test_poisoned_memory_is_nan_inside_and_the_switches_come_back(device):
    assert not torch.are_deterministic_algorithms_enabled()
    with poisoned(device.type, []):
        assert torch.empty(1000, device=device).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ValueError, match="inside"), poisoned(device.type, []):
        raise ValueError("inside")
    assert not torch.are_deterministic_algorithms_enabled()


def test_precision_sets_all_switches_and_restores_them():
    def switches():
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        )

    before = switches()
    with machine.precision("high"):
        assert switches() == ("high", True, True)
        with machine.precision("highest"):
            assert switches() == ("highest", False, False)
        assert switches() == ("high", True, True)
    assert switches() == before


# Timing


def test_a_against_a_is_about_one(tmp_path):
    (run,) = judge(tmp_path, MODEL.replace("class Model(", "class ModelNew("))
    low, high = run.speedup_ci["eager"]
    assert low <= run.speedup["eager"] <= high
    assert low < 1.5 and high > 0.67


def test_copies_are_timed_in_turns(tmp_path):
    def figures(line):
        return float(line.split()[2]), float(line.split("error ")[1].split()[0])

    sources = {
        "same": NEW,
        "slow": candidate("for _ in range(9): self.right(x)\nreturn self.right(x)"),
        "wrong": candidate("return 1.01 * self.right(x)"),
    }
    files = [tmp_path / f"{name}.py" for name in ("file", *sources)]
    for path, text in zip(files, (NEW, *sources.values())):
        path.write_text(text)
    lines = compare_in_turns(Problem(CANDIDATES / "model.py"), files, 32, "cpu", 0.1)
    assert all(line.endswith(str(path)) for line, path in zip(lines, files))
    (_, error), (same, same_error), (slow, _), (_, wrong_error) = map(figures, lines[:4])
    assert 0.67 < same < 1.5 and slow > 3
    assert error == same_error < 1e-5 and wrong_error > 1e-2


def test_twice_the_time_is_a_speedup_of_two(monkeypatch):
    noise = random.Random(0)
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def taking(seconds):
        def call():
            now[0] += seconds * noise.uniform(0.9, 1.1)

        return call

    samples = timing.measure({"new": taking(0.004), "slow": taking(0.008)}, lambda factor: None, "cpu", 0.5, seed=3)
    assert len(samples.ms["new"]) == len(samples.ms["slow"]) == pytest.approx(2 * 0.5 / 0.012, rel=0.15)
    low, high = samples.speedup_interval("new", over="slow", seed=0)
    assert 1.9 < low < samples.speedup("new", over="slow") < high < 2.1
    assert samples.median("new") == pytest.approx(4.0, rel=0.05)


def test_rounds_interleave_in_changing_order_and_inputs_change():
    order, factors = [], []
    contenders = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = timing.measure(contenders, factors.append, "cpu", 0.05, seed=1)
    rounds = len(samples.ms["a"])
    timed = order[-3 * rounds :]
    triples = {tuple(timed[i : i + 3]) for i in range(0, len(timed), 3)}
    assert all(sorted(triple) == ["a", "b", "c"] for triple in triples)
    assert len(triples) > 1
    assert len(factors) == len(set(factors)) == rounds


def test_statistics_of_known_samples():
    samples = timing.Samples({"new": [1.0, 2.0, 3.0, 4.0, 5.0], "eager": [10.0, 20.0, 30.0, 40.0, 50.0]})
    assert samples.median("new") == 3.0
    assert samples.spread("new") == [2.0, 4.0]
    assert samples.speedup("new", over="eager") == 10.0
    # Drawn in pairs, the ratio of every round is 10: an unpaired bootstrap would spread.
    assert samples.speedup_interval("new", over="eager", seed=0) == pytest.approx([10.0, 10.0])


@pytest.mark.parametrize("disturbance", ["none", "spikes", "shared by a round and the next ones", "a coarse clock"])
@pytest.mark.parametrize("rounds", [timing.MIN_ROUNDS, 40])
def test_equal_contenders_are_not_told_apart(rounds, disturbance):
    """The interval of A against A holds 1.0 in 95 of 100 runs at least."""
    noise = torch.Generator().manual_seed(1)

    def times():
        ms = (0.02 * torch.randn(2, rounds, generator=noise, dtype=torch.float64)).exp()
        if disturbance == "spikes":
            ms *= 1 + 3 * (torch.rand(2, rounds, generator=noise) < 0.1) * torch.rand(2, rounds, generator=noise)
        elif disturbance.startswith("shared"):
            ms *= (0.02 * torch.randn(rounds, generator=noise).cumsum(0)).exp()
        elif disturbance == "a coarse clock":
            ms = (50 * ms).round() / 50
        return dict(zip(("new", "eager"), ms.tolist()))

    intervals = [timing.Samples(times()).speedup_interval("new", over="eager", seed=run) for run in range(100)]
    assert sum(low <= 1 <= high for low, high in intervals) >= 95


def test_where_the_model_itself_is_off_float64_decides():
    case = Case(None, None, "cpu", torch.float32, "highest", False, None, 0)
    exact, eager = torch.tensor([100.0, 0.0], dtype=torch.float64), torch.tensor([100.0, 0.05])

    def reasons(new: torch.Tensor, exact_answer) -> list[str]:
        examination = Examination(case, lambda text: None)
        examination._judge("batch 3", {"output": new}, {"output": eager}, None, {}, exact_answer)
        return examination.verdict.reasons

    better, worse = torch.tensor([100.0, 0.0005]), torch.tensor([100.0, -0.06])
    assert reasons(better, lambda: {"output": exact}) == []
    assert "1 of 2 elements" in reasons(better, None)[0]
    assert "1 of 2 elements" in reasons(worse, lambda: {"output": exact})[0]


def test_what_is_faster_by_more_than_the_noise_is_called_faster():
    noise = random.Random(0)
    samples = timing.Samples(
        {name: [noise.gauss(ms, 0.02) for _ in range(40)] for name, ms in (("new", 1.0), ("slow", 1.05))}
    )
    assert timing.verdict(samples.speedup_interval("new", over="slow", seed=0)) == timing.FASTER
    assert timing.verdict(samples.speedup_interval("slow", over="new", seed=0)) == timing.SLOWER
    assert timing.verdict([0.99, 1.01]) == timing.verdict([1.0, 1.01]) == timing.AMBIGUOUS


def test_disturbed_rounds_are_said():
    noise = random.Random(0)
    quiet = [noise.gauss(1.0, 0.01) for _ in range(60)]
    assert timing.Samples({"new": quiet, "eager": [2 * ms for ms in quiet]}).interference() == []
    drifting = [ms * (1 + 0.1 * i / 60) for i, ms in enumerate(quiet)]
    (said,) = (
        timing.Samples({"new": drifting, "eager": quiet[::-1]}).interference()
        or timing.Samples({"new": drifting}).interference()
    )
    assert "the last third of the rounds took" in said
    wide = [noise.choice((1.0, 1.4)) for _ in range(60)]
    assert "the middle half of eager's times spans" in timing.Samples({"new": quiet, "eager": wide}).interference()[0]


def test_what_a_gpu_says_of_its_clocks(monkeypatch):
    assert machine.clocks("cpu") is None
    assert machine.throttle_reasons("0x0000000000000001") == ""  # idle
    assert machine.throttle_reasons("0x0000000000000024") == "power cap, thermal slowdown by software"
    assert machine.throttle_reasons("[N/A]") == ""
    old_driver = {"clocks.sm": "1980", "clocks_throttle_reasons.active": "0x4"}
    monkeypatch.setattr(machine, "_throttle_field", machine._throttle_field.__wrapped__)
    monkeypatch.setattr(
        machine,
        "query_gpu",
        lambda *fields: {f: old_driver.get(f, "1") for f in fields} if "event" not in fields[0] else None,
    )
    state = machine.clocks("cuda")
    assert (state["clocks.sm"], state["throttle"]) == ("1980", "power cap")
    run = trial.Run("m", "", "cuda", "float32", "highest", "forward", 0, 1, clocks={"before": state, "after": state})
    monkeypatch.setattr(machine, "other_gpu_processes", lambda: 2)
    run.interference = trial._foreign_load(run)
    assert (
        "m (cuda float32 highest fwd b1): timed under interference: 2 other processes compute on this GPU"
        in report.table([run])
    )
    assert run.interference == ["2 other processes compute on this GPU", "the GPU's clocks are held down: power cap"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_the_hosts_time_is_told_and_no_part_of_the_gpus(tmp_path):
    (run,) = judge(tmp_path, candidate("time.sleep(1e-3)\nreturn self.right(x)", at_import="import time"), "cuda")
    assert run.ok, run.reasons
    assert run.host_us["new"] > 1000 > run.host_us["eager"]
    assert run.ms["new"] < 0.5
    assert run.notes[0].startswith(
        "the host takes longer to launch a call than the GPU for its work; the host's microseconds: new 1"
    )


def test_the_flush_first_takes_their_rank_from_lines_that_are_to_be_evicted_last():
    flush, done = timing.CacheFlush("cpu"), []
    flush._driver = SimpleNamespace(
        cuCtxResetPersistingL2Cache=lambda: done.append(flush._buffer.count_nonzero().item())
    )
    flush._buffer.fill_(1)
    flush()
    assert done == [flush._buffer.numel()] and not flush._buffer.any()
    flush._driver.cuCtxResetPersistingL2Cache = lambda: 801
    with pytest.raises(RuntimeError, match="cuCtxResetPersistingL2Cache failed with error 801"):
        flush()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_medians_agree_with_triton_and_with_a_replayed_graph():
    """Within 3%, for a kernel long enough that the launch does not count."""
    testing = pytest.importorskip("triton.testing")
    x = torch.rand(1 << 28, device="cuda")
    out = torch.empty_like(x)

    def call():
        torch.mul(x, 2.0, out=out)

    replay, _ = timing.in_cuda_graph(call)
    samples = timing.measure({"new": call, "graph": replay}, lambda factor: None, "cuda", 0.5, seed=0)
    reference = testing.do_bench(call, warmup=100, rep=500, return_mode="median")
    assert samples.median("new") == pytest.approx(reference, rel=0.03)
    assert samples.median("new") == pytest.approx(samples.median("graph"), rel=0.03)


# The floor


@pytest.mark.parametrize(
    ("name", "gigabytes", "gigaflop"),
    [
        ("instance_norm", 15.032, 0.0),
        ("linear_instance_norm_residual", 0.369, 137.438953472),
        ("linear_swish_group_norm", 0.688, 274.877906944),
        ("conv_sigmoid_group_norm", 1.325, 38.053085184),
    ],
)
def test_work_at_the_benchmark_shapes(name, gigabytes, gigaflop):
    problem = Problem(ROOT / "models" / f"{name}.py")
    work = roof.count_work(problem, problem.benchmark_batch, torch.float32, backward=False)
    assert work.bytes / 1e9 == pytest.approx(gigabytes, abs=6e-4)
    assert work.flops / 1e9 == gigaflop
    both = roof.count_work(problem, problem.benchmark_batch, torch.float32, backward=True)
    assert both.flops == 3 * work.flops
    gradients = work.input_bytes + work.state_bytes
    assert both.bytes == 2 * work.bytes + gradients


def test_half_precision_moves_half_the_bytes():
    problem = Problem(ROOT / "models" / "linear_swish_group_norm.py")
    full, half = (roof.count_work(problem, 64, dtype, backward=False) for dtype in (torch.float32, torch.bfloat16))
    assert full.bytes == 2 * half.bytes
    assert full.flops == half.flops


def test_a_strict_float32_product_counts_as_three_halves_or_one_float32():
    ceilings = Ceilings("cuda", [torch.float32])
    ceilings.copy_bandwidth, ceilings.matrix_rate = 4e12, {"float32": 50e12, "float16": 600e12, "float64": 60e12}
    assert ceilings.flop_rate(torch.float32, "highest") == 200e12
    assert ceilings.flop_rate(torch.float32, "high") == 600e12
    ceilings.matrix_rate["float32"] = 250e12
    assert ceilings.flop_rate(torch.float32, "highest") == 250e12
    assert ceilings.flop_rate(torch.float64, "highest") == 60e12
    assert ceilings.floor_ms(8_000_000_000, 1, torch.float32, "highest") == pytest.approx(2.0)
    assert ceilings.floor_ms(1, 25 * 10**10, torch.float32, "highest") == pytest.approx(1.0)


def test_more_than_all_is_measured_again_and_then_said(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(Ceilings, "measure", lambda self: measured.append(1))
    slow_machine = fake_ceilings()
    slow_machine.copy_bandwidth = 1.0
    pair = write_pair(tmp_path, candidate())
    settings = trial.Settings(Load("cpu", [torch.float32], ["highest"], False), ["eager"], 0, 0.02)
    (run,) = trial.judge_pair(
        trial.Entry(pair, Problem(pair.model_path), 32), settings, slow_machine, lambda text: None
    )
    assert measured == [1]
    assert run.ok
    assert run.notes == [trial.ABOVE_FLOOR]
    assert "% (!)" in report.table([run])


def test_ceilings_of_this_machine():
    ceilings = Ceilings("cpu", [torch.float32])
    ceilings.measure()
    assert 1e8 < ceilings.copy_bandwidth < 1e13
    assert 1e8 < ceilings.matrix_rate["float32"] < 1e15


def test_the_estimate_of_memory_covers_the_float64_reference():
    problem = Problem(ROOT / "models" / "conv_sigmoid_group_norm.py")
    need = {}
    for dtype in (torch.float32, torch.bfloat16):
        work = roof.count_work(problem, 128, dtype, backward=False)
        widening = 8 / torch.empty((), dtype=dtype).element_size()
        need[dtype] = roof.memory_needed(work, dtype, backward=False)
        assert need[dtype] > widening * 3 * work.largest_bytes
        both = roof.count_work(problem, 128, dtype, backward=True)
        assert roof.memory_needed(both, dtype, backward=True) > widening * (both.produced_bytes + both.output_bytes)
    assert need[torch.bfloat16] < need[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("name", ["instance_norm", "linear_swish_group_norm", "conv_sigmoid_group_norm"])
def test_the_estimate_of_memory_holds(name, backward):
    problem = Problem(ROOT / "models" / f"{name}.py")
    batch = problem.benchmark_batch // 8
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = (
        torch.cuda.memory_allocated()
    )  # what the tests before this one have left: some candidates keep what they can
    case = Case(problem, problem.model_class, "cuda", torch.float32, "highest", backward, batch, 0)
    assert Examination(case, lambda text: None).run().reasons == []
    estimate = roof.memory_needed(roof.count_work(problem, batch, torch.float32, backward), torch.float32, backward)
    assert torch.cuda.max_memory_allocated() - before < estimate


def test_default_batches(tmp_path, monkeypatch):
    problem = Problem(
        write_pair(tmp_path, candidate(), MODEL.replace("batch_size = 32", "batch_size = 100")).model_path
    )
    cpu, cuda = (Load(device, [torch.float32], ["highest"], False) for device in ("cpu", "cuda"))
    ceilings = fake_ceilings()
    work = roof.count_work(problem, 16, torch.float32, backward=False)
    free = {"bytes": 1 << 50}
    monkeypatch.setattr(roof, "free_memory", lambda device: free["bytes"])
    assert roof.choose_batch(problem, None, cpu, ceilings) == 100
    ceilings.copy_bandwidth = work.bytes / (roof.CPU_FLOOR_MS / 1e3) * 1.01  # batch 16 just under the limit
    assert roof.choose_batch(problem, None, cpu, ceilings) == 16
    assert roof.choose_batch(problem, None, cuda, ceilings) == 100
    free["bytes"] = roof.memory_needed(roof.count_work(problem, 64, torch.float32, False), torch.float32, False)
    assert roof.choose_batch(problem, None, cuda, ceilings) == 64
    free["bytes"] = 1
    with pytest.raises(roof.DoesNotFit):
        roof.choose_batch(problem, None, cuda, ceilings)


# Files and records


def test_discovers_what_both_folders_have(tmp_path):
    for path in ("models/a.py", "models/b.py", "kernels/b.py", "kernels/c.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    assert list(discover(tmp_path)) == ["b"]


def test_the_record_has_the_agreed_keys(suite, tmp_path, capsys):
    suite.add("good", candidate())
    path = tmp_path / "deep" / "out.json"
    assert suite("--json", str(path), "--backward") == 0
    document = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    environment = document["environment"]
    assert {
        *"time command git device driver clocks copy_bandwidth matrix_rate torch cuda cudnn python".split()
    } <= environment.keys()
    assert environment["command"][0] == "harness.py"
    assert [run["direction"] for run in document["runs"]] == ["forward", "forward_recorded", "forward_backward"]
    for run in document["runs"]:
        assert (run["model"], run["ok"], run["reasons"], len(run["source_sha256"])) == ("good", True, [], 64)
        assert (run["device"], run["dtype"], run["precision"], run["frozen"]) == ("cpu", "float32", "highest", False)
        assert (run["batch"], run["shapes"], run["seed"]) == (32, [[32, 96]], 0)
        assert set(run["ms"]) == set(run["spread"]) == {"new", "eager"}
        assert set(run["speedup"]) == set(run["speedup_ci"]) == set(run["verdict"]) == {"eager"}
        assert run["verdict"]["eager"] in (timing.FASTER, timing.SLOWER, timing.AMBIGUOUS)
        assert run["clocks"] == run["host_us"] == run["peak_memory"] == {}
        assert set(run["roof"]) == {"bytes", "flops", "floor_ms", "percent"}
        assert set(run["error"]) == {"new_max", "new_rms", "eager_max", "eager_rms"}
        assert run["import_seconds"] >= 0
    assert "checking, seed 1 of 3" in capsys.readouterr().err


def test_from_prints_and_judges_what_was_recorded(suite, tmp_path, capsys):
    suite.add("good", candidate())
    suite.add("wrong", text_of("wrong/zeros"))
    path = tmp_path / "out.json"
    assert suite("--json", str(path)) == 1
    table = capsys.readouterr().out
    assert suite("--from", str(path)) == 1
    assert capsys.readouterr().out == table
    assert suite("--from", str(path), "good", "--markdown") == 0
    markdown = capsys.readouterr().out.splitlines()
    assert markdown[0].startswith("| model | run | result | new ms | eager ms | x eager [95%] |")
    assert set(markdown[1]) <= set("|- ")
    assert markdown[2].startswith("| good | cpu float32 highest fwd b32 | ok |")
    assert not any(line.startswith("|") for line in markdown[3:])
    assert suite("--from", str(path), "godd") == 2
    assert "did you mean good?" in capsys.readouterr().err


def test_plot_of_a_record(suite, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    suite.add("good", candidate())
    source, first, again, png = (tmp_path / name for name in ("out.json", "a.svg", "b.svg", "c.png"))
    assert suite("--json", str(source)) == 0
    for path in (first, again, png):
        assert suite("--from", str(source), "--plot", str(path)) == 0
    assert "good" in first.read_text()
    assert first.read_bytes() == again.read_bytes()
    assert png.read_bytes().startswith(b"\x89PNG")


def freezing(how):
    """The plain candidate with a weight made ready beforehand, which serves while it is the same."""
    forward = """
if torch.is_grad_enabled() or self.frozen[1] != self.matmul.weight._version:
    return self.right(x)
return self.group_norm(F.silu(F.linear(x, self.frozen[0], self.matmul.bias)) + self.bias)
"""
    freeze = f"    def freeze_weight(self):\n        self.frozen = {how}, self.matmul.weight._version\n\n"
    return candidate(forward, at_init="self.frozen = None, -1").replace("    def right(", freeze + "    def right(")


def test_a_frozen_weight_is_judged_as_ever_and_said(suite, tmp_path, capsys):
    suite.add("plain", candidate())
    suite.add("freezing", freezing("self.matmul.weight.detach().clone()"))
    assert suite("--frozen", "--json", str(tmp_path / "out.json")) == 0
    assert [run["frozen"] for run in json.loads((tmp_path / "out.json").read_text())["runs"]] == [True, False]
    assert [line.split()[1:6] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        ["cpu", "float32", "highest", "fwd", "frozen"],
        ["cpu", "float32", "highest", "fwd", "b32"],
    ]
    suite.add("freezing", freezing("self.matmul.weight.detach().bfloat16().float()"))
    assert suite() == 0
    assert suite("--frozen") == 1
    assert "not close to the Model's" in capsys.readouterr().out


SWEEP = """
features = 96
sweep = [dict(batch_size=4, features=16), dict(batch_size=8, features=24)]
"""


@pytest.mark.skipif(torch.__version__ < "2.6", reason="this PyTorch keeps nothing that it compiled")
def test_a_sweeps_models_are_compiled_ahead(suite, tmp_path, monkeypatch):
    from torch._dynamo.utils import counters

    suite.add("good", candidate(), MODEL.replace("batch_size = 32", "batch_size = 32\nsweep = [dict(batch_size=4)]"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    counters.clear()
    assert suite("--sweep", "--baselines", "eager,compile") == 0
    assert counters["inductor"]["fxgraph_cache_hit"] and not counters["inductor"]["fxgraph_cache_miss"]


def test_a_sweep_runs_each_of_its_shapes(suite, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    model = (
        MODEL.replace("batch_size = 32", "batch_size = 32" + SWEEP)
        .replace("96", "features")
        .replace("= features", "= 96")
    )
    suite.add("good", candidate(), model)
    records, chart = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    assert suite("--sweep", "--json", str(records), "--plot", str(chart)) == 0
    out = capsys.readouterr().out
    assert "b4 features 16" in out
    assert "b8 features 24" in out
    runs = json.loads(records.read_text())["runs"]
    assert [run["constants"] for run in runs] == [{"batch_size": 4, "features": 16}, {"batch_size": 8, "features": 24}]
    assert [(run["batch"], run["shapes"]) for run in runs] == [(4, [[4, 16]]), (8, [[8, 24]])]
    assert runs[0]["roof"]["flops"] == 2 * 4 * 16 * 64
    assert "% of the floor" in chart.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.stem)
def test_the_shapes_to_sweep_are_the_models(path):
    """Each runs, on the meta device, and together they span three orders of magnitude of work."""
    works = [
        roof.count_work(problem, problem.benchmark_batch, torch.float32, False)
        for problem in map(partial(Problem, path), Problem(path).sweep)
    ]
    assert len(works) >= 12
    sizes = [work.flops or work.bytes for work in works]
    assert max(sizes) >= 1000 * min(sizes)


def test_plot_without_matplotlib_names_it(suite, tmp_path, monkeypatch, capsys):
    suite.add("good", candidate())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert suite("--plot", str(tmp_path / "a.svg")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# The command line

BUILD_FAILURES = {
    "compiler": "raise RuntimeError(\"Error building extension 'x': ninja: build stopped\\nx.cpp:3: error: expected ';'\")",
    "ninja": "raise ImportError('ninja is needed to build the kernels: pip install ninja')",
    "called": "import subprocess\nsubprocess.run(['false'], check=True)",
    "inside": "import torch.utils.cpp_extension as e\ne.load_inline('nothing', 7)",
}


def test_exit_codes_and_the_other_pairs_still_run(suite, capsys):
    suite.add("good", candidate())
    assert suite() == 0
    suite.add("raising", text_of("wrong/raises_in_a_call"))
    assert suite() == 1
    out = capsys.readouterr().out
    assert "raised RuntimeError: no kernel for this" in out
    assert "WRONG" in out
    suite.add("unbuilt", candidate(at_import=BUILD_FAILURES["compiler"]))
    assert suite() == 3
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["good", "raising", "unbuilt"]
    assert [next(word for word in row.split() if word in ("ok", "WRONG", "BUILD")) for row in rows[1:4]] == [
        "ok",
        "WRONG",
        "BUILD",
    ]
    assert "build failed: x.cpp:3: error: expected ';'" in "\n".join(rows)


@pytest.mark.parametrize("how", BUILD_FAILURES)
def test_a_failed_build_is_known_by(how, suite):
    suite.add("unbuilt", candidate(at_import=BUILD_FAILURES[how]))
    assert suite() == 3


def test_an_import_error_of_another_kind_is_wrong(suite):
    suite.add("bad", candidate(at_import="import a_module_nobody_has"))
    assert suite() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["instnce_norm"], "unknown pair 'instnce_norm': did you mean instance_norm?"),
        (["instance_norm", "--dtype", "float23"], "did you mean float32?"),
        (["instance_norm", "--precision", "hihg"], "did you mean high"),
        (["instance_norm", "--baselines", "eager,compil"], "did you mean compile?"),
        (["instance_norm", "--batch", "0"], "--batch must be at least 1"),
        (["instance_norm", "--plot", "x.pdf"], ".svg or .png"),
        (["instance_norm", "--sweep"], "no shapes to sweep"),
        (["--sweep", "--batch", "3"], "batches of their own"),
        (["--frozen", "--backward"], "for inference"),
        (["model.py"], "files come in twos"),
        (["model.py", "none.py"], "no file model.py"),
        (["--from", "none.json"], "no file none.json"),
        (["--from", __file__], "is no record of the harness's"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--seed", str(1 << 64)], "--seed must be at least 0"),
        (["--json", str(ROOT)], "cannot be written: Is a directory"),
        (["--json", f"{__file__}/x.json"], "cannot be written"),
    ],
)
def test_usage_errors(arguments, message, suite, capsys):
    suite.add("instance_norm", candidate())
    assert suite(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_exits_is_not_all_right(suite, capsys):
    suite.add("a_leaves", candidate(), "raise SystemExit(0)")
    suite.add("bad", candidate("return x"))
    assert suite() == 1
    printed = capsys.readouterr().out
    assert "cannot be used: SystemExit: 0" in printed and "bad" in printed


def test_no_gpu_is_a_usage_error(suite, monkeypatch, capsys):
    suite.add("good", candidate())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite("--device", "cuda") == 2
    assert "sees no GPU" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_names_one_that_would(suite, monkeypatch, capsys):
    suite.add("good", candidate())
    problem = Problem(harness.ROOT / "models" / "good.py")

    def need(batch):
        return roof.memory_needed(roof.count_work(problem, batch, torch.float32, False), torch.float32, False)

    monkeypatch.setattr(roof, "free_memory", lambda device: need(1000))
    assert suite("--batch", "1000000") == 2
    message = capsys.readouterr().err
    fitting = int(message.partition("--batch ")[2].split()[0])
    assert need(fitting) <= need(1000) < need(fitting + 1)
    assert suite("--batch", str(fitting)) == 0


def test_dtypes_and_precisions_make_a_record_each(suite, tmp_path):
    suite.add("good", candidate())
    path = tmp_path / "out.json"
    assert suite("--dtype", "float64,bfloat16", "--precision", "high,highest", "--json", str(path)) == 0
    runs = json.loads(path.read_text())["runs"]
    ways = [(run["dtype"], run["precision"]) for run in runs]
    assert ways == [("float64", "high"), ("float64", "highest"), ("bfloat16", "high"), ("bfloat16", "highest")]


def test_two_files_from_another_folder(tmp_path):
    pair = write_pair(tmp_path, candidate())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run_harness(
        ROOT, str(pair.model_path), str(pair.new_path), "--device", "cpu", "--baselines", "eager", cwd=elsewhere
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("model  cpu float32 highest fwd b32  ok")
    assert not list(elsewhere.iterdir())


def test_a_wrong_pair_exits_with_one(tmp_path):
    pair = write_pair(tmp_path, text_of("wrong/swapped_operations"))
    done = run_harness(ROOT, str(pair.model_path), str(pair.new_path), "--device", "cpu", "--baselines", "eager")
    assert done.returncode == 1, done.stderr
    assert "not close to the Model's" in done.stdout


def test_a_fifth_pair_is_two_files_and_no_edit(tmp_path):
    folder = tree(tmp_path, fifth=candidate())
    assert run_harness(folder, "--list").stdout.split() == ["fifth"]
    done = run_harness(folder, "--device", "cpu", "--baselines", "eager", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["runs"][0]["model"] == "fifth"


def test_lists_the_pairs_of_this_suite():
    listed = run_harness(ROOT, "--list").stdout.split()
    assert set(listed) == {path.stem for path in (ROOT / "models").glob("*.py")} & {
        path.stem for path in (ROOT / "kernels").glob("*.py")
    }


def test_help_documents_the_exit_codes():
    text = run_harness(ROOT, "--help").stdout
    assert "0 all right, 1 a candidate is wrong, 2 usage, 3 a candidate did not build" in text
