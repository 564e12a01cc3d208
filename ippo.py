"""Independent PPO for many agents, on JaxMARL environments.

Each agent learns from its own observation, action and reward (de Witt et al. 2020, arXiv
2011.09533). Agents are one more batch axis: one network reads each agent's observation and index,
or each agent has its own.

PPO (Schulman et al. 2017, arXiv 1707.06347) with GAE (Schulman et al. 2015, arXiv 1506.02438).
All seeds train and evaluate in one XLA program. Details that matter:
- a time limit is not a termination: it cuts the trace, but the return still bootstraps from the
  value of the true final observation (Pardo et al. 2018, arXiv 1712.00378);
- advantages are normalized per minibatch, across all devices;
- actor and critic have separate optimizers and epochs; `--target-kl` stops only the actor;
- an agent done early, except in SMAX, gets no gradient until the next episode.
`eval/return` is the sum over agents: a shared return counts K times. Observations are flattened and
padded to one size.

Shapes: T steps, N environments and minibatch B per device, D devices, S seeds, K agents, A actions.

    python ippo.py --num-seeds 5

-51.1 ± 0.8 on MPE_simple_spread_v3 (needs jaxmarl): 160k steps/s, 46 s in all on two CPU cores.
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro", "wandb"]
# ///

import contextlib
import dataclasses
import difflib
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

# Avoids an XLA:CPU deadlock with vmapped loops.
os.environ.setdefault("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_cpu_enable_concurrency_optimized_scheduler=false"

import distrax
import flax
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
import tyro
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.extend.backend import clear_backends

SCRIPT = "ippo"
DEFAULT_ENV = "MPE_simple_spread_v3" if find_spec("jaxmarl") else "rings"


# ----------------------------------------- config
class ConfigError(Exception):
    """Invalid input."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Independent PPO for many agents."""

    # Environment
    env_id: str = DEFAULT_ENV  # JaxMARL environment, environment/map, or rings (built in)
    env_params: str = ""  # JSON object of environment parameters
    total_timesteps: float = 1e6  # environment steps per seed (at most)
    num_envs: int = 16  # parallel environments per seed, over all devices
    num_steps: int = 128  # rollout length
    # Algorithm
    share_parameters: bool = True  # one network for all agents, not one each
    actor_epochs: int = 2  # epochs of the actor per rollout
    critic_epochs: int = 2  # epochs of the critic per rollout
    num_minibatches: int = 4  # minibatches per epoch
    hidden_size: int = 64  # width of the dense layers
    actor_lr: float = 3e-3  # Adam learning rate of the actor
    critic_lr: float = 3e-3  # Adam learning rate of the critic
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # trace decay of GAE
    clip_eps: float = 0.2  # clipping range of the probability ratio
    clip_value: bool = False  # clip the change in value to ±clip_eps
    ent_coef: float = 0.01  # entropy bonus coefficient
    max_grad_norm: float = 0.5  # clip gradients to this norm
    target_kl: float | None = None  # stop the actor above this approximate KL
    # Run
    seed: int = 0  # random seed
    num_seeds: int = 1  # seeds trained in parallel
    num_evals: int = 10  # evaluations, each followed by a checkpoint
    eval_episodes: int = 128  # full episodes per evaluation
    eval_greedy: bool = False  # act greedily during evaluation
    run_dir: str = ""  # run folder to start or continue; empty: a new one
    init_from: str = ""  # run folder to start from: the best parameters of its first seed
    track: bool = False  # log to Weights & Biases
    distributed: bool = False  # run on several hosts

    def __post_init__(self):
        for name, value in vars(self).items():
            low = 0 if name.endswith(("seed", "gamma", "lambda", "coef")) else 1e-12
            high = 1 if name in ("gamma", "gae_lambda") else 1e18
            if type(value) in (int, float) and not low <= value <= high:
                raise ConfigError(f"{name} = {value} is not in {'(' if low else '['}0, {high:g}]")

    @property
    def batch_size(self) -> int:
        """Environment steps per update, over all devices."""
        return self.num_envs * self.num_steps

    @property
    def updates_per_eval(self) -> int:
        return int(self.total_timesteps) // (self.batch_size * self.num_evals)

    @property
    def num_updates(self) -> int:
        return self.updates_per_eval * self.num_evals


