"""plot.py, enjoy.py, benchmarks/ and the notebooks: numbers, pictures, videos and errors."""

import csv
import dataclasses
import importlib.util
import inspect
import itertools
import json
import shutil
import subprocess
import sys
import types
from functools import partial

import flax.linen
import flax.serialization
import imageio.v3
import jax
import numpy as np
import pytest
import tyro
from conftest import ROOT, SCRIPTS, load_script, tiny, with_devices
from PIL import Image

import enjoy
import plot

STEPS = 10  # between two updates of the made-up runs


# ------------------------------------------- plot
def write_run(path, returns, speeds=(1, 1, 1, 1), training=None, **options):
    """A run of four updates, each evaluated: returns and training [4, S], speeds [4]."""
    path.mkdir()
    seed = len(list(path.parent.iterdir()))  # of its own
    config = {"script": "ppo_ff", "env_id": "CartPole-v1", "lr": 0.1, "seed": seed}
    (path / "config.json").write_text(json.dumps(config | options))
    training = np.full_like(returns, 7.0) if training is None else np.array(training)
    with open(path / "metrics.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow("update seed env_steps episode/return eval/return time/sps".split())
        for (i, seed), value in np.ndenumerate(np.array(returns)):
            cells = ["" if np.isnan(x) else x for x in (training[i, seed], value)]
            table.writerow([i + 1, seed, STEPS * (i + 1), *cells, speeds[i]])
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
    runs = [write_run(tmp_path / "a", a), write_run(tmp_path / "b", b, seed=7)]
    curve = one_curve(tmp_path, *runs)
    np.testing.assert_allclose(curve.steps, [10, 20, 30, 40])
    expected = [mean_of_the_middle([*x, *y]) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(plot.iqm(curve.values), expected)
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
    curve = one_curve(tmp_path, write_run(tmp_path / "a", made_up(3), (30, 30, 15, 15)))
    # An update is 10 steps * 3 seeds, at 30 and then 15 steps per second.
    np.testing.assert_allclose(curve.seconds, [1, 2, 4, 6])


def lines_of(axes, figure_x):
    """The lines against these steps: [(x, y, alpha)]."""
    lines = [(line.get_xdata(), line.get_ydata(), line.get_alpha()) for line in axes.get_lines()]
    return [line for line in lines if len(line[0]) == figure_x]


def test_the_line_is_of_evaluations_not_of_the_episodes_that_ended_first(tmp_path, capsys):
    """At first only short episodes have ended, which are the lucky ones on MiniGrid-Empty."""
    returns = np.array([[0.1, 0.2, 0.3, 0.9]]).T
    lucky = np.array([[0.9, 0.8, 0.6, 0.5]]).T
    run = write_run(tmp_path / "run", returns, training=lucky)
    panels = plot.group([plot.read_run(tmp_path / "run", "eval/return")])
    (axes,) = plot.draw(panels, "eval/return", with_time=False).axes
    (x, y, alpha), (faint_x, faint_y, faint_alpha) = lines_of(axes, 4)
    np.testing.assert_allclose(y, returns[:, 0])
    np.testing.assert_allclose(faint_y, lucky[:, 0])
    np.testing.assert_allclose([x, faint_x], [[10, 20, 30, 40]] * 2)
    assert alpha is None and faint_alpha < 0.5
    plot.main([run])
    assert ": 0.9 [" in capsys.readouterr().out


def test_the_picture_of_a_single_run_lies_in_its_folder(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / name, made_up(2)) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    plot.main(runs[:1])
    single = Image.open(tmp_path / "a" / "learning_curve.png")
    plot.main(runs)
    assert single.size[0] < Image.open(tmp_path / "compare.png").size[0]  # one panel, not two
    assert not list(tmp_path.glob("b/*.png"))


def test_other_options_are_other_lines_and_other_environments_other_panels(tmp_path):
    runs = [
        write_run(tmp_path / "a", made_up(3)),
        write_run(tmp_path / "b", made_up(3), lr=0.2, run_dir="elsewhere"),
        write_run(tmp_path / "c", made_up(3), env_id="Acrobot-v1", lr=0.3),
    ]
    panels = plot.main([*runs, "--out", str(tmp_path / "out.png")])
    lines = {env_id: set(curves) for env_id, curves in panels.items()}
    assert lines == {"CartPole-v1": {"ppo_ff lr=0.1", "ppo_ff lr=0.2"}, "Acrobot-v1": {"ppo_ff"}}


def test_a_copy_of_a_script_is_a_line_of_its_own(tmp_path, capsys):
    """Even with the seed and the options of its parent."""
    runs = [
        write_run(tmp_path / "parent", made_up(3), seed=0),
        write_run(tmp_path / "copy", made_up(2), seed=0, script="my_ppo"),
        write_run(tmp_path / "copy_again", made_up(4), seed=7, script="my_ppo"),
    ]
    (lines,) = plot.main([*runs, "--out", str(tmp_path / "out.png")]).values()
    assert {label: curve.values.shape[1] for label, curve in lines.items()} == {
        "ppo_ff": 3,
        "my_ppo": 6,
    }
    assert capsys.readouterr().err == ""  # no run is left out
    panels = plot.group(
        [plot.read_run(tmp_path / name, "eval/return") for name in ("parent", "copy", "copy_again")]
    )
    (axes,) = plot.draw(panels, "eval/return", with_time=False).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[:2] == ["ppo_ff (3 seeds)", "my_ppo (6 seeds)"]


def test_options_of_a_copy_are_compared_with_its_own_runs(tmp_path):
    runs = [
        write_run(tmp_path / "a", made_up(3)),
        write_run(tmp_path / "b", made_up(3), lr=0.2),
        write_run(tmp_path / "c", made_up(3), lr=0.3, script="my_ppo"),
    ]
    (lines,) = plot.main([*runs, "--out", str(tmp_path / "out.png")]).values()
    assert set(lines) == {"ppo_ff lr=0.1", "ppo_ff lr=0.2", "my_ppo"}


def test_updates_before_all_seeds_have_a_value_are_left_out(tmp_path):
    returns = made_up(3)
    returns[0, 1] = np.nan
    curve = one_curve(tmp_path, write_run(tmp_path / "a", returns))
    np.testing.assert_allclose(curve.steps, [20, 30, 40])
    np.testing.assert_allclose(curve.values, returns[1:])


def test_gaps_are_interpolated_seed_by_seed(tmp_path):
    nan = np.nan
    returns = [[nan, 1], [2, 2], [nan, nan], [6, nan]]
    curve = one_curve(tmp_path, write_run(tmp_path / "run", returns))
    np.testing.assert_array_equal(curve.steps, [2 * STEPS, 4 * STEPS])  # the third has no value
    np.testing.assert_array_equal(curve.values, [[2, 2], [6, 2]])
    returns = [[1, 1], [2, nan], [3, nan], [4, 7]]
    curve = one_curve(tmp_path, write_run(tmp_path / "other", returns))
    np.testing.assert_allclose(curve.values, [[1, 1], [2, 3], [3, 5], [4, 7]], atol=0.1)


def test_a_longer_run_is_cut_to_the_shortest(tmp_path):
    a, b = made_up(2), made_up(3)
    b[2:] = np.nan  # stopped after two updates
    runs = [write_run(tmp_path / "a", a), write_run(tmp_path / "b", b)]
    curve = one_curve(tmp_path, *runs)
    np.testing.assert_allclose(curve.steps, [10, 20])
    np.testing.assert_allclose(curve.values, np.hstack([a, b])[:2])


def test_agents_that_are_the_same_count_once(tmp_path, capsys):
    few = write_run(tmp_path / "few", made_up(5)[:, :3], seed=7)
    many = write_run(tmp_path / "many", made_up(5), seed=7)
    other = write_run(tmp_path / "other", made_up(4))
    (tmp_path / "notes.txt").touch()
    curve = one_curve(tmp_path, few, many, other, str(tmp_path / "notes.txt"))
    values = np.hstack([made_up(5), made_up(4)])
    np.testing.assert_allclose(np.sort(curve.values[-1]), np.sort(values[-1]))
    out, err = capsys.readouterr()
    assert "9 seeds" in out and "seed repeats: 1" in err and "notes.txt left out" in err


def test_what_is_no_run_cannot_be_plotted(tmp_path):
    (tmp_path / "empty").mkdir()
    bad = write_run(tmp_path / "json", made_up(3))
    (tmp_path / "json" / "config.json").write_text('{"script":')
    silent = write_run(tmp_path / "silent", np.full((4, 2), np.nan))
    good = write_run(tmp_path / "good", made_up(3))
    (tmp_path / "text").mkdir()
    shutil.copy(tmp_path / "good" / "config.json", tmp_path / "text")
    (tmp_path / "text" / "metrics.csv").write_text("update,seed\nnothing")
    with pytest.raises(plot.RunError, match="empty"):
        plot.main([str(tmp_path / "empty")])
    with pytest.raises(plot.RunError, match="none of these"):
        plot.main([str(tmp_path / "empty")] * 2)
    names = [tmp_path / "none", bad, silent, tmp_path / "text"]
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


# ------------------------------------------ enjoy
DISCO = {"weights": "random", "env_id": "Catch-5x5", "num_steps": 8, "num_envs": 2}
DISCO |= {"replay_batch": 4, "replay_size": 6, "hidden_size": 8, "feature_size": 8}
DISCO |= {"model_size": 4, "branch_size": 4, "eval_episodes": 4, "num_evals": 2}
DISCO |= {"total_timesteps": 64}
PLAYED = [*SCRIPTS, "ppo_vtrace", "disco"]  # ppo_drift acts as ppo_ff does


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(script) -> the folder of a finished run of two seeds."""
    folder = tmp_path_factory.mktemp("runs")

    def get(script):
        module = load_script(script)
        if not (folder / script).exists():
            options = {"num_seeds": 2, "lr": 0.01, "run_dir": str(folder / script)}
            config = module.Config(**DISCO, **options) if script == "disco" else None
            module.main(config or tiny(module, **options))
        return folder / script

    return get


def stored(run):
    """The state of the last checkpoint as a dict, [S, ...]."""
    state = flax.serialization.msgpack_restore((run / "checkpoint.msgpack").read_bytes())
    return jax.tree.map(lambda x: x[0], state)


def evaluation(run, script):
    """The next evaluation of the best parameters of both seeds, by the script: [S]."""
    module = load_script(script)
    options = json.loads((run / "config.json").read_text())
    del options["script"]
    config = module.Config(**options)
    init, *_, train_seed = module.make_train(config)
    state = init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
    state = module.restore(jax.device_get(state), config, run)
    evaluate = inspect.getclosurevars(train_seed).nonlocals["evaluate"]
    on_device = jax.vmap(jax.vmap(evaluate), axis_name="devices")
    _, metrics = jax.jit(on_device)(state._replace(params=state.best_params))
    return np.asarray(metrics["eval/return"])[0]


def replay(run, seed_index):
    """The episodes of that evaluation by enjoy.py."""
    module, config, params = enjoy.load_run(run, "best", seed_index)
    _, eval_key = jax.random.split(stored(run)["key"][seed_index])
    keys = jax.random.split(eval_key, config.eval_episodes)
    return jax.jit(jax.vmap(enjoy.get_episode(module, config), (None, 0)))(params, keys)


@pytest.mark.parametrize("script", PLAYED)
def test_replayed_returns_are_those_of_the_runs_evaluation(script, runs):
    run = runs(script)
    assert replay(run, 1).mean() == pytest.approx(evaluation(run, script)[1], rel=1e-3)


def test_the_actions_are_those_of_the_stored_network(runs):
    """Greedy actions against a forward pass in NumPy."""
    run = runs("ppo_ff")

    def forward(layers, obs):
        for name in ("Dense_0", "Dense_1"):
            obs = np.tanh(obs @ layers[name]["kernel"] + layers[name]["bias"])
        return obs @ layers["Dense_4"]["kernel"] + layers["Dense_4"]["bias"]

    seen = {}
    for (checkpoint, name), seed in itertools.product(
        [("best", "best_params"), ("last", "params")], [0, 1]
    ):
        module, config, params = enjoy.load_run(run, checkpoint, seed)
        config = dataclasses.replace(config, eval_greedy=True)
        steps = enjoy.record(module, config, params, jax.random.key(0))
        layers = jax.tree.map(lambda x: x[seed], stored(run)[name])["params"]  # noqa: B023
        obs = [np.array([s.x, s.x_dot, s.theta, s.theta_dot]) for _, s, *_ in steps]
        logits = np.array([forward(layers, x) for x in obs])
        np.testing.assert_array_equal([step.action for step in steps], logits.argmax(axis=1))
        seen[checkpoint, seed] = logits[0]
    assert not np.allclose(seen["best", 0], seen["best", 1])
    assert not np.allclose(seen["last", 0], seen["last", 1])


def test_a_recording_holds_a_whole_episode(runs):
    module, config, params = enjoy.load_run(runs("ppo_ff"), seed_index=0)
    viewer = enjoy.make_viewer(config)
    fallen = lambda s: abs(float(s.x)) > 2.4 or abs(float(s.theta)) > np.radians(12)
    for key in jax.random.split(jax.random.key(1), 2):
        steps = enjoy.record(module, config, params, key)
        *before, final = enjoy.states_of(steps, viewer)
        total = enjoy.get_episode(module, config)(params, key)
        assert sum(step.reward for step in steps) == total == len(steps)  # 1 for each step
        assert fallen(final) and not any(map(fallen, before))
        assert [int(state.time) for state in (*before, final)] == list(range(len(steps) + 1))


def make_viewer(env_id, **options):
    return enjoy.make_viewer(types.SimpleNamespace(env_id=env_id, env_params="{}", **options))


def count_frames(video):
    if video.suffix == ".mp4":
        return len(imageio.v3.imread(video, plugin="FFMPEG"))
    return Image.open(video).n_frames


@pytest.mark.parametrize(
    "script, name, every",
    [("ppo_ff", "out.gif", 1), ("ppo_ff", "out.mp4", 2)],
)
def test_a_video_shows_every_state(script, name, every, runs, tmp_path, monkeypatch, capsys):
    lengths, record = [], enjoy.record

    def remember(*args):
        steps = record(*args)
        lengths.append(len(steps))
        return steps

    monkeypatch.setattr(enjoy, "record", remember)
    video = tmp_path / name
    words = [str(runs(script)), "--episodes", "3", "--video", str(video), "--video-episodes", "2"]
    returns = enjoy.main([*words, "--every", str(every)])
    assert len(lengths) == 2
    frames = sum(len({*range(0, length + 1, every), length}) for length in lengths)
    assert count_frames(video) == frames
    out = capsys.readouterr().out
    means, half = returns.mean(axis=1), 12.71 / 2**0.5  # Student's t, one degree of freedom
    interval = f"{half * means.std(ddof=1):.3g}"
    assert f"return {means.mean():.4g} ± " in out and "(2 seeds, 3 episodes each)" in out
    assert float(out.partition(" ± ")[2].split()[0]) == pytest.approx(float(interval), rel=0.01)
    assert f"{frames} frames written to {video}" in out


def test_the_video_of_a_tracked_run_is_its_artifact(runs, tmp_path, monkeypatch):
    calls, run_dir, video = [], tmp_path / "tracked: 1", tmp_path / "out.gif"
    shutil.copytree(runs("ppo_ff"), run_dir)
    options = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(options | {"track": True}))
    run = types.SimpleNamespace(
        log_artifact=lambda path, name, type: calls.append((path, name, type)),
        finish=lambda: calls.append("finish"),
    )

    def init(id, resume):
        calls.append((id, resume))
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    enjoy.main([str(run_dir), "--episodes", "1"])
    assert calls == []
    enjoy.main([str(run_dir), "--episodes", "1", "--video", str(video)])
    run_id = f"{run_dir.parent.name}-tracked--1"[-64:]
    assert calls == [(run_id, "allow"), (str(video), "out", "video"), "finish"]


def test_parameters_of_the_environment_are_those_of_the_run(runs, tmp_path):
    """The time limit of a run holds in its replay."""
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    options = json.loads((run / "config.json").read_text())
    options["env_params"] = '{"max_steps_in_episode": 5}'
    (run / "config.json").write_text(json.dumps(options))
    video = tmp_path / "out.gif"
    returns = enjoy.main([str(run), "--video", str(video), "--episodes", "10"])
    assert returns.tolist() == [[5.0] * 10] * 2 and count_frames(video) == 6


def test_the_absolute_metric_is_the_return_of_the_best_on_new_episodes(runs, tmp_path, capsys):
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    path = run / "summary.json"
    before = json.loads(path.read_text())
    assert not any(name.startswith("absolute") for name in before)
    returns = enjoy.main([str(run)])
    assert returns.shape == (2, 1280) and len(np.unique(returns[0])) > 10
    means = returns.mean(axis=1)
    assert json.loads(path.read_text()) == before | {
        "absolute_return_mean": pytest.approx(means.mean(), rel=1e-5),
        "absolute_return_per_seed": pytest.approx(means.tolist(), rel=1e-5),
    }
    assert {x.name for x in run.iterdir()} == {x.name for x in runs("ppo_ff").iterdir()}
    assert f"absolute metric written to {path}" in capsys.readouterr().out
    np.testing.assert_array_equal(enjoy.main([str(run), "--seed-index", "1"])[0], returns[1])
    other = enjoy.main([str(run), "--seed", "1"])
    assert (other != returns).mean() > 0.5
    spread = returns.std(axis=1) / 1280**0.5
    np.testing.assert_array_less(np.abs(other.mean(axis=1) - means), 6 * spread)  # the same policy
    # Seeds do not play the same episodes: their first observations differ.
    module, config, params = enjoy.load_run(run)
    same = jax.tree.map(lambda x: x[[0, 0]], params)
    keys = jax.random.split(jax.random.PRNGKey(0), (2, 16))
    assert (np.diff(enjoy.play(module, config, same, keys), axis=0) != 0).any()


@pytest.mark.parametrize("script", [*PLAYED, "ppo_meta"])
def test_a_policy_acts_outside_of_its_script(script, runs):
    """As in the script's own episode, with memory too."""
    module, config, params = enjoy.load_run(runs(script), seed_index=1)
    config = dataclasses.replace(config, eval_greedy=True)
    episode = jax.jit(enjoy.get_episode(module, config))
    act = enjoy.load_policy(runs(script), seed_index=1, greedy=True)
    reset, step, *_ = module.make_env(config)
    step = jax.jit(step)
    for seed in (0, 1):
        expected = episode(params, jax.random.PRNGKey(seed))
        key, reset_key = jax.random.split(jax.random.PRNGKey(seed))
        is_test = [True] if script == "ppo_meta" else []  # its evaluation plays tasks held out
        (obs, env_state), total, first, done = reset(reset_key, *is_test), 0.0, True, False
        while not done:
            key, action_key, step_key = jax.random.split(key, 3)
            action = act(obs, action_key, first)
            obs, env_state, reward, *ended = step(step_key, env_state, action)
            total, first, done = total + reward, False, any(ended[:2])
        assert total == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["--episodes", "1279"],
        ["--checkpoint", "last"],
        ["--greedy"],
        ["--seed-index", "0"],
    ],
)
def test_nothing_else_is_an_absolute_metric(words, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(enjoy, "play", lambda *args: np.zeros(args[-1].shape[:2]))
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    before = (run / "summary.json").read_bytes()
    enjoy.main([str(run), *words])
    assert (run / "summary.json").read_bytes() == before
    enjoy.main([str(run), "--no-greedy", "--episodes", "2000"])
    assert json.loads((run / "summary.json").read_text())["absolute_return_mean"] == 0


def test_an_unfinished_run_has_no_absolute_metric(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(enjoy, "play", lambda *args: np.zeros(args[-1].shape[:2]))
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    (run / "summary.json").unlink()
    enjoy.main([str(run)])
    assert "not finished" in capsys.readouterr().out
    assert not (run / "summary.json").exists()


def test_a_copy_of_a_script_is_found_in_its_run(tmp_path):
    """The program is the one that trained, not the repository's, whose network differs here."""
    text = (ROOT / "ppo_ff.py").read_text()
    layer = "        x = nn.tanh(dense(self.hidden_size)(x))\n"
    assert text.count(layer) == 1
    (tmp_path / "my_ppo.py").write_text(text.replace(layer, 2 * layer))
    copy = enjoy.load_source(tmp_path, "my_ppo")
    run = tmp_path / "run"
    copy.main(copy.Config(**vars(tiny(load_script("ppo_ff"))) | {"run_dir": str(run)}))
    assert json.loads((run / "config.json").read_text())["script"] == "my_ppo"
    (tmp_path / "my_ppo.py").unlink()
    returns = enjoy.main([str(run), "--episodes", "4"])
    assert returns.shape == (1, 4) and not (run / "__pycache__").exists()
    (line,) = plot.main([str(run)])["CartPole-v1"]
    assert line == "my_ppo"
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(options | {"script": "ppo_ff"}))
    (run / "my_ppo.py").rename(run / "ppo_ff.py")  # the repository has a ppo_ff.py, too
    np.testing.assert_array_equal(enjoy.main([str(run), "--episodes", "4"]), returns)
    (run / "ppo_ff.py").unlink()
    with pytest.raises(enjoy.RunError, match=str(run / "checkpoint.msgpack")):
        enjoy.main([str(run)])
    (run / "config.json").write_text(json.dumps(options))
    with pytest.raises(enjoy.RunError, match="my_ppo"):
        enjoy.main([str(run)])


def test_a_run_without_its_source_is_played_by_the_repositorys_script(runs, tmp_path):
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    words = [str(run), "--episodes", "8"]
    expected = enjoy.main(words)
    (run / "ppo_ff.py").unlink()
    np.testing.assert_array_equal(enjoy.main(words), expected)


def test_the_number_of_devices_does_not_matter(runs):
    """Of four environments, three devices could not each have as many."""
    code = "import sys, enjoy; print(enjoy.main(sys.argv[1:]).tolist())"
    words = [sys.executable, "-W", "ignore", "-c", code, str(runs("ppo_ff")), "--episodes", "3"]
    result = subprocess.run(
        words, cwd=ROOT, env=with_devices(3), capture_output=True, text=True, check=True
    )
    expected = enjoy.main([str(runs("ppo_ff")), "--episodes", "3"])
    assert json.loads(result.stdout.splitlines()[-1]) == expected.tolist()


@pytest.mark.parametrize(
    "env_id, script",
    [
        ("Pendulum-v1", "ppo_continuous"),
        ("Acrobot-v1", "ppo_ff"),
        ("MountainCar-v0", "ppo_ff"),
        ("Breakout-MinAtar", "ppo_ff"),
        ("Catch-bsuite", "ppo_ff"),
        ("Catch-8x6", "disco"),
        ("MiniGrid-Empty-5x5", "ppo_rnn"),
    ],
)
def test_a_picture_moves_with_its_state(env_id, script):
    """`advance` returns the state in which the script's step ends."""
    module = load_script(script)
    reset, step, num_actions = module.make_env(module.Config(env_id=env_id))
    draw, advance, fps, _ = make_viewer(env_id)
    _, state = reset(jax.random.PRNGKey(0))
    before = draw(state)
    for key in jax.random.split(jax.random.PRNGKey(1), 5):
        action = jax.random.randint(key, (), 0, num_actions)
        if script == "ppo_continuous":
            action = jax.random.uniform(key, (num_actions,), minval=-1.0)
        advanced = advance(key, state, action)
        _, state, _, terminated, truncated, _ = step(key, state, action)
        assert not terminated and not truncated
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), advanced, state)
    after = draw(state)
    assert before.dtype == np.uint8 and before.shape == after.shape and before.shape[2] == 3
    assert (before != after).any() and fps > 0


