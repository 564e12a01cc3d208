"""Discovering an update rule: the smallest faithful form of the meta-training behind Disco103.

Oh et al. 2025, Nature, doi 10.1038/s41586-025-09761-x. A population of agents learns with the
meta-network's targets; the meta-network follows the gradient of how well they do afterwards, back
through their updates. It starts from random weights or from given ones and writes a file that
`disco.py --weights` takes. One meta step, for every agent: `inner_updates` rollouts and one for
validation, all with the same parameters; an update on each of the former; then on the latter a
policy gradient, with the advantages of a critic that learns beside. As in the released notebook,
agents are never reset, unless `--lifetime` says so; with 600, all of three runs found rules that
teach new agents (README).
The critic here credits the reward to the action that earned it; the original's is one step off.
Networks, rule and losses are those of disco.py, line by line.

Shapes: T transitions and L = T + 1 steps, N environments per device, A actions, P agents, D
devices.

    python disco_meta.py --output meta.npz
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10.2,<0.12", "flax>=0.12.8,<0.13", "optax>=0.2.8,<0.3", "distrax>=0.1.9,<0.2",
#     "tyro>=1.0,<2", "matplotlib>=3.10,<4", "numpy>=2.0,<3", "tqdm>=4.67.1,<5",
# ]
# ///

import csv
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# XLA on CPU can wait for itself for ever when loops run side by side, as those of the agents do.
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

NUM_PREDICTIONS = 600  # entries of y and of z
MAX_VALUE, NUM_BINS = 300, 601  # squashed returns are integers from -300 to 300, and between


# ------------------------------------------------------------------------------------------ config
class ConfigError(Exception):
    """A wrong input. The message says what is wrong, what is allowed and what to change."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Meta-training of an update rule on Catch."""

    env_id: str = "Catch-5x5"  # Catch-<rows>x<columns>
    weights: str = "random"  # where to start: random, or an npz file of the meta-network
    output: str = "meta.npz"  # npz file to write; beside it the curve (csv, png) and the state
    resume: bool = False  # go on where the run that wrote `output` ended, or to more meta steps
    num_meta_steps: int = 800  # steps of the meta-network's optimizer, rounded to whole calls
    steps_per_call: int = 10  # meta steps in each call of the compiled program
    num_agents: int = 2  # the population
    lifetime: int | None = None  # meta steps after which an agent starts anew; None: never
    num_envs: int = 32  # parallel environments of each agent over all devices
    num_steps: int = 17  # steps of every environment in a rollout, one more than transitions
    valid_steps: int = 32  # the same, for validation
    inner_updates: int = 2  # of the agent, through which the meta-gradient flows
    hidden_size: int = 512  # width of the first layer
    feature_size: int = 512  # width of the second, which every output reads
    model_size: int = 256  # of the LSTM that imagines each action
    branch_size: int = 256  # width of the layer between it and each of its outputs
    meta_lr: float = 5e-4  # learning rate of the meta-network
    lr: float = 5e-4  # learning rate of the agents
    critic_lr: float = 1e-3  # learning rate of the critics
    max_update: float = 1.0  # every entry of Adam's step is clipped to this, before the rate
    gamma: float = 0.997  # discount of the rule
    trace_lambda: float = 0.95  # trace decay of Retrace
    critic_gamma: float = 0.99  # discount of the critic
    critic_lambda: float = 0.96  # trace decay of V-trace
    ema_decay: float = 0.99  # of the moments that normalise the advantages
    target_decay: float = 0.9  # of the slowly moving copy of the parameters
    ent_coef: float = 0.0  # weight of the entropy bonus in the agents' own loss
    vf_coef: float = 0.2  # weight of the value loss
    seed: int = 0  # of everything random
    rule: str = dataclasses.field(default="disco", init=False)  # what the agent's outputs are for

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            smallest = {"seed": 0, "num_steps": 2, "valid_steps": 2}.get(name, 1)
            if type(value) is int and value < smallest:
                raise ConfigError(f"{name} = {value}: must be at least {smallest}")
        if self.num_envs % jax.device_count():
            raise ConfigError(
                f"num_envs = {self.num_envs} does not divide by devices = {jax.device_count()}"
            )
        if not re.fullmatch(r"Catch-\d+x\d+", self.env_id):
            raise ConfigError(f"{self.env_id} is not Catch-<rows>x<columns>")


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