# ------------------------------------ environment
class Rings:
    """Three agents, each on its own ring: the built-in environment, with JaxMARL's methods.

    Agent k sees, one-hot, how far ahead its goal is on a ring of 3 + k cells. Action a is a step of
    (a + k) % 3 - 1 cells ahead, so that no action moves two agents alike. Arriving pays 1 and ends
    that agent's episode; other steps cost 0.2; the time limit is 8 steps. From d cells away, by the
    shorter way, the best return is 1.2 - 0.2 d; means over d add up to 1 + 14 / 15 + 0.9 = 2.833.
    """

    agents = ("ring_3", "ring_4", "ring_5")

    def action_space(self, agent):
        return gymnax.environments.spaces.Discrete(3)

    def observe(self, state):
        rings = zip(self.agents, state["distance"], (3, 4, 5), strict=True)
        return {name: jax.nn.one_hot(distance, size) for name, distance, size in rings}

    def reset(self, key):
        distance = jax.random.randint(key, (3,), 1, 3 + jnp.arange(3))
        state = {"distance": distance, "step": jnp.int32(0)}
        return self.observe(state), state

    def step_env(self, key, state, actions):
        k = jnp.arange(3)
        move = (jnp.stack([actions[name] for name in self.agents]) + k) % 3 - 1
        distance = (state["distance"] - move * (state["distance"] > 0)) % (3 + k)
        state = {"distance": distance, "step": state["step"] + 1}
        arrived = distance == 0
        reward = dict(zip(self.agents, jnp.where(arrived, 1.0, -0.2), strict=True))
        done = dict(zip(self.agents, arrived, strict=True))
        done["__all__"] = arrived.all() | (state["step"] >= 8)
        return self.observe(state), state, reward, done, {}


# First word of env_id -> a function that sets the step counter in the state to zero.
NATIVE = ("MPE", "SMAX", "switch", "coin", "overcooked", "jaxnav")
BRAX = ("ant", "halfcheetah", "hopper", "humanoid", "walker2d")
REWIND = dict.fromkeys(NATIVE, lambda state: state.replace(step=0))
REWIND |= dict.fromkeys(BRAX, lambda state: state.replace(info=state.info | {"steps": 0}))
REWIND["HeuristicEnemySMAX"] = lambda state: state.replace(state=state.state.replace(step=0))
REWIND["rings"] = lambda state: state | {"step": 0}
REWIND["hanabi"] = lambda state: state  # no time limit


class Observation(NamedTuple):
    features: jax.Array  # [F], with a one-hot agent index if parameters are shared
    mask: jax.Array  # [A] legal actions, or the agent's components of a continuous action
    active: jax.Array  # [] False once the agent is done


def load_env(config: Config):
    """An environment with the methods of JaxMARL's MultiAgentEnv. Raises ConfigError."""
    try:
        params = json.loads(config.env_params or "{}")
        if config.env_id == "rings":
            return Rings(**params)
        with contextlib.redirect_stdout(None):  # its import prints
            import jaxmarl
            from jaxmarl.environments.overcooked import overcooked_layouts as layouts
            from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO as maps
        known = {name: {} for name in ("rings", *jaxmarl.registered_envs)}
        # Brax's own reset would overwrite the final observation.
        known |= {name: {"auto_reset": False} for name in known if name.startswith(BRAX)}
        known |= {f"overcooked/{name}": {"layout": x} for name, x in layouts.items()}
        known |= {f"HeuristicEnemySMAX/{name}": {"scenario": x} for name, x in maps.items()}
        if config.env_id not in known:
            nearest = difflib.get_close_matches(config.env_id, known, cutoff=0)
            raise ConfigError(f"unknown env_id {config.env_id}: did you mean {', '.join(nearest)}?")
        return jaxmarl.make(config.env_id.split("/")[0], **known[config.env_id], **params)
    except ImportError as error:
        raise ConfigError(f"{config.env_id}: {error}; pip install 'jaxmarl[mabrax]'") from None
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"{config.env_id}, env_params: {error}") from None


