"""The same work by other systems, each from a checkout of its own (see peers.md).

A function with the name of a peer takes the folder of the checkout, a script of ours with its
configuration, the environment steps per call and the number of timed calls, and returns the seconds
to compile, the steps of a call and the seconds of each call. PEER_curve takes the folder, settings
that replace the peer's own and the number of seeds, and returns a learning curve. PEER_clock takes
the folder and such settings as words, and returns what the function with the name of the peer does.

    python benchmarks/peers.py stoix Stoix 3 env=gymnax/acrobot system.actor_lr=1e-3    # tuning
"""

import argparse
import contextlib
import importlib
import io
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from speed import timed_calls

FIRST_SEED = 0


class FiveValues:
    """An environment of gymnax 1.x for callers that expect the five values of earlier versions."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def step(self, key, state, action, params=None):
        obs, state, reward, terminated, truncated, _ = self.env.step(key, state, action, params)
        return obs, state, reward, terminated | truncated, {}


BOUNDS = {"Pendulum-v1": 2.0, "MountainCarContinuous-v0": 1.0}  # of the actions


def is_continuous(env_id):
    return env_id in BOUNDS or env_id.startswith("brax/")


class Evaluation(NamedTuple):
    reward: jax.Array
    length: jax.Array


def compiled(function, *args):
    """Returns the seconds to compile, and a call that waits for its result."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    return time.perf_counter() - start, lambda: jax.block_until_ready(program(*args))


PUREJAXRL = {  # the defaults of its `ppo.py`
    "LR": 2.5e-4,
    "NUM_ENVS": 4,
    "NUM_STEPS": 128,
    "TOTAL_TIMESTEPS": 5e5,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1",
    "ANNEAL_LR": True,
    "DEBUG": False,
}
PUREJAXRL_CONTINUOUS = {  # those of its `ppo_continuous_action.py`
    **PUREJAXRL,
    "LR": 3e-4,
    "NUM_ENVS": 2048,
    "NUM_STEPS": 10,
    "NUM_MINIBATCHES": 32,
    "ENT_COEF": 0.0,
    "ANNEAL_LR": False,
    "NORMALIZE_ENV": True,
}


def parse(words):
    """NAME=value ... -> dict"""
    options = dict(word.split("=") for word in words)
    for name, value in options.items():
        try:
            number = float(value)
            options[name] = int(number) if number.is_integer() else number
        except ValueError:
            pass
    return options


def purejaxrl_trainer(path, options):
    """The make_train of its script for the environment, and the settings, replaced by `options`."""
    import gymnax

    sys.path.insert(0, f"{path}/purejaxrl")
    sys.modules.setdefault("navix", types.ModuleType("navix"))  # imported, not used here
    env_id = options.get("ENV_NAME", PUREJAXRL["ENV_NAME"])
    make = gymnax.make
    gymnax.make = lambda name: (FiveValues(make(name)[0]), make(name)[1])
    if not is_continuous(env_id):
        import ppo

        return ppo.make_train, {**PUREJAXRL, **options}

    import ppo_continuous_action as ppo
    import wrappers

    if env_id in BOUNDS:
        env, params = gymnax.make(env_id)
        bound = (
            types.SimpleNamespace(  # the wrapper of a Brax environment leaves out the parameters
                reset=lambda key, _=None: env.reset(key, params),
                step=lambda key, state, action, _=None: env.step(key, state, action, params),
                observation_space=lambda _=None: env.observation_space(params),
                action_space=lambda _=None: env.action_space(params),
            )
        )
        ppo.BraxGymnaxWrapper = lambda name: bound
        bounds = (-BOUNDS[env_id], BOUNDS[env_id])
        ppo.ClipAction = lambda env: wrappers.ClipAction(env, *bounds)
    else:  # the physics of our scripts, which is Brax's default
        ppo.BraxGymnaxWrapper = lambda name: wrappers.BraxGymnaxWrapper(
            name.removeprefix("brax/"), backend="generalized"
        )
    return ppo.make_train, {**PUREJAXRL_CONTINUOUS, **options}


def train_seeds(train, options, seeds):
    """All seeds in one program: side by side, or on Brax, where that can deadlock, in turns."""
    in_turns = options.get("ENV_NAME", "").startswith("brax/")
    program = jax.jit(lambda keys: jax.lax.map(train, keys) if in_turns else jax.vmap(train)(keys))
    return program(jax.random.split(jax.random.PRNGKey(0), seeds))


