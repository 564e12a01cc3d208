"""Meta-training of an update rule for reinforcement learning: the method behind Disco103.

Oh et al. 2025, Nature, doi 10.1038/s41586-025-09761-x, and the notebook meta_train of disco_rl. A
population of agents learns from the meta-network's targets (disco.py); the meta-network follows the
gradient of their later returns, back through their updates. One meta step:

    act        each agent plays K rollouts and one for validation, before any update
    update     K times: one step of the agent (disco.learn) and one of its critic
    judge      policy gradient of the updated agent on the validation rollout, with the critic's
               advantages, plus entropy bonuses and target regularizers
    meta step  differentiate through the K updates, average over agents; one Adam step

Deviations from the notebook, besides the defaults: the critic credits a reward to the action that
earned it (the notebook's is one step off); an agent is replaced by a new one after `lifetime` meta
steps (`--lifetime None`: never, as in the notebook). `disco.py --weights FILE` reads the
weights.npz of the run folder.

Shapes: L steps of any rollout, T = L - 1 with a successor, K inner updates, P agents, D devices; N
environments are per agent and device.

    python disco_meta.py --seed 1

Rules meta-trained with seeds 1, 2 and 3 (24 to 30 minutes each on one CPU core) taught new agents
Catch 5x5 in 816k steps: return 0.99, 0.50 and 0.85 (means of three agents; a random rule: -0.55).
"""

# /// script
# dependencies = ["distrax", "flax<0.13", "gymnax>=1.0.1,<1.1", "jax<0.12", "tqdm", "tyro"]
# ///

import dataclasses
import io
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from disco import ConfigError, pmean, write

SCRIPT = "disco_meta"


# ----------------------------------------- config
@dataclasses.dataclass(frozen=True)
class Config:
    """Meta-training of an update rule."""

    # Environment
    env_id: str = "Catch-5x5"  # Catch-<rows>x<columns> or a gymnax environment
    env_params: str = ""  # JSON object of environment parameters
    num_meta_steps: int = 1500  # updates of the meta-network (at most)
    num_envs: int = 32  # parallel environments per agent, over all devices
    num_steps: int = 17  # rollout length of an inner update
    valid_steps: int = 17  # rollout length for validation
    # Meta-training
    weights: str = "random"  # initial meta-network: random, disco103 (downloaded) or an npz file
    meta_lr: float = 1e-3  # Adam learning rate of the meta-network
    num_agents: int = 4  # population size
    lifetime: int | None = 600  # meta steps until an agent is replaced by a new one; None: never
    inner_updates: int = 2  # updates of an agent per meta step
    critic_lr: float = 1e-3  # Adam learning rate of the critics
    critic_gamma: float = 0.99  # discount factor of the critics
    critic_lambda: float = 0.96  # trace decay of the critics
    # Agents
    hidden_size: int = 128  # width of the first layer
    feature_size: int = 128  # width of the second layer, which all outputs read
    model_size: int = 64  # width of the LSTM that models the effect of an action
    branch_size: int = 64  # width of the layer between that LSTM and each of its outputs
    lr: float = 1e-2  # Adam learning rate of the agents
    max_update: float = 1.0  # clip entries of Adam's step to this, before lr
    gamma: float = 0.997  # discount factor
    trace_lambda: float = 0.95  # trace decay of Retrace
    ema_decay: float = 0.99  # decay of the moments that normalize advantages (critics' too)
    target_decay: float = 0.9  # decay of the target network
    ent_coef: float = 0.0  # entropy bonus coefficient
    vf_coef: float = 0.2  # value loss coefficient
    # Run
    seed: int = 0  # random seed
    num_evals: int = 150  # evaluations of all agents, each followed by a checkpoint
    eval_episodes: int = 128  # full episodes per evaluation and agent
    run_dir: str = ""  # run folder to start or continue; empty: a new one

    # Read by functions of disco.py; not options here.
    rule = "disco"
    init_from = ""

    def __post_init__(self):
        fractions = ("gamma", "trace_lambda", "ema_decay", "target_decay")
        fractions += ("critic_gamma", "critic_lambda")
        for name, value in vars(self).items():
            low = 0 if name in ("seed", "ent_coef", "vf_coef", *fractions) else 1e-12
            low = 2 if name in ("num_steps", "valid_steps") else low
            high = 0.9999 if name == "ema_decay" else 1 if name in fractions else 1e18
            if type(value) in (int, float) and not low <= value <= high:
                bound = "(0" if low == 1e-12 else f"[{low}"
                raise ConfigError(f"{name} = {value} is not in {bound}, {high:g}]")

    @property
    def num_seeds(self) -> int:
        """Rows of metrics.csv per meta step, one for each agent."""
        return self.num_agents

    @property
    def batch_size(self) -> int:
        """Environment steps per meta step and agent, over all devices."""
        return self.num_envs * (self.inner_updates * self.num_steps + self.valid_steps)

    @property
    def updates_per_eval(self) -> int:
        return self.num_meta_steps // self.num_evals


