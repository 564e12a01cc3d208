"""Recurrent PPO with V-trace advantages and prioritized segments, written with flax NNX.

Over its epochs, PPO (Schulman et al. 2017, arXiv 1707.06347) moves away from the policy that
collected the rollout. Here every minibatch recomputes its advantages under the current actor and
critic: generalized advantage estimation with the truncated importance weights of V-trace (Espeholt
et al. 2018, arXiv 1802.01561, eq. 1). A segment is the rollout of one environment. Each epoch draws
segments without replacement, favoring large advantages; weighted losses reduce this bias. Also:
- a time limit is not a termination: it cuts the trace, but the return still bootstraps from the
  value of the true final observation, with the memory of that moment (arXiv 1712.00378);
- raw actions are stored; only the environment receives them mapped to its bounds;
- advantages are normalized per minibatch, across all devices; segments are drawn per device.

Shapes: T steps, N environments and minibatch B per device, D devices, S seeds.

    python ppo_vtrace.py --hide-velocity --num-seeds 5 --num-evals 20

Pendulum-v1 without velocity: return -208 ± 7 (no memory: -1063 ± 22).
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro", "wandb"]
# ///

import dataclasses
import difflib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Avoids an XLA:CPU deadlock with vmapped loops.
os.environ.setdefault("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_cpu_enable_concurrency_optimized_scheduler=false"

import distrax
import flax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
import tyro
from flax import nnx
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.extend.backend import clear_backends

SCRIPT = "ppo_vtrace"


# ----------------------------------------- config
class ConfigError(Exception):
    """Invalid input."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Recurrent PPO with V-trace advantages and prioritized segments."""

    # Environment
    env_id: str = "Pendulum-v1"  # gymnax environment or brax/<name>
    env_params: str = ""  # JSON object of environment parameters
    hide_velocity: bool = False  # observe positions only (CartPole-v1, Pendulum-v1)
    total_timesteps: float = 5e5  # environment steps per seed (at most)
    num_envs: int = 64  # parallel environments per seed, over all devices
    num_steps: int = 32  # rollout length
    # Algorithm
    update_epochs: int = 8  # epochs per rollout
    num_minibatches: int = 8  # minibatches per epoch
    recompute_advantages: bool = True  # for every minibatch; if off, once per rollout
    rho_clip: float = 1.0  # V-trace's rho-bar: cap on the ratio that weights a TD error
    c_clip: float = 1.0  # V-trace's c-bar: cap on the ratio that weights the trace
    draw_fraction: float = 0.5  # fraction of the segments that an epoch draws
    priority_alpha: float = 0.5  # exponent of a segment's mean |advantage|; 0: uniform
    priority_beta: float = 0.4  # initial exponent of the draw's importance weight, annealed to 1
    cell: Literal["gru", "lstm"] = "gru"  # recurrent cell
    memory: bool = True  # --no-memory clears the hidden state at every step, as an ablation
    policy: Literal["gaussian", "tanh_gaussian"] = "gaussian"  # for continuous actions
    normalize_reward: bool = True  # divide rewards by the std of their rolling discounted sum
    hidden_size: int = 64  # units of the encoder and of the cell
    lr: float = 1e-3  # Adam learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.97  # discount factor
    gae_lambda: float = 0.95  # trace decay of GAE
    clip_eps: float = 0.2  # clipping range of the probability ratio
    clip_value: bool = False  # clip the change in value to ±clip_eps
    ent_coef: float = 0.0  # entropy bonus coefficient
    vf_coef: float = 0.5  # value loss coefficient
    max_grad_norm: float = 0.5  # clip gradients to this norm
    target_kl: float | None = None  # drop further epochs above this approximate KL
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
            zero = ("seed", "gamma", "gae_lambda", "ent_coef", "vf_coef", "priority_alpha")
            low = 0 if name in (*zero, "priority_beta") else 1e-12
            high = 1 if name in ("gamma", "gae_lambda", "draw_fraction", "priority_beta") else 1e18
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
POSITIONS = {"CartPole-v1": np.array([0, 2]), "Pendulum-v1": np.array([0, 1])}  # indices into obs