def purejaxrl_curve(path, options, seeds):
    """Environment steps [U] and mean training returns [U, S]."""
    make_train, config = purejaxrl_trainer(path, options)
    metrics = train_seeds(make_train(config), options, seeds)["metrics"]
    return mean_returns(
        metrics["returned_episode_returns"],  # [S, U, T, N]
        metrics["returned_episode"],
        config["NUM_ENVS"] * config["NUM_STEPS"],
    )


def mean_returns(returns, ended, batch):
    """Over the episodes that ended in an update; NaN if none did."""
    returns, ended = np.asarray(returns), np.asarray(ended)
    count = ended.sum(axis=(2, 3))  # [S, U]
    total = (returns * ended).sum(axis=(2, 3))
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return batch * np.arange(1, mean.shape[1] + 1), mean.T


def clock(program, batch, least=10, calls=3, seconds_per_call=4.0):
    """Times calls of roughly `seconds_per_call`. program(steps) -> seconds to compile, call."""
    updates = least
    for _ in range(2):
        steps = updates * batch
        seconds, call = program(steps)
        timed = timed_calls(call, calls)
        if min(timed) >= seconds_per_call:
            break
        updates = max(least, int(updates * seconds_per_call / min(timed)))
    return seconds, steps, timed


def purejaxrl_clock(path, words):
    make_train, config = purejaxrl_trainer(path, parse(words))
    program = lambda steps: compiled(
        make_train({**config, "TOTAL_TIMESTEPS": steps}), jax.random.PRNGKey(0)
    )
    return clock(program, config["NUM_ENVS"] * config["NUM_STEPS"])