# ------------------------------------ many agents
@pytest.fixture(scope="module")
def many_agents(tmp_path_factory):
    """The folder of a finished run of two seeds of ippo.py."""
    import ippo

    sizes = {"num_envs": 4, "num_steps": 4, "total_timesteps": 64, "num_minibatches": 2}
    sizes |= {"hidden_size": 4, "num_evals": 2, "eval_episodes": 4, "num_seeds": 2}
    run_dir = tmp_path_factory.mktemp("ippo") / "run"
    ippo.main(ippo.Config(env_id="rings", actor_lr=0.05, run_dir=str(run_dir), **sizes))
    return run_dir


def test_replayed_returns_of_many_agents_are_those_of_the_team(many_agents):
    expected = evaluation(many_agents, "ippo")
    for seed_index in (0, 1):
        returns = replay(many_agents, seed_index)
        assert returns.mean() == pytest.approx(expected[seed_index], rel=1e-3)


def test_a_recording_of_many_agents_holds_a_whole_episode(many_agents):
    module, config, params = enjoy.load_run(many_agents, seed_index=0)
    viewer = enjoy.make_viewer(config)
    over = lambda state: not state["distance"].any() or state["step"] == 8
    lengths = set()
    for key in jax.random.split(jax.random.PRNGKey(1), 4):
        steps = enjoy.record(module, config, params, key)
        *before, (final, _) = enjoy.states_of(steps, viewer)
        total = enjoy.get_episode(module, config)(params, key)
        assert sum(step.reward.sum() for step in steps) == pytest.approx(float(total), abs=1e-5)
        assert over(final) and not any(over(state) for state, _ in before)
        lengths.add(len(steps))
    assert len(lengths) > 1  # not all end by the time limit


