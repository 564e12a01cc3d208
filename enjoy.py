"""Play the policies of a run: their returns in new full episodes, and a video.

    python enjoy.py runs/my_run                   # the absolute metric, written to summary.json
    python enjoy.py runs/my_run --episodes 100 --checkpoint last --greedy --video out.gif
    python enjoy.py runs/my_run --json > out.json # the same numbers, to be read by a program
    python enjoy.py runs/my_run --against runs/b  # two runs play the two sides of a game

All seeds play, each --episodes times. Printed are the mean return and length with its 95 %
interval, the median, the least and the greatest; also for each agent of a team, and for each
episode of a trial. In Python, load_policy(run_dir) is the policy as a function.

--against is for runs of ippo.py, ippo_rnn.py and mappo.py on one environment with two sides: agents
of two kinds, such as adversary_0, adversary_1 and agent_0, or exactly two agents. Each run plays
each side. Seed i of one run meets seed i of the other; the run with fewer seeds starts over.

The absolute metric is the return of the best parameters over ten times as many new episodes as an
evaluation has by default (Gorsane et al. 2022, arXiv 2209.10485): 1280 for each seed. Choosing the
best of several evaluations makes their own returns too high. It is written if all seeds play, the
best parameters at least 1280 episodes each, with actions chosen as in the run.

The program is the source in the run folder: it plays what was trained, after the script has
changed, moved or gone, too. Loading it runs it, so play only runs that you trust.

Videos: .gif and .mp4 of gymnax, xminigrid, Brax and the environments of ippo.py (rings; MPE,
coin_game, overcooked and SMAX of JaxMARL), .html of Brax (its viewer, which loads code from the
internet). A video shows every state of an episode. A .gif holds the final one for a second. In a
trial of ppo_meta.py, tiles that pay have a golden frame.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent
FAMILIES = ROOT / "environments"
sys.path.append(str(FAMILIES))  # its files import family.py
PAPER, INK, GRAY, RED, BLUE = "#f7f5f0", "#2b2d42", "#b8b5ad", "#e4572e", "#3d6cb9"
GOLD = "#ffc300"
PLANES = "#f4f1de #ffd166 #8d99ae #ef6f6c #4ecdc4 #c77dff #90be6d #f9a03f #577590 #ff99c8".split()
SIZE = (480, 320)  # of drawings; ffmpeg wants multiples of 16
EPISODES = 1280  # of the absolute metric
FPS = {"CartPole-v1": 50, "Pendulum-v1": 20}  # real time
FFMPEG = ("imageio", "imageio_ffmpeg")  # packages that write .mp4
HOLD = 1000  # ms that a .gif holds the end of an episode


class RunError(Exception):
    """A wrong input, and what to change."""


# ----------------------------------------- replay
def load_source(run_dir: Path, script: str) -> ModuleType:
    """The source that ran, from the run folder; without one, this repository's script."""
    folders = (run_dir, ROOT, FAMILIES)
    path = next((x for x in folders if (x / f"{script}.py").exists()), None)
    if path is None or Path(script).name != script:
        message = f"the script {script!r} of config.json is neither in {run_dir} nor in {ROOT}"
        raise RunError(message)
    path = path / f"{script}.py"
    module = ModuleType(script)
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec"), vars(module))  # leaves no __pycache__
    module = getattr(module, "script", module)  # a file of environments/ names the one that it runs
    if not hasattr(getattr(module, "TrainState", None), "best_params"):
        raise RunError(f"{path} trains no policy")
    return module


@contextlib.contextmanager
def stdout_to_stderr():
    """JaxMARL prints on import, and with Brax it sets sys.stdout to sys.__stdout__ before."""
    before = sys.stdout, sys.__stdout__
    sys.stdout = sys.__stdout__ = sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.__stdout__ = before


def load_run(run_dir: Path, checkpoint: str = "best", seed_index: int | None = None) -> tuple:
    """Returns (the script's module, its Config, params [S, ...], or [...] of one seed).

    Raises RunError.
    """
    about, path = run_dir / "config.json", run_dir / "checkpoint.msgpack"
    try:
        options = json.loads(about.read_text())
        script, num_seeds = options["script"], options["num_seeds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run_dir} is no run: {about} is missing or damaged: {error!r}") from None
    if seed_index is not None and not 0 <= seed_index < num_seeds:
        raise RunError(f"seed-index = {seed_index}: {run_dir} has {num_seeds} seed(s), from 0")
    module = load_source(run_dir, str(script))
    devices = jax.local_device_count()
    try:
        config = module.Config(**{k: v for k, v in options.items() if k != "script"})
        # Fits any number of devices; the policy does not depend on it.
        config = dataclasses.replace(config, num_envs=config.num_envs * devices)
        with stdout_to_stderr():
            init, *_ = module.make_train(config)
    except (module.ConfigError, TypeError) as error:
        raise RunError(f"{about}: {error}") from None
    expected = jax.eval_shape(init, jax.random.split(jax.random.PRNGKey(0), devices)).params
    name = {"best": "best_params", "last": "params"}[checkpoint]
    try:
        params = flax.serialization.msgpack_restore(path.read_bytes())[name]
        params = flax.serialization.from_state_dict(expected, params)  # [D, S, ...]
        params = jax.tree.map(lambda x: x[0], params)
    except FileNotFoundError:
        raise RunError(f"{path} is missing: the run has not been evaluated yet") from None
    except Exception as error:
        raise RunError(f"{path} is damaged or no checkpoint of {script}: {error!r}") from None
    if any(jax.tree.leaves(jax.tree.map(lambda x, y: x.shape != y.shape[1:], params, expected))):
        raise RunError(f"{path} has parameters of other shapes than those of {about}")
    if seed_index is not None:
        params = jax.tree.map(lambda x: x[seed_index], params)
    return module, config, params


def get_parts(module: ModuleType, config) -> tuple[Callable, dict[str, Any]]:
    """The script's play_episode(params, key), out of make_train, and the functions it calls."""
    *_, train_seed = module.make_train(config)
    evaluate = inspect.getclosurevars(train_seed).nonlocals["evaluate"]
    parts = inspect.getclosurevars(evaluate).nonlocals
    play_episode = parts.get("play_episode") or parts["play_trial"]
    return play_episode, inspect.getclosurevars(play_episode).nonlocals