# ---------------------------------------- weights
def load_weights(config: Config) -> disco.MetaNetwork:
    """The initial meta-network. Raises ConfigError."""
    if config.weights == "random":
        return disco.random_weights(config.seed)
    return disco.load_weights("" if config.weights == "disco103" else config.weights)


def weights_file(meta_net: disco.MetaNetwork) -> bytes:
    """`meta_net` [D, ...] -> an npz file in the released format."""
    layers = jax.tree.leaves(meta_net, is_leaf=lambda x: isinstance(x, disco.Linear))
    arrays = {}
    for place, layer in zip(jax.tree.leaves(disco.MetaNetwork()), layers, strict=True):
        arrays[f"{place.name}/w"] = np.reshape(layer.w[0], place.shape)
        arrays[f"{place.name}/b"] = np.asarray(layer.b[0])
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


# ----------------------------------------- critic
class Critic(nn.Module):
    """Values for the meta-gradient, learned without the rule."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """One observation [...] -> squashed value []."""
        x = nn.relu(disco.dense(256, "torso_0")(obs.ravel().astype(float)))
        x = disco.dense(256, "torso_1")(x)
        return disco.dense(1, "value", 1e-2)(x).squeeze(-1)


def unroll(network: nn.Module, params, *inputs):
    """Outputs of a network for inputs [L, N, ...]."""
    return jax.vmap(jax.vmap(partial(network.apply, params)))(*inputs)


def critic_advantage(critic, logits, batch: disco.Transition, config: Config):
    """Squashed value [L, N] and V-trace advantage [T, N] under the policy of `logits`."""
    output = unroll(Critic(), critic, batch.obs)
    discount = config.critic_gamma * (1 - batch.done[:-1])
    ratio = disco.clipped_ratio(logits, batch)
    steps = (batch.reward[:-1], discount, disco.unsquash(output), ratio)
    advantage, _ = disco.vtrace_advantage(*steps, config.critic_lambda)
    return jax.lax.stop_gradient((output, advantage))


# ----------------------------------- inner update
class AgentState(NamedTuple):
    """A member of the population; outside make_train, with leading axes [D, P]."""

    key: jax.Array  # [2]
    params: Any
    target_params: Any  # moving average
    opt_state: Any
    critic: Any  # parameters
    critic_opt_state: Any
    runner: disco.RunnerState  # [N]
    meta: disco.MetaState = disco.MetaState()
    moments: disco.Moments = disco.Moments()  # of the critic's advantages in training rollouts
    eval_return: jax.Array = np.float32(np.nan)


def make_optimizer(lr: float, max_update: float) -> optax.GradientTransformation:
    """disco.py's, without meta-gradients through Adam's denominator, as in the notebook."""
    adam = optax.scale_by_adam()

    def scale(grads, state, params=None):
        _, state = adam.update(grads, state)
        mean = optax.tree.bias_correction(state.mu, 0.9, state.count)
        square = optax.tree.bias_correction(state.nu, 0.999, state.count)
        divide = lambda mean, square: mean / (jnp.sqrt(jax.lax.stop_gradient(square)) + 1e-8)
        return jax.tree.map(divide, mean, square), state

    scaling = optax.GradientTransformation(adam.init, scale)
    return optax.chain(scaling, optax.clip(max_update), optax.scale(-lr))


def regularizer(targets: disco.MetaTargets, target_logits):
    """Keeps each target's mean logit near zero and the policy target near the target network."""
    means = sum(x.mean() ** 2 for x in targets)
    target_logits = jax.lax.stop_gradient(target_logits)
    return 1e-3 * means + 1e-2 * disco.kl_divergence(target_logits, targets.logits).mean()