def make_env(config: Config) -> tuple:
    """Edit here to bring your own environment; episodes must end. Raises ConfigError.

    Returns reset(key) -> (obs, env_state), step(key, env_state, action) -> (obs, env_state, reward,
    terminated, truncated, next_obs), the agents' names, and whether actions are continuous (`step`
    clips to [-1, 1]). All but env_state have a leading axis K. `step` resets after an episode:
    `obs` then starts the next one, but `next_obs` is the true final observation.
    """
    env = load_env(config)
    obs, env_state = jax.eval_shape(env.reset, jax.random.key(0))
    family = config.env_id.replace("/", "_").split("_")[0]
    if family not in REWIND:
        raise ConfigError(f"add {family} to REWIND: set the step counter to 0 in {env_state}")
    names = tuple(env.agents)
    spaces = [env.action_space(name) for name in names]
    continuous = not hasattr(spaces[0], "n")
    if len({hasattr(space, "n") for space in spaces}) > 1:
        raise ConfigError(f"{config.env_id} mixes discrete and continuous actions")
    sizes = [space.shape[0] if continuous else space.n for space in spaces]
    num_features = max(obs[name].size for name in names)
    is_smax = "SMAX" in family
    all_legal = lambda _: dict(zip(names, map(jnp.ones, sizes), strict=True))
    method = "get_avail_actions" if is_smax and not continuous else "get_legal_moves"
    legal_actions = getattr(env, method, all_legal)
    stack = lambda x: jnp.stack([x[name] for name in names])  # [K, ...]
    to_bounds = lambda space, x: space.low + (space.high - space.low) * x[: space.shape[0]]
    pad = lambda x, size: jnp.stack([jnp.pad(x[k].ravel(), (0, size - x[k].size)) for k in names])

    def observe(obs, env_state, active):
        features = pad(obs, num_features)
        if config.share_parameters:
            features = jnp.concatenate([features, jnp.eye(len(names))], axis=-1)
        mask = pad(legal_actions(env_state), max(sizes)) > 0  # [K, A]
        return Observation(jnp.float32(features), mask, active)

    def reset(key):
        obs, env_state = env.reset(key)
        active = jnp.ones(len(names), bool)
        return observe(obs, env_state, active), (env_state, active)

    def step(key, env_state, action):
        step_key, reset_key = jax.random.split(key)
        env_state, active = env_state
        if continuous:
            action = map(to_bounds, spaces, (jnp.clip(action, -1.0, 1.0) + 1) / 2)
        actions = dict(zip(names, action, strict=True))
        # Also step with the counter at zero: an episode that ends even then is terminated.
        _, _, _, done_anyway, _ = env.step_env(step_key, REWIND[family](env_state), actions)
        obs, env_state, reward, done, _ = env.step_env(step_key, env_state, actions)
        # SMAX pays dead agents too: they stay active.
        ends = lambda done: active & (done["__all__"] | (stack(done) & (not is_smax)))
        terminated = ends(done) & ends(done_anyway)
        truncated = ends(done) & ~terminated
        next_obs = observe(obs, env_state, active & ~terminated)
        reward = jnp.float32(stack(reward)) * active
        remaining = active & ~ends(done)
        continued = (next_obs._replace(active=remaining), (env_state, remaining))
        obs, env_state = optax.tree.where(remaining.any(), continued, reset(reset_key))
        return obs, env_state, reward, terminated, truncated, next_obs

    return reset, step, names, continuous


# ---------------------------------------- network
def dense(features: int, scale: float) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))


class ActorCritic(nn.Module):
    """A policy and a value function."""

    hidden_size: int
    continuous: bool

    @nn.compact
    def __call__(self, obs: Observation):
        """One agent's observation -> policy, value []."""
        num_outputs = obs.mask.size * (1 + self.continuous)
        outputs = MLP(num_outputs, 0.01, self.hidden_size, name="actor")(obs.features)
        value = MLP(1, 1.0, self.hidden_size, name="critic")(obs.features).squeeze(-1)
        # Masked outputs are constants without gradient.
        value = jnp.where(obs.active, value, 0.0)
        mask = obs.mask & obs.active
        if not self.continuous:
            masked = -1e9 * (1 + jnp.arange(mask.size))  # all masked: first action, entropy 0
            return distrax.Categorical(jnp.where(mask, outputs, masked)), value
        mean, log_std = jnp.split(outputs, 2)
        std = jnp.where(mask, jnp.exp(log_std), (2 * np.pi * np.e) ** -0.5)  # of entropy 0
        return distrax.Independent(distrax.Normal(jnp.where(mask, mean, 0.0), std), 1), value