class Played(NamedTuple):
    """Full episodes, or trials."""

    # K: agents of ippo.py, episodes of a trial of ppo_meta.py, otherwise 1.
    returns: jax.Array  # [..., K]
    length: jax.Array  # [...]
    info: dict = {}  # of matches: scalars [...] of the environment at the end


def get_play(module: ModuleType, config) -> Callable:
    """(params, key) -> Played, of an episode or trial as the script's evaluation plays it."""
    play_episode, _ = get_parts(module, config)

    def play_one(params, key):
        runner = play_episode(params, key)
        if hasattr(runner, "trial_return"):
            return Played(runner.returns, runner.trial_length)
        return Played(jnp.atleast_1d(runner.episode_return), runner.episode_length.mean())

    return play_one


def get_episode(module: ModuleType, config) -> Callable:
    """(params, key) -> return of an episode: the sum over agents, or over a trial."""
    play_one = get_play(module, config)
    return lambda params, key: play_one(params, key).returns.sum()


def zeros_of(function: Callable, *args) -> Any:
    """What the function returns, but of zeros."""
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def make_policy(module: ModuleType, config) -> tuple[Callable, Callable]:
    """The script's policy without its environment. Returns start, act.

    start(key) -> runner, reset_key
    act(params, runner, obs, first) -> runner, action, step_key

    The keys are those with which the script would reset and step the environment.
    """
    make_env, calls = module.make_env, []

    def make_outside_env(config):
        """An environment that is elsewhere: it keeps its arguments and knows nothing else."""
        reset, step, *rest = make_env(config)

        def outside_reset(key, *args):
            calls.append(key)
            return zeros_of(lambda key: reset(key, *args), key)

        def outside_step(key, env_state, action):
            calls.append((action, key))
            return zeros_of(step, key, env_state, action)

        return outside_reset, outside_step, *rest

    try:
        module.make_env = make_outside_env
        _, parts = get_parts(module, config)
    finally:
        module.make_env = make_env
    start_episode, policy = parts.get("start_episode") or parts.get("start_trial"), parts.get("act")
    if policy is None:  # disco.py, where they are functions of the module
        start_episode = partial(module.start_episode, parts["env_reset"])
        policy = partial(module.act, parts["network"], parts["env_step"])

    def start(key):
        return start_episode(key), calls.pop()

    def act(params, runner, obs, first):
        runner = runner._replace(obs=obs, done=jnp.zeros_like(runner.done) | first)
        runner, _ = policy(params, runner, config.eval_greedy)
        return runner, *calls.pop()

    return start, act


def load_policy(
    run_dir: str | Path,
    seed_index: int = 0,
    greedy: bool | None = None,
    checkpoint: str = "best",
) -> Callable:
    """The policy of a run as a function of NumPy arrays, for any program.

    seed_index: which of the run's agents, from 0. greedy: take the likeliest action instead of a
    sample; by default as in the run's evaluations. checkpoint: "best" parameters by evaluation, or
    the "last". Raises RunError.

    Returns act(obs, key=None, first=False) -> action.

    obs: what `reset` and `step` in the script's make_env return, without a leading axis. Where
    that is a NamedTuple (ppo_rnn.py, ppo_meta.py, ippo.py), a dictionary of its fields will do. It
    holds all agents of ippo.py, [K, ...], and so does the action.
    key: of jax.random, for the sample. Without it, act draws its own, from seed 0.
    first: this obs is the first of an episode (of ppo_meta.py: of a trial), so a policy with
    memory forgets the calls before.
    action: what `step` takes; continuous actions are in [-1, 1] (ippo.py: clip them).
    act raises ValueError if obs has other shapes than in the run.
    """
    module, config, params = load_run(Path(run_dir), checkpoint, seed_index)
    if greedy is not None:
        config = dataclasses.replace(config, eval_greedy=greedy)
    params = jax.device_put(params)  # under vmap, JAX's custom_vjp refuses constants of NumPy
    start, policy = make_policy(module, config)
    runner, _ = start(jax.random.PRNGKey(0))
    expected, structure = jax.tree.flatten(runner.obs)

    @jax.jit
    def step(runner, obs, first):
        runner, action, _ = policy(params, runner, obs, first)
        return runner, action

    def act(obs, key=None, first=False):
        nonlocal runner
        if isinstance(obs, dict):
            obs = type(runner.obs)(**obs)
        is_array = jax.tree_util.treedef_is_leaf(structure)  # then obs may be a list of numbers
        leaves = [obs] if is_array else jax.tree.leaves(obs)
        shapes, in_run = ([list(np.shape(x)) for x in tree] for tree in (leaves, expected))
        if shapes != in_run:
            raise ValueError(f"the observation has shapes {shapes}, in the run {in_run}")
        leaves = [np.asarray(x, y.dtype) for x, y in zip(leaves, expected, strict=True)]
        if key is not None:
            runner = runner._replace(key=key)
        runner, action = step(runner, structure.unflatten(leaves), first)
        return np.asarray(action)

    return act


def play(module: ModuleType, config, params: Any, keys: jax.Array) -> Played:
    """Episodes of NumPy arrays [S, E, ...], one for each key [S, E], all seeds in one program."""
    return play_all(get_play(module, config), params, keys)


def play_all(play_one: Callable, params: Any, keys: jax.Array) -> Played:
    """play_one(params, key) for params [S, ...] and keys [S, E]."""
    # Not a vmap over seeds: nobody waits for the longest episode of another seed.
    seed = lambda x: jax.vmap(play_one, (None, 0))(*x)
    return jax.tree.map(np.asarray, jax.jit(lambda *x: jax.lax.map(seed, x))(params, keys))


class Step(NamedTuple):
    """A step of the environment, before it resets."""

    key: jax.Array
    env_state: Any  # before the step
    action: jax.Array  # of many agents [K, ...]
    reward: jax.Array  # of many agents [K]


