"""Draw docs/families.png from run folders of environments/, and print the table of its last points.

    python benchmarks/families_figure.py runs/families_*

A panel per environment: return of evaluations against environment steps. Lines are interquartile
means over seeds, bands 95 % bootstrap intervals, as in plot.py. Printed are means and 95 %
intervals by Student's t.
"""

import sys
from pathlib import Path

import matplotlib
import matplotlib.figure
import tyro
from craftax_figure import describe
from matplotlib.ticker import EngFormatter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot

COLUMNS = 3


def draw(panels: dict[str, dict[str, plot.Line]]) -> matplotlib.figure.Figure:
    """Two lines of one environment have two colors, and a legend."""
    rows = -(-len(panels) // COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.8 * COLUMNS, 2.6 * rows))
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes, (env_id, lines) in zip(grid.flat, panels.items(), strict=False):
        for color, (label, (_, curve, _)) in zip(plot.COLORS, lines.items(), strict=False):
            style = {"marker": "o", "markersize": 3, "label": label}
            plot.draw_line([(axes, curve.steps)], curve.values, color, **style)
        axes.set(title=env_id, xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if len(lines) > 1:
            axes.legend()
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("return")
    for axes in grid[-1]:
        axes.set_xlabel("environment steps")
    return figure


def main(run_dirs: tyro.conf.Positional[list[Path]]) -> None:
    """Draw docs/families.png from run folders of environments/."""
    panels = plot.group([plot.read_run(path, "eval/return") for path in run_dirs])
    for env_id, lines in panels.items():
        for label, (_, curve, _) in lines.items():
            print(f"{env_id}, {label}: {describe(curve.values[-1])}", end=" ")
            print(f"after {curve.steps[-1]:,.0f} steps and {curve.seconds[-1]:.0f} s")
    with matplotlib.rc_context(plot.STYLE):
        draw(panels).savefig(ROOT / "docs" / "families.png", dpi=100)


if __name__ == "__main__":
    tyro.cli(main)
