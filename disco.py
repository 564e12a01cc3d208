"""Reinforcement learning with Disco103, an update rule that was itself discovered by learning.

Oh et al. 2025, Nature, doi 10.1038/s41586-025-09761-x. A frozen meta-network takes the place of a
hand-written policy loss: it emits targets for the policy and for two predictions, y and z, whose
meaning was discovered as well; q predicts returns. One update:

    rollout      N environments play L steps; the replay keeps the last C trajectories
    batch        draw B trajectories from the replay, once it holds that many
    values       returns = Retrace(q of the target network)
    rule         policy', y', z' = meta_network(outputs, rewards, advantages, past updates)
    loss         KL(policy' || policy) + KL(y' || y) + KL(z' || z) + KL(next policy || aux_pi)
                 + 0.2 cross_entropy(returns, q), then one step of Adam
As in the authors' code, a time limit counts as a termination, and the loss skips the first step
after a reset: an episode's first action is learned by generalization only, and one-step episodes
teach nothing. `--rule` offers two baselines. Axes: L = T + 1 steps, of which the last only
bootstraps; A actions, D devices, S seeds; N, B, C per device.

    python disco.py
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro", "wandb"]
# ///

import csv
import dataclasses
import difflib
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Works around an XLA:CPU deadlock with vmapped loops (jax 0.10).
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
FILE = globals().get("__file__", "")  # empty in a notebook
SOURCES = [FILE] if FILE else []  # copied to the run folder; files in environments/ add themselves
SCRIPT = Path(FILE or "disco").stem  # names the runs: a renamed copy gets runs of its own
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
OTHERS = "Brax: ppo_continuous.py, MiniGrid: ppo_rnn.py, JaxMARL: ippo.py, others: environments/"
BRAX = "ant halfcheetah hopper humanoid inverted_pendulum pusher reacher swimmer walker2d"


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where agents act. For example: --env-id CartPole-v1 --num-envs 8"""

    env_id: str = "Catch-8x8"  # Catch-<rows>x<columns> or a gymnax environment
    env_params: str = "{}"  # JSON, e.g. '{"max_steps_in_episode": 200}'
    num_envs: int = 2  # parallel environments per seed, over all devices


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How agents learn. For example: --rule actor_critic --lr 5e-4"""

    total_timesteps: float = 58e3  # steps per seed, rounded to whole updates per evaluation
    num_steps: int = 29  # rollout length
    rule: Literal["disco", "actor_critic", "policy_gradient"] = "disco"  # Disco103 or a baseline
    weights: str = "disco103"  # disco103 (downloaded once), random (always the same) or an npz file
    replay_size: int = 1024  # trajectories in the replay, over all devices
    replay_batch: int = 64  # trajectories per update, over all devices
    hidden_sizes: tuple[int, ...] = (512, 512)  # widths of the layers; all outputs read the last
    model_size: int = 128  # width of the LSTM that models the effect of an action
    branch_size: int = 128  # width of the layers between LSTM and outputs
    lr: float = 1e-2  # Adam learning rate
    max_update: float = 1.0  # clip entries of Adam's step to this, before lr
    gamma: float = 0.997  # discount factor
    trace_lambda: float = 0.95  # trace decay of Retrace and of actor_critic's V-trace
    ema_decay: float = 0.99  # decay of the moments that normalize advantages
    target_decay: float = 0.9  # decay of the target network
    ent_coef: float = 0.0  # coefficient of the entropy bonus
    vf_coef: float = 0.2  # value loss coefficient
    policy_coef: float = 1.0  # policy loss coefficient
    y_coef: float = 1.0  # coefficient of the loss of the prediction y
    z_coef: float = 1.0  # coefficient of the loss of the prediction z
    aux_coef: float = 1.0  # coefficient of the loss of the predicted next policy
    scalar_value: bool = False  # actor_critic: a plain number as value, trained by squared error
    normalize_advantages: bool = False  # actor_critic: by their moving mean and standard deviation
    normalize_errors: bool = False  # with scalar_value: divide its errors by their moving std


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
    """Reinforcement learning with the discovered update rule Disco103."""

    @property
    def batch_size(self) -> int:
        """Environment steps played per update and seed, over all devices."""
        return self.num_envs * self.num_steps

    @property
    def updates_per_eval(self) -> int:
        return max(1, round(self.total_timesteps / self.batch_size / self.num_evals))

    @property
    def num_updates(self) -> int:
        return self.updates_per_eval * self.num_evals


# ------------------------------------ environment
def make_env(config: Config):
    """Replace this to bring your own environment. Returns reset, step, num_actions.

    reset(key) -> obs, env_state
    step(key, env_state, action) -> obs, env_state, reward, terminated, truncated, next_obs

    Both handle a single environment; `obs` is a vector. `next_obs` is the observation that
    the action led to. When an episode ends, `step` resets the environment: `obs` is then the first
    observation of the next episode, and `next_obs` the final one of the episode that ended.
    Episodes must end, or evaluations never do. This script ignores next_obs and treats terminated
    and truncated alike. Raises ConfigError.
    """
    names = ["Catch-8x8", *gymnax.registered_envs]
    catch = re.fullmatch(r"Catch-([2-9]|[1-9]\d+)x([2-9]|[1-9]\d+)", config.env_id)
    if config.env_id == "list":
        print(*names, sep="\n")
        sys.exit()
    if not catch and config.env_id not in names:
        lower = {name.lower(): name for name in names}
        lower |= {task: f"brax/{task} (ppo_continuous.py)" for task in BRAX.split()}
        nearest = difflib.get_close_matches(config.env_id.lower(), lower, cutoff=0)
        nearest = " or ".join(lower[name] for name in nearest)
        raise ConfigError(f"unknown env_id {config.env_id}: did you mean {nearest}? {OTHERS}")
    sizes = {"rows": int(catch[1]), "columns": int(catch[2])} if catch else {}
    env, default = gymnax.make("Catch-bsuite" if catch else config.env_id, **sizes)
    try:
        params = default.replace(**json.loads(config.env_params))
        for name, value in vars(default).items():
            if type(getattr(params, name)) is not type(value):
                raise TypeError(f"{name} must be of type {type(value).__name__}")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_params: {error}; the defaults are {default}") from None
    obs_space, action_space = env.observation_space(params), env.action_space(params)
    if not hasattr(action_space, "n"):
        raise ConfigError(f"{config.env_id} has continuous actions: use ppo_continuous.py")
    is_image = len(obs_space.shape) == 3

    def encode(obs):
        if is_image:
            return obs.ravel().astype(bool)  # gymnax images are binary
        # A discrete observation has no shape.
        obs = obs.ravel() if obs_space.shape else jax.nn.one_hot(obs, obs_space.n)
        return obs.astype(jnp.float32)

    def reset(key):
        obs, env_state = env.reset(key, params)
        return encode(obs), env_state

    def step(key, env_state, action):
        outcome = env.step(key, env_state, action, params)
        obs, env_state, reward, terminated, truncated, info = outcome
        next_obs = encode(info["final_observation"])  # set at every step
        return encode(obs), env_state, jnp.float32(reward), terminated, truncated, next_obs

    return reset, step, action_space.n


# ---------------------------------------- network
NUM_BINS = 601  # a return is a categorical over the integers from -300 to 300, after squashing
MAX_VALUE = 300


class AgentOutput(NamedTuple):
    """Unnormalized log-probabilities. policy_gradient has only logits, actor_critic also value."""

    logits: jax.Array  # [..., A] policy
    y: jax.Array | None = None  # [..., Y] of discovered meaning, 600 by default
    z: jax.Array | None = None  # [..., A, Y] the same, for each action
    aux_pi: jax.Array | None = None  # [..., A, A] policy one step after each action
    q: jax.Array | None = None  # [..., A, 601] categorical return after each action
    value: jax.Array | None = None  # [..., 601] categorical return, or [..., 1] the value itself


def dense(features: int, name: str, stddev: float | None = None) -> nn.Dense:
    """Weights from a normal distribution truncated at 2 stddev; None: 1 / sqrt(inputs)."""
    truncated = nn.initializers.truncated_normal
    init = lambda key, shape, dtype: truncated(stddev or shape[0] ** -0.5)(key, shape, dtype)
    return nn.Dense(features, kernel_init=init, name=name)


def lstm_cell(linear, x, hidden, cell):
    """[..., I], [..., H], [..., H] -> hidden, cell. The forget gate gets an extra bias of one."""
    gates = linear(jnp.concatenate([x, hidden], axis=-1))  # [..., 4 H]
    write, candidate, forget, output = jnp.split(gates, 4, axis=-1)
    cell = nn.sigmoid(forget + 1) * cell + nn.sigmoid(write) * nn.tanh(candidate)
    return nn.sigmoid(output) * nn.tanh(cell), cell


class Agent(nn.Module):
    """An MLP, then one step of an LSTM as a model of each action's effect."""

    num_actions: int
    config: Config
    prediction_size: int = 600  # length of y and z, fixed by the rule

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array | None = None) -> AgentOutput:
        """obs [..., F] -> AgentOutput. With action [...]: z, aux_pi and q of that action alone."""
        config = self.config
        x = obs
        for i, size in enumerate(config.hidden_sizes):
            x = nn.relu(x) if i else x  # the last is linear, as in the authors' code
            x = dense(size, f"torso_{i}")(x)
        logits = dense(self.num_actions, "logits", 1e-2)(x)
        if config.rule == "policy_gradient":
            return AgentOutput(logits)
        if config.rule == "actor_critic":
            size = 1 if config.scalar_value else NUM_BINS
            return AgentOutput(logits, value=dense(size, "value", 1e-2)(x))
        y = dense(self.prediction_size, "y", 1e-2)(x)
        cell = dense(config.model_size, "cell")(x)  # [..., H]
        if action is None:  # each action
            cell = jnp.repeat(cell[..., None, :], self.num_actions, axis=-2)  # [..., A, H]
            action = jnp.broadcast_to(jnp.arange(self.num_actions), cell.shape[:-1])
        action = nn.one_hot(action, self.num_actions, dtype=cell.dtype)
        gates = dense(4 * config.model_size, "gates")
        hidden, _ = lstm_cell(gates, action, nn.tanh(cell), cell)  # first hidden state: tanh(cell)
        heads = {}
        for name, size in (
            ("z", self.prediction_size),
            ("aux_pi", self.num_actions),
            ("q", NUM_BINS),
        ):
            x = nn.relu(dense(config.branch_size, f"{name}_0")(hidden))
            heads[name] = dense(size, f"{name}_1")(x)
        return AgentOutput(logits, y, **heads)


