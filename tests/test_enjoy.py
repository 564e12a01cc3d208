"""enjoy.py: policies, returns, reports, videos and errors."""

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import itertools
import json
import shutil
import subprocess
import sys
import types
from functools import partial

import flax.serialization
import imageio.v3
import jax
import numpy as np
import pytest
import scipy.stats
import xminigrid
from conftest import ROOT, load_script, tiny, with_devices
from PIL import Image
from xminigrid.core.constants import Colors, Tiles

import enjoy
import plot

# ------------------------------------------- runs
DISCO = {"weights": "random", "env_id": "Catch-5x5", "num_steps": 8, "num_envs": 2}
DISCO |= {"replay_batch": 4, "replay_size": 6, "hidden_sizes": (8, 8)}
DISCO |= {"model_size": 4, "branch_size": 4, "eval_episodes": 4, "num_evals": 2}
DISCO |= {"total_timesteps": 64}
# ppo_drift acts as ppo_ff does, ppo_continuous as ppo_obs_norm, ppo_rnn as ppo_meta.
PLAYED = ["ppo_ff", "ppo_obs_norm", "ppo_vtrace", "disco"]


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


@pytest.mark.parametrize("script", ["ppo_ff", "ppo_rnn"])
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
    viewer, record = enjoy.make_viewer(config), enjoy.make_recorder(module, config)
    episode = jax.jit(enjoy.get_episode(module, config))
    fallen = lambda s: abs(float(s.x)) > 2.4 or abs(float(s.theta)) > np.radians(12)
    for key in jax.random.split(jax.random.key(1), 2):
        steps = record(params, key)
        *before, final = enjoy.states_of(steps, viewer)
        total = episode(params, key)
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
    lengths, make_recorder = [], enjoy.make_recorder

    def make_remembering(*args):
        record = make_recorder(*args)

        def remember(*args):
            steps = record(*args)
            lengths.append(len(steps))
            return steps

        return remember

    monkeypatch.setattr(enjoy, "make_recorder", make_remembering)
    video = tmp_path / name
    words = [str(runs(script)), "--episodes", "3", "--video", str(video), "--video-episodes", "2"]
    enjoy.main([*words, "--every", str(every)])
    assert len(lengths) == 2
    frames = sum(len({*range(0, length + 1, every), length}) for length in lengths)
    assert count_frames(video) == frames
    if name == "out.gif":  # CartPole has 50 frames per second; the end of each episode is held
        image, durations = Image.open(video), []
        for i in range(frames):
            image.seek(i)
            durations.append(image.info["duration"])
        expected = [[20] * length + [1000] for length in lengths]
        assert durations == sum(expected, [])
    assert f"{frames} frames written to {video}" in capsys.readouterr().out


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
    assert (np.diff(enjoy.play(module, config, same, keys).returns, axis=0) != 0).any()


# --------------------------------------- policies
@pytest.mark.parametrize("script", [*PLAYED, "ppo_meta", "ippo"])
def test_a_policy_acts_outside_of_its_script(script, runs, many_agents):
    """As in the script's own episode, with memory and for many agents too, on NumPy arrays."""
    run = many_agents if script == "ippo" else runs(script)
    module, config, params = enjoy.load_run(run, seed_index=1)
    config = dataclasses.replace(config, eval_greedy=True)
    episode = jax.jit(enjoy.get_episode(module, config))
    act = enjoy.load_policy(run, seed_index=1, greedy=True)
    reset, step, *_ = module.make_env(config)
    step = jax.jit(step)
    for seed in (0, 1):
        expected = episode(params, jax.random.PRNGKey(seed))
        key, reset_key = jax.random.split(jax.random.PRNGKey(seed))
        is_test = [True] if script == "ppo_meta" else []  # its evaluation plays tasks held out
        (obs, env_state), total, first, over = reset(reset_key, *is_test), 0.0, True, False
        while not np.all(over):
            key, action_key, step_key = jax.random.split(key, 3)
            obs = jax.tree.map(np.asarray, obs)
            if isinstance(obs, tuple) and seed == 0:
                obs = obs._asdict()
            action = act(obs, np.asarray(action_key), first)
            assert type(action) is np.ndarray
            obs, env_state, reward, *ended = step(step_key, env_state, action)
            over = over | np.logical_or(*ended[:2]) if ended[1:] else ended[0]  # [K] of many agents
            total, first = total + reward.sum(), False
        assert total == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_a_policy_acts_in_gymnasium(runs):
    """On its float64 or float32 observations, without a key."""
    import gymnasium

    act, again = enjoy.load_policy(runs("ppo_ff")), enjoy.load_policy(str(runs("ppo_ff")))
    env, actions = gymnasium.make("CartPole-v1"), []
    obs, _ = env.reset(seed=0)
    for _ in range(30):
        action = act(obs)
        assert action == again(np.float64(obs).tolist())  # the same draws
        obs, _, terminated, _, _ = env.step(action)
        actions.append(int(action))
        if terminated:
            obs, _ = env.reset()
    assert set(actions) == {0, 1}


