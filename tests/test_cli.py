"""The command line, the run folder, checkpoints and what a wrong input says."""

import contextlib
import csv
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import flax.serialization
import jax
import matplotlib.axes
import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, load_script, tiny

FILES = {"config.json", "metrics.csv", "summary.json", "last.msgpack", "best.msgpack"}
FILES |= {"learning_curve.png"}
COLUMNS = "update,seed,env_steps,episode/return,episode/length,episode/count,eval/return,"
COLUMNS += "loss/total,loss/policy,loss/value,policy/entropy,policy/approx_kl,policy/clip_fraction,"
COLUMNS += "value/explained_variance,optim/grad_norm,optim/lr,time/sps"
COLUMNS = COLUMNS.split(",")
SUMMARY = "script env_id env_steps num_seeds eval_return_mean eval_return_std eval_return_per_seed "
SUMMARY += "best_eval_return_mean eval_episodes compile_seconds train_seconds steps_per_second "
SUMMARY = (SUMMARY + "device num_devices").split()
TRACKING = {"track": True, "wandb_project": "a project", "wandb_entity": "a team"}


@pytest.fixture(scope="module")
def compile_once(module):
    """Runs that differ in nothing but their folder or seed share the compiled programs."""
    make_train, make_evaluate, jit, made = module.make_train, module.make_evaluate, jax.jit, {}
    aside = {"run_dir": "", "resume": "", "seed": 0, "num_evals": 1, "track": False}
    aside |= {"wandb_project": "", "wandb_entity": None}

    def remember(key, make):
        if key not in made:
            made[key] = make()
        return made[key]

    def make_train_once(config, num_updates=None):
        def make():
            init, train = make_train(config, num_updates)
            lower_once = functools.cache(lambda: train.lower(*states))
            compile_once = functools.cache(lambda: lower_once().compile())
            states = []

            def lower(state):
                states[:] = states or [state]
                return types.SimpleNamespace(
                    compile=compile_once, as_text=lambda: lower_once().as_text()
                )

            return init, types.SimpleNamespace(lower=lower)

        return remember((dataclasses.replace(config, **aside), num_updates), make)

    def make_evaluate_once(config):
        return remember(dataclasses.replace(config, **aside), lambda: make_evaluate(config))

    def jit_once(function, **options):
        inner = getattr(function, "__wrapped__", None)
        if any(inner is evaluate for evaluate in made.values()):
            return remember(id(inner), lambda: jit(function, **options))
        return jit(function, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_train", make_train_once)
        patch.setattr(module, "make_evaluate", make_evaluate_once)
        patch.setattr(jax, "jit", jit_once)
        yield


def flags(config):
    """The command line that gives this configuration."""
    words = []
    for field in dataclasses.fields(config):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value not in (None, ""):
            words += [f"--{name}", str(value)]
    return words


def run(module, *words):
    """Runs the command line in this process. Returns exit code, output and errors."""
    out, err, argv, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = [f"{module.SCRIPT}.py", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            module.cli()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


def read_rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def learned(run_dir):
    """All that a run must repeat exactly: its rows without the clock, and both checkpoints."""
    rows = [{k: v for k, v in row.items() if k != "time/sps"} for row in read_rows(run_dir)]
    return rows, checkpoint(run_dir / "last.msgpack"), checkpoint(run_dir / "best.msgpack")


def checkpoint(path):
    arrays = flax.serialization.msgpack_restore(path.read_bytes())["state"]
    paths = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): (x.dtype, x.shape, x.tobytes()) for path, x in paths}


@dataclasses.dataclass
class Run:
    config: object
    path: Path
    code: int
    out: str
    err: str

    @property
    def rows(self):
        return read_rows(self.path)

    @property
    def summary(self):
        return json.loads((self.path / "summary.json").read_text())


@pytest.fixture(scope="module")
def base(module, compile_once, tmp_path_factory):
    """A whole run of two seeds, from the command line."""
    path = tmp_path_factory.mktemp(module.SCRIPT) / "run"
    config = tiny(module, num_seeds=2)
    return Run(config, path, *run(module, *flags(config), "--run-dir", path))


