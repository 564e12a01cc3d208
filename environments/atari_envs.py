"""Atari games by EnvPool in ppo_ff.py, with the network of Mnih et al. 2015 (Nature 518, 529-533).

    pip install envpool==1.2.5
    python environments/atari_envs.py --env-id Pong-v5
    python environments/atari_envs.py --env-id Breakout-v5 --env-params '{"episodic_life": true}'

Environments: all of EnvPool's Atari games. `env_params` are arguments of envpool.make. `obs` is
[84, 84, 4]: the last four gray frames, as bytes; each is the maximum of two, and an action lasts
four. Time limits are EnvPool's, 27,000 actions. The agent learns from the sign of each reward, and
episode/return and eval/return are sums of signs; env/score is the mean score of the training
episodes that ended. One call of the host steps all environments, by threads: one seed and one
device. Their states are not in the checkpoint. A continued run starts new episodes: its bits are
not those of a run in one go.
"""

import dataclasses
import difflib
import json
import sys

import family
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import ppo_ff as script

try:
    import envpool
    from envpool.registration import registry
except ImportError:
    family.missing("EnvPool", "envpool==1.2.5")


@dataclasses.dataclass(frozen=True)
class Environment(script.Environment):
    """Where agents act. For example: --env-id Breakout-v5"""

    env_id: str = "Pong-v5"  # Atari game of EnvPool; list: print them
    env_params: str = "{}"  # JSON, e.g. '{"episodic_life": true}'
    num_envs: int = 8  # parallel environments


@dataclasses.dataclass(frozen=True)
class Algorithm(script.Algorithm):
    """How agents learn. For example: --lr 5e-4 --num-steps 256"""

    total_timesteps: float = 1e7  # environment steps, of four frames each
    update_epochs: int = 4  # passes over each rollout
    num_minibatches: int = 4  # minibatches per epoch
    hidden_size: int = 512  # width of the dense layer
    lr: float = 2.5e-4  # Adam learning rate
    clip_eps: float = 0.1  # clipping range of the probability ratio
    clip_value: bool = True  # also clip the change in value to clip_eps
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    anneal_ent: bool = False  # decay the entropy bonus linearly to zero
    vf_coef: float = 0.5  # value loss coefficient


@dataclasses.dataclass(frozen=True)
class Run(script.Run):
    """What a run does. For example: --eval-greedy"""

    num_seeds: int = 1  # only 1 here: start a run for each --seed, which plot pools
    eval_episodes: int = 8  # full episodes per evaluation


@dataclasses.dataclass(frozen=True)
class Config(Run, Algorithm, Environment, script.Config):
    """PPO on Atari games."""


class ActorCritic(script.ActorCritic):
    """A policy and a value function: two heads on the CNN of Mnih et al. 2015."""

    def cnn(self, x):
        """[..., 84, 84, 4] -> [..., hidden_size]"""
        x = x / jnp.float32(255)
        for features, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
            x = nn.relu(self.conv(x, features, size, stride))
        return nn.relu(script.dense(self.hidden_size)(x.reshape(*x.shape[:-3], -1)))

    def conv(self, x, features: int, size: int, stride: int):
        """A convolution without padding, as a dense layer on patches.

        In a scan on a CPU, the gradient of nn.Conv takes twelve times as long as outside of one.
        """
        *leading, h, w, c = x.shape
        h, w, k = h // stride, w // stride, size // stride
        # Pixels [stride, stride, c] of a block become its channels: patches are k x k blocks.
        x = x.reshape(*leading, h, stride, w, stride, c).swapaxes(-4, -3)
        x = x.reshape(*leading, h, w, stride * stride * c)
        h, w = h - k + 1, w - k + 1
        patches = [x[..., i : i + h, j : j + w, :] for i in range(k) for j in range(k)]
        return script.dense(features)(jnp.concatenate(patches, axis=-1))


def make_pool(config, seeds):
    """A game for each seed, all stepped by one call. Raises ConfigError."""
    options = {"num_envs": len(seeds), "env_seed": seeds}
    try:
        return envpool.make_gymnasium(config.env_id, **options | json.loads(config.env_params))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        message = f"{config.env_id}, env_params: {error}".split("\n")[0]
        raise script.ConfigError(message) from None


def make_env(config):
    names = [name for name, (module, *_) in registry.specs.items() if module == "envpool.atari"]
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        nearest = " or ".join(difflib.get_close_matches(config.env_id, names, cutoff=0))
        raise script.ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}?")
    if config.num_seeds * jax.device_count() > 1:
        message = "environments of the host: only one seed and one device; plot pools runs"
        raise script.ConfigError(f"{message} of several --seed")
    pools = []  # on the host: `init` starts one and trains in it; another is for evaluations
    frames_last = lambda obs: np.moveaxis(obs, -3, -1)  # [N, 84, 84, 4]

    def host_reset(seed):
        envs = pools[1] if len(pools) > 1 else make_pool(config, np.ravel(seed).tolist())
        if envs not in pools:
            pools.append(envs)
        obs = frames_last(envs.reset()[0])
        return obs.reshape(*seed.shape, *obs.shape[1:]), np.full(
            seed.shape, pools.index(envs), np.int32
        )

    def host_step(pool, action):
        envs = pools[pool.item(0)]
        final, reward, terminated, truncated, _ = envs.step(np.asarray(action).reshape(pool.size))
        next_obs = frames_last(final)
        obs, ended = next_obs.copy(), np.flatnonzero(terminated | truncated)
        if ended.size:
            obs[ended] = frames_last(envs.reset(ended)[0])
        outcome = obs, np.float32(reward), terminated, truncated, next_obs
        return [x.reshape(pool.shape + x.shape[1:]) for x in outcome]  # no axis without vmap

    # One call for all environments. It is not pure, but needs the action that its result leads to:
    # XLA can neither leave out a call nor change their order.
    call = lambda *args: jax.pure_callback(*args, vmap_method="broadcast_all")
    number, flag, index = (jax.ShapeDtypeStruct((), x) for x in (np.float32, bool, np.int32))
    image = jax.ShapeDtypeStruct((84, 84, 4), np.uint8)

    def reset(key):
        obs, pool = call(host_reset, (image, index), jax.random.bits(key) >> 1)
        return obs, (pool, jnp.float32(0))

    def step(key, env_state, action):
        pool, score = env_state
        outcome = call(host_step, (image, number, flag, flag, image), pool, action)
        obs, reward, terminated, truncated, next_obs = outcome
        score += reward
        env_state = pool, jnp.where(terminated | truncated, 0, score)
        info = {"score": score}
        return obs, env_state, jnp.sign(reward), terminated, truncated, next_obs, info

    return reset, step, make_pool(config, [0]).action_space.n


script.ActorCritic = ActorCritic
family.adapt(script, __file__, Config, make_env)
if __name__ == "__main__":
    script.cli()
