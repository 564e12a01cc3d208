"""Recurrent PPO with a GRU, on XLand-MiniGrid environments.

PPO (Schulman et al. 2017, arXiv 1707.06347) with GAE (Schulman et al. 2015, arXiv 1506.02438).
All seeds train and evaluate in one XLA program. Details that matter:
- a time limit is not a termination: it cuts the trace, but the return still bootstraps from the
  value of the true final observation (Pardo et al. 2018, arXiv 1712.00378);
- advantages are normalized per minibatch, across all devices.

Shapes: T steps, N environments and minibatch B per device, D devices, S seeds.

    python ppo_rnn.py --env-id MiniGrid-Empty-6x6 --num-envs 8192

Return 0.9556 ± 0.0003 (5 seeds); one seed: 84k steps/s, 47 s in all on two CPU cores.
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "jax<0.12", "tqdm", "tyro", "wandb", "xminigrid>=0.9.3"]
# ///

import dataclasses
import difflib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# Avoids an XLA:CPU deadlock with vmapped loops.
os.environ.setdefault("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_cpu_enable_concurrency_optimized_scheduler=false"

import distrax
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
import tyro
import xminigrid
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.extend.backend import clear_backends

SCRIPT = "ppo_rnn"


# ----------------------------------------- config
class ConfigError(Exception):
    """Invalid input."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Recurrent PPO with a GRU, on XLand-MiniGrid environments."""

    # Environment
    env_id: str = "MiniGrid-Empty-6x6"  # xminigrid environment
    env_params: str = ""  # JSON object of environment parameters
    benchmark_id: str = ""  # XLand benchmark to draw rulesets from, e.g. small-1m
    ruleset_id: int | None = None  # ruleset of benchmark_id; None: a random one per episode
    img_obs: bool = False  # observe pixels instead of symbols
    total_timesteps: float = 3e6  # environment steps per seed (at most)
    num_envs: int = 256  # parallel environments per seed, over all devices
    num_steps: int | None = None  # rollout length; None: 64, 32 in Memory*, 16 if num_envs > 1024
    # Algorithm
    update_epochs: int | None = None  # epochs per rollout; None: 1, or 4 in MiniGrid-Memory*
    num_minibatches: int = 16  # minibatches per epoch
    embedding_size: int | None = 8  # features per tile; None: one-hot tiles
    conv_size: int = 8  # channels of the first convolution; 4 times as many on a 3 x 3 view
    hidden_size: int = 64  # units of the GRU
    head_size: int = 64  # width of the actor's and the critic's hidden layer
    memory: bool = True  # --no-memory clears the hidden state at every step, as an ablation
    bf16: bool = False  # compute the network in bfloat16; parameters stay float32
    lr: float = 3e-3  # Adam learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # trace decay of GAE
    clip_eps: float = 0.2  # clipping range of the probability ratio
    clip_value: bool = False  # clip the change in value to ±clip_eps
    ent_coef: float = 0.01  # entropy bonus coefficient
    vf_coef: float = 0.5  # value loss coefficient
    min_advantage_std: float = 0.05  # divide advantages by at least this, or noise drowns rewards
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
            low = 0 if name.endswith(("seed", "gamma", "lambda", "coef", "_id")) else 1e-12
            high = 1 if name in ("gamma", "gae_lambda") else 1e18
            if type(value) in (int, float) and not low <= value <= high:
                raise ConfigError(f"{name} = {value} is not in {'(' if low else '['}0, {high:g}]")

    @property
    def batch_size(self) -> int:
        """Environment steps per update, over all devices."""
        length = 32 if "MiniGrid-Memory" in self.env_id else 64
        return self.num_envs * (self.num_steps or (length if self.num_envs <= 1024 else 16))

    @property
    def updates_per_eval(self) -> int:
        return int(self.total_timesteps) // (self.batch_size * self.num_evals)

    @property
    def num_updates(self) -> int:
        return self.updates_per_eval * self.num_evals


# ------------------------------------ environment
class Observation(NamedTuple):
    grid: jax.Array  # [V, V, 2] uint8, tile and color in view
    direction: jax.Array  # [] the agent's, 0 to 3
    prev_action: jax.Array  # [] -1 if none
    prev_reward: jax.Array  # [] 0 if none


