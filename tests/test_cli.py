"""The command line, the run folder, checkpoints and error messages."""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, for_a_process, load_script, program, tiny

FILES = {"config.json", "metrics.csv", "summary.json", "checkpoint.msgpack"}
COLUMNS = {"update", "seed", "env_steps", "episode/return", "episode/length", "episode/count"}
COLUMNS |= {"eval/return", "loss/total", "loss/policy", "loss/value", "policy/entropy"}
COLUMNS |= {"policy/approx_kl", "policy/clip_fraction", "value/explained_variance"}
COLUMNS |= {"optim/grad_norm", "optim/lr", "time/sps"}
SUMMARY = {"script", "env_id", "env_steps", "num_seeds", "eval_return_mean", "eval_return_std"}
SUMMARY |= {"eval_return_per_seed", "best_eval_return_mean", "absolute_return_mean"}
SUMMARY |= {"eval_episodes", "compile_seconds", "train_seconds", "steps_per_second", "device"}
SUMMARY |= {"num_devices"}
SECONDS = {"compile_seconds", "train_seconds", "steps_per_second"}


# Of ppo_continuous, ppo_obs_norm has everything that matters here, the same run part included.
@pytest.fixture(scope="module", params=[script for script in SCRIPTS if script != "ppo_continuous"])
def module(request):
    return load_script(request.param)


@contextlib.contextmanager
def compiling_once(module, made=None):
    """Runs that differ in nothing but their folder or seed share the compiled programs `made`."""
    make_train, made = module.make_train, {} if made is None else made

    def make_train_once(config):
        key = dataclasses.replace(config, run_dir="", seed=0, track=False, init_from="")
        if key not in made:
            init, train, *rest = make_train(config)
            compiled = []

            def lower(state):
                compiled[:] = compiled or [train.lower(state).compile()]
                return types.SimpleNamespace(compile=lambda: compiled[0])

            made[key] = (init, types.SimpleNamespace(lower=lower), *rest)
        return made[key]

    make_train_once.original = make_train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_train", make_train_once)
        yield


@pytest.fixture(scope="module")
def compile_once(module):
    with compiling_once(module):
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
    """All that a run must repeat exactly: its rows without the clock, and the checkpoint."""
    rows = [{k: v for k, v in row.items() if k != "time/sps"} for row in read_rows(run_dir)]
    return rows, (run_dir / "checkpoint.msgpack").read_bytes()


def read_checkpoint(run_dir):
    """path -> array"""
    state = flax.serialization.msgpack_restore((run_dir / "checkpoint.msgpack").read_bytes())
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(state)}


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


class Killed(BaseException):
    """Stands for kill -9: nothing in the scripts catches it."""


def run_killed(module, words, name, number):
    """A run that dies just before call `number` of the module's function `name`."""
    calls, original = [], getattr(module, name)

    def dies(*args):
        calls.append(args)
        if len(calls) == number:
            raise Killed
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, dies)
        with pytest.raises(Killed):
            run(module, *words)


# ------------------------------------- run folder
def test_a_run_writes_its_folder_and_nothing_else(base):
    assert base.code == 0, base.err
    assert set(content(base.path)) == FILES
    assert base.out.endswith(f"python plot.py {base.path}\n") and len(base.out.splitlines()) == 2
    assert base.err.strip().startswith(str(base.path))  # the progress bar names the folder


def test_config_json_tells_script_options_versions_and_device(base, module):
    about = json.loads((base.path / "config.json").read_text())
    assert about["script"] == module.SCRIPT and about["device"] and about["num_devices"] >= 1
    assert {"jax", "flax", "optax"} <= set(about["versions"])
    options = {field.name: about[field.name] for field in dataclasses.fields(module.Config)}
    assert module.Config(**options) == dataclasses.replace(base.config, run_dir=str(base.path))