# ----------------------------------- meta-network
URL = "https://raw.githubusercontent.com/google-deepmind/disco_rl/main/disco_rl/update_rules/"
URL += "weights/disco_103.npz"
SHA256 = "dac840a15b81e8805326363458c33979626172618f620d9e6e170315388530aa"


class Linear(NamedTuple):
    w: jax.Array  # [I, O]
    b: jax.Array  # [O]

    def __call__(self, x):
        return x @ self.w + self.b


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """Stands for a Linear until it is loaded: its name and shape in the released file.

    A leaf: `jax.tree.map(load, name_layers())` replaces each by its layer.
    """

    name: str
    shape: tuple[int, ...]  # [I, O], or [1, I, O] for a convolution across actions
    stddev: float | None = None  # of random weights; None: 1 / sqrt(I)


class Embeddings(NamedTuple):
    """Layers that embed LSTM inputs."""

    y_hidden: Linear
    y_output: Linear
    z_hidden: Linear
    z_output: Linear
    action_hidden: Linear
    action_output: Linear

    def embed_y(self, logits):
        return self.y_output(nn.relu(self.y_hidden(nn.softmax(logits)))).squeeze(-1)

    def embed_z(self, logits):
        return self.z_output(nn.relu(self.z_hidden(nn.softmax(logits)))).squeeze(-1)


