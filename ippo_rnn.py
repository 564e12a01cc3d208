"""Independent PPO for many agents with memory, on JaxMARL environments.

PPO (Schulman et al. 2017, arXiv 1707.06347) with GAE (Schulman et al. 2015, arXiv 1506.02438).
Each agent learns from its own observation, action and reward (de Witt et al. 2020, arXiv
2011.09533). All agents share one network, which also reads the agent's index, or each has its own.
`eval/return` is the sum over the agents: a shared reward counts once per agent.
All seeds train and evaluate in one XLA program. What differs from most implementations:
- a time limit is not a termination: it cuts the trace, but the return still bootstraps from the
  value of the final observation (Pardo et al. 2018, arXiv 1712.00378);
- actor and critic have memories, learning rates, epochs and gradient clipping of their own;
- `--target-kl` stops the actor alone;
- an agent that is done early adds nothing to the gradient from then on (except in SMAX);
- a minibatch holds whole sequences of all agents; its advantages are normalized across all devices.

Axes: T steps, K agents, F features, A actions, H hidden units, S seeds, D devices; on each device,
N environments and minibatches of B sequences.

    python ippo_rnn.py --num-seeds 5
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro", "wandb"]
# ///

import contextlib
import csv
import dataclasses
import difflib
import fcntl
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Works around an XLA:CPU deadlock with vmapped loops (jax 0.10).
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
FILE = globals().get("__file__", "")  # empty in a notebook
SOURCES = [FILE] if FILE else []  # copied to the run folder; files in environments/ add themselves
SCRIPT = Path(FILE or "ippo_rnn").stem  # names the runs: a renamed copy gets runs of its own
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
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
import tyro
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.extend.backend import clear_backends
from scipy import stats


# ----------------------------------------- config
class ConfigError(ValueError):
    """An error that the user can correct. The command line reports it without a traceback."""


# Where to look for an environment that this script does not know.
OTHERS = "single agents: ppo_ff.py, others: environments/"


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where agents act. For example: --env-id HeuristicEnemySMAX/3m"""

    env_id: str = "rings"  # or one of JaxMARL, e.g. overcooked/cramped_room; "list" prints all
    env_params: str = "{}"  # options of a JaxMARL environment, as JSON: '{"max_steps": 50}'
    num_envs: int = 16  # parallel environments per seed, over all devices


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How agents learn. For example: --cell lstm --actor-lr 1e-3"""

    total_timesteps: float = 1e6  # steps per seed, rounded to whole updates per evaluation
    num_steps: int = 128  # rollout length
    share_parameters: bool = True  # one network for all agents, not one each
    actor_epochs: int = 2  # passes of the actor over each rollout
    critic_epochs: int = 2  # passes of the critic over each rollout
    num_minibatches: int = 4  # minibatches per epoch, of whole sequences
    hidden_size: int = 64  # units of each dense layer and cell
    cell: Literal["gru", "lstm"] = "gru"  # recurrent cell
    memory: bool = True  # --no-memory clears the hidden state at every step, as an ablation
    actor_lr: float = 3e-3  # Adam learning rate of the actor
    critic_lr: float = 3e-3  # Adam learning rate of the critic
    anneal_lr: bool = True  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # trace decay of GAE
    clip_eps: float = 0.2  # clipping range of the probability ratio
    clip_value: bool = False  # also clip the change in value to clip_eps
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    anneal_ent: bool = False  # decay the entropy bonus linearly to zero
    max_grad_norm: float = 0.5  # clip the norms of the actor's gradient and of the critic's
    target_kl: float = 0.0  # stop the actor after an epoch whose KL divergence exceeds this; 0: off


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
    """Independent PPO for many agents with memory."""

    @property
    def batch_size(self) -> int:
        """Environment steps per update and seed, over all devices."""
        return self.num_envs * self.num_steps

    @property
    def updates_per_eval(self) -> int:
        return max(1, round(self.total_timesteps / self.batch_size / self.num_evals))

    @property
    def num_updates(self) -> int:
        return self.updates_per_eval * self.num_evals


# ------------------------------------ environment
class Rings:
    """Three agents, each on its own ring: the built-in environment, with JaxMARL's methods.

    Agent k sees, one-hot, how far ahead its goal is on a ring of 3 + k cells. Action a is a step of
    (a + k) % 3 - 1 cells ahead, so that no action moves two agents alike. Arriving pays 1 and ends
    that agent's episode; other steps cost 0.2; the time limit is 8 steps. From d cells away, by the
    shorter way, the best return is 1.2 - 0.2 d. On average, the three add up to 1 + 14 / 15 + 0.9.
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
        # An agent that has arrived is no longer active: make_env pays it only once.
        reward = dict(zip(self.agents, jnp.where(arrived, 1.0, -0.2), strict=True))
        done = dict(zip(self.agents, arrived, strict=True))
        done["__all__"] = arrived.all() | (state["step"] >= 8)
        return self.observe(state), state, reward, done, {}