def test_metrics_csv_has_one_row_per_update_and_seed(base, module):
    text = (base.path / "metrics.csv").read_text()
    header = text.splitlines()[0].split(",")
    assert text.endswith("\n") and header[:3] == ["update", "seed", "env_steps"]
    assert set(header) == COLUMNS and header[-1] == "time/sps"
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
    evaluated = {int(row["update"]) for row in base.rows if row["eval/return"]}
    last = base.config.num_updates
    assert evaluated == {last // 2, last}
    rare = {"episode/return", "episode/length", "eval/return"}
    for row in base.rows:
        assert all(np.isfinite(float(row[name])) for name in set(row) - rare)
        assert "nan" not in "".join(row.values()).lower()


def test_summary_tells_what_the_last_rows_tell(base, module):
    summary, rows = base.summary, base.rows
    assert set(summary) >= SUMMARY
    assert summary["script"] == module.SCRIPT and summary["env_id"] == base.config.env_id
    assert summary["env_steps"] == int(rows[-1]["env_steps"])
    assert summary["num_seeds"] == 2 and summary["eval_episodes"] == base.config.eval_episodes
    returns = [float(row["eval/return"]) for row in rows[-2:]]
    np.testing.assert_allclose(summary["eval_return_per_seed"], returns, rtol=1e-6)
    assert summary["eval_return_mean"] == pytest.approx(np.mean(returns), rel=1e-6)
    assert summary["eval_return_std"] == pytest.approx(np.std(returns), rel=1e-5, abs=1e-5)
    best = [max(float(r["eval/return"]) for r in rows[s::2] if r["eval/return"]) for s in (0, 1)]
    assert summary["best_eval_return_mean"] == pytest.approx(np.mean(best), rel=1e-6)


def test_compile_time_is_apart_from_training_time(base):
    """The few steps of this run take a fraction of the seconds that its compilation takes."""
    summary = base.summary
    assert summary["compile_seconds"] > 10 * summary["train_seconds"] > 0
    steps = summary["env_steps"] * summary["num_seeds"]
    assert summary["steps_per_second"] == pytest.approx(steps / summary["train_seconds"])


def test_the_checkpoint_holds_every_seed(base):
    arrays = read_checkpoint(base.path)
    assert all(x.shape[:2] == (jax.local_device_count(), 2) for x in arrays.values())
    for name in ("params", "best"):
        kernels = [x for p, x in arrays.items() if p.startswith(f"['{name}']") and "kernel" in p]
        assert kernels and all((x[:, 0] != x[:, 1]).any() for x in kernels)


def test_seeds_are_apart_in_the_rows(base):
    first, second = ([row["loss/total"] for row in base.rows[seed::2]] for seed in (0, 1))
    assert not set(first) & set(second)


def test_a_run_without_a_folder_gets_a_name_of_its_own(module, base, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(module, *flags(base.config))
    assert code == 0, err
    (path,) = tmp_path.glob("runs/*")
    env_id = base.config.env_id.replace("/", "-")
    assert re.fullmatch(rf"{module.SCRIPT}__{re.escape(env_id)}__seed0__\d+-\d+-\d+", path.name)
    assert learned(path) == learned(base.path)  # and the same command gives the same numbers


# ----------------------------------- command line
@pytest.mark.parametrize("words", ["1e5", "100_000", "100000"])
def test_total_timesteps_may_be_written_in_three_ways(module, words, monkeypatch):
    configs = []
    monkeypatch.setattr(module, "main", configs.append)
    code, _, err = run(module, "--total-timesteps", words)
    assert code == 0, err
    assert configs == [module.Config(total_timesteps=100_000)]


def test_options_may_be_spelled_with_underscores(module, monkeypatch):
    configs = []
    monkeypatch.setattr(module, "main", configs.append)
    code, _, err = run(module, "--env_id", "Some-v1", "--no_anneal_lr", "--num_envs", 32)
    assert code == 0, err
    assert configs == [module.Config(env_id="Some-v1", anneal_lr=False, num_envs=32)]


def test_help_lists_every_option(module):
    code, out, _ = run(module, "--help")
    assert code == 0
    for field in dataclasses.fields(module.Config):
        assert f"--{field.name.replace('_', '-')}" in out


@pytest.mark.parametrize("words", [["--num-envs", "1.5"], ["--num-envs", "many"], ["--learn", "1"]])
def test_what_tyro_refuses_ends_with_exit_code_2(module, words):
    code, out, err = run(module, *words)
    assert code == 2 and "Traceback" not in out + err and words[-1] in out + err + "--learn 1"


PROGRAM = {  # an option of the compiled program, and a value other than tiny's (None: the opposite)
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
    "min_advantage_std": 10.0,
    "max_grad_norm": 0.25,
    "target_kl": 0.1,
    "total_timesteps": 256,
    "num_evals": 1,
    "num_seeds": 3,
    "eval_episodes": 5,
    "eval_greedy": None,
    "policy": "tanh_gaussian",
    "normalize_reward": None,
    "embedding_size": 3,
    "conv_size": 3,
    "head_size": 3,
    "bf16": None,
    "memory": None,
}
# Tested one by one: those of the run, and those of the environment.
OTHERS = {"env_id", "env_params", "seed", "run_dir", "init_from", "track", "distributed"}
OTHERS |= {"benchmark_id", "ruleset_id", "img_obs"}


def test_every_option_is_covered(module):
    fields = {field.name for field in dataclasses.fields(module.Config)}
    assert fields <= {*PROGRAM, *OTHERS}


def test_every_option_changes_the_program(module, monkeypatch):
    """Of a sibling, only the options that ppo_ff.py does not have, and some that it has."""
    reset, step, *rest = module.make_env(tiny(module))
    env = jax.jit(reset), jax.jit(step), *rest  # traced once for all programs
    monkeypatch.setattr(module, "make_env", lambda _: env)
    base = program(module, tiny(module))
    if module.SCRIPT == "ppo_ff":
        assert program(module, tiny(module)) == base
    parent = load_script("ppo_ff").Config.__dataclass_fields__
    again = {"gamma", "eval_greedy"}
    for name in PROGRAM.keys() & module.Config.__dataclass_fields__.keys():
        if module.SCRIPT == "ppo_ff" or name not in parent or name in again:
            before = getattr(tiny(module), name)
            value = (not before) if PROGRAM[name] is None else PROGRAM[name]
            assert value != before
            assert program(module, tiny(module, **{name: value})) != base, name


def test_minatar_has_its_own_network():
    module = load_script("ppo_ff")
    shapes = {}
    for env_id in ("CartPole-v1", "Breakout-MinAtar"):
        config = tiny(module, env_id=env_id, hidden_size=None, lr=None)
        init, *_ = getattr(module.make_train, "original", module.make_train)(config)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        params = jax.eval_shape(init, keys).params
        shapes[env_id] = [x.shape for x in jax.tree.leaves(params)]
    sizes = {key: {n for shape in value for n in shape[2:]} for key, value in shapes.items()}
    assert 64 in sizes["CartPole-v1"] and 128 in sizes["Breakout-MinAtar"]
    assert (1, 1, 9 * 4, 16) in shapes["Breakout-MinAtar"]  # a 3 x 3 convolution


@pytest.mark.parametrize("script", ["ppo_ff", "ppo_drift"])
@pytest.mark.parametrize(("env_id", "which"), [("CartPole-v1", 0), ("Breakout-MinAtar", 1)])
def test_default_learning_rate_is_that_of_the_help(script, env_id, which):
    module = load_script(script)
    line = next(x for x in (ROOT / f"{script}.py").read_text().splitlines() if "    lr: " in x)
    rates = re.search(r"None: (\S+), or (\S+) for MinAtar", line).groups()
    config = tiny(module, env_id=env_id, lr=None, num_seeds=1)
    init, train, *_ = getattr(module.make_train, "original", module.make_train)(config)
    _, metrics = train(init(jax.random.split(jax.random.key(0), 1)))
    np.testing.assert_allclose(metrics["optim/lr"][0, 0], float(rates[which]), rtol=1e-6)


def test_many_environments_make_shorter_rollouts():
    config = load_script("ppo_rnn").Config
    sizes = [(1024, None), (1025, None), (8192, None), (8192, 64), (16, 5)]

    def lengths(env_id):
        configs = [config(env_id=env_id, num_envs=n, num_steps=steps) for n, steps in sizes]
        return [config.batch_size // config.num_envs for config in configs]

    assert lengths("MiniGrid-Empty-6x6") == [64, 16, 16, 64, 5]
    assert lengths("MiniGrid-MemoryS8") == [32, 16, 16, 64, 5]
    help_text = (ROOT / "ppo_rnn.py").read_text()
    assert "rollout length; None: 64, 32 in Memory*, 16 if num_envs > 1024" in help_text


def test_seed_changes_the_run(module, base, tmp_path):
    words = flags(dataclasses.replace(base.config, seed=1))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err
    losses = {row["loss/total"] for row in read_rows(tmp_path / "run")}
    assert not losses & {row["loss/total"] for row in base.rows}


def test_env_params_change_the_environment():
    module = load_script("ppo_ff")
    config = tiny(module, env_params='{"max_steps_in_episode": 3}')
    reset, step, _ = module.make_env(config)
    key = jax.random.key(0)
    _, env_state = reset(key)
    ends = []
    for _ in range(3):
        _, env_state, _, terminated, truncated, _ = step(key, env_state, 0)
        ends.append((bool(terminated), bool(truncated)))
    assert ends == [(False, False), (False, False), (False, True)]


def test_tracking_sends_what_the_files_hold(module, base, tmp_path, monkeypatch):
    started, logged, summary, finished = [], [], {}, []
    tracker = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: finished.append(True),
        summary=summary,
    )
    wandb = types.SimpleNamespace(init=lambda **options: started.append(options) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = flags(dataclasses.replace(base.config, track=True))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err
    ((start,), (finish,)) = started, finished
    assert finish and start["config"]["gamma"] == base.config.gamma
    assert start["id"] == "run" and start["resume"] == "allow"
    rows = read_rows(tmp_path / "run")
    assert len(logged) == len(rows)
    for (step, values), row in zip(logged, rows, strict=True):
        assert step == int(row["env_steps"])
        names = [name for name in row if "/" in name and row[name]]
        sent = {f"{name}/seed{row['seed']}": float(row[name]) for name in names}
        assert values == pytest.approx(sent)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_tracking_offline_needs_no_account(tmp_path):
    """As a user runs it: a process of its own, the script's path, another working directory."""
    module = load_script(SCRIPTS[0])
    words = [*flags(tiny(module, track=True)), "--run_dir", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, str(ROOT / f"{module.SCRIPT}.py"), *words],
        cwd=tmp_path,
        env=for_a_process(WANDB_MODE="offline", WANDB_SILENT="true"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert set(path.name for path in (tmp_path / "run").iterdir()) == {*FILES, "wandb"}
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ------------------------------------- continuing
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("write_rows", 1),  # in the first call: there is no checkpoint yet
        ("write", 3),  # between the first rows and the first checkpoint
        ("write_rows", 2),
        ("write", 5),  # between the last rows and the last checkpoint
        ("write", 6),  # behind the last checkpoint: only the summary is missing
    ],
)
def test_a_killed_run_continues_to_the_same_bits(module, base, name, number, tmp_path):
    words = [*flags(base.config), "--run-dir", tmp_path / "run"]
    run_killed(module, words, name, number)
    assert not (tmp_path / "run" / "summary.json").exists()
    code, _, err = run(module, "--run-dir", tmp_path / "run")  # enough: config.json has the rest
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(base.path)
    assert set(content(tmp_path / "run")) == FILES
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    same = {k: v for k, v in base.summary.items() if k not in {*SECONDS, "run_dir"}}
    assert {k: v for k, v in summary.items() if k not in {*SECONDS, "run_dir"}} == same


def test_a_file_is_written_whole_or_not_at_all(module, base, tmp_path, monkeypatch):
    """A kill in the middle of a write leaves the previous file and a temporary one."""
    words = [*flags(base.config), "--run-dir", tmp_path / "run"]
    write_bytes, done = Path.write_bytes, []

    def dies(path, data):
        if path.name.startswith("checkpoint"):
            done.append(path)
            if len(done) == 2:
                write_bytes(path, data[: len(data) // 2])
                raise Killed
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", dies)
    with pytest.raises(Killed):
        run(module, *words)
    monkeypatch.undo()
    assert (tmp_path / "run" / "checkpoint.tmp").exists()
    code, _, err = run(module, *words)
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(base.path)
    assert set(content(tmp_path / "run")) == FILES


def test_a_finished_run_stays_as_it_is(module, base):
    before = content(base.path)
    code, _, err = run(module, *flags(base.config), "--run-dir", base.path)
    assert code == 0 and err == "", err  # not even an empty bar
    assert content(base.path) == before


@pytest.mark.parametrize("module", ["ppo_ff", "ppo_obs_norm"], indirect=True)
def test_a_finished_run_can_be_extended(module, base, tmp_path):
    """The updates so far stay; evaluations and time steps grow in proportion."""
    shutil.copytree(base.path, tmp_path / "run")
    config = base.config
    more = ["--total-timesteps", 2 * config.total_timesteps, "--num-evals", 2 * config.num_evals]
    code, _, err = run(module, "--run-dir", tmp_path / "run", *more)
    assert code == 0, err
    rows = read_rows(tmp_path / "run")
    assert rows[: len(base.rows)] == base.rows and len(rows) == 2 * len(base.rows)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 2 * base.summary["env_steps"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["num_evals"] == 4


@pytest.mark.parametrize("module", ["ppo_ff", "ppo_obs_norm"], indirect=True)
def test_an_extended_run_that_dies_before_its_summary(module, base, tmp_path):
    """The summary of the shorter run must not pass for that of the extended one."""
    shutil.copytree(base.path, tmp_path / "run")
    config = base.config
    more = ["--total-timesteps", 2 * config.total_timesteps, "--num-evals", 2 * config.num_evals]
    run_killed(module, ["--run-dir", tmp_path / "run", *more], "write", 6)
    assert not (tmp_path / "run" / "summary.json").exists()
    code, _, err = run(module, "--run-dir", tmp_path / "run")
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 2 * base.summary["env_steps"]


def test_a_finished_run_cannot_shrink(module, base):
    before, config = content(base.path), base.config
    less = ["--total-timesteps", config.total_timesteps // 2, "--num-evals", 1]
    code, _, err = run(module, "--run-dir", base.path, *less)
    assert code == 2 and "total_timesteps" in err
    assert content(base.path) == before


def test_a_finished_run_cannot_grow_out_of_proportion(module, base):
    before = content(base.path)
    code, _, err = run(module, "--run-dir", base.path, "--total-timesteps", 256)
    assert code == 2 and "updates_per_eval = 4, not 8" in err
    assert content(base.path) == before


@pytest.fixture(scope="module")
def half(base, module, tmp_path_factory):
    """A run that was killed after its first checkpoint."""
    path = tmp_path_factory.mktemp(module.SCRIPT) / "half"
    run_killed(module, [*flags(base.config), "--run-dir", path], "write_rows", 2)
    return path


@pytest.fixture
def stopped(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "stopped"))


@pytest.mark.parametrize(
    ("field", "value"), [("gamma", 0.5), ("hidden_size", 8), ("num_seeds", 1), ("num_evals", 4)]
)
def test_other_options_are_an_error_with_both_values(module, stopped, field, value):
    before = content(stopped)
    saved = json.loads((stopped / "config.json").read_text())[field]
    code, _, err = run(module, "--run-dir", stopped, f"--{field}", value)
    assert code == 2 and len(err.splitlines()) == 1 and "Traceback" not in err
    assert all(str(word) in err for word in (field, saved, value, stopped))
    assert content(stopped) == before


def test_the_folder_of_another_script(module, stopped):
    path = stopped / "config.json"
    stored = json.loads(path.read_text())
    assert stored["script"] == module.SCRIPT
    # Its options may not fit here: they must not be read.
    path.write_text(json.dumps(stored | {"script": "ppo_other", "num_envs": None, "env_id": "?"}))
    before = content(stopped)
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and err == f"error: {stopped} has script = ppo_other, not {module.SCRIPT}\n"
    assert content(stopped) == before


def test_a_damaged_checkpoint(module, stopped):
    whole = (stopped / "checkpoint.msgpack").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", b"not a checkpoint"):
        (stopped / "checkpoint.msgpack").write_bytes(damaged)
        code, _, err = run(module, "--run-dir", stopped)
        assert code == 2 and str(stopped / "checkpoint.msgpack") in err and "unusable" in err
        assert "Traceback" not in err
        assert (stopped / "checkpoint.msgpack").read_bytes() == damaged


def test_the_checkpoint_of_another_state(module, stopped):
    """Of a version of the script whose state had another field."""
    path = stopped / "checkpoint.msgpack"
    saved = flax.serialization.msgpack_restore(path.read_bytes())
    saved["step"] = saved.pop("update")
    path.write_bytes(flax.serialization.msgpack_serialize(saved))
    before = path.read_bytes()
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and str(path) in err and "unusable" in err
    assert path.read_bytes() == before


def test_a_damaged_config_json(module, stopped):
    (stopped / "config.json").write_bytes((stopped / "config.json").read_bytes()[:20])
    before = content(stopped)
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and "Traceback" not in err
    assert content(stopped) == before


# -------------------------------------- init_from
def test_init_from_starts_from_the_best_parameters(module, base, tmp_path, monkeypatch):
    seen = []
    make_train = module.make_train

    def record(config):
        init, train, *rest = make_train(config)

        def lower(state):
            seen.append(jax.tree.map(np.array, state))
            return train.lower(state)

        return init, types.SimpleNamespace(lower=lower), *rest

    monkeypatch.setattr(module, "make_train", record)
    words = flags(dataclasses.replace(base.config, seed=5, init_from=str(base.path)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err
    params = flax.serialization.to_state_dict(seen[0].params)
    saved = flax.serialization.msgpack_restore((base.path / "checkpoint.msgpack").read_bytes())
    for seed in (0, 1):
        same = lambda x, y, seed=seed: np.testing.assert_array_equal(x[:, seed], y[:, 0])
        jax.tree.map(same, params, saved["best"])
    assert seen[0].update.max() == 0 and np.isneginf(seen[0].best_return).all()


def test_init_from_needs_no_more_than_the_network(module, base, tmp_path):
    """The state of another environment, say, may have other parts."""
    path = tmp_path / "other" / "checkpoint.msgpack"
    path.parent.mkdir()
    saved = flax.serialization.msgpack_restore((base.path / path.name).read_bytes())
    path.write_bytes(flax.serialization.msgpack_serialize({"best": saved["best"]}))
    words = flags(dataclasses.replace(base.config, seed=5, init_from=str(path.parent)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err


def test_init_from_another_network(module, base, tmp_path):
    words = flags(tiny(module, hidden_size=5, init_from=str(base.path)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 2 and str(base.path / "checkpoint.msgpack") in err and "unusable" in err


def test_init_from_does_not_stretch_parameters(tmp_path):
    module = load_script("ppo_ff")  # the function is the same in all scripts
    narrow = tmp_path / "narrow"
    module.main(tiny(module, hidden_size=1, run_dir=str(narrow)))
    words = flags(tiny(module, hidden_size=5, init_from=str(narrow)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 2 and str(narrow / "checkpoint.msgpack") in err and "reshape" in err


def test_init_from_a_folder_without_a_run(module, base, tmp_path):
    words = flags(dataclasses.replace(base.config, init_from=str(tmp_path)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 2 and str(tmp_path / "checkpoint.msgpack") in err and "Traceback" not in err


# ----------------------------------------- errors
@pytest.fixture
def fails(module, monkeypatch):
    """fails(*words) -> the error message of a run that must end before anything is compiled."""

    def never(*args, **kwargs):
        raise AssertionError("something was compiled")

    program = types.SimpleNamespace(lower=never)
    monkeypatch.setattr(jax, "pmap", lambda *_, **__: functools.wraps(never)(program.lower))

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
    assert wrong in message and right in message and "did you mean" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "env_id", "other"),
    [
        ("ppo_ff", "Pendulum-v1", "ppo_continuous.py"),
        ("ppo_ff", "MountainCarContinuous-v0", "ppo_continuous.py"),
        ("ppo_continuous", "CartPole-v1", "ppo_ff.py"),
    ],
)
def test_environment_of_the_wrong_kind(script, env_id, other):
    code, out, err = run(load_script(script), "--env-id", env_id)
    assert code == 2 and not out and env_id in err and other in err
    assert len(err.splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize("changes", ['{"nonsense": 1}', "nonsense", "[1]"])
def test_wrong_environment_parameters(module, fails, changes):
    message = fails("--env-params", changes)
    assert "env_params" in message and re.search("max_steps", message)


def test_sizes_that_do_not_divide(module, fails):
    message = fails(*flags(tiny(module)), "--num-minibatches", 3)
    assert re.search(r"\b3\b", message) and "num_minibatches" in message


def test_environments_that_do_not_divide_by_devices(module, fails, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    message = fails(*flags(tiny(module, gamma=0.125)))  # a program that no other test has made
    assert re.search(r"num_envs = 4\b", message) and re.search(r"\b3\b", message)


OUT_OF_RANGE = [("num_envs", 0), ("num_steps", 0), ("num_seeds", 0), ("update_epochs", -1)]
OUT_OF_RANGE += [("lr", "nan"), ("lr", "inf"), ("lr", 0), ("lr", -1), ("gamma", 1.5)]
OUT_OF_RANGE += [("gamma", -0.1), ("gae_lambda", 1.01), ("clip_eps", 0), ("max_grad_norm", 0)]
OUT_OF_RANGE += [("ent_coef", -0.1), ("vf_coef", "nan"), ("target_kl", 0), ("num_evals", 0)]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_numbers_out_of_range(module, fails, name, value):
    message = fails(f"--{name}", value)
    closed = name in ("gamma", "gae_lambda", "ent_coef", "vf_coef")
    interval = r"\[0" if closed else r"\(0"
    number = re.fullmatch(rf"error: {name} = (\S+) is not in {interval}, (1|1e\+18)]\n", message)[1]
    np.testing.assert_equal(float(number), float(value))


def test_fewer_steps_than_one_update_per_evaluation(module, fails):
    message = fails(*flags(tiny(module)), "--total-timesteps", 31)
    assert "total_timesteps must be >= 32" in message


def test_a_folder_that_cannot_be_made(module, fails, tmp_path):
    (tmp_path / "file").write_text("")
    message = fails(*flags(tiny(module)), "--run-dir", tmp_path / "file" / "run")
    assert str(tmp_path / "file") in message


def test_a_missing_extra(module, monkeypatch):
    """brax/ant without Brax: the command that installs it, where the script takes Brax at all."""
    for name in [name for name in sys.modules if name.split(".")[0] == "brax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "brax", None)
    code, out, err = run(module, "--env-id", "brax/ant")
    assert code == 2 and not out and "brax/ant" in err and len(err.splitlines()) <= 2
    takes_brax = "import brax" in (ROOT / f"{module.SCRIPT}.py").read_text()
    assert ("pip install brax" in err) == takes_brax


def test_an_error_in_a_process_of_its_own(tmp_path):
    module = load_script(SCRIPTS[-1])
    script = str(ROOT / f"{module.SCRIPT}.py")
    words = [sys.executable, script, "--env-id", "Nowhere-v0"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: unknown env_id Nowhere-v0")
    assert list(tmp_path.iterdir()) == []