def load_weights(source: str, seed: int) -> dict[str, np.ndarray]:
    """The meta-network's arrays to start from. Raises ConfigError if they are not to be had."""
    if source == "random":
        return random_weights(seed)
    try:
        with np.load(source) as file:
            weights = dict(file)
    except Exception as error:
        raise ConfigError(f"--weights {source} cannot be read: {error}") from None
    for name, shape in WEIGHT_SHAPES.items():
        found = [weights.get(f"{name}/{part}", np.empty(0)).shape for part in "wb"]
        if found != [shape, shape[-1:]]:
            raise ConfigError(f"{source} has {name} of shapes {found}, not {shape}")
    return weights


class Critic(nn.Module):
    """The value under which a validation rollout is judged."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """obs [B, ...] -> squashed value [B]."""
        x = nn.relu(dense(256)(obs.reshape(len(obs), -1).astype(float)))
        return dense(1, 1e-2)(dense(256)(x)).squeeze(-1)


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


class Learner(NamedTuple):
    """An agent and its critic: what an inner update changes."""

    params: Any
    target_params: Any
    opt_state: Any
    meta: MetaState
    critic: Any
    critic_opt_state: Any
    adv: Moments  # of the critic's advantages
    td: Moments  # of its errors


class AgentState(NamedTuple):
    """A member of the population. Outside `train` each leaf has [D, P] in front."""

    learner: Learner
    env_state: Any
    obs: jax.Array  # [N, ...]
    reset: jax.Array  # [N] obs is the first of an episode, and another went before
    key: jax.Array  # [2]


class TrainState(NamedTuple):
    """All that one meta step hands to the next. Outside `train` each leaf has [D] in front."""

    weights: dict
    opt_state: Any
    agents: AgentState


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


def entropy_of(logits):
    return distrax.Categorical(logits).entropy().mean()


def judge(critic, network, logits, batch: Transition, config: Config):
    """The critic's output [L, B], and V-trace's advantages and targets [T, B] under `logits`."""
    output = jax.vmap(network.apply, (None, 0))(critic, batch.obs)
    log_ratio = nn.log_softmax(logits) - nn.log_softmax(batch.logits)
    ratio = jnp.exp(of_action(log_ratio[:-1], batch.action[:-1]))
    discount = config.critic_gamma * (1 - batch.done[:-1])
    steps = (batch.reward[:-1], discount, unsquash(output), ratio)
    adv, target = compute_vtrace(*jax.lax.stop_gradient(steps), config.critic_lambda)
    return output, adv, target


def regularizer(hat: Hat, target_logits):
    """Keeps the targets near zero on the mean, and the policy's near where the agent is."""
    means = sum(x.mean() ** 2 for x in (hat.logits, hat.y, hat.z))
    target_logits = jax.lax.stop_gradient(target_logits)
    return 1e-3 * means + 1e-2 * kl_divergence(target_logits, hat.logits).mean()


# ------------------------------------------------------------------------------------------- train
class AdamState(NamedTuple):
    count: jax.Array
    mu: Any
    nu: Any


def adam(grads, state: AdamState, lr, max_update):
    """As optax has it, each entry clipped, but no gradient flows through the denominator."""
    count = state.count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state.nu, grads)

    def step(mu, nu):
        scale = jnp.sqrt(jax.lax.stop_gradient(nu / (1 - 0.999**count))) + 1e-8
        return -lr * jnp.clip(mu / (1 - 0.9**count) / scale, -max_update, max_update)

    return jax.tree.map(step, mu, nu), AdamState(count, mu, nu)


def adam_init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return AdamState(jnp.zeros(()), zeros, zeros)