def jaxnav_time_limit(env, state, reward):
    ended = state.goal_reached | state.move_term
    # Agents that evaporate end one by one, [K]; others act until the last has ended, [].
    return ~(ended if env.evaporating else ended.all())


BRAX = ("ant", "halfcheetah", "hopper", "humanoid", "walker2d")
# JaxMARL does not say why an agent is done. First word of env_id -> time_limit(env, state, reward):
# whether the agents that are done in this state merely ran out of time, [] or [K].
TIME_LIMIT = dict.fromkeys(("MPE", "coin", "overcooked", "storm"), lambda *_: True)
TIME_LIMIT |= dict.fromkeys(BRAX, lambda env, state, reward: state.info["truncation"] > 0)
TIME_LIMIT |= {
    "hanabi": lambda *_: False,
    "switch": lambda env, state, reward: reward == 0,  # a guess pays 1 or -1 and ends it
    "rings": lambda env, state, reward: state["distance"] > 0,
    "jaxnav": jaxnav_time_limit,
    # At step 0 time is not up: only who is alive counts.
    "SMAX": lambda env, state, reward: ~env.is_terminal(state.replace(step=0)),
    "HeuristicEnemySMAX": lambda env, state, _: ~env._env.is_terminal(state.state.replace(step=0)),
}


class Observation(NamedTuple):
    features: jax.Array  # [F], with a one-hot agent index if parameters are shared
    mask: jax.Array  # [A] legal actions; if continuous, the components that are not padding
    active: jax.Array  # [] False once the agent is done; True in the next_obs of a truncation