def make_recorder(module: ModuleType, config) -> Callable:
    """(params, key) -> the Steps of one episode, or one trial of ppo_meta.py."""
    steps, make_env = [], module.make_env

    def make_recorded_env(config):
        reset, env_step, *rest = make_env(config)

        def recorded_step(key, env_state, action):
            outcome = env_step(key, env_state, action)
            step = Step(key, env_state, action, reward=outcome[2])
            jax.experimental.io_callback(steps.append, None, step, ordered=True)
            return outcome

        return reset, recorded_step, *rest

    try:
        module.make_env = make_recorded_env
        episode = jax.jit(get_episode(module, config))
    finally:
        module.make_env = make_env

    def record_one(params, key) -> list[Step]:
        steps.clear()
        jax.block_until_ready(episode(params, key))
        jax.effects_barrier()
        return jax.tree.map(np.asarray, steps)

    return record_one


def record(module: ModuleType, config, params, key) -> list[Step]:
    """The Steps of one episode, or one trial of ppo_meta.py."""
    return make_recorder(module, config)(params, key)


# ----------------------------------------- match
def find_sides(names: tuple) -> dict[str, list[int]]:
    """Side -> where its agents are in `names`. Raises RunError."""
    names = [str(name) for name in names]
    sides = {}
    for k, name in enumerate(names):
        sides.setdefault(re.sub(r"_?\d+$", "", name), []).append(k)
    if len(sides) == 2:
        return sides
    if len(names) == 2:
        return {name: [k] for k, name in enumerate(names)}
    raise RunError(f"--against needs two sides, here the agents are {', '.join(names)}")


def find_game(run_dirs: list[Path], loaded: list[tuple]) -> dict[str, list[int]]:
    """The sides of the one environment of several runs. Raises RunError."""
    games = []
    for run_dir, (module, config, _) in zip(run_dirs, loaded, strict=True):
        _, _, names, *_ = module.make_env(config)
        if not isinstance(names, tuple):
            raise RunError(f"{run_dir} is of {module.SCRIPT}, a script for single agents: no sides")
        games.append((config.env_id, json.loads(config.env_params)))
    if games[0] != games[1]:
        plays = (f"{x} plays {' '.join(map(str, y))}" for x, y in zip(run_dirs, games, strict=True))
        raise RunError(f"--against needs one environment, but {' and '.join(plays)}")
    return find_sides(names)


class Match(NamedTuple):
    """What an episode between two runs carries from step to step."""

    runners: tuple  # one for each run
    obs: tuple  # as each run sees it
    env_state: list  # the leaves
    over: jax.Array  # [K] the agent is done
    returns: jax.Array  # [K] so far
    length: jax.Array
    info: dict  # scalars of the environment at the last step


def get_match(runs: list[tuple]) -> Callable:
    """(params, key) -> Played, of an episode between two runs; a run is (module, config).

    params: the parameters of each run, and the agents that the first one plays, bool [K].
    """
    policies = [make_policy(*run) for run in runs]
    resets, steps, *_ = zip(*(module.make_env(config) for module, config in runs), strict=True)

    def play_one(params, key):
        *params, is_first = params
        # Both runs get the same key, and each agent takes its row of the noise from one of them: a
        # run against itself plays the episodes of its own evaluation.
        runners, reset_keys = zip(*(start(key) for start, _ in policies), strict=True)
        obs, env_states = zip(*(reset(reset_keys[0]) for reset in resets), strict=True)
        # The same state to both, of which each script may have classes of its own.
        structures = [jax.tree.structure(x) for x in env_states]

        def advance(match: Match):
            players = zip(policies, params, match.runners, match.obs, strict=True)
            acted = [act(*player, False) for (_, act), *player in players]
            runners, actions, step_keys = zip(*acted, strict=True)
            mine = is_first.reshape(-1, *[1] * (actions[0].ndim - 1))
            action = jnp.where(mine, *actions)
            # Both make the same step, each to see the next state in its own way.
            worlds = [structure.unflatten(match.env_state) for structure in structures]
            pairs = zip(steps, worlds, strict=True)
            outcomes = [step(step_keys[0], world, action) for step, world in pairs]
            _, env_state, reward, terminated, truncated, _, *info = outcomes[0]
            return Match(
                runners=runners,
                obs=tuple(outcome[0] for outcome in outcomes),
                env_state=jax.tree.leaves(env_state),
                over=match.over | terminated | truncated,
                returns=match.returns + reward,
                length=match.length + 1,
                info=info[0] if info else {},
            )

        match = Match(
            runners=runners,
            obs=obs,
            env_state=jax.tree.leaves(env_states[0]),
            over=jnp.zeros_like(is_first),
            returns=jnp.zeros(is_first.shape, jnp.float32),
            length=jnp.float32(0),
            info={},
        )
        match = match._replace(info=zeros_of(advance, match).info)
        match = jax.lax.while_loop(lambda match: ~match.over.all(), advance, match)
        return Played(match.returns, match.length, match.info)

    return play_one


def play_match(runs: list[tuple], params: list, sides: dict[str, list[int]], keys) -> Played:
    """Episodes between two runs of NumPy arrays [2, S, E, ...], for params [S, ...], keys [S, E].

    In the first half the first run plays the first side, in the second half the second side.
    """
    first, second = sides.values()
    is_first = np.isin(np.arange(len(first + second)), first)  # [K]
    twice = lambda tree: jax.tree.map(lambda x: jnp.concatenate([x, x]), tree)
    who = np.repeat([is_first, ~is_first], len(keys), axis=0)  # [2 S, K]
    played = play_all(get_match(runs), (*twice(params), who), twice(keys))
    return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), played)


# ----------------------------------------- video
class Viewer(NamedTuple):
    draw: Callable  # env_state -> [H, W, 3] uint8
    # key, env_state, action -> the next env_state. It does not reset, unlike the scripts' step,
    # and so gives the final state of an episode.
    advance: Callable
    fps: int
    label: Callable = lambda state: ""  # env_state -> a second line below the picture
    legend: str = ""  # behind the label
    unit: str = "episode"  # what is played from start to end
    # env_state before, env_state after a step -> whether an episode of a trial ended between them
    ended: Callable = lambda before, after: False


