"""Recurrent PPO with a GRU, on XLand-MiniGrid environments.

PPO (Schulman et al. 2017, arXiv 1707.06347) with GAE (Schulman et al. 2015, arXiv 1506.02438).
All seeds train and evaluate in one XLA program. What differs from most implementations:
- a time limit is not a termination: it cuts the trace, but the return still bootstraps from the
  value of the final observation (Pardo et al. 2018, arXiv 1712.00378);
- the advantages of a minibatch are normalized across all devices, by their standard deviation or
  by `--min-advantage-std`, whichever is larger.
A minibatch holds whole sequences, replayed from the hidden states before their first steps.

Axes: T steps, S seeds, D devices; on each device, N environments and minibatches of B sequences;
L layers of H hidden units, V x V tiles in view.

    python ppo_rnn.py --env-id MiniGrid-Empty-6x6 --num-envs 8192
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "jax<0.12", "tqdm", "tyro", "wandb", "xminigrid>=0.9.3"]
# ///

import bz2
import csv
import dataclasses
import difflib
import fcntl
import json
import math
import os
import pickle
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

# Works around an XLA:CPU deadlock with vmapped loops (jax 0.10).
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
FILE = globals().get("__file__", "")  # empty in a notebook
SOURCES = [FILE] if FILE else []  # copied to the run folder; files in environments/ add themselves
SCRIPT = Path(FILE or "ppo_rnn").stem  # names the runs: a renamed copy gets runs of its own
COMMAND = ["python", *sys.argv]  # printed on Ctrl-C; `main` adds the run folder


def stop_on_interrupt():
    """Ctrl-C ends the process at once, even during an import or inside a compiled program."""
    signal.sigwait([signal.SIGINT])
    print("\ninterrupted; to continue:", shlex.join(COMMAND), file=sys.stderr, flush=True)
    os._exit(130)


if __name__ == "__main__" and FILE:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # here and in all later threads
    threading.Thread(target=stop_on_interrupt, daemon=True).start()

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
from jax.flatten_util import ravel_pytree
from scipy import stats
from xminigrid.benchmarks import Benchmark


# ----------------------------------------- config
class ConfigError(ValueError):
    """An error that the user can correct. The command line reports it without a traceback."""


# Where to look for an environment that this script does not know.
OTHERS = "gymnax: ppo_ff.py, Brax: ppo_continuous.py, JaxMARL: ippo.py, others: environments/"
BRAX = "ant halfcheetah hopper humanoid inverted_pendulum pusher reacher swimmer walker2d"


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where agents act. For example: --env-id MiniGrid-Empty-6x6 --num-envs 8192"""

    env_id: str = "MiniGrid-Empty-6x6"  # xminigrid environment; "list" prints all
    env_params: str = "{}"  # JSON, e.g. '{"max_steps": 200}'
    num_envs: int = 256  # parallel environments per seed, over all devices
    benchmark_id: str = ""  # rulesets of XLand tasks: a benchmark, e.g. small-1m, or a file
    ruleset_id: int = -1  # the only ruleset in use; -1: a random one in every episode
    img_obs: bool = False  # the network sees each tile as 32 x 32 pixels, not as symbols


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How agents learn. For example: --num-layers 2 --lr 1e-3"""

    total_timesteps: float = 3e6  # steps per seed, rounded to whole updates per evaluation
    num_steps: int = 64  # rollout length; at most 16 if num_envs > 1024
    update_epochs: int = 1  # passes over each rollout
    num_minibatches: int = 16  # minibatches per epoch, of whole sequences
    num_layers: int = 1  # GRUs, each reading the one before; the heads read the sum of all
    hidden_size: int = 64  # units of a GRU
    embedding_size: int = 8  # features per tile; 0: one-hot tiles and colors
    conv_size: int = 8  # channels of the first convolution over tiles; times 4 on a 3 x 3 view
    head_size: int = 64  # width of the actor's and the critic's hidden layer
    lr: float = 3e-3  # Adam learning rate
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # trace decay of GAE
    clip_eps: float = 0.2  # clipping range of the probability ratio
    clip_value: bool = False  # also clip the change in value to clip_eps
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    anneal_ent: bool = False  # decay the entropy bonus linearly to zero
    vf_coef: float = 0.5  # value loss coefficient
    max_grad_norm: float = 0.5  # clip gradients to this global norm
    min_advantage_std: float = 0.05  # floor of the std that divides advantages
    memory: bool = True  # --no-memory clears the hidden state at every step, as an ablation
    bf16: bool = False  # compute the network in bfloat16; parameters stay float32


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run does. For example: --num-seeds 5 --eval-greedy"""

    seed: int = 0  # random seed
    num_seeds: int = 1  # independent training runs in one program
    num_evals: int = 10  # evaluations, each followed by a checkpoint
    eval_episodes: int = 128  # full episodes per evaluation and seed, over all devices
    eval_greedy: bool = False  # act with the mode of the policy in evaluations
    run_dir: str = ""  # run folder to start or continue; empty: a new one in runs/
    init_from: str = ""  # run folder: start from the best parameters of its first seed
    track: bool = False  # log to Weights & Biases
    distributed: bool = False  # run on several hosts