class MLP(nn.Module):
    num_outputs: int
    scale: float  # of the initial outputs
    hidden_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[F] -> [num_outputs]."""
        x = nn.tanh(dense(self.hidden_size, 2**0.5)(x))
        x = nn.tanh(dense(self.hidden_size, 2**0.5)(x))
        return dense(self.num_outputs, self.scale)(x)


# ---------------------------------------- rollout
class Transition(NamedTuple):
    """One step of one environment, [K, ...]."""

    obs: Observation
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array  # reached a terminal state
    next_obs: Observation  # the true one, even at the end of an episode
    done: jax.Array  # terminated, truncated or inactive
    episode: jax.Array  # [2] return and length so far


class RunnerState(NamedTuple):
    """Rollout carry of one environment."""

    key: jax.Array  # [2] raw, so a checkpoint can hold it
    obs: Observation  # [K, ...]
    env_state: Any
    done: jax.Array  # [] whether the previous step ended the episode
    episode: jax.Array  # [K, 2] of the previous step


class TrainState(NamedTuple):
    """Training carry of one seed; outside make_train, with leading axes [D, S]."""

    key: jax.Array  # [2]
    params: Any  # [K, ...] for one network per agent
    opt_state: Any
    runner: RunnerState  # [N]
    best: Any  # parameters that scored best_return
    agent_returns: jax.Array  # [K], summing to eval_return
    update: jax.Array = np.int32(0)
    initial_return: jax.Array = np.float32(np.nan)
    eval_return: jax.Array = np.float32(np.nan)
    best_return: jax.Array = np.float32(-np.inf)
    absolute_return: jax.Array = np.float32(0)  # of `best`, on new episodes


def episode_stats(rollout: Transition, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Means over the episodes that ended in a rollout [T, N, K]; NaN if none did."""
    over = rollout.done.all(-1, keepdims=True)  # [T, N, 1]
    count = jax.lax.psum(over.sum(dtype=jnp.float32), "devices")
    mean = jax.lax.psum((rollout.episode * over[..., None]).sum((0, 1)), "devices") / count
    stats = {f"episode/return/{name}": mean[k, 0] for k, name in enumerate(names)}
    stats |= {"episode/return": mean[:, 0].sum(), "episode/length": mean[0, 1]}
    return stats | {"episode/count": count}


