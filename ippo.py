"""Independent PPO for many agents, on JaxMARL environments and a small one of its own.

Every agent learns from its own observation, action and reward, as if alone (de Witt et al. 2020,
arXiv 2011.09533), with proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) and
generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438). One network serves all
agents and reads who is asking, or each agent has a network of its own: the same code, with G
networks side by side. Deliberate differences from the papers and from most implementations:
- a time limit is not a death. JaxMARL reports both as `done`: an episode that would go on if its
  clock stood at zero was cut by the time limit, and bootstraps from its true final observation;
- an agent whose part of the episode is over while others play is left out of the loss;
- actor and critic have their own optimizer, clipping and epochs; `--target-kl` stops the actor's.
  They run side by side, and the one that is ready first waits;
- observations are flattened and padded with zeros to the largest, but for images of one size;
  actions are padded, too: what an agent does not have, or may not do now, is masked out of samples,
  densities, entropy and gradients.

Shapes: T steps, N environments per device, K agents, G networks (1 or K), R rows of each network
(N * K / G, agent by agent), F features, B minibatch, A actions, D devices, S seeds.

    python ippo.py
    python ippo.py --env-id MPE_simple_tag_v3 --no-share-parameters

-51.9 ± 0.1 on MPE_simple_spread_v3 over 3 seeds, 1M steps each; 72k steps/s on two CPU cores.
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
import functools
import importlib.util
import json
import math
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
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import tqdm
import tyro
from gymnax.environments import spaces
from jax.experimental.multihost_utils import process_allgather
from jax.extend.backend import clear_backends

SCRIPT = "ippo"
LOSSES = "loss/total loss/policy loss/value policy/entropy policy/approx_kl policy/clip_fraction"
COLUMNS = "update seed env_steps episode/return episode/length episode/count eval/return"
COLUMNS += f" {LOSSES} value/explained_variance optim/grad_norm optim/lr time/sps"
COLUMNS += " actor/epochs critic/epochs"


# ------------------------------------------------------------------------------------------ config
class ConfigError(Exception):
    """A wrong input. The message says what is wrong, what is allowed and what to change."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Independent PPO for many agents, on JaxMARL environments and a small one of its own."""

    env_id: str = "auto"  # rings or one of JaxMARL; auto: MPE_simple_spread_v3 if that is installed
    total_timesteps: int = 1_000_000  # steps of each seed over all devices, rounded down
    num_envs: int = 16  # parallel environments of each seed over all devices
    num_steps: int = 128  # steps of every environment between two updates
    share_parameters: bool = True  # one network that is told the agent, or one for each agent
    actor_epochs: int = 2  # passes of the actor over each rollout
    critic_epochs: int = 2  # passes of the critic over each rollout
    num_minibatches: int = 4  # gradient steps in each pass
    network: Literal["auto", "mlp", "cnn"] = "auto"  # auto: cnn for [H, W, C] observations
    hidden_size: int = 64  # width of the dense layers
    optimizer: Literal["adam", "adamw", "nadam", "rmsprop", "lion", "sgd"] = "adam"  # of optax
    actor_lr: float = 3e-3  # learning rate of the actor
    critic_lr: float = 3e-3  # learning rate of the critic
    anneal_lr: bool = True  # let the learning rate fall linearly to zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # trace decay of the advantages
    clip_eps: float = 0.2  # clip range of the probability ratio, and of the change in value
    clip_value: bool = False  # clip the value loss as well as the policy loss
    ent_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # gradients are scaled down to this global norm
    target_kl: float | None = None  # skip the remaining epochs after one with a larger mean KL
    best_metric: str = "team"  # the return in eval/return and best.msgpack: team, worst or an agent
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
    if config.env_id == "auto":
        found = importlib.util.find_spec("jaxmarl")
        config = dataclasses.replace(config, env_id="MPE_simple_spread_v3" if found else "rings")
    check_divides("num_envs", config.num_envs, "devices", jax.device_count())
    _, _, agents = make_env(config)
    rows = config.batch_size // jax.device_count() * len(agents.names) // agents.num_networks
    check_divides("rows of a network", rows, "num_minibatches", config.num_minibatches)
    if config.best_metric not in ("team", "worst", *agents.names):
        names = ", ".join(agents.names)
        raise ConfigError(f"unknown best_metric {config.best_metric}: team, worst, {names}")
    return config