def test_a_policy_is_that_of_one_seed_and_checkpoint(runs, tmp_path):
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    path = run / "checkpoint.msgpack"
    state = flax.serialization.msgpack_restore(path.read_bytes())
    # As if training had turned the policy around: without biases, the network is an odd function.
    state["best_params"] = jax.tree.map(lambda x: -x, state["params"])
    path.write_bytes(flax.serialization.msgpack_serialize(state))
    seen = []
    for checkpoint, seed_index in (("best", 0), ("best", 1), ("last", 0)):
        module, config, params = enjoy.load_run(run, checkpoint, seed_index)
        act = enjoy.load_policy(run, seed_index, greedy=True, checkpoint=checkpoint)
        obs = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
        policy, _ = module.ActorCritic(2, config.hidden_size, is_image=False).apply(params, obs)
        seen.append([int(act(x)) for x in obs])
        assert seen[-1] == policy.mode().tolist()
    assert seen[0] != seen[1] and seen[0] != seen[2]


def test_a_policy_samples_as_its_run_does(runs, tmp_path):
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    keys = jax.random.split(jax.random.PRNGKey(0), 32)

    def draw(**options):
        act = enjoy.load_policy(run, **options)
        return {int(act(np.ones(4), key)) for key in keys}

    assert draw() == {0, 1} and len(draw(greedy=True)) == 1
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(options | {"eval_greedy": True}))
    assert draw(greedy=False) == {0, 1} and len(draw()) == 1


def test_memory_lasts_until_the_next_episode(runs):
    act = enjoy.load_policy(runs("ppo_vtrace"), greedy=True)  # samples may be clipped alike
    key, rng = jax.random.PRNGKey(0), np.random.default_rng(0)
    first, *others = rng.normal(size=(4, 3))
    alone = act(first, key, first=True)
    np.testing.assert_array_equal(act(first, key, first=True), alone)
    for obs in others:
        act(obs, key)
    assert (act(first, key) != alone).any()
    np.testing.assert_array_equal(act(first, key, first=True), alone)


def test_an_observation_of_another_shape_is_an_error(runs, many_agents):
    with pytest.raises(ValueError, match=r"shapes \[\[1, 4\]\], in the run \[\[4\]\]"):
        enjoy.load_policy(runs("ppo_ff"))(np.zeros((1, 4)))
    obs = {"features": np.zeros((3, 8)), "mask": np.ones((3, 3)), "active": np.ones(2)}
    act = enjoy.load_policy(many_agents)
    with pytest.raises(ValueError, match=r"\[2\]\], in the run .*\[3\]\]"):
        act(obs)
    assert act(obs | {"active": np.ones(3)}).shape == (3,)