# -------------------------------------- advantage
def compute_gae(reward, value, next_value, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) with time limits.

    All arrays are [T, ...]. `next_value` is the value of the true next observation; `done` is
    terminated | truncated. Returns (advantage, target).
    """
    # Only a termination stops the bootstrap; any episode end cuts the trace.
    delta = reward + gamma * (1.0 - terminated) * next_value - value
    decay = gamma * gae_lambda * (1.0 - done)

    def step(advantage, x):
        delta, decay = x
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(step, jnp.zeros_like(delta[-1]), (delta, decay), reverse=True)
    return advantage, advantage + value


# ------------------------------------------- loss
def ppo_loss(params, apply_fn, batch: Transition, advantage, target, config: Config):
    """Clipped surrogate (arXiv 1707.06347, eq. 7), value loss and entropy bonus (eq. 9).

    All arrays are [B, ...]; `advantage` is already normalized. Returns (loss, metrics).
    """
    policy, value = jax.vmap(apply_fn, (None, 0))(params, batch.obs)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
    value_error = (value - target) ** 2
    if config.clip_value:
        change = jnp.clip(value - batch.value, -config.clip_eps, config.clip_eps)
        value_error = jnp.maximum(value_error, (batch.value + change - target) ** 2)
    value_loss = 0.5 * value_error.mean()
    entropy = policy.entropy().mean()
    loss = policy_loss + value_loss - config.ent_coef * entropy
    return loss, {
        "loss/total": loss,
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": (ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html
        "policy/clip_fraction": (jnp.abs(ratio - 1) > config.clip_eps).mean(),
    }


# ------------------------------------------ train
def shuffle(key, size: int) -> jax.Array:
    """A random permutation. Sorts random words whose low bits are the row; faster than argsort."""
    row_bits = (size - 1).bit_length()
    bits = jax.random.bits(key, (size,))
    if row_bits > 16:  # too few random bits left
        return jnp.argsort(bits)
    return jnp.sort(bits << row_bits | jnp.arange(size, dtype=bits.dtype)) % 2**row_bits


def make_train(config: Config) -> tuple:
    """Returns init, train and (for sweeps: docs/runs.md) init_seed, train_seed. Raises ConfigError.

    init(keys [D]) -> state and train(state) -> (state, metrics) are pmapped. `train` runs
    `updates_per_eval` updates of each seed, then evaluates. Metrics [D, updates, S] are NaN
    where unmeasured.
    """
    num_devices = jax.device_count()
    num_envs = config.num_envs // num_devices  # N
    env_reset, env_step, names, continuous = make_env(config)
    num_samples = num_envs * config.num_steps * (len(names) if config.share_parameters else 1)
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs = {config.num_envs} is not divisible by {num_devices} devices")
    if num_samples % config.num_minibatches:
        raise ConfigError(f"num_minibatches = {config.num_minibatches} must divide {num_samples}")
    if config.updates_per_eval < 1:
        raise ConfigError(f"total_timesteps must be >= {config.num_evals * config.batch_size}")
    network = ActorCritic(config.hidden_size, continuous)
    apply_agents = jax.vmap(network.apply, (None if config.share_parameters else 0, 0))
    kl_limit = jnp.inf if config.target_kl is None else config.target_kl
    pmean = lambda x: jax.lax.pmean(x, "devices")

    def learning_rate(lr, update):
        return jnp.float32(lr * (1 - config.anneal_lr * update / config.num_updates))

    def optimizer(update):  # constant lr within an update
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        adam = lambda lr: optax.chain(clip, optax.adam(learning_rate(lr, update), eps=1e-5))
        parts = {"actor": adam(config.actor_lr), "critic": adam(config.critic_lr)}
        return optax.partition(parts, {"params": {name: name for name in parts}})

    def start_episode(key):
        key, reset_key = jax.random.split(key)
        return RunnerState(key, *env_reset(reset_key), jnp.bool(False), jnp.zeros((len(names), 2)))

    def step(params, runner, greedy=False):
        """One step of one environment."""
        key, action_key, step_key = jax.random.split(runner.key, 3)
        policy, value = apply_agents(params, runner.obs)  # [K]
        action = policy.mode() if greedy else policy.sample(seed=action_key)
        outcome = env_step(step_key, runner.env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs = outcome
        transition = Transition(
            obs=runner.obs,
            action=action,
            log_prob=policy.log_prob(action),
            value=value,
            reward=reward,
            terminated=terminated,
            next_obs=next_obs,
            done=terminated | truncated | ~runner.obs.active,
            episode=runner.episode * ~runner.done + jnp.stack([reward, jnp.ones_like(reward)], 1),
        )
        done = transition.done.all()
        return RunnerState(key, obs, env_state, done, transition.episode), transition

    def episode_returns(params, key):
        unfinished = lambda runner: ~runner.done
        play = lambda runner: step(params, runner, config.eval_greedy)[0]
        return jax.lax.while_loop(unfinished, play, start_episode(key)).episode[:, 0]

    def evaluate(i, state):
        """Round 0 scores `params` and updates `best`; final rounds 1 to 10 score `best`."""
        key, eval_key = jax.random.split(state.key)
        keys = jax.random.split(eval_key, -(-config.eval_episodes // num_devices))
        params = optax.tree.where(i == 0, state.params, state.best)
        returns = pmean(jax.vmap(episode_returns, (None, 0))(params, keys).mean(0))  # [K]
        result = returns.sum()
        improved = (i == 0) & (result > state.best_return)
        return state._replace(
            key=key,
            best=optax.tree.where(improved, state.params, state.best),
            initial_return=jnp.where(i < 0, result, state.initial_return),  # see train_seed
            agent_returns=jnp.where(i == 0, returns, state.agent_returns),
            eval_return=jnp.where(i == 0, result, state.eval_return),
            best_return=jnp.where(improved, result, state.best_return),
            absolute_return=jnp.where(i == 0, 0.0, state.absolute_return + result / 10),
        )

    def update_minibatch(state, minibatch):
        batch, advantage, target = minibatch  # [B, ...]
        # Mean, variance and gradient span all devices.
        # Losses and metrics count inactive agents as 0; these moments leave them out.
        weight = batch.obs.active / jnp.maximum(pmean(batch.obs.active.mean()), 1e-8)
        advantage = (advantage - pmean((weight * advantage).mean())) * batch.obs.active
        advantage /= jnp.sqrt(pmean((weight * advantage**2).mean())) + 1e-8
        inputs = (network.apply, batch, advantage, target, config)
        grads, metrics = jax.grad(ppo_loss, has_aux=True)(state.params, *inputs)
        grads, metrics = pmean((grads, metrics))
        metrics["optim/grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer(state.update).update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics

    def update_epochs(state, samples):
        """One network's epochs over [num_samples, ...]. A high KL stops the actor."""

        def update_epoch(carry, x):
            state, stop = carry
            epoch, key = x
            rows = shuffle(key, num_samples).reshape(config.num_minibatches, -1)
            minibatches = jax.tree.map(lambda x: x[rows], samples)  # [num_minibatches, B, ...]
            updated, metrics = jax.lax.scan(update_minibatch, state, minibatches)
            metrics = jax.tree.map(jnp.mean, metrics)
            stop_actor = stop | (epoch >= config.actor_epochs)
            # Each flag freezes a subtree.
            frozen = {"actor": stop_actor, "critic": epoch >= config.critic_epochs}
            keep = optax.tree.where
            params = jax.tree.map(keep, {"params": frozen}, state.params, updated.params)
            flags = state.opt_state._replace(inner_states=frozen)
            opt_state = jax.tree.map(keep, flags, state.opt_state, updated.opt_state)
            state = state._replace(params=params, opt_state=opt_state)
            return (state, stop | (metrics["policy/approx_kl"] > kl_limit)), (metrics, frozen)

        epochs = jnp.arange(max(config.actor_epochs, config.critic_epochs))
        keys = jax.random.split(state.key, 1 + len(epochs))
        carry = (state._replace(key=keys[0]), jnp.bool(False))
        (state, _), (metrics, frozen) = jax.lax.scan(update_epoch, carry, (epochs, keys[1:]))
        count = {name: jnp.sum(~x) for name, x in frozen.items()}
        most = jnp.maximum(*count.values())
        last_epoch = lambda name: (count["actor"] if "policy" in name else most) - 1
        metrics = {name: x[last_epoch(name)] for name, x in metrics.items()}
        return state, metrics | {f"{name}/epochs": jnp.float32(x) for name, x in count.items()}

    def update_networks(state, samples):
        """Samples [T, N, K, ...] train one network or, split by agent, K networks."""
        if config.share_parameters:
            samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), samples)
            return update_epochs(state, samples)
        fold = lambda x: x.reshape(-1, *x.shape[2:]).swapaxes(0, 1)  # [K, T * N, ...]
        axes = TrainState(*[None] * len(state))._replace(params=0, opt_state=0)  # rest is shared
        update_agents = jax.vmap(update_epochs, (axes, 0), (axes, 0))
        state, metrics = update_agents(state, jax.tree.map(fold, samples))
        return state, jax.tree.map(jnp.mean, metrics)

    def update_step(state, _):
        step_envs = lambda runner, _: jax.vmap(step, (None, 0))(state.params, runner)
        runner, rollout = jax.lax.scan(step_envs, state.runner, None, config.num_steps)  # [T, N]
        critic = lambda obs: apply_agents(state.params, obs)[1]
        next_value = jax.vmap(jax.vmap(critic))(rollout.next_obs)  # [T, N, K]
        steps = (rollout.reward, rollout.value, next_value, rollout.terminated, rollout.done)
        advantage, target = compute_gae(*steps, config.gamma, config.gae_lambda)
        samples = (rollout._replace(next_obs=None), advantage, target)
        state, metrics = update_networks(state, samples)
        error, target = jax.lax.all_gather((target - rollout.value, target), "devices")
        active = jax.lax.all_gather(rollout.obs.active, "devices")
        explained = 1 - jnp.var(error, where=active) / jnp.var(target, where=active)
        metrics["value/explained_variance"] = explained
        metrics["optim/lr"] = learning_rate(config.actor_lr, state.update)
        metrics |= episode_stats(rollout, names)
        return state._replace(runner=runner, update=state.update + 1), metrics

    def init_seed(key):
        params_key, runner_key, key = jax.random.split(key, 3)
        runner = jax.vmap(start_episode)(jax.random.split(runner_key, num_envs))
        # Environments differ by device; the network must not.
        keys = jax.random.split(jax.lax.all_gather(params_key, "devices")[0], len(names))
        obs = jax.tree.map(lambda x: x[0, 0], runner.obs)
        params = jax.lax.map(lambda key: network.init(key, obs), keys)
        opt_state = jax.vmap(optimizer(0).init)(params)
        if config.share_parameters:
            params, opt_state = jax.tree.map(lambda x: x[0], (params, opt_state))
        return TrainState(key, params, opt_state, runner, params, jnp.full(len(names), jnp.nan))

    def train_seed(state):
        is_first = state.update == 0  # an extra round, -1, evaluates the initial parameters
        state = state._replace(best=optax.tree.where(is_first, state.params, state.best))
        state, metrics = jax.lax.scan(update_step, state, None, config.updates_per_eval)
        # At the end, ten more rounds: the absolute metric (Gorsane et al. 2022, arXiv 2209.10485).
        rounds = jnp.where(state.update < config.num_updates, 1, 11)
        state = jax.lax.fori_loop(jnp.where(is_first, -1, 0), rounds, evaluate, state)
        at = lambda i, x: jnp.full(config.updates_per_eval, jnp.nan).at[i].set(x)
        metrics["eval/initial_return"] = at(0, jnp.where(is_first, state.initial_return, jnp.nan))
        metrics["eval/return"] = at(-1, state.eval_return)
        for k, name in enumerate(names):
            metrics[f"eval/return/{name}"] = at(-1, state.agent_returns[k])
        return state, metrics

    def init(key):
        keys = jax.random.split(jax.random.key_data(key), config.num_seeds)
        # One seed at a time: batched QR can deadlock on XLA:CPU.
        return jax.lax.map(init_seed, keys)

    train_seeds = jax.vmap(train_seed, out_axes=(0, 1))
    if config.num_seeds == 1:  # up to 30% faster on CPU
        unbatched = jax.vmap(train_seed, None, (0, 1), axis_size=1)
        train_seeds = lambda state: unbatched(jax.tree.map(lambda x: x[0], state))
    train = jax.pmap(train_seeds, "devices", donate_argnums=0)
    return jax.pmap(init, "devices"), train, init_seed, train_seed


