"""Reinforcement learning with Disco103, an update rule that was itself discovered by learning.

Oh et al. 2025, Nature, doi 10.1038/s41586-025-09761-x. In place of a hand-written policy loss, a
frozen meta-network emits targets for the policy and for two predictions, y and z, whose meaning it
has learned too; q predicts returns. One update:

    act          N environments play L steps; the replay keeps the last C trajectories
    replay       draw a batch of B trajectories
    targets      returns = Retrace(q of the target network)
                 policy', y', z' = meta_network(outputs, rewards, advantages, lifetime state)
    divergences  KL(policy' || policy) + KL(y' || y) + KL(z' || z) + KL(next policy || aux_pi)
                 + 0.2 cross_entropy(returns, q), reduced by one Adam step

Values and targets match the original's to 1e-9 in float64 (tests/test_disco.py). As there, a time
limit counts as a termination, and the first step after a reset has no loss. Deviation: num_envs,
replay_size and replay_batch are totals over devices. `--rule` offers two baselines.

Shapes: L steps, T = L - 1 with a successor, A actions, D devices, S seeds; N, B, C are per device.

    python disco.py

Seeds 0-2 reach a training return of 0.9 after 28k to 36k steps and end at 1.00; chance: -0.75.
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro", "wandb"]
# ///

import dataclasses
import difflib
import hashlib
import io
import json
import os
import re
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

SCRIPT = "disco"
MAX_VALUE, NUM_BINS = 300, 601  # squashed returns from -300 to 300, a bin for each integer
URL = "https://raw.githubusercontent.com/google-deepmind/disco_rl/main/disco_rl/update_rules/"
URL += "weights/disco_103.npz"
SHA256 = "dac840a15b81e8805326363458c33979626172618f620d9e6e170315388530aa"
pmean = partial(jax.lax.pmean, axis_name="devices")


# ----------------------------------------- config
class ConfigError(Exception):
    """Invalid input."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Reinforcement learning with the discovered update rule Disco103."""

    # Environment
    env_id: str = "Catch-8x8"  # Catch-<rows>x<columns> or a gymnax environment
    env_params: str = ""  # JSON object of environment parameters
    total_timesteps: float = 58e3  # environment steps per seed (at most)
    num_envs: int = 2  # parallel environments per seed, over all devices
    num_steps: int = 29  # rollout length
    # Algorithm
    rule: Literal["disco", "actor_critic", "policy_gradient"] = "disco"  # Disco103 or a baseline
    weights: str = ""  # npz file of the meta-network, or random; empty: Disco103, downloaded once
    replay_size: int = 1024  # trajectories in the replay, over all devices
    replay_batch: int = 64  # trajectories per update, over all devices
    hidden_size: int = 512  # width of the first layer
    feature_size: int = 512  # width of the second layer, which all outputs read
    model_size: int = 128  # width of the LSTM that models the effect of an action
    branch_size: int = 128  # width of the layers between LSTM and outputs
    lr: float | None = None  # Adam learning rate; None: 1e-2 (baselines: 5e-4, 1e-3)
    max_update: float = 1.0  # clip entries of Adam's step to this, before lr
    gamma: float = 0.997  # discount factor
    trace_lambda: float = 0.95  # trace decay of Retrace and of actor_critic's V-trace
    ema_decay: float = 0.99  # decay of the moments that normalize advantages
    target_decay: float = 0.9  # decay of the target network
    ent_coef: float | None = None  # entropy bonus coefficient; None: 0 (baselines: 0.2, 0.01)
    vf_coef: float | None = None  # value loss coefficient; None: 0.2 (baselines: 0.5, 0)
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
        fractions = ("gamma", "trace_lambda", "ema_decay", "target_decay")
        for name, value in vars(self).items():
            low = 0 if name in ("seed", "ent_coef", "vf_coef", *fractions) else 1e-12
            high = 0.9999 if name == "ema_decay" else 1 if name in fractions else 1e18
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


def resolve(config: Config) -> Config:
    """Fill in the rule's settings, mostly those of the original code."""
    defaults = {
        "disco": {"lr": 1e-2, "ent_coef": 0.0, "vf_coef": 0.2},
        "actor_critic": {"lr": 5e-4, "ent_coef": 0.2, "vf_coef": 0.5},
        "policy_gradient": {"lr": 1e-3, "ent_coef": 0.01, "vf_coef": 0.0},
    }
    given = {name: value for name, value in vars(config).items() if value is not None}
    return Config(**defaults[config.rule] | given)


