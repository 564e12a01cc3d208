"""Meta-training of an update rule for reinforcement learning: the method behind Disco103.

Oh et al. 2025, Nature, doi 10.1038/s41586-025-09761-x, and the notebook meta_train of disco_rl. A
population of agents on each environment learns from the targets of a meta-network (disco.py). The
meta-network follows the gradient of their later returns, back through the updates. A meta step:

    rollouts     each agent plays K rollouts and one for validation, before any update
    updates      K times: one step of the agent (disco.learn) and one of its critic
    meta-loss    policy gradient of the updated agent on the validation rollout, with the critic's
                 advantages, plus entropy bonuses and target regularizers
    meta-update  differentiate through the K updates, average over all agents; one step of Adam

V-trace corrects for the validation rollout being off-policy: it was played before the updates.
Deviations from the notebook: the critic credits a reward to the action that earned it (the
notebook's is one step off); an agent is replaced by a new one after `lifetime` meta steps.
Axes: L = T + 1 steps of a rollout, of which the last only bootstraps; K inner updates; P agents of
a population, S of all; D devices; N environments per agent and device.

    python disco_meta.py --env-id Catch-5x5 Catch-6x7
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro"]
# ///

import csv
import dataclasses
import io
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Works around an XLA:CPU deadlock with vmapped loops (jax 0.10).
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
)
FILE = globals().get("__file__", "")  # empty in a notebook
SOURCES = [FILE] if FILE else []  # copied to the run folder; files in environments/ add themselves
SCRIPT = Path(FILE or "disco_meta").stem  # names the runs: a renamed copy gets runs of its own
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

import disco
from disco import ConfigError, open_table, pmean, psum, restore, save, write


# ----------------------------------------- config
@dataclasses.dataclass(frozen=True)
class Environment:
    """Where agents act. For example: --env-id Catch-5x5 CartPole-v1"""

    env_id: tuple[str, ...] = ("Catch-5x5",)  # one or more, each with num_agents agents
    env_params: tuple[str, ...] = ("{}",)  # JSON, one for all environments or one for each
    num_envs: int = 32  # parallel environments per agent, over all devices


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """How agents learn. For example: --num-agents 8 --meta-lr 3e-4"""

    num_meta_steps: int = 1500  # updates of the meta-network, rounded to a multiple of num_evals
    num_steps: int = 17  # rollout length of an inner update
    valid_steps: int = 17  # rollout length for validation
    weights: str = "random"  # initial meta-network: random, disco103 (downloaded) or an npz file
    prediction_size: int = 600  # of a random meta-network: length of the predictions y and z
    rule_size: int = 256  # of a random meta-network: width of the LSTM over a rollout
    lifetime_size: int = 128  # of a random meta-network: width of the LSTM over updates
    embedding_size: int = 16  # of a random meta-network: width of the other layers
    meta_lr: float = 1e-3  # Adam learning rate of the meta-network
    num_agents: int = 4  # population size, on each environment
    lifetime: int = 600  # meta steps until an agent is replaced by a new one; 0: never
    inner_updates: int = 2  # K: updates of an agent per meta step
    critic_lr: float = 1e-3  # Adam learning rate of the critics
    critic_gamma: float = 0.99  # discount factor of the critics, hence of the meta-objective
    critic_lambda: float = 0.96  # trace decay of the critics
    critic_max_update: float = 1.0  # clip entries of the critics' Adam steps to this
    critic_ema_decay: float = 0.99  # decay of the moments of the critics' advantages
    hidden_sizes: tuple[int, ...] = (128, 128)  # widths of an agent's layers
    model_size: int = 64  # width of the LSTM that models the effect of an action
    branch_size: int = 64  # width of the layers between LSTM and outputs
    agent_scale: tuple[float, ...] = (1.0,)  # factor of these sizes; one, or one per environment
    lr: float = 1e-2  # Adam learning rate of the agents
    max_update: float = 1.0  # clip entries of Adam's step to this, before lr
    gamma: float = 0.997  # discount factor of the agents' q
    trace_lambda: float = 0.95  # trace decay of Retrace
    ema_decay: float = 0.99  # decay of the moments that normalize advantages
    target_decay: float = 0.9  # decay of the target network
    ent_coef: float = 0.0  # entropy bonus in the agents' own loss
    vf_coef: float = 0.2  # value loss coefficient
    policy_coef: float = 1.0  # policy loss coefficient
    y_coef: float = 1.0  # coefficient of the loss of the prediction y
    z_coef: float = 1.0  # coefficient of the loss of the prediction z
    aux_coef: float = 1.0  # coefficient of the loss of the predicted next policy


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run does. For example: --num-evals 30 --seed 1"""

    seed: int = 0  # random seed
    num_evals: int = 150  # evaluations of all agents, each followed by a checkpoint
    eval_episodes: int = 128  # full episodes per evaluation and agent, with sampled actions
    run_dir: str = ""  # run folder to start or continue; empty: a new one in runs/


