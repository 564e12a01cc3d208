"""PPO for continuous actions with feed-forward networks, on gymnax and Brax environments.

Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) with generalized advantage
estimation (Schulman et al. 2015, arXiv 1506.02438). All updates of all seeds are one XLA program.
Deliberate differences from the papers and from most implementations:
- a time limit is not a death: it bootstraps from the value of the true final observation and only
  cuts the trace (Pardo et al. 2018, arXiv 1712.00378);
- the learning rate falls by update, so that an early stop of the epochs does not slow its schedule;
- actions are in units of the environment's bounds: 1 is the upper one, whatever its size. The raw
  sample is stored and learned from; only what the environment receives is clipped or squashed;
- advantages are normalised with the mean and variance of the minibatch over all devices.

Shapes: T steps, N environments and B minibatch per device, A actions, D devices, S seeds.

    python ppo_continuous.py
    python ppo_continuous.py --env-id brax/reacher --policy tanh_gaussian

-161 ± 7 on Pendulum-v1 over 5 seeds, 500k steps each; 198k steps/s on two CPU cores.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10.2,<0.12", "flax>=0.12.8,<0.13", "optax>=0.2.8,<0.3", "distrax>=0.1.9,<0.2",
#     "gymnax>=1.0.1,<1.1", "tyro>=1.0,<2", "wandb>=0.31,<1", "matplotlib>=3.10,<4",
#     "numpy>=2.0,<3", "tqdm>=4.67.1,<5",
# ]
# ///

import contextlib
import dataclasses
import difflib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

# XLA on CPU can wait for itself for ever when loops run side by side, as those of many seeds do.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_cpu_enable_concurrency_optimized_scheduler=false", os.environ.get("XLA_FLAGS", "")]
)

import distrax
import flax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import tqdm
import tyro
from jax.experimental.multihost_utils import process_allgather
from jax.extend.backend import clear_backends

SCRIPT = "ppo_continuous"
LOSSES = "loss/total loss/policy loss/value policy/entropy policy/approx_kl policy/clip_fraction"
COLUMNS = "update seed env_steps episode/return episode/length episode/count eval/return"
COLUMNS += f" {LOSSES} value/explained_variance optim/grad_norm optim/lr time/sps"


# ------------------------------------------------------------------------------------------ config
class ConfigError(Exception):
    """A wrong input. The message says what is wrong, what is allowed and what to change."""


@dataclasses.dataclass(frozen=True)
class Config:
    """PPO for continuous actions with feed-forward networks, on gymnax and Brax environments."""

    env_id: str = "Pendulum-v1"  # a gymnax environment with continuous actions, or brax/<name>
    total_timesteps: int = 500_000  # steps of each seed over all devices, rounded down
    num_envs: int = 16  # parallel environments of each seed over all devices
    num_steps: int = 128  # steps of every environment between two updates
    update_epochs: int = 4  # passes over each rollout
    num_minibatches: int = 16  # gradient steps in each pass
    policy: Literal["gaussian", "tanh_gaussian"] = "gaussian"  # clipped or squashed to the bounds
    hidden_size: int = 64  # width of the dense layers
    lr: float = 1e-3  # learning rate of Adam
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: float = 0.97  # discount
    gae_lambda: float = 0.95  # trace decay of the advantages
    clip_eps: float = 0.2  # clip range of the probability ratio, and of the change in value
    clip_value: bool = False  # clip the value loss as well as the policy loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are scaled down to this global norm
    target_kl: float | None = None  # skip the remaining epochs after one with a larger mean KL
    seed: int = 0  # of everything random
    num_seeds: int = 1  # agents trained side by side in the one program
    num_calls: int = 100  # calls of the compiled program; files and progress wait for the next one
    num_evals: int = 10  # evaluations at equal distances, the last one of the final policy
    eval_episodes: int = 128  # full episodes in each evaluation
    eval_greedy: bool = False  # evaluate the most likely action instead of a sampled one
    run_dir: str = ""  # folder to write; empty: runs/<script>__<env_id>__seed<seed>__<time>
    resume: str = ""  # folder of an interrupted run to finish, with the options it had
    checkpoint_every: int = 5  # calls between two checkpoints; evaluations write one too
    track: bool = False  # send metrics and config to Weights & Biases
    wandb_project: str = "ppo"  # where --track sends them
    wandb_entity: str | None = None  # user or team that owns the project
    distributed: bool = False  # one of several processes, found through SLURM, Kubernetes or TPU
    coordinator: str | None = None  # host:port of process 0, where no cluster is found
    num_processes: int | None = None  # how many there are
    process_id: int | None = None  # which one this is, from 0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            smallest = int(name not in ("seed", "process_id", "ruleset_id"))
            if type(value) is int and value < smallest:
                raise ConfigError(f"{name} = {value}: must be at least {smallest}")
        if self.total_timesteps < self.batch_size:
            raise ConfigError(
                f"total_timesteps = {self.total_timesteps} is less than one update, num_envs *"
                f" num_steps = {self.batch_size}: raise it to that or lower num_envs or num_steps"
            )

    @property
    def batch_size(self) -> int:
        """Environment steps of one update, over all devices."""
        return self.num_envs * self.num_steps

    @property
    def updates_per_call(self) -> int:
        return max(1, self.total_timesteps // self.batch_size // self.num_calls)

    @property
    def num_updates(self) -> int:
        """Updates of the whole training, a multiple of `updates_per_call`."""
        updates = self.total_timesteps // self.batch_size
        return updates - updates % self.updates_per_call


def check_divides(name: str, size: int, parts_name: str, parts: int) -> None:
    """Raises ConfigError, with the nearest numbers that work, unless `parts` divides `size`."""
    if size % parts:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - parts))
        raise ConfigError(
            f"{name} = {size} does not divide by {parts_name} = {parts}: the nearest {parts_name}"
            f" that works is {nearest}, the nearest {name} is {max(1, round(size / parts)) * parts}"
        )


def resolve(config: Config) -> Config:
    """Choose what is left to the environment and check the sizes. Raises ConfigError."""
    check_divides("num_envs", config.num_envs, "devices", jax.device_count())
    per_device = config.batch_size // jax.device_count()
    check_divides("steps per device", per_device, "num_minibatches", config.num_minibatches)
    make_env(config)
    return config


# ------------------------------------------------------------------------------------- environment
def make_env(config: Config) -> tuple[Callable, Callable, tuple[np.ndarray, np.ndarray]]:
    """The one place to edit to bring your own environment. Raises ConfigError for a wrong one.

    Returns reset(keys [N]) -> (obs, env_state), step(keys, env_state, action) -> (obs, env_state,
    reward, terminated, truncated, final_obs), all [N, ...], and the bounds of the actions [A]. A
    step that ends an episode starts the next: obs is its first, final_obs the true next one.
    """
    if config.env_id.startswith("brax/"):
        return make_brax_env(config.env_id)
    if config.env_id not in gymnax.registered_envs:
        nearest = difflib.get_close_matches(config.env_id, gymnax.registered_envs, cutoff=0)
        raise ConfigError(f"unknown env_id {config.env_id}: the nearest are {', '.join(nearest)}")
    env, params = gymnax.make(config.env_id)
    space = env.action_space(params)
    if hasattr(space, "n"):
        raise ConfigError(f"{config.env_id} has discrete actions: use ppo_ff.py")
    low, high = np.broadcast_to(space.low, space.shape), np.broadcast_to(space.high, space.shape)

    def reset(key):
        return env.reset(key, params)

    def step(key, env_state, action):
        action = jnp.clip(action, low, high)
        obs, env_state, *outcome, info = env.step(key, env_state, action, params)
        reward, terminated, truncated = outcome
        final_obs = info["final_observation"]
        return obs, env_state, jnp.float32(reward), terminated, truncated, final_obs

    return jax.vmap(reset), jax.vmap(step), (low, high)


def make_brax_env(env_id: str, time_limit: int = 1000) -> tuple:
    """brax/<name>, with the customary time limit in steps. Raises ConfigError."""
    try:
        import brax.envs
    except ImportError:
        raise ConfigError(f"{env_id} needs Brax: pip install '.[brax]'") from None
    names = [f"brax/{name}" for name in brax.envs._envs]
    if env_id not in names:
        nearest = difflib.get_close_matches(env_id, names, cutoff=0)
        raise ConfigError(f"unknown env_id {env_id}: the nearest are {', '.join(nearest)}")
    env = brax.envs.get_environment(env_id.removeprefix("brax/"))

    def reset(key):
        state = env.reset(key)
        return state.obs, (state, jnp.int32(0))

    def step(key, env_state, action):
        state, time = env_state
        state = env.step(state, jnp.clip(action, -1.0, 1.0))
        terminated, truncated = state.done > 0, time + 1 >= time_limit
        # Brax does not reset itself; its own wrapper would return to one and the same state.
        fresh = (env.reset(key), jnp.int32(0))
        choose = lambda new, old: jnp.where(terminated | truncated, new, old)
        env_state = jax.tree.map(choose, fresh, (state, time + 1))
        return env_state[0].obs, env_state, state.reward, terminated, truncated, state.obs

    high = np.ones(env.action_size, np.float32)
    return jax.vmap(reset), jax.vmap(step), (-high, high)


# ----------------------------------------------------------------------------------------- network
def dense(features: int, scale: float) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))


class ActionDistribution(NamedTuple):
    """Diagonal Gaussian over raw actions. The environment receives `to_env(raw)`.

    A raw action is in units of the bounds: -1 is the lower one, 1 the upper one. "gaussian" is
    clipped by the environment; "tanh_gaussian" is squashed, and its densities are those of
    `to_env(raw)` (Haarnoja et al. 2018, arXiv 1801.01290, appendix C).
    """

    mean: jax.Array  # [B, A]
    log_std: jax.Array  # [A]
    squash: bool
    low: np.ndarray  # [A]
    high: np.ndarray  # [A]

    def to_env(self, raw: jax.Array) -> jax.Array:
        unit = jnp.tanh(raw) if self.squash else raw
        return (self.high + self.low) / 2 + (self.high - self.low) / 2 * unit

    def log_slope(self, raw: jax.Array) -> jax.Array:
        """log |d to_env / d raw|, in a form that does not underflow for large |raw|, [..., A]."""
        return jnp.log((self.high - self.low) / 2) + 2 * (
            jnp.log(2.0) - raw - nn.softplus(-2 * raw)
        )

    def sample_and_log_prob(self, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        raw = self.sample(seed)
        return raw, self.log_prob(raw)

    def sample(self, seed: jax.Array) -> jax.Array:
        return self.gaussian().sample(seed=seed)

    def gaussian(self) -> distrax.Distribution:
        return distrax.Independent(distrax.Normal(self.mean, jnp.exp(self.log_std)), 1)

    def log_prob(self, raw: jax.Array) -> jax.Array:
        """raw [B, A] -> [B]."""
        log_prob = self.gaussian().log_prob(raw)
        return log_prob - self.log_slope(raw).sum(-1) if self.squash else log_prob

    def entropy(self) -> jax.Array:
        """[B], the squashed one by Gauss-Hermite quadrature of the mean log slope."""
        entropy = self.gaussian().entropy()
        if self.squash:
            nodes, weights = np.polynomial.hermite_e.hermegauss(16)
            raw = self.mean + jnp.exp(self.log_std) * nodes.reshape(-1, 1, 1)  # [16, B, A]
            entropy += jnp.tensordot(weights / weights.sum(), self.log_slope(raw).sum(-1), 1)
        return entropy

    def mode(self) -> jax.Array:
        return self.mean


class ActorCritic(nn.Module):
    """Actor and critic with nothing shared; the standard deviation depends on no observation."""

    bounds: tuple[np.ndarray, np.ndarray]
    config: Config

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[ActionDistribution, jax.Array]:
        """obs [B, ...] -> distribution of A actions [B, A], value [B]."""
        low, high = self.bounds
        mean = dense(len(low), 0.01)(self.torso(obs))
        log_std = self.param("log_std", nn.initializers.zeros, low.shape)
        value = dense(1, 1.0)(self.torso(obs)).squeeze(-1)
        squash = self.config.policy == "tanh_gaussian"
        return ActionDistribution(mean, log_std, squash, low, high), value

    def torso(self, obs: jax.Array) -> jax.Array:
        """obs [B, ...] -> features [B, hidden_size]."""
        x, hidden_size = obs.astype(jnp.float32), self.config.hidden_size
        x = nn.tanh(dense(hidden_size, 2**0.5)(x.reshape(len(x), -1)))
        return nn.tanh(dense(hidden_size, 2**0.5)(x))


# ----------------------------------------------------------------------------------------- rollout
class Transition(NamedTuple):
    """One step of every environment; a rollout is T of them."""

    obs: jax.Array  # [N, ...]
    action: jax.Array  # [N, A] raw
    log_prob: jax.Array  # [N]
    value: jax.Array  # [N]
    reward: jax.Array  # [N]
    terminated: jax.Array  # [N] the environment ended the episode: nothing follows
    truncated: jax.Array  # [N] the time limit ended it: the value of final_obs follows
    final_obs: jax.Array  # [N, ...] the true next observation, not the next episode's first

    @property
    def done(self) -> jax.Array:
        return self.terminated | self.truncated


class RunnerState(NamedTuple):
    """All that one update hands to the next. Outside `train` each leaf has [D, S] in front."""

    params: Any
    opt_state: Any
    env_state: Any
    obs: jax.Array  # [N, ...]
    episode_return: jax.Array  # [N] of the episodes under way
    episode_length: jax.Array  # [N]
    update: jax.Array  # [] updates done
    key: jax.Array  # [2] the data of a random key, which a checkpoint can hold


# --------------------------------------------------------------------------------------- advantage
def compute_gae(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) with ends and time limits.

    All arrays are [T, ...]. `next_value` is the value of the true next observation: where an
    episode ended, of its final one. `done` is terminated | truncated. Returns (advantage, target).
    """
    # Only a termination stops the bootstrap; both ends cut the trace.
    delta = reward + gamma * (1.0 - terminated) * next_value - value
    decay = gamma * gae_lambda * (1.0 - done)

    def step(advantage, x):
        delta, decay = x
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(step, jnp.zeros_like(delta[-1]), (delta, decay), reverse=True)
    return advantage, advantage + value