# ------------------------------------ environment
def make_env(config: Config) -> tuple:
    """Edit here to bring your own environment; episodes must end. Raises ConfigError.

    Returns reset(key) -> (obs, env_state), step(key, env_state, action) -> (obs, env_state, reward,
    terminated, truncated, next_obs) and the number of actions. `step` resets after an episode:
    `obs` then starts the next one, but `next_obs` is the true final observation.
    """
    known = ["Catch-8x8", *gymnax.registered_envs]
    catch = re.fullmatch(r"Catch-([2-9]|[1-9]\d+)x([2-9]|[1-9]\d+)", config.env_id)
    if not catch and config.env_id not in known:
        nearest = difflib.get_close_matches(config.env_id, known, cutoff=0)
        raise ConfigError(f"unknown env_id {config.env_id}: did you mean {', '.join(nearest)}?")
    sizes = {"rows": int(catch[1]), "columns": int(catch[2])} if catch else {}
    env, params = gymnax.make("Catch-bsuite" if catch else config.env_id, **sizes)
    try:
        params = params.replace(**json.loads(config.env_params or "{}"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_params: {error}; known: {', '.join(vars(params))}") from None
    space = env.observation_space(params)
    num_actions = getattr(env.action_space(params), "n", None)
    if num_actions is None:
        raise ConfigError(f"{config.env_id} has continuous actions: use ppo_continuous.py")

    def encode(obs):
        if not space.shape:
            return jax.nn.one_hot(obs, space.n)
        return obs.astype(bool) if config.env_id.endswith("MinAtar") else obs  # saves memory

    def reset(key):
        obs, env_state = env.reset(key, params)
        return encode(obs), env_state

    def step(key, env_state, action):
        outcome = env.step(key, env_state, action, params)
        obs, env_state, reward, terminated, truncated, info = outcome
        next_obs = encode(info["final_observation"])
        return encode(obs), env_state, jnp.float32(reward), terminated, truncated, next_obs

    return reset, step, num_actions


# ---------------------------------------- network
class AgentOutput(NamedTuple):
    """All are logits. The baselines fill only `logits`, or `logits` and `value`."""

    logits: jax.Array  # [..., A] policy
    y: jax.Array | None = None  # [..., 600] of meta-learned meaning
    z: jax.Array | None = None  # [..., A, 600] the same, for each action
    aux_pi: jax.Array | None = None  # [..., A, A] policy one step after each action
    q: jax.Array | None = None  # [..., A, 601] categorical return after each action
    value: jax.Array | None = None  # [..., 601] categorical return


def dense(features: int, name: str, stddev: float | None = None) -> nn.Dense:
    """Weights from a normal distribution truncated at 2 stddev; None: 1 / sqrt(inputs)."""
    truncated = nn.initializers.truncated_normal
    init = lambda key, shape, dtype: truncated(stddev or shape[0] ** -0.5)(key, shape, dtype)
    return nn.Dense(features, kernel_init=init, name=name)


def lstm_cell(linear, x, hidden, cell):
    """[..., I], [..., H], [..., H] -> (hidden, cell). The forget gate gets an extra bias of one."""
    gates = linear(jnp.concatenate([x, hidden], axis=-1))  # [..., 4 H]
    write, candidate, forget, output = jnp.split(gates, 4, axis=-1)
    cell = nn.sigmoid(forget + 1) * cell + nn.sigmoid(write) * nn.tanh(candidate)
    return nn.sigmoid(output) * nn.tanh(cell), cell


class Agent(nn.Module):
    """An MLP, then one step of an LSTM as a model of each action's effect."""

    num_actions: int
    config: Config

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> AgentOutput:
        """One observation [...] -> AgentOutput. With an action: z, aux_pi and q for it alone."""
        config = self.config
        x = nn.relu(dense(config.hidden_size, "torso_0")(obs.ravel().astype(float)))
        x = dense(config.feature_size, "torso_1")(x)
        logits = dense(self.num_actions, "logits", 1e-2)(x)
        if config.rule == "policy_gradient":
            return AgentOutput(logits)
        if config.rule == "actor_critic":
            return AgentOutput(logits, value=dense(NUM_BINS, "value", 1e-2)(x))
        y = dense(600, "y", 1e-2)(x)
        cell = dense(config.model_size, "cell")(x)  # [H]
        actions = jnp.eye(self.num_actions)  # one-hot, [A, A]
        actions = actions if action is None else actions[action]
        hidden = jnp.broadcast_to(nn.tanh(cell), (*actions.shape[:-1], config.model_size))  # [A, H]
        hidden, _ = lstm_cell(dense(4 * config.model_size, "gates"), actions, hidden, cell)
        heads = {}
        for name, size in ("z", 600), ("aux_pi", self.num_actions), ("q", NUM_BINS):
            x = nn.relu(dense(config.branch_size, f"{name}_0")(hidden))
            heads[name] = dense(size, f"{name}_1")(x)
        return AgentOutput(logits, y, **heads)


# ----------------------------------- meta-network
class Linear(NamedTuple):
    w: jax.Array  # [I, O]
    b: jax.Array  # [O]

    def __call__(self, x):
        return x @ self.w + self.b


@dataclasses.dataclass(frozen=True)
class Released:
    """Name of a layer in the released file, and the shape of its weights there."""

    name: str
    shape: tuple[int, ...]  # [I, O], or [1, I, O] for a convolution across actions
    stddev: float | None = None  # of random weights; None: 1 / sqrt(I)


class Embeddings(NamedTuple):
    """Layers that embed LSTM inputs, or their places in the file."""

    y_hidden: Linear = Released("mlp/~/linear_0", (600, 16))
    y_output: Linear = Released("mlp/~/linear_1", (16, 1))
    z_hidden: Linear = Released("mlp_1/~/linear_0", (600, 16))
    z_output: Linear = Released("mlp_1/~/linear_1", (16, 1))
    action_hidden: Linear = Released("sequential/conv1_d", (1, 2 * 9, 16))
    action_output: Linear = Released("sequential/conv1_d_1", (1, 2 * 16, 2))

    def embed_y(self, logits):
        return self.y_output(nn.relu(self.y_hidden(nn.softmax(logits)))).squeeze(-1)

    def embed_z(self, logits):
        return self.z_output(nn.relu(self.z_hidden(nn.softmax(logits)))).squeeze(-1)


def within(module: str) -> Embeddings:
    """Embeddings found in a module."""
    return jax.tree.map(lambda x: dataclasses.replace(x, name=f"{module}/{x.name}"), Embeddings())


class MetaNetwork(NamedTuple):
    """Weights, or their places in the file. A lifetime LSTM modulates a backward LSTM."""

    embeddings: Embeddings = within("lstm")
    lifetime_embeddings: Embeddings = within("lstm/~/meta_lstm/~unroll")
    backward_lstm: Linear = Released("lstm/lstm/linear", (27 + 256, 4 * 256))
    modulation: Linear = Released("lstm/linear", (128, 256), stddev=1.0)
    summary: Linear = Released("lstm/linear_1", (256, 1), stddev=0.3)
    y: Linear = Released("lstm/linear_2", (256, 600), stddev=0.3)
    z: Linear = Released("lstm/linear_3", (256, 600), stddev=0.3)
    policy_hidden: Linear = Released("lstm/sequential_1/conv1_d", (1, 2 * (256 + 2), 16))
    policy: Linear = Released("lstm/linear_4", (16, 1), stddev=0.3)
    lifetime_input: Linear = Released("lstm/~/meta_lstm/~unroll/mlp_2/~/linear_0", (27 + 2, 16))
    lifetime_lstm: Linear = Released("lstm/~/meta_lstm/~unroll/lstm/linear", (16 + 128, 4 * 128))


def random_weights(seed: int) -> MetaNetwork:
    """A meta-network before meta-training, with truncated normal weights."""
    rng = np.random.default_rng(seed)

    def init(layer):
        x = rng.standard_normal(layer.shape[-2:])
        while (far := abs(x) > 2).any():
            x[far] = rng.standard_normal(far.sum())
        stddev = layer.stddev or len(x) ** -0.5
        return Linear(np.float32(stddev * x), np.zeros(layer.shape[-1], np.float32))

    return jax.tree.map(init, MetaNetwork())


def load_weights(source: str) -> MetaNetwork:
    """The meta-network: an npz file, `random` or, if empty, Disco103. Raises ConfigError."""
    if source == "random":
        return random_weights(0)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(source or cache / "disco_rl" / "disco_103.npz")
    download = not source and not path.exists()

    def load(layer):
        w, b = arrays[f"{layer.name}/w"], arrays[f"{layer.name}/b"]
        if w.shape != layer.shape or b.shape != layer.shape[-1:]:
            raise ValueError(f"{layer.name} must have shape {layer.shape}")
        return Linear(w.reshape(w.shape[-2:]), b)

    try:
        content = urllib.request.urlopen(URL, timeout=30).read() if download else path.read_bytes()
        if not source and hashlib.sha256(content).hexdigest() != SHA256:
            raise ValueError("its sha256 is not that of Disco103")
        arrays = dict(np.load(io.BytesIO(content)))
        meta_net = jax.tree.map(load, MetaNetwork())
    except Exception as error:
        advice = "" if source else f": try\ncurl --create-dirs -o {path} {URL}"
        raise ConfigError(f"cannot read {URL if download else path} ({error}){advice}") from None
    if download:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
    return meta_net


# ---------------------------------------- rollout
class Transition(NamedTuple):
    """One step of one environment. A trajectory is L of them."""

    obs: jax.Array
    action: jax.Array
    logits: jax.Array  # [A] of the behavior policy
    reward: jax.Array
    done: jax.Array  # the step ended the episode
    reset: jax.Array  # the previous step ended an episode
    episode: jax.Array  # [2] return and length so far


class RunnerState(NamedTuple):
    """Rollout carry of one environment."""

    key: jax.Array  # [2] raw, so a checkpoint can hold it
    obs: jax.Array
    env_state: Any
    done: jax.Array = np.bool(False)  # of the previous step
    episode: jax.Array = np.zeros(2, np.float32)  # of the previous step


class Moments(NamedTuple):
    """Moving averages over updates and devices."""

    raw: jax.Array = np.zeros(2)  # of x and of x ** 2
    decay_product: jax.Array = np.ones(())  # weight of the initial zeros

    def update(self, x, decay) -> "Moments":
        new = pmean(jnp.stack([x.mean(), (x**2).mean()]))
        return Moments(decay * self.raw + (1 - decay) * new, decay * self.decay_product)

    def mean_and_std(self):
        mean, square = self.raw / (1 - self.decay_product)
        return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0) + 1e-12) + 1e-6


