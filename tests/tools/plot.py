"""Draws the charts of results/ from its JSON alone (needs matplotlib):

    python tests/tools/plot.py [FOLDER]      FOLDER/<direction>.svg and FOLDER/sweep.svg, each also for a dark page; default results/

One figure a direction, a panel a pair, each on a scale of its own: milliseconds of the kernels and of the Model, and the floor as a line. Of
the sweep: percent of the floor over the size.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
ORDER = ("new", "compile", "max-autotune", "eager")
TITLES = {"forward": "forward", "forward_recorded": "forward, gradients recorded", "forward_backward": "forward + backward"}
COLOURS = {"new": "#2f81c1", "compile": "#9a9a9a", "max-autotune": "#b4b4b4", "eager": "#6e6e6e"}
FLOOR = "#d7301f"
PAGES = {"": "#1f2328", "_dark": "#e6edf3"}  # by the file's ending: the colour of text and axes, on no background


def runs_of(folder: Path) -> list[dict]:
    return [run for path in sorted(folder.glob("*.json")) for run in json.loads(path.read_text())["runs"] if run["ms"]]


def save(figure, path: Path, ink: str) -> None:
    for axes in figure.axes:
        axes.tick_params(colors=ink, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label):
            part.set_color(ink)
        for spine in axes.spines.values():
            spine.set_color(ink)
        for text in [*axes.texts, *(axes.get_legend().get_texts() if axes.get_legend() else [])]:
            text.set_color(ink)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def draw_direction(runs: list[dict]):
    figure, grid = pyplot.subplots(1, len(runs), figsize=(2.6 * len(runs), 2.8), squeeze=False, layout="constrained")
    for axes, run in zip(grid.flat, runs):
        names = [name for name in ORDER if name in run["ms"]]
        bars = axes.bar(names, [run["ms"][name] for name in names], color=[COLOURS[name] for name in names])
        axes.bar_label(bars, [f"{run['ms'][name]:.3g}" for name in names], fontsize=8)
        if run["roof"]:
            axes.axhline(run["roof"]["floor_ms"], color=FLOOR, linestyle="dashed", linewidth=1, label="floor")
            axes.legend(frameon=False, fontsize=8)
        axes.set_title(run["model"], fontsize=8)
    grid.flat[0].set_ylabel("ms")
    return figure


def draw_sweep(runs: list[dict]):
    panels = sorted({(run["model"], run["dtype"]) for run in runs})
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure, grid = pyplot.subplots(down, across, figsize=(4.5 * across, 2.6 * down), sharey=True, squeeze=False, layout="constrained")
    for axes, (model, dtype) in zip(grid.flat, panels):
        shown = [run for run in runs if (run["model"], run["dtype"], run["direction"]) == (model, dtype, "forward") and run["roof"]]
        for name, marker in zip(ORDER, "osD^"):
            points = [(run["roof"]["floor_ms"], 100 * run["roof"]["floor_ms"] / run["ms"][name]) for run in shown if name in run["ms"]]
            if points:
                axes.plot(*zip(*sorted(points)), marker=marker, markersize=4, linestyle="none", color=COLOURS[name], label=name)
        axes.axhline(100, color=FLOOR, linestyle="dashed", linewidth=1)
        axes.set_xscale("log")
        axes.set_ylim(0, 115)
        axes.set_title(f"{model}, {dtype}", fontsize=8)
        axes.set_xlabel("size, as the floor in ms")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].set_ylabel("% of the floor")
    grid.flat[0].legend(frameon=False, fontsize=8)
    return figure


def main(folder: Path = ROOT / "results") -> int:
    settings = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.size": 9}  # the same records give the same file
    benchmark = [run for path in sorted(folder.glob("*/")) if path.name != "sweep" for run in runs_of(path)]
    benchmark = [run for run in benchmark if (run["dtype"], run["precision"]) == ("float32", "highest") and not run.get("frozen")]
    sweep = runs_of(folder / "sweep")
    with matplotlib.rc_context(settings):
        for ending, ink in PAGES.items():
            for direction in TITLES:
                if shown := [run for run in benchmark if run["direction"] == direction]:
                    figure = draw_direction(shown)
                    figure.suptitle(f"{TITLES[direction]}, float32, {shown[0]['device']}", fontsize=9, color=ink)
                    save(figure, folder / f"{direction}{ending}.svg", ink)
            if sweep:
                save(draw_sweep(sweep), folder / f"sweep{ending}.svg", ink)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