@dataclasses.dataclass(frozen=True)
class Config(Run, Algorithm, Environment):  # a new option goes into one of these groups
    """Recurrent PPO with a GRU, on XLand-MiniGrid environments."""

    @property
    def rollout_length(self) -> int:
        """T. Short with many environments, so that a run has enough updates."""
        return self.num_steps if self.num_envs <= 1024 else min(self.num_steps, 16)

    @property
    def batch_size(self) -> int:
        """Environment steps per update and seed, over all devices."""
        return self.num_envs * self.rollout_length

    @property
    def updates_per_eval(self) -> int:
        return max(1, round(self.total_timesteps / self.batch_size / self.num_evals))

    @property
    def num_updates(self) -> int:
        return self.updates_per_eval * self.num_evals


# ------------------------------------ environment
class Observation(NamedTuple):
    grid: jax.Array  # [V, V, 2] uint8, tile and color in view
    direction: jax.Array  # the agent's, 0 to 3
    prev_action: jax.Array  # -1 if none
    prev_reward: jax.Array  # 0 if none


class ArrayUnpickler(pickle.Unpickler):
    """Loads arrays in plain containers only: other pickles can run any code."""

    def find_class(self, module, name):
        module = module.replace("numpy.core", "numpy._core")  # the name in files written by NumPy 1
        modules = ("numpy", "numpy._core.multiarray", "numpy._core.numeric", "jax._src.array")
        names = ("dtype", "ndarray", "_frombuffer", "_reconstruct", "_reconstruct_array")
        if module not in modules or name not in names:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")
        return super().find_class(module, name)


def load_benchmark(benchmark_id: str) -> Benchmark:
    """Rulesets of XLand by name, downloaded once, or from a file. Raises ConfigError."""
    names = xminigrid.registered_benchmarks()
    try:
        if benchmark_id in names:
            return xminigrid.load_benchmark(benchmark_id)
        with bz2.open(benchmark_id) as file:
            arrays = ArrayUnpickler(file).load()
        return Benchmark(**{k: jnp.asarray(arrays[k]) for k in Benchmark.__dataclass_fields__})
    except Exception as error:  # a file may hold anything
        known = f"a file or one of {', '.join(names)} (in the folder $XLAND_MINIGRID_DATA)"
        raise ConfigError(f"benchmark_id = {benchmark_id!r}: {error!r}; use {known}") from None


def make_env(config: Config):
    """Replace this to bring your own environment. Returns reset, step, num_actions.

    reset(key) -> obs, env_state
    step(key, env_state, action) -> obs, env_state, reward, terminated, truncated, next_obs

    Both handle a single environment. `obs` is an Observation; for others, replace that class and
    the first layers of ActorCritic, too. `next_obs` is the observation that the action led to.
    When an episode ends, `step` resets the environment: `obs` is then the first observation of the
    next episode, and `next_obs` the final one of the episode that ended. Episodes must end, or
    evaluations never do. A seventh output of `step` is optional: a dictionary of scalars, logged as
    env/<name> where an episode ends. Raises ConfigError.
    """
    names = xminigrid.registered_environments()
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if config.env_id not in names:
        lower = {name.lower(): name for name in names}
        lower |= {task: f"brax/{task} (ppo_continuous.py)" for task in BRAX.split()}
        nearest = difflib.get_close_matches(config.env_id.lower(), lower, cutoff=0)
        nearest = " or ".join(lower[name] for name in nearest)
        raise ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}? {OTHERS}")
    env, default = xminigrid.make(config.env_id)
    try:
        params = default.replace(**json.loads(config.env_params))
        for name, value in vars(default).items():
            if type(getattr(params, name)) is not type(value):
                raise TypeError(f"{name} must be of type {type(value).__name__}")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_params: {error}; the defaults are {default}") from None
    sample_task = lambda key: params  # reads params late: a ruleset may be set below
    if hasattr(params, "ruleset"):  # XLand environments have one, those of MiniGrid do not
        benchmark = load_benchmark(config.benchmark_id)
        if config.ruleset_id >= benchmark.num_rulesets():
            raise ConfigError(f"ruleset_id must be < {benchmark.num_rulesets()}")
        if config.ruleset_id >= 0:
            params = params.replace(ruleset=benchmark.get_ruleset(config.ruleset_id))
        else:
            sample_task = lambda key: params.replace(ruleset=benchmark.sample_ruleset(key))
    elif config.benchmark_id or config.ruleset_id >= 0:
        raise ConfigError(f"{config.env_id} takes no benchmark: use an XLand-MiniGrid env_id")

    def observe(timestep, action):
        direction, reward = timestep.state.agent.direction, jnp.float32(timestep.reward)
        return Observation(timestep.observation, jnp.int32(direction), jnp.int32(action), reward)

    def reset(key):
        task_key, reset_key = jax.random.split(key)
        timestep = env.reset(sample_task(task_key), reset_key)
        return observe(timestep, -1), timestep

    def step(key, timestep, action):
        timestep = env.step(params, timestep, action)  # the ruleset is in timestep
        next_obs, reward = observe(timestep, action), jnp.float32(timestep.reward)
        done, terminated = timestep.last(), timestep.discount == 0
        obs, timestep = optax.tree.where(done, reset(key), (next_obs, timestep))
        return obs, timestep, reward, terminated, done & ~terminated, next_obs

    return reset, step, env.num_actions(params)