class MetaState(NamedTuple):
    """Memory of the update rule over the agent's lifetime."""

    advantage: Moments = Moments()
    hidden: jax.Array = np.zeros(128)  # of the lifetime LSTM
    cell: jax.Array = np.zeros(128)


class TrainState(NamedTuple):
    """Training carry of one seed; outside make_train, with leading axes [D, S]."""

    key: jax.Array  # [2]
    params: Any
    target_params: Any  # moving average
    opt_state: Any
    replay: Transition  # [C, L] ring buffer
    runner: RunnerState  # [N]
    best: Any  # parameters that scored best_return
    meta: MetaState = MetaState()
    update: jax.Array = np.int32(0)
    eval_return: jax.Array = np.float32(np.nan)
    best_return: jax.Array = np.float32(-np.inf)
    absolute_return: jax.Array = np.float32(0)  # of `best`, on new episodes


def episode_stats(rollout: Transition) -> dict[str, jax.Array]:
    """Means over the episodes that ended in a rollout; NaN if none did."""
    count = jax.lax.psum(rollout.done.sum(dtype=jnp.float32), "devices")
    mean = jax.lax.psum((rollout.episode * rollout.done[..., None]).sum((0, 1)), "devices") / count
    return {"episode/return": mean[0], "episode/length": mean[1], "episode/count": count}