# -------------------------------------------------------------------------------------------- loss
def ppo_loss(params, apply_fn, batch: Transition, advantage, target, config: Config):
    """Clipped surrogate (arXiv 1707.06347, eq. 7), clipped value error and entropy bonus (eq. 9).

    All arrays are [B, ...], the advantage normalised. Returns (loss, metrics), scalars.
    """
    policy, value = apply_fn(params, batch.obs)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob  # [B]
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

    value_error = (value - target) ** 2  # [B]
    if config.clip_value:
        change = jnp.clip(value - batch.value, -config.clip_eps, config.clip_eps)
        value_error = jnp.maximum(value_error, (batch.value + change - target) ** 2)
    value_loss = 0.5 * value_error.mean()

    entropy = policy.entropy().mean()
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    approx_kl = (ratio - 1 - log_ratio).mean()  # http://joschu.net/blog/kl-approx.html
    clip_fraction = (jnp.abs(ratio - 1) > config.clip_eps).mean()
    metrics = (loss, policy_loss, value_loss, entropy, approx_kl, clip_fraction)
    return loss, dict(zip(LOSSES.split(), metrics, strict=True))


# ------------------------------------------------------------------------------------------- train
def shuffle(key: jax.Array, size: int) -> jax.Array:
    """A random permutation of range(size), ten times as fast on CPU as jax.random.permutation.

    Sorts random numbers whose low bits are the index; equal high bits leave a few rows in order.
    """
    low_bits = jnp.uint32(2 ** (size - 1).bit_length() - 1)
    numbers = jax.random.bits(key, (size,), jnp.uint32) & ~low_bits
    return jnp.sort(numbers | jnp.arange(size, dtype=jnp.uint32)) & low_bits