# ---------------------------------------- reports
def test_the_statistics_of_a_report():
    values = np.random.default_rng(0).normal(3, 2, (5, 40)).astype(np.float32)
    found = enjoy.summarize(values)
    means = [sum(map(float, row)) / 40 for row in values]
    assert found["per_seed"] == pytest.approx(means)
    assert found["mean"] == pytest.approx(sum(means) / 5)
    ordered = sorted(values.ravel())
    assert found["median"] == pytest.approx((ordered[99] + ordered[100]) / 2)
    assert (found["min"], found["max"]) == pytest.approx((ordered[0], ordered[-1]))
    test = scipy.stats.ttest_1samp(means, 0)
    assert found["interval"] == pytest.approx(list(test.confidence_interval()))
    one = enjoy.summarize(values[:1])["interval"]  # of one seed: over episodes
    test = scipy.stats.ttest_1samp(values[0].astype(float), 0)
    assert one == pytest.approx(list(test.confidence_interval()), rel=1e-5)
    assert enjoy.summarize(values[:1, :1])["interval"] is None


def read_table(text):
    """{row: its numbers}."""
    header, *lines = text.splitlines()
    assert header.split() == ["mean", "±", "95", "%", "median", "min", "max"]
    return {line.split()[0]: [float(x) for x in line.split()[1:]] for line in lines}