@pytest.fixture
def interrupt(module, monkeypatch):
    """interrupt(n) sends SIGINT while call n of the compiled program is written down."""

    def after(call, number=signal.SIGINT):
        write_rows, calls = module.write_rows, []

        def hooked(*args):
            calls.append(args)
            write_rows(*args)
            if len(calls) == call:
                signal.raise_signal(number)

        monkeypatch.setattr(module, "write_rows", hooked)

    yield after
    monkeypatch.undo()


# -------------------------------------------------------------------------------------- run folder
def test_a_run_writes_its_folder_and_nothing_else(base):
    assert base.code == 0, base.err
    assert {path.name for path in base.path.iterdir()} == FILES
    assert str(base.path) in base.out and len(base.out.splitlines()) == 1


def test_config_json_tells_script_options_versions_and_device(base, module):
    about = json.loads((base.path / "config.json").read_text())
    assert about["script"] == module.SCRIPT and about["device"] and about["num_devices"] >= 1
    assert {"jax", "flax", "optax"} <= set(about["versions"])
    options = {field.name: about[field.name] for field in dataclasses.fields(module.Config)}
    config = dataclasses.replace(base.config, run_dir=str(base.path))
    assert module.Config(**options) == module.resolve(config)


def test_metrics_csv_has_one_row_per_update_and_seed(base, module):
    text = (base.path / "metrics.csv").read_text()
    header, *lines = text.splitlines()
    assert text.endswith("\n") and header.split(",")[: len(COLUMNS)] == COLUMNS
    assert header.split(",") == module.COLUMNS.split()
    rows = [(int(row["update"]), int(row["seed"]), int(row["env_steps"])) for row in base.rows]
    batch = base.config.num_envs * base.config.num_steps
    updates = range(1, base.config.total_timesteps // batch + 1)
    assert rows == [(update, seed, update * batch) for update in updates for seed in (0, 1)]


def test_a_cell_is_empty_where_nothing_was_measured(base):
    finished = [float(row["episode/count"]) for row in base.rows]
    assert 0.0 in finished
    for row, count in zip(base.rows, finished, strict=True):
        assert (row["episode/return"] != "") == (count > 0)
        assert (row["episode/length"] != "") == (count > 0)
    evaluated = {row["update"] for row in base.rows if row["eval/return"]}
    last = base.config.total_timesteps // (base.config.num_envs * base.config.num_steps)
    assert evaluated == {str(last // 2), str(last)}
    timed = {int(row["update"]) for row in base.rows if row["time/sps"]}
    assert timed == set(range(last // 4, last + 1, last // 4))
    rare = {"episode/return", "episode/length", "eval/return", "time/sps"}
    for row in base.rows:
        assert all(np.isfinite(float(row[name])) for name in set(row) - rare)
        assert "nan" not in "".join(row.values()).lower()


def test_summary_tells_what_the_last_rows_tell(base, module):
    summary, rows = base.summary, base.rows
    assert list(summary)[: len(SUMMARY)] == SUMMARY
    assert summary["script"] == module.SCRIPT and summary["env_id"] == base.config.env_id
    assert summary["env_steps"] == int(rows[-1]["env_steps"])
    assert summary["num_seeds"] == 2 and summary["eval_episodes"] == base.config.eval_episodes
    returns = [float(row["eval/return"]) for row in rows[-2:]]
    np.testing.assert_allclose(summary["eval_return_per_seed"], returns, rtol=1e-6)
    assert summary["eval_return_mean"] == pytest.approx(np.mean(returns))
    assert summary["eval_return_std"] == pytest.approx(np.std(returns), rel=1e-5, abs=1e-5)
    best = [max(float(r["eval/return"]) for r in rows[s::2] if r["eval/return"]) for s in (0, 1)]
    assert summary["best_eval_return_mean"] == pytest.approx(np.mean(best))


def test_compile_time_is_apart_from_training_time(base):
    """The few steps of this run take a fraction of the seconds that its compilation takes."""
    summary = base.summary
    assert summary["compile_seconds"] > 10 * summary["train_seconds"] > 0
    steps = summary["env_steps"] * summary["num_seeds"]
    assert summary["steps_per_second"] == pytest.approx(steps / summary["train_seconds"])


def test_checkpoints_hold_seeds_apart(base, module):
    for name in ("last.msgpack", "best.msgpack"):
        saved = flax.serialization.msgpack_restore((base.path / name).read_bytes())
        assert saved["config"]["script"] == module.SCRIPT and saved["config"]["num_seeds"] == 2
        arrays = {
            jax.tree_util.keystr(path): x
            for path, x in jax.tree_util.tree_leaves_with_path(saved["state"])
        }
        assert all(x.shape[:2] == (jax.local_device_count(), 2) for x in arrays.values())
        kernels = [x for path, x in arrays.items() if "kernel" in path and "params" in path]
        assert kernels and all((x[:, 0] != x[:, 1]).any() for x in kernels)


def test_seeds_are_apart_in_the_rows(base):
    rows = base.rows
    first, second = ([row["loss/total"] for row in rows[seed::2]] for seed in (0, 1))
    assert not set(first) & set(second)


def test_the_learning_curve_is_a_picture(base):
    assert (base.path / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_learning_curve_is_that_of_the_seeds_that_ended_an_episode(
    module, base, tmp_path, monkeypatch
):
    lines, plot = [], matplotlib.axes.Axes.plot
    monkeypatch.setattr(
        matplotlib.axes.Axes,
        "plot",
        lambda axes, *xy, **kw: lines.append(xy) or plot(axes, *xy, **kw),
    )
    rows = ["0,10,1,", "1,10,3,", "0,20,,", "1,20,5,2", "0,30,,4", "1,30,,"]
    text = "\n".join(["seed,env_steps,episode/return,eval/return", *rows])
    (tmp_path / "metrics.csv").write_text(text)
    module.plot_curve(tmp_path, dataclasses.replace(base.config, num_seeds=2))
    (steps, mean, _), (eval_steps, eval_mean, _) = lines
    np.testing.assert_array_equal([steps, mean], [[10, 20], [2, 5]])
    np.testing.assert_array_equal([eval_steps, eval_mean], [[20, 30], [2, 4]])


def test_a_run_without_a_folder_gets_a_name_of_its_own(module, base, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(module, *flags(base.config))
    assert code == 0, err
    (path,) = tmp_path.glob("runs/*")
    env_id = base.config.env_id.replace("/", "-")
    assert re.fullmatch(rf"{module.SCRIPT}__{re.escape(env_id)}__seed0__\d+-\d+", path.name)
    assert learned(path) == learned(base.path)  # and the same command gives the same numbers


# ------------------------------------------------------------------------------------ command line
@pytest.mark.parametrize("words", ["1e5", "100_000", "100000"])
def test_integers_may_be_written_in_three_ways(module, words, monkeypatch):
    configs = []
    monkeypatch.setattr(module, "main", configs.append)
    code, _, err = run(module, "--total-timesteps", words)
    assert code == 0, err
    assert configs == [module.Config(total_timesteps=100_000)]
    assert type(configs[0].total_timesteps) is int


def test_options_may_be_spelled_with_underscores(module, monkeypatch):
    configs = []
    monkeypatch.setattr(module, "main", configs.append)
    code, _, err = run(module, "--env_id", "Some-v1", "--no_anneal_lr", "--num_envs", 32)
    assert code == 0, err
    assert configs == [module.Config(env_id="Some-v1", anneal_lr=False, num_envs=32)]


def test_help_lists_every_option_with_its_comment(module):
    code, out, _ = run(module, "--help")
    assert code == 0
    for field in dataclasses.fields(module.Config):
        assert f"--{field.name.replace('_', '-')}" in out


@pytest.mark.parametrize("words", [["--num-envs", "1.5"], ["--num-envs", "many"], ["--learn", "1"]])
def test_what_tyro_refuses_ends_with_exit_code_2(module, words):
    code, out, err = run(module, *words)
    assert code == 2 and "Traceback" not in out + err and words[-1] in out + err + "--learn 1"


# Every option, with a value that differs from `tiny` (None: the other one). PROGRAM changes the
# compiled training, EVALUATION the compiled evaluation; the others are looked at one by one.
PROGRAM = {
    "num_envs": 2,
    "num_steps": 8,
    "update_epochs": 3,
    "num_minibatches": 4,
    "hidden_size": 5,
    "lr": 1e-3,
    "anneal_lr": None,
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "clip_eps": 0.3,
    "clip_value": None,
    "ent_coef": 0.5,
    "vf_coef": 0.25,
    "max_grad_norm": 0.25,
    "target_kl": 0.1,
    "total_timesteps": 256,
    "num_calls": 2,
    "num_seeds": 3,
    "network": "cnn",
    "policy": "tanh_gaussian",
    "normalize_reward": None,
    "embedding_size": 3,
    "conv_size": 3,
    "head_size": 3,
    "bf16": None,
    "reset_hidden": None,
    "memory": None,
}
EVALUATION = {"eval_episodes": 5, "eval_greedy": None}
OTHERS = {"env_id", "seed", "num_evals", "checkpoint_every", "run_dir", "resume", *TRACKING}
OTHERS |= {"distributed", "coordinator", "num_processes", "process_id"}
ELSEWHERE = {"benchmark_id", "ruleset_id", "img_obs"}  # what the environment shows


def lowered_training(module, config):
    init, train = module.make_train(config, config.updates_per_call)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), jax.local_device_count()))
    return train.lower(jax.eval_shape(init, keys)).as_text()


def lowered_evaluation(module, config):
    init, _ = module.make_train(config)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), jax.local_device_count()))
    policy = jax.eval_shape(lambda keys: jax.tree.map(lambda x: x[0, 0], init(keys).params), keys)
    return jax.jit(module.make_evaluate(config)).lower(policy, jax.random.key(0)).as_text()


@pytest.fixture(scope="module")
def programs(module):
    """lowered(config), both programs of the unchanged configuration; environments traced once."""
    make_env, made = module.make_env, {}
    read = set(re.findall(r"config\.(\w+)", inspect.getsource(make_env)))

    def make_env_once(config):
        key = tuple(getattr(config, name) for name in sorted(read))
        if key not in made:
            reset, step, *rest = make_env(config)
            made[key] = (jax.jit(reset), jax.jit(step), *rest)
        return made[key]

    lowerings = (lowered_training, lowered_evaluation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_env", make_env_once)
        yield {lower: lower(module, tiny(module)) for lower in lowerings}


def test_every_option_is_covered(module):
    fields = {field.name for field in dataclasses.fields(module.Config)}
    assert fields <= {*PROGRAM, *EVALUATION, *OTHERS, *ELSEWHERE}


def test_the_same_options_give_the_same_program(module, programs):
    assert lowered_training(module, tiny(module)) == programs[lowered_training]


@pytest.mark.parametrize("name", [*PROGRAM, *EVALUATION])
def test_every_option_changes_the_program(module, name, programs):
    if name not in module.Config.__dataclass_fields__:
        assert any(name in load_script(s).Config.__dataclass_fields__ for s in SCRIPTS)
        return
    if name == "network":  # needs images
        changes = {"env_id": "Breakout-MinAtar"}
        assert lowered_training(module, tiny(module, **changes, network="mlp")) != lowered_training(
            module, tiny(module, **changes, network="cnn")
        )
        return
    lower = lowered_training if name in PROGRAM else lowered_evaluation
    value, before = {**PROGRAM, **EVALUATION}[name], getattr(tiny(module), name)
    value = not before if value is None else value
    assert value != before
    assert lower(module, tiny(module, **{name: value})) != programs[lower]


def test_the_progress_line_shows_the_seeds_that_ended_an_episode(
    module, base, tmp_path, monkeypatch
):
    write_rows = module.write_rows

    def one_without_an_episode(run_dir, config, update, metrics, tracker):
        write_rows(run_dir, config, update, metrics, tracker)
        metrics["episode/return"] = np.array([[np.nan, 7.0]])

    monkeypatch.setattr(module, "write_rows", one_without_an_episode)
    code, _, err = run(module, *flags(base.config), "--run-dir", tmp_path / "run")
    assert code == 0 and "return 7]" in err, err


def test_seed_and_num_evals_change_the_run(module, base, tmp_path):
    words = flags(dataclasses.replace(base.config, seed=1, num_evals=1))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err
    rows = read_rows(tmp_path / "run")
    losses = {row["loss/total"] for row in rows}
    assert not losses & {row["loss/total"] for row in base.rows}
    assert [bool(row["eval/return"]) for row in rows] == [False] * (len(rows) - 2) + [True] * 2


def test_tracking_sends_what_the_files_hold(module, base, tmp_path, monkeypatch):
    started, logged, summary, finished, uploaded = [], [], {}, [], []
    tracker = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)),
        log_artifact=lambda path, name, type: uploaded.append(Path(path).name),
        finish=lambda: finished.append(True),
        summary=summary,
    )
    wandb = types.SimpleNamespace(init=lambda **options: started.append(options) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = flags(dataclasses.replace(base.config, **TRACKING))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err
    ((start,), (finish,)) = started, finished
    assert (start["project"], start["entity"]) == ("a project", "a team") and finish
    assert start["config"]["gamma"] == base.config.gamma
    rows = read_rows(tmp_path / "run")
    assert len(logged) == len(rows)
    for (step, values), row in zip(logged, rows, strict=True):
        names = [name for name in COLUMNS if "/" in name and row[name]]
        assert step == int(row["env_steps"])
        sent = {f"{name}/seed{row['seed']}": float(row[name]) for name in names}
        assert values == pytest.approx(sent)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert uploaded == [f"{module.SCRIPT}.py", "learning_curve.png"]


def test_tracking_offline_needs_no_account(tmp_path):
    """As a user runs it: a process of its own, the script's path, another working directory."""
    module = load_script(SCRIPTS[0])
    words = [*flags(tiny(module, track=True)), "--run_dir", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, str(ROOT / f"{module.SCRIPT}.py"), *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*FILES, "wandb"}
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# -------------------------------------------------------------------------------------- resumption
@pytest.mark.parametrize("call, number", [(1, signal.SIGTERM), (3, signal.SIGINT)])
def test_an_interrupted_run_resumes_to_the_same_bits(
    module, base, interrupt, call, number, tmp_path
):
    """Before the first evaluation, when there is no best policy yet, and after it."""
    handler = signal.getsignal(number)  # a shell's background jobs ignore SIGINT
    interrupt(call, number)
    code, out, err = run(module, *flags(base.config), "--run-dir", tmp_path / "run")
    assert code == 128 + number, err
    assert f"--resume {tmp_path / 'run'}" in out and "Traceback" not in out + err
    assert len(read_rows(tmp_path / "run")) == len(base.rows) * call // 4
    assert not (tmp_path / "run" / "summary.json").exists()
    assert signal.getsignal(number) == handler
    interrupt(0)
    code, _, err = run(module, "--resume", tmp_path / "run")
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(base.path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    different = {"compile_seconds", "train_seconds", "steps_per_second"}
    same = {k: v for k, v in base.summary.items() if k not in different}
    assert {k: v for k, v in summary.items() if k not in different} == same


def test_an_interrupt_in_the_last_call_comes_too_late(module, base, interrupt, tmp_path):
    interrupt(4)
    code, _, err = run(module, *flags(base.config), "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(base.path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES


def test_a_run_that_died_before_its_first_checkpoint_is_no_run(module, base, tmp_path):
    """There is nothing to resume: the same command may start again in the same folder."""
    shutil.copytree(base.path, tmp_path / "run", ignore=lambda *_: FILES - {"config.json"})
    config = dataclasses.replace(base.config, run_dir=str(tmp_path / "run"))
    path, *arrays = module.open_run(module.resolve(config))
    assert path == tmp_path / "run" and not any(arrays)


def test_a_crash_between_rows_and_checkpoint_loses_nothing(module, base, tmp_path, monkeypatch):
    """Rows that came after the checkpoint, the last one cut short, are written again."""
    saves, numbers = [], (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]

    def crash(path, *args, save=module.save):
        saves.append(path.name)
        if saves.count("last.msgpack") == 3:
            with open(path.parent / "metrics.csv", "a") as file:
                file.write("12,0,34")
            raise MemoryError
        save(path, *args)

    monkeypatch.setattr(module, "save", crash)
    with pytest.raises(MemoryError):
        run(module, *flags(base.config), "--run-dir", tmp_path / "run")
    assert [signal.getsignal(number) for number in numbers] == handlers
    monkeypatch.undo()
    code, _, err = run(module, "--resume", tmp_path / "run")
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(base.path)


# ------------------------------------------------------------------------------------------ errors
@pytest.fixture
def fails(module, half, monkeypatch):
    """fails(*words) -> the error message of a run that must end before anything is compiled."""

    def never(*args, **kwargs):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(jax, "pmap", never)
    monkeypatch.setattr(jax, "jit", never)

    def check(*words):
        code, out, err = run(module, *words)
        assert code == 2 and not out, (code, out, err)
        assert err.startswith("error: ") and 1 <= len(err.splitlines()) <= 2
        assert "Traceback" not in err
        return err

    return check


def test_unknown_environment(module, fails, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    right = tiny(module).env_id
    wrong = right[:-4] + right[-3:]
    message = fails("--env-id", wrong)
    assert wrong in message and right in message and "nearest" in message
    assert list(tmp_path.iterdir()) == []


WRONG_KIND = {
    "ppo_ff": {"Pendulum-v1": "ppo_continuous.py", "MountainCarContinuous-v0": "ppo_continuous.py"},
    "ppo_continuous": {"CartPole-v1": "ppo_ff.py"},
}


def test_environment_of_the_wrong_kind(module, fails):
    for env_id, script in WRONG_KIND.get(module.SCRIPT, {}).items():
        message = fails("--env-id", env_id)
        assert env_id in message and script in message


def test_sizes_that_do_not_divide(module, fails):
    message = fails(*flags(tiny(module)), "--num-minibatches", 3)
    assert re.search(r"\b3\b", message) and "num_minibatches" in message
    name, works = re.search(r"nearest (num_minibatches) that works is (\d+)", message).groups()
    assert module.resolve(tiny(module, **{name: int(works)}))


def test_environments_that_do_not_divide_by_devices(module, fails, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    message = fails(*flags(tiny(module)))
    assert re.search(r"num_envs = 4\b", message) and re.search(r"\b3\b", message)
    assert re.search(r"the nearest num_envs is 3\b", message)


@pytest.mark.parametrize("name", ["num_envs", "num_steps", "num_seeds", "update_epochs"])
def test_sizes_below_one(module, fails, name):
    message = fails(f"--{name}", 0)
    assert f"{name} = 0" in message and "at least 1" in message


def test_fewer_steps_than_one_update(module, fails):
    message = fails(*flags(tiny(module)), "--total-timesteps", 15)
    assert "total_timesteps = 15" in message and "16" in message


def test_a_folder_that_holds_a_run(module, base, fails):
    before = {path.name: path.read_bytes() for path in base.path.iterdir()}
    message = fails(*flags(base.config), "--run-dir", base.path)
    assert str(base.path) in message and f"--resume {base.path}" in message
    assert before == {path.name: path.read_bytes() for path in base.path.iterdir()}


def test_a_folder_that_cannot_be_made(module, fails, tmp_path):
    (tmp_path / "file").write_text("")
    message = fails(*flags(tiny(module)), "--run-dir", tmp_path / "file" / "run")
    assert "--run-dir" in message and str(tmp_path / "file") in message


def test_nothing_to_resume(module, fails, tmp_path):
    message = fails(*flags(tiny(module)), "--resume", tmp_path / "nothing")
    assert str(tmp_path / "nothing") in message
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_has_nothing_to_resume(module, base, fails):
    before = {path.name: path.read_bytes() for path in base.path.iterdir()}
    message = fails("--resume", base.path)
    assert str(base.path) in message and "finished" in message
    assert before == {path.name: path.read_bytes() for path in base.path.iterdir()}


@pytest.fixture(scope="module")
def half(base, module, tmp_path_factory):
    """A run that was interrupted after its first evaluation."""
    path, write_rows = tmp_path_factory.mktemp(module.SCRIPT) / "half", module.write_rows

    def hooked(run_dir, config, update, *args):
        write_rows(run_dir, config, update, *args)
        if update > config.num_updates // 2:
            signal.raise_signal(signal.SIGINT)

    module.write_rows = hooked
    code, _, err = run(module, *flags(base.config), "--run-dir", path)
    module.write_rows = write_rows
    assert code == 130, err
    return path


@pytest.fixture
def stopped(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "stopped"))


def test_a_damaged_checkpoint(module, stopped, fails):
    for name in ("last.msgpack", "best.msgpack"):
        whole = (stopped / name).read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:-1], b"", b"not a checkpoint"):
            (stopped / name).write_bytes(damaged)
            before = {path.name: path.read_bytes() for path in stopped.iterdir()}
            message = fails("--resume", stopped)
            assert str(stopped / name) in message and "cut short" in message
            assert before == {path.name: path.read_bytes() for path in stopped.iterdir()}
        (stopped / name).write_bytes(whole)


@pytest.mark.parametrize("field, value", [("gamma", 0.5), ("hidden_size", 8), ("num_seeds", 1)])
def test_a_checkpoint_of_another_configuration(module, stopped, fails, field, value):
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}
    saved = json.loads((stopped / "config.json").read_text())[field]
    message = fails("--resume", stopped, f"--{field}", value)
    assert all(str(word) in message for word in (field, saved, value, stopped))
    assert before == {path.name: path.read_bytes() for path in stopped.iterdir()}


def test_a_checkpoint_of_another_script(module, stopped, fails):
    path = stopped / "last.msgpack"
    saved = flax.serialization.msgpack_restore(path.read_bytes())
    saved["config"]["script"] = "ppo_other"
    content = flax.serialization.msgpack_serialize(saved)
    path.write_bytes(content)
    message = fails("--resume", stopped)
    assert "ppo_other" in message and module.SCRIPT in message and path.read_bytes() == content


def test_an_older_checkpoint(module, stopped, fails):
    """Of a version of the script whose state had another field."""
    path = stopped / "last.msgpack"
    saved = flax.serialization.msgpack_restore(path.read_bytes())
    saved["state"]["step"] = saved["state"].pop("update")
    content = flax.serialization.msgpack_serialize(saved)
    path.write_bytes(content)
    message = fails("--resume", stopped)
    assert all(word in message for word in ("another version", "step", "update", str(path)))
    assert path.read_bytes() == content


def test_a_damaged_config_json_is_written_again(module, base, stopped):
    """Checkpoints know the options themselves."""
    path = stopped / "config.json"
    before = json.loads(path.read_text())
    path.write_bytes(path.read_bytes()[:20])
    code, _, err = run(module, "--resume", stopped)
    assert code == 0, err
    assert json.loads(path.read_text()) == {**before, "resume": str(stopped)}
    assert learned(stopped) == learned(base.path)


def test_a_missing_extra(module, monkeypatch):
    """brax/ant without Brax: the command that installs it, where the script takes Brax at all."""
    fields = module.Config.__dataclass_fields__
    for name in [name for name in sys.modules if name.split(".")[0] == "brax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "brax", None)
    code, out, err = run(module, "--env-id", "brax/ant")
    assert code == 2 and not out and "brax/ant" in err and len(err.splitlines()) <= 2
    takes_brax = "import brax" in (ROOT / f"{module.SCRIPT}.py").read_text()
    assert ("pip install" in err and "[brax]" in err) == takes_brax, fields["env_id"]


def test_an_error_in_a_process_of_its_own(tmp_path):
    module = load_script(SCRIPTS[-1])
    script = str(ROOT / f"{module.SCRIPT}.py")
    words = [sys.executable, script, "--env-id", "Nowhere-v0"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: unknown env_id Nowhere-v0")
    assert list(tmp_path.iterdir()) == []