# -------------------------------------- advantage
def unsquash(x):
    """Inverse value squashing (Pohlen et al. 2018, arXiv 1805.11593, proposition A.2)."""
    eps = 1e-3
    root = jnp.sqrt(1 + 4 * eps * (eps + 1 + jnp.abs(x))) / (2 * eps) - 1 / (2 * eps)
    return jnp.sign(x) * (root**2 - 1)


def expected_return(logits):
    """Categorical return [..., 601] -> its unsquashed mean [...]."""
    return unsquash(nn.softmax(logits) @ jnp.linspace(-MAX_VALUE, MAX_VALUE, NUM_BINS))


def select_action(x, action):
    """x [T, B, A, ...], action [T, B] -> [T, B, ...]."""
    index = action.reshape(action.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=2).squeeze(2)


def clipped_ratio(logits, batch: Transition):
    """Importance ratio of the actions taken, clipped at one, [T, B]."""
    log_ratio = nn.log_softmax(logits) - nn.log_softmax(batch.logits)
    return jnp.exp(jnp.minimum(select_action(log_ratio[:-1], batch.action[:-1]), 0.0))


def retrace(reward, discount, value, q, trace):
    """Retrace (Munos et al. 2016, arXiv 1606.02647). Returns the target of q, [T, B].

    All arrays are [T, B] except value [T + 1, B]. trace is lambda * min(1, importance ratio).
    """

    def step(correction, x):
        reward, discount, next_value, q, trace = x
        target = reward + discount * (next_value + correction)
        return trace * (target - q), target

    steps = (reward, discount, value[1:], q, trace)
    _, target = jax.lax.scan(step, jnp.zeros_like(reward[0]), steps, reverse=True)
    return target