# ------------------------------------------------------------------------------------- environment
class Rings:
    """Three agents, each on a ring of its own: the built-in environment, with JaxMARL's methods.

    Agent k walks on 3 + k cells and sees, one-hot, how many cells ahead its goal is. It can step
    back, stay or step forward, but action a is move (a + k) mod 3 of these: what is right for one
    agent is wrong for the others. The step onto the goal pays 1 and ends the agent's part, any
    other costs 0.2; the time limit is 8 steps. From d steps away the best return is 1.2 - 0.2 d, on
    average 1 + 14 / 15 + 0.9 for the three agents: 2.833 for the team.
    """

    agents = ("ring_3", "ring_4", "ring_5")
    time_limit = 8

    class State(NamedTuple):
        ahead: jax.Array  # [K] cells from the agent to its goal
        step: jax.Array  # []

    def action_space(self, agent: str) -> spaces.Discrete:
        return spaces.Discrete(3)

    def see(self, state: State) -> dict[str, jax.Array]:
        return {name: jax.nn.one_hot(state.ahead[k], 3 + k) for k, name in enumerate(self.agents)}

    def reset(self, key):
        state = self.State(jax.random.randint(key, (3,), 1, 3 + jnp.arange(3)), jnp.int32(0))
        return self.see(state), state

    def step_env(self, key, state, actions):
        k = jnp.arange(3)
        move = (jnp.stack([actions[name] for name in self.agents]) + k) % 3 - 1
        state = self.State((state.ahead - move * (state.ahead > 0)) % (3 + k), state.step + 1)
        there, late = state.ahead == 0, state.step >= self.time_limit
        reward = {name: jnp.where(there[k], 1.0, -0.2) for k, name in enumerate(self.agents)}
        done = {name: there[k] | late for k, name in enumerate(self.agents)}
        return self.see(state), state, reward, done | {"__all__": there.all() | late}, {}


class Observation(NamedTuple):
    """What the agents see; the leading axes are [K] in an environment, [G, R] outside."""

    view: jax.Array  # [..., F] or [..., H, W, F], the agent one-hot behind it if it shares
    mask: jax.Array  # [..., A] actions that exist and may be chosen, or components that exist
    active: jax.Array  # [...] False from the agent's own end until the episode ends for all


class Agents(NamedTuple):
    """What the networks must know of an environment."""

    names: tuple[str, ...]  # K of them
    num_networks: int  # G
    num_actions: int  # A, of the agent that has most
    continuous: bool


def load_env(env_id: str) -> Any:
    """An environment with the methods of JaxMARL's MultiAgentEnv. Raises ConfigError."""
    if env_id == "rings":
        return Rings()
    try:
        with contextlib.redirect_stdout(None):  # it tells which of its parts are missing
            import jaxmarl
            from jaxmarl.environments.overcooked import overcooked_layouts
            from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO
    except ImportError:
        raise ConfigError(f"{env_id} needs JaxMARL: pip install '.[marl]', or rings") from None
    options = {name: {} for name in ("rings", *jaxmarl.registered_envs)}
    options |= {f"overcooked/{name}": {"layout": x} for name, x in overcooked_layouts.items()}
    maps = MAP_NAME_TO_SCENARIO.items()
    options |= {f"HeuristicEnemySMAX/{name}": {"scenario": x} for name, x in maps}
    if env_id not in options:
        nearest = difflib.get_close_matches(env_id, options, cutoff=0)
        raise ConfigError(f"unknown env_id {env_id}: the nearest are {', '.join(nearest)}")
    return jaxmarl.make(env_id.split("/")[0], **options[env_id])


def rewind(env_state: Any) -> Any:
    """The same state with its clocks at zero: what ends an episode now is no time limit."""

    def at_zero(path, x):
        clocks = ("step", "steps", "time", "outer_t")
        return jnp.zeros_like(x) if path and getattr(path[-1], "name", None) in clocks else x

    return jax.tree_util.tree_map_with_path(at_zero, env_state)