def test_a_video_of_many_agents_shows_every_state(many_agents, tmp_path, capsys):
    video = tmp_path / "out.gif"
    words = [str(many_agents), "--episodes", "3", "--video", str(video), "--video-episodes", "2"]
    enjoy.main(words)
    frames = Image.open(video).n_frames
    assert f"{frames} frames written to {video}" in capsys.readouterr().out
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
    """`advance` returns the state in which the script's step ends."""
    import ippo

    draw, advance, fps, _ = make_viewer(env_id, share_parameters=True)
    reset, step, _, continuous = ippo.make_env(ippo.Config(env_id=env_id))
    obs, env_state = reset(jax.random.PRNGKey(0))
    before, step, advance = draw(env_state), jax.jit(step), jax.jit(advance)
    for key in jax.random.split(jax.random.PRNGKey(1), 4):
        action = jax.random.uniform(key, obs.mask.shape, minval=-2.0, maxval=2.0)  # beyond bounds
        if not continuous:
            action = jax.numpy.where(obs.mask, action, -9).argmax(1)
        after = advance(key, env_state, action)
        obs, env_state, *_ = step(key, env_state, action)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), after[0], env_state[0])
    image = draw(env_state)
    assert image.dtype == np.uint8 and image.shape == before.shape and image.shape[2] == 3
    assert (image != before).any() and fps > 0