def load_env(config: Config):
    """An environment with the methods of JaxMARL's MultiAgentEnv. Raises ConfigError."""
    try:
        params = json.loads(config.env_params)
        if config.env_id == "rings":
            return Rings(**params)
        with contextlib.redirect_stdout(None):  # JaxMARL prints on import
            import jaxmarl
            from jaxmarl.environments.overcooked import overcooked_layouts as layouts
            from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO as maps
        known = {name: {} for name in ("rings", *jaxmarl.registered_envs)}  # env_id -> options
        # Brax's own reset would overwrite the final observation.
        known |= {name: {"auto_reset": False} for name in known if name.startswith(BRAX)}
        known |= {f"overcooked/{name}": {"layout": x} for name, x in layouts.items()}
        known |= {f"HeuristicEnemySMAX/{name}": {"scenario": x} for name, x in maps.items()}
        if config.env_id == "list":
            print(*known, sep="\n")
            sys.exit()
        if config.env_id not in known:
            lower = {name.lower(): name for name in known}
            near = difflib.get_close_matches(config.env_id.lower(), lower, cutoff=0)
            near = " or ".join(lower[name] for name in near)
            raise ConfigError(f"unknown env_id {config.env_id}: did you mean {near}? {OTHERS}")
        env = jaxmarl.make(config.env_id.split("/")[0], **known[config.env_id], **params)
        key = jax.random.PRNGKey(0)
        actions = [env.action_space(name).sample(key) for name in env.agents]
        # Some environments number their agents and take a list.
        actions = actions if env.agents[0] == 0 else dict(zip(env.agents, actions, strict=True))
        # Wrong values in env_params fail here.
        jax.eval_shape(lambda: env.step_env(key, env.reset(key)[1], actions))
        return env
    except ConfigError:
        raise
    except ImportError as error:
        advice = f"only rings is built in; {error}: pip install 'jaxmarl[mabrax]'"
        raise ConfigError(f"{config.env_id}: {advice}") from None
    except (AssertionError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(f"{config.env_id}, env_params: {error}") from None


def make_env(config: Config):
    """Replace this to bring your own environment. Returns reset, step, names, continuous.

    reset(key) -> obs, env_state
    step(key, env_state, action) -> obs, env_state, reward, terminated, truncated, next_obs

    Both handle a single environment; all but key and env_state have a leading agent axis, [K, ...].
    `obs` and `next_obs` are Observations; the actions led to `next_obs`. An agent is terminated or
    truncated once; from then on, it is not active and is paid 0. (In the next_obs of a truncation
    it is still active: its return bootstraps from there.) When the last agent is done, `step`
    resets the environment: `obs` is then the first observation of the next episode. Episodes must
    end, or evaluations never do. Continuous actions are samples of a Gaussian: `step` clips them,
    here to [-1, 1], and rescales them. `step` may return a seventh value: scalars by name, logged
    as env/<name> where an episode ends. `names` are in the order of K. Raises ConfigError.
    """
    env = load_env(config)
    names = tuple(env.agents)
    family = config.env_id.replace("/", "_").split("_")[0]
    if family not in TIME_LIMIT:
        raise ConfigError(f"TIME_LIMIT in {SCRIPT}.py has no {family}")
    spaces = {name: env.action_space(name) for name in names}
    continuous = not hasattr(spaces[names[0]], "n")
    all_legal = {name: jnp.ones(space.shape or space.n) for name, space in spaces.items()}
    # Legal actions: discrete SMAX and Hanabi have a method each; elsewhere all are legal.
    method = "get_avail_actions" if "SMAX" in family and not continuous else "get_legal_moves"
    legal_actions = getattr(env, method, lambda env_state: all_legal)

    def stack(by_name):
        """{name: tree} -> [K, size of the largest], flattened and padded with zeros."""
        flatten = lambda tree: jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
        rows = [jnp.float32(flatten(by_name[name])) for name in names]
        size = max(row.size for row in rows)
        return jnp.stack([jnp.pad(row, (0, size - row.size)) for row in rows])

    def observe(obs, env_state, active):
        if config.env_id == "storm":  # observations [K, ...], inventory [..., K]
            obs = list(zip(obs["observations"], obs["inventory"].T, strict=True))
        features = stack(obs)
        if config.share_parameters:
            features = jnp.concatenate([features, jnp.eye(len(names), dtype=jnp.float32)], axis=-1)
        return Observation(features, stack(legal_actions(env_state)) > 0, active)

    def reset(key):
        obs, env_state = env.reset(key)
        active = jnp.ones(len(names), bool)
        return observe(obs, env_state, active), (env_state, active)

    def step(key, env_state, action):
        step_key, reset_key = jax.random.split(key)
        env_state, active = env_state
        if continuous:
            fraction = (jnp.clip(action, -1, 1) + 1) / 2
            action = [
                space.low + (space.high - space.low) * x[: space.shape[0]]  # without the padding
                for space, x in zip(spaces.values(), fraction, strict=True)
            ]
        actions = action if names[0] == 0 else dict(zip(names, action, strict=True))
        obs, env_state, reward, done, _ = env.step_env(step_key, env_state, actions)
        reward = stack(reward).squeeze(-1)
        info = []
        if hasattr(env, "num_allies"):  # SMAX; against the heuristic, its state is inside another
            alive = getattr(env_state, "state", env_state).unit_alive
            info = [{"won": alive[: env.num_allies].any() & ~alive[env.num_allies :].any()}]
        # SMAX pays dead agents too: they stay active.
        is_done = lambda name: done["__all__"] | (done.get(name, False) & ("SMAX" not in family))
        ended = active & jnp.stack([is_done(name) for name in names])
        truncated = ended & TIME_LIMIT[family](env, env_state, reward)
        terminated = ended & ~truncated
        next_obs = observe(obs, env_state, active & ~terminated)
        remaining = active & ~ended
        continued = (next_obs._replace(active=remaining), (env_state, remaining))
        obs, env_state = optax.tree.where(remaining.any(), continued, reset(reset_key))
        return obs, env_state, reward * active, terminated, truncated, next_obs, *info

    return reset, step, names, continuous


# ---------------------------------------- network
def dense(features: int, scale: float = 2**0.5) -> nn.Dense:
    return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))


