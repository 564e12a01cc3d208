"""plot.py, enjoy.py and the notebooks: their numbers, their films and what a wrong input says."""

import csv
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
import types

import flax.serialization
import imageio.v3
import jax
import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, load_script, tiny
from PIL import Image

import enjoy
import plot

STEPS = 10  # between two updates of the runs that are made up for the plots


# -------------------------------------------------------------------------------------------- plot
def write_run(path, returns, speeds, **options):
    """A run of two calls of two updates each: returns [4, S], a speed for each call."""
    path.mkdir()
    config = {"script": "ppo_ff", "env_id": "CartPole-v1", "lr": 0.1, "seed": 0}
    (path / "config.json").write_text(json.dumps(config | options))
    with open(path / "metrics.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow("update seed env_steps episode/return time/sps".split())
        for (i, seed), value in np.ndenumerate(np.array(returns)):
            speed = speeds[i // 2] if i % 2 else ""
            cell = "" if np.isnan(value) else value
            table.writerow([i + 1, seed, STEPS * (i + 1), cell, speed])
    return str(path)


def made_up(seeds):
    return np.random.default_rng(seeds).normal(size=(4, seeds)).cumsum(axis=0)


def mean_of_the_middle(values):
    cut = len(values) // 4
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)


def one_curve(tmp_path, *runs):
    panels = plot.main([*runs, "--out", str(tmp_path / "out.png")])
    ((_, curves),) = panels.items()
    ((_, curve),) = curves.items()
    return curve


def test_the_line_is_the_interquartile_mean_of_all_seeds_of_all_runs(tmp_path, capsys):
    a, b = made_up(3), made_up(6)
    runs = [write_run(tmp_path / "a", a, (20, 30)), write_run(tmp_path / "b", b, (20, 30), seed=7)]
    curve = one_curve(tmp_path, *runs)
    np.testing.assert_allclose(curve.steps, [10, 20, 30, 40])
    expected = [mean_of_the_middle([*x, *y]) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(plot.iqm(curve.returns), expected)
    assert f"{expected[-1]:.4g} [" in capsys.readouterr().out
    assert Image.open(tmp_path / "out.png").size[0] > 1000


def test_the_band_is_that_of_all_possible_resamples():
    returns = made_up(5)
    for row, low, high in zip(returns, *plot.bootstrap(returns), strict=True):
        everything = [mean_of_the_middle(x) for x in itertools.product(row, repeat=5)]
        expected = np.quantile(everything, [0.025, 0.975])
        np.testing.assert_allclose([low, high], expected, atol=0.05 * np.ptp(row))
    np.testing.assert_array_equal(*plot.bootstrap(returns[:, :1]))  # of one seed nothing is known


def test_training_time_is_steps_of_all_seeds_by_speed(tmp_path):
    curve = one_curve(tmp_path, write_run(tmp_path / "a", made_up(3), (30, 15)))
    # A call is 2 updates * 10 steps * 3 seeds, at 30 and then 15 steps per second.
    np.testing.assert_allclose(curve.seconds, [1, 2, 4, 6])


def test_other_options_are_other_lines_and_other_environments_other_panels(tmp_path):
    runs = [
        write_run(tmp_path / "a", made_up(3), (1, 1)),
        write_run(tmp_path / "b", made_up(3), (1, 1), lr=0.2, run_dir="elsewhere"),
        write_run(tmp_path / "c", made_up(3), (1, 1), env_id="Acrobot-v1", lr=0.3),
    ]
    panels = plot.main([*runs, "--out", str(tmp_path / "out.png")])
    lines = {env_id: set(curves) for env_id, curves in panels.items()}
    assert lines == {"CartPole-v1": {"ppo_ff lr=0.1", "ppo_ff lr=0.2"}, "Acrobot-v1": {"ppo_ff"}}


def test_gaps_and_a_cut_last_row_are_left_out(tmp_path):
    returns = made_up(3)
    returns[0, 1] = np.nan
    path = write_run(tmp_path / "a", returns, (1, 1))
    with open(tmp_path / "a" / "metrics.csv", "a") as file:
        file.write("5,0,50,1.0,\n5,1")  # killed while it wrote the rows of an update
    curve = one_curve(tmp_path, path)
    np.testing.assert_allclose(curve.steps, [20, 30, 40])
    np.testing.assert_allclose(curve.returns, returns[1:])


def test_what_a_seed_did_not_measure_is_filled_in_from_its_own_returns(tmp_path):
    """Between two values on the line through them, behind the last one that one, before none."""
    nan = np.nan
    returns = [[nan, 1], [2, 2], [nan, nan], [6, nan]]
    curve = one_curve(tmp_path, write_run(tmp_path / "run", returns, [100, 100]))
    np.testing.assert_array_equal(curve.steps, [2 * STEPS, 4 * STEPS])  # the third has no value
    np.testing.assert_array_equal(curve.returns, [[2, 2], [6, 2]])
    returns = [[1, 1], [2, nan], [3, nan], [4, 7]]
    curve = one_curve(tmp_path, write_run(tmp_path / "other", returns, [100, 100]))
    np.testing.assert_allclose(curve.returns, [[1, 1], [2, 3], [3, 5], [4, 7]], atol=0.1)


def test_what_is_no_run_cannot_be_plotted(tmp_path):
    (tmp_path / "empty").mkdir()
    bad = write_run(tmp_path / "json", made_up(3), (1, 1))
    (tmp_path / "json" / "config.json").write_text('{"script":')
    silent = write_run(tmp_path / "silent", np.full((4, 2), np.nan), (1, 1))
    good = write_run(tmp_path / "good", made_up(3), (1, 1))
    (tmp_path / "text").mkdir()
    shutil.copy(tmp_path / "good" / "config.json", tmp_path / "text")
    (tmp_path / "text" / "metrics.csv").write_text("update,seed\nnothing")
    names = [tmp_path / "none", tmp_path / "empty", bad, silent, tmp_path / "text"]
    for path in map(str, names):
        with pytest.raises(plot.RunError, match=path):
            plot.main([good, path, "--out", str(tmp_path / "out.png")])
    with pytest.raises(plot.RunError, match="loss/other"):
        plot.main([good, "--metric", "loss/other"])
    with pytest.raises(plot.RunError, match="out.docx"):
        plot.main([good, "--out", str(tmp_path / "out.docx")])
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("tool", ["plot.py", "enjoy.py"])
def test_an_error_of_a_tool_is_one_line_and_exit_code_2(tool, tmp_path):
    words = [sys.executable, str(ROOT / tool), str(tmp_path / "none")]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert str(tmp_path / "none") in result.stderr and list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- enjoy
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(script) -> the folder of a finished run of two seeds."""
    folder = tmp_path_factory.mktemp("runs")

    def get(script):
        module = load_script(script)
        if not (folder / script).exists():
            module.main(tiny(module, num_seeds=2, lr=0.01, run_dir=str(folder / script)))
        return folder / script

    return get


def played(run, checkpoint, seed_index, film_episodes=0):
    """The returns of enjoy.py with the keys of the evaluation that the checkpoint is from."""
    module, config, params, seeds = enjoy.load_run(run, checkpoint, seed_index)
    saved = flax.serialization.msgpack_restore((run / f"{checkpoint}.msgpack").read_bytes())
    key = jax.random.fold_in(jax.random.key(config.seed), saved["state"]["update"][0, seed_index])
    key = jax.random.split(key, seeds)[seed_index]
    return enjoy.replay(module, config, params, key, film_episodes)


@pytest.mark.parametrize("script", SCRIPTS)
def test_replayed_returns_are_those_of_the_runs_evaluation(script, runs):
    run = runs(script)
    best = flax.serialization.msgpack_restore((run / "best.msgpack").read_bytes())["state"]
    assert played(run, "best", 1)[0].mean() == pytest.approx(best["eval_return"][0, 1], rel=1e-4)


def test_the_last_policy_is_that_of_the_last_evaluation(runs):
    summary = json.loads((runs("ppo_ff") / "summary.json").read_text())
    last = [played(runs("ppo_ff"), "last", seed)[0].mean() for seed in (0, 1)]
    assert last == pytest.approx(summary["eval_return_per_seed"], rel=1e-4)
    assert last[0] != last[1]


def test_the_tape_holds_whole_episodes(runs):
    run = runs("ppo_ff")
    returns, tape = played(run, "last", 0, film_episodes=2)
    np.testing.assert_array_equal(returns, played(run, "last", 0)[0])
    _, advance, _ = enjoy.make_viewer("CartPole-v1")
    fallen = lambda s: abs(float(s.x)) > 2.4 or abs(float(s.theta)) > np.radians(12)
    for episode, total in zip(enjoy.episodes_of(tape, advance), returns, strict=False):
        *before, (final, value) = episode
        assert value == total == len(before)  # CartPole pays 1 for each step
        assert fallen(final) and not any(fallen(state) for state, _ in before)
        assert [int(state.time) for state, _ in episode] == list(range(len(episode)))


def count_frames(film):
    if film.suffix == ".mp4":
        return len(imageio.v3.imread(film, plugin="FFMPEG"))
    return Image.open(film).n_frames


@pytest.mark.parametrize(
    "script, name, every",
    [("ppo_ff", "out.gif", 1), ("ppo_ff", "out.mp4", 2), ("ppo_rnn", "out.gif", 1)],
)
def test_a_film_shows_every_state(script, name, every, runs, tmp_path, monkeypatch, capsys):
    tapes, replay = [], enjoy.replay

    def remember(*args):
        returns, tape = replay(*args)
        tapes.append(tape)
        return returns, tape

    monkeypatch.setattr(enjoy, "replay", remember)
    film = tmp_path / name
    words = [str(runs(script)), "--episodes", "3", "--film", str(film), "--film-episodes", "2"]
    returns = enjoy.main([*words, "--every", str(every)])
    done = np.array([entry[-1] for entry in tapes[0]])
    lengths = [list(done[:, i]).index(True) + 1 for i in range(2)]
    frames = sum(len({*range(0, length + 1, every), length}) for length in lengths)
    assert count_frames(film) == frames
    out = capsys.readouterr().out
    assert f"return {returns.mean():.4g} ± {returns.std():.3g} over 3 episode(s)" in out
    assert f"{frames} frames written to {film}" in out


def test_the_film_of_a_tracked_run_is_its_artifact(runs, tmp_path, monkeypatch):
    calls, run_dir, film = [], tmp_path / "tracked", tmp_path / "out.gif"
    shutil.copytree(runs("ppo_ff"), run_dir)
    about = json.loads((run_dir / "config.json").read_text())
    about |= {"track": True, "wandb_project": "a project"}
    (run_dir / "config.json").write_text(json.dumps(about))
    wandb = types.SimpleNamespace(
        init=lambda **options: calls.append((options["project"], options["id"])),
        log_artifact=lambda path, name, type: calls.append((path, name, type)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setattr(enjoy, "wandb", wandb)
    enjoy.main([str(run_dir), "--episodes", "1"])
    assert calls == []
    enjoy.main([str(run_dir), "--episodes", "1", "--film", str(film)])
    assert calls == [("a project", "tracked"), (str(film), "out", "film"), "finish"]


@pytest.mark.parametrize(
    "env_id", ["Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "Breakout-MinAtar", "Catch-bsuite"]
)
def test_a_picture_moves_with_its_state(env_id):
    import gymnax

    draw, advance, fps = enjoy.make_viewer(env_id)
    env, params = gymnax.make(env_id)
    _, state = env.reset(jax.random.key(0), params)
    before = draw(state)
    for key in jax.random.split(jax.random.key(1), 3):
        action = env.action_space(params).sample(key)
        *_, info = env.step(key, state, action, params)
        state = advance(key, state, action)
        obs = env.observe(key, state, action, params)
        np.testing.assert_allclose(obs, info["final_observation"], atol=1e-6)
    after = draw(state)
    assert before.dtype == np.uint8 and before.shape == after.shape and before.shape[2] == 3
    assert (before != after).any() and fps > 0


# ------------------------------------------------------------------------------------ many agents
@pytest.fixture(scope="module")
def many_agents(tmp_path_factory):
    """The folder of a finished run of two seeds of ippo.py."""
    import ippo

    sizes = {"num_envs": 4, "num_steps": 4, "total_timesteps": 64, "num_minibatches": 2}
    sizes |= {"hidden_size": 4, "num_calls": 4, "num_evals": 2, "eval_episodes": 5, "num_seeds": 2}
    run_dir = tmp_path_factory.mktemp("ippo") / "run"
    ippo.main(ippo.Config(env_id="rings", actor_lr=0.05, run_dir=str(run_dir), **sizes))
    return run_dir


@pytest.mark.parametrize("seed_index", [0, 1])
def test_the_tape_of_many_agents_holds_whole_episodes(many_agents, seed_index):
    module, config, params, seeds = enjoy.load_run(many_agents, "best", seed_index)
    key = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), seeds)[seed_index]
    returns, tape = enjoy.replay(module, config, params, key, 3)
    best = flax.serialization.msgpack_restore((many_agents / "best.msgpack").read_bytes())["state"]
    assert returns.mean() == pytest.approx(best["eval_return"][0, seed_index], rel=1e-4)
    _, advance, _ = enjoy.make_viewer("rings")
    over = lambda state: not state.ahead.any() or state.step == module.Rings.time_limit
    lengths = set()
    for episode, total in zip(enjoy.episodes_of(tape, advance), returns, strict=False):
        *before, ((final, _), value) = episode
        assert value == pytest.approx(total, rel=1e-5) and over(final)
        assert not any(over(state) for (state, _), _ in before)
        lengths.add(int(final.step))
    assert len(lengths) > 1  # they do not end together


def test_a_film_of_many_agents_shows_every_state(many_agents, tmp_path, capsys):
    film = tmp_path / "out.gif"
    enjoy.main([str(many_agents), "--episodes", "3", "--film", str(film), "--film-episodes", "2"])
    frames = Image.open(film).n_frames
    assert f"{frames} frames written to {film}" in capsys.readouterr().out
    assert 2 * 2 <= frames <= 2 * 9


@pytest.mark.skipif(importlib.util.find_spec("jaxmarl") is None, reason="pip install '.[marl]'")
@pytest.mark.parametrize(
    "env_id",
    [
        "MPE_simple_tag_v3",
        "MPE_simple_facmac_v1",
        "coin_game",
        "overcooked",
        "HeuristicEnemySMAX/3m",
    ],
)
def test_a_picture_of_many_agents_moves_with_its_state(env_id):
    """The state that `advance` returns is the one in which the script's step ends."""
    import ippo

    draw, advance, fps = enjoy.make_viewer(env_id)
    reset, step, agents = ippo.make_env(ippo.Config(env_id=env_id))
    keys = jax.random.split(jax.random.key(0), 1)
    obs, env_state = reset(keys)
    first = lambda tree: jax.tree.map(lambda x: np.asarray(x)[0], tree)
    before, step, advance = draw(first(env_state)), jax.jit(step), jax.jit(advance)
    for key in jax.random.split(jax.random.key(1), 4):
        shape = (len(agents.names), agents.num_actions)
        action = jax.random.uniform(key, shape, minval=-2.0, maxval=2.0)  # beyond the bounds, too
        action = action if agents.continuous else jax.numpy.where(obs.mask[0], action, -9).argmax(1)
        after = advance(key, first(env_state), action)
        obs, env_state, *_ = step(key[None], env_state, action[None])
        jax.tree.map(np.testing.assert_array_equal, after[0], first(env_state)[0])
    image = draw(first(env_state))
    assert image.dtype == np.uint8 and image.shape == before.shape and image.shape[2] == 3
    assert (image != before).any() and fps > 0


def test_an_environment_without_a_picture():
    with pytest.raises(enjoy.RunError, match="nearest are|pip install|no film"):
        enjoy.make_viewer("switch_riddle")


def test_the_planes_have_a_colour_each():
    obs = np.zeros((10, 10, 4), bool)
    obs[1, 2, 3] = obs[4, 5, 0] = obs[4, 5, 3] = obs[6, 7, 1] = True
    image = enjoy.planes(obs)
    cell = len(image) // 10
    middle = image[cell // 2 :: cell, cell // 2 :: cell]  # [10, 10, 3]
    names = {(1, 2): enjoy.PLANES[3], (4, 5): enjoy.PLANES[0], (6, 7): enjoy.PLANES[1]}
    for place in np.ndindex(10, 10):
        assert "#{:02x}{:02x}{:02x}".format(*middle[place]) == names.get(place, enjoy.INK)


def test_what_cannot_be_replayed(runs, tmp_path):
    def fails(*words, names):
        with pytest.raises(enjoy.RunError) as error:
            enjoy.main([str(run), *words])
        assert str(names) in str(error.value) and len(str(error.value).splitlines()) == 1

    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    fails("--seed-index", "2", names="2 seed(s)")
    fails("--episodes", "0", names="at least 1")
    fails("--film", "out.avi", names="out.avi")
    fails("--film", "out.html", names="Brax")
    fails("--film", str(tmp_path / "none" / "out.gif"), names=tmp_path / "none")
    whole = (run / "best.msgpack").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        (run / "best.msgpack").write_bytes(damaged)
        fails(names=run / "best.msgpack")
    shutil.copy(runs("ppo_obs_norm") / "best.msgpack", run)
    fails(names=run / "best.msgpack")
    (run / "best.msgpack").unlink()
    fails(names="['last']")
    config = json.loads((run / "config.json").read_text())
    for changes, name in [
        ({"hidden_size": 8}, "other shapes"),
        ({"env_id": "CartPole-v9"}, "CartPole-v9"),
        ({"script": "../evil"}, "../evil"),
        ({"script": "ppo_none"}, "ppo_none"),
        ({"script": "plot"}, "trains nothing"),
    ]:
        (run / "config.json").write_text(json.dumps(config | changes))
        fails("--checkpoint", "last", names=name)
    for text in ('{"script":', "[]", "{}"):
        (run / "config.json").write_text(text)
        fails(names=run / "config.json")


# --------------------------------------------------------------------------------------- notebooks
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def outputs(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return cells, [output for cell in cells for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    (tmp_path / "notebooks").mkdir()  # what it writes stays out of the repository
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    monkeypatch.setenv("PPO_SHORT", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path / "notebooks")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    _, shown = outputs(notebook)
    assert [output for output in shown if "image/png" in output.get("data", {})]
    if path.stem == "quickstart":
        assert [output for output in shown if "image/gif" in output.get("data", {})]
        assert len(list(tmp_path.glob("runs/*/*/summary.json"))) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path):
    import nbformat

    cells, shown = outputs(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [output for output in shown if "image/png" in output.get("data", {})]
    assert not [output for output in shown if output.output_type == "error"]
    assert "site-packages" not in json.dumps(shown)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["quickstart", "sweep"]
