"""plot.py as a command: names, pictures, messages and exports. Its numbers: test_tools.py."""

import json
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from test_tools import STEPS, made_up, write_run

import plot

NAN = np.nan


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def one_run(name, seeds=3, **options):
    """A made-up run in the current folder."""
    return write_run(Path.cwd() / name, made_up(seeds), **options)


def error_of(capsys, *words):
    """The command's only line."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["plot.py", *map(str, words)])
        plot.cli()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out and len(err.splitlines()) == 1
    return err.removeprefix("error: ").strip()


def legend_of(*runs, labels=None):
    """The names in the legend of the first environment, without numbers of seeds."""
    panels = plot.group([plot.read_run(Path(run), "eval/return") for run in runs])
    if labels:
        panels = plot.rename(panels, labels)
    axes = plot.draw(panels, "eval/return", with_time=False).axes[0]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    return [text.split(" (")[0] for text in texts if text != "training return"]


def test_each_environment_of_a_run_has_a_panel_and_agents_of_its_own():
    """disco_meta.py: its agents are in the order of its environments."""
    path = Path(one_run("run", seeds=6, env_id=["b", "a", "b"]))
    whole = plot.read_run(path, "eval/return")
    panels = plot.main([str(path), "--out", "picture.png"])
    assert list(panels) == ["b #1", "a", "b #2"]
    for i, lines in enumerate(panels.values()):
        (curve,) = lines.values()
        expected = whole.curve.values[:, 2 * i : 2 * i + 2]
        np.testing.assert_array_equal(curve.values[-1], expected[-1])
        assert curve.values.shape[1] == 2 and curve.seconds[-1] == whole.curve.seconds[-1]


# ------------------------------------------- names
def test_numbers_in_the_legend_are_in_order():
    """As words, 1e-05 would come last, and 128 before 64."""
    rates = [0.01, 1e-05, 0.001, 0.0003]
    runs = [one_run(f"lr{k}", lr=lr) for k, lr in enumerate(rates)]
    assert legend_of(*runs) == [f"ppo_ff lr={lr}" for lr in sorted(rates)]
    sizes = [128, 64, 256]
    runs = [one_run(f"n{k}", lr=0.3, num_envs=n) for k, n in enumerate(sizes)]
    assert legend_of(*runs) == [f"ppo_ff num_envs={n}" for n in sorted(sizes)]


def test_scripts_are_in_the_order_of_the_arguments():
    runs = [one_run("a", script="my_ppo"), one_run("b", lr=0.2), one_run("c", lr=0.1)]
    assert legend_of(*runs) == ["my_ppo lr=0.1", "ppo_ff lr=0.1", "ppo_ff lr=0.2"]
    assert legend_of(*runs[::-1]) == ["ppo_ff lr=0.1", "ppo_ff lr=0.2", "my_ppo lr=0.1"]


def test_a_loss_that_is_not_the_default_is_named_next_to_another_script():
    ff = one_run("ff")
    clip = one_run("clip", script="ppo_drift", drift="clip", kl_coef=0.5)
    spo = one_run("spo", script="ppo_drift", drift="spo")
    assert legend_of(ff, clip) == ["ppo_ff", "ppo_drift"]
    assert legend_of(ff, spo) == ["ppo_ff", "ppo_drift drift=spo"]
    assert legend_of(spo) == ["ppo_drift"]


def test_the_default_of_a_copy_is_that_of_the_source_in_its_folder():
    copy = one_run("copy", script="my_ppo", drift="spo")
    Path("copy/my_ppo.py").write_text('class Algorithm:\n    drift: str = "spo"\n')
    assert legend_of(one_run("ff"), copy) == ["ppo_ff", "my_ppo"]
    drift = one_run("drift", script="ppo_drift", drift="clip")  # another default
    assert legend_of(drift, copy) == ["ppo_drift drift=clip", "my_ppo drift=spo"]


def test_a_switch_that_is_not_at_its_default_is_named_next_to_another_script():
    """anneal_ent: on in ppo_ff, off in ppo_rnn."""
    ff = one_run("ff", anneal_ent=True)
    rnn = one_run("rnn", script="ppo_rnn", anneal_ent=False, memory=True)
    blind = one_run("blind", script="ppo_rnn", anneal_ent=False, memory=False)
    assert legend_of(ff, rnn) == ["ppo_ff", "ppo_rnn"]
    assert legend_of(ff, blind) == ["ppo_ff", "ppo_rnn memory=False"]


def test_a_run_without_rows_does_not_stop_the_others(capsys):
    """It is compiling, or has diverged."""
    runs = [one_run("a"), one_run("early")]
    table = Path("early", "metrics.csv")
    table.write_text(table.read_text().splitlines()[0] + "\n")
    ((line,),) = (x.values() for x in plot.main(runs).values())
    np.testing.assert_array_equal(line.values, made_up(3))
    assert f"{runs[1]} left out: it has no rows in metrics.csv" in capsys.readouterr().err


def test_a_run_that_was_continued_for_longer_is_named(capsys):
    runs = [one_run("a"), one_run("longer", lr=0.3)]
    table = Path("longer", "metrics.csv")
    header, *rows = table.read_text().splitlines()
    rates = [0.2, 0.1, 0.15, 0.05]
    rows = [f"{row},{rates[int(row.split(',')[0]) - 1]}" for row in rows]
    assert len(rows) == 3 * len(rates)
    table.write_text("\n".join([f"{header},optim/lr", *rows]))
    plot.main(runs)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"{runs[1]}: its learning rate rises after 20 steps, where it was continued"
    )


def test_labels_replace_the_names_in_the_order_of_the_legend(capsys):
    runs = [one_run("a", lr=0.2), one_run("b", lr=0.1)]
    assert legend_of(*runs, labels=["low", "high"]) == ["low", "high"]
    (lines,) = plot.main([*runs, "--labels", "low", "high"]).values()
    np.testing.assert_array_equal(lines["high"].values, made_up(3))
    assert "high (ppo_ff lr=0.2): " in capsys.readouterr().out
    message = error_of(capsys, *runs, "--labels", "low")
    assert message == "--labels needs 2 names, in this order: ppo_ff lr=0.1; ppo_ff lr=0.2"
    assert "CartPole-v1" in error_of(capsys, *runs, "--labels", "PPO", "PPO")


def test_environments_may_share_a_label():
    """Each with the learning rate that suits it."""
    runs = [one_run("a"), one_run("b", script="my_ppo")]
    runs += [one_run(name, env_id="Acrobot-v1", lr=lr) for name, lr in (("c", 1), ("d", 2))]
    names = ["PPO", "mine", "PPO", "mine"]
    panels = plot.main([*runs, "--labels", *names])
    assert [list(lines) for lines in panels.values()] == [["PPO", "mine"]] * 2


# ----------------------------------------- repeats
def test_of_a_repeated_seed_the_longer_run_counts_in_any_order(capsys):
    long = one_run("long", 2, seed=7)
    short = write_run(Path.cwd() / "short", made_up(5)[:2], seed=7)
    other = one_run("other", 4, seed=8)
    for runs in ([long, short, other], [short, other, long], [other, short, long]):
        ((line,),) = (x.values() for x in plot.main(runs).values())
        np.testing.assert_array_equal(line.values, np.hstack([made_up(2), made_up(4)]))
        out, err = capsys.readouterr()
        assert "6 seeds" in out
        assert f"{short} (20 steps, 5 agents) left out" in err
        assert f"{long} (40 steps, 2 agents)" in err and len(err.splitlines()) == 1


def test_the_same_folder_twice_is_one_run(capsys):
    run = one_run("a")
    ((line,),) = (x.values() for x in plot.main([run, run]).values())
    assert line.values.shape[1] == 3 and not capsys.readouterr().err


# ---------------------------------------- messages
def test_an_unknown_metric_is_one_line_with_the_columns(capsys):
    run = one_run("a")
    message = error_of(capsys, run, "--metric", "return")
    columns = "update, seed, env_steps, episode/return, eval/return, time/sps"
    assert message == f"{run} has no column return; it has {columns}"


def test_a_run_without_rows_is_one_line(capsys):
    run = one_run("a")
    header = Path(run, "metrics.csv").read_text().splitlines()[0]
    Path(run, "metrics.csv").write_text(header + "\n")
    assert error_of(capsys, run) == f"{run} has no rows in metrics.csv yet"


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_two_seeds_have_an_interval_and_one_has_none(seeds, capsys):
    """That of two or three is their range, as docs/runs.md says."""
    run = one_run("a", seeds)
    plot.main([run])
    last = made_up(seeds)[-1]
    interval = f" [{last.min():.4g}, {last.max():.4g}]" if seeds > 1 else ""
    assert f"ppo_ff: {last.mean():.4g}{interval} after 40 steps" in capsys.readouterr().out
    panels = plot.group([plot.read_run(Path(run), "eval/return")])
    (axes,) = plot.draw(panels, "eval/return", with_time=False).axes
    assert len(axes.collections) == (seeds > 1)
    curve = panels["CartPole-v1"]["ppo_ff"].curve
    left, right = plot.draw_trial([curve, curve], "task").axes
    assert (len(left.collections), len(right.collections)) == (2 * (seeds > 1), seeds > 1)


# ---------------------------------------- pictures
def test_the_picture_is_a_pdf_or_a_png_by_its_name(capsys):
    run = one_run("a")
    plot.main([run, "--out", "out.pdf"])
    plot.main([run, "--out", "out.png"])
    pdf = Path("out.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/Type3" not in pdf  # fonts that conferences refuse
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    assert error_of(capsys, run, "--out", "out").startswith("cannot write out: ")
    assert not Path("out").exists()


def test_a_long_name_does_not_shrink_the_axes():
    def width(label):
        figure = plot.draw({"CartPole-v1": {label: line}}, "eval/return", with_time=False)
        figure.savefig("out.png")
        return figure.get_figwidth() * figure.axes[0].get_position().width

    (line,) = plot.group([plot.read_run(Path(one_run("a")), "eval/return")])["CartPole-v1"].values()
    assert width("ppo_drift drift=adaptive_kl adaptive_kl_target=0.02 lr=0.003") > 0.9 * width(
        "ppo"
    )


def test_only_a_picture_needs_matplotlib(monkeypatch, capsys):
    for name in [x for x in sys.modules if x.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    run = one_run("a")
    assert error_of(capsys, run) == "a picture needs matplotlib: pip install matplotlib"
    plot.main([run, "--json", "scores.json"])
    assert Path("scores.json").exists()


# ----------------------------------------- exports
def read_events(path):
    """{column: [(env_steps, seconds, value)]} of an event file, the format of TensorBoard.

    A record is its length [8 bytes], a checksum [4], an Event and a checksum [4].
    """
    from tensorboardX.proto.event_pb2 import Event

    data, columns = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        for value in event.summary.value:
            entry = (event.step, event.wall_time, value.simple_value)
            columns.setdefault(value.tag, []).append(entry)
        data = data[16 + length :]
    return columns


def test_tensorboard_gets_every_column_of_every_seed():
    returns = np.array([[NAN, 1], [2, 3], [NAN, NAN], [4, 5]])
    run = write_run(Path.cwd() / "run", returns, speeds=(4, 4, 2, 2))
    plot.main([run, "--tensorboard", "tb"])
    for seed in range(2):
        (path,) = Path(f"tb/run/seed_{seed}").iterdir()
        columns = read_events(path)
        assert set(columns) == {"episode/return", "eval/return", "time/sps"}
        known = np.flatnonzero(np.isfinite(returns[:, seed]))
        steps, _, values = zip(*columns["eval/return"], strict=True)
        assert steps == tuple(STEPS * (known + 1)) and values == tuple(returns[known, seed])
        _, seconds, values = zip(*columns["time/sps"], strict=True)
        # An update is 10 steps * 2 seeds; the clock of the last one is that of the file.
        np.testing.assert_allclose(np.diff(seconds), [5, 10, 10], atol=1e-3)
        assert seconds[-1] == pytest.approx(Path(run, "metrics.csv").stat().st_mtime, abs=1)
        assert values == (4, 4, 2, 2)


def test_tensorboard_files_are_replaced_and_those_of_others_kept():
    run = one_run("run", 1)
    plot.main([run, "--tensorboard", "tb"])
    (old,) = Path("tb/run/seed_0").iterdir()
    old = old.rename(old.with_name(f"events.out.tfevents.1.host{old.suffix}"))
    others = old.with_name("events.out.tfevents.1.host")
    others.touch()
    plot.main([run, "--tensorboard", "tb"])
    assert not old.exists() and others.exists() and len(list(others.parent.iterdir())) == 2


def test_runs_of_the_same_name_do_not_share_a_folder():
    """As those of a loop with --run-dir $lr/seed0."""
    runs = []
    for parent in ("low", "high"):
        Path(parent).mkdir()
        runs.append(one_run(f"{parent}/seed0", 1, lr=len(parent)))
    plot.main([*runs, "--tensorboard", "tb"])
    found = [str(path.parent) for path in Path("tb").rglob("events*")]
    assert sorted(found) == ["tb/high/seed0/seed_0", "tb/low/seed0/seed_0"]


def test_without_tensorboardx_there_is_one_line(monkeypatch):
    for name in ["tensorboardX", *(x for x in sys.modules if x.startswith("tensorboardX."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(plot.RunError, match="pip install tensorboardX"):
        plot.main([one_run("a"), "--tensorboard", "tb"])
    assert not Path("tb").exists()


def marl_eval_matrices(path):
    """{environment: (scores {algorithm: [runs, tasks]}, curves {algorithm: [runs, tasks, steps]})}.

    As marl_eval.utils.data_processing_utils reads them: names of runs and of steps are those of the
    first algorithm, names are lower case, every step has the metrics of absolute_metrics.
    """
    lower = lambda x: {k.lower(): lower(v) for k, v in x.items()} if isinstance(x, dict) else x
    matrices = {}
    for environment, tasks in lower(json.loads(Path(path).read_text())).items():
        algorithms = next(iter(tasks.values()))
        assert not any("," in algorithm for algorithm in algorithms)
        runs = next(iter(algorithms.values()))
        steps = [x for x in next(iter(runs.values())) if x != "absolute_metrics"]
        read = lambda algorithm, run, task, step, tasks=tasks: np.mean(
            tasks[task][algorithm][run][step]["return"]
        )
        scores, curves = {}, {}
        for x in algorithms:
            scores[x] = [[read(x, run, task, "absolute_metrics") for task in tasks] for run in runs]
            curves[x] = [[[read(x, r, t, step) for step in steps] for t in tasks] for r in runs]
        matrices[environment] = scores, curves
        for seeds in (seeds for task in tasks.values() for seeds in task.values()):
            for seed in seeds.values():
                counts = [seed[step]["step_count"] for step in steps]
                assert len(seed) == len(steps) + 1 and counts == sorted(counts)
    return matrices


def test_the_json_is_what_marl_eval_reads(capsys):
    """marl-eval's own DiagnoseData (commit 5675ad6) calls such a file valid."""
    runs, absolute = [], {}
    for env_id in ("Breakout-MinAtar", "Freeway-MinAtar"):
        for script in ("ppo_ff", "my_ppo"):
            for seed in (5, 6):
                name = f"{env_id}-{script}-{seed}"
                runs.append(one_run(name, 2, env_id=env_id, script=script, seed=seed))
                absolute[name] = [len(runs), 0.5 * len(runs)]
                summary = {"absolute_return_per_seed": absolute[name]}
                Path(name, "summary.json").write_text(json.dumps(summary))
    plot.main([*runs[::-1], "--json", "scores.json", "--labels", "mine, new", "PPO"])
    assert not capsys.readouterr().err
    ((environment, (scores, curves)),) = marl_eval_matrices("scores.json").items()
    assert environment == "minatar" and set(scores) == {"mine; new", "ppo"}
    tasks = ["Freeway-MinAtar", "Breakout-MinAtar"]  # in the order of the arguments
    for label, script in (("mine; new", "my_ppo"), ("ppo", "ppo_ff")):
        expected = [[*absolute[f"{x}-{script}-5"], *absolute[f"{x}-{script}-6"]] for x in tasks]
        np.testing.assert_array_equal(scores[label], np.transpose(expected))
        expected = np.hstack([made_up(2), made_up(2)]).T[:, None].repeat(2, axis=1)
        np.testing.assert_allclose(curves[label], expected)
    first = json.loads(Path("scores.json").read_text())["MinAtar"]["Breakout-MinAtar"]["PPO"]
    assert [first["seed_0"][f"step_{m}"]["step_count"] for m in range(4)] == [10, 20, 30, 40]