class MetaNetwork(NamedTuple):
    """A lifetime LSTM modulates a backward LSTM that reads 27 step features."""

    embeddings: Embeddings
    lifetime_embeddings: Embeddings
    backward_lstm: Linear
    modulation: Linear
    summary: Linear
    y: Linear
    z: Linear
    policy_hidden: Linear
    policy: Linear
    lifetime_input: Linear
    lifetime_lstm: Linear


class RuleSizes(NamedTuple):
    """Sizes of a meta-network, by default those of Disco103."""

    prediction: int = 600  # length of y and of z
    lstm: int = 256
    lifetime_lstm: int = 128
    embedding: int = 16


DISCO103_SIZES = RuleSizes()


def name_layers(sizes: RuleSizes = DISCO103_SIZES) -> MetaNetwork:
    """A Placeholder for each layer."""
    prediction, lstm, lifetime_lstm, embedding = sizes
    # Times 2: the features of an action, and their mean over the actions.
    inputs, policy_inputs = 2 * 9, 2 * (lstm + 2)

    def embeddings(module):
        return Embeddings(
            y_hidden=Placeholder(f"{module}/mlp/~/linear_0", (prediction, embedding)),
            y_output=Placeholder(f"{module}/mlp/~/linear_1", (embedding, 1)),
            z_hidden=Placeholder(f"{module}/mlp_1/~/linear_0", (prediction, embedding)),
            z_output=Placeholder(f"{module}/mlp_1/~/linear_1", (embedding, 1)),
            action_hidden=Placeholder(f"{module}/sequential/conv1_d", (1, inputs, embedding)),
            action_output=Placeholder(f"{module}/sequential/conv1_d_1", (1, 2 * embedding, 2)),
        )

    unroll = "lstm/~/meta_lstm/~unroll"
    return MetaNetwork(
        embeddings=embeddings("lstm"),
        lifetime_embeddings=embeddings(unroll),
        backward_lstm=Placeholder("lstm/lstm/linear", (27 + lstm, 4 * lstm)),
        modulation=Placeholder("lstm/linear", (lifetime_lstm, lstm), stddev=1.0),
        summary=Placeholder("lstm/linear_1", (lstm, 1), stddev=0.3),
        y=Placeholder("lstm/linear_2", (lstm, prediction), stddev=0.3),
        z=Placeholder("lstm/linear_3", (lstm, prediction), stddev=0.3),
        policy_hidden=Placeholder("lstm/sequential_1/conv1_d", (1, policy_inputs, embedding)),
        policy=Placeholder("lstm/linear_4", (embedding, 1), stddev=0.3),
        lifetime_input=Placeholder(f"{unroll}/mlp_2/~/linear_0", (27 + 2, embedding)),
        lifetime_lstm=Placeholder(
            f"{unroll}/lstm/linear", (embedding + lifetime_lstm, 4 * lifetime_lstm)
        ),
    )


