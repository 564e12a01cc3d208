"""Write XLand-MiniGrid tasks whose goal only exploring can reveal.

    python benchmarks/make_rulesets.py runs/places.bz2
    python ppo_meta.py --env-id XLand-MiniGrid-R1-9x9 --benchmark-id runs/places.bz2 \\
        --env-params '{"height": 6, "width": 6, "max_steps": 12}' --total-timesteps 6e6

Standing on one unmarked cell of the room pays, the same in all episodes of a task. Two colored
floor tiles, in new places in every episode, are distractors: a task is a cell and a pair of colors.
A room of 6 x 6 is 4 x 4 inside, so there are 16 x 55 tasks.
"""

import argparse
import itertools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from xminigrid.benchmarks import save_bz2_pickle
from xminigrid.core.constants import Colors, Tiles
from xminigrid.core.goals import AgentOnPositionGoal
from xminigrid.core.rules import EmptyRule

COLORS = (Colors.RED, Colors.GREEN, Colors.BLUE, Colors.PURPLE, Colors.YELLOW)
COLORS += (Colors.ORANGE, Colors.PINK, Colors.WHITE, Colors.BROWN, Colors.GREY)


def make_rulesets(size: int) -> dict:
    """The arrays of a benchmark file for rooms of `size` x `size`, walls included."""
    inside = range(1, size - 1)
    pairs = itertools.combinations_with_replacement(COLORS, 2)  # their order would not show
    tasks = itertools.product(inside, inside, pairs)
    tasks = np.array([(y, x, *pair) for y, x, pair in tasks], np.uint8)
    cells, colors = tasks[:, :2], tasks[:, 2:]
    goals = [AgentOnPositionGoal(cell).encode() for cell in cells]
    return {
        "goals": jnp.stack(goals),
        "rules": jnp.tile(EmptyRule().encode(), (len(tasks), 1, 1)),
        "init_tiles": jnp.stack([jnp.full_like(colors, Tiles.FLOOR), colors], axis=-1),
        "num_rules": jnp.zeros(len(tasks), jnp.int32),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument(
        "--size",
        type=int,
        default=6,
        help="height and width of the room, walls included, as in --env-params",
    )
    args = parser.parse_args()
    if args.size < 4:
        print(f"error: size = {args.size} must be >= 4", file=sys.stderr)
        sys.exit(2)
    tasks = make_rulesets(args.size)
    args.path.parent.mkdir(parents=True, exist_ok=True)
    save_bz2_pickle(tasks, str(args.path))
    print(f"{len(tasks['goals'])} tasks")


if __name__ == "__main__":
    main()
