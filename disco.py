"""Learning with Disco103, the update rule that DeepMind discovered by meta-learning.

Oh et al. 2025, Nature, doi 10.1038/s41586-025-09761-x: no loss is written down by hand. A frozen
meta-network reads a batch of replayed trajectories and says where the agent's policy and its two
predictions without fixed meaning, y and z, should move; only q keeps a fixed meaning, the return.
All updates of all seeds are one XLA program. As in the original, and unlike the PPO scripts beside:
- a time limit counts as an end of the episode, and the reset observation follows it at once;
- the first step of an episode is no target of the losses, though the networks do read it.
Here num_envs, replay_size and replay_batch are spread over the devices; the original gives each
device as many. --rule actor_critic and --rule policy_gradient are baselines in the same harness.

Shapes: L steps, T = L - 1 transitions, N environments and B trajectories per device, A actions,
C trajectories of replay per device, D devices, S seeds.

    python disco.py

0.9 is reached after 25.5k, 42.0k and 28.8k steps with seeds 0, 1 and 2, and 1.0 kept over the last
5k; chance is -0.75. The arithmetic is the original's to 1e-9 in float64: tests/test_disco.py.
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
import hashlib
import io
import json
import os
import re
import signal
import sys
import time
import urllib.request
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

SCRIPT = "disco"
LOSSES = "loss/total loss/policy loss/value policy/entropy policy/approx_kl policy/clip_fraction"
COLUMNS = "update seed env_steps episode/return episode/length episode/count eval/return"
COLUMNS += f" {LOSSES} value/explained_variance optim/grad_norm optim/lr time/sps"

NUM_PREDICTIONS = 600  # entries of y and of z
MAX_VALUE, NUM_BINS = 300, 601  # squashed returns are integers from -300 to 300, and between
URL = "https://raw.githubusercontent.com/google-deepmind/disco_rl/main/disco_rl/update_rules/"
URL += "weights/disco_103.npz"
SHA256 = "dac840a15b81e8805326363458c33979626172618f620d9e6e170315388530aa"


# ------------------------------------------------------------------------------------------ config
class ConfigError(Exception):
    """A wrong input. The message says what is wrong, what is allowed and what to change."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Learning with the discovered update rule Disco103."""

    env_id: str = "Catch-8x8"  # Catch-<rows>x<columns> or a gymnax environment, discrete actions
    total_timesteps: int = 58_000  # steps of each seed over all devices, rounded down
    num_envs: int = 2  # parallel environments of each seed over all devices
    num_steps: int = 29  # steps of every environment between two updates
    rule: Literal["disco", "actor_critic", "policy_gradient"] = "disco"  # what updates the agent
    weights: str = ""  # npz file of the meta-network, or random; empty: Disco103, downloaded once
    replay_size: int = 1024  # trajectories remembered, over all devices; the oldest go first
    replay_batch: int = 64  # trajectories drawn for each update, over all devices
    hidden_size: int = 512  # width of the first layer
    feature_size: int = 512  # width of the second, which every output reads
    model_size: int = 128  # of the LSTM that imagines each action
    branch_size: int = 128  # width of the layer between it and each of its outputs
    lr: float = 1e-2  # learning rate of Adam
    max_update: float = 1.0  # every entry of Adam's step is clipped to this, before the rate
    gamma: float = 0.997  # discount
    trace_lambda: float = 0.95  # trace decay of Retrace and of V-trace
    ema_decay: float = 0.99  # of the moments that normalise the advantages
    target_decay: float = 0.9  # of the slowly moving copy of the parameters
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.2  # weight of the value loss
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
            smallest = {"seed": 0, "process_id": 0, "num_steps": 2}.get(name, 1)
            if type(value) is int and value < smallest:
                raise ConfigError(f"{name} = {value}: must be at least {smallest}")
        needed = max(self.num_envs, self.replay_batch) * self.num_steps
        if self.total_timesteps < needed:
            raise ConfigError(
                f"total_timesteps = {self.total_timesteps} ends before the first update, at"
                f" max(num_envs, replay_batch) * num_steps = {needed}: raise it or lower those"
            )
        if self.replay_size < max(self.num_envs, self.replay_batch):
            raise ConfigError(
                f"replay_size = {self.replay_size} is less than num_envs = {self.num_envs} or"
                f" replay_batch = {self.replay_batch}: raise it to {self.replay_batch} or more"
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
    """Check the sizes, the environment and the weights. Raises ConfigError."""
    for name in ("num_envs", "replay_size", "replay_batch"):
        check_divides(name, getattr(config, name), "devices", jax.device_count())
    make_env(config)
    if config.rule == "disco":
        load_weights(config.weights)
    return config


# ------------------------------------------------------------------------------------- environment
class CatchState(NamedTuple):
    ball_y: jax.Array  # [] row, from 0 at the top
    ball_x: jax.Array  # [] column
    paddle_x: jax.Array  # [] column in the last row


def make_catch(rows: int, columns: int) -> tuple[Callable, Callable, int]:
    """Catch of bsuite: a ball falls, a paddle in the last row moves; +1 or -1 at the end.

    Returns reset, step and the number of actions as `make_env` does, for one environment.
    """

    def observe(state):
        y, x = jnp.arange(rows)[:, None], jnp.arange(columns)  # [rows, 1], [columns]
        ball = (y == state.ball_y) & (x == state.ball_x)
        paddle = (y == rows - 1) & (x == state.paddle_x)
        return (ball | paddle)[..., None]  # [rows, columns, 1]

    def reset(key):
        ball_x = jax.random.randint(key, (), 0, columns, jnp.int32)
        state = CatchState(jnp.int32(0), ball_x, jnp.int32(columns // 2))
        return observe(state), state

    def step(key, state, action):
        paddle_x = jnp.clip(state.paddle_x + action - 1, 0, columns - 1)
        moved = CatchState(state.ball_y + 1, state.ball_x, paddle_x)
        landed = moved.ball_y == rows - 1
        reward = jnp.where(moved.ball_x == paddle_x, 1.0, -1.0) * landed
        _, fresh = reset(key)
        state = jax.tree.map(lambda x, y: jnp.where(landed, x, y), fresh, moved)
        return observe(state), state, reward, landed, jnp.zeros_like(landed), observe(moved)

    return reset, step, 3


def make_env(config: Config) -> tuple[Callable, Callable, int]:
    """The one place to edit to bring your own environment. Raises ConfigError for a wrong one.

    Returns reset(keys [N]) -> (obs, env_state), the number of actions, and step(keys, env_state,
    action) -> (obs, env_state, reward, terminated, truncated, final_obs), all [N, ...]. A step that
    ends an episode starts the next: obs is its first, final_obs the true next observation.
    """
    if catch := re.fullmatch(r"Catch-(\d+)x(\d+)", config.env_id):
        rows, columns = map(int, catch.groups())
        if min(rows, columns) < 2:
            raise ConfigError(f"{config.env_id} leaves no room to move: the smallest is Catch-2x2")
        reset, step, num_actions = make_catch(rows, columns)
        return jax.vmap(reset), jax.vmap(step), num_actions
    if config.env_id not in gymnax.registered_envs:
        known = ["Catch-8x8", *gymnax.registered_envs]
        nearest = difflib.get_close_matches(config.env_id, known, cutoff=0)
        raise ConfigError(f"unknown env_id {config.env_id}: the nearest are {', '.join(nearest)}")
    env, params = gymnax.make(config.env_id)
    obs_space, action_space = env.observation_space(params), env.action_space(params)
    if not hasattr(action_space, "n"):
        raise ConfigError(f"{config.env_id} has continuous actions: use ppo_continuous.py")

    def encode(obs):
        if not obs_space.shape:
            return jax.nn.one_hot(obs, obs_space.n)
        # MinAtar's planes hold 0 and 1: as bools they take a quarter of the rollout's memory.
        return obs.astype(bool) if config.env_id.endswith("MinAtar") else obs

    def reset(key):
        obs, env_state = env.reset(key, params)
        return encode(obs), env_state

    def step(key, env_state, action):
        obs, env_state, *outcome, info = env.step(key, env_state, action, params)
        reward, terminated, truncated = outcome
        final_obs = encode(info["final_observation"])
        return encode(obs), env_state, jnp.float32(reward), terminated, truncated, final_obs

    return jax.vmap(reset), jax.vmap(step), action_space.n


# ----------------------------------------------------------------------------------------- network
class AgentOut(NamedTuple):
    """What the agent says of every observation. The baselines have no y, z and aux_pi."""

    logits: jax.Array  # [..., A] of the policy
    y: jax.Array  # [..., 600] prediction about the observation
    z: jax.Array  # [..., A, 600] prediction about each action
    aux_pi: jax.Array  # [..., A, A] logits of the policy one step after each action
    q: jax.Array  # [..., A, 601] logits of the return after each action; baselines: [..., 601]


def dense(features: int, stddev: float | None = None, name: str | None = None) -> nn.Dense:
    """Normal weights cut off at two standard deviations; None: 1 / sqrt(inputs)."""

    def kernel_init(key, shape, dtype):
        scale = stddev or shape[0] ** -0.5
        return nn.initializers.truncated_normal(scale)(key, shape, dtype)

    return nn.Dense(features, kernel_init=kernel_init, name=name)


def lstm_cell(gates: jax.Array, cell: jax.Array) -> tuple[jax.Array, jax.Array]:
    """gates [..., 4 H], cell [..., H] -> (hidden, cell), with the forget gate's bias of one."""
    write, candidate, forget, output = jnp.split(gates, 4, axis=-1)
    cell = nn.sigmoid(forget + 1) * cell + nn.sigmoid(write) * nn.tanh(candidate)
    return nn.sigmoid(output) * nn.tanh(cell), cell


class Agent(nn.Module):
    """A multilayer perceptron, and one step of an LSTM that imagines each action."""

    num_actions: int
    config: Config

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> AgentOut:
        """obs [B, ...] -> AgentOut. With action [B], only that action's outputs: no axis A."""
        size, branch_size = self.config.model_size, self.config.branch_size
        x = obs.reshape(len(obs), -1).astype(float)
        x = nn.relu(dense(self.config.hidden_size, name="torso_0")(x))
        x = dense(self.config.feature_size, name="torso_1")(x)
        logits = dense(self.num_actions, 1e-2, name="logits")(x)
        if self.config.rule != "disco":
            return AgentOut(logits, None, None, None, dense(NUM_BINS, 1e-2, name="value")(x))
        y = dense(NUM_PREDICTIONS, 1e-2, name="y")(x)

        # The LSTM reads [one-hot action, hidden]: the second part is the same for all actions.
        cell = dense(size, name="cell")(x)
        stddev = (self.num_actions + size) ** -0.5
        gates = dense(4 * size, stddev, name="gates")(nn.tanh(cell))  # [B, 4 H]
        init = nn.initializers.truncated_normal(stddev)
        action_gates = self.param("action_gates", init, (self.num_actions, 4 * size))
        if action is None:
            gates, cell = gates[:, None] + action_gates, cell[:, None]  # [B, A, 4 H], [B, 1, H]
        else:
            gates += action_gates[action]  # [B, 4 H]
        hidden, _ = lstm_cell(gates, cell)
        sizes = {"z": NUM_PREDICTIONS, "aux_pi": self.num_actions, "q": NUM_BINS}
        first = {name: nn.relu(dense(branch_size, name=f"{name}_0")(hidden)) for name in sizes}
        heads = {name: dense(sizes[name], name=f"{name}_1")(first[name]) for name in sizes}
        return AgentOut(logits, y, **heads)


# The meta-network has two sets of features with weights of their own: for the targets, and for the
# LSTM that lives as long as the agent. The names are those of the released file.
MAIN, META = "lstm", "lstm/~/meta_lstm/~unroll"
WEIGHT_SHAPES = {
    f"{features}/{name}": shape
    for features in (MAIN, META)
    for name, shape in {
        "mlp/~/linear_0": (NUM_PREDICTIONS, 16),  # reads y
        "mlp/~/linear_1": (16, 1),
        "mlp_1/~/linear_0": (NUM_PREDICTIONS, 16),  # reads z
        "mlp_1/~/linear_1": (16, 1),
        "sequential/conv1_d": (1, 2 * 9, 16),  # read what there is about each action
        "sequential/conv1_d_1": (1, 2 * 16, 2),
    }.items()
}
WEIGHT_SHAPES |= {
    f"{MAIN}/lstm/linear": (27 + 256, 4 * 256),
    f"{MAIN}/linear": (128, 256),  # what the lifetime so far makes of the LSTM's output
    f"{MAIN}/linear_1": (256, 1),
    f"{MAIN}/linear_2": (256, NUM_PREDICTIONS),  # target of y
    f"{MAIN}/linear_3": (256, NUM_PREDICTIONS),  # target of z
    f"{MAIN}/sequential_1/conv1_d": (1, 2 * 258, 16),  # target of the policy
    f"{MAIN}/linear_4": (16, 1),
    f"{META}/mlp_2/~/linear_0": (29, 16),
    f"{META}/lstm/linear": (16 + 128, 4 * 128),
}


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """The meta-network before any meta-training."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in WEIGHT_SHAPES.items():
        last_layers = re.fullmatch(rf"{MAIN}/linear(_\d)?", name)
        stddev = np.prod(shape[:-1]) ** -0.5
        if last_layers:
            stddev = 0.3 if last_layers[1] else 1.0
        x = rng.standard_normal(shape)
        while (far := abs(x) > 2).any():
            x[far] = rng.standard_normal(far.sum())
        weights[f"{name}/w"] = np.float32(stddev * x)
        weights[f"{name}/b"] = np.zeros(shape[-1], np.float32)
    return weights


def check_released(content: bytes, source: Any) -> None:
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ConfigError(f"{source} is not Disco103: its sha256 is {digest}, not {SHA256}")


def download(path: Path) -> bytes:
    """The released weights, kept at `path`. Raises ConfigError without network."""
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
        check_released(content, URL)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"cannot download the weights of Disco103 ({error}); with network elsewhere, run\n"
            f"curl --create-dirs -o {path} {URL}"
        ) from None
    return content


@functools.cache
def load_weights(source: str) -> dict[str, np.ndarray]:
    """The meta-network's arrays by name. Raises ConfigError if they are not to be had."""
    if source == "random":
        return random_weights(0)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(source or cache / "disco_rl" / "disco_103.npz")
    try:
        content = path.read_bytes() if source or path.exists() else download(path)
    except OSError as error:
        raise ConfigError(f"--weights {source} cannot be read: {error}") from None
    if not source:
        check_released(content, path)
    try:
        arrays = dict(np.load(io.BytesIO(content)))
    except Exception as error:
        raise ConfigError(f"{path} is no npz file: {error}") from None
    for name, shape in WEIGHT_SHAPES.items():
        for part, expected in (("w", shape), ("b", shape[-1:])):
            found = arrays.get(f"{name}/{part}", np.empty(0)).shape
            if found != expected:
                raise ConfigError(f"{path} has {name}/{part} of shape {found}, not {expected}")
    return arrays


def linear(weights: dict, name: str, x: jax.Array) -> jax.Array:
    """x [..., I] -> [..., O]."""
    w = weights[f"{name}/w"]
    return x @ w.reshape(w.shape[-2:]) + weights[f"{name}/b"]


def embed(weights: dict, name: str, x: jax.Array) -> jax.Array:
    """A prediction as a distribution [..., 600] -> one number [...]."""
    hidden = nn.relu(linear(weights, f"{name}/~/linear_0", x))
    return linear(weights, f"{name}/~/linear_1", hidden).squeeze(-1)


def mix_actions(weights: dict, name: str, x: jax.Array) -> jax.Array:
    """x [..., A, I] -> [..., A, O]. Treats all actions alike: each meets the mean of all."""
    own, mean = jnp.split(weights[f"{name}/w"].squeeze(0), 2)
    mean = x.mean(axis=-2, keepdims=True) @ mean + weights[f"{name}/b"]  # [..., 1, O]
    return nn.relu(x @ own + mean)


# ----------------------------------------------------------------------------------------- rollout
class Transition(NamedTuple):
    """One step of every environment; a trajectory is L of them."""

    obs: jax.Array  # [N, ...]
    action: jax.Array  # [N]
    logits: jax.Array  # [N, A] of the policy that acted
    reward: jax.Array  # [N]
    done: jax.Array  # [N] the step ended the episode
    reset: jax.Array  # [N] obs is the first of an episode, and another went before


class Moments(NamedTuple):
    """Exponential averages of x and x ** 2, over all devices."""

    first: jax.Array  # []
    second: jax.Array  # []
    decay_product: jax.Array  # [] weight that is still on the zeros at the start


class MetaState(NamedTuple):
    """What the update rule remembers of the agent's lifetime."""

    adv: Moments
    td: Moments
    hidden: jax.Array  # [128] of the lifetime LSTM
    cell: jax.Array  # [128]


class RunnerState(NamedTuple):
    """All that one update hands to the next. Outside `train` each leaf has [D, S] in front."""

    params: Any
    target_params: Any
    opt_state: Any
    meta: MetaState
    replay: Transition  # [C, L, ...] a ring: the oldest trajectory is overwritten first
    env_state: Any
    obs: jax.Array  # [N, ...]
    reset: jax.Array  # [N] obs is the first of an episode, and another went before
    episode_return: jax.Array  # [N] of the episodes under way
    episode_length: jax.Array  # [N]
    update: jax.Array  # [] updates done, those that only fill the replay included
    key: jax.Array  # [2] the data of a random key, which a checkpoint can hold


# --------------------------------------------------------------------------------------- advantage
def squash(x):
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x


def unsquash(x):
    """The inverse of `squash` (Pohlen et al. 2018, arXiv 1805.11593, proposition A.2)."""
    eps = 1e-3
    root = jnp.sqrt(1 + 4 * eps * (eps + 1 + jnp.abs(x))) / (2 * eps) - 1 / (2 * eps)
    return jnp.sign(x) * (root**2 - 1)


def signed_log(x):
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def expected_value(logits):
    """Logits over the bins [..., 601] -> returns [...]."""
    bins = jnp.linspace(-MAX_VALUE, MAX_VALUE, NUM_BINS)
    return unsquash(nn.softmax(logits) @ bins)


def of_action(x, action):
    """x [T, B, A, ...] -> [T, B, ...] of the actions [T, B] that were taken."""
    index = action.reshape(action.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=2).squeeze(2)


def update_moments(moments, x, decay):
    average = lambda old, new: decay * old + (1 - decay) * jax.lax.pmean(new.mean(), "devices")
    first, second = average(moments.first, x), average(moments.second, x**2)
    return Moments(first, second, decay * moments.decay_product)


def mean_and_std(moments):
    weight = 1 - moments.decay_product
    mean = moments.first / weight
    variance = jnp.maximum(moments.second / weight - mean**2, 0)
    return mean, jnp.sqrt(variance + 1e-12) + 1e-6


def compute_retrace(reward, discount, value, q, trace):
    """Retrace (Munos et al. 2016, arXiv 1606.02647, eq. 4). Returns the target of q, [T, B].

    All arrays are [T, B] but value [T + 1, B]. q is of the actions taken; trace[t] is
    lambda * min(1, ratio[t]) and cuts what lies after the step t.
    """

    def step(correction, x):
        reward, discount, next_value, q, trace = x
        target = reward + discount * (next_value + correction)
        return trace * (target - q), target

    steps = (reward, discount, value[1:], q, trace)
    _, target = jax.lax.scan(step, jnp.zeros_like(reward[0]), steps, reverse=True)
    return target


def compute_vtrace(reward, discount, value, ratio, trace_lambda):
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561, eq. 1). Returns (advantage, target), [T, B].

    All arrays are [T, B] but value [T + 1, B]. Ratios are clipped at one.
    """
    ratio = jnp.minimum(ratio, 1.0)
    delta = ratio * (reward + discount * value[1:] - value[:-1])

    def step(error, x):
        delta, decay = x
        error = delta + decay * error
        return error, error

    decay = discount * trace_lambda * ratio
    _, error = jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    target = value[:-1] + error  # [T, B]
    # Beyond the last step there is only the value.
    next_error = jnp.concatenate([error[1:], jnp.zeros_like(error[:1])])
    next_value = value[1:] + trace_lambda * next_error
    return ratio * (reward + discount * next_value - value[:-1]), target


class Values(NamedTuple):
    """What the returns are thought to be, and how the actions compare."""

    value: jax.Array  # [T + 1, B] of the online network
    target_q: jax.Array  # [T + 1, B, A] of the target network
    target: jax.Array  # [T, B] Retrace's target of q
    td: jax.Array  # [T, B] how far the online q is from it
    adv: jax.Array  # [T, B] of the actions taken
    qv_adv: jax.Array  # [T + 1, B, A] of all actions
    normalized_adv: jax.Array  # [T, B]
    normalized_qv_adv: jax.Array  # [T + 1, B, A] with the mean and spread of adv


def compute_values(out: AgentOut, target_out: AgentOut, batch: Transition, meta, config: Config):
    """Retrace's targets with the target network, under the online policy. Returns (Values, meta).

    All inputs are [T + 1, B, ...]; the last action, reward and done are not used.
    """
    policy, action = nn.softmax(out.logits), batch.action[:-1]
    q, target_q = expected_value(out.q), expected_value(target_out.q)  # [T + 1, B, A]
    value, target_value = (policy * q).sum(axis=-1), (policy * target_q).sum(axis=-1)
    log_ratio = nn.log_softmax(out.logits) - nn.log_softmax(batch.logits)
    trace = config.trace_lambda * jnp.exp(jnp.minimum(of_action(log_ratio[:-1], action), 0))
    taken_q = of_action(target_q[:-1], action)
    discount = config.gamma * (1 - batch.done[:-1])
    target = compute_retrace(batch.reward[:-1], discount, target_value, taken_q, trace)

    adv, td = target - target_value[:-1], target - of_action(q[:-1], action)
    qv_adv = target_q - target_value[..., None]
    meta = meta._replace(
        adv=update_moments(meta.adv, adv, config.ema_decay),
        td=update_moments(meta.td, td, config.ema_decay),
    )
    mean, std = mean_and_std(meta.adv)
    normalized = (adv - mean) / std, (qv_adv - mean) / std
    return Values(value, target_q, target, td, adv, qv_adv, *normalized), meta


def make_features(weights, features, out, target_out, batch: Transition, values: Values):
    """What the meta-network reads. Returns columns [T, B, 27] and, by action, [T, B, A, 2].

    `features` is MAIN or META; `out` and `target_out` hold probabilities, not logits. The gradient
    of meta-training flows through the predictions y and z alone.
    """
    values = jax.lax.stop_gradient(values)
    policies = out.logits, nn.softmax(batch.logits), target_out.logits
    policy, behaviour, target_policy = jax.lax.stop_gradient(policies)  # [T + 1, B, A]
    y, target_y = (embed(weights, f"{features}/mlp", x.y) for x in (out, target_out))
    z, target_z = (embed(weights, f"{features}/mlp_1", x.z) for x in (out, target_out))

    by_action = [policy, behaviour, target_policy, z, target_z]
    by_action += [signed_log(values.target_q), signed_log(values.qv_adv), values.normalized_qv_adv]
    by_action += [nn.one_hot(batch.action, policy.shape[-1], dtype=policy.dtype)]
    by_action = jnp.stack(by_action, axis=-1)[:-1]  # [T, B, A, 9]
    by_action = mix_actions(weights, f"{features}/sequential/conv1_d", by_action)
    by_action = mix_actions(weights, f"{features}/sequential/conv1_d_1", by_action)

    taken = lambda x: of_action(x[:-1], batch.action[:-1])
    pair = lambda x: (x[:-1], x[1:])  # now and one step later
    columns = [taken(policy), taken(behaviour), signed_log(batch.reward[:-1]), 1 - batch.done[:-1]]
    columns += [*pair(signed_log(values.value)), signed_log(values.adv), values.normalized_adv]
    columns += [taken(target_policy), *pair(y), *pair(target_y)]
    for x in (z, target_z):
        columns += [taken(x), *pair((policy * x).sum(axis=-1)), *pair(x.max(axis=-1))]
    columns = jnp.stack(columns, axis=-1)  # [T, B, 23]
    about_actions = [by_action.mean(axis=2), of_action(by_action, batch.action[:-1])]
    return jnp.concatenate([columns, *about_actions], axis=-1), by_action


class Hat(NamedTuple):
    """Where the meta-network wants the agent's outputs to be: logits."""

    logits: jax.Array  # [T, B, A]
    y: jax.Array  # [T, B, 600]
    z: jax.Array  # [T, B, 600] of the actions taken
    emb: jax.Array  # [T, B] for the lifetime LSTM


def look_back(weights, columns, done):
    """An LSTM from the last step to the first, anew at each end. [T, B, 27] -> [T, B, 256]."""
    w = weights[f"{MAIN}/lstm/linear/w"]
    inputs = columns @ w[:27] + weights[f"{MAIN}/lstm/linear/b"]  # [T, B, 4 * 256]

    def step(carry, x):
        inputs, done = x
        hidden, cell = jax.tree.map(lambda x: x * (1 - done)[:, None], carry)
        carry = lstm_cell(inputs + hidden @ w[27:], cell)
        hidden, _ = carry
        return carry, hidden

    zeros = jnp.zeros((done.shape[1], 256), columns.dtype)
    _, hidden = jax.lax.scan(step, (zeros, zeros), (inputs, done), reverse=True)
    return hidden


def lifetime_input(weights, columns, hat: Hat):
    """The mean over the batch and all devices of what an update was like, [16]."""
    y = embed(weights, f"{META}/mlp", nn.softmax(hat.y))
    x = jnp.concatenate([columns, hat.emb[..., None], y[..., None]], axis=-1)  # [T, B, 29]
    x = linear(weights, f"{META}/mlp_2/~/linear_0", x)
    return jax.lax.pmean(x.mean(axis=(0, 1)), "devices")


def discovered_rule(weights, out: AgentOut, target_out: AgentOut, batch, meta, config):
    """The meta-network. Inputs are [T + 1, B, ...]. Returns (Hat, Values, MetaState)."""
    values, meta = compute_values(out, target_out, batch, meta, config)
    inputs = jax.tree.map(nn.softmax, (out, target_out)) + (batch, values)
    columns, by_action = make_features(weights, MAIN, *inputs)
    x = look_back(weights, columns, batch.done[:-1])
    x = x * linear(weights, f"{MAIN}/linear", meta.hidden)  # [T, B, 256]
    tiled = jnp.broadcast_to(x[:, :, None], (*by_action.shape[:3], 256))
    by_action = jnp.concatenate([tiled, by_action], axis=-1)  # [T, B, A, 258]
    by_action = mix_actions(weights, f"{MAIN}/sequential_1/conv1_d", by_action)
    logits = linear(weights, f"{MAIN}/linear_4", by_action).squeeze(-1)
    y, z = linear(weights, f"{MAIN}/linear_2", x), linear(weights, f"{MAIN}/linear_3", x)
    hat = Hat(logits, y, z, linear(weights, f"{MAIN}/linear_1", x).squeeze(-1))

    # The next update is the first to know of this one.
    columns, _ = make_features(weights, META, *inputs)
    x = jnp.concatenate([lifetime_input(weights, columns, hat), meta.hidden])
    hidden, cell = lstm_cell(linear(weights, f"{META}/lstm/linear", x), meta.cell)
    return hat, values, meta._replace(hidden=hidden, cell=cell)


# -------------------------------------------------------------------------------------------- loss
def kl_divergence(p_logits, q_logits):
    """KL(p || q) over the last axis."""
    log_p, log_q = nn.log_softmax(p_logits), nn.log_softmax(q_logits)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def value_loss(logits, target):
    """Cross-entropy with the squashed target [...] shared by the two nearest of the bins."""
    value = jnp.clip(squash(target), -MAX_VALUE, MAX_VALUE)
    place = (value + MAX_VALUE) / (2 * MAX_VALUE) * (NUM_BINS - 1)
    lower, upper = jnp.floor(place), jnp.ceil(place)
    weight = (upper - MAX_VALUE - value) / (upper - lower + 1e-5)  # of the lower bin
    log_p = nn.log_softmax(logits)
    pick = lambda bins: jnp.take_along_axis(log_p, bins.astype(int)[..., None], -1).squeeze(-1)
    return -weight * pick(lower) - (1 - weight) * pick(upper)


def mean_loss(policy, predictions, value, out: AgentOut, batch: Transition, config: Config):
    """The weighted losses [T, B] over the steps that count. Returns (loss, metrics), scalars."""
    mask = ~batch.reset[:-1]
    mean = lambda x: (x * mask).sum() / (mask.sum() + 1e-8)
    entropy = distrax.Categorical(out.logits[:-1]).entropy()
    loss = mean(policy + predictions + config.vf_coef * value - config.ent_coef * entropy)
    metrics = {"loss/total": loss, "loss/policy": mean(policy), "loss/value": mean(value)}
    return loss, metrics | {"policy/entropy": mean(entropy)}


def disco_loss(out: AgentOut, hat: Hat, target, batch: Transition, config: Config):
    """Divergences of the agent's outputs from the meta-network's targets, and q's fixed meaning.

    `out` is of the actions taken, [T + 1, B, ...]; `hat` and `target` are [T, B, ...].
    """
    policy = kl_divergence(hat.logits, out.logits[:-1])
    predictions = kl_divergence(hat.y, out.y[:-1]) + kl_divergence(hat.z, out.z[:-1])
    next_logits = jax.lax.stop_gradient(out.logits[1:])
    predictions += kl_divergence(next_logits, out.aux_pi[:-1]) * (1 - batch.done[:-1])
    value = value_loss(out.q[:-1], target)
    return mean_loss(policy, predictions, value, out, batch, config)


def actor_critic_loss(out: AgentOut, adv, target, batch: Transition, config: Config):
    """Policy gradient, and the value's cross-entropy. `adv` and `target` are [T, B]."""
    log_prob = of_action(nn.log_softmax(out.logits[:-1]), batch.action[:-1])
    value = value_loss(out.q[:-1], target)
    return mean_loss(-adv * log_prob, 0.0, value, out, batch, config)


# ------------------------------------------------------------------------------------------- train
def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Adam, each entry of its step clipped."""
    return optax.chain(
        optax.scale_by_adam(), optax.clip(config.max_update), optax.scale(-config.lr)
    )


def baseline_rule(out: AgentOut, batch: Transition, meta: MetaState, config: Config):
    """Advantages and targets of the two baselines. Returns (adv, target, td, meta).

    Without a critic the policy gradient has the return up to the trajectory's end, normalised. Its
    mean is weighted as the returns are: what the policy has given up is not pushed down for ever.
    """
    value, trace_lambda = expected_value(out.q), config.trace_lambda  # [T + 1, B]
    if config.rule == "policy_gradient":
        value, trace_lambda = jnp.zeros_like(value), 1.0
    log_ratio = nn.log_softmax(out.logits) - nn.log_softmax(batch.logits)
    ratio = jnp.exp(of_action(log_ratio[:-1], batch.action[:-1]))
    discount = config.gamma * (1 - batch.done[:-1])
    steps = (batch.reward[:-1], discount, value, ratio)
    adv, target = compute_vtrace(*steps, trace_lambda)
    if config.rule == "policy_gradient":
        meta = meta._replace(adv=update_moments(meta.adv, adv, config.ema_decay))
        mean, std = mean_and_std(meta.adv)
        adv = (adv - jnp.minimum(ratio, 1) * mean) / std
    return adv, target, target - value[:-1], meta


def learn(state: RunnerState, batch: Transition, weights, network, optimizer, config: Config):
    """One update with a batch [L, B, ...]. Returns (state, metrics), equal on all devices."""
    unroll = jax.vmap(network.apply, (None, 0))
    out = unroll(state.params, batch.obs)  # [L, B, ...]
    if config.rule == "disco":
        target_out = unroll(state.target_params, batch.obs)
        hat, values, meta = discovered_rule(weights, out, target_out, batch, state.meta, config)
        target, td = values.target, values.td
        loss = lambda out: disco_loss(out, hat, target, batch, config)
    else:
        adv, target, td, meta = baseline_rule(out, batch, state.meta, config)
        loss = lambda out: actor_critic_loss(out, adv, target, batch, config)

    # Only the actions taken have losses: the gradient is spared the others.
    unroll_taken = jax.vmap(network.apply, (None, 0, 0))
    loss_of = lambda params: loss(unroll_taken(params, batch.obs, batch.action))
    grads, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["value/explained_variance"] = 1 - td.var() / target.var()
    grads, metrics = jax.lax.pmean((grads, metrics), "devices")
    updates, opt_state = optimizer.update(grads, state.opt_state)
    metrics["optim/grad_norm"] = optax.tree.norm(grads)
    decay = config.target_decay
    average = lambda old, new: decay * old + (1 - decay) * new
    state = state._replace(
        params=optax.apply_updates(state.params, updates),
        target_params=jax.tree.map(average, state.target_params, state.params),
        opt_state=opt_state,
        meta=meta,
    )
    return state, metrics


def make_train(config: Config, num_updates: int | None = None) -> tuple[Callable, Callable]:
    """Returns pmapped init(keys [D]) -> state and train(state) -> (state, metrics).

    A call of `train` runs `num_updates` updates (None: the whole training) of all seeds and
    consumes its argument. Metrics are float32 [D, num_updates, S], equal on all devices and NaN
    where an update had nothing to measure. Raises ConfigError for a wrong input.
    """
    config = resolve(config)
    env_reset, env_step, num_actions = make_env(config)
    network, optimizer = Agent(num_actions, config), make_optimizer(config)
    num_envs = config.num_envs // jax.device_count()  # N
    replay_size = config.replay_size // jax.device_count()  # C
    replay_batch = config.replay_batch // jax.device_count()  # B
    weights = load_weights(config.weights) if config.rule == "disco" else {}

    def init_seed(key):
        params_key, reset_key, key = jax.random.split(key, 3)
        obs, env_state = env_reset(jax.random.split(reset_key, num_envs))
        # The environments of the devices differ, the networks must not.
        params = network.init(jax.lax.all_gather(params_key, "devices")[0], obs)
        zeros, no = jnp.zeros(num_envs), jnp.zeros(num_envs, bool)
        logits = jnp.zeros((num_envs, num_actions))
        transition = Transition(obs, jnp.zeros(num_envs, jnp.int32), logits, zeros, no, no)
        row = lambda x: jnp.zeros((replay_size, config.num_steps, *x.shape[1:]), x.dtype)
        replay = jax.tree.map(row, transition)  # [C, L, ...]
        moments = Moments(jnp.zeros(()), jnp.zeros(()), jnp.ones(()))
        meta = MetaState(moments, moments, jnp.zeros(128), jnp.zeros(128))
        learner = (params, params, optimizer.init(params), meta, replay)
        return RunnerState(*learner, env_state, obs, no, zeros, zeros, jnp.int32(0), key)

    def rollout_step(state, _):
        key, action_key, step_key = jax.random.split(state.key, 3)
        logits = network.apply(state.params, state.obs).logits
        action = distrax.Categorical(logits).sample(seed=action_key)
        step_keys = jax.random.split(step_key, num_envs)
        obs, env_state, *outcome = env_step(step_keys, state.env_state, action)
        reward, terminated, truncated, _ = outcome
        done = terminated | truncated
        transition = Transition(state.obs, action, logits, reward, done, state.reset)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        state = state._replace(
            obs=obs,
            env_state=env_state,
            reset=done,
            episode_return=episode_return * ~done,
            episode_length=episode_length * ~done,
            key=key,
        )
        ended = (episode_return, episode_length, jnp.ones(num_envs))
        return state, (transition, [jnp.sum(x * done) for x in ended])

    def act(state):
        state, (rollout, ended) = jax.lax.scan(rollout_step, state, None, config.num_steps)
        rows = (state.update * num_envs + jnp.arange(num_envs)) % replay_size  # the oldest N
        write = lambda replay, x: replay.at[rows].set(x.swapaxes(0, 1))  # x [L, N, ...]
        replay = jax.tree.map(write, state.replay, rollout)
        state = state._replace(replay=replay, update=state.update + 1)
        return state, jax.lax.psum(jax.tree.map(jnp.sum, ended), "devices")

    def learn_from_replay(state):
        key, batch_key = jax.random.split(state.key)
        filled = jnp.minimum(state.update * num_envs, replay_size)
        rows = jax.random.randint(batch_key, (replay_batch,), 0, filled)
        batch = jax.tree.map(lambda x: x[rows].swapaxes(0, 1), state.replay)  # [L, B, ...]
        return learn(state._replace(key=key), batch, weights, network, optimizer, config)

    def wait(state):
        """While the replay holds too few trajectories: nothing measured, a step of length zero."""
        _, metrics = jax.eval_shape(learn_from_replay, state)
        metrics = {name: jnp.full(x.shape, jnp.nan, x.dtype) for name, x in metrics.items()}
        return state, metrics | {"optim/grad_norm": jnp.float32(0)}

    def update_seeds(state, _):
        state, (return_sum, length_sum, count) = jax.vmap(act)(state)  # [S, ...]
        # All seeds start to learn at once: outside of vmap, waiting costs nothing.
        ready = state.update[0] * num_envs >= replay_batch
        state, metrics = jax.lax.cond(ready, jax.vmap(learn_from_replay), jax.vmap(wait), state)
        metrics["episode/return"] = return_sum / count  # 0 / 0 = NaN where no episode ended
        metrics["episode/length"] = length_sum / count
        metrics["episode/count"] = count
        metrics["optim/lr"] = jnp.full_like(count, config.lr)
        return state, metrics

    def init(key):
        return jax.vmap(init_seed)(jax.random.split(jax.random.key_data(key), config.num_seeds))

    def train(state):
        return jax.lax.scan(update_seeds, state, None, num_updates or config.num_updates)

    train = jax.pmap(train, axis_name="devices", donate_argnums=0)
    return jax.pmap(init, axis_name="devices"), train


# ---------------------------------------------------------------------------------------- evaluate
def make_evaluate(config: Config) -> Callable:
    """Returns evaluate(params, key) -> returns [episodes], full episodes in fresh environments."""
    config = resolve(config)
    env_reset, env_step, num_actions = make_env(config)
    network = Agent(num_actions, config)

    def unfinished(carry):
        _, done = carry
        return ~done.all()

    def eval_step(carry):
        state, done = carry
        key, action_key, step_key = jax.random.split(state.key, 3)
        policy = distrax.Categorical(network.apply(state.params, state.obs).logits)
        action = policy.mode() if config.eval_greedy else policy.sample(seed=action_key)
        step_keys = jax.random.split(step_key, config.eval_episodes)
        obs, env_state, *outcome = env_step(step_keys, state.env_state, action)
        reward, terminated, truncated, _ = outcome
        episode_return = state.episode_return + reward * ~done
        state = state._replace(obs=obs, env_state=env_state, episode_return=episode_return, key=key)
        return state, done | terminated | truncated

    def evaluate(params, key):
        key, reset_key = jax.random.split(jax.random.key_data(key))
        obs, env_state = env_reset(jax.random.split(reset_key, config.eval_episodes))
        zeros = jnp.zeros(config.eval_episodes)
        state = RunnerState(**dict.fromkeys(RunnerState._fields))  # acting needs the policy alone
        state = state._replace(params=params, env_state=env_state, obs=obs, key=key)
        carry = (state._replace(episode_return=zeros), zeros > 0)
        state, _ = jax.lax.while_loop(unfinished, eval_step, carry)
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