def test_an_environment_without_a_picture():
    with pytest.raises(enjoy.RunError, match="did you mean|pip install|no video"):
        make_viewer("switch_riddle", share_parameters=True)
    with pytest.raises(enjoy.RunError, match="no video of corridor"):
        make_viewer("corridor")


def test_the_planes_have_a_color_each():
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
    fails("--video", "out.avi", names="out.avi")
    fails("--video", "out.html", names="Brax")
    fails("--video", str(tmp_path / "none" / "out.gif"), names=tmp_path / "none")
    path = run / "checkpoint.msgpack"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        path.write_bytes(damaged)
        fails(names=path)
    shutil.copy(runs("ppo_obs_norm") / path.name, run)
    fails(names=path)
    path.unlink()
    fails(names="not been evaluated yet")
    path.write_bytes(whole)
    config = json.loads((run / "config.json").read_text())
    for changes, name in [
        ({"hidden_size": 8}, "other shapes"),
        ({"env_id": "CartPole-v9"}, "CartPole-v9"),
        ({"script": "../run/ppo_ff"}, "../run/ppo_ff"),
        ({"nonsense": 1}, "nonsense"),
        ({"script": "ppo_none"}, "ppo_none"),
        ({"script": "plot"}, "trains no policy"),
        ({"script": "disco_meta"}, "trains no policy"),
    ]:
        (run / "config.json").write_text(json.dumps(config | changes))
        fails("--checkpoint", "last", names=name)
    for text in ('{"script":', "[]", "{}"):
        (run / "config.json").write_text(text)
        fails(names=run / "config.json")


