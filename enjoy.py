"""Play the policies of a run: returns of new full episodes, and a video.

    python enjoy.py runs/my_run                   # the absolute metric, written to summary.json
    python enjoy.py runs/my_run --episodes 100 --checkpoint last --greedy --video out.gif

The absolute metric is the return of the best parameters over ten times as many new episodes as an
evaluation has by default (Gorsane et al. 2022, arXiv 2209.10485): 1280 for each seed. Choosing the
best of several evaluations makes their own returns too high. It is written if all seeds play, the
best parameters at least 1280 episodes each, with actions chosen as in the run.

The program is the source in the run folder: it plays what was trained, after the script has
changed, too. Loading it runs it, so play only runs that you trust.

Videos: .gif and .mp4 of gymnax, xminigrid, Brax and the environments of ippo.py (rings; MPE,
coin_game, overcooked and SMAX of JaxMARL), .html of Brax (its viewer, which loads code from the
internet). A video shows every state of an episode, the final one included.
"""

import argparse
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
import imageio.v3
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent
PAPER, INK, GRAY, RED, BLUE = "#f7f5f0", "#2b2d42", "#b8b5ad", "#e4572e", "#3d6cb9"
PLANES = "#f4f1de #ffd166 #8d99ae #ef6f6c #4ecdc4 #c77dff #90be6d #f9a03f #577590 #ff99c8".split()
SIZE = (480, 320)  # of drawings; ffmpeg wants multiples of 16
EPISODES = 1280  # of the absolute metric
FPS = {"CartPole-v1": 50, "Pendulum-v1": 20}  # real time


class RunError(Exception):
    """A wrong input, and what to change."""


# ----------------------------------------- replay
def load_source(run_dir: Path, script: str) -> ModuleType:
    """The source that ran, from the run folder; without one, this repository's script."""
    path = next((x for x in (run_dir, ROOT) if (x / f"{script}.py").exists()), None)
    if path is None or Path(script).name != script:
        message = f"the script {script!r} of config.json is neither in {run_dir} nor in {ROOT}"
        raise RunError(message)
    path = path / f"{script}.py"
    module = ModuleType(script)
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec"), vars(module))  # leaves no __pycache__
    if not hasattr(getattr(module, "TrainState", None), "best_params"):
        raise RunError(f"{path} trains no policy")
    return module


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


def get_episode(module: ModuleType, config) -> Callable:
    """(params, key) -> return of a full episode as the script's evaluation plays it.

    The sum over the agents of ippo.py, and over the episodes of a trial of ppo_meta.py.
    """
    play_episode, _ = get_parts(module, config)

    def episode(params, key):
        runner = play_episode(params, key)
        is_trial = hasattr(runner, "trial_return")
        return (runner.trial_return if is_trial else runner.episode_return).sum()

    return episode


def load_policy(run_dir: str | Path, seed_index: int = 0, greedy: bool = False) -> Callable:
    """act(obs, key, first=False) -> action of the best parameters, for use anywhere.

    Observation and action are those of `step` in the script's make_env. A policy with memory
    remembers the calls before; `first` starts an episode (of ppo_meta.py: a trial). Raises
    RunError.
    """
    module, config, params = load_run(Path(run_dir), "best", seed_index)
    make_env, actions = module.make_env, []

    def zeros(function, *args):
        """What the function returns, but of zeros."""
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def make_outside(config):
        """An environment that is elsewhere: it keeps the action and knows nothing else."""
        reset, step, *rest = make_env(config)

        def outside_step(key, env_state, action):
            actions.append(action)
            return zeros(step, key, env_state, action)

        return lambda key, *args: zeros(lambda key: reset(key, *args), key), outside_step, *rest

    module.make_env = make_outside
    _, parts = get_parts(module, config)
    start, policy = parts.get("start_episode") or parts.get("start_trial"), parts.get("act")
    if policy is None:  # disco.py, where they are functions of the module
        start = partial(module.start_episode, parts["env_reset"])
        policy = partial(module.act, parts["network"], parts["env_step"])
    runner = start(jax.random.PRNGKey(0))

    @jax.jit
    def step(runner, obs, key, first):
        runner = runner._replace(obs=obs, key=key, done=jnp.zeros_like(runner.done) | first)
        runner, _ = policy(params, runner, greedy)
        return runner, actions.pop()

    def act(obs, key, first=False):
        nonlocal runner
        runner, action = step(runner, obs, key, first)
        return action

    return act