def inner_update(weights, learner: Learner, batch: Transition, agent, critic, config: Config):
    """One update of an agent and its critic on a rollout [L, B, ...]. Returns (learner, penalty).

    Differentiable with respect to the meta-network's `weights`.
    """
    unroll = jax.vmap(agent.apply, (None, 0))
    out, target_out = unroll(learner.params, batch.obs), unroll(learner.target_params, batch.obs)
    hat, values, meta = discovered_rule(weights, out, target_out, batch, learner.meta, config)
    target = jax.lax.stop_gradient(values.target)

    def agent_loss(params):
        taken = jax.vmap(agent.apply, (None, 0, 0))(params, batch.obs, batch.action)
        return disco_loss(taken, hat, target, batch, config)

    grads, metrics = jax.grad(agent_loss, has_aux=True)(learner.params)
    grads = jax.lax.pmean(grads, "devices")
    updates, opt_state = adam(grads, learner.opt_state, config.lr, config.max_update)
    decay = config.target_decay
    average = lambda old, new: decay * old + (1 - decay) * new

    logits = jax.lax.stop_gradient(out.logits)
    output, _, critic_target = judge(learner.critic, critic, logits, batch, config)
    error = critic_target - unsquash(output[:-1])
    td = update_moments(learner.td, jax.lax.stop_gradient(error), config.ema_decay)
    _, std = mean_and_std(td)
    goal = jax.lax.stop_gradient(output[:-1] + error / std)

    def critic_loss(params):
        output = jax.vmap(critic.apply, (None, 0))(params, batch.obs[:-1])
        return 0.5 * ((output - goal) ** 2).mean()

    critic_grads = jax.lax.pmean(jax.grad(critic_loss)(learner.critic), "devices")
    steps = adam(critic_grads, learner.critic_opt_state, config.critic_lr, config.max_update)
    critic_updates, critic_opt_state = steps
    learner = learner._replace(
        params=optax.apply_updates(learner.params, updates),
        target_params=jax.tree.map(average, learner.target_params, learner.params),
        opt_state=opt_state,
        meta=meta,
        critic=optax.apply_updates(learner.critic, critic_updates),
        critic_opt_state=critic_opt_state,
        td=td,
    )
    return learner, (regularizer(hat, target_out.logits[:-1]), metrics["loss/total"])


def meta_loss(weights, learner: Learner, batches, valid, agent, critic, config: Config):
    """How well an agent does after its inner updates. Returns (loss, (learner, metrics)).

    `batches` are rollouts [inner_updates, L, B, ...], `valid` is one [L, B, ...].
    """
    update = lambda learner, batch: inner_update(weights, learner, batch, agent, critic, config)
    learner, (penalty, agent_loss) = jax.lax.scan(update, learner, batches)
    out = jax.vmap(agent.apply, (None, 0, 0))(learner.params, valid.obs, valid.action)
    _, adv, _ = judge(learner.critic, critic, jax.lax.stop_gradient(out.logits), valid, config)
    moments = update_moments(learner.adv, adv, config.ema_decay)
    mean, std = mean_and_std(moments)
    adv = jax.lax.stop_gradient((adv - mean) / std)
    log_prob = of_action(nn.log_softmax(out.logits[:-1]), valid.action[:-1])
    policy_loss, entropy = -(log_prob * adv).mean(), entropy_of(out.logits[:-1])
    loss = policy_loss - 1e-2 * entropy + penalty.mean()
    loss -= 1e-3 * (entropy_of(out.y) + entropy_of(out.z[:-1]))
    metrics = {"meta/loss": loss, "meta/policy": policy_loss, "meta/entropy": entropy}
    metrics["agent/loss"] = agent_loss.mean()
    return loss, (learner._replace(adv=moments), metrics)