# ------------------------------------- benchmarks
@pytest.mark.parametrize(
    "name", ["disco_figures", "gpu", "ideas", "learning", "peers", "speed", "storm"]
)
def test_a_benchmark_explains_itself(name):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "usage" in result.stdout, result.stderr


def test_every_idea_changes_its_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ideas

    for script, _, replacements in ideas.IDEAS.values():
        source = (ROOT / f"{script}.py").read_text()
        for old, new in replacements:
            assert source.count(old) == 1, (script, old)
            source = source.replace(old, new)
        compile(source, script, "exec")


def test_the_rows_of_the_gpu_tables_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu
    import ideas

    for _, _, (first, *names) in gpu.CHOICES.values():
        for name in names:  # they are compared with the same program
            assert ideas.IDEAS[name][:2] == ideas.IDEAS[first][:2]
    for script, options, sizes, steps in gpu.SPEED.values():
        config = load_script(script).Config(**options, num_envs=sizes[-1])
        assert sizes[-1] <= config.batch_size <= steps
    scripts = {path.name for path in ROOT.glob("*.py")} - {"enjoy.py", "plot.py"}
    assert {f"{script}.py" for script, *_ in gpu.SPEED.values()} == scripts
    assert {words.split()[0] for words in gpu.RETURNS} == scripts - {"disco_meta.py"}
    for words in gpu.RETURNS:
        script, *options = words.split()
        config = tyro.cli(load_script(script[:-3]).Config, args=options)
        assert config.num_updates > 0


