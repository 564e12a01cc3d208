"""plot.py, benchmarks/ and the notebooks: numbers, pictures and errors."""

import csv
import itertools
import json
import random
import shutil
import subprocess
import sys
import textwrap
import types

import flax.linen
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from conftest import ROOT, load_script
from PIL import Image

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
    assert ": 0.9 after" in capsys.readouterr().out


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


def test_an_option_that_differs_in_one_script_is_named_in_all(tmp_path):
    runs = [
        write_run(tmp_path / "a", made_up(3)),
        write_run(tmp_path / "b", made_up(3), lr=0.2),
        write_run(tmp_path / "c", made_up(3), lr=0.3, script="my_ppo"),
    ]
    (lines,) = plot.main([*runs, "--out", str(tmp_path / "out.png")]).values()
    assert set(lines) == {"ppo_ff lr=0.1", "ppo_ff lr=0.2", "my_ppo lr=0.3"}


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
    assert "9 seeds" in out and "notes.txt left out" in err
    assert f"{few} (40 steps, 3 agents) left out" in err and f"{many} (40 steps, 5" in err


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


# ------------------------------------- benchmarks
@pytest.mark.parametrize(
    "name",
    [
        "craftax_figure",
        "disco_figures",
        "families_figure",
        "gpu",
        "ideas",
        "kernels",
        "learning",
        "peers",
        "speed",
        "storm",
    ],
)
def test_a_benchmark_explains_itself(name):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "usage" in result.stdout, result.stderr