# ---------------------------------------- network
def dense(features: int, scale: float, dtype: Any) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale), dtype=dtype)


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014, arXiv 1406.1078v1): nn.GRUCell with another init."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, hidden: jax.Array, reset: jax.Array) -> jax.Array:
        """x [T, ..., F], hidden [..., H], reset [T, ...] -> hidden after each step [T, ..., H]"""
        size = hidden.shape[-1]
        x = nn.Dense(3 * size, dtype=self.dtype)(x)  # [T, ..., 3 H], all steps at once
        # Unlike in nn.GRUCell, one orthogonal initialization for r, z and n together.
        kernel = self.param("kernel", nn.initializers.orthogonal(), (size, 3 * size), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (size,), jnp.float32)
        kernel, bias, hidden = (p.astype(x.dtype) for p in (kernel, bias, hidden))

        def step(hidden, inputs):
            x, reset = inputs
            hidden = jnp.where(reset[..., None], 0, hidden)
            r_x, z_x, n_x = jnp.split(x, 3, axis=-1)  # gates r and z, candidate n
            r_h, z_h, n_h = jnp.split(hidden @ kernel, 3, axis=-1)
            z = nn.sigmoid(z_x + z_h)
            n = jnp.tanh(n_x + nn.sigmoid(r_x + r_h) * (n_h + bias))
            hidden = (1 - z) * n + z * hidden
            return hidden, hidden

        unroll = 1 if jax.default_backend() == "cpu" else 16  # up to 1.7x as fast on a GPU
        return jax.lax.scan(step, hidden, (x, reset), unroll=unroll)[1]


class ActorCritic(nn.Module):
    """A policy and a value function: two heads on a CNN and a GRU."""

    num_actions: int
    config: Config

    @nn.compact
    def __call__(self, obs: Observation, hidden: jax.Array, reset: jax.Array):
        """obs, reset [T, ...], hidden [..., L H] -> policy, value, hidden after each step"""
        config = self.config
        dtype = jnp.bfloat16 if config.bf16 else jnp.float32
        if config.img_obs:
            x = self.embed_pixels(obs.grid, dtype)
        else:
            tile = jax.nn.one_hot(obs.grid[..., 0], xminigrid.core.constants.NUM_TILES)
            color = jax.nn.one_hot(obs.grid[..., 1], xminigrid.core.constants.NUM_COLORS)
            x = jnp.concatenate([tile, color], axis=-1)  # [T, ..., V, V, tiles + colors]
            if config.embedding_size:  # not a lookup, whose gradient is a slow scatter
                x = nn.Dense(config.embedding_size, use_bias=False, dtype=dtype)(x)
        widths = (1, 2, 4) if x.shape[-2] > 3 else (4, 8)  # a 3 x 3 view has room for two layers
        for width in widths:
            # A 2 x 2 convolution as a dense layer on patches: several times as fast on a CPU.
            v = x.shape[-2] - 1
            patches = [x[..., i : i + v, j : j + v, :] for i in range(2) for j in range(2)]
            x = nn.relu(
                dense(width * config.conv_size, 2**0.5, dtype)(jnp.concatenate(patches, -1))
            )
        direction = jax.nn.one_hot(obs.direction, 4)
        prev_action = jax.nn.one_hot(obs.prev_action, self.num_actions)
        x = x.reshape(*x.shape[:-3], -1)
        features = [x, direction, prev_action, obs.prev_reward[..., None]]
        reset |= not config.memory
        x, outputs = jnp.concatenate(features, axis=-1), []
        for initial in jnp.split(hidden, config.num_layers, axis=-1):
            x = GRU(dtype)(x, initial, reset)  # [T, ..., H]
            outputs.append(x)
        x = sum(outputs)  # as in XLand-MiniGrid
        actor = nn.tanh(dense(config.head_size, 2**0.5, dtype)(x))
        critic = nn.tanh(dense(config.head_size, 2**0.5, dtype)(x))
        logits = dense(self.num_actions, 0.01, dtype)(actor).astype(jnp.float32)
        value = dense(1, 1.0, dtype)(critic).astype(jnp.float32).squeeze(-1)
        hidden = jnp.concatenate(outputs, axis=-1).astype(jnp.float32)
        return distrax.Categorical(logits), value, hidden

    def embed_pixels(self, grid, dtype):
        """Renders here, 32 x 32 pixels per tile: rollouts store symbols, which are far smaller."""
        with jax.ensure_compile_time_eval():  # the import creates arrays, which must be concrete
            from xminigrid.experimental.img_obs import _render_obs

        x = jnp.vectorize(_render_obs, signature="(v,v,c)->(h,w,d)")(grid) / 255
        # Two convolutions without overlap, as dense layers: 32 pixels per tile -> 4 -> 1.
        for features, stride in ((16, 8), (self.config.conv_size, 4)):
            axes, size = x.shape[:-3], x.shape[-2] // stride
            x = x.reshape(*axes, size, stride, size, stride, -1).swapaxes(-3, -4)
            x = nn.relu(dense(features, 2**0.5, dtype)(x.reshape(*axes, size, size, -1)))
        return x