def make_train(config: Config, num_meta_steps: int) -> tuple[Callable, Callable]:
    """Returns pmapped init(keys [D], weights) -> state and train(state) -> (state, metrics).

    Metrics are float32 [D, num_meta_steps], means over the population, equal on all devices.
    """
    rows, columns = map(int, config.env_id.removeprefix("Catch-").split("x"))
    env_reset, env_step, num_actions = make_catch(rows, columns)
    env_reset, env_step = jax.vmap(env_reset), jax.vmap(env_step)
    agent, critic = Agent(num_actions, config), Critic()
    num_envs = config.num_envs // jax.device_count()  # N
    meta_optimizer = optax.adam(config.meta_lr)

    def init_agent(key):
        agent_key, critic_key, reset_key, key = jax.random.split(key, 4)
        # The environments of the devices differ, the networks must not.
        same = lambda key: jax.lax.all_gather(key, "devices")[0]
        obs, env_state = env_reset(jax.random.split(reset_key, num_envs))
        params, value = agent.init(same(agent_key), obs), critic.init(same(critic_key), obs)
        moments = Moments(jnp.zeros(()), jnp.zeros(()), jnp.ones(()))
        meta = MetaState(moments, moments, jnp.zeros(128), jnp.zeros(128))
        optimizers = (adam_init(params), meta, value, adam_init(value))
        learner = Learner(params, params, *optimizers, moments, moments)
        return AgentState(learner, env_state, obs, jnp.zeros(num_envs, bool), key)

    def rollout_step(state, _):
        key, action_key, step_key = jax.random.split(state.key, 3)
        logits = agent.apply(state.learner.params, state.obs).logits
        action = distrax.Categorical(logits).sample(seed=action_key)
        keys = jax.random.split(step_key, num_envs)
        obs, env_state, reward, done, *_ = env_step(keys, state.env_state, action)
        transition = Transition(state.obs, action, logits, reward, done, state.reset)
        state = state._replace(env_state=env_state, obs=obs, reset=done, key=key)
        return state, transition

    def act(state, _):
        return jax.lax.scan(rollout_step, state, None, config.num_steps)

    def act_all(state):
        """All that a meta step learns from, with the parameters before it."""
        state, batches = jax.lax.scan(act, state, None, config.inner_updates)
        state, valid = jax.lax.scan(rollout_step, state, None, config.valid_steps)
        return state, batches, valid

    def population_loss(weights, learners, batches, valid):
        loss = lambda *agents: meta_loss(weights, *agents, agent, critic, config)
        losses, (learners, metrics) = jax.vmap(loss)(learners, batches, valid)
        return losses.mean(), (learners, jax.tree.map(jnp.mean, metrics))

    def renew(state, age):
        """An agent at the end of its life leaves its place to a new one."""
        key, fresh_key = jax.random.split(state.key)
        old, fresh = state._replace(key=key), init_agent(fresh_key)
        return jax.tree.map(lambda x, y: jnp.where(age == 0, x, y), fresh, old)

    def meta_step(state, _):
        agents = state.agents
        if config.lifetime:  # births are spread, so that the rule always teaches all ages
            ages = jnp.arange(config.num_agents) * config.lifetime // config.num_agents
            ages = (ages + optax.tree.get(state.opt_state, "count")) % config.lifetime
            agents = jax.vmap(renew)(agents, ages)
        agents, batches, valid = jax.vmap(act_all)(agents)
        grad = jax.grad(population_loss, has_aux=True)
        grads, (learner, metrics) = grad(state.weights, agents.learner, batches, valid)
        # Rewards come only at the end of an episode, one each.
        metrics["episode/return"] = valid.reward.sum() / valid.done.sum()
        returns = valid.reward.sum(axis=(1, 2)) / valid.done.sum(axis=(1, 2))  # [P]
        metrics |= {f"episode/return/agent{i}": x for i, x in enumerate(returns)}
        grads, metrics = jax.lax.pmean((grads, metrics), "devices")
        metrics["meta/grad_norm"] = optax.tree.norm(grads)
        updates, opt_state = meta_optimizer.update(grads, state.opt_state)
        weights = optax.apply_updates(state.weights, updates)
        return TrainState(weights, opt_state, agents._replace(learner=learner)), metrics

    def init(key, weights):
        keys = jax.random.split(jax.random.key_data(key), config.num_agents)
        agents = jax.lax.map(init_agent, keys)
        return TrainState(weights, meta_optimizer.init(weights), agents)

    def train(state):
        return jax.lax.scan(meta_step, state, None, num_meta_steps)

    train = jax.pmap(train, axis_name="devices", donate_argnums=0)
    return jax.pmap(init, axis_name="devices", in_axes=(0, None)), train