def load_tasks(config: Config, params):
    """Returns sample_task(key) -> parameters of the environment. Raises ConfigError."""
    if not hasattr(params, "ruleset"):  # a task of MiniGrid
        if config.benchmark_id or config.ruleset_id is not None:
            raise ConfigError(f"{config.env_id} takes no benchmark: use an XLand-MiniGrid env_id")
        return lambda key: params
    try:
        benchmark = xminigrid.load_benchmark(config.benchmark_id)
    except Exception as error:  # e.g. a corrupt file
        raise ConfigError(f"benchmark_id: {error}; if offline, set XLAND_MINIGRID_DATA") from None
    if config.ruleset_id is None:
        return lambda key: params.replace(ruleset=benchmark.sample_ruleset(key))
    if config.ruleset_id >= benchmark.num_rulesets():
        raise ConfigError(f"ruleset_id must be < {benchmark.num_rulesets()}")
    return lambda key: params.replace(ruleset=benchmark.get_ruleset(config.ruleset_id))


def make_env(config: Config) -> tuple:
    """Edit here to bring your own environment; episodes must end. Raises ConfigError.

    Returns reset(key) -> (obs, env_state), step(key, env_state, action) -> (obs, env_state, reward,
    terminated, truncated, next_obs) and the number of actions. `step` resets after an episode:
    `obs` then starts the next one, but `next_obs` is the true final observation.
    """
    names = xminigrid.registered_environments()
    if config.env_id not in names:
        nearest = difflib.get_close_matches(config.env_id, names, cutoff=0)
        raise ConfigError(f"unknown env_id {config.env_id}: did you mean {', '.join(nearest)}?")
    env, params = xminigrid.make(config.env_id)
    try:
        params = params.replace(**json.loads(config.env_params or "{}"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_params: {error}; known: {', '.join(vars(params))}") from None
    sample_task = load_tasks(config, params)
    num_actions = env.num_actions(params)

    def observe(ts, action):
        return Observation(ts.observation, ts.state.agent.direction, action, ts.reward)

    def reset(key):
        task_key, reset_key = jax.random.split(key)
        env_state = env.reset(sample_task(task_key), reset_key)
        return observe(env_state, jnp.int32(-1)), env_state

    def step(key, env_state, action):
        timestep = env.step(params, env_state, action)  # uses env_state's ruleset
        terminated = timestep.discount == 0
        truncated = timestep.last() & ~terminated
        next_obs = observe(timestep, action)
        obs, env_state = optax.tree.where(timestep.last(), reset(key), (next_obs, timestep))
        return obs, env_state, timestep.reward, terminated, truncated, next_obs

    return reset, step, num_actions


# ---------------------------------------- network
def dense(features: int, scale: float, dtype: Any) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale), dtype=dtype)


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014, arXiv 1406.1078v1), nn.GRUCell but for its init."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, hidden: jax.Array, reset: jax.Array) -> jax.Array:
        """x [T, F], hidden [H], reset [T] (before x is read) -> hidden states [T, H]."""
        inputs = nn.Dense(3 * hidden.size, dtype=self.dtype)(x)  # [T, 3 H]
        kernel = self.param("kernel", nn.initializers.orthogonal(), (hidden.size, 3 * hidden.size))
        bias = self.param("bias", nn.initializers.zeros, hidden.shape)
        kernel, bias, hidden = (p.astype(inputs.dtype) for p in (kernel, bias, hidden))

        def step(hidden, x):
            inputs, clear = x
            hidden = jnp.where(clear, 0, hidden)
            reset_x, update_x, new_x = jnp.split(inputs, 3)
            reset_h, update_h, new_h = jnp.split(hidden @ kernel, 3)
            update = nn.sigmoid(update_x + update_h)
            new = jnp.tanh(new_x + nn.sigmoid(reset_x + reset_h) * (new_h + bias))
            hidden = (1 - update) * new + update * hidden
            return hidden, hidden

        return jax.lax.scan(step, hidden, (inputs, reset))[1]