def vtrace_advantage(reward, discount, value, ratio, trace_lambda):
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561, eq. 1). Returns (advantage, target), [T, B].

    It is Retrace with the value in place of q and errors weighted by the clipped ratio.
    """
    returns = retrace(reward, discount, value, value[:-1], trace_lambda * ratio)
    advantage = ratio * (returns - value[:-1])
    return advantage, value[:-1] + advantage


class Values(NamedTuple):
    """Value estimates and advantages under the online policy."""

    value: jax.Array  # [T + 1, B] of the online network
    target_q: jax.Array  # [T + 1, B, A] of the target network
    returns: jax.Array  # [T, B] Retrace target of q
    td: jax.Array  # [T, B] returns minus the online q
    advantage: jax.Array  # [T, B] of the actions taken
    action_advantage: jax.Array  # [T + 1, B, A] of all actions


def compute_values(online: AgentOutput, target: AgentOutput, batch: Transition, config) -> Values:
    """Inputs are [T + 1, B, ...]."""
    policy = nn.softmax(online.logits)
    q = expected_return(online.q)  # [T + 1, B, A]
    target_q = expected_return(target.q)
    target_value = (policy * target_q).sum(axis=-1)
    trace = config.trace_lambda * clipped_ratio(online.logits, batch)
    discount = config.gamma * (1 - batch.done[:-1])
    taken_q = select_action(target_q[:-1], batch.action[:-1])
    returns = retrace(batch.reward[:-1], discount, target_value, taken_q, trace)
    return Values(
        value=(policy * q).sum(axis=-1),
        target_q=target_q,
        returns=returns,
        td=returns - select_action(q[:-1], batch.action[:-1]),
        advantage=returns - target_value[:-1],
        action_advantage=target_q - target_value[..., None],
    )


# ------------------------------------------- rule
def mix_actions(linear: Linear, x):
    """[..., A, I] -> [..., A, O], equivariant: reads each action and the mean over the actions."""
    mean = jnp.broadcast_to(x.mean(axis=-2, keepdims=True), x.shape)
    return nn.relu(linear(jnp.concatenate([x, mean], axis=-1)))


def make_features(embeddings: Embeddings, online, target, batch, values: Values, moments: Moments):
    """Inputs of the meta-network: step_features [T, B, 27], embedded actions [T, B, A, 2].

    Only the agent's y and z carry meta-gradients. The released weights fix the order of features.
    """
    action = batch.action[:-1]
    policy = jax.lax.stop_gradient(nn.softmax(online.logits))  # [T + 1, B, A]
    target_policy = jax.lax.stop_gradient(nn.softmax(target.logits))
    behavior_policy = nn.softmax(batch.logits)
    mean, std = moments.mean_and_std()
    y, target_y = embeddings.embed_y(online.y), embeddings.embed_y(target.y)  # [T + 1, B]
    z, target_z = embeddings.embed_z(online.z), embeddings.embed_z(target.z)  # [T + 1, B, A]
    signed_log = lambda x: jnp.sign(x) * jnp.log1p(jnp.abs(x))
    taken = lambda x: select_action(x[:-1], action)
    pair = lambda x: jnp.stack([x[:-1], x[1:]], axis=-1)  # this step and the next, [T, B, 2]
    action_features = {
        "policy": policy[:-1],
        "behavior_policy": behavior_policy[:-1],
        "target_policy": target_policy[:-1],
        "z": z[:-1],
        "target_z": target_z[:-1],
        "target_q": signed_log(values.target_q)[:-1],
        "advantage": signed_log(values.action_advantage)[:-1],
        "normalized_advantage": (values.action_advantage[:-1] - mean) / std,
        "is_taken": nn.one_hot(action, policy.shape[-1], dtype=policy.dtype),
    }
    actions = jnp.stack(list(action_features.values()), axis=-1)  # [T, B, A, 9]
    actions = mix_actions(embeddings.action_hidden, actions)
    actions = mix_actions(embeddings.action_output, actions)  # [T, B, A, 2]
    step_features = {
        "policy": taken(policy),
        "behavior_policy": taken(behavior_policy),
        "reward": signed_log(batch.reward[:-1]),
        "continues": 1 - batch.done[:-1],
        "value": pair(signed_log(values.value)),
        "advantage": signed_log(values.advantage),
        "normalized_advantage": (values.advantage - mean) / std,
        "target_policy": taken(target_policy),
        "y": pair(y),
        "target_y": pair(target_y),
        "z": taken(z),
        "mean_z": pair((policy * z).sum(axis=-1)),
        "max_z": pair(z.max(axis=-1)),
        "target_z": taken(target_z),
        "mean_target_z": pair((policy * target_z).sum(axis=-1)),
        "max_target_z": pair(target_z.max(axis=-1)),
        "mean_action": actions.mean(axis=2),  # [T, B, 2]
        "taken_action": select_action(actions, action),  # [T, B, 2]
    }
    return jnp.dstack(list(step_features.values())), actions


class MetaTargets(NamedTuple):
    """Targets of the agent's outputs, as logits."""

    logits: jax.Array  # [T, B, A]
    y: jax.Array  # [T, B, 600]
    z: jax.Array  # [T, B, 600] of the actions taken