def play(module: ModuleType, config, params: Any, keys: jax.Array) -> np.ndarray:
    """Returns [S, E] of an episode for each key [S, E], all seeds in one program."""
    episode = get_episode(module, config)
    # Not a vmap over seeds: nobody waits for the longest episode of another seed.
    seed = lambda x: jax.vmap(episode, (None, 0))(*x)
    return np.asarray(jax.jit(lambda *x: jax.lax.map(seed, x))(params, keys))


class Step(NamedTuple):
    """A step of the environment, before it resets."""

    key: jax.Array
    env_state: Any  # before the step
    action: jax.Array  # of many agents [K, ...]
    reward: jax.Array  # of many agents [K]


def record(module: ModuleType, config, params, key) -> list[Step]:
    """Play one episode, or one trial of ppo_meta.py."""
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
        episode_return = get_episode(module, config)
    finally:
        module.make_env = make_env
    jax.block_until_ready(jax.jit(episode_return)(params, key))
    jax.effects_barrier()
    return jax.tree.map(np.asarray, steps)


# ----------------------------------------- video
class Viewer(NamedTuple):
    draw: Callable  # env_state -> [H, W, 3] uint8
    # key, env_state, action -> the next env_state. It does not reset, unlike the scripts' step,
    # and so gives the final state of an episode.
    advance: Callable
    fps: int
    label: Callable = lambda state: ""  # env_state -> text below the picture


def make_viewer(config) -> Viewer:
    """Raises RunError if the environment has no picture."""
    if config.env_id.startswith("brax/"):
        return brax_viewer(config)
    import gymnax
    import xminigrid

    if config.env_id in xminigrid.registered_environments():
        viewer = xminigrid_viewer(config)
        return trial_viewer(viewer, config) if hasattr(config, "trial_episodes") else viewer
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