def test_the_gpu_tables_name_what_no_time_was_left_for(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    monkeypatch.setattr(gpu, "describe_machine", str)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", "0"])
    gpu.main()
    lines = capsys.readouterr().out.splitlines()
    alternatives = [name for *_, names in gpu.CHOICES.values() for name in names]
    for name in (*gpu.RETURNS, *gpu.SPEED, *alternatives):
        assert [line for line in lines if name in line and "no time left" in line], name


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "brax/hopper"])  # side by side, in turns
def test_a_peer_trains_each_seed_with_its_key(monkeypatch, env_id):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import peers

    returns = peers.train_seeds(jax.random.uniform, {"ENV_NAME": env_id}, 3)
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    assert returns.tolist() == [float(jax.random.uniform(key)) for key in keys]


def test_a_peers_brax_environment_resets_in_the_step(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import peers

    count_to_two = types.SimpleNamespace(
        reset_env=lambda key, params: (jax.numpy.float32(0), {"count": jax.numpy.float32(0)}),
        step_env=lambda key, state, action, params: (
            state["count"] + 1,
            {"count": state["count"] + 1},
            state["count"] + action,
            state["count"] == 1,
            {},
        ),
    )
    env, key = peers.BraxEnv(count_to_two), jax.random.key(0)
    obs, state = env.reset(key)
    seen = []
    for _ in range(3):
        obs, state, reward, done, _ = env.step(key, state, 10.0)
        seen.append((float(obs), float(state["count"]), float(reward), bool(done)))
    assert seen == [(1, 1, 10, False), (0, 0, 11, True), (1, 1, 10, False)]


def test_a_peers_layers_that_are_faster_on_a_cpu_are_those_of_flax(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import peers

    tiles = jax.random.randint(jax.random.key(0), (3, 5, 6), 0, 13)

    def parameters_and_gradient(linen):
        class Network(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, tiles):
                x = linen.Embed(13, 16)(tiles)
                options = {"kernel_init": flax.linen.initializers.orthogonal(2), "dtype": None}
                options |= {"padding": "VALID", "param_dtype": jax.numpy.float32}
                return linen.Conv(8, (2, 2), **options)(x)

        network = Network()
        params = network.init(jax.random.key(1), tiles)
        return params, jax.grad(lambda params: (network.apply(params, tiles) ** 3).sum())(params)

    params, gradient = parameters_and_gradient(flax.linen)
    same, close = parameters_and_gradient(peers.faster_on_cpu(flax.linen))
    jax.tree.map(np.testing.assert_array_equal, params, same)
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)
    jax.tree.map(near, gradient, close)


def test_a_timed_call_makes_that_many_steps(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import speed

    sizes = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "hidden_size": 4}
    compile_seconds, steps, seconds = speed.ours("ppo_ff", sizes, 100, 2)
    assert steps == 96 and len(seconds) == 2 and min(compile_seconds, *seconds) > 0


def test_flat_observations_are_vectors(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import speed

    module = load_script("ppo_ff")
    monkeypatch.setitem(sys.modules, "ppo_ff", module)
    monkeypatch.setattr(module, "make_env", module.make_env)  # restored afterwards
    same, options = speed.load("ppo_ff", {"env_id": "Breakout-MinAtar", "flat_obs": True})
    assert same is module and options == {"env_id": "Breakout-MinAtar"}
    reset, step, _ = module.make_env(module.Config(**options))
    obs, env_state = reset(jax.random.key(0))
    next_step = step(jax.random.key(1), env_state, 0)
    assert obs.shape == next_step[0].shape == next_step[-1].shape == (400,)


@pytest.mark.parametrize("script", ["ppo_ff", "ppo_rnn"])  # update_epochs: a number; None
def test_the_shuffle_is_timed(monkeypatch, script):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import speed

    monkeypatch.setitem(sys.modules, script, load_script(script))
    options = {"num_envs": 16, "num_steps": 4, "num_minibatches": 2}
    _, steps, seconds = speed.shuffling(script, options, 128, 2)
    assert steps == 128 and len(seconds) == 2 and min(seconds) > 0


# -------------------------------------- notebooks
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
