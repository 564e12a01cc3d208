"""MuJoCo Playground in ppo_obs_norm.py: control tasks and robots, simulated by MJX.

    pip install playground==0.2.0
    python environments/playground_envs.py --env-id CheetahRun --total-timesteps 5e6

Environments: the 25 tasks of DeepMind's control suite (CartpoleBalance, CheetahRun, WalkerWalk),
and robots in locomotion and manipulation, whose models are downloaded when first used. `obs` is the
observation as a vector; of a robot, what its own sensors measure. `--env-params` sets fields of the
task's configuration, like episode_length. Truncated after episode_length steps, 1000 in the control
suite. There, only physics that become NaN terminate; robots also terminate where they fall.
`action_repeat` is not supported. The reward of a step is in [0, 1] in the control suite.
"""

import dataclasses
import difflib
import json
import sys

import family
import jax
import jax.numpy as jnp

import ppo_obs_norm as script

try:
    from mujoco_playground import registry
except ImportError:
    family.missing("Playground", "playground==0.2.0")


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id CheetahRun"""

    env_id: str = "CartpoleBalance"  # environment of Playground; list: print them
    env_params: str = "{}"  # JSON, e.g. '{"episode_length": 500}'
    num_envs: int = 64  # parallel environments per seed, over all devices


@dataclasses.dataclass(frozen=True)
class Run(script.Run):
    """What a run does. For example: --eval-greedy"""

    eval_episodes: int = 16  # full episodes per evaluation and seed


@dataclasses.dataclass(frozen=True)
class Config(Run, Environment, script.Config):
    """PPO on MuJoCo Playground."""


def make_env(config):
    names = registry.ALL_ENVS
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        nearest = " or ".join(difflib.get_close_matches(config.env_id, names, cutoff=0))
        raise script.ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}?")
    default = registry.get_default_config(config.env_id)
    try:
        # On a GPU, '{"impl": "warp"}' is another simulator.
        overrides = {"impl": "jax"} | json.loads(config.env_params)
        if ignored := overrides.keys() & {"vision", "action_repeat"}:
            raise ValueError(f"{ignored} is not supported")
        env = registry.load(config.env_id, config_overrides=overrides)
    except (KeyError, TypeError, ValueError) as error:
        reason = error.args[0].split(". Other fields")[0]
        raise script.ConfigError(f"env_params: {reason}; the fields are {[*default]}") from None
    time_limit = env._config.episode_length
    # Traced once, not at every call: a quarter less time until CheetahRun starts.
    env_reset, env_step = jax.jit(env.reset), jax.jit(env.step)

    def observe(state):
        return state.obs["state"] if isinstance(state.obs, dict) else state.obs

    def reset(key):
        state = env_reset(key)
        return observe(state), (state, jnp.int32(0))

    restart = family.lazy(reset)

    def step(key, env_state, action):
        state, time = env_state
        state, time = env_step(state, action), time + 1
        next_obs, terminated = observe(state), state.done > 0
        truncated = ~terminated & (time >= time_limit)
        reward = jnp.nan_to_num(state.reward)  # of physics that became NaN
        obs, env_state = restart(terminated | truncated, key, (next_obs, (state, time)))
        return obs, env_state, reward, terminated, truncated, next_obs

    return reset, step, env.action_size, False


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
