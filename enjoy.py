"""Replay the policy of a run: its return over full episodes, and a video of the first of them.

    python enjoy.py runs/my_run --episodes 100
    python enjoy.py runs/my_run --checkpoint last --greedy --video out.gif

Videos: .gif and .mp4 of gymnax, xminigrid, Brax and the environments of ippo.py (rings; MPE,
coin_game, overcooked and SMAX of JaxMARL), .html of Brax (its viewer, which loads code from the
internet). A video shows every state of an episode, the final one included.
"""

import argparse
import dataclasses
import importlib
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
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent
PAPER, INK, GRAY, RED, BLUE = "#f7f5f0", "#2b2d42", "#b8b5ad", "#e4572e", "#3d6cb9"
PLANES = "#f4f1de #ffd166 #8d99ae #ef6f6c #4ecdc4 #c77dff #90be6d #f9a03f #577590 #ff99c8".split()
SIZE = (480, 320)  # of drawings; ffmpeg wants multiples of 16
FPS = {"CartPole-v1": 50, "Pendulum-v1": 20}  # real time


class RunError(Exception):
    """A wrong input, and what to change."""


# ----------------------------------------- replay
def load_run(run_dir: Path, checkpoint: str = "best", seed_index: int = 0) -> tuple:
    """Returns (the script's module, its Config, params of one seed). Raises RunError."""
    about, path = run_dir / "config.json", run_dir / "checkpoint.msgpack"
    try:
        options = json.loads(about.read_text())
        script, num_seeds = options["script"], options.get("num_seeds", 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{run_dir} is no run: {about} is missing or damaged: {error!r}") from None
    # Only import scripts of this folder, whatever the file names.
    if not re.fullmatch(r"\w+", str(script)) or not (ROOT / f"{script}.py").exists():
        raise RunError(f"{about} names the script {script!r}, which is not in {ROOT}")
    if not 0 <= seed_index < num_seeds:
        raise RunError(f"seed-index = {seed_index}: {run_dir} has {num_seeds} seed(s), from 0")
    module = importlib.import_module(script)
    if not hasattr(getattr(module, "TrainState", None), "best"):
        raise RunError(f"{about} names the script {script!r}, which trains no policy")
    try:
        known = module.Config.__dataclass_fields__
        config = module.Config(**{k: v for k, v in options.items() if k in known})
        config = dataclasses.replace(config, num_seeds=1)
        init, *_ = module.make_train(config)
    except module.ConfigError as error:
        raise RunError(str(error)) from None
    keys = jax.random.split(jax.random.key(0), jax.local_device_count())
    expected = jax.eval_shape(init, keys).params  # [D, S, ...]
    name = {"best": "best", "last": "params"}[checkpoint]
    try:
        params = flax.serialization.msgpack_restore(path.read_bytes())[name]
        params = flax.serialization.from_state_dict(expected, params)
        params = jax.tree.map(lambda x: x[0, seed_index], params)
    except FileNotFoundError:
        raise RunError(f"{path} is missing: the run has not been evaluated yet") from None
    except Exception as error:
        raise RunError(f"{path} is damaged or no checkpoint of {script}: {error!r}") from None
    if any(jax.tree.leaves(jax.tree.map(lambda x, y: x.shape != y.shape[2:], params, expected))):
        raise RunError(f"{path} has parameters of other shapes than those of {about}")
    return module, config, params


def get_episode(module: ModuleType, config) -> Callable:
    """The script's own episode_return(params, key), out of the evaluation inside make_train."""
    *_, train_seed = module.make_train(config)
    evaluate = inspect.getclosurevars(train_seed).nonlocals["evaluate"]
    parts = inspect.getclosurevars(evaluate).nonlocals
    if "episode_returns" in parts:  # ippo.py: one return per agent
        return lambda params, key: parts["episode_returns"](params, key).sum()
    if "trial_returns" in parts:  # ppo_meta.py: one return per episode of the trial
        return lambda params, key: parts["trial_returns"](params, key).sum()
    return parts["episode_return"]


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
    params = params.replace(**json.loads(config.env_params or "{}"))
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
    params = params.replace(**json.loads(config.env_params or "{}"))

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

    run = wandb.init(id=run_dir.name, dir=run_dir, resume="allow")
    run.log_artifact(str(path), name=path.stem, type="video")
    run.finish()


# ------------------------------------------- main
def main(words: list[str] | None = None) -> np.ndarray:
    """Returns the returns [episodes]. Raises RunError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="run folder")
    add(
        "--checkpoint", choices=["best", "last"], default="best", help="best by evaluation, or last"
    )
    add("--episodes", type=int, default=10, help="full episodes to play")
    add("--greedy", action=argparse.BooleanOptionalAction, help="default: as in the run")
    add("--seed-index", type=int, default=0, help="which of the run's seeds, from 0")
    add("--seed", type=int, default=0, help="random seed of the episodes")
    add("--video", type=Path, help="file to write: .gif, .mp4, or .html for Brax")
    add("--video-episodes", type=int, default=1, help="episodes in the video")
    add("--every", type=int, default=1, help="show every nth state, for a smaller file")
    options = parser.parse_args(words)
    if min(options.episodes, options.video_episodes, options.every) < 1:
        raise RunError("--episodes, --video-episodes and --every must be at least 1")
    module, config, params = load_run(options.run_dir, options.checkpoint, options.seed_index)
    if options.greedy is not None:
        config = dataclasses.replace(config, eval_greedy=options.greedy)
    if options.video:
        check_video(options.video, config.env_id)
        make_viewer(config)
    key = jax.random.key_data(jax.random.key(options.seed))  # raw, as in the scripts
    keys = jax.random.split(key, options.episodes)
    returns = np.asarray(jax.jit(jax.vmap(get_episode(module, config), (None, 0)))(params, keys))
    print(
        f"{module.SCRIPT} on {config.env_id}, {options.checkpoint} policy of seed"
        f" {options.seed_index}, {'greedy' if config.eval_greedy else 'sampled'} actions:"
        f" return {returns.mean():.4g} ± {returns.std():.3g} over {len(returns)} episode(s)"
    )
    if options.video:
        episodes = [record(module, config, params, k) for k in keys[: options.video_episodes]]
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
