"""Write a benchmark of XLand-MiniGrid tasks: which of several objects pays?

    python benchmarks/make_rulesets.py runs/objects.bz2
    python ppo_meta.py --env-id XLand-MiniGrid-R1-9x9 --benchmark-id runs/objects.bz2

A task is a set of distinct objects (shape and color) and the one of them that ends the episode with
a reward when the agent stands next to it. The observation does not show which: in the first episode
of a trial the agent must try one after another, later it can remember. The number of tasks is
objects * binomial(shapes * colors, objects), or --max-tasks of them, drawn at random.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from xminigrid.benchmarks import save_bz2_pickle
from xminigrid.core.constants import TILES_REGISTRY, Colors, Tiles
from xminigrid.core.goals import AgentHoldGoal
from xminigrid.core.rules import EmptyRule

SHAPES = {
    "ball": Tiles.BALL,
    "square": Tiles.SQUARE,
    "pyramid": Tiles.PYRAMID,
    "star": Tiles.STAR,
    "hex": Tiles.HEX,
    "key": Tiles.KEY,
}
COLORS = (
    Colors.RED,
    Colors.GREEN,
    Colors.BLUE,
    Colors.PURPLE,
    Colors.YELLOW,
    Colors.WHITE,
    Colors.ORANGE,
    Colors.PINK,
)


def make_rulesets(shapes, num_colors: int, num_objects: int, max_tasks: int, seed: int) -> dict:
    """The arrays of a benchmark file: goals, rules, init_tiles and num_rules."""
    kinds = [TILES_REGISTRY[SHAPES[x], color] for x in shapes for color in COLORS[:num_colors]]
    if not 2 <= num_objects <= len(kinds):
        raise ValueError(f"objects = {num_objects} must be >= 2, <= {len(kinds)} kinds of object")
    num_tasks = num_objects * math.comb(len(kinds), num_objects)
    if num_tasks > 1_000_000:
        raise ValueError(f"{num_tasks} tasks are too many: use fewer shapes, colors or objects")
    chosen = np.arange(num_tasks)
    if num_tasks > max_tasks:
        chosen = np.sort(np.random.default_rng(seed).choice(num_tasks, max_tasks, replace=False))
    sets = np.array(list(itertools.combinations(range(len(kinds)), num_objects)))
    objects, paying = sets[chosen // num_objects], chosen % num_objects
    goals = jnp.stack([AgentHoldGoal(tile=tile).encode() for tile in kinds])
    rules = EmptyRule().encode()[None]  # one rule, which does nothing
    return {
        "goals": goals[objects[np.arange(len(chosen)), paying]],
        "rules": jnp.tile(rules, (len(chosen), 1, 1)),
        "init_tiles": jnp.stack(kinds)[objects],  # [tasks, objects, 2]
        "num_rules": jnp.zeros(len(chosen), jnp.int32),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["ball"])
    parser.add_argument("--colors", type=int, choices=range(1, 9), default=8)
    parser.add_argument("--objects", type=int, default=3, help="objects of a task")
    parser.add_argument("--max-tasks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the tasks drawn")
    args = parser.parse_args()
    try:
        tasks = make_rulesets(args.shapes, args.colors, args.objects, args.max_tasks, args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    args.path.parent.mkdir(parents=True, exist_ok=True)
    save_bz2_pickle(tasks, str(args.path))
    print(f"{len(tasks['goals'])} tasks")


if __name__ == "__main__":
    main()
