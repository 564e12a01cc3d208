"""Craftax in ppo_ff.py: a survival game of mining, crafting and fighting in a generated world.

    pip install craftax==1.6.1
    python environments/craftax_envs.py --num-seeds 5

Environments: Craftax-Classic-Symbolic-v1, Craftax-Symbolic-v1 and their -Pixels-v1. `obs` is the
map around the player with inventory and vitals, flat, or an image, which is slow here. An episode
terminates in death, and truncates after 10,000 steps (Classic) or 100,000: `max_timesteps` in
`--env-params`. An evaluation waits for its longest episode.

`env/Achievements/NAME` is the percentage of episodes that unlocked NAME. `env/score`, in Classic
only, is the mean of exp(mean(log(1 + x))) - 1 with the 22 percentages x, 0 or 100, of one episode.
Crafter's score (arXiv 2109.06780) is this function of the logged percentages, and higher.
"""

import dataclasses
import difflib
import json
import sys

import family
import jax
import jax.numpy as jnp

import ppo_ff as script

try:
    from craftax.craftax_env import make_craftax_env_from_name
except ImportError:
    family.missing("Craftax", "craftax==1.6.1")

NAMES = [
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
]


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id Craftax-Symbolic-v1 --num-envs 256"""

    env_id: str = "Craftax-Classic-Symbolic-v1"  # Craftax environment; list: print them
    env_params: str = "{}"  # JSON, e.g. '{"max_timesteps": 1000}'
    num_envs: int = 64  # parallel environments per seed, over all devices


@dataclasses.dataclass(frozen=True)
class Algorithm(script.Algorithm):
    """How agents learn. For example: --lr 3e-4 --num-steps 128"""

    total_timesteps: float = 1e6  # steps per seed, rounded to whole updates per evaluation
    num_steps: int = 64  # rollout length
    hidden_size: int = 256  # width of the dense layers
    lr: float = 1e-3  # Adam learning rate
    gamma: float = 0.95  # discount factor
    gae_lambda: float = 0.65  # trace decay of GAE
    ent_coef: float = 0.01  # coefficient of the entropy bonus


@dataclasses.dataclass(frozen=True)
class Config(Algorithm, Environment, script.Config):
    """PPO on Craftax."""


def make_env(config):
    if config.env_id == "list":
        print(*NAMES, sep="\n")
        sys.exit()
    if config.env_id not in NAMES:
        nearest = " or ".join(difflib.get_close_matches(config.env_id, NAMES, cutoff=0))
        raise script.ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}?")
    env = make_craftax_env_from_name(config.env_id, auto_reset=False)
    default = env.default_params
    try:
        params = default.replace(**json.loads(config.env_params))
        for name, value in vars(default).items():
            if type(getattr(params, name)) is not type(value):
                raise TypeError(f"{name} must be of type {type(value).__name__}")
    except (TypeError, ValueError) as error:
        raise script.ConfigError(f"env_params: {error}; the defaults are {default}") from None
    endless = params.replace(max_timesteps=jnp.inf)

    def reset(key):
        return env.reset(key, params)

    restart = family.lazy(reset)  # generates a world

    def step(key, env_state, action):
        step_key, reset_key = jax.random.split(key)
        outcome = env.step(step_key, env_state, action, params)
        next_obs, env_state, reward, done, info = outcome
        terminated = env.is_terminal(env_state, endless)
        del info["discount"]  # done, in other words
        obs, env_state = restart(done, reset_key, (next_obs, env_state))
        return obs, env_state, reward, terminated, done & ~terminated, next_obs, info

    return reset, step, env.action_space(params).n


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