def update_critic(agent: AgentState, logits, batch: disco.Transition, config: Config):
    """One step of the critic toward its squashed value plus the V-trace error / its std."""
    output, advantage = critic_advantage(agent.critic, logits, batch, config)
    moments = agent.moments.update(advantage, config.ema_decay)
    _, std = moments.mean_and_std()
    goal = output[:-1] + advantage / std

    loss = lambda params: 0.5 * ((unroll(Critic(), params, batch.obs[:-1]) - goal) ** 2).mean()
    grads = pmean(jax.grad(loss)(agent.critic))
    optimizer = make_optimizer(config.critic_lr, config.max_update)
    updates, opt_state = optimizer.update(grads, agent.critic_opt_state)
    critic = optax.apply_updates(agent.critic, updates)
    return agent._replace(critic=critic, critic_opt_state=opt_state, moments=moments)


def inner_update(meta_net, agent: AgentState, batch: disco.Transition, network, config: Config):
    """One update from a rollout [L, N, ...], differentiable with respect to `meta_net`.

    Returns agent, (regularizer, metrics).
    """
    logits = unroll(network, agent.params, batch.obs).logits
    target_logits = unroll(network, agent.target_params, batch.obs).logits[:-1]
    optimizer = make_optimizer(config.lr, config.max_update)
    agent, targets, metrics = disco.learn(meta_net, agent, batch, network, optimizer, config)
    agent = update_critic(agent, logits, batch, config)
    return agent, (regularizer(targets, target_logits), metrics)


# -------------------------------------- meta-loss
def mean_entropy(logits):
    return distrax.Categorical(logits).entropy().mean()


def meta_loss(meta_net, agent: AgentState, batches, valid, network, config: Config):
    """Loss of an agent after its inner updates. Returns loss, (agent, metrics).

    Rollouts: `batches` [K, L, N, ...] and `valid` [valid_steps, N, ...].
    """
    update = lambda agent, batch: inner_update(meta_net, agent, batch, network, config)
    agent, (penalty, metrics) = jax.lax.scan(update, agent, batches)
    output = unroll(network, agent.params, valid.obs, valid.action)
    _, advantage = critic_advantage(agent.critic, output.logits, valid, config)
    # As in the notebook, the mean is not weighted, and the moments updated here are not stored.
    mean, std = agent.moments.update(advantage, config.ema_decay).mean_and_std()
    log_prob = disco.select_action(nn.log_softmax(output.logits[:-1]), valid.action[:-1])
    policy_loss = -(log_prob * (advantage - mean) / std).mean()
    entropy = mean_entropy(output.logits[:-1])
    loss = policy_loss - 1e-2 * entropy + penalty.mean()
    # y on all steps, as in the notebook.
    loss -= 1e-3 * (mean_entropy(output.y) + mean_entropy(output.z[:-1]))
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics |= {"meta/loss": loss, "meta/policy": policy_loss, "meta/entropy": entropy}
    return loss, (agent, metrics)


# ------------------------------------------ train
class TrainState(NamedTuple):
    """Training carry; outside make_train, with a leading axis [D]."""

    meta_net: disco.MetaNetwork
    opt_state: Any
    agents: AgentState  # [P]
    update: jax.Array = np.int32(0)  # meta steps done


