"""Jumanji in ppo_ff.py: games, puzzles, packing and routing, with the mask of legal actions.

    pip install jumanji==1.1.2
    python environments/jumanji_envs.py --env-id Snake-v1 --total-timesteps 1e6

Environments: those of Jumanji with one reward and at most 10,000 discrete actions, as in Snake-v1,
Game2048-v1, Maze-v0, Tetris-v0, BinPack-v2, TSP-v1. `obs` is a grid of planes (Snake-v1) or all
fields of the observation, flat, with the mask of legal actions. Where an action has several parts,
one action of the policy is one combination of them, and legal if all parts are. `--env-params` are
arguments of the environment's constructor. A time limit of the environment truncates, every other
end terminates. Its own metrics are logged, as `env/highest_tile`. Game2048-v1 needs a smaller
entropy bonus than the default, `--ent-coef 0.01`. Sokoban-v0 downloads its levels.
"""

import dataclasses
import difflib
import json
import math
import sys

import family
import jax
import jax.numpy as jnp
import numpy as np

import ppo_ff as script

try:
    import jumanji
except ImportError:
    family.missing("Jumanji", "jumanji==1.1.2")

# They have a reward for each agent, continuous actions or millions of combinations.
UNFIT = "Connector-v3 JobShop-v0 LevelBasedForaging-v0 MMST-v0 MultiCVRP-v0 SearchAndRescue-v0"


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id Game2048-v1"""

    env_id: str = "Snake-v1"  # Jumanji environment; list: print them
    env_params: str = "{}"  # JSON, e.g. '{"time_limit": 1000}'
    num_envs: int = 64  # parallel environments per seed, over all devices


@dataclasses.dataclass(frozen=True)
class Algorithm(script.Algorithm):
    """How agents learn. For example: --ent-coef 0.01"""

    total_timesteps: float = 1e6  # steps per seed, rounded to whole updates per evaluation
    lr: float = 1e-3  # Adam learning rate


@dataclasses.dataclass(frozen=True)
class Config(Algorithm, Environment, script.Config):
    """PPO on Jumanji."""


def make_env(config):
    names = sorted(jumanji.registered_environments() - {*UNFIT.split()})
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        problem = "does not fit" if config.env_id in UNFIT.split() else "is unknown"
        nearest = " or ".join(difflib.get_close_matches(config.env_id, names, cutoff=0))
        raise script.ConfigError(f"env_id {config.env_id} {problem}: did you mean {nearest}?")
    try:
        params = json.loads(config.env_params)
        env = jumanji.make(config.env_id, **params)
        time_limit = getattr(env, "time_limit", None)
        if time_limit:  # the limit is checked below
            env = jumanji.make(config.env_id, **params | {"time_limit": 2**30})
    except (TypeError, ValueError) as error:
        raise script.ConfigError(f"env_params: {error}") from None
    sizes = np.array(env.action_spec.num_values)  # [], or of the parts of an action [K]
    num_actions = math.prod(sizes.ravel().tolist())
    parts = jnp.stack(jnp.unravel_index(jnp.arange(num_actions), sizes.ravel()))  # [K, A]

    def encode(obs):
        fields = obs._asdict()
        mask = fields.pop("action_mask", np.ones(num_actions, bool))
        if mask.size != num_actions:  # [K, n]: each part has its own
            mask = jnp.take_along_axis(mask, parts, axis=1).all(axis=0)
        if np.ndim(fields.get("grid")) == 3:  # Snake-v1: nothing else is of use
            return {"obs": fields["grid"], "mask": mask}
        flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves([*fields.values()])])
        return {"obs": flat.astype(jnp.float32), "mask": mask.ravel()}

    def reset(key):
        state, first = env.reset(key)
        return encode(first.observation), state

    restart = family.lazy(reset)

    def step(key, env_state, action):
        action = parts[:, action] if sizes.ndim else action
        state, last = env.step(env_state, action)
        next_obs, terminated = encode(last.observation), last.last()
        truncated = jnp.bool(False)
        if time_limit:
            truncated = ~terminated & (state.step_count >= time_limit)
        obs, env_state = restart(terminated | truncated, key, (next_obs, state))
        return obs, env_state, last.reward, terminated, truncated, next_obs, last.extras

    return reset, step, num_actions


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
