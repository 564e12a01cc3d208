"""Write XLand-MiniGrid tasks that only trying can tell apart.

    python benchmarks/make_rulesets.py runs/shapes.bz2
    python ppo_meta.py --env-id XLand-MiniGrid-R1-9x9 --benchmark-id runs/shapes.bz2 \\
        --env-params '{"height": 6, "width": 6, "max_steps": 7}'

A room holds one object of every shape, and picking up the right one pays: the same in all episodes
of a task, and nothing shows which. Colors differ between tasks and mean nothing. An agent carries
one object at a time, so seven steps leave no time for a second choice. A room of 6 x 6 is 4 x 4
inside.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from xminigrid.benchmarks import save_bz2_pickle
from xminigrid.core.constants import Colors, Tiles
from xminigrid.core.goals import AgentHoldGoal
from xminigrid.core.rules import EmptyRule

SHAPES = {"ball": Tiles.BALL, "square": Tiles.SQUARE, "pyramid": Tiles.PYRAMID, "key": Tiles.KEY}
COLORS = (Colors.RED, Colors.GREEN, Colors.BLUE, Colors.PURPLE, Colors.YELLOW)
COLORS += (Colors.ORANGE, Colors.PINK, Colors.WHITE, Colors.BROWN, Colors.GREY)


def make_rulesets(shapes: list[str], max_tasks: int, seed: int) -> dict:
    """The arrays of a benchmark file, of distinct tasks. Raises ValueError."""
    if len(set(shapes)) != len(shapes) or len(shapes) < 2 or max_tasks < 2:
        raise ValueError("tasks need two different shapes or more, and max_tasks >= 2")
    num_shapes = len(shapes)
    num_tasks = num_shapes * len(COLORS) ** num_shapes
    rng = np.random.default_rng(seed)
    chosen = rng.choice(num_tasks, min(max_tasks, num_tasks), replace=False)
    looks, pays = np.divmod(chosen, num_shapes)  # pays: index of the shape
    colors = np.stack(np.unravel_index(looks, (len(COLORS),) * num_shapes), axis=1)
    tile_ids = np.broadcast_to([SHAPES[shape] for shape in shapes], colors.shape)
    tiles = np.stack([tile_ids, np.array(COLORS)[colors]], axis=-1).astype(np.uint8)
    goals = [AgentHoldGoal(tiles[task, shape]).encode() for task, shape in enumerate(pays)]
    return {
        "goals": jnp.stack(goals),
        "rules": jnp.tile(EmptyRule().encode(), (len(chosen), 1, 1)),
        "init_tiles": jnp.array(tiles),  # [tasks, shapes, 2]
        "num_rules": jnp.zeros(len(chosen), jnp.int32),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["ball", "square"])
    parser.add_argument("--max-tasks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the tasks")
    args = parser.parse_args()
    try:
        tasks = make_rulesets(args.shapes, args.max_tasks, args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    args.path.parent.mkdir(parents=True, exist_ok=True)
    save_bz2_pickle(tasks, str(args.path))
    print(f"{len(tasks['goals'])} tasks")


if __name__ == "__main__":
    main()