def make_env(config: Config) -> tuple:
    """Edit here to bring your own environment; episodes must end. Raises ConfigError.

    Returns reset(key) -> (obs, env_state), step(key, env_state, action) -> (obs, env_state, reward,
    terminated, truncated, next_obs), the number or dimension n of actions, and whether they are
    discrete. `step` resets after an episode: `obs` then starts the next one, but `next_obs` is the
    true final observation. Continuous actions lie in [-1, 1]^n.
    """
    if config.env_id.startswith("brax/"):
        if config.hide_velocity:
            raise ConfigError("hide_velocity does not work with Brax")
        return make_brax_env(config)
    names = gymnax.registered_envs
    if config.env_id not in names:
        nearest = difflib.get_close_matches(config.env_id, names, cutoff=0)
        raise ConfigError(f"unknown env_id {config.env_id}: did you mean {', '.join(nearest)}?")
    if config.hide_velocity and config.env_id not in POSITIONS:
        raise ConfigError(f"hide_velocity: add {config.env_id} to POSITIONS")
    env, params = gymnax.make(config.env_id)
    try:
        params = params.replace(**json.loads(config.env_params or "{}"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_params: {error}; known: {', '.join(vars(params))}") from None
    space = env.action_space(params)
    obs_space = env.observation_space(params)
    is_discrete = hasattr(space, "n")
    visible = POSITIONS[config.env_id] if config.hide_velocity else slice(None)

    def encode(obs):
        return obs[visible] if obs_space.shape else jax.nn.one_hot(obs, obs_space.n)

    def reset(key):
        obs, env_state = env.reset(key, params)
        return encode(obs), env_state

    def step(key, env_state, action):
        if not is_discrete:
            action = space.low + (space.high - space.low) * (action + 1) / 2
        outcome = env.step(key, env_state, action, params)
        obs, env_state, reward, terminated, truncated, info = outcome
        next_obs = encode(info["final_observation"])
        return encode(obs), env_state, jnp.float32(reward), terminated, truncated, next_obs

    return reset, step, space.n if is_discrete else space.shape[0], is_discrete


def make_brax_env(config: Config) -> tuple:
    """brax/<name>; its one parameter is the time limit, 1000 steps by default."""
    try:
        import brax.envs
    except ImportError:
        raise ConfigError(f"{config.env_id} needs Brax: pip install brax") from None
    names = [f"brax/{name}" for name in brax.envs._envs]
    if config.env_id not in names:
        raise ConfigError(f"unknown env_id {config.env_id}; known: {', '.join(names)}")
    try:
        params = {"max_steps_in_episode": 1000} | json.loads(config.env_params or "{}")
        (time_limit,) = map(int, params.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_params: {error}; known: max_steps_in_episode") from None
    env = brax.envs.create(config.env_id.removeprefix("brax/"), time_limit, auto_reset=False)

    def reset(key):
        env_state = env.reset(key)
        return env_state.obs, env_state

    def step(key, env_state, action):
        last = env.step(env_state, action)
        done, truncated = last.done > 0, last.info["truncation"] > 0
        # Brax's own auto-reset would always return to the same state.
        env_state = optax.tree.where(done, env.reset(key), last)
        return env_state.obs, env_state, last.reward, done & ~truncated, truncated, last.obs

    return reset, step, env.action_size, False


# ---------------------------------------- network
def dense(inputs: int, features: int, scale: float, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.orthogonal(scale)
    return nnx.Linear(inputs, features, kernel_init=init, rngs=rngs)


class GaussianPolicy(distrax.Independent):
    """Independent normal distributions; the environment receives the clipped action."""

    def to_env(self, raw: jax.Array) -> jax.Array:
        return jnp.clip(raw, -1.0, 1.0)


class TanhGaussianPolicy(distrax.Independent):
    """Independent normal distributions over raw; log_prob and entropy are those of tanh(raw)."""

    def to_env(self, raw: jax.Array) -> jax.Array:
        return jnp.tanh(raw)

    def log_slope(self, raw: jax.Array) -> jax.Array:
        """Sum of log(1 - tanh(raw)^2) (arXiv 1801.01290, appendix C), in a stable form."""
        return 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw)).sum(-1)

    def log_prob(self, raw: jax.Array) -> jax.Array:
        return super().log_prob(raw) - self.log_slope(raw)

    def entropy(self) -> jax.Array:
        nodes, weights = np.polynomial.hermite_e.hermegauss(16)  # quadrature of E[log_slope]
        slope = lambda node: self.log_slope(self.mean() + self.stddev() * node)
        return super().entropy() + jnp.tensordot(weights / weights.sum(), jax.vmap(slope)(nodes), 1)


class Moments(NamedTuple):
    """Running mean and variance."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array  # [] float32


def update_moments(moments: Moments, batch: jax.Array) -> Moments:
    """Merge [T * N, ...] from all devices (Chan et al. 1979, eq. 2.1).

    Stores mean and variance: running sums would lose precision in float32.
    """
    mean = jax.lax.pmean(batch.mean(axis=0), "devices")
    var = jax.lax.pmean(((batch - mean) ** 2).mean(axis=0), "devices")
    size = len(batch) * jax.lax.axis_size("devices")
    weight = size / (moments.count + size)
    delta = mean - moments.mean
    return Moments(
        mean=moments.mean + weight * delta,
        var=moments.var + weight * (var - moments.var + (1 - weight) * delta**2),
        count=moments.count + size,
    )


class Memory(nnx.Module):
    """An encoder and a recurrent cell."""

    def __init__(self, obs_size: int, config: Config, rngs: nnx.Rngs):
        cell = nnx.GRUCell if config.cell == "gru" else nnx.LSTMCell
        self.encoder = dense(obs_size, config.hidden_size, 2**0.5, rngs)
        self.cell = cell(config.hidden_size, config.hidden_size, rngs=rngs)
        self.forget = not config.memory

    def __call__(self, obs: jax.Array, carry: Any, reset: jax.Array):
        """H = hidden_size; obs [T, ...], carry, reset [T] -> outputs [T, H], carries [T]."""

        def step(carry, x):
            features, clear = x
            carry = jax.tree.map(lambda c: jnp.where(clear, 0, c), carry)
            carry, output = self.cell(carry, features)
            return carry, (output, carry)

        features = nnx.tanh(self.encoder(obs.reshape(len(obs), -1)))
        return jax.lax.scan(step, carry, (features, reset | self.forget))[1]


class ActorCritic(nnx.Module):
    """Actor and critic without shared layers."""

    def __init__(
        self, obs_size: int, num_actions: int, policy: str, config: Config, rngs: nnx.Rngs
    ):
        self.actor = Memory(obs_size, config, rngs)
        self.critic = Memory(obs_size, config, rngs)
        self.output = dense(config.hidden_size, num_actions, 0.01, rngs)
        self.value = dense(config.hidden_size, 1, 1.0, rngs)
        if policy != "categorical":
            self.log_std = nnx.Param(jnp.zeros(num_actions))
        self.policy = policy

    def __call__(self, obs: jax.Array, hidden: Any, reset: jax.Array):
        """obs [T, ...], hidden, reset [T] -> output, value and hidden of all T steps."""
        x, actor_hidden = self.actor(obs, hidden[0], reset)
        output = self.output(x)
        x, critic_hidden = self.critic(obs, hidden[1], reset)
        value = self.value(x).squeeze(-1)
        return output, value, (actor_hidden, critic_hidden)

    def policy_of(self, output: jax.Array):
        """[..., n] -> distribution of actions."""
        if self.policy == "categorical":
            return distrax.Categorical(output)
        std = jnp.broadcast_to(jnp.exp(self.log_std[...]), output.shape)
        kind = GaussianPolicy if self.policy == "gaussian" else TanhGaussianPolicy
        return kind(distrax.Normal(output, std), 1)


# ---------------------------------------- rollout
class Transition(NamedTuple):
    """One step of one environment."""

    obs: jax.Array
    reset: jax.Array  # clear memory before reading obs
    hidden: Any  # carries of the cells before reading obs
    action: jax.Array  # raw, if continuous
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array  # reached a terminal state
    next_obs: jax.Array  # the true one, even at the end of an episode
    done: jax.Array  # terminated or truncated
    episode: jax.Array  # [3] return, length, rolling discounted sum


class RunnerState(NamedTuple):
    """Rollout carry of one environment."""

    key: jax.Array  # [2] raw, so a checkpoint can hold it
    obs: jax.Array
    env_state: Any
    hidden: Any  # carries of the cells before reading obs
    done: jax.Array = np.bool(False)  # of the previous step
    episode: jax.Array = np.zeros(3, np.float32)  # of the previous step


class TrainState(NamedTuple):
    """Training carry of one seed; outside make_train, with leading axes [D, S]."""

    key: jax.Array  # [2]
    params: Any
    opt_state: Any
    runner: RunnerState  # [N]
    best: Any  # parameters that scored best_return
    return_stats: Moments = Moments(np.float32(0), np.float32(1), np.float32(0))  # discounted sums
    update: jax.Array = np.int32(0)
    eval_return: jax.Array = np.float32(np.nan)
    best_return: jax.Array = np.float32(-np.inf)
    absolute_return: jax.Array = np.float32(0)  # of `best`, on new episodes


def episode_stats(rollout: Transition) -> dict[str, jax.Array]:
    """Means over the episodes that ended in a rollout [T, N]; NaN if none did."""
    count = jax.lax.psum(rollout.done.sum(dtype=jnp.float32), "devices")
    mean = jax.lax.psum((rollout.episode * rollout.done[..., None]).sum((0, 1)), "devices") / count
    return {"episode/return": mean[0], "episode/length": mean[1], "episode/count": count}


def scale_reward(rollout: Transition, return_stats: Moments) -> tuple[Transition, Moments]:
    """Divide rewards [T, N] by the standard deviation of their rolling discounted sums.

    Engstrom et al. 2020 (arXiv 2005.12729), section 3. Clipped to ±10, as in VecNormalize:
    otherwise a first reward of 1 after many zeros could reach hundreds.
    """
    return_stats = update_moments(return_stats, rollout.episode[..., 2].reshape(-1))
    reward = jnp.clip(rollout.reward / jnp.sqrt(return_stats.var + 1e-8), -10, 10)
    return rollout._replace(reward=reward), return_stats


# -------------------------------------- advantage
def compute_vtrace(ratio, reward, value, next_value, terminated, done, config: Config):
    """V-trace (arXiv 1802.01561, eq. 1 and remark 2) as generalized advantage estimation.

    All arrays are [T, ...]. `ratio` is that of the current policy to the one that acted,
    `next_value` the value of the true next observation, and `done` is terminated | truncated. With
    ratio 1 and caps >= 1 this is GAE (arXiv 1506.02438, eq. 16). Returns (advantage, target). The
    advantage contains a capped ratio and ppo_loss applies the ratio again; V-trace applies it once.
    """
    # Only a termination stops the bootstrap; any episode end cuts the trace.
    delta = reward + config.gamma * (1.0 - terminated) * next_value - value
    delta *= jnp.minimum(ratio, config.rho_clip)
    decay = config.gamma * config.gae_lambda * (1.0 - done)
    decay *= jnp.minimum(ratio, config.c_clip)

    def step(advantage, x):
        delta, decay = x
        advantage = delta + decay * advantage
        return advantage, advantage

    _, advantage = jax.lax.scan(step, jnp.zeros_like(delta[-1]), (delta, decay), reverse=True)
    return advantage, advantage + value


# ------------------------------------------- loss
def ppo_loss(params, replay, batch: Transition, advantage, target, weight, config: Config):
    """Clipped surrogate (arXiv 1707.06347, eq. 7), value loss and entropy bonus (eq. 9).

    All arrays are [B, T, ...], except weight [B] and batch.hidden [B, 1, ...]; the advantage is
    normalized. Only policy and value loss are weighted. Returns (loss, metrics).
    """
    policy, value, _ = jax.vmap(replay, (None, 0))(params, batch)
    log_ratio = policy.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_eps, 1 + config.clip_eps)
    surrogate = jnp.minimum(ratio * advantage, clipped_ratio * advantage)
    policy_loss = -(weight[:, None] * surrogate).mean()
    value_error = (value - target) ** 2
    if config.clip_value:
        change = jnp.clip(value - batch.value, -config.clip_eps, config.clip_eps)
        value_error = jnp.maximum(value_error, (batch.value + change - target) ** 2)
    value_loss = 0.5 * (weight[:, None] * value_error).mean()
    entropy = policy.entropy().mean()
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {
        "loss/total": loss,
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": (ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html
        "policy/clip_fraction": (jnp.abs(ratio - 1) > config.clip_eps).mean(),
    }


# ------------------------------------------ train
def draw_segments(key, priority, count: int) -> tuple[jax.Array, jax.Array]:
    """Gumbel top-k: draw `count` segments without replacement, in proportion to priority [N] > 0.

    Returns rows [count] and each one's probability of being drawn, given the best score left
    out: P(score > left_out) = 1 - exp(-priority / exp(left_out)) (Kool et al. 2019, arXiv
    1903.06059, section 4).
    """
    score = jnp.log(priority) + jax.random.gumbel(key, priority.shape)
    order = jnp.argsort(-score)
    left_out = score[order[count]] if count < len(order) else -jnp.inf
    rows = order[:count]
    return rows, -jnp.expm1(-priority[rows] * jnp.exp(-left_out))


def make_train(config: Config) -> tuple:
    """Returns init, train and (for sweeps: docs/runs.md) init_seed, train_seed. Raises ConfigError.

    init(keys [D]) -> state and train(state) -> (state, metrics) are pmapped. `train` runs
    `updates_per_eval` updates of each seed, then evaluates. Metrics [D, updates, S] are NaN
    where unmeasured.
    """
    num_devices = jax.device_count()
    num_envs = config.num_envs // num_devices  # N
    num_drawn = round(num_envs * config.draw_fraction)  # segments per epoch
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs = {config.num_envs} is not divisible by {num_devices} devices")
    if not num_drawn or num_drawn % config.num_minibatches:
        multiple = f"a positive multiple of num_minibatches = {config.num_minibatches}"
        raise ConfigError(f"num_envs * draw_fraction is {num_drawn} per device: not {multiple}")
    if config.updates_per_eval < 1:
        raise ConfigError(f"total_timesteps must be >= {config.num_evals * config.batch_size}")
    env_reset, env_step, num_actions, is_discrete = make_env(config)
    policy_type = "categorical" if is_discrete else config.policy
    obs_size = jax.eval_shape(env_reset, jax.random.key(0))[0].size
    # Parameters live in a plain dict, for optax and the checkpoint; graphdef is the rest.
    build = lambda key: ActorCritic(obs_size, num_actions, policy_type, config, nnx.Rngs(key))
    graphdef = nnx.graphdef(nnx.eval_shape(build, jax.random.key(0)))
    decay = jnp.array([1.0, 1.0, config.gamma])  # per-step factors of Transition.episode
    kl_limit = jnp.inf if config.target_kl is None else config.target_kl
    pmean = lambda x: jax.lax.pmean(x, "devices")

    def learning_rate(update):
        return jnp.float32(config.lr * (1 - config.anneal_lr * update / config.num_updates))

    def optimizer(update):  # constant lr within an update
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        return optax.chain(clip, optax.adam(learning_rate(update), eps=1e-5))

    def start_episode(key):
        key, reset_key = jax.random.split(key)
        zeros = jnp.zeros(config.hidden_size)
        carry = zeros if config.cell == "gru" else (zeros, zeros)
        return RunnerState(key, *env_reset(reset_key), hidden=(carry, carry))

    def infer(params, obs, hidden, reset):
        """One step of one environment -> policy, value [], hidden."""
        obs, reset = jax.tree.map(lambda x: x[None], (obs, reset))
        network = nnx.merge(graphdef, params)
        outputs = network(obs, hidden, reset)
        output, value, hidden = jax.tree.map(lambda x: x[0], outputs)
        return network.policy_of(output), value, hidden

    def replay(params, segment):
        """Rerun a segment [T] from its first stored carry -> policy, value and hidden [T]."""
        first = jax.tree.map(lambda x: x[0], segment.hidden)
        network = nnx.merge(graphdef, params)
        output, value, hidden = network(segment.obs, first, segment.reset)
        return network.policy_of(output), value, hidden

    def vtrace(params, segment):
        """Advantage and target [T] under `params`."""
        policy, value, hidden = replay(params, segment)
        infer_next = jax.vmap(infer, (None, 0, 0, None))
        # `hidden` has read obs; next_obs is of the same episode: no reset.
        _, next_value, _ = infer_next(params, segment.next_obs, hidden, jnp.bool(False))
        ratio = jnp.exp(policy.log_prob(segment.action) - segment.log_prob)
        steps = (segment.reward, value, next_value, segment.terminated, segment.done)
        return compute_vtrace(ratio, *steps, config)

    def step(params, runner, greedy=False):
        """One step of one environment."""
        key, action_key, step_key = jax.random.split(runner.key, 3)
        policy, value, hidden = infer(params, runner.obs, runner.hidden, runner.done)
        action = policy.mode() if greedy else policy.sample(seed=action_key)
        env_action = action if is_discrete else policy.to_env(action)
        outcome = env_step(step_key, runner.env_state, env_action)
        obs, env_state, reward, terminated, truncated, next_obs = outcome
        transition = Transition(
            obs=runner.obs,
            reset=runner.done,
            hidden=runner.hidden,
            action=action,
            log_prob=policy.log_prob(action),
            value=value,
            reward=reward,
            terminated=terminated,
            next_obs=next_obs,
            done=terminated | truncated,
            episode=runner.episode * ~runner.done * decay + jnp.stack([reward, 1.0, reward]),
        )
        runner = RunnerState(key, obs, env_state, hidden, transition.done, transition.episode)
        return runner, transition

    def episode_return(params, key):
        unfinished = lambda runner: ~runner.done
        play = lambda runner: step(params, runner, config.eval_greedy)[0]
        return jax.lax.while_loop(unfinished, play, start_episode(key)).episode[0]

    def evaluate(i, state):
        """Round 0 scores `params` and updates `best`; final rounds 1 to 10 score `best`."""
        key, eval_key = jax.random.split(state.key)
        keys = jax.random.split(eval_key, -(-config.eval_episodes // num_devices))
        params = optax.tree.where(i == 0, state.params, state.best)
        result = pmean(jax.vmap(episode_return, (None, 0))(params, keys).mean())
        improved = (i == 0) & (result > state.best_return)
        return state._replace(
            key=key,
            best=optax.tree.where(improved, state.params, state.best),
            eval_return=jnp.where(i == 0, result, state.eval_return),
            best_return=jnp.where(improved, result, state.best_return),
            absolute_return=jnp.where(i == 0, 0.0, state.absolute_return + result / 10),
        )

    def update_minibatch(state, minibatch):
        batch, advantage, target, weight = minibatch  # [B, T, ...], [B]
        if config.recompute_advantages:  # outside the gradient
            advantage, target = jax.vmap(vtrace, (None, 0))(state.params, batch)
        # Mean, variance and gradient span all devices.
        advantage -= pmean(advantage.mean())
        advantage /= jnp.sqrt(pmean((advantage**2).mean())) + 1e-8
        loss_grad = jax.grad(ppo_loss, has_aux=True)
        grads, metrics = loss_grad(state.params, replay, batch, advantage, target, weight, config)
        grads, metrics = pmean((grads, metrics))
        metrics["optim/grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer(state.update).update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics

    def update_epochs(state, samples):
        """Drop epochs once approx_kl exceeds target_kl. Returns state, last kept metrics."""
        _, advantage, _ = samples
        priority = jnp.abs(advantage).mean(1) ** config.priority_alpha + 1e-8  # [N]
        progress = state.update / config.num_updates
        beta = config.priority_beta + (1 - config.priority_beta) * progress

        def update_epoch(carry, key):
            state, stop = carry
            rows, probability = draw_segments(key, priority, num_drawn)
            weight = probability**-beta
            drawn = (*jax.tree.map(lambda x: x[rows], samples), weight / weight.mean())
            split = lambda x: x.reshape(config.num_minibatches, -1, *x.shape[1:])
            minibatches = jax.tree.map(split, drawn)  # [num_minibatches, B, ...] by score
            updated, metrics = jax.lax.scan(update_minibatch, state, minibatches)
            metrics = jax.tree.map(jnp.mean, metrics)
            state = optax.tree.where(stop, state, updated)
            return (state, stop | (metrics["policy/approx_kl"] > kl_limit)), (metrics, stop)

        keys = jax.random.split(state.key, 1 + config.update_epochs)
        carry = (state._replace(key=keys[0]), jnp.bool(False))
        (state, _), (metrics, skipped) = jax.lax.scan(update_epoch, carry, keys[1:])
        last = jnp.sum(~skipped) - 1
        return state, jax.tree.map(lambda x: x[last], metrics)

    def update_step(state, _):
        step_envs = lambda runner, _: jax.vmap(step, (None, 0))(state.params, runner)
        runner, rollout = jax.lax.scan(step_envs, state.runner, None, config.num_steps)  # [T, N]
        if config.normalize_reward:
            rollout, return_stats = scale_reward(rollout, state.return_stats)
            state = state._replace(return_stats=return_stats)
        first = jax.tree.map(lambda x: x[:1], rollout.hidden)  # all that `replay` needs
        rollout = rollout._replace(hidden=first)
        segments = jax.tree.map(lambda x: x.swapaxes(0, 1), rollout)  # [N, T, ...]
        advantage, target = jax.vmap(vtrace, (None, 0))(state.params, segments)  # GAE if caps >= 1
        state, metrics = update_epochs(state, (segments, advantage, target))
        # The advantage is target - value, the error of the value.
        error, target = jax.lax.all_gather((advantage, target), "devices")
        metrics["value/explained_variance"] = 1 - jnp.var(error) / jnp.var(target)
        metrics["optim/lr"] = learning_rate(state.update)
        metrics |= episode_stats(rollout)
        return state._replace(runner=runner, update=state.update + 1), metrics

    def init_seed(key):
        params_key, runner_key, key = jax.random.split(key, 3)
        runner = jax.vmap(start_episode)(jax.random.split(runner_key, num_envs))
        # Environments differ by device; the network must not.
        params_key = jax.lax.all_gather(params_key, "devices")[0]
        params = nnx.to_pure_dict(nnx.state(build(params_key)))
        return TrainState(key, params, optimizer(0).init(params), runner, best=params)

    def train_seed(state):
        state, metrics = jax.lax.scan(update_step, state, None, config.updates_per_eval)
        # At the end, ten more rounds: the absolute metric (Gorsane et al. 2022, arXiv 2209.10485).
        rounds = jnp.where(state.update < config.num_updates, 1, 11)
        state = jax.lax.fori_loop(0, rounds, evaluate, state)
        eval_return = jnp.full(config.updates_per_eval, jnp.nan).at[-1].set(state.eval_return)
        return state, {**metrics, "eval/return": eval_return}

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