@dataclasses.dataclass(frozen=True)
class Config(Run, Algorithm, Environment):  # a new option goes into one of these groups
    """Meta-training of an update rule."""

    # Read by functions of disco.py; not options here.
    rule = "disco"
    init_from = ""

    @property
    def num_seeds(self) -> int:
        """All agents. In metrics.csv and in plot.py, each counts as a seed."""
        return len(self.env_id) * self.num_agents

    @property
    def batch_size(self) -> int:
        """Environment steps per meta step and agent, over all devices."""
        return self.num_envs * (self.inner_updates * self.num_steps + self.valid_steps)

    @property
    def updates_per_eval(self) -> int:
        """Meta steps per evaluation."""
        return max(1, round(self.num_meta_steps / self.num_evals))

    @property
    def num_updates(self) -> int:
        """Meta steps."""
        return self.updates_per_eval * self.num_evals


# ---------------------------------------- weights
def weights_file(meta_net: disco.MetaNetwork) -> bytes:
    """The npz file of a meta-network, in the released format, for `disco.py --weights`."""
    layers = jax.tree.leaves(meta_net, is_leaf=lambda x: isinstance(x, disco.Linear))
    places = jax.tree.leaves(disco.name_layers(disco.sizes_of(meta_net)))
    arrays = {}
    for place, layer in zip(places, layers, strict=True):
        arrays[f"{place.name}/w"] = np.reshape(layer.w, place.shape)
        arrays[f"{place.name}/b"] = layer.b
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


# ----------------------------------------- critic
class Critic(nn.Module):
    """State values for the meta-gradient, trained by V-trace and not by the rule."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """obs [..., F] -> squashed value [...]"""
        x = nn.relu(disco.dense(256, "torso_0")(obs))
        x = disco.dense(256, "torso_1")(x)  # linear, as in disco.Agent
        return disco.dense(1, "value", 1e-2)(x).squeeze(-1)


def critic_advantage(critic, logits, batch: disco.Transition, config: Config):
    """Squashed value [L, N] and V-trace advantage [T, N] of the policy with `logits` [L, N, A].

    Neither carries a gradient.
    """
    squashed = Critic().apply(critic, batch.obs)
    value = disco.unsquash(squashed)
    ratio = disco.clipped_ratio(logits, batch)  # [T, N]
    steps = (batch.reward[:-1], batch.done[:-1], value, ratio)
    advantage, _ = disco.vtrace(*steps, config.critic_gamma, config.critic_lambda)
    return jax.lax.stop_gradient((squashed, advantage))


# ----------------------------------- inner update
class AgentState(NamedTuple):
    """What one agent of the population carries from meta step to meta step."""

    key: jax.Array
    params: Any
    target_params: Any  # moving average
    opt_state: Any
    meta: disco.MetaState
    critic: Any  # parameters
    critic_opt_state: Any
    moments: disco.Moments  # of the critic's advantages in training rollouts


def make_optimizer(lr: float, max_update: float) -> optax.GradientTransformation:
    """As in disco.py, but Adam's denominator has no meta-gradient, as in the notebook."""
    adam = optax.scale_by_adam()

    def scale(grads, state, params=None):
        _, state = adam.update(grads, state)  # for the new moments
        # Adam's step, from these moments; 0.9, 0.999 and 1e-8 are its defaults.
        mean = optax.tree.bias_correction(state.mu, 0.9, state.count)
        square = optax.tree.bias_correction(state.nu, 0.999, state.count)
        divide = lambda m, v: m / (jnp.sqrt(jax.lax.stop_gradient(v)) + 1e-8)
        return jax.tree.map(divide, mean, square), state

    scaling = optax.GradientTransformation(adam.init, scale)
    return optax.chain(scaling, optax.clip(max_update), optax.scale(-lr))