def make_env(config: Config) -> tuple[Callable, Callable, Agents]:
    """The one place to edit to bring your own environment. Raises ConfigError for a wrong one.

    Returns reset(keys [N]) -> (obs, env_state), step(keys, env_state, action) -> (obs, env_state,
    reward, terminated, truncated, final_obs), all but env_state [G, R, ...], and what the networks
    must know. A step that ends the episode of all agents starts the next: obs is its first,
    final_obs the true next observation. Continuous actions are in units of the bounds: -1 is the
    lower one, 1 the upper one, and what lies outside is clipped.
    """
    env = load_env(config.env_id)
    names, num_networks = tuple(env.agents), 1 if config.share_parameters else len(env.agents)
    action_spaces = [env.action_space(name) for name in names]
    continuous = not hasattr(action_spaces[0], "n")
    if any(hasattr(s, "n") == continuous or len(s.shape) != continuous for s in action_spaces):
        raise ConfigError(f"{config.env_id} mixes kinds of actions, which ippo.py does not take")
    sizes = [int(space.shape[0] if continuous else space.n) for space in action_spaces]
    exists = np.arange(max(sizes)) < np.array(sizes)[:, None]  # [K, A]
    ids = np.eye(len(names), dtype=np.float32)[:, : len(names) * config.share_parameters]  # [K, 0]
    first_obs, first_state = jax.eval_shape(env.reset, jax.random.key(0))
    shapes = {first_obs[name].shape for name in names}
    image = len(shapes) == 1 and len(min(shapes)) == 3 and config.network != "mlp"
    if config.network == "cnn" and not image:
        raise ConfigError(f"{config.env_id} has no observations [H, W, C]: use --network mlp")
    num_features = max(map(math.prod, shapes))
    # Hanabi has another name for it; most environments have no masks at all.
    legal = getattr(env, "get_legal_moves", getattr(env, "get_avail_actions", None))
    has_masks = False
    with contextlib.suppress(NotImplementedError):
        has_masks = bool(legal and not continuous and jax.eval_shape(legal, first_state))

    def pad(x, size):
        return jnp.pad(jnp.ravel(x), (0, size - x.size))

    def see(x, agent_id):
        x = jnp.float32(x) if image else pad(jnp.float32(x), num_features)
        agent_id = jnp.broadcast_to(agent_id, (*x.shape[:-1], agent_id.size))
        return jnp.concatenate([x, agent_id], axis=-1)

    def observe(obs, env_state, active):
        view = jnp.stack([see(obs[name], ids[k]) for k, name in enumerate(names)])
        mask = jnp.array(exists)
        if has_masks:
            may = legal(env_state)
            mask &= jnp.stack([pad(may[name], max(sizes)) > 0 for name in names])
        return Observation(view, mask, active)

    def to_env(action, k):
        if not continuous:
            return action[k]
        low, high = action_spaces[k].low, action_spaces[k].high
        return low + (high - low) * (jnp.clip(action[k, : sizes[k]], -1.0, 1.0) + 1) / 2

    def reset(key):
        obs, env_state = env.reset(key)
        active = jnp.ones(len(names), bool)
        return observe(obs, env_state, active), (env_state, active)

    def step(key, env_state, action):
        step_key, reset_key = jax.random.split(key)
        before, active = env_state
        actions = {name: to_env(action, k) for k, name in enumerate(names)}
        obs, after, rewards, done, _ = env.step_env(step_key, before, actions)
        _, _, _, done_anyway, _ = env.step_env(step_key, rewind(before), actions)
        reward = jnp.stack([jnp.float32(rewards[name]) for name in names]) * active  # [K]
        # SMAX pays the dead for the victory of their team: its agents end together.
        alone = "SMAX" not in config.env_id
        ends = lambda done: jnp.stack([done[name] & alone for name in names]) | done["__all__"]
        terminated = ends(done) & ends(done_anyway) & active
        truncated = ends(done) & ~ends(done_anyway) & active
        final_obs = observe(obs, after, active & ~ends(done))
        # Neither does step_env reset, nor does JaxMARL's step keep the final observation.
        choose = lambda new, old: jnp.where(done["__all__"], new, old)
        goes_on = final_obs, (after, final_obs.active)
        obs, env_state = jax.tree.map(choose, reset(reset_key), goes_on)
        return obs, env_state, reward, terminated, truncated, final_obs

    def to_rows(x):  # [K, N, ...] -> [G, R, ...]
        return x.reshape(num_networks, -1, *x.shape[2:])

    def reset_all(keys):
        obs, env_state = jax.vmap(reset, out_axes=(1, 0))(keys)
        return jax.tree.map(to_rows, obs), env_state

    def step_all(keys, env_state, action):
        action = action.reshape(len(names), -1, *action.shape[2:])  # [K, N, ...]
        out_axes = (1, 0, 1, 1, 1, 1)
        obs, env_state, *outcome = jax.vmap(step, (0, 0, 1), out_axes)(keys, env_state, action)
        return jax.tree.map(to_rows, obs), env_state, *jax.tree.map(to_rows, outcome)

    return reset_all, step_all, Agents(names, num_networks, max(sizes), continuous)