def test_the_last_evaluation_stands_in_for_the_absolute_metric(capsys):
    run = write_run(Path.cwd() / "a", [[1, 2], [3, 4], [5, NAN], [NAN, NAN]], env_id="brax/ant")
    plot.main([run, "--json", "scores.json"])
    assert f"python enjoy.py {run}" in capsys.readouterr().err
    seeds = json.loads(Path("scores.json").read_text())["brax"]["brax/ant"]["ppo_ff"]
    assert [x["absolute_metrics"]["return"] for x in seeds.values()] == [[5], [4]]
    assert [len(x) for x in seeds.values()] == [4, 3]


@pytest.mark.parametrize("change", ["seeds", "evaluations", "names"])
def test_what_marl_eval_cannot_compare_is_said(change, capsys):
    runs = [one_run("a", 2), one_run("b", 2 + (change == "seeds"), lr=0.2)]
    if change == "evaluations":
        runs.append(write_run(Path.cwd() / "c", made_up(2)[:3], lr=0.3))
    if change == "names":
        runs = [one_run("d", 2, env_id="Asterix-MinAtar")]
        runs += [one_run("e", 2, env_id="Freeway-MinAtar", script="my_ppo")]
    plot.main([*runs, "--json", "scores.json"])
    (message,) = [x for x in capsys.readouterr().err.splitlines() if "marl-eval" in x]
    assert "scores.json" in message
    plot.main([*runs[:1], "--json", "scores.json"])
    assert "marl-eval" not in capsys.readouterr().err


def test_another_metric_is_exported_under_its_name():
    plot.main([one_run("a", 1), "--metric", "episode/return", "--json", "scores.json"])
    tasks = json.loads(Path("scores.json").read_text())["CartPole-v1"]
    (seed,) = tasks["CartPole-v1"]["ppo_ff"].values()
    assert seed["step_0"] == {"step_count": 10, "episode/return": [7.0]}
    assert seed["absolute_metrics"] == {"episode/return": [7.0]}


def test_an_export_draws_a_picture_only_on_request():
    run = one_run("a")
    plot.main([run, "--json", "scores.json", "--tensorboard", "tb"])
    assert not [*Path().rglob("*.png")]
    plot.main([run, "--json", "scores.json", "--out", "out.png"])
    assert Path("out.png").exists()


# ------------------------------------------- help
def test_every_option_is_in_the_documentation(capsys):
    with pytest.raises(SystemExit):
        plot.main(["--help"])
    options = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.M))
    text = (ROOT / "docs" / "runs.md").read_text()
    (section,) = re.findall(r"\n## Plots\n[\s\S]*?(?=\n## )", text)
    assert options == set(re.findall(r"^\| `(--\w+)`", section, re.M))