def regularizer(targets: disco.AgentOutput, target_network_logits):
    """Keeps targets centered at 0, and the policy target near the target network's policy."""
    offset = sum(x.mean() ** 2 for x in (targets.logits, targets.y, targets.z))
    old_logits = jax.lax.stop_gradient(target_network_logits)
    return 1e-3 * offset + 1e-2 * disco.kl_divergence(old_logits, targets.logits).mean()


def update_critic(agent: AgentState, logits, batch: disco.Transition, config: Config):
    """One step of the critic, toward its squashed value + V-trace advantage / moving std.

    The sum mixes units, as in the notebook, but its fixed point is right: in each state, a mean
    advantage of zero.
    """
    squashed, advantage = critic_advantage(agent.critic, logits, batch, config)
    moments = agent.moments.add(advantage, config.critic_ema_decay)
    _, std = moments.mean_and_std()
    goal = squashed[:-1] + advantage / std

    loss = lambda params: 0.5 * ((Critic().apply(params, batch.obs[:-1]) - goal) ** 2).mean()
    grads = pmean(jax.grad(loss)(agent.critic))
    optimizer = make_optimizer(config.critic_lr, config.critic_max_update)
    updates, opt_state = optimizer.update(grads, agent.critic_opt_state)
    critic = optax.apply_updates(agent.critic, updates)
    return agent._replace(critic=critic, critic_opt_state=opt_state, moments=moments)


def inner_update(meta_net, agent: AgentState, batch: disco.Transition, network, config: Config):
    """One update from a rollout [L, N, ...], differentiable with respect to `meta_net`.

    Returns agent, (regularizer, metrics).
    """
    logits = network.apply(agent.params, batch.obs).logits  # before the update
    target_network_logits = network.apply(agent.target_params, batch.obs).logits[:-1]
    optimizer = make_optimizer(config.lr, config.max_update)
    agent, targets, metrics = disco.learn(meta_net, agent, batch, network, optimizer, config)
    agent = update_critic(agent, logits, batch, config)
    return agent, (regularizer(targets, target_network_logits), metrics)


# -------------------------------------- meta-loss
def mean_entropy(logits):
    return distrax.Categorical(logits).entropy().mean()


def meta_loss(meta_net, agent: AgentState, batches, valid, network, config: Config):
    """Loss of an agent after its inner updates. Returns loss, (agent, metrics).

    Rollouts: `batches` [K, L, N, ...] and `valid` [valid_steps, N, ...].
    """
    update = lambda agent, batch: inner_update(meta_net, agent, batch, network, config)
    agent, (penalty, metrics) = jax.lax.scan(update, agent, batches)
    output = network.apply(agent.params, valid.obs, valid.action)
    _, advantage = critic_advantage(agent.critic, output.logits, valid, config)
    # As in the notebook, the moments with this rollout are not kept, and the first steps of
    # episodes are not masked (disco.mean_losses masks them).
    mean, std = agent.moments.add(advantage, config.critic_ema_decay).mean_and_std()
    log_prob = disco.select_action(nn.log_softmax(output.logits[:-1]), valid.action[:-1])
    policy_loss = -(log_prob * (advantage - mean) / std).mean()
    entropy = mean_entropy(output.logits[:-1])
    loss = policy_loss - 1e-2 * entropy + penalty.mean()
    # As in the notebook, y includes the last step and z does not.
    loss -= 1e-3 * (mean_entropy(output.y) + mean_entropy(output.z[:-1]))
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics |= {"meta/loss": loss, "meta/policy": policy_loss, "meta/entropy": entropy}
    metrics["meta/regularizer"] = penalty.mean()
    return loss, (agent, metrics)


