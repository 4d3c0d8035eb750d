"""The table and the chart."""

from __future__ import annotations

from pathlib import Path

from judge.trial import ABOVE_FLOOR, BUILD, OK, WRONG, Run

RESULT = {OK: "ok", WRONG: "WRONG", BUILD: "BUILD"}
COLOURS = {"new": "#1b6ca8", "new_cudagraph": "#74a9cf", "eager": "#969696", "compile": "#bdbdbd", "max-autotune": "#d9d9d9"}


class PlotUnavailable(Exception):
    """The chart's package is missing."""


def table(runs: list[Run], markdown: bool = False) -> str:
    """One line a run, and under it why any is not ok and what was noted."""
    contenders = ["new", *_in_order({name for run in runs for name in run.ms} - {"new"})]
    rivals = [name for name in contenders if any(name in run.speedup for run in runs)]
    header = ["model", "run", "result", *(f"{name} ms" for name in contenders)]
    header += [*(f"x {name} [95%]" for name in rivals), "of floor", "error new / eager"]
    rows = [
        [
            run.model,
            _way(run),
            RESULT[run.status],
            *(_number(run.ms.get(name)) for name in contenders),
            *(_speedup(run, name) for name in rivals),
            _percent(run),
            _errors(run),
        ]
        for run in runs
    ]
    lines = _markdown(header, rows) if markdown else _aligned(header, rows)
    remarks = [f"{run.model} ({_way(run)}): {remark}" for run in runs for remark in [*run.reasons, *run.notes]]
    if remarks:
        lines += ["", *(f"- {remark}" if markdown else remark for remark in dict.fromkeys(remarks))]
    return "\n".join(lines)


def _in_order(names: set[str]) -> list[str]:
    return sorted(names, key=list(COLOURS).index)


def _way(run: Run) -> str:
    direction = "fwd" if run.direction == "forward" else "fwd+bwd"
    batch = "" if run.batch is None else f" b{run.batch}"
    return f"{run.device} {run.dtype} {run.precision} {direction}{batch}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _speedup(run: Run, name: str) -> str:
    if name not in run.speedup:
        return "-"
    low, high = run.speedup_ci[name]
    return f"{run.speedup[name]:.2f} [{low:.2f}, {high:.2f}]"


def _percent(run: Run) -> str:
    if not run.roof:
        return "-"
    return f"{run.roof['percent']:.0f}%" + (" (!)" if ABOVE_FLOOR in run.notes else "")


def _errors(run: Run) -> str:
    """The largest errors against float64; for a float64 run the distance to eager."""
    if not run.error:
        return "-"
    eager = run.error["eager_max"]
    return f"{run.error['new_max']:.1e} / {'-' if eager is None else format(eager, '.1e')}"


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [header, *rows]]


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]]


def plot(runs: list[Run], surroundings: dict, path: Path) -> None:
    """Bars of milliseconds, a group a run; a line across each group marks its floor. SVG or PNG by the file's suffix."""
    try:
        import matplotlib
    except ImportError as missing:
        raise PlotUnavailable("--plot needs matplotlib: pip install matplotlib") from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [run for run in runs if run.ms]
    names = ["new", *_in_order({name for run in timed for name in run.ms} - {"new"})]
    group = len(names) + 1
    settings = {"svg.fonttype": "none", "svg.hashsalt": "harness", "font.size": 9}  # the same records give the same file
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.24 * group * max(1, len(timed))))
        for slot, name in enumerate(names):
            shown = [(i * group + slot, run.ms[name]) for i, run in enumerate(timed) if name in run.ms]
            bars = axes.barh([y for y, _ in shown], [ms for _, ms in shown], height=0.9, color=COLOURS[name], label=name)
            axes.bar_label(bars, labels=[f"{ms:.3g}" for _, ms in shown], padding=3)
        floors = [(i * group, run.roof["floor_ms"]) for i, run in enumerate(timed) if run.roof]
        if floors:
            axes.vlines(
                [ms for _, ms in floors],
                [y - 0.6 for y, _ in floors],
                [y + group - 1.4 for y, _ in floors],
                colors="#d7301f",
                linestyles="dashed",
                label="floor",
            )
        axes.set_yticks([i * group + (group - 2) / 2 for i in range(len(timed))], [f"{run.model}\n{_way(run)}" for run in timed])
        axes.invert_yaxis()
        axes.set_xlabel("ms, less is better")
        axes.set_title(f"{surroundings['device']}, torch {surroundings['torch']}", fontsize=9, pad=26)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names) + 1)
        figure.savefig(path, bbox_inches="tight", dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)
