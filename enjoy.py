"""Replay the policy of a run: its return over full episodes, and a film of the first of them.

The episodes are played by the training script's own `make_evaluate`, with its own network,
normaliser and memory. For a film the environment is wrapped to hand out what happens in it.

    python enjoy.py runs/my_run --episodes 100
    python enjoy.py runs/my_run --checkpoint last --greedy --film out.gif

Films: .gif and .mp4 of gymnax, xminigrid, Brax and what ippo.py plays (rings; MPE, coin_game,
overcooked and SMAX of JaxMARL), .html of Brax (its viewer, to be opened in a browser that is
online). A film shows every state of an episode, the last one included.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.serialization
import imageio.v3
import jax
import jax.numpy as jnp
import numpy as np
import wandb
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent
PAPER, INK, GREY, RED, BLUE = "#f7f5f0", "#2b2d42", "#b8b5ad", "#e4572e", "#3d6cb9"
PLANES = "#f4f1de #ffd166 #8d99ae #ef6f6c #4ecdc4 #c77dff #90be6d #f9a03f #577590 #ff99c8".split()
SIZE = (480, 320)  # of drawn frames; ffmpeg wants multiples of 16
FPS = {"CartPole-v1": 50, "Pendulum-v1": 20}  # as fast as in the world they model


class RunError(Exception):
    """A wrong input. The message says what is wrong and what to change."""


# ------------------------------------------------------------------------------------------ replay
def load_run(run_dir: Path, checkpoint: str = "best", seed_index: int = 0) -> tuple:
    """Returns (script's module, Config, params, number of seeds). Raises RunError."""
    about = run_dir / "config.json"
    try:
        options = json.loads(about.read_text())
        script, seeds = options["script"], options["num_seeds"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run_dir} is no run: {about} is missing or damaged: {error!r}") from None
    # The name comes from a file: it may select a script that lies here, and nothing else.
    if not re.fullmatch(r"\w+", str(script)) or not (ROOT / f"{script}.py").exists():
        raise RunError(f"{about} names the script {script!r}, which is not in {ROOT}")
    if not 0 <= seed_index < seeds:
        raise RunError(f"seed-index = {seed_index}: {run_dir} has {seeds} seed(s), from 0")
    if not (path := run_dir / f"{checkpoint}.msgpack").exists():
        there = [p.stem for p in sorted(run_dir.glob("*.msgpack"))]
        raise RunError(f"{path} is missing: choose --checkpoint from {there}")
    module = importlib.import_module(script)
    if not hasattr(module, "make_evaluate"):
        raise RunError(f"{about} names the script {script!r}, which trains nothing")
    try:
        known = module.Config.__dataclass_fields__
        config = module.Config(**{k: v for k, v in options.items() if k in known})
        keys = jax.random.split(jax.random.key(0), jax.local_device_count())
        init, _ = module.make_train(dataclasses.replace(config, num_seeds=1))
        expected = jax.eval_shape(init, keys).params  # [D, S, ...]
    except module.ConfigError as error:
        raise RunError(str(error)) from None
    try:
        saved = flax.serialization.msgpack_restore(path.read_bytes())
        params = jax.tree.map(lambda x: x[0, seed_index], saved["state"]["params"])
        params = flax.serialization.from_state_dict(expected, params)
    except Exception as error:
        raise RunError(f"{path} is cut short or no checkpoint of {script}: {error!r}") from None
    if any(jax.tree.leaves(jax.tree.map(lambda x, y: x.shape != y.shape[2:], params, expected))):
        raise RunError(f"{path} has parameters of other shapes than those of {about}")
    return module, config, params, seeds


def replay(module: ModuleType, config, params, key, film_episodes: int = 0) -> tuple:
    """Returns the returns [eval_episodes] and the tape, one entry per step of the environments.

    An entry holds (key, state before the step, action, reward, done), [film_episodes, ...]. Of many
    agents it holds all actions, the sum of the rewards, and whether all are done.
    """
    tape, make_env = [], module.make_env

    def make_recorded_env(config):
        reset, step, about = make_env(config)

        def recorded_step(keys, env_state, action):
            outcome = step(keys, env_state, action)
            _, _, reward, terminated, truncated, final_obs = outcome
            done = terminated | truncated
            if hasattr(final_obs, "active"):  # [G, R] of ippo.py, agent by agent
                by_env = lambda x: x.reshape(-1, len(keys), *x.shape[2:]).swapaxes(0, 1)
                action, reward = by_env(action), by_env(reward).sum(1)  # [N, K, ...], [N]
                done = ~by_env(final_obs.active).any(1)
            entry = (keys, env_state, action, reward, done)
            entry = jax.tree.map(lambda x: x[:film_episodes], entry)
            jax.experimental.io_callback(lambda x: tape.append(x), None, entry, ordered=True)
            return outcome

        return reset, recorded_step, about

    try:
        module.make_env = make_recorded_env if film_episodes else make_env
        evaluate = jax.jit(module.make_evaluate(config))
    finally:
        module.make_env = make_env
    returns = np.asarray(evaluate(params, key))
    jax.effects_barrier()
    return returns, jax.tree.map(np.asarray, tape)


def episodes_of(tape: list, advance) -> list:
    """For each filmed episode a list of (state, return up to it), the final state included."""
    done = np.array([entry[4] for entry in tape])  # [steps, film_episodes]
    episodes, advance = [], jax.jit(advance)
    for i, length in enumerate(done.argmax(axis=0) + 1):
        steps = [jax.tree.map(lambda x, i=i: x[i], entry) for entry in tape[:length]]
        final = jax.tree.map(np.asarray, advance(*steps[-1][:3]))
        states = [state for _, state, *_ in steps] + [final]
        rewards = [0.0] + [float(reward) for *_, reward, _ in steps]
        episodes.append(list(zip(states, np.cumsum(rewards), strict=True)))
    return episodes


# -------------------------------------------------------------------------------------------- film
# A viewer is (draw(state) -> [H, W, 3] uint8, advance(key, state, action) -> state, fps). `advance`
# gives the final state of an episode, in whose place the scripts have the first of the next.
def make_viewer(env_id: str) -> tuple:
    """Raises RunError where there is nothing to look at."""
    if env_id.startswith("brax/"):
        return brax_viewer(env_id.removeprefix("brax/"))
    import gymnax
    import xminigrid

    if env_id in xminigrid.registered_environments():
        return xminigrid_viewer(env_id)
    if env_id not in gymnax.registered_envs:
        return many_agents_viewer(env_id)
    env, params = gymnax.make(env_id)
    if env_id in DRAWINGS:
        draw = lambda state: drawn(DRAWINGS[env_id], state)
    elif len(env.observation_space(params).shape) == 3 or env_id == "Catch-bsuite":
        draw = lambda state: planes(np.asarray(env.observe(state.time, state, None, params)))
    else:
        raise RunError(f"no film of {env_id}: it has no picture, leave out --film")
    space = env.action_space(params)

    def advance(key, state, action):  # as env.step does, before it resets
        action = action if hasattr(space, "n") else jnp.clip(action, space.low, space.high)
        return env.step_env(jax.random.split(key)[0], state, action, params)[1]

    return draw, advance, FPS.get(env_id, 30 if env_id in DRAWINGS else 10)


def xminigrid_viewer(env_id: str) -> tuple:
    import xminigrid
    from xminigrid.rendering.rgb_render import render

    env, params = xminigrid.make(env_id)

    def draw(timestep):
        grid = timestep.state.grid
        tile = 16 * max(1, 448 // max(grid.shape) // 16)
        return render(grid, timestep.state.agent, params.view_size, tile)

    return draw, lambda key, timestep, action: env.step(params, timestep, action), 6


def brax_viewer(name: str) -> tuple:
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # a GPU draws without a screen
    import brax.envs

    env = brax.envs.get_environment(name)

    def draw(state):
        try:
            from brax.io import image

            return image.render_array(env.sys, state[0].pipeline_state, *SIZE[::-1])
        except Exception as error:
            raise RunError(f"MuJoCo cannot draw here, use --film out.html: {error!r}") from None

    def advance(key, state, action):
        return env.step(state[0], jnp.clip(action, -1.0, 1.0)), state[1] + 1

    return draw, advance, round(1 / env.dt)


def many_agents_viewer(env_id: str) -> tuple:
    import ippo

    try:
        env = ippo.load_env(env_id)
    except ippo.ConfigError as error:
        raise RunError(str(error)) from None
    drawings = {"rings": draw_rings, "MPE": draw_mpe, "coin": draw_coins, "SMAX": draw_smax}
    if env_id.startswith("overcooked") and "v2" not in env_id:
        draw = lambda env_state: overcooked(env, env_state[0])
    else:
        drawing = next((drawings[name] for name in drawings if name in env_id), None)
        if drawing is None:
            raise RunError(f"no film of {env_id}: it has no picture, leave out --film")
        draw = lambda env_state: drawn(lambda pen, state: drawing(pen, state, env), env_state[0])

    def to_env(space, action):
        if hasattr(space, "n"):
            return action
        unit = (jnp.clip(action[: space.shape[0]], -1.0, 1.0) + 1) / 2
        return space.low + (space.high - space.low) * unit

    def advance(key, env_state, action):  # as the script's step does, before it resets
        actions = {n: to_env(env.action_space(n), action[k]) for k, n in enumerate(env.agents)}
        _, state, *_ = env.step_env(jax.random.split(key)[0], env_state[0], actions)
        return state, env_state[1]

    return draw, advance, 5 if env_id in ("rings", "coin_game") else 10


def overcooked(env: Any, state: Any) -> np.ndarray:
    from jaxmarl.viz.overcooked_visualizer import OvercookedVisualizer

    edge = env.agent_view_size - 1
    grid = np.asarray(state.maze_map)[edge:-edge, edge:-edge]
    about = {"agent_dir_idx": state.agent_dir_idx, "agent_inv": state.agent_inv}
    return OvercookedVisualizer._render_grid(grid, tile_size=64, **about)


def planes(obs: np.ndarray) -> np.ndarray:
    """A colour for each plane of [H, W, C] or [H, W]; the first of those that are set is seen."""
    obs = obs.reshape(*obs.shape[:2], -1) > 0
    top = np.where(obs.any(axis=-1), obs.argmax(axis=-1), -1)  # [H, W]
    colors = [ImageDraw.ImageColor.getrgb(color) for color in (*PLANES, INK)]
    cell = 16 * max(1, 400 // max(top.shape) // 16)
    image = np.uint8(colors)[top].repeat(cell, axis=0).repeat(cell, axis=1)
    lines = np.arange(max(image.shape)) % cell == 0
    image[lines[: len(image)]] = image[:, lines[: image.shape[1]]] = (56, 58, 82)
    return image


def drawn(drawing, state) -> np.ndarray:
    """Drawn at twice the size and scaled down, which smooths the edges."""
    image = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), PAPER)
    drawing(ImageDraw.Draw(image), state)
    return np.asarray(image.resize(SIZE, Image.Resampling.LANCZOS))


def disc(pen: ImageDraw.ImageDraw, center: tuple, radius: float, color: str) -> None:
    pen.circle(center, radius, fill=color)


def rod(pen: ImageDraw.ImageDraw, start: tuple, end: tuple, width: int, color: str) -> None:
    pen.line([start, end], fill=color, width=width)
    disc(pen, start, width / 2, color)
    disc(pen, end, width / 2, color)


def draw_cartpole(pen, state):
    x, y, angle = 480 + 180 * float(state.x), 440, float(state.theta)
    pen.line([(0, y + 44), (960, y + 44)], fill=GREY, width=6)
    for wheel in (x - 44, x + 44):
        disc(pen, (wheel, y + 30), 16, INK)
    pen.rounded_rectangle((x - 80, y - 26, x + 80, y + 26), 12, fill=BLUE)
    rod(pen, (x, y - 20), (x + 300 * math.sin(angle), y - 20 - 300 * math.cos(angle)), 20, RED)
    disc(pen, (x, y - 20), 8, PAPER)


def draw_pendulum(pen, state):
    angle, torque = float(state.theta), float(np.squeeze(state.last_u))
    rod(pen, (480, 320), (480 - 230 * math.sin(angle), 320 - 230 * math.cos(angle)), 36, RED)
    disc(pen, (480, 320), 12, INK)
    # A positive torque turns to the left: the arc grows from the top in its direction.
    ends = sorted((-90, -90 - 60 * torque))
    pen.arc((420, 260, 540, 380), *ends, fill=BLUE, width=10)


def draw_acrobot(pen, state):
    angle, end, points = 0.0, (480, 320), [(480, 320)]
    for turn in (state.joint_angle1, state.joint_angle2):
        angle += float(turn)
        end = (end[0] + 140 * math.sin(angle), end[1] + 140 * math.cos(angle))
        points.append(end)
    pen.line([(0, 180), (960, 180)], fill=GREY, width=6)  # to be reached
    rod(pen, points[0], points[1], 26, BLUE)
    rod(pen, points[1], points[2], 26, RED)
    for joint in points[:2]:
        disc(pen, joint, 9, PAPER)


def draw_mountain_car(pen, state, goal=0.5):
    place = lambda x: (480 + 520 * (x + 0.3), 560 - 420 * (0.45 * math.sin(3 * x) + 0.55))
    hill = [place(x) for x in np.linspace(-1.25, 0.65, 200)]
    pen.polygon([(0, 640), (0, hill[0][1]), *hill, (960, hill[-1][1]), (960, 640)], fill="#dcd8cc")
    x, y = place(goal)
    pen.line([(x, y), (x, y - 90)], fill=INK, width=6)
    pen.polygon([(x, y - 90), (x + 50, y - 72), (x, y - 54)], fill=BLUE)
    x, y = place(float(state.position))
    disc(pen, (x, y - 24), 24, RED)


def draw_rings(pen, state, env):
    """The goal is on top; the agent walks the shorter or the longer way round to it."""
    for k, ahead in enumerate(np.asarray(state.ahead)):
        size, middle = 3 + k, (180 + 300 * k, 320)
        around = lambda cell, radius, size=size, middle=middle: (
            middle[0] + radius * math.sin(2 * math.pi * cell / size),
            middle[1] - radius * math.cos(2 * math.pi * cell / size),
        )
        pen.circle(middle, 100, outline=GREY, width=8)
        for cell in range(size):
            disc(pen, around(cell, 100), 34, PAPER if cell else RED)
            pen.circle(around(cell, 100), 34, outline=GREY if cell else RED, width=8)
        disc(pen, around(-ahead, 100), 22, BLUE)


def draw_mpe(pen, state, env):
    """Agents blue, adversaries red, obstacles and landmarks in JaxMARL's own colours."""
    place = lambda x, y: (480 + 220 * x, 320 - 220 * y)
    pen.rectangle((*place(-1, 1), *place(1, -1)), outline="#e4e0d6", width=4)
    for i in np.argsort(-np.asarray(env.rad), kind="stable"):  # the small ones on top
        color = "#{:02x}{:02x}{:02x}".format(*map(int, env.colour[i]))
        if i < env.num_agents:
            color = RED if "adversary" in env.agents[i] else BLUE
        disc(pen, place(*map(float, state.p_pos[i])), max(220 * float(env.rad[i]), 12), color)


def draw_coins(pen, state, env):
    cell = lambda pos: (250 + 180 * float(pos[1]) + 50, 50 + 180 * float(pos[0]) + 90)
    for line in range(4):
        pen.line([(210 + 180 * line, 50), (210 + 180 * line, 590)], fill=GREY, width=4)
        pen.line([(210, 50 + 180 * line), (750, 50 + 180 * line)], fill=GREY, width=4)
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
    """Allies blue, enemies red, each with its health as a bar; the dead are grey."""
    state = getattr(state, "state", state)  # of the environment that plays the enemies itself
    place = lambda x, y: (160 + 20 * x, 640 - 20 * y)
    pen.rectangle((*place(0, 32), *place(32, 0)), fill="#fffdf8")
    most = env.unit_type_health[state.unit_types]
    for i in np.argsort(state.unit_alive):
        x, y = place(*map(float, state.unit_positions[i]))
        alive, color = bool(state.unit_alive[i]), RED if i >= env.num_allies else BLUE
        disc(pen, (x, y), 14, color if alive else "#e4e0d6")
        if alive:
            pen.line([(x - 20, y - 24), (x + 20, y - 24)], fill=GREY, width=6)
            length = 40 * float(state.unit_health[i] / most[i])
            pen.line([(x - 20, y - 24), (x - 20 + length, y - 24)], fill=color, width=6)


DRAWINGS = {
    "CartPole-v1": draw_cartpole,
    "Pendulum-v1": draw_pendulum,
    "Acrobot-v1": draw_acrobot,
    "MountainCar-v0": draw_mountain_car,
    "MountainCarContinuous-v0": lambda pen, state: draw_mountain_car(pen, state, goal=0.45),
}


def captioned(image: np.ndarray, caption: str) -> Image.Image:
    height, width, _ = image.shape
    frame = Image.new("RGB", (max(width, 320), height + 32), PAPER)
    frame.paste(Image.fromarray(np.ascontiguousarray(image)), ((frame.width - width) // 2, 0))
    font = ImageFont.load_default(16)
    ImageDraw.Draw(frame).text((12, frame.height - 25), caption, fill=INK, font=font)
    return frame


def check_film(film: Path, env_id: str) -> None:
    """Raises RunError for what would fail after the episodes are played."""
    if film.suffix not in (".gif", ".mp4", ".html"):
        raise RunError(f"{film}: a film ends in .gif, .mp4 or .html")
    if film.suffix == ".html" and not env_id.startswith("brax/"):
        raise RunError(f"{film}: only Brax has a viewer for the browser, choose .gif or .mp4")
    if film.suffix == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise RunError(f"{film} needs ffmpeg: pip install imageio-ffmpeg, or choose .gif")
    if not film.absolute().parent.is_dir():
        raise RunError(f"{film}: {film.absolute().parent} is no folder")


def write_film(film: Path, env_id: str, tape: list, every: int = 1) -> int:
    """Writes every `every`th state. Returns the number of frames. Raises RunError, OSError."""
    draw, advance, fps = make_viewer(env_id)
    episodes = episodes_of(tape, advance)
    if film.suffix == ".html":
        import brax.envs
        from brax.io import html

        env = brax.envs.get_environment(env_id.removeprefix("brax/"))
        states = [state[0].pipeline_state for episode in episodes for state, _ in episode]
        film.write_text(html.render(env.sys.tree_replace({"opt.timestep": env.dt}), states))
        return len(states)
    frames = [
        captioned(draw(state), f"episode {number}   step {step}   return {value:.4g}")
        for number, episode in enumerate(episodes, 1)
        for step, (state, value) in enumerate(episode)
        if step % every == 0 or step == len(episode) - 1
    ]
    if film.suffix == ".mp4":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # by which ffmpeg starts
            imageio.v3.imwrite(film, np.stack(frames), fps=fps / every, plugin="FFMPEG")
        return len(frames)
    # One palette and no dithering: what stands still is the same in all frames and costs nothing.
    sample = np.vstack(frames[:: max(1, len(frames) // 8)])
    palette = Image.fromarray(sample).quantize(64)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    options = {"duration": 1000 * every / fps, "loop": 0, "append_images": frames[1:]}
    frames[0].save(film, save_all=True, **options)
    return len(frames)


def upload(film: Path, run_dir: Path, config: Any) -> None:
    """Add the film to the artifacts of the run at Weights & Biases."""
    place = {"project": config.wandb_project, "entity": config.wandb_entity, "dir": run_dir}
    wandb.init(**place, id=run_dir.name, resume="allow")
    wandb.log_artifact(str(film), name=film.stem, type="film")
    wandb.finish()


# -------------------------------------------------------------------------------------------- main
def main(words: list[str] | None = None) -> np.ndarray:
    """Returns the returns [episodes]. Raises RunError for a wrong input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="folder of a run")
    add(
        "--checkpoint", choices=["best", "last"], default="best", help="best by evaluation, or last"
    )
    add("--episodes", type=int, default=10, help="full episodes to play")
    add("--greedy", action=argparse.BooleanOptionalAction, help="default: as the run evaluated")
    add("--seed-index", type=int, default=0, help="which of the run's agents, from 0")
    add("--seed", type=int, default=0, help="of the episodes")
    add("--film", type=Path, help="file to write: .gif, .mp4, or .html for Brax")
    add("--film-episodes", type=int, default=1, help="how many of the episodes the film shows")
    add("--every", type=int, default=1, help="film every so many steps only, for a smaller file")
    options = parser.parse_args(words)
    if min(options.episodes, options.film_episodes, options.every) < 1:
        raise RunError("--episodes, --film-episodes and --every must be at least 1")
    module, config, params, seeds = load_run(
        options.run_dir, options.checkpoint, options.seed_index
    )
    greedy = config.eval_greedy if options.greedy is None else options.greedy
    config = dataclasses.replace(config, eval_episodes=options.episodes, eval_greedy=greedy)
    if options.film:
        check_film(options.film, config.env_id)
        make_viewer(config.env_id)
    filmed = min(options.film_episodes, options.episodes) if options.film else 0
    returns, tape = replay(module, config, params, jax.random.key(options.seed), filmed)
    print(
        f"{module.SCRIPT} on {config.env_id}, {options.checkpoint} policy of seed"
        f" {options.seed_index} ({seeds} in the run), {'greedy' if greedy else 'sampled'} actions:"
        f" return {returns.mean():.4g} ± {returns.std():.3g} over {len(returns)} episode(s)"
    )
    if options.film:
        frames = write_film(options.film, config.env_id, tape, options.every)
        print(f"{frames} frames written to {options.film}")
        if config.track:
            upload(options.film, options.run_dir, config)
    return returns


if __name__ == "__main__":
    try:
        main()
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