def gru_forward(kernel, bias, x, hidden, reset):
    """Runs a GRU over a sequence and keeps what gru_backward needs.

    x [T, ..., 3 H] comes from the dense layer; kernel [H, 3 H] and bias [H] belong to the recurrent
    part. Where reset [T, ...] is set, hidden [..., H] is cleared before the step. Returns hidden
    after each step [T, ..., H] and the residuals.
    """

    def step(hidden, inputs):
        x, reset = inputs
        before = jnp.where(reset[..., None], 0, hidden)
        r_x, z_x, n_x = jnp.split(x, 3, axis=-1)  # gates r and z, candidate n
        r_h, z_h, n_h = jnp.split(before @ kernel, 3, axis=-1)
        r = nn.sigmoid(r_x + r_h)
        z = nn.sigmoid(z_x + z_h)
        gated = n_h + bias
        n = jnp.tanh(n_x + r * gated)
        hidden = (1 - z) * n + z * before
        return hidden, (hidden, before, r, z, n, gated)

    unroll = 1 if jax.default_backend() == "cpu" else 16  # up to 1.7x as fast on a GPU
    _, (hidden, *steps) = jax.lax.scan(step, hidden, (x, reset), unroll=unroll)
    return hidden, (kernel, reset, *steps)


def gru_backward(residuals, d_output):
    """Backpropagation through time, from d_output [T, ..., H], the gradient after each step.

    Written by hand because jax.grad accumulates the gradient of the kernel inside the loop. One
    product after the loop makes training 1.2 times as fast on a CPU.
    """
    kernel, reset, before, r, z, n, gated = residuals
    # Derivatives, for all steps at once. In these names n, r and z stand for the inputs of tanh and
    # the sigmoids: hidden_by_n is d hidden / d (input of tanh).
    hidden_by_n = (1 - z) * (1 - n**2)
    hidden_by_z = (before - n) * z * (1 - z)
    n_by_r = gated * r * (1 - r)

    def step(d_hidden, inputs):
        d_output, reset, r, z, hidden_by_n, hidden_by_z, n_by_r = inputs
        d_hidden += d_output
        d_n = d_hidden * hidden_by_n
        d_z = d_hidden * hidden_by_z
        d_r = d_n * n_by_r
        d_product = jnp.concatenate([d_r, d_z, d_n * r], axis=-1)  # gradient of before @ kernel
        d_before = z * d_hidden + d_product @ kernel.T
        return jnp.where(reset[..., None], 0, d_before), (d_n, d_product)

    zero = jnp.zeros_like(d_output[0])
    xs = d_output, reset, r, z, hidden_by_n, hidden_by_z, n_by_r
    unroll = 1 if jax.default_backend() == "cpu" else 16  # as in gru_forward
    d_hidden, (d_n, d_product) = jax.lax.scan(step, zero, xs, reverse=True, unroll=unroll)
    size = len(kernel)
    # r and z read x + product, so both have the same gradient; n reads x + r * (product + bias).
    d_x = jnp.concatenate([d_product[..., : 2 * size], d_n], axis=-1)
    d_product = d_product.reshape(-1, 3 * size)
    d_kernel = before.reshape(-1, size).T @ d_product
    d_bias = d_product[:, 2 * size :].sum(0)
    return d_kernel, d_bias, d_x, d_hidden, None  # reset has no gradient