def make_viewer(config) -> Viewer:
    """Raises RunError if the environment has no picture."""
    if config.env_id.startswith("brax/"):
        return brax_viewer(config)
    if config.env_id.startswith(("MiniGrid-", "XLand-MiniGrid-")):
        is_trial = hasattr(config, "trial_episodes")
        return trial_viewer(config) if is_trial else xminigrid_viewer(config)
    import gymnax

    if config.env_id in gymnax.registered_envs or config.env_id.startswith("Catch-"):
        return gymnax_viewer(config)
    if hasattr(config, "share_parameters"):  # ippo.py
        return many_agents_viewer(config)
    raise RunError(f"no video of {config.env_id}: it has no Viewer here, leave out --video")


def gymnax_viewer(config) -> Viewer:
    import gymnax

    catch = re.fullmatch(r"Catch-(\d+)x(\d+)", config.env_id)  # of disco.py
    sizes = {"rows": int(catch[1]), "columns": int(catch[2])} if catch else {}
    env, params = gymnax.make("Catch-bsuite" if catch else config.env_id, **sizes)
    params = params.replace(**json.loads(config.env_params))
    space = env.action_space(params)
    has_planes = len(env.observation_space(params).shape) == 3 or env.name == "Catch-bsuite"
    if has_planes:
        draw = lambda state: planes(np.asarray(env.observe(state.time, state, None, params)))
    else:
        draw = find_drawing(env, config.env_id)

    def advance(key, state, action):
        if not hasattr(space, "n"):
            action = space.low + (space.high - space.low) * (action + 1) / 2
        return env.step_env(jax.random.split(key)[0], state, action, params)[1]

    return Viewer(draw, advance, FPS.get(config.env_id, 10 if has_planes else 30))


def load_xminigrid(config) -> tuple:
    import xminigrid

    env, params = xminigrid.make(config.env_id)
    return env, params.replace(**json.loads(config.env_params))