# ----------------------------------------------------------------------------------------- network
def dense(features: int, scale: float) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))


def patches(image: jax.Array, size: int) -> jax.Array:
    """Neighbourhoods of [B, H, W, C] as [B, H - size + 1, W - size + 1, size * size * C].

    A dense layer on them is an unpadded convolution, whose gradient XLA on CPU computes faster.
    """
    height, width = image.shape[1] - size + 1, image.shape[2] - size + 1
    shifts = [(i, j) for i in range(size) for j in range(size)]
    return jnp.concatenate([image[:, i : i + height, j : j + width] for i, j in shifts], axis=-1)


class Gaussian(distrax.Normal):
    """Diagonal Gaussian; the components that do not exist count for nothing."""

    def __init__(self, mean: jax.Array, log_std: jax.Array, mask: jax.Array):
        super().__init__(mean, jnp.exp(log_std))  # [..., A]
        self.mask = mask  # [..., A]

    def sample_and_log_prob(self, *, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        action = self.sample(seed=seed)
        return action, self.log_prob(action)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return jnp.where(self.mask, super().log_prob(action), 0.0).sum(-1)

    def entropy(self) -> jax.Array:
        return jnp.where(self.mask, super().entropy(), 0.0).sum(-1)


def make_policy(outputs: jax.Array, mask: jax.Array) -> distrax.Categorical | Gaussian:
    """The distribution of actions, from what the actor returns and the mask [..., A]."""
    if isinstance(outputs, tuple):
        return Gaussian(*outputs, mask)
    # Finite, so that 0 * log 0 is 0 in the entropy; exp of it is 0, and so is its gradient.
    return distrax.Categorical(jnp.where(mask, outputs, -1e9))


class Head(nn.Module):
    """The actor or the critic, with its torso."""

    num_outputs: int
    scale: float  # of the initial weights of the last layer
    config: Config
    with_std: bool = False

    @nn.compact
    def __call__(self, x: jax.Array):
        """view [B, ...] -> outputs [B, num_outputs], and with_std the log_std of each."""
        hidden_size = self.config.hidden_size
        if x.ndim == 4:
            x = dense(16, 2**0.5)(patches(x, 3))  # [B, H - 2, W - 2, 16]
            x = nn.relu(nn.LayerNorm()(x)).reshape(len(x), -1)
            x = nn.relu(nn.LayerNorm()(dense(hidden_size, 2**0.5)(x)))
        else:
            x = nn.tanh(dense(hidden_size, 2**0.5)(x))
            x = nn.tanh(dense(hidden_size, 2**0.5)(x))
        outputs = dense(self.num_outputs, self.scale)(x)
        if not self.with_std:
            return outputs
        log_std = self.param("log_std", nn.initializers.zeros, outputs.shape[-1:])
        return outputs, jnp.broadcast_to(log_std, outputs.shape)


class ActorCritic(nn.Module):
    """Actor and critic with nothing shared."""

    agents: Agents
    config: Config

    @nn.compact
    def __call__(self, obs: Observation) -> tuple[distrax.Categorical | Gaussian, jax.Array]:
        """obs [B, ...] -> policy over A [B], value [B]."""
        size, continuous = self.agents.num_actions, self.agents.continuous
        outputs = Head(size, 0.01, self.config, continuous, name="actor")(obs.view)
        value = Head(1, 1.0, self.config, name="critic")(obs.view).squeeze(-1)
        return make_policy(outputs, obs.mask), value


# ----------------------------------------------------------------------------------------- rollout
class Transition(NamedTuple):
    """One step of every environment; a rollout is T of them."""

    obs: Observation  # [G, R, ...]
    action: jax.Array  # [G, R] or [G, R, A]
    log_prob: jax.Array  # [G, R]
    value: jax.Array  # [G, R]
    reward: jax.Array  # [G, R]
    terminated: jax.Array  # [G, R] the environment ended the agent's episode: nothing follows
    truncated: jax.Array  # [G, R] the time limit ended it: the value of final_obs follows
    final_obs: Observation  # [G, R, ...] the true next one, not the next episode's first

    @property
    def done(self) -> jax.Array:
        return self.terminated | self.truncated


class Episode(NamedTuple):
    """What an agent's episodes came to; of those under way, so far."""

    total: jax.Array  # the undiscounted return
    length: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_reward: jax.Array

    def add(self, reward, terminated, truncated, active) -> "Episode":
        """One more step of the agents that are still in it."""
        new = Episode(self.total + reward, self.length + 1, terminated, truncated, reward)
        return jax.tree.map(lambda x, y: jnp.where(active, jnp.float32(x), y), new, self)


class Hyper(NamedTuple):
    """Numbers that may differ between seeds: put [D, S] arrays into the state that init returns."""

    actor_lr: jax.Array
    critic_lr: jax.Array
    gamma: jax.Array
    gae_lambda: jax.Array
    clip_eps: jax.Array
    ent_coef: jax.Array


class RunnerState(NamedTuple):
    """All that one update hands to the next. Outside `train` each leaf has [D, S] in front."""

    params: Any  # {"actor", "critic"}, with [G] in front
    opt_state: Any  # likewise
    hyper: Hyper  # [] each
    env_state: Any
    obs: Observation  # [G, R, ...]
    episode: Episode  # [G, R] each, of the episodes under way
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
def ppo_loss(params, apply_fn, batch: Transition, advantage, target, weight, config: Config, hyper):
    """Clipped surrogate (arXiv 1707.06347, eq. 7), clipped value error and entropy bonus (eq. 9).

    All arrays are [B, ...], the advantage normalised, `weight` 0 for inactive agents and 1 on
    average. Returns (loss, metrics), scalars. Actor and critic share no parameter, so that each
    has the gradient of its own part of the sum.
    """
    policy, value = apply_fn(params, batch.obs)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob  # [B]
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - hyper.clip_eps, 1 + hyper.clip_eps)
    surrogate = jnp.minimum(ratio * advantage, clipped_ratio * advantage)
    policy_loss = -(weight * surrogate).mean()

    value_error = (value - target) ** 2  # [B]
    if config.clip_value:
        change = jnp.clip(value - batch.value, -hyper.clip_eps, hyper.clip_eps)
        value_error = jnp.maximum(value_error, (batch.value + change - target) ** 2)
    value_loss = 0.5 * (weight * value_error).mean()

    entropy = (weight * policy.entropy()).mean()
    loss = policy_loss + value_loss - hyper.ent_coef * entropy
    approx_kl = (weight * (ratio - 1 - log_ratio)).mean()  # http://joschu.net/blog/kl-approx.html
    clip_fraction = (weight * (jnp.abs(ratio - 1) > hyper.clip_eps)).mean()
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
    env_reset, env_step, agents = make_env(config)
    network = ActorCritic(agents, config)
    apply_one = lambda params, obs: network.apply({"params": params}, obs)
    apply_all = jax.vmap(apply_one)  # params [G], obs [G, R]
    num_envs = config.num_envs // jax.device_count()  # N
    num_rows = num_envs * len(agents.names) // agents.num_networks  # R
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    options = {"eps": 1e-5} if config.optimizer in ("adam", "adamw", "nadam") else {}
    optimizer = optax.chain(clip, getattr(optax, config.optimizer)(1.0, **options))

    def learning_rate(part, state):
        lr = {"actor": state.hyper.actor_lr, "critic": state.hyper.critic_lr}[part]
        return lr * jnp.float32(1.0 - config.anneal_lr * state.update / config.num_updates)

    def init_seed(key):
        params_key, reset_key, key = jax.random.split(key, 3)
        obs, env_state = env_reset(jax.random.split(reset_key, num_envs))
        # The environments of the devices differ, the networks must not.
        params_key = jax.lax.all_gather(params_key, "devices")[0]
        params_keys = jax.random.split(params_key, agents.num_networks)
        first = jax.tree.map(lambda x: x[0], obs)  # [R, ...]
        init_one = lambda key: network.init(key, first)["params"]
        params = jax.lax.map(init_one, params_keys)  # [G, ...]
        opt_state = {part: jax.vmap(optimizer.init)(params[part]) for part in params}
        hyper = Hyper(*[jnp.float32(getattr(config, name)) for name in Hyper._fields])
        episode = Episode(*[jnp.zeros(obs.active.shape)] * len(Episode._fields))
        return RunnerState(params, opt_state, hyper, env_state, obs, episode, jnp.int32(0), key)

    def rollout_step(state, _):
        key, action_key, step_key = jax.random.split(state.key, 3)
        policy, value = apply_all(state.params, state.obs)
        action, log_prob = policy.sample_and_log_prob(seed=action_key)
        step_keys = jax.random.split(step_key, num_envs)
        obs, env_state, *outcome = env_step(step_keys, state.env_state, action)
        transition = Transition(state.obs, action, log_prob, value, *outcome)
        done = transition.done  # [G, R]
        episode = state.episode.add(*outcome[:3], state.obs.active)
        ended = jnp.stack([*episode, jnp.ones(done.shape)]) * done
        ended = ended.reshape(-1, len(agents.names), num_envs).sum(2)  # [6, K]
        # An agent that has left waits for the others: what it came to is counted and forgotten.
        episode = jax.tree.map(lambda x: x * ~done, episode)
        state = state._replace(obs=obs, env_state=env_state, episode=episode, key=key)
        return state, (transition, ended)

    nothing = RunnerState(*[None] * len(RunnerState._fields))
    networks_only = nothing._replace(params=0, opt_state=0)

    @functools.partial(jax.vmap, in_axes=(networks_only, 0, 0), out_axes=(networks_only, 0))
    def update_minibatch(state, learns, minibatch):
        """One step of one network: of its actor and critic those that still learn."""
        batch, advantage, target = minibatch  # [B, ...]
        # The minibatch is spread over the devices: its mean, variance and gradient are of all.
        active = jax.lax.pmean(batch.obs.active.mean(), "devices")
        weight = batch.obs.active / jnp.maximum(active, 1e-8)
        advantage -= jax.lax.pmean((weight * advantage).mean(), "devices")
        advantage /= jnp.sqrt(jax.lax.pmean((weight * advantage**2).mean(), "devices")) + 1e-8
        loss_grad = jax.grad(ppo_loss, has_aux=True)
        lessons = (batch, advantage, target, weight)
        grads, metrics = loss_grad(state.params, apply_one, *lessons, config, state.hyper)
        grads, metrics = jax.lax.pmean((grads, metrics), "devices")
        metrics["optim/grad_norm"] = optax.tree.norm(grads)
        params, opt_state = {**state.params}, {**state.opt_state}
        for part in params:
            lr = learning_rate(part, state)
            old = params[part], opt_state[part]
            updates, stepped = optimizer.update(grads[part], opt_state[part], params[part])
            moved = jax.tree.map(lambda x, update, lr=lr: x + lr * update, params[part], updates)
            choose = functools.partial(jnp.where, learns[part])
            params[part], opt_state[part] = jax.tree.map(choose, (moved, stepped), old)
        return state._replace(params=params, opt_state=opt_state), metrics

    def update_epoch(carry, epoch, samples):
        state, actor_learns = carry
        learns = {  # [G]; an actor or critic that has done its epochs waits for the others
            "actor": actor_learns & (epoch < config.actor_epochs),
            "critic": jnp.full_like(actor_learns, epoch < config.critic_epochs),
        }
        key, shuffle_key = jax.random.split(state.key)
        rows = shuffle(shuffle_key, num_rows * config.num_steps).reshape(config.num_minibatches, -1)
        take = lambda x: x[:, rows].swapaxes(0, 1)  # [num_minibatches, G, B, ...]
        step = lambda state, minibatch: update_minibatch(state, learns, minibatch)
        state, metrics = jax.lax.scan(step, state._replace(key=key), jax.tree.map(take, samples))
        metrics = jax.tree.map(lambda x: x.mean(0), metrics)  # [G]
        if config.target_kl is not None:
            actor_learns &= metrics["policy/approx_kl"] <= config.target_kl
        return (state, actor_learns), (metrics, learns)

    def update_step(state, _):
        state, (rollout, ended) = jax.lax.scan(rollout_step, state, None, config.num_steps)
        _, last_value = apply_all(state.params, state.obs)  # [G, R]
        _, final_value = jax.vmap(apply_all, (None, 0))(state.params, rollout.final_obs)
        # The value of the true next observation, [T, G, R]. Other scripts look up the few that time
        # limits hide; here one more pass of the critic, a 27th of all products, spares that.
        next_value = jnp.concatenate([rollout.value[1:], last_value[None]])
        next_value = jnp.where(rollout.done, final_value, next_value)
        steps = (rollout.reward, rollout.value, next_value, rollout.terminated, rollout.done)
        advantage, target = compute_gae(*steps, state.hyper.gamma, state.hyper.gae_lambda)
        variance = lambda x: jnp.var(x, axis=(0, 2), where=rollout.obs.active)  # [G]
        explained = (1 - variance(target - rollout.value) / variance(target)).mean()
        # The loss does not need these: spare the shuffle.
        batch = rollout._replace(reward=None, terminated=None, truncated=None, final_obs=None)
        flat = lambda x: x.swapaxes(0, 1).reshape(agents.num_networks, -1, *x.shape[3:])
        samples = jax.tree.map(flat, (batch, advantage, target))  # [G, T * R, ...]

        run_epoch = lambda carry, epoch: update_epoch(carry, epoch, samples)
        epochs = jnp.arange(max(config.actor_epochs, config.critic_epochs))
        carry = (state, jnp.ones(agents.num_networks, bool))
        (state, _), (metrics, learned) = jax.lax.scan(run_epoch, carry, epochs)
        metrics = jax.tree.map(lambda x: x[-1].mean(), metrics)  # of the last epoch
        for part, x in learned.items():  # [epochs, G]
            metrics[f"{part}/epochs"] = x.sum(0).mean()
        *sums, count = jax.lax.psum(ended.sum(0), "devices")  # [K] each
        means = Episode(*[x / count for x in sums])  # 0 / 0 = NaN where no episode ended
        for name, x in means._asdict().items():
            metrics |= {f"agent/{agent}/{name}": x[k] for k, agent in enumerate(agents.names)}
        metrics["episode/return"] = means.total.sum()  # of the team
        metrics["episode/length"] = means.length.max()
        metrics["episode/count"] = count.min()
        metrics["value/explained_variance"] = jax.lax.pmean(explained, "devices")
        metrics["optim/lr"] = learning_rate("actor", state)
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
def make_play(config: Config) -> Callable:
    """Returns play(params, key) -> Episode, [episodes, K] each, full ones in new environments."""
    config = resolve(config)
    env_reset, env_step, agents = make_env(config)
    network = ActorCritic(agents, config)
    apply_all = jax.vmap(lambda params, obs: network.apply({"params": params}, obs))

    def play_step(state):
        key, action_key, step_key = jax.random.split(state.key, 3)
        policy, _ = apply_all(state.params, state.obs)
        action = policy.mode() if config.eval_greedy else policy.sample(seed=action_key)
        step_keys = jax.random.split(step_key, config.eval_episodes)
        obs, env_state, *outcome = env_step(step_keys, state.env_state, action)
        reward, terminated, truncated, _ = outcome
        episode = state.episode.add(reward, terminated, truncated, state.obs.active)
        # Only the first episode counts: the next one, which has begun, finds nobody active.
        obs = obs._replace(active=state.obs.active & ~terminated & ~truncated)
        return state._replace(obs=obs, env_state=env_state, episode=episode, key=key)

    def play(params, key):
        key, reset_key = jax.random.split(jax.random.key_data(key))
        obs, env_state = env_reset(jax.random.split(reset_key, config.eval_episodes))
        episode = Episode(*[jnp.zeros(obs.active.shape)] * len(Episode._fields))
        state = RunnerState(params, None, None, env_state, obs, episode, 0, key)
        state = jax.lax.while_loop(lambda state: state.obs.active.any(), play_step, state)
        by_agent = lambda x: x.reshape(len(agents.names), -1).T  # [episodes, K]
        return jax.tree.map(by_agent, state.episode)

    return play