def test_the_score_of_craftax_counts_episodes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import craftax_figure

    # [updates, episodes, achievements]: two updates before each evaluation, none ends in the last.
    first = [np.array([[0, 100], [100, 100]]), np.array([[0, 0]])]
    second = [np.array([[100, 0], [100, 0], [0, 0]]), np.zeros((0, 2))]
    names = ["env/Achievements/a", "env/Achievements/b"]
    header = "update seed env_steps episode/count episode/return eval/return env/score time/sps"
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", np.zeros((4, 1)), seed=seed)
        with open(tmp_path / f"{seed}" / "metrics.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(header.split() + names)
            for i, episodes in enumerate(first + second):
                mean = list(episodes.mean(axis=0)) if len(episodes) else ["", ""]
                returns = [mean[0], seed + i if i % 2 else ""]
                table.writerow([i, 0, 10 * i, len(episodes), *returns, mean[1], 1, *mean])
    curves = craftax_figure.read([tmp_path / "0", tmp_path / "1"])
    assert curves.steps.tolist() == [10, 30]
    assert curves.eval_return.tolist() == [[1, 2], [3, 4]]
    assert curves.count.tolist() == [[3, 3], [3, 3]]
    expected = [np.concatenate(episodes).mean(axis=0) for episodes in (first, second)]
    for seed in (0, 1):
        np.testing.assert_allclose(curves.percentages[:, seed], expected)
        np.testing.assert_allclose(curves.training_return[:, seed], np.array(expected)[:, 0])
        np.testing.assert_allclose(curves.episode_score[:, seed], np.array(expected)[:, 1])
    # Hafner 2021, eq. 1, of 0 % and 100 %: the square root of 1 * 101, less 1.
    assert craftax_figure.crafter_score(np.array([0.0, 100.0])) == pytest.approx(101**0.5 - 1)


def test_every_idea_changes_its_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ideas

    for script, _, replacements in ideas.IDEAS.values():
        source = (ROOT / f"{script}.py").read_text()
        for old, new in replacements:
            assert source.count(old) == 1, (script, old)
            source = source.replace(old, new)
        compile(source, script, "exec")


def test_an_idea_is_measured_even_if_its_environment_prints(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ideas

    printed = subprocess.CompletedProcess([], 0, "Importing environments...\n[[2.0], [3.0]]\n", "")
    monkeypatch.setattr(ideas.subprocess, "run", lambda *_, **__: printed)
    monkeypatch.setattr(sys, "argv", ["ideas.py", "--only", "simple_spread", "--rounds", "1"])
    ideas.main()
    assert "| 2 (2 – 2) | 3 (3 – 3) | 1.50 × |" in capsys.readouterr().out


@pytest.mark.parametrize("size", [6, 512, 6144])
def test_the_idea_of_one_array_draws_permutations(monkeypatch, size):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ideas

    ((_, text),) = ideas.ONE_ARRAY
    largest = jnp.full((1, size), 2**32 - 1, jnp.uint32)
    bits = jnp.concatenate([jax.random.bits(jax.random.PRNGKey(0), (2, size)), largest])
    names = {"jnp": jnp, "bits": bits, "num_samples": size}
    exec(textwrap.dedent("        " + text), names)
    orders = np.asarray(names["indices"])
    assert (np.sort(orders) == np.arange(size)).all()
    assert (orders[0] != orders[1]).any()


def test_the_options_of_a_storm_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import storm

    scripts = {path.stem for path in ROOT.glob("*.py")} - {"enjoy", "plot"}
    assert scripts == storm.OPTIONS.keys() == storm.CHANGED.keys()
    for script in scripts:
        words = f"{storm.OPTIONS[script]} {storm.CHANGED[script]}".format(calls=5, steps=64)
        tyro.cli(load_script(script).Config, args=words.split())


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
    for words in (*gpu.RETURNS, *gpu.BRAX):
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
    for name in (*gpu.RETURNS, *gpu.PEERS, *gpu.SPEED, *alternatives):
        assert [line for line in lines if name in line and "no time left" in line], name


def test_the_programs_beside_peers_are_ours(monkeypatch):
    """Every work has a program of ours, and peers get as many environments, steps and seeds."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    for work, (steps, programs) in gpu.PEERS.items():
        script, options = programs["ours"]
        config = load_script(script).Config(
            **{name: x for name, x in options.items() if name != "flat_obs"}
        )
        assert config.batch_size * config.num_seeds <= steps, work
        for system, theirs in programs.items():
            theirs = {name.lower(): x for name, x in theirs.items()} if system != "ours" else {}
            for name in {"num_envs", "num_steps", "num_minibatches"} & theirs.keys():
                assert theirs[name] == getattr(config, name), (work, system, name)
            assert system == "ours" or theirs.get("seeds", 1) == config.num_seeds
    small = gpu.smaller({"num_envs": 2048, "num_steps": 32, "num_seeds": 1}, 64)
    assert small == {"num_envs": 32, "num_steps": 32, "num_seeds": 1}
    assert gpu.smaller({"NUM_ENVS": 4, "SEEDS": 4096}, 64) == {"NUM_ENVS": 4, "SEEDS": 64}


def test_kernels_in_loops_are_counted(monkeypatch):
    """On a program for a CPU: five steps, of which each writes a row of three steps of its own."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kernels

    def inner(x, _):
        return jax.numpy.sin(x) @ x, x.sum()

    def outer(x, _):
        return jax.lax.scan(inner, x, None, 3)

    program = jax.jit(lambda x: jax.lax.scan(outer, x, None, 5)).lower(jax.numpy.eye(8)).compile()
    whole = kernels.count(kernels.parse(program.as_text()), "ENTRY")
    (loop,) = whole.loops
    (innermost,) = loop.loops
    assert (loop.trips, innermost.trips) == (5, 3) and not innermost.loops
    alone = innermost.kernels.total()
    assert alone >= 3  # a product, a write and the condition of the loop
    assert kernels.total(loop).total() == loop.kernels.total() + 3 * alone
    assert kernels.total(whole).total() == (
        whole.kernels.total() + 5 * (loop.kernels.total() + 3 * alone)
    )
    assert loop.kernels["write into an array"] + innermost.kernels["write into an array"] >= 1


def test_the_kernels_of_all_scripts_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kernels

    scripts = {path.stem for path in ROOT.glob("*.py")} - {"enjoy", "plot", "disco", "disco_meta"}
    assert {script for script, _ in kernels.PROGRAMS.values()} == scripts
    for script, options in kernels.PROGRAMS.values():
        load_script(script).Config(**options)


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
RUNS = {"disco": 2, "quickstart": 2, "sweep": 0, "xland": 2}  # run folders that each writes
VIDEOS = ("quickstart", "xland")


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
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "disco.md", tmp_path / "docs")  # a table that disco.ipynb draws
    monkeypatch.setenv("PPO_SHORT", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path / "notebooks")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    _, shown = outputs(notebook)
    assert [output for output in shown if "image/png" in output.get("data", {})]
    assert any("image/gif" in x.get("data", {}) for x in shown) == (path.stem in VIDEOS)
    assert len(list(tmp_path.glob("runs/*/*/summary.json"))) == RUNS[path.stem]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs(path):
    import nbformat

    cells, shown = outputs(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [output for output in shown if "image/png" in output.get("data", {})]
    assert any("image/gif" in x.get("data", {}) for x in shown) == (path.stem in VIDEOS)
    assert not [output for output in shown if output.output_type == "error"]
    assert "site-packages" not in json.dumps(shown)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == list(RUNS)


def test_the_searcher_of_four_rooms_sees_what_agents_see(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import four_rooms

    env, params = four_rooms.xminigrid.make("MiniGrid-FourRooms")
    timestep = jax.vmap(lambda key: env.reset(params, key))(jax.random.split(jax.random.key(1), 16))
    agent, directions = timestep.state.agent, set()
    for i, (row, column) in enumerate(agent.position.tolist()):
        directions.add(direction := int(agent.direction[i]))
        grid, sight = timestep.state.grid[i, :, :, 0], timestep.observation[i, ::-1, :, 0]
        tiles = list(four_rooms.visible((row, column, direction)))  # from the agent's row on
        for (y, x), tile in zip(tiles, sight.ravel(), strict=True):
            if 0 <= y < params.height and 0 <= x < params.width:
                assert grid[y, x] == tile
    assert len(directions) == 4


def test_the_searcher_of_four_rooms_by_hand(monkeypatch):
    """A corridor of four tiles, from the second to the right; behind it, one more tile."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import four_rooms

    grid = np.full((3, 6), int(four_rooms.Tiles.WALL))
    grid[1, 1:5] = int(four_rooms.Tiles.FLOOR)
    maze, start = four_rooms.Maze(grid), (1, 2, 1)
    assert [maze.steps(start, (1, column)) for column in (1, 3, 4)] == [3, 1, 2]  # two turns first
    assert four_rooms.steps_of_plan(maze, start, 1.0, 0.0, random.Random(0)) == (3 + 1 + 2) / 3