# -------------------------------------------------------------------------------------------- main
def replace(path: Path, content: bytes) -> None:
    """Write a file, under another name first: a crash leaves the previous one whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def load(path: Path, config: Config) -> dict[str, Any]:
    """The checkpoint of an earlier call. Raises ConfigError: damaged, or of other options."""
    try:
        saved = flax.serialization.msgpack_restore(path.read_bytes())
        options = saved["config"]
    except Exception as error:
        raise ConfigError(f"{path} is missing, cut short or no checkpoint: {error!r}") from None
    for name, value in vars(config).items():
        if name not in ("output", "resume", "num_meta_steps") and options.get(name) != value:
            raise ConfigError(f"{path} has {name} = {options.get(name)}, this run has {value}")
    return saved


def plot_curve(path: Path, rows: list[dict[str, Any]], config: Config) -> None:
    """Draw the return of every agent and of the population against meta steps, over 20 of them."""
    axes = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained").subplots()
    window = np.ones(min(20, len(rows)))
    window /= window.sum()
    for name in (name for name in rows[0] if name.startswith("episode/return")):
        of_all = name == "episode/return"
        returns = np.convolve([float(row[name]) for row in rows], window, "valid")
        style = {"color": "C0", "zorder": 3} if of_all else {"color": "C1", "alpha": 0.4}
        label = {"episode/return": "population", "episode/return/agent0": "each agent"}.get(name)
        axes.plot(np.arange(len(window), len(rows) + 1), returns, label=label, **style)
    axes.set(xlabel="meta steps", ylabel="return", title=f"disco_meta on {config.env_id}")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(path, dpi=150)


def main(config: Config) -> dict[str, np.ndarray]:
    """Meta-train; write the curve, the weights and the state at the end of every call.

    Returns the weights. Raises ConfigError for a wrong input.
    """
    output, per_call = Path(config.output), config.steps_per_call
    checkpoint, curve = output.with_suffix(".msgpack"), output.with_suffix(".csv")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {output}, choose another --output: {error}") from None
    saved = load(checkpoint, config) if config.resume else {"rows": "", "state": None}
    weights = load_weights(config.weights, config.seed)
    init, train = make_train(config, per_call)
    state = init(jax.random.split(jax.random.key(config.seed), jax.device_count()), weights)
    if config.resume:
        place = lambda x, like: jax.device_put(x, like.sharding)
        last = flax.serialization.from_state_dict(state, saved["state"])
        state = jax.tree.map(place, last, state)
    local = lambda tree: jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0], tree)
    weights, rows = local(state.weights), list(csv.DictReader(saved["rows"].splitlines()))
    calls = range(len(rows) // per_call, max(1, config.num_meta_steps // per_call))
    for call in (bar := tqdm.tqdm(calls, unit="call")):
        state, metrics = train(state)
        metrics, weights = local((metrics, state.weights))
        bar.set_postfix_str(f"return {metrics['episode/return'].mean():.3g}", refresh=False)
        if not all(np.isfinite(x).all() for x in weights.values()):
            sys.exit(f"error: the weights are not finite, {output} is from before: lower --meta-lr")
        for i in range(per_call):
            row = {name: float(values[i]) for name, values in metrics.items()}
            rows.append({"meta_step": call * per_call + i + 1, **row})
        table, file = io.StringIO(), io.BytesIO()
        writer = csv.DictWriter(table, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        np.savez(file, **weights)
        arrays = flax.serialization.to_state_dict(jax.device_get(state))
        saved = {"config": vars(config), "rows": table.getvalue(), "state": arrays}
        replace(output, file.getvalue())
        replace(curve, table.getvalue().encode())
        replace(checkpoint, flax.serialization.to_bytes(saved))  # last: all before it is written
    plot_curve(output.with_suffix(".png"), rows, config)
    return weights


def cli() -> None:
    """Run from the command line. A wrong input ends with exit code 2 and no traceback."""
    try:
        main(tyro.cli(Config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        sys.exit(f"error: {error}; what was saved before is whole")
    except KeyboardInterrupt:  # what the calls before it reached is written
        print("interrupted: continue with the same command and --resume")
        sys.exit(130)


if __name__ == "__main__": cli()  # fmt: skip