class ActorCritic(nn.Module):
    """A policy and a value function."""

    num_actions: int
    config: Config

    @nn.compact
    def __call__(self, obs: Observation, hidden: jax.Array, reset: jax.Array):
        """obs [T, ...], hidden [H], reset [T] -> policy, value and hidden of all T steps."""
        config = self.config
        dtype = jnp.bfloat16 if config.bf16 else jnp.float32
        if config.img_obs:
            x = self.embed_pixels(obs.grid, dtype)
        else:
            tile = jax.nn.one_hot(obs.grid[..., 0], xminigrid.core.constants.NUM_TILES)
            color = jax.nn.one_hot(obs.grid[..., 1], xminigrid.core.constants.NUM_COLORS)
            x = jnp.concatenate([tile, color], axis=-1)  # [T, V, V, tiles + colors]
            if config.embedding_size:  # a lookup's gradient would be a scatter
                x = nn.Dense(config.embedding_size, use_bias=False, dtype=dtype)(x)
        for k in (1, 2, 4) if x.shape[1] > 3 else (4, 8):  # a 3 x 3 view has room for two
            size = x.shape[1] - 1  # im2col: a VALID 2 x 2 nn.Conv, faster on CPU
            patches = [x[:, i : size + i, j : size + j] for i in range(2) for j in range(2)]
            x = nn.relu(dense(k * config.conv_size, 2**0.5, dtype)(jnp.concatenate(patches, -1)))
        direction = jax.nn.one_hot(obs.direction, 4)
        prev_action = jax.nn.one_hot(obs.prev_action, self.num_actions)
        features = [x.reshape(len(x), -1), direction, prev_action, obs.prev_reward[:, None]]
        hidden = GRU(dtype)(jnp.concatenate(features, -1), hidden, reset | (not config.memory))
        actor = nn.tanh(dense(config.head_size, 2**0.5, dtype)(hidden))
        critic = nn.tanh(dense(config.head_size, 2**0.5, dtype)(hidden))
        logits = dense(self.num_actions, 0.01, dtype)(actor).astype(jnp.float32)
        value = dense(1, 1.0, dtype)(critic).astype(jnp.float32).squeeze(-1)
        return distrax.Categorical(logits), value, hidden.astype(jnp.float32)

    def embed_pixels(self, grid: jax.Array, dtype: Any) -> jax.Array:
        """Render here, 32 x 32 pixels per tile: rollouts store symbols, 1500 times less."""
        with jax.ensure_compile_time_eval():  # the import creates arrays
            from xminigrid.experimental.img_obs import _render_obs

        x = jax.vmap(_render_obs)(grid) / 255  # [T, 32 V, 32 V, 3]
        for features, stride in ((16, 8), (self.config.conv_size, 4)):
            size = x.shape[1] // stride
            x = x.reshape(len(x), size, stride, size, stride, -1).swapaxes(2, 3)
            x = nn.relu(dense(features, 2**0.5, dtype)(x.reshape(len(x), size, size, -1)))
        return x


# ---------------------------------------- rollout
class Transition(NamedTuple):
    """One step of one environment."""

    obs: Observation
    reset: jax.Array  # clear memory before reading obs
    hidden: jax.Array  # [H] before reading obs
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array  # reached a terminal state
    next_obs: Observation  # the true one, even at the end of an episode
    done: jax.Array  # terminated or truncated
    episode: jax.Array  # [2] return and length so far


class RunnerState(NamedTuple):
    """Rollout carry of one environment."""

    key: jax.Array  # [2] raw, so a checkpoint can hold it
    obs: Observation
    env_state: Any
    hidden: jax.Array  # [H] before reading obs
    done: jax.Array = np.bool(False)  # of the previous step
    episode: jax.Array = np.zeros(2, np.float32)  # of the previous step


class TrainState(NamedTuple):
    """Training carry of one seed; outside make_train, with leading axes [D, S]."""

    key: jax.Array  # [2]
    params: Any
    opt_state: Any
    runner: RunnerState  # [N]
    best: Any  # parameters that scored best_return
    update: jax.Array = np.int32(0)
    eval_return: jax.Array = np.float32(np.nan)
    best_return: jax.Array = np.float32(-np.inf)
    absolute_return: jax.Array = np.float32(0)  # of `best`, on new episodes