def purejaxrl_program(path, options, steps):
    """A training of so many steps: seconds to compile, steps of all seeds, call()."""
    options = dict(options)
    seeds = options.pop("SEEDS", 1)
    make_train, config = purejaxrl_trainer(path, options)
    batch = config["NUM_ENVS"] * config["NUM_STEPS"]
    updates = max(1, steps // (seeds * batch))
    train = make_train({**config, "TOTAL_TIMESTEPS": updates * batch})
    seconds, call = compiled(*side_by_side(train, seeds))
    return seconds, seeds * updates * batch, call


def side_by_side(train, seeds):
    """A function of the returned key, or keys: one seed without vmap."""
    if seeds == 1:
        return train, jax.random.PRNGKey(0)
    return jax.vmap(train), jax.random.split(jax.random.PRNGKey(0), seeds)


def purejaxrl(path, script, options, steps_per_call, calls):
    env_id = "CartPole-v1" if script == "ppo_ff" else "Pendulum-v1"
    env_id = options.get("env_id", env_id)
    make_train, _ = purejaxrl_trainer(path, {"ENV_NAME": env_id})
    batch = options["num_envs"] * options["num_steps"]
    config = {
        **PUREJAXRL,
        "NUM_ENVS": options["num_envs"],
        "NUM_STEPS": options["num_steps"],
        "TOTAL_TIMESTEPS": max(1, steps_per_call // batch) * batch,
        "UPDATE_EPOCHS": options["update_epochs"],
        "NUM_MINIBATCHES": options["num_minibatches"],
        "ENV_NAME": env_id,
        "NORMALIZE_ENV": script == "ppo_obs_norm",
    }
    seconds, call = compiled(make_train(config), jax.random.PRNGKey(0))
    return seconds, config["TOTAL_TIMESTEPS"], timed_calls(call, calls)


REJAX = {  # environment: its configuration
    "CartPole-v1": "gymnax/cartpole",
    "Acrobot-v1": "gymnax/acrobot",
    "MountainCar-v0": "gymnax/mountaincar",
    "Pendulum-v1": "gymnax/pendulum",
    "MountainCarContinuous-v0": "gymnax/continuous_mountaincar",
    "brax/hopper": "brax/hopper",
}


class BraxEnv(FiveValues):
    """A Brax environment in rejax's adapter, whose `step` resets as that of gymnax 0.0.9 did."""

    def reset(self, key, params=None):
        return self.env.reset_env(key, params)

    def step(self, key, state, action, params=None):
        key, reset_key = jax.random.split(key)
        obs, state, reward, done, info = self.env.step_env(key, state, action, params)
        select = lambda start, now: jax.numpy.where(done, start, now)
        obs, state = jax.tree.map(select, self.reset(reset_key, params), (obs, state))
        return obs, state, reward, done, info


def rejax_agent(path, options):
    """Its PPO with the settings that it publishes for the environment."""
    import gymnax
    import yaml

    sys.path.insert(0, f"{path}/src")
    from rejax import PPO
    from rejax.evaluate import evaluate

    with open(f"{path}/configs/{REJAX[options['ENV_NAME']]}.yaml") as file:
        config = yaml.safe_load(file)["ppo"]
    total = int(options["TOTAL_TIMESTEPS"])
    config["total_timesteps"] = total
    if config["env"].startswith("brax/"):
        from rejax.compat.brax2gymnax import create_brax

        # The physics of our scripts.
        env, params = create_brax(config["env"].removeprefix("brax/"), backend="generalized")
        config |= {"env": BraxEnv(env), "env_params": params, "eval_freq": total // 20}
        agent = PPO.create(**config)
        # Episodes are long: 32 of them instead of 128.
        return agent.replace(
            eval_callback=lambda agent, state, key: evaluate(
                agent.make_act(state), key, agent.env, params, 32
            )
        )
    env, params = gymnax.make(config["env"])
    config |= {"env": FiveValues(env), "env_params": params, "eval_freq": total // 50}
    return PPO.create(**config)


def rejax_curve(path, options, seeds):
    """Environment steps [U] and mean returns of its evaluations [U, S]."""
    agent = rejax_agent(path, options)
    train = lambda key: agent.train(key)[1][1].mean(axis=-1)
    returns = np.asarray(train_seeds(train, options, seeds))  # [S, 1 + evaluations]
    batch = agent.num_envs * agent.num_steps
    steps_per_evaluation = batch * -(-agent.eval_freq // batch)
    return steps_per_evaluation * np.arange(1, returns.shape[1]), returns[:, 1:].T


def rejax_clock(path, words):
    agent = rejax_agent(path, parse(words)).replace(
        eval_callback=lambda *_: (), skip_initial_evaluation=True
    )

    def program(steps):
        sized = agent.replace(total_timesteps=steps, eval_freq=steps)
        return compiled(lambda key: sized.train(key), jax.random.PRNGKey(0))

    return clock(program, agent.num_envs * agent.num_steps)


def rejax(path, script, options, steps_per_call, calls):
    import gymnax

    sys.path.insert(0, f"{path}/src")
    from rejax import PPO

    env, params = gymnax.make("CartPole-v1")
    batch = options["num_envs"] * options["num_steps"]
    steps = max(1, steps_per_call // batch) * batch
    agent = PPO.create(
        env=FiveValues(env),
        env_params=params,
        num_envs=options["num_envs"],
        num_steps=options["num_steps"],
        num_epochs=options["update_epochs"],
        num_minibatches=options["num_minibatches"],
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
        agent_kwargs={"activation": "tanh"},
    ).replace(eval_callback=lambda *_: ())
    seconds, call = compiled(lambda key: agent.train(key), jax.random.PRNGKey(0))
    return seconds, steps, timed_calls(call, calls)


def rejax_program(path, options, steps):
    """A training of so many steps, without evaluation; options are fields of its PPO."""
    import gymnax

    sys.path.insert(0, f"{path}/src")
    from rejax import PPO

    options = dict(options)
    seeds, (env, params) = options.pop("seeds", 1), gymnax.make(options.pop("env_id"))
    batch = options["num_envs"] * options["num_steps"]
    updates = max(1, steps // (seeds * batch))
    agent = PPO.create(
        env=FiveValues(env),
        env_params=params,
        total_timesteps=updates * batch,
        eval_freq=updates * batch,
        skip_initial_evaluation=True,
        **options,
    ).replace(eval_callback=lambda *_: ())
    seconds, call = compiled(*side_by_side(lambda key: agent.train(key), seeds))
    return seconds, seeds * updates * batch, call


STOIX_CONTINUOUS = ("gymnax/pendulum", "gymnax/mountain_car_continuous")


def stoix_module(path, config):
    """Its `ff_ppo.py`, or `ff_ppo_continuous.py` where actions are continuous, with jax 0.10."""
    sys.path.insert(0, path)
    # Left out: its logger, which needs neptune, and its environments, which need all libraries.
    for name in ("stoix.utils.logger", "stoix.utils.make_env"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["stoix.utils.logger"].LogEvent = sys.modules["stoix.utils.logger"].StoixLogger = (
        None
    )
    return importlib.import_module(f"stoix.systems.ppo.anakin.{config.script}")


def stoix_environments(config):
    """One for training and one for evaluation, with the wrappers that its factory would give."""
    import gymnax
    import stoa
    from stoa.core_wrappers.vmap import VmapWrapper
    from stoa.env_adapters.gymnax import GymnaxToStoa
    from stoa.utility_wrappers.extras_transforms import NoExtrasWrapper

    env, params = gymnax.make(config.env.scenario.name)
    env = NoExtrasWrapper(GymnaxToStoa(FiveValues(env), params))
    if "wrapper" in config.env:  # MinAtar
        env = stoa.FlattenObservationWrapper(env)
    recorded = stoa.RecordEpisodeMetrics(stoa.AddRNGKey(env))
    return VmapWrapper(stoa.AutoResetWrapper(recorded, next_obs_in_extras=True)), env


def stoix_config(path, options):
    """Its defaults, overridden by `options`, whose names are those of its command line."""
    from omegaconf import OmegaConf

    files = {"system": "system/ppo/ff_ppo", "arch": "arch/anakin"}
    options = {"env": "gymnax/cartpole", **options}
    env = options.pop("env")
    files["env"] = f"env/{env}"
    continuous = env in STOIX_CONTINUOUS
    files["network"] = "network/mlp" + "_continuous" * continuous
    config = OmegaConf.create(
        {key: OmegaConf.load(f"{path}/stoix/configs/{name}.yaml") for key, name in files.items()}
    )
    config.logger = {"checkpointing": {"load_model": False}}
    config.num_devices = 1
    config.script = "ff_ppo" + "_continuous" * continuous
    for name, value in options.items():
        OmegaConf.update(config, name, value)
    return config


def stoix_curve(path, options, seeds):
    """Environment steps [U] and mean returns of its evaluations [U, S]."""
    config = stoix_config(path, options)
    module = stoix_module(path, config)
    from stoix.evaluator import evaluator_setup, get_distribution_act_fn

    evaluations = config.arch.num_evaluation
    with contextlib.redirect_stdout(io.StringIO()):
        config = module.check_total_timesteps(config)
        if config.arch.num_updates < evaluations:  # which it refuses
            config.arch.num_evaluation = evaluations = config.arch.num_updates
            config = module.check_total_timesteps(config)
    env, eval_env = stoix_environments(config)
    learn, curves = None, []
    for seed in range(seeds):
        key, eval_key, *network_keys = jax.random.split(jax.random.PRNGKey(seed), 4)
        program, actor, state = module.learner_setup(env, (key, *network_keys), config)
        if learn is None:  # the others are the same
            learn, act = program, get_distribution_act_fn(config, actor.apply)
            params = state.params.actor_params
            evaluate, *_ = evaluator_setup(eval_env, eval_key, act, params, config)
        returns = []
        for key in jax.random.split(eval_key, evaluations):
            state = learn(state).learner_state
            params = module.unreplicate_batch_dim(state.params.actor_params)
            metrics = evaluate(params, key[None], None).episode_metrics
            returns.append(float(metrics["episode_return"].mean()))
        curves.append(returns)
    interval = config.arch.num_updates_per_eval * config.system.rollout_length
    steps = config.arch.num_envs * interval * np.arange(1, evaluations + 1)
    return steps, np.transpose(curves)


def stoix_program(module, env, config, updates):
    """Returns the seconds to compile, and a call that makes `updates` updates."""
    config.arch.num_updates = config.arch.num_updates_per_eval = updates
    learn, _, state = module.learner_setup(env, jax.random.split(jax.random.PRNGKey(0), 3), config)
    start = time.perf_counter()
    program = learn.lower(state).compile()
    seconds = time.perf_counter() - start
    return seconds, lambda: jax.block_until_ready(program(state))


def stoix_clock(path, words):
    config = stoix_config(path, parse(words))
    module = stoix_module(path, config)
    with contextlib.redirect_stdout(io.StringIO()):
        config = module.check_total_timesteps(config)
    env, _ = stoix_environments(config)
    batch = config.arch.num_envs * config.system.rollout_length
    return clock(lambda steps: stoix_program(module, env, config, steps // batch), batch)


def stoix(path, script, options, steps_per_call, calls):
    name = "breakout" if "env_id" in options else "cartpole"
    settings = {"env": f"gymnax/{name}", "system.num_minibatches": options["num_minibatches"]}
    config = stoix_config(path, settings)
    module = stoix_module(path, config)
    env, _ = stoix_environments(config)
    config.arch.num_envs = options["num_envs"]
    for network in (config.network.actor_network, config.network.critic_network):
        network.pre_torso.update({"layer_sizes": [64, 64], "activation": "tanh"})
    batch = options["num_envs"] * options["num_steps"]
    updates = max(1, steps_per_call // batch)
    seconds, call = stoix_program(module, env, config, updates)
    return seconds, updates * batch, timed_calls(call, calls)


def cleanrl_script(path):
    """A function that runs its `ppo.py` from the first to the last line.

    It takes the options and a function that gets what the script would write. Where actions are
    continuous, it runs `ppo_continuous_action.py`.
    """
    import gymnasium

    class Envs(gymnasium.vector.SyncVectorEnv):
        """Resets in the same step, and `final_info` in a list, as gymnasium 0.29 did."""

        def __init__(self, functions):
            mode = gymnasium.vector.AutoresetMode.SAME_STEP
            super().__init__(functions, autoreset_mode=mode)

        def step(self, actions):
            *transition, infos = super().step(actions)
            if "final_info" in infos:
                episodes = infos["final_info"]["episode"]
                infos["final_info"] = [
                    {"episode": {name: episodes[name][i] for name in "rl"}} if ended else None
                    for i, ended in enumerate(infos["_final_info"])
                ]
            return *transition, infos

    gymnasium.vector.SyncVectorEnv = Envs
    transform = gymnasium.wrappers.TransformObservation  # now takes the space of observations too
    gymnasium.wrappers.TransformObservation = lambda env, function: transform(
        env, function, env.observation_space
    )

    def run(options, write):
        writer = types.SimpleNamespace(
            add_text=lambda *_: None, add_scalar=write, close=lambda: None
        )
        tensorboard = types.SimpleNamespace(SummaryWriter=lambda folder: writer)
        sys.modules["torch.utils.tensorboard"] = tensorboard
        words = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
        sys.argv = ["ppo", *words]
        with contextlib.redirect_stdout(io.StringIO()):
            continuous = is_continuous(options.get("env_id", "CartPole-v1"))
            name = "ppo_continuous_action" if continuous else "ppo"
            runpy.run_path(f"{path}/cleanrl/{name}.py", run_name="__main__")

    return run


def cleanrl_curve(path, options, seeds):
    """Environment steps [U] and mean training returns [U, S]; NaN if no episode ended."""
    run = cleanrl_script(path)
    curves = []
    for seed in range(FIRST_SEED + 1, FIRST_SEED + 1 + seeds):  # its default is 1
        updates, episodes = [], []

        def write(name, value, step, updates=updates, episodes=episodes):
            if name == "charts/episodic_return":
                episodes.append((len(updates), value))
            if name == "charts/SPS":  # the last of an update
                updates.append(step)

        run({**options, "seed": seed}, write)
        update, returns = np.array(episodes).T
        update = update.astype(int)
        total = np.bincount(update, returns, minlength=len(updates))
        count = np.bincount(update, minlength=len(updates))
        curves.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    return np.array(updates), np.stack(curves, axis=1)


def cleanrl_seconds(path, options, steps_per_call, calls):
    """Seconds of each call, which are parts of a single run; its beginning warms up."""
    ends = []

    def write(name, value, step):
        if name == "charts/SPS" and step % steps_per_call == 0:
            ends.append(time.perf_counter())

    run = cleanrl_script(path)
    run({**options, "total_timesteps": (calls + 1) * steps_per_call}, write)
    return list(np.diff(ends))


def cleanrl_clock(path, words):
    steps = 40 * 4 * 128  # updates, environments, steps of its defaults
    return 0.0, steps, cleanrl_seconds(path, parse(words), steps, 3)


def cleanrl(path, script, options, steps_per_call, calls):
    batch = options["num_envs"] * options["num_steps"]
    steps = max(1, steps_per_call // 20 // batch) * batch  # since it is slow
    sizes = ("num_envs", "num_steps", "update_epochs", "num_minibatches")
    return 0.0, steps, cleanrl_seconds(path, {x: options[x] for x in sizes}, steps, calls)


def jaxmarl_trainer(path, options):
    """The training of one of its scripts, with its defaults but for `options`, and its settings.

    The option SCRIPT names the script: one of the keys below.
    """
    import wandb
    import yaml

    configs = {
        "ippo_ff_mpe": "IPPO/config/ippo_ff_mpe.yaml",
        "ippo_rnn_mpe": "IPPO/config/ippo_rnn_mpe.yaml",
        "ippo_rnn_smax": "IPPO/config/ippo_rnn_smax.yaml",
        "mappo_rnn_mpe": "MAPPO/config/mappo_homogenous_rnn_mpe.yaml",
        "mappo_rnn_smax": "MAPPO/config/mappo_homogenous_rnn_smax.yaml",
    }
    options = dict(options)
    script = options.pop("SCRIPT", "ippo_ff_mpe")
    sys.path.insert(0, f"{path}/baselines/{configs[script].split('/')[0]}")
    module = importlib.import_module(script)
    wandb.log = lambda *_: None  # its callback after every update still runs
    with open(f"{path}/baselines/{configs[script]}") as file:
        config = yaml.safe_load(file)
    # PyYAML reads its 1e7 and 5e-4 as strings.
    config = {k: parse([f"{k}={v}"])[k] if isinstance(v, str) else v for k, v in config.items()}
    config |= options
    return module.make_train(config), config


def jaxmarl_curve(path, options, seeds):
    """Environment steps [U] and mean training returns of the team, or SMAX's win rates, [U, S].

    Its log has the return of an agent multiplied by their number: the mean over agents is the sum.
    """
    import wandb

    train, config = jaxmarl_trainer(path, options)
    if options.get("SCRIPT", "ippo_ff_mpe") == "ippo_ff_mpe":
        keys = jax.random.split(jax.random.PRNGKey(0), seeds)
        metrics = jax.jit(jax.vmap(train))(keys)["metrics"]
        returns = np.asarray(metrics["returned_episode_returns"]).T  # [U, S]
        steps = config["NUM_ENVS"] * config["NUM_STEPS"] * np.arange(1, len(returns) + 1)
        return steps[1:], returns[1:]  # before the first episode has ended it logs 0
    # The other scripts return no metrics: what they log is caught, one seed after another.
    train, curves = jax.jit(train), []
    name = "win_rate" if options["SCRIPT"].endswith("smax") else "returns"
    for seed in range(seeds):
        rows = []
        wandb.log = lambda row, rows=rows: rows.append((int(row["env_step"]), float(row[name])))
        jax.block_until_ready(train(jax.random.PRNGKey(FIRST_SEED + seed)))
        jax.effects_barrier()
        curves.append(sorted(rows))  # unordered callbacks
    steps, values = np.array(curves).transpose(2, 1, 0)  # [U, S]
    return steps[:, 0], values


def jaxmarl_clock(path, words):
    options = parse(words)
    train = lambda steps: jaxmarl_trainer(path, {**options, "TOTAL_TIMESTEPS": steps})[0]
    config = jaxmarl_trainer(path, options)[1]
    program = lambda steps: compiled(train(steps), jax.random.PRNGKey(0))
    return clock(program, config["NUM_ENVS"] * config["NUM_STEPS"])


def jaxmarl(path, script, options, steps_per_call, calls, **more):
    sizes = {name.upper(): options[name] for name in ("num_envs", "num_steps", "num_minibatches")}
    names = {"ippo": "ippo_ff_mpe", "ippo_rnn": "ippo_rnn_mpe", "mappo": "mappo_rnn_mpe"}
    sizes |= {"SCRIPT": names[script], **more}
    batch = options["num_envs"] * options["num_steps"]
    steps = max(1, steps_per_call // batch) * batch
    train, _ = jaxmarl_trainer(path, {**sizes, "TOTAL_TIMESTEPS": steps})
    seconds, call = compiled(train, jax.random.PRNGKey(0))
    return seconds, steps, timed_calls(call, calls)


def jaxmarl_same_networks(path, script, options, steps_per_call, calls):
    """The same with the networks of ippo_rnn.py and mappo.py: separate actor and critic."""
    import distrax
    import flax.linen as nn

    folder, name = {"ippo_rnn": ("IPPO", "ippo_rnn_mpe"), "mappo": ("MAPPO", "mappo_rnn_mpe")}[
        script
    ]
    sys.path.insert(0, f"{path}/baselines/{folder}")
    module = importlib.import_module(name)

    class Part(nn.Module):
        size: int

        @nn.compact
        def __call__(self, hidden, obs, reset):
            x = nn.tanh(nn.Dense(hidden.shape[-1])(obs))
            hidden, x = module.ScannedRNN()(hidden, (x, reset))
            return hidden, nn.Dense(self.size)(x)

    class ActorRNN(nn.Module):
        action_dim: int
        config: dict

        @nn.compact
        def __call__(self, hidden, x):
            hidden, logits = Part(self.action_dim)(hidden, *x)
            return hidden, distrax.Categorical(logits=logits)

    class CriticRNN(nn.Module):
        config: dict

        @nn.compact
        def __call__(self, hidden, x):
            hidden, value = Part(1)(hidden, *x)
            return hidden, value.squeeze(-1)

    class ActorCriticRNN(nn.Module):  # whose hidden state is that of both
        action_dim: int
        config: dict

        @nn.compact
        def __call__(self, hidden, x):
            actor_hidden, critic_hidden = jax.numpy.split(hidden, 2, -1)
            actor_hidden, policy = ActorRNN(self.action_dim, self.config)(actor_hidden, x)
            critic_hidden, value = CriticRNN(self.config)(critic_hidden, x)
            return jax.numpy.concatenate([actor_hidden, critic_hidden], -1), policy, value

    module.ActorRNN, module.CriticRNN = ActorRNN, CriticRNN
    module.ActorCriticRNN = ActorCriticRNN
    size = options["hidden_size"] * (2 if script == "ippo_rnn" else 1)
    return jaxmarl(path, script, options, steps_per_call, calls, GRU_HIDDEN_DIM=size)


def xland_module(path, name="train_single_task"):
    """One of its trainers, with Python 3.11 and without pyrallis."""
    import xminigrid  # noqa: F401  before the patch below

    sys.path.insert(0, f"{path}/training")
    sys.modules["pyrallis"] = types.SimpleNamespace(wrap=lambda: lambda function: function)
    # Its dataclass has arrays as defaults, which Python refuses from 3.11 on.
    asarray, jax.numpy.asarray = jax.numpy.asarray, np.float32
    module = importlib.import_module(name)
    jax.numpy.asarray = asarray
    return module


def faster_on_cpu(linen):
    """flax.linen with a Conv and an Embed that are products of matrices.

    They have the parameters of flax's, and its results up to rounding.
    """
    jnp = jax.numpy

    class Conv(linen.Module):
        """A VALID 2 x 2 convolution."""

        features: int
        kernel_size: tuple
        padding: str
        kernel_init: Callable
        dtype: Any
        param_dtype: Any

        @linen.compact
        def __call__(self, x):
            shape = (2, 2, x.shape[-1], self.features)
            kernel = self.param("kernel", self.kernel_init, shape)
            bias = self.param("bias", linen.initializers.zeros, (self.features,))
            rows, columns = x.shape[-3] - 1, x.shape[-2] - 1
            parts = [x[..., i : rows + i, j : columns + j, :] for i in (0, 1) for j in (0, 1)]
            return jnp.concatenate(parts, -1) @ kernel.reshape(-1, self.features) + bias

    class Embed(linen.Embed):
        def __call__(self, x):
            return jax.nn.one_hot(x, self.num_embeddings) @ self.embedding

    return types.SimpleNamespace(**{**vars(linen), "Conv": Conv, "Embed": Embed})


def xland_program(module, config):
    """Returns the seconds to compile, and a call that trains and waits for its result."""
    from flax.jax_utils import replicate

    key, env, env_params, hidden, train_state = module.make_states(config)
    args = (
        jax.random.split(key, 1),
        *(replicate(x, jax.local_devices()) for x in (train_state, hidden)),
    )
    start = time.perf_counter()
    program = module.make_train(env, env_params, config).lower(*args).compile()
    seconds = time.perf_counter() - start
    return seconds, lambda: jax.block_until_ready(program(*args))


def xland_curve(path, options, seeds):
    """Environment steps [U] and mean returns of its evaluations after every update [U, S]."""
    module = xland_module(path)
    network = sys.modules["nn"]
    network.nn = faster_on_cpu(network.nn)
    returns = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        config = module.TrainConfig(**options, seed=seed)
        _, call = xland_program(module, config)
        returns.append(np.asarray(call()["loss_info"]["eval/returns"][0]))  # [U] of one device
    batch = config.num_envs * config.num_steps
    return batch * np.arange(1, len(returns[0]) + 1), np.stack(returns, axis=1)


def xland_clock(path, words):
    """Without evaluation."""
    module, options = xland_module(path), parse(words)
    module.rollout = lambda *_: Evaluation(jax.numpy.zeros(()), jax.numpy.zeros(()))
    config = lambda steps: module.TrainConfig(**{**options, "total_timesteps": steps})
    program = lambda steps: xland_program(module, config(steps))
    return clock(program, options["num_envs"] * options["num_steps"], least=1)


def xland_single_program(path, options, steps):
    """A training of so many steps, without evaluation; options are those of its TrainConfig."""
    module = xland_module(path)
    module.rollout = lambda *_: Evaluation(jax.numpy.zeros(()), jax.numpy.zeros(()))
    batch = options["num_envs"] * options["num_steps"]
    steps = max(1, steps // batch) * batch
    config = module.TrainConfig(**options, total_timesteps=steps, eval_episodes=1)
    seconds, call = xland_program(module, config)
    return seconds, steps, call


def xland(path, script, options, steps_per_call, calls):
    module = xland_module(path)
    batch = options["num_envs"] * options["num_steps"]
    steps = max(1, steps_per_call // 20 // batch) * batch  # since it is slow
    config = module.TrainConfig(
        num_envs=options["num_envs"],
        num_steps=options["num_steps"],
        num_minibatches=options["num_minibatches"],
        obs_emb_dim=16,  # its default
        rnn_hidden_dim=64,
        head_hidden_dim=64,
        total_timesteps=steps,
        eval_episodes=1,
    )
    no_evaluation = Evaluation(jax.numpy.zeros(()), jax.numpy.zeros(()))
    module.rollout = lambda *_: no_evaluation
    seconds, call = xland_program(module, config)
    return seconds, steps, timed_calls(call, calls)


def xland_meta(path, script, options, steps_per_call, calls):
    """`train_meta_task.py` without evaluation; a trial is as long as an update."""
    import xminigrid
    from flax.jax_utils import replicate

    module = xland_module(path, "train_meta_task")
    tasks = xminigrid.benchmarks.load_benchmark_from_path(options["benchmark_id"])
    xminigrid.load_benchmark = lambda _: tasks
    no_evaluation = Evaluation(jax.numpy.zeros(1), jax.numpy.zeros(1))
    module.rollout = lambda *_: no_evaluation
    batch = options["num_envs"] * options["num_steps"]
    steps = max(1, steps_per_call // 20 // batch) * batch  # since it is slow
    config = module.TrainConfig(
        env_id=options["env_id"],
        num_envs=options["num_envs"],
        num_steps_per_env=options["num_steps"],
        num_steps_per_update=options["num_steps"],
        num_minibatches=options["num_minibatches"],
        update_epochs=options["update_epochs"],
        obs_emb_dim=16,  # its default
        rnn_hidden_dim=64,
        head_hidden_dim=64,
        total_timesteps=steps,
        eval_num_envs=1,
    )
    key, env, env_params, tasks, hidden, train_state = module.make_states(config)
    states = (replicate(x, jax.local_devices()) for x in (train_state, hidden))
    args = (jax.random.split(key, 1), *states)
    start = time.perf_counter()
    program = module.make_train(env, env_params, tasks, config).lower(*args).compile()
    seconds = time.perf_counter() - start
    return seconds, steps, timed_calls(lambda: jax.block_until_ready(program(*args)), calls)


def main():
    """Tuning: prints the final return of each seed, on keys that the results do not use."""
    parser = argparse.ArgumentParser(description="Final training returns or evaluations of a peer.")
    names = [name.removesuffix("_curve") for name in globals() if name.endswith("_curve")]
    parser.add_argument("peer", choices=names)
    parser.add_argument("folder", help="its checkout")
    parser.add_argument("seeds", type=int, help="number of seeds, from 100 on (cleanrl: from 101)")
    parser.add_argument(
        "options", nargs="*", metavar="NAME=VALUE", help="as in its learning curves"
    )
    args = parser.parse_args()
    # As in learning.py.
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    global FIRST_SEED
    FIRST_SEED, key = 100, jax.random.PRNGKey
    jax.random.PRNGKey = lambda seed: key(seed + FIRST_SEED)
    curve = globals()[f"{args.peer}_curve"]
    steps, returns = curve(args.folder, parse(args.options), args.seeds)
    final = np.nanmean(returns[steps > 0.95 * steps[-1]], axis=0)
    print(*args.options, f"{final.mean():.4g} ± {final.std():.3g}", np.round(final, 3))


if __name__ == "__main__":
    main()