# ------------------------------------------- main
def write(path: Path, content: bytes):
    """Write atomically in process 0."""
    if jax.process_index() == 0:
        tmp = path.with_suffix(".tmp")
        tmp.write_bytes(content)
        tmp.replace(path)


def open_run(config: Config) -> tuple[Path, dict]:
    """The run folder and its config.json. Raises ConfigError."""
    name = f"{SCRIPT}__{config.env_id}__seed{config.seed}__%Y%m%d-%H%M%S-{os.getpid()}"
    run_dir = Path(config.run_dir or time.strftime("runs/" + name.replace("/", "-")))
    path = run_dir / "config.json"
    about = {"script": SCRIPT, "num_devices": jax.device_count(), **vars(config)}
    about["updates_per_eval"] = config.updates_per_eval  # must not change
    stored = json.loads(path.read_text()) if path.exists() else about
    may_differ = ["run_dir", "init_from", "track", "distributed"]
    may_grow = ["total_timesteps", "num_evals"] if (run_dir / "summary.json").exists() else []
    for option, new in about.items():
        old = stored.get(option)
        if new != old and option not in may_differ and not (option in may_grow and new > old):
            raise ConfigError(f"{run_dir} has {option} = {old}, not {new}")
    about["device"] = jax.devices()[0].device_kind
    about["versions"] = {x.__name__: x.__version__ for x in (jax, flax, optax)}
    run_dir.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(about, indent=2).encode())
    return run_dir, about