# ------------------------------------- population
class Population(NamedTuple):
    """The agents on one environment, as functions on one device."""

    init: Callable  # keys [P] -> agents [P], runners [P, N]
    play: Callable  # agents, runners, updates_done -> agents, runners, batches, valid
    loss: Callable  # meta_net, agents, batches, valid -> losses [P], (agents, metrics [P])
    evaluate: Callable  # agents -> agents, metrics [P]


def make_population(config: Config, i: int, rule_sizes: disco.RuleSizes) -> Population:
    """The population on environment i. Raises ConfigError.

    Rollouts are batches [P, K, L, N, ...] and valid [P, valid_steps, N, ...].
    """
    own = lambda values: values[i] if len(values) > 1 else values[0]
    scale = lambda size: max(1, round(own(config.agent_scale) * size))
    config = dataclasses.replace(  # as disco.py reads it
        config,
        env_id=config.env_id[i],
        env_params=own(config.env_params),
        hidden_sizes=tuple(map(scale, config.hidden_sizes)),
        model_size=scale(config.model_size),
        branch_size=scale(config.branch_size),
    )
    num_devices = jax.device_count()
    envs_per_device = config.num_envs // num_devices  # N
    env_reset, env_step, num_actions = disco.make_env(config)
    network = disco.Agent(num_actions, config, rule_sizes.prediction)
    optimizer = make_optimizer(config.lr, config.max_update)
    critic_optimizer = make_optimizer(config.critic_lr, config.critic_max_update)
    start_episode = partial(disco.start_episode, env_reset)
    act_all = jax.vmap(partial(disco.act, network, env_step), (None, 0))  # params, runners [N]

    def init_agent(key):
        """Returns AgentState, runners [N]."""
        params_key, runner_key, key = jax.random.split(key, 3)
        runners = jax.vmap(start_episode)(jax.random.split(runner_key, envs_per_device))
        params_key = jax.lax.all_gather(params_key, "devices")[0]  # the same on all devices
        params_key, critic_key = jax.random.split(params_key)
        params = network.init(params_key, runners.obs)
        critic = Critic().init(critic_key, runners.obs)
        meta = disco.start_lifetime(rule_sizes.lifetime_lstm)
        agent = AgentState(
            key=key,
            params=params,
            target_params=params,
            opt_state=optimizer.init(params),
            meta=meta,
            critic=critic,
            critic_opt_state=critic_optimizer.init(critic),
            moments=meta.moments,  # empty, too
        )
        return agent, runners

    def replace_if_due(agent: AgentState, runners, age):
        key, init_key = jax.random.split(agent.key)
        kept = (agent._replace(key=key), runners)
        return optax.tree.where(age == 0, init_agent(init_key), kept)

    def play_rollout(params, runners, num_steps):
        act_once = lambda runners, _: act_all(params, runners)
        return jax.lax.scan(act_once, runners, None, num_steps)  # runners, [L, N]

    def play_rollouts(params, runners):
        play_once = lambda runners, _: play_rollout(params, runners, config.num_steps)
        runners, batches = jax.lax.scan(play_once, runners, None, config.inner_updates)
        runners, valid = play_rollout(params, runners, config.valid_steps)
        return runners, batches, valid

    def play(agents, runners, updates_done):
        if config.lifetime:  # staggered: the first life of agent i is shorter by i / P lifetimes
            ages = jnp.arange(config.num_agents) * config.lifetime // config.num_agents
            ages = (ages + updates_done) % config.lifetime
            agents, runners = jax.vmap(replace_if_due)(agents, runners, ages)
        return agents, *jax.vmap(play_rollouts)(agents.params, runners)

    def loss(meta_net, agents, batches, valid):
        of_agent = partial(meta_loss, meta_net, network=network, config=config)
        losses, (agents, metrics) = jax.vmap(of_agent)(agents, batches, valid)
        episodes = psum(valid.done.sum((1, 2)))  # [P] of validation; if zero, means are NaN
        metrics |= {
            "episode/return": psum((valid.episode_return * valid.done).sum((1, 2))) / episodes,
            "episode/length": psum((valid.episode_length * valid.done).sum((1, 2))) / episodes,
            "episode/count": episodes,
        }
        return losses, (agents, metrics)

    def play_episode(params, key):
        """Returns the runner at the end of one full episode. Under vmap, all wait for the last."""
        unfinished = lambda runner: ~runner.done
        step = lambda runner: disco.act(network, env_step, params, runner)[0]
        return jax.lax.while_loop(unfinished, step, start_episode(key))

    def evaluate_agent(agent: AgentState):
        key, eval_key = jax.random.split(agent.key)
        keys = jax.random.split(eval_key, math.ceil(config.eval_episodes / num_devices))
        runners = jax.vmap(play_episode, (None, 0))(agent.params, keys)
        eval_return = pmean(runners.episode_return.mean())
        eval_length = pmean(runners.episode_length.mean())
        return agent._replace(key=key), {"eval/return": eval_return, "eval/length": eval_length}

    return Population(jax.vmap(init_agent), play, loss, jax.vmap(evaluate_agent))