def sizes_of(meta_net: MetaNetwork) -> RuleSizes:
    return RuleSizes(
        prediction=meta_net.y.b.size,
        lstm=len(meta_net.summary.w),
        lifetime_lstm=len(meta_net.modulation.w),
        embedding=len(meta_net.policy.w),
    )


def random_weights(seed: int, sizes: RuleSizes = DISCO103_SIZES) -> MetaNetwork:
    """A meta-network before meta-training, with truncated normal weights."""
    rng = np.random.default_rng(seed)

    def init(layer):
        x = rng.standard_normal(layer.shape[-2:])
        while (far := abs(x) > 2).any():
            x[far] = rng.standard_normal(far.sum())
        stddev = layer.stddev or len(x) ** -0.5
        return Linear(np.float32(stddev * x), np.zeros(layer.shape[-1], np.float32))

    return jax.tree.map(init, name_layers(sizes))


def load_weights(source: str, seed: int = 0, sizes: RuleSizes = DISCO103_SIZES) -> MetaNetwork:
    """The meta-network: `disco103`, `random` or an npz file. Raises ConfigError.

    `seed` and `sizes` are for `random`.
    """
    if source == "random":
        return random_weights(seed, sizes)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "disco_rl" / "disco_103.npz" if source == "disco103" else Path(source)
    download = source == "disco103" and not path.exists()

    def load(layer):
        w, b = arrays[f"{layer.name}/w"], arrays[f"{layer.name}/b"]
        return Linear(np.float32(w.reshape(w.shape[-2:])), np.float32(b))

    def check(layer, expected):
        if layer.w.shape != expected.shape[-2:] or layer.b.shape != expected.shape[-1:]:
            raise ValueError(f"{expected.name} must have shape {expected.shape[-2:]}")

    try:
        content = urllib.request.urlopen(URL, timeout=30).read() if download else path.read_bytes()
        if source == "disco103" and hashlib.sha256(content).hexdigest() != SHA256:
            raise ValueError("its sha256 is not that of Disco103")
        arrays = dict(np.load(io.BytesIO(content), allow_pickle=False))
        meta_net = jax.tree.map(load, name_layers())
        is_layer = lambda x: isinstance(x, Linear)
        jax.tree.map(check, meta_net, name_layers(sizes_of(meta_net)), is_leaf=is_layer)
    except Exception as error:
        advice = f": try curl --create-dirs -o {path} {URL}" if source == "disco103" else ""
        raise ConfigError(f"cannot read {URL if download else path} ({error}){advice}") from None
    if download:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")  # others may download at the same time
        temporary.write_bytes(content)
        temporary.replace(path)
    return meta_net


# ---------------------------------------- rollout
class Transition(NamedTuple):
    """One step of one environment. A trajectory is L of them."""

    obs: jax.Array
    action: jax.Array
    logits: jax.Array  # [A] of the behavior policy
    reward: jax.Array
    done: jax.Array  # the step ended an episode
    reset: jax.Array  # the previous step ended an episode
    episode_return: jax.Array  # up to and including this step
    episode_length: jax.Array


class RunnerState(NamedTuple):
    """What one environment carries from step to step."""

    key: jax.Array
    obs: jax.Array
    env_state: Any
    done: jax.Array  # the previous step ended an episode
    episode_return: jax.Array
    episode_length: jax.Array


def start_episode(env_reset, key) -> RunnerState:
    key, reset_key = jax.random.split(key)
    obs, env_state = env_reset(reset_key)
    return RunnerState(key, obs, env_state, jnp.bool(False), jnp.float32(0), jnp.float32(0))


def act(network: Agent, env_step, params, runner: RunnerState, greedy=False):
    """One step of one environment. Returns RunnerState, Transition."""
    key, action_key, step_key = jax.random.split(runner.key, 3)
    logits = network.apply(params, runner.obs).logits
    policy = distrax.Categorical(logits, dtype=jnp.int32)
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
        episode_return=jnp.where(runner.done, 0, runner.episode_return) + reward,
        episode_length=jnp.where(runner.done, 0, runner.episode_length) + 1,
    )
    episode = (transition.done, transition.episode_return, transition.episode_length)
    return RunnerState(key, obs, env_state, *episode), transition


# ----------------------------------------- values
def unsquash(x):
    """Inverse value squashing (Pohlen et al. 2018, arXiv 1805.11593, proposition A.2)."""
    eps = 1e-3
    root = jnp.sqrt(1 + 4 * eps * (eps + 1 + jnp.abs(x))) / (2 * eps) - 1 / (2 * eps)
    return jnp.sign(x) * (root**2 - 1)