def xminigrid_viewer(config) -> Viewer:
    from xminigrid.rendering.rgb_render import render

    env, params = load_xminigrid(config)

    def draw(timestep):
        grid = timestep.state.grid
        tile = 16 * max(1, 448 // max(grid.shape) // 16)
        return render(grid, timestep.state.agent, params.view_size, tile)

    advance = lambda key, timestep, action: env.step(params, timestep, action)
    return Viewer(draw, advance, fps=6)


def trial_viewer(config) -> Viewer:
    """For ppo_meta.py: which episode of the trial it is, and what pays."""
    viewer, find_pay, found = xminigrid_viewer(config), pay_finder(config), {}

    def draw(env_state):
        timestep = env_state.timestep
        state, agent = timestep.state, timestep.state.agent
        task = (state.grid, agent.pocket, state.goal_encoding, state.rule_encoding, state.carry)
        task = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(task))
        if task not in found:
            found[task] = np.argwhere(find_pay(timestep))
        image = Image.fromarray(viewer.draw(timestep))
        tile = image.height // state.grid.shape[0]
        pen = ImageDraw.Draw(image)

        def frame(y, x, width):
            corner = (x * tile + tile - 1, y * tile + tile - 1)
            pen.rectangle((x * tile, y * tile, *corner), outline=GOLD, width=width)

        for y, x in found[task].tolist():
            frame(y, x, tile // 10)
        if timestep.reward > 0:
            frame(*np.asarray(agent.position).tolist(), tile // 5)
        return np.asarray(image)

    def label(env_state):
        reward = float(env_state.timestep.reward)
        paid = f"   paid {reward:.3g}" if reward > 0 else ""
        return f"trial episode {env_state.episode + 1}/{config.trial_episodes}{paid}"

    return Viewer(
        draw,
        lambda key, state, action: state._replace(
            timestep=viewer.advance(key, state.timestep, action)
        ),
        viewer.fps,
        label,
        legend="   gold: pays",
        unit="trial",
        ended=lambda before, after: before.episode != after.episode,
    )


def pay_finder(config) -> Callable:
    """timestep -> [H, W], where an agent is when its next action pays, found by trying them all."""
    from xminigrid.core.grid import check_walkable

    env, params = load_xminigrid(config)

    @jax.jit
    def find(timestep):
        state, agent = timestep.state, timestep.state.agent

        def attempt(cell, direction, action):
            there = agent.replace(position=cell, direction=direction)
            after = env.step(
                params, timestep.replace(state=state.replace(agent=there, step_num=0)), action
            )
            can_stand = check_walkable(state.grid, cell)
            return after.state.agent.position, can_stand & (after.reward > 0)

        height, width = state.grid.shape[:2]
        cells = jnp.indices((height, width), agent.position.dtype).reshape(2, -1).T
        directions = jnp.arange(4, dtype=agent.direction.dtype)
        actions = jnp.arange(env.num_actions(params), dtype=jnp.int32)
        for axes in ((None, None, 0), (None, 0, None), (0, None, None)):
            attempt = jax.vmap(attempt, axes)
        cell, pays = attempt(cells, directions, actions)  # [H * W, 4, actions]
        return jnp.zeros((height, width), int).at[cell[..., 0], cell[..., 1]].max(pays)

    return find


def brax_viewer(config) -> Viewer:
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders on a GPU without a screen
    import brax.envs
    from brax.io import image

    env = brax.envs.get_environment(config.env_id.removeprefix("brax/"))

    def draw(state):
        try:
            return image.render_array(env.sys, state.pipeline_state, *SIZE[::-1])
        except Exception as error:
            raise RunError(f"MuJoCo cannot draw here, use --video out.html: {error!r}") from None

    advance = lambda key, state, action: env.step(state, action)
    return Viewer(draw, advance, fps=round(1 / env.dt))


def many_agents_viewer(config) -> Viewer:
    import ippo

    try:
        env = ippo.load_env(config)
    except ippo.ConfigError as error:
        raise RunError(str(error)) from None
    if config.env_id.startswith("overcooked") and "v2" not in config.env_id:
        draw = partial(overcooked, env)
    else:
        draw = find_drawing(env, config.env_id)

    def to_env(space, action):
        if hasattr(space, "n"):
            return action
        unit = (jnp.clip(action[: space.shape[0]], -1.0, 1.0) + 1) / 2
        return space.low + (space.high - space.low) * unit

    def advance(key, env_state, action):
        actions = {n: to_env(env.action_space(n), action[k]) for k, n in enumerate(env.agents)}
        _, state, *_ = env.step_env(jax.random.split(key)[0], env_state[0], actions)
        return state, env_state[1]

    return Viewer(
        lambda x: draw(x[0]), advance, fps=5 if config.env_id in ("rings", "coin_game") else 10
    )


def overcooked(env: Any, state: Any) -> np.ndarray:
    from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer

    edge = env.agent_view_size - 1
    grid = np.asarray(state.maze_map)[edge:-edge, edge:-edge]
    agents = {"agent_dir_idx": state.agent_dir_idx, "agent_inv": state.agent_inv}
    return OvercookedVisualizer._render_grid(grid, tile_size=64, **agents)


def planes(obs: np.ndarray) -> np.ndarray:
    """A color for each plane of [H, W, C] or [H, W]; the first plane that is set is seen."""
    obs = obs.reshape(*obs.shape[:2], -1) > 0
    top = np.where(obs.any(axis=-1), obs.argmax(axis=-1), -1)  # [H, W]
    colors = [ImageDraw.ImageColor.getrgb(color) for color in (*PLANES, INK)]
    cell = 16 * max(1, 400 // max(top.shape) // 16)
    image = np.uint8(colors)[top].repeat(cell, axis=0).repeat(cell, axis=1)
    lines = np.arange(max(image.shape)) % cell == 0
    image[lines[: len(image)]] = image[:, lines[: image.shape[1]]] = (56, 58, 82)
    return image


def find_drawing(env, env_id: str) -> Callable:
    """state -> [H, W, 3] uint8. Raises RunError if nobody drew the environment."""
    drawing = next((DRAWINGS[name] for name in DRAWINGS if name in env_id), None)
    if drawing is None:
        raise RunError(f"no video of {env_id}: it has no picture, leave out --video")

    def draw(state):
        # Twice the size, scaled down: smooth edges.
        image = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), PAPER)
        drawing(ImageDraw.Draw(image), state, env)
        return np.asarray(image.resize(SIZE, Image.Resampling.LANCZOS))

    return draw


def disc(pen: ImageDraw.ImageDraw, center: tuple, radius: float, color: str) -> None:
    pen.circle(center, radius, fill=color)


def rod(pen: ImageDraw.ImageDraw, start: tuple, end: tuple, width: int, color: str) -> None:
    pen.line([start, end], fill=color, width=width)
    disc(pen, start, width / 2, color)
    disc(pen, end, width / 2, color)


def draw_cartpole(pen, state, env):
    x, y, angle = 480 + 180 * float(state.x), 440, float(state.theta)
    pen.line([(0, y + 44), (960, y + 44)], fill=GRAY, width=6)
    for wheel in (x - 44, x + 44):
        disc(pen, (wheel, y + 30), 16, INK)
    pen.rounded_rectangle((x - 80, y - 26, x + 80, y + 26), 12, fill=BLUE)
    rod(pen, (x, y - 20), (x + 300 * math.sin(angle), y - 20 - 300 * math.cos(angle)), 20, RED)
    disc(pen, (x, y - 20), 8, PAPER)


def draw_pendulum(pen, state, env):
    angle, torque = float(state.theta), float(np.squeeze(state.last_u))
    rod(pen, (480, 320), (480 - 230 * math.sin(angle), 320 - 230 * math.cos(angle)), 36, RED)
    disc(pen, (480, 320), 12, INK)
    # A positive torque turns left: the arc grows from the top in its direction.
    ends = sorted((-90, -90 - 60 * torque))
    pen.arc((420, 260, 540, 380), *ends, fill=BLUE, width=10)


def draw_acrobot(pen, state, env):
    angle, end, points = 0.0, (480, 320), [(480, 320)]
    for turn in (state.joint_angle1, state.joint_angle2):
        angle += float(turn)
        end = (end[0] + 140 * math.sin(angle), end[1] + 140 * math.cos(angle))
        points.append(end)
    pen.line([(0, 180), (960, 180)], fill=GRAY, width=6)  # the goal
    rod(pen, points[0], points[1], 26, BLUE)
    rod(pen, points[1], points[2], 26, RED)
    for joint in points[:2]:
        disc(pen, joint, 9, PAPER)


def draw_mountain_car(pen, state, env):
    place = lambda x: (480 + 520 * (x + 0.3), 560 - 420 * (0.45 * math.sin(3 * x) + 0.55))
    hill = [place(x) for x in np.linspace(-1.25, 0.65, 200)]
    pen.polygon([(0, 640), (0, hill[0][1]), *hill, (960, hill[-1][1]), (960, 640)], fill="#dcd8cc")
    x, y = place(env.default_params.goal_position)
    pen.line([(x, y), (x, y - 90)], fill=INK, width=6)
    pen.polygon([(x, y - 90), (x + 50, y - 72), (x, y - 54)], fill=BLUE)
    x, y = place(float(state.position))
    disc(pen, (x, y - 24), 24, RED)


def draw_rings(pen, state, env):
    """The goal is on top; the agent can walk either way around."""
    for k, distance in enumerate(np.asarray(state["distance"])):
        size, middle = 3 + k, (180 + 300 * k, 320)
        around = lambda cell, radius, size=size, middle=middle: (
            middle[0] + radius * math.sin(2 * math.pi * cell / size),
            middle[1] - radius * math.cos(2 * math.pi * cell / size),
        )
        pen.circle(middle, 100, outline=GRAY, width=8)
        for cell in range(size):
            disc(pen, around(cell, 100), 34, PAPER if cell else RED)
            pen.circle(around(cell, 100), 34, outline=GRAY if cell else RED, width=8)
        disc(pen, around(-distance, 100), 22, BLUE)


def draw_mpe(pen, state, env):
    """Agents blue, adversaries red, obstacles and landmarks in JaxMARL's own colors."""
    place = lambda x, y: (480 + 220 * x, 320 - 220 * y)
    pen.rectangle((*place(-1, 1), *place(1, -1)), outline="#e4e0d6", width=4)
    for i in np.argsort(-np.asarray(env.rad), kind="stable"):  # small ones on top
        color = "#{:02x}{:02x}{:02x}".format(*map(int, env.colour[i]))
        if i < env.num_agents:
            color = RED if "adversary" in env.agents[i] else BLUE
        disc(pen, place(*map(float, state.p_pos[i])), max(220 * float(env.rad[i]), 12), color)


def draw_coins(pen, state, env):
    cell = lambda pos: (250 + 180 * float(pos[1]) + 50, 50 + 180 * float(pos[0]) + 90)
    for line in range(4):
        pen.line([(210 + 180 * line, 50), (210 + 180 * line, 590)], fill=GRAY, width=4)
        pen.line([(210, 50 + 180 * line), (750, 50 + 180 * line)], fill=GRAY, width=4)
    for color, shift, player, coin in (
        (RED, -30, state.red_pos, state.red_coin_pos),
        (BLUE, 30, state.blue_pos, state.blue_coin_pos),
    ):
        x, y = cell(player)
        disc(pen, (x + shift, y + 26), 36, color)
        x, y = cell(coin)
        disc(pen, (x + shift, y - 44), 24, INK)
        disc(pen, (x + shift, y - 44), 18, color)


def draw_smax(pen, state, env):
    """Allies blue, enemies red, with their health as a bar; the dead are gray."""
    state = getattr(state, "state", state)  # HeuristicEnemySMAX wraps it
    place = lambda x, y: (160 + 20 * x, 640 - 20 * y)
    pen.rectangle((*place(0, 32), *place(32, 0)), fill="#fffdf8")
    most = env.unit_type_health[state.unit_types]
    for i in np.argsort(state.unit_alive):
        x, y = place(*map(float, state.unit_positions[i]))
        alive, color = bool(state.unit_alive[i]), RED if i >= env.num_allies else BLUE
        disc(pen, (x, y), 14, color if alive else "#e4e0d6")
        if alive:
            pen.line([(x - 20, y - 24), (x + 20, y - 24)], fill=GRAY, width=6)
            length = 40 * float(state.unit_health[i] / most[i])
            pen.line([(x - 20, y - 24), (x - 20 + length, y - 24)], fill=color, width=6)


DRAWINGS = {  # by what the env_id contains
    "CartPole-v1": draw_cartpole,
    "Pendulum-v1": draw_pendulum,
    "Acrobot-v1": draw_acrobot,
    "MountainCar": draw_mountain_car,
    "rings": draw_rings,
    "MPE": draw_mpe,
    "coin_game": draw_coins,
    "SMAX": draw_smax,
}


class Shot(NamedTuple):
    """A state in a video."""

    env_state: Any
    step: int
    is_final: bool  # of an episode


def shots_of(steps: list[Step], viewer: Viewer) -> list[Shot]:
    """All states of an episode or trial, the final one of each episode included."""
    advance, shots = jax.jit(viewer.advance), []
    for i, step in enumerate(steps):
        shots.append(Shot(step.env_state, i, is_final=False))
        if i + 1 == len(steps) or viewer.ended(step.env_state, steps[i + 1].env_state):
            final = advance(step.key, step.env_state, step.action)
            shots.append(Shot(jax.tree.map(np.asarray, final), i + 1, is_final=True))
    return shots


def states_of(steps: list[Step], viewer: Viewer) -> list:
    return [shot.env_state for shot in shots_of(steps, viewer)]


def frames_of(steps: list[Step], viewer: Viewer, number: int, every: int) -> list[tuple]:
    """Captioned pictures of every `every`th state, and of final ones: (picture, is it final)."""
    returns = np.cumsum([0.0] + [step.reward.sum() for step in steps])
    font = ImageFont.load_default(16)
    frames = []
    for state, i, is_final in shots_of(steps, viewer):
        if i % every and not is_final:
            continue
        lines = [f"{viewer.unit} {number}   step {i}   return {returns[i]:.4g}"]
        if label := viewer.label(state):
            lines.append(label + viewer.legend)
        picture = Image.fromarray(np.ascontiguousarray(viewer.draw(state)))
        size = (max(picture.width, 320), picture.height + 16 * (1 + len(lines)))
        frame = Image.new("RGB", size, PAPER)
        frame.paste(picture, ((frame.width - picture.width) // 2, 0))
        for line, text in enumerate(lines):
            place = (12, picture.height + 7 + 18 * line)
            ImageDraw.Draw(frame).text(place, text, fill=INK, font=font)
        frames.append((frame, is_final))
    return frames


def write_frames(path: Path, frames: list[tuple], fps: float) -> None:
    frames, is_final = zip(*frames, strict=True)
    if path.suffix == ".mp4":  # a player stays at its end
        import imageio.v3

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # by imageio, for ffmpeg
            imageio.v3.imwrite(path, np.stack(frames), fps=fps, plugin="FFMPEG")
        return
    # One palette without dithering: pixels that do not change cost nothing.
    sample = np.vstack(frames[:: max(1, len(frames) // 8)])
    palette = Image.fromarray(sample).quantize(64)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [HOLD if x else 1000 / fps for x in is_final]
    first, *others = frames
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0)


def write_html(path: Path, config, states: list) -> None:
    """Brax's viewer."""
    import brax.envs
    from brax.io import html

    env = brax.envs.get_environment(config.env_id.removeprefix("brax/"))
    states = [state.pipeline_state for state in states]
    path.write_text(html.render(env.sys.tree_replace({"opt.timestep": env.dt}), states))


def check_video(path: Path, env_id: str) -> None:
    """Raises RunError for errors that would otherwise come after the episodes."""
    if path.suffix not in (".gif", ".mp4", ".html"):
        raise RunError(f"{path}: a video ends in .gif, .mp4 or .html")
    if path.suffix == ".html" and not env_id.startswith("brax/"):
        raise RunError(f"{path}: only Brax has a viewer for the browser, choose .gif or .mp4")
    if path.suffix == ".mp4" and not all(map(importlib.util.find_spec, FFMPEG)):
        raise RunError(f"{path} needs ffmpeg: pip install {' '.join(FFMPEG)}, or choose .gif")
    if not path.absolute().parent.is_dir():
        raise RunError(f"{path}: {path.absolute().parent} is no folder")


def write_video(path: Path, config, episodes: list[list[Step]], every: int = 1) -> int:
    """Returns the number of frames. Raises RunError, OSError."""
    viewer = make_viewer(config)
    if path.suffix == ".html":
        states = [state for steps in episodes for state in states_of(steps, viewer)]
        write_html(path, config, states)
        return len(states)
    frames = []
    for number, steps in enumerate(episodes, 1):
        frames += frames_of(steps, viewer, number, every)
    write_frames(path, frames, viewer.fps / every)
    return len(frames)


def upload(path: Path, run_dir: Path) -> None:
    """Add the video to the artifacts of the run at Weights & Biases."""
    import wandb

    # As in the scripts.
    run_id = re.sub(r"[^\w-]", "-", "-".join(run_dir.resolve().parts[-2:]))[-64:]
    run = wandb.init(id=run_id, resume="allow")
    run.log_artifact(str(path), name=path.stem, type="video")
    run.finish()


# ------------------------------------------- main
def summarize(values: np.ndarray) -> dict:
    """Statistics of the returns or lengths [S, E].

    The interval is that of the mean over seeds (of one seed: over its episodes), 95 % by Student's
    t, and None for one value. Median, min and max are over all episodes of all seeds.
    """
    per_seed = values.mean(axis=1, dtype=float)
    sample = per_seed if len(per_seed) > 1 else values[0]
    mean, interval = per_seed.mean(), None
    if sample.size > 1:
        half = scipy.stats.t.ppf(0.975, sample.size - 1) * scipy.stats.sem(sample)
        interval = [float(mean - half), float(mean + half)]
    return {
        "mean": float(mean),
        "interval": interval,
        "median": float(np.median(values)),
        "min": float(values.min()),
        "max": float(values.max()),
        "per_seed": per_seed.tolist(),
    }


def make_report(module: ModuleType, config, played: Played) -> dict:
    """Statistics of "return" and "length"; also by name of "agents" or "trial_episodes"."""
    report = {"return": summarize(played.returns.sum(axis=-1))}
    parts = np.moveaxis(played.returns, -1, 0)  # [K, S, E]
    if hasattr(config, "trial_episodes"):
        report["trial_episodes"] = {f"episode_{k}": summarize(x) for k, x in enumerate(parts, 1)}
    elif len(parts) > 1:
        _, _, names, *_ = module.make_env(config)
        report["agents"] = {str(k): summarize(x) for k, x in zip(names, parts, strict=True)}
    return report | {"length": summarize(played.length)}


def rows_of(report: dict) -> dict[str, dict]:
    rows = {"return": report["return"]}
    for kind in ("agents", "trial_episodes"):
        rows |= {f"  {name}": row for name, row in report.get(kind, {}).items()}
    return rows | {"length": report["length"]}


def make_table(rows: dict[str, dict]) -> str:
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{x:>10}" for x in ("mean", "± 95 %", "median", "min", "max"))]
    for name, row in rows.items():
        half = "" if row["interval"] is None else f"{row['interval'][1] - row['mean']:.3g}"
        rest = "".join(f"{row[x]:>10.4g}" for x in ("median", "min", "max"))
        lines.append(f"{name:{width}}{row['mean']:>10.4g}{half:>10}{rest}")
    return "\n".join(lines)


def write_absolute_metric(run_dir: Path, per_seed: np.ndarray) -> str:
    """Returns [S] of an episode, like eval/return, go into summary.json. Returns what was done."""
    path = run_dir / "summary.json"
    if not path.exists():
        return f"the run is not finished, so there is no {path} to write the absolute metric to"
    absolute = {
        "absolute_return_mean": float(per_seed.mean()),
        "absolute_return_per_seed": per_seed.tolist(),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(json.loads(path.read_text()) | absolute, indent=2))
    temporary.replace(path)
    return f"absolute metric written to {path}"


def new_keys(seed: int, shape: tuple[int, ...]) -> jax.Array:
    # `split` in the scripts never reaches this number: the keys are new.
    key = jax.random.fold_in(jax.random.PRNGKey(seed), 2**32 - 1)
    return jax.random.split(key, shape)


def make_match_report(played: Played, sides: dict[str, list[int]]) -> list[dict]:
    """For each order of the runs: statistics of "sides" (with their "run"), "length" and "env"."""
    matches = []
    for order, runs in enumerate(("AB", "BA")):
        now = jax.tree.map(lambda x, i=order: x[i], played)
        returns = {name: now.returns[..., places].sum(-1) for name, places in sides.items()}
        runs = zip(runs, returns.items(), strict=True)
        matches.append(
            {
                "sides": {name: {"run": run} | summarize(x) for run, (name, x) in runs},
                "length": summarize(now.length),
                "env": {name: summarize(np.float64(x)) for name, x in now.info.items()},
            }
        )
    return matches


def main_against(options: argparse.Namespace) -> np.ndarray:
    """Two runs A and B play each other. Returns returns [2, pairs of seeds, episodes, K].

    First A has the first side and B the second, then the reverse. Raises RunError.
    """
    if options.video:
        raise RunError("--against makes no video, leave out --video")
    run_dirs, seed_index = [options.run_dir, options.against], options.seed_index
    loaded = [load_run(run_dir, options.checkpoint) for run_dir in run_dirs]
    sides = find_game(run_dirs, loaded)
    seeds = [config.num_seeds for _, config, _ in loaded]
    if seed_index is not None and not 0 <= seed_index < max(seeds):
        raise RunError(
            f"seed-index = {seed_index}: there are {max(seeds)} pair(s) of seeds, from 0"
        )
    pairs = np.arange(max(seeds)) if seed_index is None else np.array([seed_index])
    runs, params = [], []
    for module, config, of_seeds in loaded:
        if options.greedy is not None:
            config = dataclasses.replace(config, eval_greedy=options.greedy)
        runs.append((module, config))
        params.append(jax.tree.map(lambda x, n=config.num_seeds: x[pairs % n], of_seeds))
    keys = new_keys(options.seed, (max(seeds), options.episodes))[pairs]
    played = play_match(runs, params, sides, keys)
    matches = make_match_report(played, sides)
    if options.json:
        about = {
            name: {"run_dir": str(run_dir), "script": module.SCRIPT, "greedy": config.eval_greedy}
            for name, run_dir, (module, config) in zip("AB", run_dirs, runs, strict=True)
        }
        report = {
            "runs": about,
            "env_id": config.env_id,
            "checkpoint": options.checkpoint,
            "seeds": [[int(i % n) for n in seeds] for i in pairs],
            "episodes": options.episodes,
            "matches": matches,
        }
        print(json.dumps(report, indent=2))
        return played.returns
    print(
        f"{config.env_id}: {options.checkpoint} policies of {len(pairs)}"
        f" pair{'s' * (len(pairs) > 1)} of seeds,"
        f" {options.episodes} episode{'s' * (options.episodes > 1)} each"
    )
    for name, run_dir, (module, config) in zip("AB", run_dirs, runs, strict=True):
        actions = "greedy" if config.eval_greedy else "sampled"
        print(f"{name} is {run_dir}: {module.SCRIPT}, {actions} actions")
    for match in matches:
        rows = {f"{row['run']} as {side}": row for side, row in match["sides"].items()}
        rows |= {"length": match["length"]}
        rows |= {f"env/{name}": row for name, row in match["env"].items()}
        print(make_table(rows))
    over = "pairs" if len(pairs) > 1 else "episodes"
    print(f"± is half the 95 % interval of the mean over {over}")
    return played.returns


def main(words: list[str] | None = None) -> np.ndarray:
    """What the command line does. Returns the returns [S, episodes]. Raises RunError.

    With --against, as `main_against`.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="run folder")
    add(
        "--checkpoint", choices=["best", "last"], default="best", help="best by evaluation, or last"
    )
    add("--against", type=Path, help="run folder: the two runs play the two sides of a game")
    add("--episodes", type=int, default=EPISODES, help="full episodes for each seed")
    add("--greedy", action=argparse.BooleanOptionalAction, help="default: as in the run")
    add("--seed-index", type=int, help="one of the run's seeds, from 0; default: all")
    add("--seed", type=int, default=0, help="random seed of the episodes")
    add("--json", action="store_true", help="print one JSON object, and nothing else, to stdout")
    add("--video", type=Path, help="file to write: .gif, .mp4, or .html for Brax")
    add("--video-episodes", type=int, default=1, help="episodes in the video, all of one seed")
    add("--every", type=int, default=1, help="show every nth state, for a smaller file")
    options = parser.parse_args(words)
    if min(options.episodes, options.video_episodes, options.every) < 1:
        raise RunError("--episodes, --video-episodes and --every must be at least 1")
    if options.against:
        return main_against(options)
    seed_index = options.seed_index
    module, config, params = load_run(options.run_dir, options.checkpoint, seed_index)
    is_absolute = options.checkpoint == "best" and seed_index is None
    is_absolute &= options.episodes >= EPISODES
    is_absolute &= options.greedy in (None, config.eval_greedy)
    if options.greedy is not None:
        config = dataclasses.replace(config, eval_greedy=options.greedy)
    if options.video:
        check_video(options.video, config.env_id)
        if Path(module.FILE).stem != module.SCRIPT:  # a file of environments/
            raise RunError(f"no video of {module.SCRIPT}, leave out --video")
        make_viewer(config)
    keys = new_keys(options.seed, (config.num_seeds, options.episodes))
    if seed_index is not None:
        keys, params = jax.tree.map(lambda x: x[None], (keys[seed_index], params))
    played = play(module, config, params, keys)
    report = make_report(module, config, played)
    seeds, episodes = played.length.shape
    say = partial(print, file=sys.stderr) if options.json else print
    if options.json:
        about = {
            "run_dir": str(options.run_dir),
            "script": module.SCRIPT,
            "env_id": config.env_id,
            "checkpoint": options.checkpoint,
            "greedy": config.eval_greedy,
            "seeds": list(range(seeds)) if seed_index is None else [seed_index],
            "episodes": episodes,
        }
        print(json.dumps(about | report, indent=2))
    else:
        which = f"{seeds} seed{'s' * (seeds > 1)}" if seed_index is None else f"seed {seed_index}"
        game = "trial" if hasattr(config, "trial_episodes") else "episode"
        print(
            f"{module.SCRIPT} on {config.env_id}: {options.checkpoint} policy of {which},"
            f" {episodes} {game}{'s' * (episodes > 1)} each,"
            f" {'greedy' if config.eval_greedy else 'sampled'} actions"
        )
        print(make_table(rows_of(report)))
        print(
            f"± is half the 95 % interval of the mean over {'seeds' if seeds > 1 else 'episodes'}"
        )
    if is_absolute:
        per_seed = np.array(report["return"]["per_seed"])  # of a trial: the sum of its episodes
        say(write_absolute_metric(options.run_dir, per_seed / getattr(config, "trial_episodes", 1)))
    if options.video:
        first = jax.tree.map(lambda x: x[0], params)
        record_one = make_recorder(module, config)
        episodes = [record_one(first, key) for key in keys[0, : options.video_episodes]]
        frames = write_video(options.video, config, episodes, options.every)
        say(f"{frames} frames written to {options.video}")
        if config.track:
            upload(options.video, options.run_dir)
    return played.returns.sum(axis=-1)


def cli() -> None:
    try:
        main()
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