# -------------------------------------- algorithm
class TrainState(NamedTuple):
    """What meta-training carries from meta step to meta step, on one device."""

    meta_net: disco.MetaNetwork
    opt_state: Any
    agents: tuple[AgentState, ...]  # [P] of each population
    runners: tuple[disco.RunnerState, ...]  # [P, N] of each population
    updates_done: jax.Array  # meta steps
    eval_return: jax.Array  # [S] of the latest evaluation; agents differ in age


def concatenate(trees):
    """[P, ...] of each population -> [S, ...]"""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def make_train(config: Config):
    """Returns init, train. Raises ConfigError.

    init(keys [D]) -> state and train(state) -> (state, metrics) are pmapped: state [D, ...],
    metrics [D, S, meta steps]. `train` performs `updates_per_eval` meta steps, then evaluates each
    agent on full episodes.
    """
    num_devices = jax.device_count()
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs must be a multiple of {num_devices}, the number of devices")
    if min(config.num_steps, config.valid_steps) < 2:
        raise ConfigError("num_steps and valid_steps must be at least 2")
    num_populations = len(config.env_id)
    if num_populations == 0:
        raise ConfigError("env_id must name an environment")
    if not {len(config.env_params), len(config.agent_scale)} <= {1, num_populations}:
        raise ConfigError(f"env_params and agent_scale must have one value or {num_populations}")
    sizes = (config.prediction_size, config.rule_size, config.lifetime_size, config.embedding_size)
    meta_net = disco.load_weights(config.weights, config.seed, disco.RuleSizes(*sizes))
    rule_sizes = disco.sizes_of(meta_net)  # a file has its own, whatever the options say
    populations = [make_population(config, i, rule_sizes) for i in range(num_populations)]
    meta_net = jax.tree.map(jnp.asarray, meta_net)
    meta_optimizer = optax.adam(config.meta_lr)

    def update(state: TrainState, _):
        """One meta step."""
        play = lambda population, *inputs: population.play(*inputs, state.updates_done)
        played = map(play, populations, state.agents, state.runners)
        agents, runners, batches, valid = zip(*played, strict=True)

        def mean_loss(meta_net):
            loss = lambda population, *inputs: population.loss(meta_net, *inputs)
            losses, outcomes = zip(*map(loss, populations, agents, batches, valid), strict=True)
            return jnp.concatenate(losses).mean(), outcomes

        grads, outcomes = jax.grad(mean_loss, has_aux=True)(state.meta_net)
        agents, metrics = zip(*outcomes, strict=True)
        # Inside pmap, a pmean is the transpose of a pmean: each device has the gradient of all
        # devices' summed losses by its own copy of meta_net. The mean loss has their mean.
        grads, metrics = pmean((grads, concatenate(metrics)))
        updates, opt_state = meta_optimizer.update(grads, state.opt_state)
        metrics["meta/grad_norm"] = jnp.full(config.num_seeds, optax.tree.norm(grads))
        state = state._replace(
            meta_net=optax.apply_updates(state.meta_net, updates),
            opt_state=opt_state,
            agents=agents,
            runners=runners,
            updates_done=state.updates_done + 1,
        )
        return state, metrics

    def init_on_device(key):
        keys = jnp.split(jax.random.split(key, config.num_seeds), num_populations)
        started = map(lambda population, keys: population.init(keys), populations, keys)
        agents, runners = zip(*started, strict=True)
        return TrainState(
            meta_net=meta_net,
            opt_state=meta_optimizer.init(meta_net),
            agents=agents,
            runners=runners,
            updates_done=jnp.int32(0),
            eval_return=jnp.full(config.num_seeds, jnp.nan, jnp.float32),
        )

    def train_on_device(state: TrainState):
        state, metrics = jax.lax.scan(update, state, None, config.updates_per_eval)
        evaluated = map(lambda population, x: population.evaluate(x), populations, state.agents)
        agents, evaluation = zip(*evaluated, strict=True)
        evaluation = concatenate(evaluation)  # [S]
        state = state._replace(agents=agents, eval_return=evaluation["eval/return"])
        unmeasured = jnp.full((config.updates_per_eval, config.num_seeds), jnp.nan)
        metrics |= {name: unmeasured.at[-1].set(x) for name, x in evaluation.items()}
        return state, jax.tree.map(lambda x: jnp.float32(x).T, metrics)  # [S, meta steps]

    init = jax.pmap(init_on_device, "devices")
    train = jax.pmap(train_on_device, "devices", donate_argnums=0)
    return init, train