# -------------------------------------- algorithm
class Transition(NamedTuple):
    obs: Observation
    reset: jax.Array  # the memory is cleared before obs is read
    hidden: Any  # [1, N, L H] before the first step of a rollout; None in single steps
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array  # reached a terminal state
    done: jax.Array  # terminated or truncated
    next_obs: Any  # the observation that the action led to; None in rollouts
    episode_return: jax.Array  # up to and including this step
    episode_length: jax.Array
    info: dict = {}  # scalars of the environment, logged at the end of an episode


class RunnerState(NamedTuple):
    """What one environment carries from step to step."""

    key: jax.Array
    obs: Observation
    hidden: jax.Array  # [L H] before obs is read; if `done`, the network clears it first
    env_state: Any
    done: jax.Array  # the previous step ended an episode
    episode_return: jax.Array  # so far; if `done`, of the episode that ended
    episode_length: jax.Array


class TrainState(NamedTuple):
    """What one seed carries from update to update, on one device."""

    key: jax.Array
    params: Any
    opt_state: Any
    runners: RunnerState  # [N]
    updates_done: jax.Array
    eval_return: jax.Array  # of the latest evaluation
    best_return: jax.Array
    best_params: Any


def compute_gae(rollout: Transition, next_value, gamma, gae_lambda):
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16).

    All arrays are [T, ...]; next_value is the value of next_obs. Returns advantage, target.
    """
    # A termination stops the bootstrap; a termination or a truncation cuts the trace.
    next_value = jnp.where(rollout.terminated, 0, next_value)  # not a product: 0 * NaN is NaN
    delta = rollout.reward + gamma * next_value - rollout.value
    decay = gamma * gae_lambda * (1 - rollout.done)

    def step(advantage, x):
        delta, decay = x
        advantage = delta + decay * advantage
        return advantage, advantage

    zero = jnp.zeros_like(delta[0])
    # Unrolled, eight steps are one kernel on a GPU.
    _, advantage = jax.lax.scan(step, zero, (delta, decay), reverse=True, unroll=8)
    return advantage, advantage + rollout.value


def ppo_loss(params, network, batch: Transition, advantage, target, ent_coef, config: Config):
    """Clipped surrogate objective, value loss and entropy bonus (arXiv 1707.06347, eq. 7 and 9).

    All arrays are [T, B, ...], hidden [1, B, L H]. Returns loss, metrics.
    """
    policy, value, _ = network.apply(params, batch.obs, batch.hidden[0], batch.reset)
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
    loss = policy_loss + config.vf_coef * value_loss - ent_coef * entropy
    return loss, {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
        "policy/approx_kl": (ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html
        "policy/clip_fraction": (jnp.abs(ratio - 1) > config.clip_eps).mean(),
    }


def make_train(config: Config):
    """Returns init, train, init_seed, train_seed. Raises ConfigError.

    init(keys [D]) -> state and train(state) -> (state, metrics) are pmapped. A seed spans all
    devices: its parameters and metrics are the same on each, its environments are not. state is
    [D, S, ...], metrics are [D, S, updates]. `train` performs `updates_per_eval` updates on each
    seed, evaluates it on full episodes and keeps its best parameters. It donates its argument.

    init_seed(key) and train_seed(state) do the work of one device for one seed. They need an axis
    "devices" of size D: jax.pmap(jax.vmap(train_seed), "devices").
    """
    num_devices = jax.device_count()
    envs_per_device = config.num_envs // num_devices  # N
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs must be a multiple of {num_devices}, the number of devices")
    if envs_per_device % config.num_minibatches:
        raise ConfigError(
            f"num_minibatches must divide {envs_per_device}, the environments per device"
        )
    env_reset, env_step, num_actions = make_env(config)
    network = ActorCritic(num_actions, config)
    pmean = lambda x: jax.lax.pmean(x, "devices")
    psum = lambda x: jax.lax.psum(x, "devices")

    def schedule(value, anneal):
        """A function of the updates done: linear to zero, or constant."""
        return optax.linear_schedule(value, 0 if anneal else value, config.num_updates)

    lr_schedule = schedule(config.lr, config.anneal_lr)
    ent_schedule = schedule(config.ent_coef, config.anneal_ent)
    optimizer = optax.chain(  # update_minibatch multiplies by the learning rate
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(eps=1e-5),
    )

    def apply_once(params, obs, hidden, reset):
        """The network on sequences of one step. A distrax policy is a tree of arrays, too."""
        obs, reset = jax.tree.map(lambda x: x[None], (obs, reset))
        return jax.tree.map(lambda x: x[0], network.apply(params, obs, hidden, reset))

    def start_episode(key):
        key, reset_key = jax.random.split(key)
        obs, env_state = env_reset(reset_key)
        return RunnerState(
            key=key,
            obs=obs,
            hidden=jnp.zeros(config.num_layers * config.hidden_size, jnp.float32),
            env_state=env_state,
            done=jnp.bool(False),
            episode_return=jnp.float32(0),
            episode_length=jnp.float32(0),
        )

    def act(params, runner: RunnerState, greedy=False):
        """One step of one environment."""
        key, action_key, step_key = jax.random.split(runner.key, 3)
        policy, value, hidden = apply_once(params, runner.obs, runner.hidden, runner.done)
        action = policy.mode() if greedy else policy.sample(seed=action_key)
        outcome = env_step(step_key, runner.env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs, *info = outcome
        transition = Transition(
            obs=runner.obs,
            reset=runner.done,
            hidden=None,
            action=action,
            log_prob=policy.log_prob(action),
            value=value,
            reward=reward,
            terminated=terminated,
            done=terminated | truncated,
            next_obs=next_obs,
            episode_return=jnp.where(runner.done, 0, runner.episode_return) + reward,
            episode_length=jnp.where(runner.done, 0, runner.episode_length) + 1,
            info=info[0] if info else {},
        )
        runner = RunnerState(
            key=key,
            obs=obs,
            hidden=hidden,
            env_state=env_state,
            done=transition.done,
            episode_return=transition.episode_return,
            episode_length=transition.episode_length,
        )
        return runner, transition

    def update(state: TrainState, _):
        """A rollout and the gradient steps taken on it."""

        def critic(obs, hidden, reset):
            return apply_once(state.params, obs, hidden, reset)[1]

        def act_all(runners, _):
            runners, transition = jax.vmap(act, (None, 0))(state.params, runners)  # [N]
            # The value of the final observation, with the memory of its episode. This pass covers
            # all N, so steps without a truncation skip it: else it takes a sixth of the training
            # time. (With several seeds, it always does: vmap runs both branches.)
            truncated = transition.done & ~transition.terminated
            final = (transition.next_obs, runners.hidden, jnp.zeros_like(truncated))
            skip = lambda *_: transition.value  # a placeholder
            final_value = jax.lax.cond(truncated.any(), critic, skip, *final)
            return runners, (transition._replace(next_obs=None), final_value)

        length = config.rollout_length
        runners, (rollout, final_value) = jax.lax.scan(act_all, state.runners, None, length)
        last_value = critic(runners.obs, runners.hidden, runners.done)
        next_value = jnp.concatenate([rollout.value[1:], last_value[None]])  # [T, N]
        truncated = rollout.done & ~rollout.terminated
        next_value = jnp.where(truncated, final_value, next_value)
        advantage, target = compute_gae(rollout, next_value, config.gamma, config.gae_lambda)
        samples = (rollout._replace(hidden=state.runners.hidden[None]), advantage, target)
        lr, ent_coef = lr_schedule(state.updates_done), ent_schedule(state.updates_done)

        def update_minibatch(carry, indices):
            params, opt_state = carry
            batch, advantage, target = jax.tree.map(lambda x: x[:, indices], samples)  # [T, B, ...]
            advantage -= pmean(advantage.mean())
            std = jnp.sqrt(pmean((advantage**2).mean()))
            advantage /= jnp.maximum(std, config.min_advantage_std)
            grad = jax.grad(ppo_loss, has_aux=True)
            grads, metrics = grad(params, network, batch, advantage, target, ent_coef, config)
            grads, metrics = pmean((grads, metrics))
            grads, unravel = ravel_pytree(grads)  # Adam on one vector: fewer operations
            metrics["optim/grad_norm"] = jnp.linalg.norm(grads)
            updates, opt_state = optimizer.update(grads, opt_state)
            params = optax.apply_updates(params, unravel(-lr * updates))
            return (params, opt_state), metrics

        def update_epoch(carry, indices):
            return jax.lax.scan(update_minibatch, carry, indices)

        # The permutations of all epochs, in one sort (jax.random.permutation sorts large batches
        # twice). They do not depend on the rollout: XLA:CPU can sort while it runs.
        key, shuffle_key = jax.random.split(state.key)
        bits = jax.random.bits(shuffle_key, (config.update_epochs, envs_per_device), jnp.uint32)
        indices = jnp.argsort(bits).reshape(config.update_epochs, config.num_minibatches, -1)
        carry = (state.params, state.opt_state)
        (params, opt_state), metrics = jax.lax.scan(update_epoch, carry, indices)
        metrics = jax.tree.map(lambda x: x[-1].mean(), metrics)  # the mean of the last epoch
        episodes = psum(rollout.done.sum())  # if none ended, the means are NaN
        mean = lambda x: psum(jnp.where(rollout.done, x, 0).sum()) / episodes
        metrics |= {
            "value/explained_variance": pmean(1 - (target - rollout.value).var() / target.var()),
            "episode/return": mean(rollout.episode_return),
            "episode/length": mean(rollout.episode_length),
            "episode/count": episodes,
            "optim/lr": lr,
        }
        metrics |= {f"env/{name}": mean(x) for name, x in rollout.info.items()}
        state = state._replace(
            key=key,
            params=params,
            opt_state=opt_state,
            runners=runners,
            updates_done=state.updates_done + 1,
        )
        return state, metrics

    def play_episode(params, key):
        """Returns the runner at the end of one full episode. Under vmap, all wait for the last."""
        unfinished = lambda runner: ~runner.done
        play = lambda runner: act(params, runner, config.eval_greedy)[0]
        return jax.lax.while_loop(unfinished, play, start_episode(key))

    def evaluate(state: TrainState):
        key, eval_key = jax.random.split(state.key)
        keys = jax.random.split(eval_key, math.ceil(config.eval_episodes / num_devices))
        runners = jax.vmap(play_episode, (None, 0))(state.params, keys)
        eval_return = pmean(runners.episode_return.mean())
        is_best = eval_return > state.best_return
        state = state._replace(
            key=key,
            eval_return=eval_return,
            best_return=jnp.where(is_best, eval_return, state.best_return),
            best_params=optax.tree.where(is_best, state.params, state.best_params),
        )
        eval_length = pmean(runners.episode_length.mean())
        return state, {"eval/return": eval_return, "eval/length": eval_length}

    def init_seed(key):
        key, params_key, runner_key = jax.random.split(key, 3)
        runners = jax.vmap(start_episode)(jax.random.split(runner_key, envs_per_device))
        params_key = jax.lax.all_gather(params_key, "devices")[0]  # the same on all devices
        # The N observations pass as one sequence of N steps: only the sizes of the layers matter.
        params = network.init(params_key, runners.obs, runners.hidden[0], runners.done)
        return TrainState(
            key=key,
            params=params,
            opt_state=optimizer.init(ravel_pytree(params)[0]),
            runners=runners,
            updates_done=jnp.int32(0),
            eval_return=jnp.float32(jnp.nan),
            best_return=jnp.float32(-jnp.inf),
            best_params=params,
        )

    def train_seed(state: TrainState):
        state, metrics = jax.lax.scan(update, state, None, config.updates_per_eval)
        state, evaluation = evaluate(state)
        unmeasured = jnp.full(config.updates_per_eval, jnp.nan)
        metrics |= {name: unmeasured.at[-1].set(x) for name, x in evaluation.items()}
        return state, jax.tree.map(jnp.float32, metrics)

    def init_seeds(key):  # not vmap: batched orthogonal initialization can deadlock in XLA:CPU
        return jax.lax.map(init_seed, jax.random.split(key, config.num_seeds))

    def train_seeds(state):
        if config.num_seeds == 1:  # up to 30% faster on a CPU than vmap
            return jax.lax.map(train_seed, state)
        return jax.vmap(train_seed)(state)

    init = jax.pmap(init_seeds, "devices")
    train = jax.pmap(train_seeds, "devices", donate_argnums=0)
    return init, train, init_seed, train_seed


# ------------------------------------------- main
def write(path: Path, content: bytes):
    """Atomic: a killed process leaves either the old file or the new one."""
    path.with_suffix(".tmp").write_bytes(content)
    path.with_suffix(".tmp").replace(path)


def save(path: Path, state: TrainState):
    """Write a checkpoint. Runners become a list of arrays: flax cannot save every env_state."""
    write(path, flax.serialization.to_bytes(state._replace(runners=jax.tree.leaves(state.runners))))


def restore(fresh: TrainState, config: Config, run_dir: Path) -> TrainState:
    """The last checkpoint of the run. Without one: `fresh`, with the parameters of any `init_from`.

    Arrays are [D, S, ...]. Raises ConfigError.
    """
    runners, structure = jax.tree.flatten(fresh.runners)
    fresh = fresh._replace(runners=runners)
    state, path = fresh, run_dir / "checkpoint.msgpack"
    try:
        if path.exists():
            state = flax.serialization.from_bytes(fresh, path.read_bytes())
        elif config.init_from:
            path = Path(config.init_from, path.name)
            best = flax.serialization.msgpack_restore(path.read_bytes())["best_params"]
            # Device 0, seed 0 -> [D, S, ...]; fresh.updates_done is [D, S].
            copy = lambda x: np.broadcast_to(x[0, 0], (*fresh.updates_done.shape, *x.shape[2:]))
            params = flax.serialization.from_state_dict(fresh.params, jax.tree.map(copy, best))
            state = fresh._replace(params=params)
    except Exception as error:
        raise ConfigError(f"cannot load {path}: {error}") from None
    describe = lambda x: (x.shape, x.dtype)
    if jax.tree.map(describe, state) != jax.tree.map(describe, fresh):
        raise ConfigError(
            f"{path} does not fit: check env_id, sizes, seeds, devices and JAX_ENABLE_X64"
        )
    return state._replace(runners=structure.unflatten(state.runners))


def open_table(path: Path, mode: str):
    """Open metrics.csv and lock it until it is closed or the process ends. Raises ConfigError."""
    table = path.open(mode)
    try:
        fcntl.lockf(table, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path.parent} is in use by another process") from None
    return table


def append_rows(table, config: Config, first: int, metrics: dict[str, np.ndarray]):
    """One row per update and seed: metrics are [S, updates], from update `first` on."""
    rows = [["update", "seed", "env_steps", *metrics]] if table.tell() == 0 else []
    for i in range(config.updates_per_eval):
        for seed in range(config.num_seeds):
            cells = ["" if np.isnan(x[seed, i]) else x[seed, i] for x in metrics.values()]
            rows.append([first + i, seed, (first + i) * config.batch_size, *cells])
    csv.writer(table, lineterminator="\n").writerows(rows)
    table.flush()


def read_rows(lines: list[str], num_seeds: int) -> dict[str, np.ndarray]:
    """The metrics [S, updates] in the lines of metrics.csv, NaN where a cell is empty."""
    names = lines[0].strip().split(",")
    cells = np.genfromtxt(lines[1:], delimiter=",").reshape(-1, num_seeds, len(names))
    return {name: cells[:, :, i].T for i, name in enumerate(names) if "/" in name}


def start_tracking(run_dir: Path, options: dict):
    """Start or continue a Weights & Biases run. Raises ConfigError."""
    import wandb

    # At most 64 letters, digits, _ or -. With the parent folder, a/seed0 and b/seed0 differ.
    run_id = re.sub(r"[^\w-]", "-", "-".join(run_dir.resolve().parts[-2:]))[-64:]
    try:
        return wandb.init(id=run_id, name=run_dir.name, config=options, resume="allow")
    except wandb.errors.Error as error:
        raise ConfigError(
            f"--track: {error}; run `wandb login` or set WANDB_MODE=offline"
        ) from None


def track(wandb_run, config: Config, first: int, metrics: dict[str, np.ndarray]):
    """Log means over the seeds that have a value. Steps that were logged before are skipped."""
    for i in range(metrics["eval/return"].shape[1]):
        env_steps = (first + i) * config.batch_size
        if env_steps >= wandb_run.step:
            finite = {name: x[np.isfinite(x[:, i]), i] for name, x in metrics.items()}
            means = {name: x.mean() for name, x in finite.items() if x.size}
            wandb_run.log(means, step=env_steps)


def main(config: Config) -> dict:
    """Train, or continue the run in `run_dir`. Returns its summary. Raises ConfigError."""
    start = time.perf_counter()
    if config.distributed:
        clear_backends()  # the imports have initialized JAX, but `initialize` must come first
        jax.distributed.initialize()
    process, num_processes = jax.process_index(), jax.process_count()
    my_part = lambda tree: jax.tree.map(lambda x: np.split(x, num_processes)[process], tree)
    name = f"{SCRIPT}__{config.env_id}__{config.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(config.run_dir or f"runs/{name.replace('/', '-')}-{os.getpid()}")
    if not config.run_dir:
        COMMAND.extend(["--run-dir", str(run_dir)])
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed = {config.seed} is not in [0, 2**32)")
    if config.updates_per_eval > 1e6:  # metrics stay in memory until the evaluation
        raise ConfigError(f"{config.updates_per_eval} updates per evaluation: raise num_evals")

    # Every process builds the state. Process 0 loads the checkpoint, if there is one, and sends
    # the state to the others; each keeps the part for its devices.
    init, train, *_ = make_train(config)
    keys = jax.random.split(jax.random.PRNGKey(config.seed), jax.device_count())
    host_state = process_allgather(init(my_part(keys)), tiled=True)  # NumPy arrays [D, S, ...]
    table_path, summary_path = run_dir / "metrics.csv", run_dir / "summary.json"
    table = None
    if process == 0:
        table = open_table(table_path, "r+") if table_path.exists() else None  # locks the folder
        host_state = restore(host_state, config, run_dir)
    host_state = broadcast_one_to_all(host_state)
    state = my_part(host_state)
    updates_done = int(host_state.updates_done[0, 0])
    # Rounded, since total_timesteps and num_evals may have changed since the checkpoint.
    calls_left = max(0, round((config.num_updates - updates_done) / config.updates_per_eval))
    if calls_left == 0 and summary_path.exists():
        steps = updates_done * config.batch_size
        print(f"{run_dir} has finished {steps:,} steps; raise --total-timesteps to continue it")
        return json.loads(summary_path.read_text())
    options = {"script": SCRIPT, **vars(config)}
    wandb_run = start_tracking(run_dir, options) if config.track and process == 0 else None
    if num_processes == 1:  # otherwise the first call compiles
        done = updates_done * config.batch_size
        steps = done + calls_left * config.updates_per_eval * config.batch_size
        about = f"{run_dir}: {done:,} to {steps:,} steps per seed"
        print(about, "compiling ...", sep=", ", end=" ", flush=True)
        compile_start = time.perf_counter()
        train = train.lower(state).compile()
        print(f"{time.perf_counter() - compile_start:.1f} s", flush=True)

    if process == 0:  # nothing in the folder changes until the run can start
        run_dir.mkdir(parents=True, exist_ok=True)
        table = table or open_table(table_path, "x+")
        # Keep the header and the rows up to the checkpoint (ASCII: a character is a byte).
        lines = table.readlines()[: 1 + updates_done * config.num_seeds] if updates_done else []
        table.seek(len("".join(lines)))
        table.truncate()
        summary_path.unlink(missing_ok=True)
        write(run_dir / "config.json", json.dumps(options, indent=2).encode())
        for source in map(Path, SOURCES):
            write(run_dir / source.name, source.read_bytes())
        if wandb_run and lines:
            track(wandb_run, config, 1, read_rows(lines, config.num_seeds))
    call_steps = config.updates_per_eval * config.batch_size * config.num_seeds
    style = {"unit": " steps", "unit_scale": True, "ncols": 80, "disable": process > 0}
    with tqdm.tqdm(total=calls_left * call_steps, **style) as bar:
        for call in range(calls_left):
            call_start = time.perf_counter()
            state, metrics = train(state)
            # [S, updates], the same on all devices.
            metrics = {name: np.array(x.addressable_data(0))[0] for name, x in metrics.items()}
            call_sps = call_steps / (time.perf_counter() - call_start)
            metrics["time/sps"] = np.full_like(metrics["eval/return"], call_sps)  # of all seeds
            if not np.isfinite(metrics["optim/grad_norm"][:, -1]).any():
                raise ConfigError(f"all seeds diverged: {run_dir} needs a lower learning rate")
            host_state = process_allgather(state, tiled=True)
            if process == 0:
                first = 1 + updates_done + call * config.updates_per_eval
                append_rows(table, config, first, metrics)
                if wandb_run:
                    track(wandb_run, config, first, metrics)
                # After the rows are written: a checkpoint never lacks rows.
                save(run_dir / "checkpoint.msgpack", host_state)
            bar.set_postfix_str(f"return {host_state.eval_return.mean():.4g}", refresh=False)
            bar.update(call_steps)

    returns, seconds = host_state.eval_return[0], time.perf_counter() - start
    summary = options | {
        "versions": {x.__name__: x.__version__ for x in (jax, flax, optax)},
        "device": f"{len(host_state.updates_done)} x {jax.devices()[0].device_kind}",
        "env_steps": int(host_state.updates_done[0, 0]) * config.batch_size,  # per seed
        "seconds": seconds,  # since the last start, including compilation
        "steps_per_second": calls_left * call_steps / seconds,  # over all seeds
        "eval_return_mean": float(returns.mean()),
        "eval_return_per_seed": returns.tolist(),
        "best_return_per_seed": host_state.best_return[0].tolist(),  # biased: a maximum
    }
    if process == 0:
        write(summary_path, json.dumps(summary, indent=2).encode())
        table.close()
        interval = ""
        if config.num_seeds > 1:  # 95% confidence, by Student's t
            interval = f" ± {stats.sem(returns) * stats.t.ppf(0.975, returns.size - 1):.3g}"
        # plot and enjoy are installed with the project.
        print(f"return {returns.mean():.4g}{interval}\nto plot:  plot {run_dir}")
        has_video = len(SOURCES) < 2  # a second is a file in environments/: without video
        video = f" --video {run_dir / 'video.gif'}" if has_video else ""
        print(f"to watch: enjoy {run_dir}{video}")
    if wandb_run:
        wandb_run.summary.update(summary)
        wandb_run.finish()
    return summary


def read_options(default: Config) -> Config:
    """Options of the command line, by group: `--help` then has a box for each."""
    defaults = {}
    for group in (Environment, Algorithm, Run):
        values = {field.name: getattr(default, field.name) for field in dataclasses.fields(group)}
        defaults[group.__name__.lower()] = group(**values)
    groups = tyro.cli(
        dict, default=defaults, description=Config.__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )
    chosen = {name: x for group in groups.values() for name, x in vars(group).items()}
    return dataclasses.replace(default, **chosen)


def cli():
    """The command line. Options that are not given come from the run in `run_dir`, if any."""
    try:
        config = read_options(Config())  # finds run_dir; read again below, with the run's options
        path = Path(config.run_dir, "config.json")
        if config.run_dir and path.exists():
            stored = json.loads(path.read_text())
            if not isinstance(stored, dict) or stored.get("script") != SCRIPT:
                raise ConfigError(f"{config.run_dir} does not hold a run of {SCRIPT}.py")
            # Options that are tuples (one of yours may be) have become lists in JSON.
            stored = {k: tuple(x) if isinstance(x, list) else x for k, x in stored.items()}
            default = Config(**{name: stored[name] for name in vars(config) if name in stored})
            config = read_options(default)
            if (config.num_envs, config.num_steps) != (default.num_envs, default.num_steps):
                raise ConfigError(f"{config.run_dir}: num_envs and num_steps must stay the same")
        main(config)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        print("error:", str(error).split("\n")[0], file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