def make_train(config: Config) -> tuple:
    """Returns init(keys [D]) -> state and train(state) -> (state, metrics). Raises ConfigError.

    Both are pmapped. `train` takes `updates_per_eval` meta steps, then evaluates the agents.
    Metrics [D, updates, P] are NaN where nothing was measured.
    """
    num_devices = jax.device_count()
    if config.num_envs % num_devices:
        raise ConfigError(f"num_envs = {config.num_envs} is not divisible by {num_devices} devices")
    if config.updates_per_eval < 1:
        raise ConfigError(f"num_meta_steps must be >= num_evals = {config.num_evals}")
    env_reset, env_step, num_actions = disco.make_env(config)
    network = disco.Agent(num_actions, config)
    meta_optimizer = optax.adam(config.meta_lr)
    meta_net = jax.tree.map(jnp.asarray, load_weights(config))
    start = partial(disco.start_episode, env_reset)

    def init_agent(key):
        params_key, runner_key, key = jax.random.split(key, 3)
        # Environments differ between devices, but the networks must not.
        params_key, critic_key = jax.random.split(jax.lax.all_gather(params_key, "devices")[0])
        runner = jax.vmap(start)(jax.random.split(runner_key, config.num_envs // num_devices))
        params = network.init(params_key, runner.obs[0])
        critic = Critic().init(critic_key, runner.obs[0])
        return AgentState(
            key=key,
            params=params,
            target_params=params,
            opt_state=make_optimizer(config.lr, config.max_update).init(params),
            critic=critic,
            critic_opt_state=make_optimizer(config.critic_lr, config.max_update).init(critic),
            runner=runner,
        )

    def replace(agent, age):
        """An agent at the end of its lifetime is replaced by a new one."""
        key, init_key = jax.random.split(agent.key)
        return optax.tree.where(age == 0, init_agent(init_key), agent._replace(key=key))

    def act(agent, num_steps):
        collect = partial(disco.collect, network, env_step, num_steps)
        runner, rollout = jax.vmap(collect, (None, 0), (0, 1))(agent.params, agent.runner)
        return agent._replace(runner=runner), rollout  # [L, N]

    def act_all(agent):
        act_once = lambda agent, _: act(agent, config.num_steps)
        agent, batches = jax.lax.scan(act_once, agent, None, config.inner_updates)
        return *act(agent, config.valid_steps), batches  # agent, [L, N], [K, L, N]

    def population_loss(meta_net, agents, batches, valid):
        loss = lambda *inputs: meta_loss(meta_net, *inputs, network, config)
        losses, aux = jax.vmap(loss)(agents, batches, valid)
        return losses.mean(), aux

    def meta_step(state, _):
        agents = state.agents
        if config.lifetime:  # staggered, so that ages differ
            ages = jnp.arange(config.num_agents) * config.lifetime // config.num_agents
            agents = jax.vmap(replace)(agents, (ages + state.update) % config.lifetime)
        agents, valid, batches = jax.vmap(act_all)(agents)
        gradient = jax.grad(population_loss, has_aux=True)
        grads, (agents, metrics) = gradient(state.meta_net, agents, batches, valid)
        grads, metrics = pmean((grads, metrics))
        updates, opt_state = meta_optimizer.update(grads, state.opt_state)
        metrics |= jax.vmap(disco.episode_stats)(valid)
        metrics["meta/grad_norm"] = jnp.full(config.num_agents, optax.tree.norm(grads))
        meta_net = optax.apply_updates(state.meta_net, updates)
        return TrainState(meta_net, opt_state, agents, state.update + 1), metrics

    def episode_return(params, key):
        unfinished = lambda runner: ~runner.done
        play = lambda runner: disco.step(network, env_step, params, runner)[0]
        return jax.lax.while_loop(unfinished, play, start(key)).episode[0]

    def evaluate(agent):
        key, eval_key = jax.random.split(agent.key)
        keys = jax.random.split(eval_key, -(-config.eval_episodes // num_devices))
        result = pmean(jax.vmap(episode_return, (None, 0))(agent.params, keys).mean())
        return agent._replace(key=key, eval_return=result)

    def init(key):
        keys = jax.random.split(jax.random.key_data(key), config.num_agents)
        return TrainState(meta_net, meta_optimizer.init(meta_net), jax.vmap(init_agent)(keys))

    def train(state):
        state, metrics = jax.lax.scan(meta_step, state, None, config.updates_per_eval)
        state = state._replace(agents=jax.vmap(evaluate)(state.agents))
        eval_return = jnp.full_like(metrics["meta/loss"], jnp.nan)
        eval_return = eval_return.at[-1].set(state.agents.eval_return)
        return state, {**metrics, "eval/return": eval_return}

    return jax.pmap(init, "devices"), jax.pmap(train, "devices", donate_argnums=0)


# ------------------------------------------- main
def open_run(config: Config) -> tuple[Path, dict]:
    """The run folder and its config.json. Raises ConfigError."""
    name = f"{SCRIPT}__{config.env_id}__seed{config.seed}__%Y%m%d-%H%M%S-{os.getpid()}"
    run_dir = Path(config.run_dir or time.strftime("runs/" + name.replace("/", "-")))
    path = run_dir / "config.json"
    about = {"script": SCRIPT, "num_devices": jax.device_count(), **vars(config)}
    about["updates_per_eval"] = config.updates_per_eval  # must not change
    stored = json.loads(path.read_text()) if path.exists() else about
    may_grow = ["num_meta_steps", "num_evals"] if (run_dir / "summary.json").exists() else []
    for option, new in about.items():
        old = stored.get(option)
        if new != old and option != "run_dir" and not (option in may_grow and new > old):
            raise ConfigError(f"{run_dir} has {option} = {old}, not {new}")
    about["device"] = jax.devices()[0].device_kind
    about["versions"] = {x.__name__: x.__version__ for x in (jax, flax, optax)}
    run_dir.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(about, indent=2).encode())
    return run_dir, about


def main(config: Config) -> dict:
    """Meta-train, or continue the run in `run_dir`. Returns its summary."""
    start = time.perf_counter()
    init, train = make_train(config)
    run_dir, about = open_run(config)
    keys = jax.random.split(jax.random.key(config.seed), jax.device_count())
    saved = state = disco.restore(init(keys), config, run_dir)
    num_updates = config.updates_per_eval * config.num_evals
    calls = range(1 + int(state.update.max()), 1 + num_updates, config.updates_per_eval)
    path = run_dir / "summary.json"
    if path.exists() and not calls:
        return json.loads(path.read_text())
    path.unlink(missing_ok=True)  # stale
    bar = tqdm.tqdm(calls, str(run_dir))
    train = train.lower(state).compile()
    about["compile_seconds"] = time.perf_counter() - start
    train_seconds = 0.0
    call_steps = config.updates_per_eval * config.batch_size * config.num_agents
    for first in bar:
        start = time.perf_counter()
        state, metrics = train(state)
        metrics = {k: np.array(x)[0] for k, x in metrics.items()}
        seconds = time.perf_counter() - start
        train_seconds += seconds
        metrics["time/sps"] = np.full_like(metrics["eval/return"], call_steps / seconds)
        disco.write_rows(run_dir / "metrics.csv", config, metrics, first, None)
        finite = np.isfinite(metrics["meta/grad_norm"]).all(1)
        if not finite.all():
            sys.exit(f"error: NaN or inf at meta step {first + finite.argmin()}: lower meta_lr")
        saved = jax.device_get(state)
        write(run_dir / "weights.npz", weights_file(saved.meta_net))
        write(run_dir / "checkpoint.msgpack", flax.serialization.to_bytes(saved))
        bar.set_postfix_str(f"return {saved.agents.eval_return.mean():.4g}")
    returns = saved.agents.eval_return[0]
    summary = about | {
        "env_steps": int(saved.update.max()) * config.batch_size,
        "eval_return_mean": float(returns.mean()),
        "eval_return_std": float(returns.std()),
        "eval_return_per_seed": returns.tolist(),
        "train_seconds": train_seconds,
        "steps_per_second": len(calls) * call_steps / (train_seconds or 1),
    }
    write(path, json.dumps(summary, indent=2).encode())
    print(f"return {returns.mean():.4g} ± {returns.std():.3g}; weights: {run_dir}/weights.npz")
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