def expected_return(logits):
    """Categorical return [..., 601] -> its unsquashed mean [...]."""
    bins = jnp.linspace(-MAX_VALUE, MAX_VALUE, NUM_BINS, dtype=logits.dtype)
    return unsquash(nn.softmax(logits) @ bins)


def select_action(x, action):
    """x [T, B, A, ...], action [T, B] -> [T, B, ...]."""
    index = action.reshape(action.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=2).squeeze(2)


def clipped_ratio(logits, batch: Transition):
    """Importance ratio of the actions taken, clipped at one, [T, B]."""
    log_ratio = nn.log_softmax(logits) - nn.log_softmax(batch.logits)
    return jnp.exp(jnp.minimum(select_action(log_ratio[:-1], batch.action[:-1]), 0.0))


def retrace(reward, done, value, q, trace, gamma):
    """Retrace (Munos et al. 2016, arXiv 1606.02647). Returns the target of q, [T, B].

    All arrays are [T, B] except value [T + 1, B]. trace is lambda * min(1, importance ratio).
    """

    def step(correction, x):
        reward, done, next_value, q, trace = x
        # Not a product: 0 * NaN is NaN.
        bootstrap = jnp.where(done, 0, gamma * (next_value + correction))
        target = reward + bootstrap
        return trace * (target - q), target

    steps = (reward, done, value[1:], q, trace)
    _, target = jax.lax.scan(step, jnp.zeros_like(reward[0]), steps, reverse=True)
    return target


def vtrace(reward, done, value, ratio, gamma, trace_lambda):
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561, eq. 1). Returns advantage, target, [T, B].

    With the paper's c = trace_lambda * ratio, target - value = ratio * (returns - value), where the
    returns are those of Retrace with q = value. As in GAE, this is also the advantage; that of the
    paper is ratio * (reward + gamma * next target - value).
    """
    returns = retrace(reward, done, value, value[:-1], trace_lambda * ratio, gamma)
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
    taken_q = select_action(target_q[:-1], batch.action[:-1])
    steps = (batch.reward[:-1], batch.done[:-1], target_value, taken_q, trace)
    returns = retrace(*steps, config.gamma)
    return Values(
        value=(policy * q).sum(axis=-1),
        target_q=target_q,
        returns=returns,
        td=returns - select_action(q[:-1], batch.action[:-1]),
        advantage=returns - target_value[:-1],
        action_advantage=target_q - target_value[..., None],
    )


# ------------------------------------------- rule
pmean = lambda x: jax.lax.pmean(x, "devices")
psum = lambda x: jax.lax.psum(x, "devices")


class Moments(NamedTuple):
    """Moving averages over updates and devices."""

    raw: jax.Array  # [2] of x and of x ** 2
    decay_product: jax.Array  # weight of the initial zeros

    def add(self, x, decay) -> "Moments":
        new = pmean(jnp.stack([x.mean(), (x**2).mean()]))
        return Moments(decay * self.raw + (1 - decay) * new, decay * self.decay_product)

    def mean_and_std(self):
        mean, square = self.raw / (1 - self.decay_product)
        return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0) + 1e-12) + 1e-6


class MetaState(NamedTuple):
    """Memory of the update rule over the lifetime of an agent."""

    moments: Moments  # of the advantage, or in policy_gradient of the return
    hidden: jax.Array  # of the lifetime LSTM, [128] by default
    cell: jax.Array  # the same


def start_lifetime(units: int = 128) -> MetaState:
    zeros = lambda size: jnp.zeros(size, jnp.float32)
    return MetaState(Moments(zeros(2), jnp.float32(1)), hidden=zeros(units), cell=zeros(units))


def mix_actions(linear: Linear, x):
    """[..., A, I] -> [..., A, O], equivariant: reads each action and the mean over the actions."""
    mean = jnp.broadcast_to(x.mean(axis=-2, keepdims=True), x.shape)
    return nn.relu(linear(jnp.concatenate([x, mean], axis=-1)))


def make_features(embeddings: Embeddings, online, target, batch, values: Values, moments: Moments):
    """Inputs of the meta-network: step_features [T, B, 27], embedded actions [T, B, A, 2].

    In meta-training (disco_meta.py), gradients pass from here to the agent through its y and z
    only: policies are stopped here, values in disco_rule. The weights fix the order of features.
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
    return jnp.dstack(list(step_features.values())), actions  # [T, B] counts as [T, B, 1]


