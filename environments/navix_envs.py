"""Navix in ppo_ff.py: MiniGrid's tasks of keys, doors, lava and rooms, fully observed.

    pip install navix==0.7.4
    python environments/navix_envs.py --env-id Navix-DoorKey-5x5-v0

Environments: Navix-Empty-8x8-v0, Navix-FourRooms-v0 and 39 others. `obs` is the grid [H, W, 3] of
objects, colors and states, scaled to [0, 1]; a key that the player holds is in its corner. Reaching
the goal pays 1 and terminates an episode, as lava and balls do for nothing. `max_steps` (100) in
`--env-params` truncate it. GoToDoor does not show which door it means. KeyCorridor cannot be
solved, since Navix 0.7.4 takes no ball for a goal.
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
    import navix
except ImportError:
    family.missing("Navix", "navix==0.7.4")


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id Navix-Empty-8x8-v0"""

    env_id: str = "Navix-DoorKey-5x5-v0"  # Navix environment; list: print them
    env_params: str = "{}"  # JSON of max_steps and penality_coeff, e.g. '{"max_steps": 200}'


@dataclasses.dataclass(frozen=True)
class Config(Environment, script.Config):
    """PPO on Navix."""


def make_env(config):
    names = list(navix.registry())
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        nearest = " or ".join(difflib.get_close_matches(config.env_id, names, cutoff=0))
        raise script.ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}?")
    default = {"max_steps": 100, "penality_coeff": 0.0}
    try:
        params = default | json.loads(config.env_params)
        if jax.tree.map(type, params) != jax.tree.map(type, default):
            raise TypeError("wrong name or type")
    except (TypeError, ValueError) as error:
        raise script.ConfigError(f"env_params: {error}; the defaults are {default}") from None
    env = navix.make(config.env_id, observation_fn=navix.observations.symbolic, **params)

    def encode(timestep):
        return timestep.observation / jnp.array([10, 5, 3])  # object, color, state

    def reset(key):
        timestep = env.reset(key)
        # The cache holds pictures of the grid, which nothing here draws.
        timestep = timestep.replace(state=timestep.state.replace(cache=None))
        return encode(timestep), timestep

    restart = family.lazy(reset)

    def step(key, env_state, action):
        last = env._step(env_state, action)  # env.step resets as well, but one step later
        next_obs = encode(last)
        obs, env_state = restart(last.is_done(), key, (next_obs, last))
        return obs, env_state, last.reward, last.is_termination(), last.is_truncation(), next_obs

    return reset, step, len(env.action_set)


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
