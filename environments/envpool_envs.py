"""EnvPool in ppo_obs_norm.py: classic control, Box2D, MuJoCo, dm_control and more, in C++ threads.

    pip install envpool==1.2.5
    python environments/envpool_envs.py --env-id HalfCheetah-v5
    python environments/envpool_envs.py --env-id CartPole-v1 --num-envs 32 --total-timesteps 5e5

Environments: those with discrete or continuous actions and without images. `env_params` are
arguments of envpool.make, such as num_threads. `obs` is a vector: a discrete one is one-hot, the
parts of a dictionary are joined. Time limits are EnvPool's (max_episode_steps); an episode that
terminates in the last step of its limit counts as truncated. One call of the host steps all
environments, by threads: one seed and one device. Their states are not in the checkpoint. A
continued run starts new episodes: its bits are not those of a run in one go.
"""

import dataclasses
import difflib
import json
import sys

import family
import jax
import numpy as np

import ppo_obs_norm as script

try:
    import envpool
    from gymnasium.spaces import Box, Dict, Discrete
    from gymnasium.spaces.utils import flatdim
except ImportError:
    family.missing("EnvPool", "envpool==1.2.5")


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id Hopper-v5 --num-envs 16"""

    env_id: str = "HalfCheetah-v5"  # EnvPool environment; list: print them
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
    """PPO on EnvPool."""


def make_pool(config, seeds):
    """An environment for each seed, all stepped by one call. Raises ConfigError."""
    options = {"num_envs": len(seeds), "env_seed": seeds}
    try:
        return envpool.make_gymnasium(config.env_id, **options | json.loads(config.env_params))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        message = f"{config.env_id}, env_params: {error}".split("\n")[0]
        raise script.ConfigError(message) from None


def flatten(space, obs):
    """[N, ...] -> [N, F]"""
    if isinstance(space, Dict):
        return np.concatenate([flatten(space[name], obs[name]) for name in space], axis=1)
    if isinstance(space, Discrete):
        obs = np.eye(space.n)[obs - space.start]
    return np.float32(obs).reshape(len(obs), -1)


def make_env(config):
    names = envpool.list_all_envs()
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        nearest = " or ".join(difflib.get_close_matches(config.env_id, names, cutoff=0))
        raise script.ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}?")
    if config.num_seeds * jax.device_count() > 1:
        message = "environments of the host: only one seed and one device; plot pools runs"
        raise script.ConfigError(f"{message} of several --seed")
    pool = make_pool(config, [0])
    obs_space, space = pool.observation_space, pool.action_space
    if len(obs_space.shape or ()) == 3:
        raise script.ConfigError(f"{config.env_id} shows images, but the networks take vectors")
    is_discrete = isinstance(space, Discrete)
    if not is_discrete and not (isinstance(space, Box) and space.is_bounded()):
        raise script.ConfigError(f"{config.env_id} has actions of another kind: {space}")
    pools = []  # on the host: `init` starts two, and trains in one; a third is for evaluations

    def host_reset(seed):
        envs = pools[2] if len(pools) > 2 else make_pool(config, np.ravel(seed).tolist())
        if envs not in pools:
            pools.append(envs)
        obs = flatten(obs_space, envs.reset()[0]).reshape(*seed.shape, -1)
        return obs, np.full(seed.shape, pools.index(envs), np.int32)

    def host_step(pool, action):
        envs = pools[pool.item(0)]
        outcome = envs.step(np.asarray(action).reshape(pool.size, *space.shape))
        final, reward, terminated, truncated, _ = outcome
        next_obs = flatten(obs_space, final)
        obs, ended = next_obs.copy(), np.flatnonzero(terminated | truncated)
        if ended.size:
            obs[ended] = flatten(obs_space, envs.reset(ended)[0])
        outcome = obs, np.float32(reward), terminated, truncated, next_obs
        return [x.reshape(pool.shape + x.shape[1:]) for x in outcome]  # no axis without vmap

    # One call for all environments. It is not pure, but needs the action that its result leads to:
    # XLA can neither leave out a call nor change their order.
    call = lambda *args: jax.pure_callback(*args, vmap_method="broadcast_all")
    number, flag, index = (jax.ShapeDtypeStruct((), x) for x in (np.float32, bool, np.int32))
    vector = jax.ShapeDtypeStruct((flatdim(obs_space),), np.float32)

    def reset(key):
        return call(host_reset, (vector, index), jax.random.bits(key) >> 1)

    def step(key, env_state, action):
        if not is_discrete:
            low, high = space.low.ravel(), space.high.ravel()
            action = low + (high - low) * (action + 1) / 2
        outcome = call(host_step, (vector, number, flag, flag, vector), env_state, action)
        obs, reward, terminated, truncated, next_obs = outcome
        return obs, env_state, reward, terminated, truncated, next_obs

    return reset, step, flatdim(space), is_discrete


family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