def restore(state, config: Config, run_dir: Path):
    """Last checkpoint, else `init_from`, else `state`, as NumPy arrays."""
    state = process_allgather(state, tiled=True)
    path = run_dir / "checkpoint.msgpack"
    try:
        if path.exists():
            state = flax.serialization.from_bytes(state, path.read_bytes())
        elif config.init_from and jax.process_index() == 0:
            path = Path(config.init_from, path.name)
            best = flax.serialization.from_bytes({"best": state.best}, path.read_bytes())["best"]
            copy = lambda x, new: np.broadcast_to(x[0, 0].reshape(new.shape[2:]), new.shape)
            state = state._replace(params=jax.tree.map(copy, best, state.params))
    except Exception as error:
        raise ConfigError(f"{path} is unusable: {error}") from None
    state = broadcast_one_to_all(state)  # needs no shared folder
    return jax.tree.map(lambda x: np.split(x, jax.process_count())[jax.process_index()], state)


def write_rows(path: Path, config: Config, metrics: dict, first: int, run):
    """Write metrics [updates, S] from update `first`."""
    header = ",".join(["update", "seed", "env_steps", *metrics])
    lines = path.read_text().splitlines() if path.exists() else [header]
    del lines[1 + (first - 1) * config.num_seeds :]  # past the checkpoint
    for i, seed in np.ndindex(metrics["eval/return"].shape):
        env_steps = (first + i) * config.batch_size
        row = {name: x[i, seed] for name, x in metrics.items() if np.isfinite(x[i, seed])}
        cells = [first + i, seed, env_steps, *(row.get(name, "") for name in metrics)]
        lines.append(",".join(map(str, cells)))
        if run:
            suffix = f"/seed{seed}" if config.num_seeds > 1 else ""
            run.log({name + suffix: x for name, x in row.items()}, step=env_steps)
    write(path, "\n".join([*lines, ""]).encode())