def backward_lstm(linear: Linear, step_features, done):
    """An LSTM from the last step to the first, reset at episode ends. Returns [T, B, H]."""

    def step(carry, x):
        features, done = x
        hidden, cell = jnp.where(done[:, None], 0, carry)  # [B, H]
        hidden, cell = lstm_cell(linear, features, hidden, cell)
        return jnp.stack([hidden, cell]), hidden

    start = jnp.zeros((2, done.shape[1], linear.b.size // 4), step_features.dtype)
    _, hidden = jax.lax.scan(step, start, (step_features, done), reverse=True)
    return hidden


def embed_update(meta_net: MetaNetwork, step_features, hidden, new_y):
    """Embedding of an update: the mean over its batch and the devices, 16 numbers by default.

    `new_y` is the target that the rule emits, not that of the target network.
    """
    y = meta_net.lifetime_embeddings.embed_y(new_y)[..., None]
    x = jnp.concatenate([step_features, meta_net.summary(hidden), y], axis=-1)  # [T, B, 29]
    return pmean(meta_net.lifetime_input(x).mean(axis=(0, 1)))


def disco_rule(meta_net: MetaNetwork, online, target, batch: Transition, meta: MetaState, config):
    """The discovered rule, on arrays [T + 1, B, ...]. Returns targets, Values, MetaState.

    Targets are an AgentOutput: logits [T, B, A], y [T, B, Y], z [T, B, Y] of the actions taken.
    """
    values = jax.lax.stop_gradient(compute_values(online, target, batch, config))
    moments = meta.moments.add(values.advantage, config.ema_decay)
    inputs = (online, target, batch, values, moments)
    step_features, actions = make_features(meta_net.embeddings, *inputs)
    hidden = backward_lstm(meta_net.backward_lstm, step_features, batch.done[:-1])
    hidden *= meta_net.modulation(meta.hidden)
    tiled = jnp.broadcast_to(hidden[:, :, None], (*actions.shape[:3], hidden.shape[-1]))
    actions = mix_actions(meta_net.policy_hidden, jnp.concatenate([tiled, actions], axis=-1))
    logits = meta_net.policy(actions).squeeze(-1)
    targets = AgentOutput(logits, meta_net.y(hidden), meta_net.z(hidden))
    # The lifetime state takes effect at the next update.
    step_features, _ = make_features(meta_net.lifetime_embeddings, *inputs)
    x = embed_update(meta_net, step_features, hidden, targets.y)
    lifetime_hidden, cell = lstm_cell(meta_net.lifetime_lstm, x, meta.hidden, meta.cell)
    return targets, values, MetaState(moments, lifetime_hidden, cell)


def baseline_rule(online: AgentOutput, batch: Transition, meta: MetaState, config):
    """actor_critic: V-trace; policy_gradient: returns. Gives advantage, value target, MetaState."""
    ratio = clipped_ratio(online.logits, batch)
    steps = (batch.reward[:-1], batch.done[:-1])
    if config.rule == "actor_critic":
        is_scalar = config.scalar_value
        value = online.value.squeeze(-1) if is_scalar else expected_return(online.value)  # [T+1, B]
        advantage, target = vtrace(*steps, value, ratio, config.gamma, config.trace_lambda)
        moments = meta.moments.add(advantage, config.ema_decay)
        return advantage, target, meta._replace(moments=moments)
    # With a value of 0, V-trace's advantage and target are both the discounted rewards up to the
    # end of the episode or trajectory, weighted by products of the clipped ratios.
    no_value = jnp.zeros_like(batch.reward)
    weighted_return, _ = vtrace(*steps, no_value, ratio, config.gamma, trace_lambda=1.0)
    meta = meta._replace(moments=meta.moments.add(weighted_return, config.ema_decay))
    mean, std = meta.moments.mean_and_std()
    # The mean return is a baseline: off-policy, it needs the ratio as well.
    return (weighted_return - ratio * mean) / std, weighted_return, meta


def normalize_targets(advantage, value_target, moments: Moments, config: Config):
    """The options of actor_critic, whose advantage is also the error of its value."""
    mean, std = moments.mean_and_std()
    if config.normalize_errors:  # the value follows a scaled error, as in the authors' code
        value_target += advantage / std - advantage  # value + advantage / std
    if config.normalize_advantages:
        advantage = (advantage - mean) / std
    return advantage, value_target


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
    """Adds the entropy; averages [T, B] without first steps of episodes. Returns loss, metrics."""
    losses = losses | {"policy/entropy": distrax.Categorical(output.logits[:-1]).entropy()}
    mask = ~batch.reset[:-1]  # see the docstring of this file
    metrics = {name: (x * mask).sum() / (mask.sum() + 1e-8) for name, x in losses.items()}
    coefs = {  # the other metrics are not part of the loss
        "loss/policy": config.policy_coef,
        "loss/y": config.y_coef,
        "loss/z": config.z_coef,
        "loss/aux_policy": config.aux_coef,
        "loss/value": config.vf_coef,
        "policy/entropy": -config.ent_coef,
    }
    return sum(coefs.get(name, 0) * x for name, x in metrics.items()), metrics


def disco_loss(output: AgentOutput, targets: AgentOutput, returns, batch: Transition, config):
    """Divergences from the targets. `output` [T + 1, B, ...] is for the actions taken."""
    next_logits = jax.lax.stop_gradient(output.logits[1:])
    aux_loss = kl_divergence(next_logits, output.aux_pi[:-1])
    losses = {
        "loss/policy": kl_divergence(targets.logits, output.logits[:-1]),
        "loss/y": kl_divergence(targets.y, output.y[:-1]),
        "loss/z": kl_divergence(targets.z, output.z[:-1]),
        "loss/aux_policy": jnp.where(batch.done[:-1], 0, aux_loss),
        "loss/value": value_loss(output.q[:-1], returns),
        "policy/entropy_y": distrax.Categorical(output.y[:-1]).entropy(),
        "policy/entropy_z": distrax.Categorical(output.z[:-1]).entropy(),
    }
    return mean_losses(losses, output, batch, config)


def baseline_loss(output: AgentOutput, advantage, value_target, batch: Transition, config):
    """Policy gradient, with a value loss if there is a critic."""
    log_prob = select_action(nn.log_softmax(output.logits[:-1]), batch.action[:-1])
    losses = {"loss/policy": -advantage * log_prob}
    if config.rule == "actor_critic":
        if config.scalar_value:
            losses["loss/value"] = 0.5 * (output.value[:-1].squeeze(-1) - value_target) ** 2
        else:
            losses["loss/value"] = value_loss(output.value[:-1], value_target)
    return mean_losses(losses, output, batch, config)


# -------------------------------------- algorithm
class TrainState(NamedTuple):
    """What one seed carries from update to update, on one device."""

    key: jax.Array
    params: Any
    target_params: Any  # moving average
    opt_state: Any
    meta: MetaState
    replay: Transition  # [L, C] ring buffer
    runners: RunnerState  # [N]
    updates_done: jax.Array
    eval_return: jax.Array  # of the latest evaluation
    best_return: jax.Array
    best_params: Any


def make_optimizer(config: Config) -> optax.GradientTransformation:
    clip = optax.clip(config.max_update)
    return optax.chain(optax.scale_by_adam(), clip, optax.scale(-config.lr))


def learn(meta_net: MetaNetwork, state: Any, batch: Transition, network, optimizer, config):
    """One step of Adam on a batch [L, B, ...], differentiable with respect to `meta_net`.

    Returns state with new params, target_params, opt_state and meta; targets, for disco_meta.py;
    metrics.
    """
    online = network.apply(state.params, batch.obs)
    if config.rule == "disco":
        target = network.apply(state.target_params, batch.obs)
        targets, values, meta = disco_rule(meta_net, online, target, batch, state.meta, config)
        td, value_target = values.td, values.returns
        loss = lambda output: disco_loss(output, targets, value_target, batch, config)
    else:
        targets = None
        advantage, value_target, meta = baseline_rule(online, batch, state.meta, config)
        td = advantage  # in actor_critic: value_target - value, not yet normalized
        loss_targets = (advantage, value_target)
        if config.rule == "actor_critic":
            loss_targets = normalize_targets(*loss_targets, meta.moments, config)
        loss = lambda output: baseline_loss(output, *loss_targets, batch, config)

    # With batch.action, only the outputs of these actions are computed: 30% less time.
    loss_of = lambda params: loss(network.apply(params, batch.obs, batch.action))
    grads, metrics = jax.grad(loss_of, has_aux=True)(state.params)
    metrics["policy/ratio"] = clipped_ratio(online.logits, batch).mean()
    if config.rule != "policy_gradient":
        metrics["value/explained_variance"] = 1 - td.var() / value_target.var()
        metrics["value/td"] = jnp.abs(td).mean()
        metrics["value/target"] = value_target.mean()
        metrics["value/mean"] = (value_target - td).mean()  # before the update
    grads, metrics = pmean((grads, metrics))
    metrics["optim/grad_norm"] = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state)
    metrics["optim/update_norm"] = optax.tree.norm(updates)
    # The average moves toward the parameters before this step, as in the authors' code.
    step_size = 1 - config.target_decay
    state = state._replace(
        params=optax.apply_updates(state.params, updates),
        target_params=optax.incremental_update(state.params, state.target_params, step_size),
        opt_state=opt_state,
        meta=meta,
    )
    return state, targets, metrics


def make_train(config: Config):
    """Returns init, train, init_seed, train_seed. Raises ConfigError.

    init(keys [D]) -> state and train(state) -> (state, metrics) are pmapped. A seed spans all
    devices: its parameters and metrics are the same on each, its environments are not. state is
    [D, S, ...], metrics are [D, S, updates]. `train` performs `updates_per_eval` updates on each
    seed, evaluates it on full episodes and keeps its best parameters. It donates its argument.

    init_seed(key) and train_seed(state) do the work of one device for one seed. They need an axis
    "devices" of size D: jax.pmap(jax.vmap(train_seed), "devices").
    """
    # The most devices that divide all these sizes, with the same number from each process.
    sizes = (config.num_envs, config.replay_size, config.replay_batch)
    devices = np.reshape(jax.devices(), (jax.process_count(), -1))
    while devices.size and math.gcd(*sizes) % devices.size:
        devices = devices[:, :-1]
    num_devices = devices.size
    if num_devices == 0:
        raise ConfigError(f"{len(devices)} processes must divide num_envs and replay_*")
    if config.normalize_errors and not config.scalar_value:
        raise ConfigError("normalize_errors needs scalar_value")
    trajectories = min(config.replay_size, config.num_updates * config.num_envs)
    if trajectories < max(config.num_envs, config.replay_batch) or config.num_steps < 2:
        raise ConfigError(
            f"{trajectories} trajectories of {config.num_steps} steps are too few to learn from: "
            "check num_envs, replay_batch, replay_size, num_steps and total_timesteps"
        )
    num_envs, replay_size, replay_batch = (size // num_devices for size in sizes)  # N, C, B
    env_reset, env_step, num_actions = make_env(config)
    meta_net = load_weights(config.weights) if config.rule == "disco" else None
    rule_sizes = sizes_of(meta_net) if meta_net else DISCO103_SIZES
    network = Agent(num_actions, config, rule_sizes.prediction)
    optimizer = make_optimizer(config)
    act_all = jax.vmap(partial(act, network, env_step), (None, 0))  # params, runners [N]

    def update(state: TrainState, _):
        """A rollout, and one step of Adam on a batch from the replay."""
        play = lambda runners, _: act_all(state.params, runners)
        runners, rollout = jax.lax.scan(play, state.runners, None, config.num_steps)  # [L, N]
        oldest = (state.updates_done * num_envs + jnp.arange(num_envs)) % replay_size
        replay = jax.tree.map(lambda x, new: x.at[:, oldest].set(new), state.replay, rollout)
        key, replay_key = jax.random.split(state.key)
        filled = jnp.minimum((state.updates_done + 1) * num_envs, replay_size)
        drawn = jax.random.randint(replay_key, (replay_batch,), 0, filled)
        batch = jax.tree.map(lambda x: x[:, drawn], replay)  # [L, B, ...]
        # At first the target network equals the agent, even if `init_from` has replaced params.
        target_params = optax.tree.where(state.updates_done == 0, state.params, state.target_params)
        state = state._replace(target_params=target_params)
        learned, _, metrics = learn(meta_net, state, batch, network, optimizer, config)
        ready = filled >= replay_batch  # before, nothing is learned
        unmeasured = dict.fromkeys(metrics, jnp.nan)  # empty cells
        unmeasured["optim/grad_norm"] = 0.0  # `main` takes NaN for divergence
        metrics = optax.tree.where(ready, metrics, unmeasured)
        episodes = psum(rollout.done.sum())
        metrics |= {
            "episode/return": psum((rollout.episode_return * rollout.done).sum()) / episodes,
            "episode/length": psum((rollout.episode_length * rollout.done).sum()) / episodes,
            "episode/count": episodes,
            "optim/lr": jnp.float32(config.lr),
        }
        state = optax.tree.where(ready, learned, state)._replace(
            key=key,
            replay=replay,
            runners=runners,
            updates_done=state.updates_done + 1,
        )
        return state, metrics

    def play_episode(params, key):
        """Returns the runner at the end of one full episode. Under vmap, all wait for the last."""
        unfinished = lambda runner: ~runner.done
        play = lambda runner: act(network, env_step, params, runner, config.eval_greedy)[0]
        return jax.lax.while_loop(unfinished, play, start_episode(env_reset, key))

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
        params_key, runner_key, key = jax.random.split(key, 3)
        runner_keys = jax.random.split(runner_key, num_envs)
        runners = jax.vmap(partial(start_episode, env_reset))(runner_keys)
        params_key = jax.lax.all_gather(params_key, "devices")[0]  # the same on all devices
        params = network.init(params_key, runners.obs)
        _, transition = jax.eval_shape(act_all, params, runners)  # [N, ...]
        empty = lambda x: jnp.zeros((config.num_steps, replay_size, *x.shape[1:]), x.dtype)
        return TrainState(
            key=key,
            params=params,
            target_params=params,
            opt_state=optimizer.init(params),
            meta=start_lifetime(rule_sizes.lifetime_lstm),
            replay=jax.tree.map(empty, transition),
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

    def init_seeds(key):
        return jax.vmap(init_seed)(jax.random.split(key, config.num_seeds))

    pmap = partial(jax.pmap, axis_name="devices", devices=devices.ravel().tolist())
    init = lambda keys: pmap(init_seeds)(keys[: devices.shape[1]])  # of the devices in use
    return init, pmap(jax.vmap(train_seed), donate_argnums=0), init_seed, train_seed


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