def make_train(config: Config, num_updates: int | None = None) -> tuple[Callable, Callable]:
    """Returns pmapped init(keys [D]) -> state and train(state) -> (state, metrics).

    A call of `train` runs `num_updates` updates (None: the whole training) of all seeds and
    consumes its argument. Metrics are float32 [D, num_updates, S], equal on all devices and NaN
    where an update had nothing to measure. Raises ConfigError for a wrong input.
    """
    config = resolve(config)
    env_reset, env_step, bounds = make_env(config)
    network = ActorCritic(bounds, config)
    num_envs = config.num_envs // jax.device_count()  # N
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))

    def learning_rate(update):
        return jnp.float32(config.lr * (1.0 - config.anneal_lr * update / config.num_updates))

    def init_seed(key):
        params_key, reset_key, key = jax.random.split(key, 3)
        obs, env_state = env_reset(jax.random.split(reset_key, num_envs))
        # The environments of the devices differ, the networks must not.
        params = network.init(jax.lax.all_gather(params_key, "devices")[0], obs)
        opt_state, zeros, update = optimizer.init(params), jnp.zeros(num_envs), jnp.int32(0)
        return RunnerState(params, opt_state, env_state, obs, zeros, zeros, update, key)

    def rollout_step(state, _):
        key, action_key, step_key = jax.random.split(state.key, 3)
        policy, value = network.apply(state.params, state.obs)
        action, log_prob = policy.sample_and_log_prob(seed=action_key)
        step_keys = jax.random.split(step_key, num_envs)
        obs, env_state, *outcome = env_step(step_keys, state.env_state, policy.to_env(action))
        transition = Transition(state.obs, action, log_prob, value, *outcome)
        episode_return = state.episode_return + transition.reward
        episode_length = state.episode_length + 1
        state = state._replace(
            obs=obs,
            env_state=env_state,
            episode_return=episode_return * ~transition.done,
            episode_length=episode_length * ~transition.done,
            key=key,
        )
        ended = (episode_return, episode_length, jnp.ones(num_envs))
        return state, (transition, [jnp.sum(x * transition.done) for x in ended])

    def next_values(params, rollout, last_value):
        """The value of the true next observation of every step, [T, N].

        That is the value of the next step, but not where a time limit cut the episode. Those few
        final observations are gathered N at a time: no time limit, no second pass of the network.
        """
        next_value = jnp.concatenate([rollout.value[1:], last_value[None]])  # [T, N]
        cut = (rollout.truncated & ~rollout.terminated).reshape(-1)  # [T * N]
        rows = jnp.flatnonzero(cut, size=cut.size, fill_value=cut.size)  # the cut ones come first

        def look_up(i, next_value):
            block = jax.lax.dynamic_slice_in_dim(rows, i * num_envs, num_envs)  # [N]
            take = lambda x: x.reshape(cut.size, *x.shape[2:])[block]  # [N, ...]
            _, value = network.apply(params, jax.tree.map(take, rollout.final_obs))
            return next_value.at[block].set(value, mode="drop")

        num_blocks = (cut.sum() + num_envs - 1) // num_envs
        next_value = jax.lax.fori_loop(0, num_blocks, look_up, next_value.reshape(-1))
        return next_value.reshape(rollout.value.shape)

    def update_minibatch(state, minibatch):
        batch, advantage, target = minibatch  # [B, ...]
        # The minibatch is spread over the devices: its mean, variance and gradient are of all.
        advantage -= jax.lax.pmean(advantage.mean(), "devices")
        advantage /= jnp.sqrt(jax.lax.pmean((advantage**2).mean(), "devices")) + 1e-8
        loss_grad = jax.grad(ppo_loss, has_aux=True)
        grads, metrics = loss_grad(state.params, network.apply, batch, advantage, target, config)
        grads, metrics = jax.lax.pmean((grads, metrics), "devices")
        metrics["optim/grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        lr = learning_rate(state.update)
        params = jax.tree.map(lambda param, update: param - lr * update, state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics

    def another_epoch(carry):
        _, epoch, metrics = carry
        kl_limit = jnp.inf if config.target_kl is None else config.target_kl
        return (epoch < config.update_epochs) & (metrics["policy/approx_kl"] <= kl_limit)

    def update_epoch(carry, samples):
        state, epoch, _ = carry
        key, shuffle_key = jax.random.split(state.key)
        rows = shuffle(shuffle_key, num_envs * config.num_steps).reshape(config.num_minibatches, -1)
        minibatches = jax.tree.map(lambda x: x[rows], samples)  # [num_minibatches, B, ...]
        state, metrics = jax.lax.scan(update_minibatch, state._replace(key=key), minibatches)
        return state, epoch + 1, jax.tree.map(jnp.mean, metrics)

    def update_step(state, _):
        state, (rollout, ended) = jax.lax.scan(rollout_step, state, None, config.num_steps)
        _, last_value = network.apply(state.params, state.obs)  # [N]
        next_value = next_values(state.params, rollout, last_value)  # [T, N]
        steps = (rollout.reward, rollout.value, next_value, rollout.terminated, rollout.done)
        advantage, target = compute_gae(*steps, config.gamma, config.gae_lambda)
        explained = 1 - jnp.var(target - rollout.value) / jnp.var(target)
        # The loss does not need these: spare the shuffle.
        batch = rollout._replace(reward=None, terminated=None, truncated=None, final_obs=None)
        samples = (batch, advantage, target)
        samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)  # [T * N, ...]

        metrics = dict.fromkeys([*LOSSES.split(), "optim/grad_norm"], jnp.float32(0))
        run_epoch = lambda carry: update_epoch(carry, samples)
        carry = jax.lax.while_loop(another_epoch, run_epoch, (state, 0, metrics))
        state, _, metrics = carry
        return_sum, length_sum, count = jax.lax.psum(jax.tree.map(jnp.sum, ended), "devices")
        metrics["episode/return"] = return_sum / count  # 0 / 0 = NaN where no episode ended
        metrics["episode/length"] = length_sum / count
        metrics["episode/count"] = count
        metrics["value/explained_variance"] = jax.lax.pmean(explained, "devices")
        metrics["optim/lr"] = learning_rate(state.update)
        return state._replace(update=state.update + 1), metrics

    def init(key):
        # One seed after the other: XLA on CPU can hang in the QR of a stack of matrices.
        return jax.lax.map(init_seed, jax.random.split(jax.random.key_data(key), config.num_seeds))

    def train(state):
        update_seeds = jax.vmap(update_step, in_axes=(0, None))
        return jax.lax.scan(update_seeds, state, None, num_updates or config.num_updates)

    train = jax.pmap(train, axis_name="devices", donate_argnums=0)
    return jax.pmap(init, axis_name="devices"), train


# ---------------------------------------------------------------------------------------- evaluate
def make_evaluate(config: Config) -> Callable:
    """Returns evaluate(params, key) -> returns [episodes], full episodes in fresh environments."""
    config = resolve(config)
    env_reset, env_step, bounds = make_env(config)
    network = ActorCritic(bounds, config)

    def unfinished(carry):
        _, done = carry
        return ~done.all()

    def eval_step(carry):
        state, done = carry
        key, action_key, step_key = jax.random.split(state.key, 3)
        policy, _ = network.apply(state.params, state.obs)
        action = policy.mode() if config.eval_greedy else policy.sample(seed=action_key)
        step_keys = jax.random.split(step_key, config.eval_episodes)
        obs, env_state, *outcome = env_step(step_keys, state.env_state, policy.to_env(action))
        reward, terminated, truncated, _ = outcome
        episode_return = state.episode_return + reward * ~done
        state = state._replace(obs=obs, env_state=env_state, episode_return=episode_return, key=key)
        return state, done | terminated | truncated

    def evaluate(params, key):
        key, reset_key = jax.random.split(jax.random.key_data(key))
        obs, env_state = env_reset(jax.random.split(reset_key, config.eval_episodes))
        zeros = jnp.zeros(config.eval_episodes)
        state = RunnerState(params, None, env_state, obs, zeros, zeros, 0, key)
        state, _ = jax.lax.while_loop(unfinished, eval_step, (state, zeros > 0))
        return state.episode_return

    return evaluate


# -------------------------------------------------------------------------------------------- main
def describe(config: Config) -> dict[str, Any]:
    """Every option and what else must be the same to continue a run."""
    return {"script": SCRIPT, "num_devices": jax.device_count(), **vars(config)}


def save(path: Path, config: Config, state: dict[str, Any]) -> None:
    """Write a checkpoint, under another name first: a crash leaves the previous one whole."""
    content = flax.serialization.to_bytes({"config": describe(config), "state": state})
    if jax.process_index() == 0:
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:  # of a full disk
            temporary.unlink(missing_ok=True)


def load(path: Path, config: Config | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options and the state that `save` wrote. Raises ConfigError: damaged, or not config's."""
    try:
        saved = flax.serialization.msgpack_restore(path.read_bytes())
        options, state = saved["config"], saved["state"]
    except Exception as error:
        raise ConfigError(f"{path} is missing, cut short or no checkpoint: {error!r}") from None
    for name, value in describe(config).items() if config else ():
        if name == "run_dir":  # what follows does not change the result
            break
        if options.get(name) != value:
            raise ConfigError(f"{path} has {name} = {options.get(name)}, this run has {value}")
    changed = {*RunnerState._fields, "eval_return"} ^ {*state}
    if config and changed:
        raise ConfigError(f"{path} is of another version of {SCRIPT}.py: {sorted(changed)} differ")
    return options, state


def open_run(config: Config) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Returns the run folder and, to continue, its last and best state. Raises ConfigError."""
    name = f"{SCRIPT}__{config.env_id}__seed{config.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(config.resume or config.run_dir or f"runs/{name.replace('/', '-')}")
    last, best, update = {}, {}, 0
    if config.resume:
        _, last = load(run_dir / "last.msgpack", config)
        if (run_dir / "best.msgpack").exists():
            _, best = load(run_dir / "best.msgpack", config)
        update = last["update"].max()
        if update == config.num_updates and (run_dir / "summary.json").exists():
            raise ConfigError(f"{run_dir} is finished: start a new run with another --run-dir")
    elif (run_dir / "last.msgpack").exists():
        raise ConfigError(f"{run_dir} already holds a run: continue it with --resume {run_dir}")
    if jax.process_index() > 0:
        return run_dir, last, best
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        versions = {name: metadata.version(name) for name in ("jax", "flax", "optax", "gymnax")}
        about = {**describe(config), "versions": versions, "device": jax.devices()[0].device_kind}
        (run_dir / "config.json").write_text(json.dumps(about, indent=2))
        table, rows = run_dir / "metrics.csv", 1 + update * config.num_seeds
        if last:
            lines = table.read_bytes().splitlines(keepends=True)[:rows]
            os.truncate(table, sum(map(len, lines)))  # in place: a full disk loses no row
        else:
            table.write_text(COLUMNS.replace(" ", ",") + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {run_dir}, choose another --run-dir: {error}") from None
    return run_dir, last, best


def write_rows(run_dir: Path, config: Config, update: int, metrics: dict, tracker: Any) -> None:
    """Append metrics [updates, S], the last ones of a call, to metrics.csv and to the tracker."""
    if jax.process_index() > 0:
        return
    with open(run_dir / "metrics.csv", "a") as file:
        for i, seed in np.ndindex(metrics["time/sps"].shape):
            number = update + 1 + i - len(metrics["time/sps"])
            row = {"update": number, "seed": seed, "env_steps": number * config.batch_size}
            row |= {k: float(x[i, seed]) for k, x in metrics.items() if np.isfinite(x[i, seed])}
            file.write(",".join(str(row.get(name, "")) for name in COLUMNS.split()) + "\n")
            if config.track:
                suffix = f"/seed{seed}" if config.num_seeds > 1 else ""
                series = {name + suffix: x for name, x in row.items() if "/" in name}
                tracker.log(series, step=row["env_steps"])


def plot_curve(run_dir: Path, config: Config) -> None:
    """Write learning_curve.png: mean over seeds, shaded one standard deviation to either side."""
    table = np.genfromtxt(run_dir / "metrics.csv", delimiter=",", names=True, deletechars="")
    axes = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained").subplots()
    for name, style in (("episode/return", "-"), ("eval/return", "o--")):
        steps, returns = (table[x].reshape(-1, config.num_seeds) for x in ("env_steps", name))
        parts = np.array_split(np.flatnonzero(np.isfinite(returns).any(axis=1)), 100)
        returns = np.ma.masked_invalid(returns)  # an update may end no episode of a seed
        points = [(steps[part], returns[part].mean(axis=0)) for part in parts if len(part)]
        curve = [(step.mean(), seeds.mean(), seeds.std()) for step, seeds in points]
        steps, mean, spread = np.array(curve or np.empty((0, 3))).T
        axes.plot(steps, mean, style, label=name)
        axes.fill_between(steps, mean - spread, mean + spread, alpha=0.2)
    axes.set(xlabel="environment steps", ylabel="return", title=f"{SCRIPT} on {config.env_id}")
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(run_dir / "learning_curve.png", dpi=150)


def report(run_dir: Path, config: Config, summary: dict[str, Any], tracker: Any) -> None:
    """Write summary.json and learning_curve.png, close the tracker, and say what was reached."""
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    plot_curve(run_dir, config)
    if config.track:
        tracker.summary.update(summary)
        for file in (globals().get("__file__"), str(run_dir / "learning_curve.png")):
            if file:  # a notebook's cell has none
                tracker.log_artifact(file, name=Path(file).stem, type="file")
        tracker.finish()
    print(
        f"evaluation return {summary['eval_return_mean']:.4g} ± {summary['eval_return_std']:.3g},"
        f" {summary['steps_per_second']:,.0f} steps/s, compiled in"
        f" {summary['compile_seconds']:.1f} s, written to {run_dir}"
    )


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are put in a list, for the end of the call. A second one is not caught."""
    signals = []
    catch = lambda number, _: signals.append(number) or signal.signal(number, handlers[number])
    handlers = {n: signal.signal(n, catch) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(config: Config) -> dict[str, Any]:
    """Train, evaluate and write the run folder. Returns what summary.json holds.

    Raises ConfigError for a wrong input; SystemExit after Ctrl-C or SIGTERM, or if a loss is NaN.
    """
    if config.distributed:
        clear_backends()  # which the import of the environments started, for this process alone
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_id)
    config = resolve(config)
    run_dir, last, best = open_run(config)
    seeds, devices, per_call = config.num_seeds, jax.device_count(), config.updates_per_call
    start, train_seconds, key = time.perf_counter(), 0.0, jax.random.key(config.seed)
    init, train = make_train(config, per_call)
    keys = jax.random.split(key, devices).reshape(jax.process_count(), -1)
    state = init(keys[jax.process_index()])
    if last:
        place = lambda x, like: jax.make_array_from_callback(x.shape, like.sharding, x.__getitem__)
        saved = {name: last[name] for name in state._fields}
        state = jax.tree.map(place, flax.serialization.from_state_dict(state, saved), state)

    def to_host(state, returns):  # [D, S, ...] over all processes
        arrays = flax.serialization.to_state_dict(process_allgather(state, tiled=True))
        return {**arrays, "eval_return": np.tile(returns, (devices, 1))}

    def local(tree):  # [S, ...], equal on all devices
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0], tree)

    def eval_keys(number):
        return jax.random.split(jax.random.fold_in(key, number), seeds)

    if jax.process_count() == 1:  # of several, pmap can compile only when it is called
        train = train.lower(state).compile()
    evaluate = jax.jit(jax.vmap(make_evaluate(config)))
    evaluate = evaluate.lower(local(state.params), eval_keys(0)).compile()
    compile_seconds = time.perf_counter() - start
    tracker = None
    if config.track and jax.process_index() == 0:
        import wandb  # not above: it takes a second

        account = {"project": config.wandb_project, "entity": config.wandb_entity, "dir": run_dir}
        tracker = wandb.init(**account, id=run_dir.name, resume="allow", config=describe(config))
    if not last:
        last = to_host(state, np.full(seeds, -np.inf))
        save(run_dir / "last.msgpack", config, last)
    best, returns = best or last, last["eval_return"][0]  # [S]
    first = update = int(last["update"].max())
    total, initial = config.num_updates * config.batch_size, first * config.batch_size
    shown = {"unit": " steps", "unit_scale": True, "disable": jax.process_index() > 0}
    with caught_signals() as signals, tqdm.tqdm(total=total, initial=initial, **shown) as bar:
        while update < config.num_updates:
            update, call_start = update + per_call, time.perf_counter()
            state, metrics = train(state)
            metrics = local(metrics)  # [per_call, S]
            call_seconds = time.perf_counter() - call_start
            train_seconds += call_seconds
            metrics["time/sps"], metrics["eval/return"] = np.full((2, per_call, seeds), np.nan)
            metrics["time/sps"][-1] = per_call * config.batch_size * seeds / call_seconds
            is_finite = np.isfinite(metrics["optim/grad_norm"]).all(axis=1)  # [per_call]
            leaves = jax.tree.leaves(local(state.params))  # wrong before their gradient is
            is_finite[-1] &= all(np.isfinite(x).all() for x in leaves)
            evals_by = lambda update: update * config.num_evals // config.num_updates
            is_eval = is_finite.all() and evals_by(update) > evals_by(update - per_call)
            if is_eval:
                returns = np.asarray(evaluate(local(state.params), eval_keys(update))).mean(axis=1)
                metrics["eval/return"][-1] = returns
            write_rows(run_dir, config, update, metrics, tracker)
            recent = metrics["episode/return"][-1]  # [S], NaN where no episode ended
            recent = np.nanmean(recent) if np.isfinite(recent).any() else np.nan
            bar.set_postfix_str(f"update {update}, return {recent:.4g}", refresh=False)
            bar.update(per_call * config.batch_size)
            if not is_finite.all():
                broken = update - per_call + 1 + is_finite.argmin()
                name = f"{run_dir}/last.msgpack"
                sys.exit(f"error: update {broken} is not finite, {name} is from before: lower --lr")
            stop = process_allgather(np.array([len(signals)])).any()
            if is_eval or stop or update // per_call % config.checkpoint_every == 0:
                last = to_host(state, returns)
                if is_eval:  # for each seed, what it has been evaluated best with
                    better = (last["eval_return"] > best["eval_return"]).T  # [S, D]
                    pick = lambda new, old, better=better: np.where(better, new.T, old.T).T
                    best = jax.tree.map(pick, last, best)
                    save(run_dir / "best.msgpack", config, best)
                save(run_dir / "last.msgpack", config, last)
            if stop and update < config.num_updates:
                print(f"interrupted: continue with  python {SCRIPT}.py --resume {run_dir}")
                sys.exit(128 + max([0, *signals]))

    # The absolute metric (Gorsane et al. 2022, arXiv 2209.10485): ten times as many new episodes.
    params = flax.serialization.from_state_dict(state.params, best["params"])
    params = jax.tree.map(lambda x: x[0], params)
    absolute = [evaluate(params, eval_keys(update + n)) for n in range(1, 11)]
    summary = {
        "script": SCRIPT,
        "env_id": config.env_id,
        "env_steps": total,
        "num_seeds": seeds,
        "eval_return_mean": float(returns.mean()),
        "eval_return_std": float(returns.std()),
        "eval_return_per_seed": returns.tolist(),
        "best_eval_return_mean": float(best["eval_return"].mean()),
        "eval_episodes": config.eval_episodes,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "steps_per_second": (total - initial) * seeds / max(train_seconds, 1e-9),
        "device": jax.devices()[0].device_kind,
        "num_devices": devices,
        "absolute_return_mean": float(np.mean(absolute)),
    }
    if jax.process_index() == 0:
        report(run_dir, config, summary, tracker)
    return summary


def cli() -> None:
    """Run from the command line. A wrong input ends with exit code 2 and no traceback."""
    # tyro takes 1_000_000 for an integer, but not 1e6.
    is_int = lambda word: re.fullmatch(r"\d+(\.\d+)?e\d+", word) and float(word).is_integer()
    words = [f"{float(word):.0f}" if is_int(word) else word for word in sys.argv[1:]]
    try:
        config = tyro.cli(Config, args=words)
        if config.resume:  # is enough on its own: the checkpoint knows the other options
            options, _ = load(Path(config.resume, "last.msgpack"))
            options = {k: v for k, v in options.items() if k in vars(config)}
            config = tyro.cli(Config, default=Config(**options), args=words)
        main(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        sys.exit(f"error: {error}; what was saved before is whole")
    except KeyboardInterrupt:  # while compiling: there is nothing to save
        sys.exit(130)


if __name__ == "__main__": cli()  # fmt: skip