# ------------------------------------------- main
def append_rows(table, config: Config, first: int, metrics: dict[str, np.ndarray]):
    """One row per meta step and agent: metrics are [S, meta steps], from meta step `first` on."""
    columns = ["update", "env_id", "seed", "env_steps", *metrics]
    rows = [columns] if table.tell() == 0 else []
    for step in range(first, first + config.updates_per_eval):
        for agent in range(config.num_seeds):
            cells = [x[agent, step - first] for x in metrics.values()]
            cells = ["" if np.isnan(x) else x for x in cells]
            env_id = config.env_id[agent // config.num_agents]
            rows.append([step, env_id, agent, step * config.batch_size, *cells])
    csv.writer(table, lineterminator="\n").writerows(rows)
    table.flush()


def main(config: Config) -> dict:
    """Meta-train, or continue the run in `run_dir`. Returns its summary. Raises ConfigError."""
    start = time.perf_counter()
    name = f"{SCRIPT}__{'-'.join(config.env_id)}__{config.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(config.run_dir or f"runs/{name.replace('/', '-')}-{os.getpid()}")
    if not config.run_dir:
        COMMAND.extend(["--run-dir", str(run_dir)])
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed = {config.seed} is not in [0, 2**32)")
    init, train = make_train(config)
    keys = jax.random.split(jax.random.PRNGKey(config.seed), jax.device_count())
    table_path, summary_path = run_dir / "metrics.csv", run_dir / "summary.json"
    table = open_table(table_path, "r+") if table_path.exists() else None  # locks the folder
    state = host_state = restore(jax.device_get(init(keys)), config, run_dir)
    updates_done = int(host_state.updates_done[0])
    # Rounded, since num_meta_steps and num_evals may have changed since the checkpoint.
    calls_left = max(0, round((config.num_updates - updates_done) / config.updates_per_eval))
    if calls_left == 0 and summary_path.exists():
        print(f"{run_dir} has finished {updates_done:,} meta steps; raise --num-meta-steps")
        return json.loads(summary_path.read_text())
    steps = updates_done + calls_left * config.updates_per_eval
    print(f"{run_dir}: {steps:,} meta steps, compiling ...", end=" ", flush=True)
    compile_start = time.perf_counter()
    train = train.lower(state).compile()
    print(f"{time.perf_counter() - compile_start:.1f} s", flush=True)

    # Nothing in the folder changes until the run can start.
    run_dir.mkdir(parents=True, exist_ok=True)
    table = table or open_table(table_path, "x+")
    # Keep the header and the rows up to the checkpoint (ASCII: a character is a byte).
    lines = table.readlines()[: 1 + updates_done * config.num_seeds] if updates_done else []
    table.seek(len("".join(lines)))
    table.truncate()
    summary_path.unlink(missing_ok=True)
    options = {"script": SCRIPT, **vars(config)}
    write(run_dir / "config.json", json.dumps(options, indent=2).encode())
    for source in map(Path, SOURCES + disco.SOURCES):
        write(run_dir / source.name, source.read_bytes())
    call_steps = config.updates_per_eval * config.batch_size * config.num_seeds
    first_device = lambda tree: jax.tree.map(lambda x: x[0], tree)  # the same on all devices
    # For each environment, the mean over its agents.
    mean_returns = lambda state: state.eval_return[0].reshape(len(config.env_id), -1).mean(axis=1)
    show_returns = lambda state: "return " + " ".join(f"{x:.4g}" for x in mean_returns(state))
    style = {"unit": " steps", "unit_scale": True, "ncols": 80}
    with tqdm.tqdm(total=calls_left * call_steps, **style) as bar:
        for call in range(calls_left):
            call_start = time.perf_counter()
            state, metrics = train(state)
            metrics = {name: np.array(x)[0] for name, x in metrics.items()}  # [S, meta steps]
            call_sps = call_steps / (time.perf_counter() - call_start)
            metrics["time/sps"] = np.full_like(metrics["eval/return"], call_sps)  # of all agents
            if not np.isfinite(metrics["meta/grad_norm"]).all():
                raise ConfigError(
                    f"meta-gradient is not finite; continue {run_dir} with a lower meta_lr"
                )
            host_state = jax.device_get(state)
            first = 1 + updates_done + call * config.updates_per_eval
            append_rows(table, config, first, metrics)
            write(run_dir / "weights.npz", weights_file(first_device(host_state.meta_net)))
            # Written last: the other files are never older than the checkpoint.
            save(run_dir / "checkpoint.msgpack", host_state)
            bar.set_postfix_str(show_returns(host_state), refresh=False)
            bar.update(call_steps)

    seconds = time.perf_counter() - start
    summary = options | {
        "versions": {x.__name__: x.__version__ for x in (jax, flax, optax)},
        "device": f"{len(host_state.updates_done)} x {jax.devices()[0].device_kind}",
        "env_steps": int(host_state.updates_done[0]) * config.batch_size,  # per agent
        "seconds": seconds,  # since the last start, including compilation
        "steps_per_second": calls_left * call_steps / seconds,  # of all agents
        "eval_return_mean": float(host_state.eval_return[0].mean()),
        "eval_return_per_env": mean_returns(host_state).tolist(),
        "eval_return_per_seed": host_state.eval_return[0].tolist(),  # of each agent
    }
    write(summary_path, json.dumps(summary, indent=2).encode())
    table.close()
    print(f"{show_returns(host_state)}\npython disco.py --weights {run_dir}/weights.npz")
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
            if config.batch_size != default.batch_size:  # env_steps = meta steps * this
                raise ConfigError(f"{config.run_dir}: steps per meta step must stay the same")
        main(config)
    except (ConfigError, OSError, json.JSONDecodeError) as error:
        print("error:", str(error).split("\n")[0], file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