def backward_lstm(linear: Linear, step_features, done):
    """An LSTM from the last step to the first, reset at episode ends. Returns [T, B, 256]."""

    def step(carry, x):
        features, done = x
        hidden, cell = carry * (1 - done)[:, None]  # [B, 256]
        hidden, cell = lstm_cell(linear, features, hidden, cell)
        return jnp.stack([hidden, cell]), hidden

    start = jnp.zeros((2, done.shape[1], 256), step_features.dtype)
    _, hidden = jax.lax.scan(step, start, (step_features, done), reverse=True)
    return hidden


def embed_update(meta_net: MetaNetwork, step_features, hidden, y):
    """Embedding of an update: the mean over its batch and the devices, [16]."""
    y = meta_net.lifetime_embeddings.embed_y(y)[..., None]
    x = jnp.concatenate([step_features, meta_net.summary(hidden), y], axis=-1)  # [T, B, 29]
    return pmean(meta_net.lifetime_input(x).mean(axis=(0, 1)))


def disco_rule(meta_net: MetaNetwork, online, target, batch: Transition, meta: MetaState, config):
    """The discovered rule, on arrays [T + 1, B, ...]. Returns (MetaTargets, Values, MetaState)."""
    values = jax.lax.stop_gradient(compute_values(online, target, batch, config))
    moments = meta.advantage.update(values.advantage, config.ema_decay)
    inputs = (online, target, batch, values, moments)
    step_features, actions = make_features(meta_net.embeddings, *inputs)
    hidden = backward_lstm(meta_net.backward_lstm, step_features, batch.done[:-1])
    hidden *= meta_net.modulation(meta.hidden)
    tiled = jnp.broadcast_to(hidden[:, :, None], (*actions.shape[:3], 256))
    actions = mix_actions(meta_net.policy_hidden, jnp.concatenate([tiled, actions], axis=-1))
    logits = meta_net.policy(actions).squeeze(-1)
    targets = MetaTargets(logits, meta_net.y(hidden), meta_net.z(hidden))
    # The lifetime state takes effect at the next update.
    step_features, _ = make_features(meta_net.lifetime_embeddings, *inputs)
    x = embed_update(meta_net, step_features, hidden, targets.y)
    hidden, cell = lstm_cell(meta_net.lifetime_lstm, x, meta.hidden, meta.cell)
    return targets, values, MetaState(moments, hidden, cell)


def baseline_rule(online: AgentOutput, batch: Transition, meta: MetaState, config):
    """V-trace, or normalized returns. Returns (advantage, value target, MetaState)."""
    ratio = clipped_ratio(online.logits, batch)
    steps = (batch.reward[:-1], config.gamma * (1 - batch.done[:-1]))
    if config.rule == "actor_critic":
        value = expected_return(online.value)  # [T + 1, B]
        return *vtrace_advantage(*steps, value, ratio, config.trace_lambda), meta
    returns, target = vtrace_advantage(*steps, jnp.zeros(batch.reward.shape), ratio, 1.0)
    meta = meta._replace(advantage=meta.advantage.update(returns, config.ema_decay))
    mean, std = meta.advantage.mean_and_std()
    # `returns` are weighted by the ratio, so the mean must be too.
    return (returns - ratio * mean) / std, target, meta


# ------------------------------------------- loss
def kl_divergence(p_logits, q_logits):
    log_p, log_q = nn.log_softmax(p_logits), nn.log_softmax(q_logits)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def value_loss(logits, target):
    """Cross-entropy with the target [...], squashed and two-hot over the nearest bins."""
    value = jnp.sign(target) * (jnp.sqrt(jnp.abs(target) + 1) - 1) + 1e-3 * target
    value = jnp.clip(value, -MAX_VALUE, MAX_VALUE)
    position = value + MAX_VALUE  # one bin per integer
    lower, upper = jnp.floor(position), jnp.ceil(position)
    weight = (upper - position) / (upper - lower + 1e-5)  # of the lower bin
    log_p = nn.log_softmax(logits)
    log_p_of = lambda bins: jnp.take_along_axis(log_p, bins.astype(int)[..., None], -1).squeeze(-1)
    return -weight * log_p_of(lower) - (1 - weight) * log_p_of(upper)


