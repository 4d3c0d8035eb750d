"""What the harness prints: blocks of 100 columns, one line of progress, a table; nothing but text in a pipe."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
from cases import ROOT

import harness
from judge import show
from judge.bench import AMBIGUOUS, FASTER, SLOWER
from judge.record import DROP_IN, RIGHT, WRONG, Result, remarks

LONG = "hopper/linear_instance_norm_residual"


def result(model: str = LONG, status: str = DROP_IN, **more) -> Result:
    """A record as a run leaves it."""
    run = Result("forward_recorded", model, "", "cuda", "float32", "high", 0, {"features": 8192, "groups": 7})
    run.status, run.shapes = status, [[1024, 8192], [1024, 8192]]
    run.ms = {"new": 9.459, "eager": 12.3456789, "compile": 8.164}
    run.spread = {name: [0.9 * ms, 1.1 * ms] for name, ms in run.ms.items()}
    run.speedup, run.verdict = {"eager": 1.305, "compile": 1.04}, {"eager": FASTER, "compile": AMBIGUOUS}
    run.speedup_ci = {"eager": [1.28, 1.33], "compile": [0.95, 1.12]}
    run.roof = {"bytes": 369e6, "flops": 137e9, "floor_ms": 0.59, "percent": 6.2}
    run.error = {"new_max": 2.9e-6, "eager_max": 2.3e-5}
    return replace(run, **more)


def test_a_block_is_read_on_a_hundred_columns():
    gradients = {"x": {"new_max": 1e-6, "eager_max": 2e-6}, "weight": {"new_max": 3e-6, "eager_max": 5e-6}}
    run = result(
        gradient_error=gradients,
        reasons=["word " * 60],
        notes=["its CUDA " * 30],
        interference=["the middle half of new's times " * 5],
    )
    lines = "\n".join(show.block(run)).splitlines()
    assert max(map(len, lines)) <= show.COLUMNS
    head, *below = lines[lines.index(next(line for line in lines if "median ms" in line)) :]
    assert all(line[head.index(" ms") + 2] != " " for line in below[:5])  # where the numbers end
    text = " ".join(" ".join(lines).split())
    assert text.startswith(f"drop-in {LONG}: forward with gradients recorded, float32 with TF32 allowed, cuda")
    assert "input 1024 x 8192 and 1024 x 8192, groups 7" in text  # what the shapes do not say
    assert "eager 12.35 11.11 to 13.58 1.30x [1.28, 1.33] FASTER" in text
    assert "compile 8.164 7.348 to 8.98 1.04x [0.95, 1.12] AMBIGUOUS" in text
    assert "floor 0.59 ModelNew takes 16.03 times as long" in text
    assert "error 2.9e-06 largest absolute error, against the Model in float64; eager's is 2.3e-05" in text
    assert "gradients 3.0e-06 the same of the gradients: that of weight; eager's is 5.0e-06" in text
    wide = result(speedup_ci={"eager": [100.0, 199.0]}, speedup={"eager": 150.0}, verdict={"eager": AMBIGUOUS})
    assert max(map(len, show.block(wide))) == show.COLUMNS


def test_a_ratio_that_the_printed_times_contradict_is_explained():
    text = " ".join("\n".join(show.block(result())).split())
    assert "the rounds' ratios; the ratio of the medians is 0.86x compile" in text


def test_why_an_interval_beyond_one_decides_nothing():
    run = result(interference=["one sign", "the last third"], verdict={"eager": AMBIGUOUS, "compile": AMBIGUOUS})
    text = " ".join("\n".join(show.block(run)).split())
    assert text.count("AMBIGUOUS (disturbed)") == 1 and "disturbed: one sign; the last third" in text


def test_why_it_is_wrong_or_no_drop_in_stands_beside_the_verdict():
    text = "\n".join(show.block(result(status=RIGHT, no_dropin=["its strides are others"])))
    assert text.startswith("right  ") and "  no drop-in: its strides are others" in text
    wrong = result(status=WRONG, ms={}, speedup={}, verdict={}, roof={}, error={}, reasons=["output[3] is 1"])
    assert "\n".join(show.block(wrong)).splitlines()[-1] == "  wrong: output[3] is 1"


def test_what_the_block_above_says_is_not_said_again():
    run = result(status=RIGHT, no_dropin=["its strides are others"], notes=["one", "two"])
    text = "\n".join(show.block(replace(run, notes=["two", "three"]), run))
    assert (
        "no drop-in: for the same reasons" in text and "strides" not in text and "two" not in text and "three" in text
    )
    assert "strides" in "\n".join(show.block(run, result(status=RIGHT, no_dropin=["others"])))


def test_the_table_has_a_row_each_and_only_what_differs():
    runs = [result(), result("instance_norm", RIGHT, direction="forward"), result("other", WRONG, ms={}, speedup={})]
    head, *rows, _, legend = show.summary(runs)
    assert head.split() == ["verdict", "pair", "ModelNew", "x", "eager", "x", "compile"]
    begin = [" ".join(row.split()[:3]) for row in rows]
    assert begin == [f"drop-in {LONG} recorded", "right instance_norm forward", "wrong other recorded"]
    assert rows[0].split()[3:] == ["9.459", "ms", "1.30", ">", "1.04", "~"] and legend == "> FASTER, ~ AMBIGUOUS"
    swept = [result(dtype=dtype, shapes=[[n] * 9, [n] * 9]) for dtype in ("float32", "bfloat16") for n in (1000, 2000)]
    assert max(map(len, show.summary(swept))) <= show.COLUMNS
    plain = show.summary([result(notes=["plain path: no sm_90 here"]), *swept])
    assert ["drop-in*" in row for row in plain[:6]] == [False, True, *[False] * 4]
    assert plain[-1].endswith(", * plain path: none of the file's kernels ran")
    assert max(map(len, plain)) <= show.COLUMNS


def test_no_line_ends_inside_a_shape():
    for length in range(60):
        text = "\n".join(show.block(result("n" * length, shapes=[[256, 2048], [256, 2048]], constants={})))
        assert text.count("256 x 2048") == 2, text


@pytest.mark.parametrize(("no_color", "painted"), [("", True), ("1", False)])
def test_colours_are_for_a_terminal(no_color, painted, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    assert show.paint("wrong", 31) == "wrong"  # captured: no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert (show.paint("wrong", 31) == "\x1b[31mwrong\x1b[0m") is painted


def test_says_what_of_a_file_does_not_run_here(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "new.py"
    for text, said in (("", ""), ("__global__", "CUDA was not compiled here"), ('NEEDS = "sm_90"', "no sm_90 here")):
        path.write_text(text)
        assert said in "".join(remarks(path, "cpu")) and bool(said) == bool(remarks(path, "cpu"))
    for capability, plain in (((9, 0), False), ((12, 0), True)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda capability=capability: capability)
        assert bool(remarks(path, "cuda")) is plain


def test_the_rule_and_the_verdicts_are_told_alike(capsys, monkeypatch):
    """By README and by --help, which is read on a hundred columns, too."""
    readme = " ".join((ROOT / "README.md").read_text().replace("*", "").replace("`", "").split())
    assert all(verdict in show.RULE for verdict in (FASTER, SLOWER, AMBIGUOUS)) and show.RULE in readme
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        harness.parse(["--help"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= show.COLUMNS
    told = " ".join(said[said.index("wrong: ") : said.index("positional arguments")].split())
    assert len(sentences := told.removesuffix(".").split(". ")) == 6
    assert all(each in readme for each in sentences)


def test_batches_refused_in_the_same_words_are_one_reason():
    run = result()
    run.lack([f"refuses batch {n}: raised E: {n} rows" for n in (9, 33)] + ["has no training mode"], "right")
    run.lack(["refuses batch 1: raised E: 1 rows", "refuses batch 0: raised E: none", "has no training mode"], "right")
    first = "refuses batches 1, 9, 33: raised E: 9 rows"
    assert run.no_dropin == [first, "has no training mode", "refuses batch 0: raised E: none"]


@pytest.mark.parametrize("seen", [b"", b"1 of "], ids=["while torch is loaded", "while a pair is judged"])
def test_ctrl_c_ends_in_one_line_and_progress_is_one_line(seen):
    """On a terminal of its own, as a user has it."""
    judged, terminal = pty.openpty()
    command = [sys.executable, "harness.py", "--device", "cpu", "--baselines", "eager"]
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    obey = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    own = {"start_new_session": True, "preexec_fn": obey, "env": os.environ | {"TERM": "xterm"}}
    process = subprocess.Popen(command, cwd=ROOT, **own, **streams)
    os.close(terminal)
    printed, deadline = b"", time.monotonic() + 120
    time.sleep(1)  # until python itself has started
    while seen not in printed and time.monotonic() < deadline:
        printed += os.read(judged, 4096)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(60) != 0
    with contextlib.suppress(OSError):  # its other end is closed
        while some := os.read(judged, 4096):
            printed += some
    printed = printed.decode()
    *_, last = printed.replace("\x1b[K", "\r").split("\r")
    assert "Traceback" not in printed and printed.rstrip().endswith("harness.py: stopped"), printed[-500:]
    lines = 4 if "On: " in printed else 1  # the machine, what brackets are, an empty line, and the last
    assert printed.count("\n") == lines and last == "\n" and seen.decode() in printed, printed