def main(config: Config) -> dict:
    """Train, or continue `run_dir`. Returns its summary."""
    if config.distributed:
        clear_backends()  # imports started JAX
        jax.distributed.initialize()
    is_first = jax.process_index() == 0
    start = time.perf_counter()
    init, train, *_ = make_train(config)
    run_dir, about = open_run(config)
    keys = jax.random.split(jax.random.key(config.seed), jax.device_count())
    keys = keys.reshape(jax.process_count(), -1)[jax.process_index()]
    saved = state = restore(init(keys), config, run_dir)
    calls = range(1 + int(state.update.max()), 1 + config.num_updates, config.updates_per_eval)
    path = run_dir / "summary.json"
    if path.exists() and not calls:
        return json.loads(path.read_text())
    path.unlink(missing_ok=True)  # stale
    bar = tqdm.tqdm(calls, str(run_dir), disable=not is_first)
    if jax.process_count() == 1:  # else the first call compiles
        train = train.lower(state).compile()
    about["compile_seconds"] = time.perf_counter() - start
    train_seconds = 0.0
    call_steps = config.updates_per_eval * config.batch_size * config.num_seeds
    run = None
    if config.track and is_first:
        import wandb

        run = wandb.init(id=run_dir.name, dir=run_dir, config=about, resume="allow", save_code=True)
    for first in bar:
        start = time.perf_counter()
        state, metrics = train(state)
        metrics = {k: np.array(x.addressable_data(0))[0] for k, x in metrics.items()}
        seconds = time.perf_counter() - start
        train_seconds += seconds
        metrics["time/sps"] = np.full_like(metrics["eval/return"], call_steps / seconds)
        write_rows(run_dir / "metrics.csv", config, metrics, first, run)
        finite = np.isfinite(metrics["optim/grad_norm"]).all(1)
        if not finite.all():
            sys.exit(f"error: NaN or inf at update {first + finite.argmin()}: reduce lr")
        saved = process_allgather(state, tiled=True)
        write(run_dir / "checkpoint.msgpack", flax.serialization.to_bytes(saved))
        bar.set_postfix_str(f"return {saved.eval_return.mean():.4g}")
    returns = saved.eval_return[0]
    summary = about | {
        "env_steps": int(saved.update.max()) * config.batch_size,
        "eval_return_mean": float(returns.mean()),
        "eval_return_std": float(returns.std()),
        "eval_return_per_seed": returns.tolist(),
        "best_eval_return_mean": float(saved.best_return.mean()),
        "absolute_return_mean": float(saved.absolute_return.mean()),
        "train_seconds": train_seconds,
        "steps_per_second": len(calls) * call_steps / (train_seconds or 1),
    }
    write(path, json.dumps(summary, indent=2).encode())
    if run:
        run.summary.update(summary)
        run.finish()
    if is_first:
        print(f"return {returns.mean():.4g} ± {returns.std():.3g}\npython plot.py {run_dir}")
    return summary


def cli():
    """Bad input exits with code 2."""
    try:
        config = tyro.cli(Config)
        path = Path(config.run_dir, "config.json")
        stored = json.loads(path.read_text()) if config.run_dir and path.exists() else {}
        if stored.get("script") == SCRIPT:
            stored = {k: stored[k] for k in vars(config) if k in stored}
            config = tyro.cli(Config, default=Config(**stored))
        main(config)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted: continue with --run-dir FOLDER")


if __name__ == "__main__": cli()  # fmt: skip
