"""The table and the chart."""

from __future__ import annotations

from pathlib import Path

from judge.timing import verdict
from judge.trial import ABOVE_FLOOR, BUILD, OK, WRONG, Run

RESULT = {OK: "ok", WRONG: "WRONG", BUILD: "BUILD"}
COLOURS = {
    "new": "#1b6ca8",
    "new_cudagraph": "#74a9cf",
    "eager": "#969696",
    "compile": "#bdbdbd",
    "max-autotune": "#d9d9d9",
}


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
    lines += _scaling(runs, markdown)
    remarks = [
        f"{run.model} ({_way(run)}): {remark}"
        for run in runs
        for remark in [*run.reasons, *run.notes, *_disturbed(run)]
    ]
    if remarks:
        lines += ["", *(f"- {remark}" if markdown else remark for remark in dict.fromkeys(remarks))]
    return "\n".join(lines)


def _scaling(runs: list[Run], markdown: bool) -> list[str]:
    """Under the table of rank 0's share: what all processes do together."""
    header = ["model", "run", "processes", "whole batch", "ms alone", "ms together", "samples/s", "of each"]
    header += ["x one alone", "efficiency"]
    rows = []
    for run in (run for run in runs if run.scaling):
        all_of_them = run.scaling
        figures = [_number(all_of_them[name]) for name in ("ms_whole_alone", "ms", "samples_per_second")]
        each = ", ".join(map(_number, all_of_them["samples_per_second_each"]))
        sizes = [str(all_of_them["processes"]), str(all_of_them["batch"])]
        gains = [f"{all_of_them['speedup']:.2f}", f"{100 * all_of_them['efficiency']:.1f}%"]
        rows.append([run.model, _way(run), *sizes, *figures, each, *gains])
    return ["", *(_markdown if markdown else _aligned)(header, rows)] if rows else []


def _disturbed(run: Run) -> list[str]:
    return [f"timed under interference: {sign}" for sign in run.interference]


def _in_order(names: set[str]) -> list[str]:
    return sorted(names, key=list(COLOURS).index)


def _way(run: Run) -> str:
    direction = {"forward": "fwd", "forward_recorded": "fwd recorded", "forward_backward": "fwd+bwd"}[
        run.direction
    ] + " frozen" * run.frozen
    batch = "" if run.batch is None else f" b{run.batch}"
    shape = "".join(
        f" {name} {value}" for name, value in run.constants.items() if isinstance(value, int) and name != "batch_size"
    )
    return f"{run.device} {run.dtype} {run.precision} {direction}{batch}{shape}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _speedup(run: Run, name: str) -> str:
    if name not in run.speedup:
        return "-"
    low, high = run.speedup_ci[name]
    return f"{run.speedup[name]:.2f} [{low:.2f}, {high:.2f}] {verdict(run.speedup_ci[name])}"


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


def plotting():
    """The chart's package."""
    try:
        import matplotlib
    except ImportError as missing:
        raise PlotUnavailable("--plot needs matplotlib: pip install matplotlib") from missing
    return matplotlib


def plot(runs: list[Run], surroundings: dict, path: Path) -> None:
    """Bars of the milliseconds, or of a sweep the percent of the floor against the size. SVG or PNG by the file's suffix."""
    matplotlib = plotting()
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [run for run in runs if run.ms]
    draw = _draw_sweep if any(run.constants for run in timed) else _draw_bars
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "harness",
        "font.size": 9,
    }  # the same records give the same file
    with matplotlib.rc_context(settings):
        figure = draw(pyplot, timed, f"{surroundings['device']}, torch {surroundings['torch']}")
        figure.savefig(path, bbox_inches="tight", dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw_bars(pyplot, runs: list[Run], title: str):
    """Milliseconds, a group a run; a line across each group marks its floor."""
    names = ["new", *_in_order({name for run in runs for name in run.ms} - {"new"})]
    group = len(names) + 1
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.24 * group * max(1, len(runs))))
    for slot, name in enumerate(names):
        shown = [(i * group + slot, run.ms[name]) for i, run in enumerate(runs) if name in run.ms]
        bars = axes.barh([y for y, _ in shown], [ms for _, ms in shown], height=0.9, color=COLOURS[name], label=name)
        axes.bar_label(bars, labels=[f"{ms:.3g}" for _, ms in shown], padding=3)
    floors = [(i * group, run.roof["floor_ms"]) for i, run in enumerate(runs) if run.roof]
    if floors:
        axes.vlines(
            [ms for _, ms in floors],
            [y - 0.6 for y, _ in floors],
            [y + group - 1.4 for y, _ in floors],
            colors="#d7301f",
            linestyles="dashed",
            label="floor",
        )
    axes.set_yticks(
        [i * group + (group - 2) / 2 for i in range(len(runs))], [f"{run.model}\n{_way(run)}" for run in runs]
    )
    axes.set_ylim(group * len(runs) - 1, -1)  # the first on top
    axes.set_xlabel("ms, less is better")
    axes.set_title(title, fontsize=9, pad=26)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names) + 1)
    return figure


def _draw_sweep(pyplot, runs: list[Run], title: str):
    """Percent of the floor against the floor itself, which is the size in the machine's own measure: a panel a pair and way."""
    panels: dict[str, list[Run]] = {}
    for run in runs:
        panels.setdefault(f"{run.model}, {run.dtype} {run.precision} {run.direction}", []).append(run)
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(4.5 * across, 2.8 * down), sharey=True, squeeze=False, layout="constrained"
    )
    names = ["new", *_in_order({name for run in runs for name in run.ms} - {"new"})]
    for axes, (panel, shown) in zip(grid.flat, panels.items()):
        shown = sorted((run for run in shown if run.roof), key=lambda run: run.roof["floor_ms"])
        for name, marker in zip(names, "osv^D"):
            points = [
                (run.roof["floor_ms"], 100 * run.roof["floor_ms"] / run.ms[name]) for run in shown if name in run.ms
            ]
            axes.plot(*zip(*points), marker=marker, markersize=4, linestyle="none", color=COLOURS[name], label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_ylim(0, 110)
        axes.axhline(100, color="#d7301f", linestyle="dashed", linewidth=1)
        axes.set_title(panel, fontsize=9)
        axes.set_xlabel("floor, ms")
        axes.set_ylabel("% of the floor")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].legend(frameon=False, loc="best")
    figure.suptitle(title, fontsize=9)
    return figure