def episode_stats(rollout: Transition) -> dict[str, jax.Array]:
    """Means over the episodes that ended in a rollout [T, N]; NaN if none did."""
    count = jax.lax.psum(rollout.done.sum(dtype=jnp.float32), "devices")
    mean = jax.lax.psum((rollout.episode * rollout.done[..., None]).sum((0, 1)), "devices") / count
    return {"episode/return": mean[0], "episode/length": mean[1], "episode/count": count}


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
    inputs = (batch.obs, batch.hidden[:, 0], batch.reset)  # [B, T, ...], [B, H], [B, T]
    policy, value, _ = jax.vmap(apply_fn, (None, 0, 0, 0))(params, *inputs)
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
    num_steps = config.batch_size // config.num_envs  # T
    num_samples = num_envs  # sequences of T steps
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs = {config.num_envs} is not divisible by {num_devices} devices")
    if num_samples % config.num_minibatches:
        raise ConfigError(f"num_minibatches = {config.num_minibatches} must divide {num_samples}")
    if config.updates_per_eval < 1:
        raise ConfigError(f"total_timesteps must be >= {config.num_evals * config.batch_size}")
    env_reset, env_step, num_actions = make_env(config)
    network = ActorCritic(num_actions, config)
    epochs = config.update_epochs or (4 if "MiniGrid-Memory" in config.env_id else 1)
    config = dataclasses.replace(config, update_epochs=epochs)
    kl_limit = jnp.inf if config.target_kl is None else config.target_kl
    pmean = lambda x: jax.lax.pmean(x, "devices")

    def learning_rate(update):
        return jnp.float32(config.lr * (1 - config.anneal_lr * update / config.num_updates))

    def optimizer(update):  # constant lr within an update
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        return optax.chain(clip, optax.adam(learning_rate(update), eps=1e-5))

    def start_episode(key):
        key, reset_key = jax.random.split(key)
        return RunnerState(key, *env_reset(reset_key), jnp.zeros(config.hidden_size))

    def infer(params, runner):
        obs, reset = jax.tree.map(lambda x: x[None], (runner.obs, runner.done))  # T = 1
        return jax.tree.map(lambda x: x[0], network.apply(params, obs, runner.hidden, reset))

    def step(params, runner, greedy=False):
        """One step of one environment."""
        key, action_key, step_key = jax.random.split(runner.key, 3)
        policy, value, hidden = infer(params, runner)
        action = policy.mode() if greedy else policy.sample(seed=action_key)
        outcome = env_step(step_key, runner.env_state, action)
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
            episode=runner.episode * ~runner.done + jnp.stack([reward, 1.0]),
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
        batch, advantage, target = minibatch  # [B, ...]
        # Mean, variance and gradient span all devices.
        advantage -= pmean(advantage.mean())
        advantage /= jnp.maximum(jnp.sqrt(pmean((advantage**2).mean())), config.min_advantage_std)
        inputs = (network.apply, batch, advantage, target, config)
        grads, metrics = jax.grad(ppo_loss, has_aux=True)(state.params, *inputs)
        grads, metrics = pmean((grads, metrics))
        metrics["optim/grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = optimizer(state.update).update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics

    def update_epochs(state, samples):
        """Drop epochs once approx_kl exceeds target_kl. Returns state, last kept metrics."""

        def update_epoch(carry, key):
            state, stop = carry
            rows = shuffle(key, num_samples).reshape(config.num_minibatches, -1)
            minibatches = jax.tree.map(lambda x: x[rows], samples)  # [num_minibatches, B, ...]
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
        critic = lambda runner: jax.vmap(infer, (None, 0))(state.params, runner)[1]  # [N]

        def step_envs(runner, _):
            runner, x = jax.vmap(step, (None, 0))(state.params, runner)  # Transition [N]
            # Only time limits need this pass; at every step, it would cost 18%. Under vmap, a loop
            # can skip it, unlike lax.cond; the barrier keeps XLA from hoisting the loop body.
            final = runner._replace(obs=x.next_obs, done=jnp.zeros_like(runner.done))
            once = lambda _, value: critic(jax.lax.optimization_barrier((final, value))[0])
            value = jax.lax.fori_loop(0, jnp.int32((x.done & ~x.terminated).any()), once, x.value)
            return runner, (x._replace(next_obs=None), value)

        runner, (rollout, end_value) = jax.lax.scan(step_envs, state.runner, None, num_steps)
        next_value = jnp.concatenate([rollout.value[1:], critic(runner)[None]])
        next_value = jnp.where(rollout.done, end_value, next_value)  # [T, N]
        steps = (rollout.reward, rollout.value, next_value, rollout.terminated, rollout.done)
        advantage, target = compute_gae(*steps, config.gamma, config.gae_lambda)
        samples = (rollout._replace(hidden=rollout.hidden[:1]), advantage, target)  # hidden: t=0
        samples = jax.tree.map(lambda x: x.swapaxes(0, 1), samples)  # [N, T, ...]
        state, metrics = update_epochs(state, samples)
        error, target = jax.lax.all_gather((target - rollout.value, target), "devices")
        metrics["value/explained_variance"] = 1 - jnp.var(error) / jnp.var(target)
        metrics["optim/lr"] = learning_rate(state.update)
        metrics |= episode_stats(rollout)
        return state._replace(runner=runner, update=state.update + 1), metrics

    def init_seed(key):
        params_key, runner_key, key = jax.random.split(key, 3)
        runner = jax.vmap(start_episode)(jax.random.split(runner_key, num_envs))
        # Environments differ by device; the network must not.
        params_key = jax.lax.all_gather(params_key, "devices")[0]
        params = network.init(params_key, runner.obs, runner.hidden[0], runner.done)  # N acts as T
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