@jax.custom_vjp
def gru(kernel, bias, x, hidden, reset):
    """The hidden states of gru_forward. Differentiable in reverse mode only."""
    return gru_forward(kernel, bias, x, hidden, reset)[0]


gru.defvjp(gru_forward, gru_backward)


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014, arXiv 1406.1078v1): nn.GRUCell with another init."""

    @nn.compact
    def __call__(self, x: jax.Array, hidden: jax.Array, reset: jax.Array) -> jax.Array:
        """x [T, ..., F], hidden [..., H], reset [T, ...] -> hidden after each step [T, ..., H]"""
        size = hidden.shape[-1]
        x = nn.Dense(3 * size)(x)  # [T, ..., 3 H], all steps at once
        # Unlike in nn.GRUCell, one orthogonal initialization for r, z and n together.
        kernel = self.param("kernel", nn.initializers.orthogonal(), (size, 3 * size), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (size,), jnp.float32)
        return gru(kernel, bias, x, hidden, reset)


class LSTM(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997). hidden is a pair: cell, output."""

    @nn.compact
    def __call__(self, x: jax.Array, hidden: tuple, reset: jax.Array) -> tuple:
        """x [T, ..., F], hidden [..., H], reset [T, ...] -> hidden after each step [T, ..., H]"""

        def step(cell, hidden, inputs):
            x, reset = inputs
            hidden = jax.tree.map(lambda h: jnp.where(reset[..., None], 0, h), hidden)
            hidden, _ = cell(hidden, x)
            return hidden, hidden

        cell = nn.OptimizedLSTMCell(hidden[1].shape[-1])
        scan = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
        return scan(cell, hidden, (x, reset))[1]


class ActorCritic(nn.Module):
    """A policy and a value function of one agent: two RNNs. hidden has the memory of each."""

    continuous: bool
    config: Config

    @nn.compact
    def __call__(self, obs: Observation, hidden: dict, reset: jax.Array):
        """obs [T, ..., F], hidden [..., H], reset [T, ...] -> policy, value, hidden [T, ..., H]"""
        num_outputs = obs.mask.shape[-1] * (2 if self.continuous else 1)  # mean, log_std
        actor = RNN(num_outputs, 0.01, self.config, name="actor")
        critic = RNN(1, 1.0, self.config, name="critic")
        outputs, actor_hidden = actor(obs.features, hidden["actor"], reset)
        value, critic_hidden = critic(obs.features, hidden["critic"], reset)
        hidden = {"actor": actor_hidden, "critic": critic_hidden}
        # Masked outputs are constants and get no gradient.
        value = jnp.where(obs.active, value.squeeze(-1), 0)
        mask = obs.mask & obs.active[..., None]
        if not self.continuous:
            # All different: if all are masked, the first action is certain and the entropy 0.
            masked = -1e9 * (1 + jnp.arange(num_outputs))
            return distrax.Categorical(jnp.where(mask, outputs, masked)), value, hidden
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        std = jnp.where(mask, jnp.exp(log_std), (2 * np.pi * np.e) ** -0.5)  # of entropy 0
        policy = distrax.Independent(distrax.Normal(jnp.where(mask, mean, 0), std), 1)
        return policy, value, hidden


class RNN(nn.Module):
    num_outputs: int
    scale: float  # of the initial outputs
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, hidden: Any, reset: jax.Array):
        """x [T, ..., F], hidden [..., H], reset [T, ...] -> outputs, hidden after each step"""
        x = nn.tanh(dense(self.config.hidden_size)(x))
        cell = GRU() if self.config.cell == "gru" else LSTM()
        hidden = cell(x, hidden, reset | (not self.config.memory))  # [T, ..., H]
        x = hidden if self.config.cell == "gru" else hidden[1]
        return dense(self.num_outputs, self.scale)(x), hidden