def read_report(run, *words):
    """What is printed as a table and as JSON, and the returns [S, E]."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        returns = enjoy.main([str(run), "--episodes", "6", *words])
    title, table = out.getvalue().split("\n", 1)
    table, _, note = table.rstrip().rpartition("\n")
    assert f"on {enjoy.load_run(run)[1].env_id}: best policy" in title and "6 " in title
    with contextlib.redirect_stdout(io.StringIO()) as out:
        enjoy.main([str(run), "--episodes", "6", "--json", *words])
    return read_table(table), note, json.loads(out.getvalue()), returns


def row_of(statistics):
    """The numbers of a row of the table."""
    half = (statistics["interval"][1] - statistics["interval"][0]) / 2
    return [statistics["mean"], half, *(statistics[name] for name in ("median", "min", "max"))]


def test_the_report_of_a_run(runs):
    run = runs("ppo_ff")
    table, note, report, returns = read_report(run)
    assert set(table) == {"return", "length"} and "over seeds" in note
    assert table["return"] == pytest.approx(row_of(report["return"]), rel=5e-3)
    assert report["return"] == enjoy.summarize(returns)
    assert report["length"] == report["return"]  # CartPole pays 1 for each step
    about = {"script": "ppo_ff", "env_id": "CartPole-v1", "run_dir": str(run), "seeds": [0, 1]}
    about |= {"checkpoint": "best", "greedy": False, "episodes": 6}
    assert {name: report[name] for name in about} == about
    _, note, report, _ = read_report(run, "--seed-index", "1", "--greedy")
    assert report["seeds"] == [1] and report["greedy"] and "over episodes" in note
    assert report["return"]["per_seed"] == [report["return"]["mean"]]


def test_json_is_all_that_stdout_gets(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(enjoy, "play", play_nothing)
    run, video = shutil.copytree(runs("ppo_ff"), tmp_path / "run"), tmp_path / "out.gif"
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["enjoy.py", str(run), "--json", "--video", str(video)])
    assert enjoy.cli() is None
    out, err = capsys.readouterr()
    assert json.loads(out)["return"]["mean"] == 0
    assert "absolute metric written" in err and f"frames written to {video}" in err


@pytest.mark.parametrize(
    "script, kind, names",
    [
        ("ippo", "agents", ["ring_3", "ring_4", "ring_5"]),
        ("ppo_meta", "trial_episodes", ["episode_1", "episode_2", "episode_3", "episode_4"]),
    ],
)
def test_a_report_has_each_agent_or_episode_of_a_trial(
    script, kind, names, runs, many_agents, monkeypatch
):
    run = many_agents if script == "ippo" else runs(script)
    parts = np.random.default_rng(0).normal(size=(2, 6, len(names)))
    monkeypatch.setattr(enjoy, "play", lambda *_: enjoy.Played(parts, parts[..., 0]))
    table, _, report, returns = read_report(run)
    np.testing.assert_array_equal(returns, parts.sum(axis=-1))
    assert list(table) == ["return", *names, "length"] and list(report[kind]) == names
    for k, name in enumerate(names):
        assert report[kind][name] == enjoy.summarize(parts[..., k])
        assert table[name] == pytest.approx(row_of(report[kind][name]), rel=5e-3, abs=1e-3)


@pytest.mark.parametrize("script", ["ppo_meta", "ippo"])
def test_the_parts_of_a_return_are_those_of_a_recording(script, runs, many_agents):
    run = many_agents if script == "ippo" else runs(script)
    module, config, params = enjoy.load_run(run, seed_index=1)
    if script == "ppo_meta":  # long enough for a random walk to the goal
        config = dataclasses.replace(config, env_params='{"max_steps": 64, "view_size": 3}')
    play, record = jax.jit(enjoy.get_play(module, config)), enjoy.make_recorder(module, config)
    differ = False
    for key in jax.random.split(jax.random.PRNGKey(2), 4):
        steps = record(params, key)
        returns, length, _ = play(params, key)
        rewards = np.array([step.reward for step in steps])
        if script == "ppo_meta":  # [T] -> [T, K]
            rewards = rewards[:, None] * np.eye(4)[[int(s.env_state.episode) for s in steps]]
        np.testing.assert_allclose(returns, rewards.sum(axis=0), atol=1e-5)
        assert length == len(steps)
        differ |= len(np.unique(returns)) > 1
    assert differ


# -------------------------------- absolute metric
def play_nothing(module, config, params, keys):
    return enjoy.Played(np.zeros((*keys.shape[:2], 1)), np.zeros(keys.shape[:2]))


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
    monkeypatch.setattr(enjoy, "play", play_nothing)
    run = shutil.copytree(runs("ppo_ff"), tmp_path / "run")
    before = (run / "summary.json").read_bytes()
    enjoy.main([str(run), *words])
    assert (run / "summary.json").read_bytes() == before
    enjoy.main([str(run), "--no-greedy", "--episodes", "2000"])
    assert json.loads((run / "summary.json").read_text())["absolute_return_mean"] == 0


@pytest.mark.parametrize(("script", "of_parts"), [("ippo", np.sum), ("ppo_meta", np.mean)])
def test_the_absolute_metric_is_of_the_kind_of_an_evaluation(
    script, of_parts, runs, many_agents, tmp_path, monkeypatch
):
    """The sum over agents, the mean over the episodes of a trial."""
    run = shutil.copytree(many_agents if script == "ippo" else runs(script), tmp_path / "run")
    parts = np.random.default_rng(0).normal(size=(2, 1280, 3 if script == "ippo" else 4))
    monkeypatch.setattr(enjoy, "play", lambda *_: enjoy.Played(parts, parts[..., 0]))
    enjoy.main([str(run)])
    expected = of_parts(parts, axis=-1).mean(axis=1)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["absolute_return_per_seed"] == pytest.approx(expected.tolist())
    assert summary["absolute_return_mean"] == pytest.approx(expected.mean())


def test_an_unfinished_run_has_no_absolute_metric(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(enjoy, "play", play_nothing)
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
    run = run.rename(tmp_path / "moved")
    returns = enjoy.main([str(run), "--episodes", "4"])
    assert enjoy.load_policy(run)(np.zeros(4)) in (0, 1)
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
    draw, advance, fps, *_ = make_viewer(env_id)
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


# ----------------------------------------- trials
TILE = 80  # pixels of a 5 x 5 grid


def record_actions(config, actions):
    """A trial in which these actions are taken."""
    reset, step, _ = load_script("ppo_meta").make_env(config)
    key, steps, step = jax.random.PRNGKey(0), [], jax.jit(step)
    _, env_state = reset(key)
    for action in map(np.int32, actions):
        _, after, reward, _ = step(key, env_state, action)
        steps.append(enjoy.Step(key, jax.tree.map(np.asarray, env_state), action, reward))
        env_state = after
    return jax.tree.map(np.asarray, steps)


def golden(picture):
    """[5, 5], the number of golden pixels in each tile."""
    color = np.array([int(enjoy.GOLD[i : i + 2], 16) for i in (1, 3, 5)])
    gold = (np.asarray(picture)[: 5 * TILE, : 5 * TILE] == color).all(axis=-1)
    return gold.reshape(5, TILE, 5, TILE).sum(axis=(1, 3))


def test_a_video_of_a_trial_marks_what_pays():
    config = tiny(load_script("ppo_meta"), trial_episodes=2)  # MiniGrid-Empty-5x5, 16 steps
    goal = [0, 0, 1, 0, 0]  # forward, forward, turn, forward, forward
    steps = record_actions(config, [*goal, *[1] * 16])
    viewer = enjoy.make_viewer(config)
    shots = enjoy.shots_of(steps, viewer)
    finals = [i for i, shot in enumerate(shots) if shot.is_final]
    assert finals == [5, 22] and [shots[i].step for i in finals] == [5, 21]
    first, last = (shots[i].env_state for i in finals)
    assert first.timestep.last() and first.timestep.state.agent.position.tolist() == [3, 3]
    assert [viewer.label(x) for x in (first, last)] == [
        f"trial episode 1/2   paid {1 - 0.9 * 5 / 16:.3g}",
        "trial episode 2/2",
    ]
    frames = enjoy.frames_of(steps, viewer, number=1, every=100)
    assert [is_final for _, is_final in frames] == [False, True, True]
    before, paid, unpaid = (golden(picture) for picture, _ in frames)
    for tiles in (before, paid, unpaid):  # the goal, alone
        assert tiles[3, 3] > 0 and (np.delete(tiles.ravel(), 18) == 0).all()
    assert before[3, 3] == unpaid[3, 3] == 4 * 8 * (TILE - 8)  # the edge of a square
    assert paid[3, 3] > 1.5 * before[3, 3]


def test_what_pays_is_found_by_trying():
    def find(env_id, env_params, ruleset=None):
        config = types.SimpleNamespace(env_id=env_id, env_params=json.dumps(env_params))
        env, params = enjoy.load_xminigrid(config)
        if ruleset:
            params = params.replace(ruleset=ruleset)
        reset = jax.jit(env.reset)
        timesteps = [reset(params, key) for key in jax.random.split(jax.random.PRNGKey(0), 6)]
        finder = enjoy.pay_finder(config)
        return [(timestep.state, np.argwhere(finder(timestep)).tolist()) for timestep in timesteps]

    found = find("MiniGrid-MemoryS8", {})
    for state, pays in found:
        assert pays == [state.carry.success_pos.tolist()]
    assert len({str(pays) for _, pays in found}) == 2

    goal = xminigrid.core.goals.AgentHoldGoal(np.array([Tiles.BALL, Colors.RED])).encode()
    rules = xminigrid.core.rules.EmptyRule().encode()[None]
    tiles = np.array([[Tiles.BALL, Colors.RED], [Tiles.BALL, Colors.BLUE]], np.uint8)
    ruleset = xminigrid.types.RuleSet(goal, rules, tiles)
    for state, pays in find("XLand-MiniGrid-R1-9x9", {"height": 6, "width": 6}, ruleset):
        grid = np.asarray(state.grid)
        (ball,) = np.argwhere((grid == tiles[0]).all(axis=-1))
        around = ball + [[-1, 0], [0, -1], [0, 1], [1, 0]]
        assert pays == [cell.tolist() for cell in around if grid[*cell, 0] == Tiles.FLOOR]


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
    viewer, record = enjoy.make_viewer(config), enjoy.make_recorder(module, config)
    episode = jax.jit(enjoy.get_episode(module, config))
    over = lambda state: not state["distance"].any() or state["step"] == 8
    lengths = set()
    for key in jax.random.split(jax.random.PRNGKey(1), 4):
        steps = record(params, key)
        *before, (final, _) = enjoy.states_of(steps, viewer)
        total = episode(params, key)
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

    draw, advance, fps, *_ = make_viewer(env_id, share_parameters=True)
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
