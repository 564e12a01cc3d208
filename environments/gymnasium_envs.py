"""Gymnasium in ppo_obs_norm.py: classic control, Box2D, MuJoCo and what you have registered.

    pip install "gymnasium[mujoco]==1.3.0" "mujoco<4"
    python environments/gymnasium_envs.py --env-id HalfCheetah-v5
    python environments/gymnasium_envs.py --env-id CartPole-v1 --num-envs 32 --total-timesteps 5e5

Environments: all that are registered, with discrete or continuous actions; those of a module as
module:Name-v0. Where an action has several parts (MultiDiscrete), one action of the policy is one
combination of them. `env_params` are arguments of gymnasium.make. `obs` is the vector of the
environment; Gymnasium flattens what is none. Time limits are Gymnasium's (max_episode_steps).
One call of the host steps all environments, in turn: one seed and one device. Their states are not
in the checkpoint. A continued run starts new episodes: its bits are not those of a run in one go.
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

import ppo_obs_norm as script

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete, MultiDiscrete
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from gymnasium.wrappers import FlattenObservation
except ImportError:
    family.missing("Gymnasium", "gymnasium==1.3.0")


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id Hopper-v5 --num-envs 16"""

    env_id: str = "HalfCheetah-v5"  # Gymnasium environment; list: print them
    env_params: str = "{}"  # JSON, e.g. '{"max_episode_steps": 200}'
    num_envs: int = 8  # parallel environments


@dataclasses.dataclass(frozen=True)
class Algorithm(script.Algorithm):
    """How agents learn. For example: --lr 3e-4 --num-steps 512"""

    total_timesteps: float = 1e6  # environment steps, rounded to whole updates per evaluation
    num_steps: int = 256  # rollout length


@dataclasses.dataclass(frozen=True)
class Run(script.Run):
    """What a run does. For example: --eval-greedy"""

    num_seeds: int = 1  # only 1 here: start a run for each --seed, which plot pools
    eval_episodes: int = 16  # full episodes per evaluation


@dataclasses.dataclass(frozen=True)
class Config(Run, Algorithm, Environment, script.Config):
    """PPO on Gymnasium."""


def make_one(config):
    """One environment, whose observations are vectors. Raises ConfigError."""
    try:
        env = gymnasium.make(config.env_id, **json.loads(config.env_params))
    except gymnasium.error.UnregisteredEnv:
        names = difflib.get_close_matches(config.env_id, gymnasium.registry, cutoff=0)
        nearest = " or ".join(names)
        raise script.ConfigError(
            f"unknown env_id {config.env_id}: did you mean {nearest}?"
        ) from None
    except gymnasium.error.DependencyNotInstalled as error:
        advice = "the first lines of gymnasium_envs.py name the versions; CartPole-v1 needs nothing"
        raise script.ConfigError(f"{config.env_id}: {error} ({advice})") from None
    except Exception as error:  # an environment may raise any
        raise script.ConfigError(f"{config.env_id}, env_params: {error}") from None
    space = env.observation_space
    is_vector = isinstance(space, Box) and len(space.shape) == 1
    return env if is_vector else FlattenObservation(env)


def make_env(config):
    if config.env_id == "list":
        print(*gymnasium.registry, sep="\n")
        sys.exit()
    if config.num_seeds * jax.device_count() > 1:
        message = "environments of the host: only one seed and one device; plot pools runs"
        raise script.ConfigError(f"{message} of several --seed")
    env = make_one(config)
    space = env.action_space
    if isinstance(space, Discrete):
        choices = space.start + np.arange(space.n)
    elif isinstance(space, MultiDiscrete) and math.prod(space.nvec.ravel().tolist()) <= 10_000:
        combinations = np.array([*np.ndindex(*space.nvec.ravel())])
        choices = space.start + combinations.reshape(-1, *space.shape)
    elif isinstance(space, Box) and space.is_bounded():
        choices = None
    else:
        raise script.ConfigError(f"{config.env_id} has actions of another kind: {space}")
    pools = []  # on the host: `init` starts two, and trains in one; a third is for evaluations

    def host_reset(seed):
        makers, mode = [lambda: make_one(config)] * seed.size, AutoresetMode.SAME_STEP
        envs = pools[2] if len(pools) > 2 else SyncVectorEnv(makers, autoreset_mode=mode)
        if envs not in pools:
            pools.append(envs)
        obs, _ = envs.reset(seed=np.ravel(seed).tolist())
        obs = np.float32(obs).reshape(*seed.shape, -1)
        return obs, np.full(seed.shape, pools.index(envs), np.int32)

    def host_step(pool, action):
        envs = pools[pool.item(0)]
        outcome = envs.step(np.asarray(action).reshape(envs.action_space.shape))
        obs, reward, terminated, truncated, info = outcome
        next_obs = obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            next_obs[i] = info["final_obs"][i]
        outcome = np.float32(obs), np.float32(reward), terminated, truncated, np.float32(next_obs)
        return [x.reshape(pool.shape + x.shape[1:]) for x in outcome]  # no axis without vmap

    # One call for all environments. It is not pure, but needs the action that its result leads to:
    # XLA can neither leave out a call nor change their order.
    call = lambda *args: jax.pure_callback(*args, vmap_method="broadcast_all")
    number, flag, index = (jax.ShapeDtypeStruct((), x) for x in (np.float32, bool, np.int32))
    vector = jax.ShapeDtypeStruct((env.observation_space.shape[0],), np.float32)

    def reset(key):
        return call(host_reset, (vector, index), jax.random.bits(key) >> 1)

    def step(key, env_state, action):
        if choices is None:
            low, high = space.low.ravel(), space.high.ravel()
            action = low + (high - low) * (action + 1) / 2
        else:
            action = jnp.asarray(choices)[action]
        outcome = call(host_step, (vector, number, flag, flag, vector), env_state, action)
        obs, reward, terminated, truncated, next_obs = outcome
        return obs, env_state, reward, terminated, truncated, next_obs

    size = math.prod(space.shape) if choices is None else len(choices)
    return reset, step, size, choices is not None


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