def score(config: Config, episodes: Episode) -> jax.Array:
    """The return that `best_metric` names, [...], of episodes [..., K]."""
    if config.best_metric in ("team", "worst"):
        return {"team": jnp.sum, "worst": jnp.min}[config.best_metric](episodes.total, axis=-1)
    return episodes.total[..., load_env(config.env_id).agents.index(config.best_metric)]


def make_evaluate(config: Config) -> Callable:
    """Returns evaluate(params, key) -> returns [episodes], full episodes in fresh environments."""
    config, play = resolve(config), make_play(config)
    return lambda params, key: score(config, play(params, key))


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
        if name != "total_timesteps" and options.get(name) != value:  # more go on where it ended
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
        (run_dir / "summary.json").unlink(missing_ok=True)  # of a smaller budget
        table, rows = run_dir / "metrics.csv", 1 + (update + 1) * config.num_seeds
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


def write_evaluation(run_dir: Path, config: Config, update: int, episodes: Episode) -> np.ndarray:
    """Describe episodes [S, episodes, K] of each agent and the team in evaluations.csv.

    What an interrupted run wrote of this update or later ones is replaced. Returns the mean of the
    return that `best_metric` names, [S].
    """
    file, names = run_dir / "evaluations.csv", [*load_env(config.env_id).agents, "team"]
    lines = file.read_text().splitlines()[1:] if file.exists() and update else []
    lines = [line for line in lines if int(line.split(",")[0]) < update]
    for metric, x in episodes._asdict().items():
        x = np.asarray(x)
        team = {"length": x.max, "terminated": x.min, "truncated": x.max}.get(metric, x.sum)
        x = np.concatenate([x, team(axis=-1, keepdims=True)], axis=-1)  # [S, episodes, K + 1]
        five = np.nanquantile(x, [0, 0.25, 0.5, 0.75, 1], axis=1)  # [5, S, K + 1]
        table = np.stack([np.nanmean(x, 1), np.nanstd(x, 1), *five, np.isnan(x).sum(1)], axis=-1)
        for seed, k in np.ndindex(table.shape[:2]):
            values = ",".join(f"{value:.7g}" for value in table[seed, k])
            lines.append(f"{update},{seed},{names[k]},{metric.replace('total', 'return')},{values}")
    if jax.process_index() == 0:
        header = "update,seed,agent,metric,mean,std,min,q25,median,q75,max,nan_count"
        file.write_text("\n".join([header, *lines, ""]))
    return np.asarray(score(config, episodes)).mean(axis=1)


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
    seeds, devices = config.num_seeds, jax.device_count()
    first = update = int(last["update"].max()) if last else 0
    if first > config.num_updates:
        raise ConfigError(f"{run_dir} has done {first} updates: raise total_timesteps")
    # Of a smaller budget? Then the calls of this one need not fit.
    per_call = math.gcd(config.updates_per_call, config.num_updates - first)
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
    evaluate = jax.jit(jax.vmap(make_play(config)))
    evaluate = evaluate.lower(local(state.params), eval_keys(0)).compile()
    compile_seconds = time.perf_counter() - start
    tracker = None
    if config.track and jax.process_index() == 0:
        import wandb  # not above: it takes a second

        account = {"project": config.wandb_project, "entity": config.wandb_entity, "dir": run_dir}
        tracker = wandb.init(**account, id=run_dir.name, resume="allow", config=describe(config))
    if not last:
        returns = write_evaluation(run_dir, config, 0, evaluate(local(state.params), eval_keys(0)))
        origin = {"time/sps": np.full((1, seeds), np.nan), "eval/return": returns[None]}
        write_rows(run_dir, config, 0, origin, tracker)
        last = to_host(state, returns)
        save(run_dir / "last.msgpack", config, last)
    best, returns = best or last, last["eval_return"][0]  # [S]
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
                episodes = evaluate(local(state.params), eval_keys(0))
                returns = write_evaluation(run_dir, config, update, episodes)
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
    absolute = [score(config, evaluate(params, eval_keys(update + n))) for n in range(1, 11)]
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