def mean_losses(losses: dict, output: AgentOutput, batch: Transition, config: Config):
    """(loss, metrics) of losses [T, B], averaged without the first step after each reset."""
    losses["policy/entropy"] = distrax.Categorical(output.logits[:-1]).entropy()
    mask = ~batch.reset[:-1]
    metrics = {name: (x * mask).sum() / (mask.sum() + 1e-8) for name, x in losses.items()}
    coefs = {"loss/value": config.vf_coef, "policy/entropy": -config.ent_coef}  # others: 1
    loss = sum(coefs.get(name, 1.0) * x for name, x in metrics.items())
    return loss, {**metrics, "loss/total": loss}


def disco_loss(output: AgentOutput, targets: MetaTargets, returns, batch: Transition, config):
    """Divergences from the targets. `output` [T + 1, B, ...] is for the actions taken."""
    next_logits = jax.lax.stop_gradient(output.logits[1:])
    losses = {
        "loss/policy": kl_divergence(targets.logits, output.logits[:-1]),
        "loss/y": kl_divergence(targets.y, output.y[:-1]),
        "loss/z": kl_divergence(targets.z, output.z[:-1]),
        "loss/aux_policy": kl_divergence(next_logits, output.aux_pi[:-1]) * (1 - batch.done[:-1]),
        "loss/value": value_loss(output.q[:-1], returns),
    }
    return mean_losses(losses, output, batch, config)


def baseline_loss(output: AgentOutput, advantage, value_target, batch: Transition, config):
    """Policy gradient, with a value loss if there is a critic."""
    log_prob = select_action(nn.log_softmax(output.logits[:-1]), batch.action[:-1])
    losses = {"loss/policy": -advantage * log_prob}
    if config.rule == "actor_critic":
        losses["loss/value"] = value_loss(output.value[:-1], value_target)
    return mean_losses(losses, output, batch, config)


# ------------------------------------------ train
def make_optimizer(config: Config) -> optax.GradientTransformation:
    clip = optax.clip(config.max_update)
    return optax.chain(optax.scale_by_adam(), clip, optax.scale(-config.lr))


def learn(meta_net: MetaNetwork, state: Any, batch: Transition, network, optimizer, config):
    """One update from a batch [L, B, ...], differentiable with respect to `meta_net`.

    Returns state with new params, target_params, opt_state and meta; targets; metrics.
    """
    unroll = jax.vmap(jax.vmap(network.apply, (None, 0, 0)), (None, 0, 0))
    online = unroll(state.params, batch.obs, None)
    if config.rule == "disco":
        target = unroll(state.target_params, batch.obs, None)
        targets, values, meta = disco_rule(meta_net, online, target, batch, state.meta, config)
        td, value_target = values.td, values.returns
        loss = lambda output: disco_loss(output, targets, value_target, batch, config)
    else:
        targets = None
        td, value_target, meta = baseline_rule(online, batch, state.meta, config)  # td = advantage
        loss = lambda output: baseline_loss(output, td, value_target, batch, config)

    # Only the outputs of the actions taken: an update takes 30% less time.
    loss_of = lambda params: loss(unroll(params, batch.obs, batch.action))
    grads, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    if config.rule != "policy_gradient":
        metrics["value/explained_variance"] = 1 - td.var() / value_target.var()
    grads, metrics = pmean((grads, metrics))
    updates, opt_state = optimizer.update(grads, state.opt_state)
    metrics["optim/grad_norm"] = optax.tree.norm(grads)
    step_size = 1 - config.target_decay  # toward pre-update params
    state = state._replace(
        params=optax.apply_updates(state.params, updates),
        target_params=optax.incremental_update(state.params, state.target_params, step_size),
        opt_state=opt_state,
        meta=meta,
    )
    return state, targets, metrics


def start_episode(env_reset, key) -> RunnerState:
    key, reset_key = jax.random.split(key)
    return RunnerState(key, *env_reset(reset_key))


def step(network: Agent, env_step, params, runner: RunnerState, greedy=False):
    """One step of one environment."""
    key, action_key, step_key = jax.random.split(runner.key, 3)
    logits = network.apply(params, runner.obs).logits
    policy = distrax.Categorical(logits)
    action = policy.mode() if greedy else policy.sample(seed=action_key)
    outcome = env_step(step_key, runner.env_state, action)
    obs, env_state, reward, terminated, truncated, _ = outcome
    transition = Transition(
        obs=runner.obs,
        action=action,
        logits=logits,
        reward=reward,
        done=terminated | truncated,
        reset=runner.done,
        episode=runner.episode * ~runner.done + jnp.stack([reward, 1.0]),
    )
    return RunnerState(key, obs, env_state, transition.done, transition.episode), transition


def collect(network: Agent, env_step, num_steps: int, params, runner: RunnerState):
    """Returns RunnerState, trajectory [L]."""
    play = lambda runner, _: step(network, env_step, params, runner)
    return jax.lax.scan(play, runner, None, num_steps)