def xminigrid_viewer(config) -> Viewer:
    import xminigrid
    from xminigrid.rendering.rgb_render import render

    env, params = xminigrid.make(config.env_id)
    params = params.replace(**json.loads(config.env_params))

    def draw(timestep):
        grid = timestep.state.grid
        tile = 16 * max(1, 448 // max(grid.shape) // 16)
        return render(grid, timestep.state.agent, params.view_size, tile)

    advance = lambda key, timestep, action: env.step(params, timestep, action)
    return Viewer(draw, advance, fps=6)


def trial_viewer(viewer: Viewer, config) -> Viewer:
    """For ppo_meta.py: which episode of the trial it is."""
    draw = lambda state: viewer.draw(state.timestep)
    advance = lambda key, state, action: state._replace(
        timestep=viewer.advance(key, state.timestep, action)
    )
    label = lambda state: f"   trial episode {state.episode + 1}/{config.trial_episodes}"
    return Viewer(draw, advance, viewer.fps, label)


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


def states_of(steps: list[Step], viewer: Viewer) -> list:
    """All states of an episode, the final one included."""
    last = steps[-1]
    final = jax.jit(viewer.advance)(last.key, last.env_state, last.action)
    return [*(step.env_state for step in steps), final]


def frames_of(steps: list[Step], viewer: Viewer, number: int, every: int) -> list[Image.Image]:
    """Captioned pictures of every `every`th state of an episode, and of the final one."""
    states = states_of(steps, viewer)
    returns = np.cumsum([0.0] + [step.reward.sum() for step in steps])
    font = ImageFont.load_default(16)
    frames = []
    for i in sorted({*range(0, len(steps), every), len(steps)}):
        picture = Image.fromarray(np.ascontiguousarray(viewer.draw(states[i])))
        frame = Image.new("RGB", (max(picture.width, 320), picture.height + 32), PAPER)
        frame.paste(picture, ((frame.width - picture.width) // 2, 0))
        caption = f"episode {number}   step {i}   return {returns[i]:.4g}{viewer.label(states[i])}"
        ImageDraw.Draw(frame).text((12, frame.height - 25), caption, fill=INK, font=font)
        frames.append(frame)
    return frames


def write_frames(path: Path, frames: list[Image.Image], fps: float) -> None:
    if path.suffix == ".mp4":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # by imageio, for ffmpeg
            imageio.v3.imwrite(path, np.stack(frames), fps=fps, plugin="FFMPEG")
        return
    # One palette without dithering: pixels that do not change cost nothing.
    sample = np.vstack(frames[:: max(1, len(frames) // 8)])
    palette = Image.fromarray(sample).quantize(64)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    first, *others = frames
    first.save(path, save_all=True, append_images=others, duration=1000 / fps, loop=0)


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
    if path.suffix == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise RunError(f"{path} needs ffmpeg: pip install imageio-ffmpeg, or choose .gif")
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
def describe(returns: np.ndarray) -> str:
    """Mean of [S, E] and, over several seeds, its 95% interval (Student's t)."""
    seeds, episodes = returns.shape
    means = returns.mean(axis=1)
    interval = ""
    if seeds > 1:
        interval = f" ± {scipy.stats.t.ppf(0.975, seeds - 1) * scipy.stats.sem(means):.3g}"
    played = f"{seeds} seed{'s' * (seeds > 1)}, {episodes} episode{'s' * (episodes > 1)} each"
    return f"return {means.mean():.4g}{interval} ({played})"


def write_absolute_metric(run_dir: Path, returns: np.ndarray) -> None:
    path = run_dir / "summary.json"
    if not path.exists():
        print(f"the run is not finished, so there is no {path} to write the absolute metric to")
        return
    means = returns.mean(axis=1).tolist()
    absolute = {"absolute_return_mean": float(np.mean(means)), "absolute_return_per_seed": means}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(json.loads(path.read_text()) | absolute, indent=2))
    temporary.replace(path)
    print(f"absolute metric written to {path}")


def main(words: list[str] | None = None) -> np.ndarray:
    """Returns the returns [S, episodes]. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="run folder")
    add(
        "--checkpoint", choices=["best", "last"], default="best", help="best by evaluation, or last"
    )
    add("--episodes", type=int, default=EPISODES, help="full episodes for each seed")
    add("--greedy", action=argparse.BooleanOptionalAction, help="default: as in the run")
    add("--seed-index", type=int, help="one of the run's seeds, from 0; default: all")
    add("--seed", type=int, default=0, help="random seed of the episodes")
    add("--video", type=Path, help="file to write: .gif, .mp4, or .html for Brax")
    add("--video-episodes", type=int, default=1, help="episodes in the video, all of one seed")
    add("--every", type=int, default=1, help="show every nth state, for a smaller file")
    options = parser.parse_args(words)
    if min(options.episodes, options.video_episodes, options.every) < 1:
        raise RunError("--episodes, --video-episodes and --every must be at least 1")
    seed_index = options.seed_index
    module, config, params = load_run(options.run_dir, options.checkpoint, seed_index)
    is_absolute = options.checkpoint == "best" and seed_index is None
    is_absolute &= options.episodes >= EPISODES
    is_absolute &= options.greedy in (None, config.eval_greedy)
    if options.greedy is not None:
        config = dataclasses.replace(config, eval_greedy=options.greedy)
    if options.video:
        check_video(options.video, config.env_id)
        make_viewer(config)
    # `split` in the scripts never reaches this number: the keys are new.
    key = jax.random.fold_in(jax.random.PRNGKey(options.seed), 2**32 - 1)
    keys = jax.random.split(key, (config.num_seeds, options.episodes))
    if seed_index is not None:
        keys, params = jax.tree.map(lambda x: x[None], (keys[seed_index], params))
    returns = play(module, config, params, keys)
    which = "" if seed_index is None else f" of seed {seed_index}"
    actions = "greedy" if config.eval_greedy else "sampled"
    print(
        f"{module.SCRIPT} on {config.env_id}, {options.checkpoint} policy{which},"
        f" {actions} actions: {describe(returns)}"
    )
    if is_absolute:
        write_absolute_metric(options.run_dir, returns)
    if options.video:
        first = jax.tree.map(lambda x: x[0], params)
        episodes = [record(module, config, first, k) for k in keys[0, : options.video_episodes]]
        frames = write_video(options.video, config, episodes, options.every)
        print(f"{frames} frames written to {options.video}")
        if config.track:
            upload(options.video, options.run_dir)
    return returns


if __name__ == "__main__":
    try:
        main()
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