# -------------------------------------- algorithm
class Transition(NamedTuple):
    obs: Observation  # [K, ...], like all below but hidden and info
    reset: jax.Array  # the memory is cleared before obs is read
    hidden: Any  # [1, N, K, H] before the first step of a rollout; None in single steps
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    terminated: jax.Array  # reached a terminal state
    done: jax.Array  # terminated, truncated or not active
    next_obs: Any  # the observation that the action led to; None in rollouts
    episode_return: jax.Array  # up to and including this step
    episode_length: jax.Array  # so far, the same for all agents
    info: dict = {}  # scalars of the environment, logged at the end of an episode


class RunnerState(NamedTuple):
    """What one environment carries from step to step."""

    key: jax.Array
    obs: Observation  # [K, ...]
    hidden: Any  # [K, H] before obs is read; if `done`, the network clears it first
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

    All arrays are [T, B, ...], hidden [1, B, ...]. Returns loss, metrics.
    """
    hidden = jax.tree.map(lambda x: x[0], batch.hidden)
    policy, value, _ = network.apply(params, batch.obs, hidden, batch.reset)
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
    loss = policy_loss + value_loss - ent_coef * entropy
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
    env_reset, env_step, names, continuous = make_env(config)
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs must be a multiple of {num_devices}, the number of devices")
    if envs_per_device % config.num_minibatches:
        raise ConfigError(
            f"num_minibatches must divide {envs_per_device}, the environments per device"
        )
    network = ActorCritic(continuous, config)
    num_epochs = max(config.actor_epochs, config.critic_epochs)
    pmean = lambda x: jax.lax.pmean(x, "devices")
    psum = lambda x: jax.lax.psum(x, "devices")

    def schedule(value, anneal):
        """A function of the updates done: linear to zero, or constant."""
        return optax.linear_schedule(value, 0 if anneal else value, config.num_updates)

    lr_schedule = schedule(1.0, config.anneal_lr)  # a factor
    ent_schedule = schedule(config.ent_coef, config.anneal_ent)

    # Serves actor and critic, each with its own state; update_minibatch applies the learning rate.
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(eps=1e-5),
    )
    # The network on obs [..., K, F], hidden [..., K, H] and reset [..., K]. Unshared parameters are
    # [K, ...].
    agent_axes = Observation(features=-2, mask=-2, active=-1)
    apply_each = jax.vmap(network.apply, in_axes=(0, agent_axes, -2, -1), out_axes=(-2, -1, -2))
    apply_agents = network.apply if config.share_parameters else apply_each

    def apply_once(params, obs, hidden, reset):
        """All agents on sequences of one step; reset has no axis K. Policies are pytrees, too."""
        reset = jnp.broadcast_to(reset[..., None], obs.active.shape)  # [..., K]
        obs, reset = jax.tree.map(lambda x: x[None], (obs, reset))
        return jax.tree.map(lambda x: x[0], apply_agents(params, obs, hidden, reset))

    def start_episode(key):
        key, reset_key = jax.random.split(key)
        obs, env_state = env_reset(reset_key)
        zeros = jnp.zeros((len(names), config.hidden_size), jnp.float32)
        hidden = zeros if config.cell == "gru" else (zeros, zeros)
        return RunnerState(
            key=key,
            obs=obs,
            hidden={"actor": hidden, "critic": hidden},
            env_state=env_state,
            done=jnp.bool(False),
            episode_return=jnp.zeros(len(names), jnp.float32),
            episode_length=jnp.zeros(len(names), jnp.float32),
        )

    def act(params, runner: RunnerState, greedy=False):
        """One step of one environment."""
        key, action_key, step_key = jax.random.split(runner.key, 3)
        policy, value, hidden = apply_once(params, runner.obs, runner.hidden, runner.done)  # [K]
        action = policy.mode() if greedy else policy.sample(seed=action_key)
        outcome = env_step(step_key, runner.env_state, action)
        obs, env_state, reward, terminated, truncated, next_obs, *info = outcome
        transition = Transition(
            obs=runner.obs,
            reset=jnp.full(len(names), runner.done),
            hidden=None,
            action=action,
            log_prob=policy.log_prob(action),
            value=value,
            reward=reward,
            terminated=terminated,
            done=terminated | truncated | ~runner.obs.active,
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
            done=transition.done.all(),
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
            # The value of the final observation, with the memory of its episode. This pass
            # covers all N, but is skipped in steps without a truncation. (With several seeds, vmap
            # makes cond run both branches.)
            truncated = transition.done & transition.next_obs.active
            final = (transition.next_obs, runners.hidden, jnp.zeros_like(runners.done))
            skip = lambda *_: transition.value  # used for inactive agents only: 0 there
            final_value = jax.lax.cond(truncated.any(), critic, skip, *final)
            return runners, (transition._replace(next_obs=None), final_value)

        length = config.num_steps
        runners, (rollout, final_value) = jax.lax.scan(act_all, state.runners, None, length)
        last_value = critic(runners.obs, runners.hidden, runners.done)
        next_value = jnp.concatenate([rollout.value[1:], last_value[None]])  # [T, N, K]
        next_value = jnp.where(rollout.done, final_value, next_value)
        advantage, target = compute_gae(rollout, next_value, config.gamma, config.gae_lambda)
        hidden = jax.tree.map(lambda x: x[None], state.runners.hidden)
        rollout = rollout._replace(hidden=hidden)
        samples = (rollout._replace(info={}), advantage, target)  # [T, N, K, ...]; info has no K
        decay, ent_coef = lr_schedule(state.updates_done), ent_schedule(state.updates_done)
        lr = {"actor": config.actor_lr * decay, "critic": config.critic_lr * decay}

        def update_minibatch(carry, minibatch):
            params, opt_state, learns = carry
            batch, advantage, target = minibatch
            # An inactive agent adds 0 to every loss: its advantage and target are 0, and the
            # network's outputs are constants. Losses are divided by the number of all samples, so
            # that an active one weighs the same in each minibatch; metrics and the moments of
            # advantages by that of active ones.
            active = jnp.float32(batch.obs.active)
            active_fraction = jnp.maximum(pmean(active.mean()), 1e-8)
            weight = active / active_fraction
            advantage = (advantage - pmean((weight * advantage).mean())) * active
            advantage /= jnp.sqrt(pmean((weight * advantage**2).mean())) + 1e-8
            grad = jax.grad(ppo_loss, has_aux=True)
            grads, metrics = grad(params, network, batch, advantage, target, ent_coef, config)
            grads, metrics = pmean((grads, metrics))
            metrics = jax.tree.map(lambda x: x / active_fraction, metrics)
            metrics["optim/grad_norm"] = optax.tree.norm(grads)

            parts, opt_state = dict(params["params"]), dict(opt_state)
            for part in parts:
                old = (parts[part], opt_state[part])
                updates, new_state = optimizer.update(grads["params"][part], opt_state[part])
                updates = optax.tree.scale(-lr[part], updates)
                new = (optax.apply_updates(parts[part], updates), new_state)
                # Where a part has stopped, neither its weights nor its Adam state change.
                parts[part], opt_state[part] = optax.tree.where(learns[part], new, old)
            return ({"params": parts}, opt_state, learns), metrics

        if not config.share_parameters:  # K: axis 0 of the carry, 2 of [T, B, K, ...]
            update_minibatch = jax.vmap(update_minibatch, (0, 2))

        def update_epoch(carry, x):
            params, opt_state, actor_epochs = carry
            epoch, indices = x
            # [num_minibatches, T, B, K, ...]
            minibatches = jax.tree.map(lambda leaf: leaf[:, indices].swapaxes(0, 1), samples)
            critic_learns = jnp.full_like(actor_epochs, epoch < config.critic_epochs, dtype=bool)
            carry = (params, opt_state, {"actor": epoch < actor_epochs, "critic": critic_learns})
            (params, opt_state, _), metrics = jax.lax.scan(update_minibatch, carry, minibatches)
            if config.target_kl:  # where the policy is too far from the old one, the actor stops
                stop = metrics["policy/approx_kl"].mean(0) > config.target_kl
                actor_epochs = jnp.where(stop, jnp.minimum(actor_epochs, epoch + 1), actor_epochs)
            return (params, opt_state, actor_epochs), metrics

        # The permutations of all epochs, in one sort (jax.random.permutation sorts large batches
        # twice). They do not depend on the rollout: XLA:CPU can sort while it runs.
        key, shuffle_key = jax.random.split(state.key)
        bits = jax.random.bits(shuffle_key, (num_epochs, envs_per_device), jnp.uint32)
        indices = jnp.argsort(bits).reshape(num_epochs, config.num_minibatches, -1)
        shape = () if config.share_parameters else len(names)
        actor_epochs = jnp.full(shape, config.actor_epochs, jnp.int32)  # [] or [K]
        carry = (state.params, state.opt_state, actor_epochs)
        xs = (jnp.arange(num_epochs, dtype=jnp.int32), indices)
        (params, opt_state, actor_epochs), metrics = jax.lax.scan(update_epoch, carry, xs)
        metrics = jax.tree.map(lambda x: x[-1].mean(), metrics)  # the mean of the last epoch
        var = lambda x: x.var(where=rollout.obs.active)
        done = rollout.done.all(-1)  # [T, N]
        episodes = psum(done.sum())  # if none ended, the means are NaN
        mean = lambda x: psum(jnp.where(done, x, 0).sum((-2, -1))) / episodes
        returns = mean(jnp.moveaxis(rollout.episode_return, -1, 0))  # [K]
        metrics |= {
            "value/explained_variance": pmean(1 - var(target - rollout.value) / var(target)),
            "episode/return": returns.sum(),
            "episode/length": mean(rollout.episode_length[..., 0]),
            "episode/count": episodes,
            "actor/epochs": actor_epochs.mean(),
            "optim/lr": lr["actor"],  # the critic's follows the same schedule
        }
        metrics |= {f"episode/return/{name}": x for name, x in zip(names, returns, strict=True)}
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
        returns = pmean(runners.episode_return.mean(0))  # [K]
        eval_return = returns.sum()
        is_best = eval_return > state.best_return
        state = state._replace(
            key=key,
            eval_return=eval_return,
            best_return=jnp.where(is_best, eval_return, state.best_return),
            best_params=optax.tree.where(is_best, state.params, state.best_params),
        )
        eval_length = pmean(runners.episode_length.mean())
        metrics = {"eval/return": eval_return, "eval/length": eval_length}
        metrics |= {f"eval/return/{name}": x for name, x in zip(names, returns, strict=True)}
        return state, metrics

    def init_seed(key):
        key, params_key, runner_key = jax.random.split(key, 3)
        runners = jax.vmap(start_episode)(jax.random.split(runner_key, envs_per_device))
        params_key = jax.lax.all_gather(params_key, "devices")[0]  # the same on all devices
        keys = jax.random.split(params_key, len(names))
        obs = jax.tree.map(lambda x: x[None], runners.obs)  # sequences of one step
        inputs = (obs, runners.hidden, jnp.zeros_like(obs.active))
        params = jax.lax.map(lambda key: network.init(key, *inputs), keys)  # [K, ...]
        opt_state = {part: jax.vmap(optimizer.init)(x) for part, x in params["params"].items()}
        if config.share_parameters:  # one is enough
            params, opt_state = jax.tree.map(lambda x: x[0], (params, opt_state))
        return TrainState(
            key=key,
            params=params,
            opt_state=opt_state,
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