def make_train(config: Config) -> tuple:
    """Returns init, train and (for sweeps: docs/runs.md) init_seed, train_seed. Raises ConfigError.

    init(keys [D]) -> state and train(state) -> (state, metrics) are pmapped. `train` runs
    `updates_per_eval` updates of each seed, then evaluates. Metrics [D, updates, S] are NaN
    where unmeasured.
    """
    config = resolve(config)
    num_devices = jax.device_count()
    sizes = (config.num_envs, config.replay_size, config.replay_batch)
    num_envs, replay_size, replay_batch = (size // num_devices for size in sizes)  # N, C, B
    if any(size % num_devices for size in sizes):
        names = "num_envs, replay_size, replay_batch"
        raise ConfigError(f"{names} = {sizes}: not divisible by {num_devices} devices")
    trajectories = min(config.replay_size, config.num_updates * config.num_envs)
    most = max(config.num_envs, config.replay_batch)
    if config.num_steps < 2 or trajectories < most:
        least = most * max(config.num_steps, 2)
        least += -least % (config.num_evals * config.batch_size)
        raise ConfigError(f"need num_steps >= 2, replay_size >= {most}, total_timesteps >= {least}")
    env_reset, env_step, num_actions = make_env(config)
    network = Agent(num_actions, config)
    meta_net = load_weights(config.weights) if config.rule == "disco" else None
    optimizer = make_optimizer(config)
    start = partial(start_episode, env_reset)
    act = jax.vmap(partial(collect, network, env_step, config.num_steps), (None, 0))

    def episode_return(params, key):
        unfinished = lambda runner: ~runner.done
        play = lambda runner: step(network, env_step, params, runner, config.eval_greedy)[0]
        return jax.lax.while_loop(unfinished, play, start(key)).episode[0]

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

    def update_step(state, _):
        runner, rollout = act(state.params, state.runner)  # [N, L]
        oldest = (state.update * num_envs + jnp.arange(num_envs)) % replay_size
        replay = jax.tree.map(lambda x, new: x.at[oldest].set(new), state.replay, rollout)
        # With --init-from, the target network starts from the same parameters.
        target_params = optax.tree.where(state.update == 0, state.params, state.target_params)
        state = state._replace(target_params=target_params, replay=replay, runner=runner)
        key, replay_key = jax.random.split(state.key)
        state = state._replace(key=key, update=state.update + 1)
        filled = jnp.minimum(state.update * num_envs, replay_size)
        rows = jax.random.randint(replay_key, (replay_batch,), 0, filled)
        batch = jax.tree.map(lambda x: x[rows].swapaxes(0, 1), replay)  # [L, B, ...]
        learned, _, metrics = learn(meta_net, state, batch, network, optimizer, config)
        # No learning before the replay holds a batch; main rejects a NaN grad_norm.
        ready = filled >= replay_batch
        unmeasured = dict.fromkeys(metrics, jnp.nan) | {"optim/grad_norm": 0.0}
        metrics = optax.tree.where(ready, metrics, unmeasured)
        metrics |= {"optim/lr": jnp.float32(config.lr), **episode_stats(rollout)}
        return optax.tree.where(ready, learned, state), metrics

    def init_seed(key):
        params_key, runner_key, key = jax.random.split(key, 3)
        runner = jax.vmap(start)(jax.random.split(runner_key, num_envs))
        # Environments differ by device; the network must not.
        params = network.init(jax.lax.all_gather(params_key, "devices")[0], runner.obs[0])
        _, rollout = jax.eval_shape(act, params, runner)  # [N, L]
        empty = lambda x: jnp.zeros((replay_size, *x.shape[1:]), x.dtype)
        return TrainState(
            key=key,
            params=params,
            target_params=params,
            opt_state=optimizer.init(params),
            replay=jax.tree.map(empty, rollout),
            runner=runner,
            best=params,
        )

    def train_seed(state):
        state, metrics = jax.lax.scan(update_step, state, None, config.updates_per_eval)
        # At the end, ten more rounds: the absolute metric (Gorsane et al. 2022, arXiv 2209.10485).
        rounds = jnp.where(state.update < config.num_updates, 1, 11)
        state = jax.lax.fori_loop(0, rounds, evaluate, state)
        eval_return = jnp.full(config.updates_per_eval, jnp.nan).at[-1].set(state.eval_return)
        return state, {**metrics, "eval/return": eval_return}

    def init(key):
        return jax.vmap(init_seed)(jax.random.split(jax.random.key_data(key), config.num_seeds))

    train = jax.pmap(jax.vmap(train_seed, out_axes=(0, 1)), "devices", donate_argnums=0)
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
