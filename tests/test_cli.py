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

FILES = {"config.json", "metrics.csv", "summary.json", "checkpoint.msgpack"}  # and the source
COLUMNS = {"update", "seed", "env_steps", "episode/return", "episode/length", "episode/count"}
COLUMNS |= {"eval/return", "eval/length", "loss/policy", "loss/value", "policy/entropy"}
COLUMNS |= {"policy/approx_kl", "policy/clip_fraction", "value/explained_variance"}
COLUMNS |= {"optim/grad_norm", "optim/lr", "time/sps"}
SUMMARY = {"versions", "device", "env_steps", "seconds", "steps_per_second", "eval_return_mean"}
SUMMARY |= {"eval_return_per_seed", "best_return_per_seed"}
SECONDS = {"seconds", "steps_per_second"}


# The part below `main` is the same in all scripts: see test_style.py.
@pytest.fixture(scope="module", params=["ppo_ff", "ppo_obs_norm"])
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
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
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
def test_a_run_writes_its_folder_and_nothing_else(base, module):
    assert base.code == 0, base.err
    assert set(content(base.path)) == {*FILES, f"{module.SCRIPT}.py"}
    assert (base.path / f"{module.SCRIPT}.py").read_text() == Path(module.__file__).read_text()


def test_what_a_terminal_shows(base):
    start, result, plot, video = base.out.splitlines()
    assert re.fullmatch(rf"{base.path}: 0 to 128 steps per seed, compiling \.\.\. \d+\.\d s", start)
    first, second = base.summary["eval_return_per_seed"]
    mean, half = re.fullmatch(r"return (\S+) ± (\S+)", result).groups()
    assert float(mean) == pytest.approx((first + second) / 2, rel=1e-3, abs=1e-3)
    # With one degree of freedom, 95% of Student's t are within 12.706 standard errors.
    assert float(half) == pytest.approx(12.706 * abs(first - second) / 2, rel=1e-2, abs=1e-3)
    assert plot == f"to plot:  plot {base.path}"
    assert video == f"to watch: enjoy {base.path} --video {base.path / 'video.gif'}"
    bar = base.err.split("\r")[-1].strip()
    assert re.search(r"100%.* [\d.]+k? steps/s, return \S+\]$", bar) and len(bar) <= 80
    assert "<" in bar  # elapsed < left


def test_config_json_tells_script_and_every_option_as_a_value(base, module):
    about = json.loads((base.path / "config.json").read_text())
    assert about.pop("script") == module.SCRIPT and None not in about.values()
    assert module.Config(**about) == dataclasses.replace(base.config, run_dir=str(base.path))


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
    rare = {"episode/return", "episode/length", "eval/return", "eval/length"}
    for row in base.rows:
        assert all(np.isfinite(float(row[name])) for name in set(row) - rare)
        assert "nan" not in "".join(row.values()).lower()


def test_summary_tells_what_the_last_rows_tell(base):
    summary, rows = base.summary, base.rows
    config = json.loads((base.path / "config.json").read_text())
    assert set(summary) == SUMMARY | set(config) and summary.items() >= config.items()
    assert {"jax", "flax", "optax"} <= set(summary["versions"])
    assert summary["device"] == f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    assert summary["env_steps"] == int(rows[-1]["env_steps"])
    returns = [float(row["eval/return"]) for row in rows[-2:]]
    np.testing.assert_allclose(summary["eval_return_per_seed"], returns, rtol=1e-6)
    assert summary["eval_return_mean"] == pytest.approx(np.mean(returns), rel=1e-6)
    best = [max(float(r["eval/return"]) for r in rows[s::2] if r["eval/return"]) for s in (0, 1)]
    np.testing.assert_allclose(summary["best_return_per_seed"], best, rtol=1e-6)
    steps = summary["env_steps"] * summary["num_seeds"]
    assert summary["steps_per_second"] == pytest.approx(steps / summary["seconds"])


def test_the_checkpoint_holds_every_seed(base):
    arrays = read_checkpoint(base.path)
    assert all(x.shape[:2] == (jax.local_device_count(), 2) for x in arrays.values())
    for name in ("params", "best_params"):
        kernels = [x for p, x in arrays.items() if p.startswith(f"['{name}']") and "kernel" in p]
        assert kernels and all((x[:, 0] != x[:, 1]).any() for x in kernels)


def test_seeds_are_apart_in_the_rows(base):
    first, second = ([row["loss/value"] for row in base.rows[seed::2]] for seed in (0, 1))
    assert not set(first) & set(second)


def test_a_run_without_a_folder_gets_a_name_of_its_own(module, base, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(module, *flags(base.config))
    assert code == 0, err
    (path,) = tmp_path.glob("runs/*")
    env_id = base.config.env_id.replace("/", "-")
    assert re.fullmatch(rf"{module.SCRIPT}__{re.escape(env_id)}__0__\d+-\d+-\d+", path.name)
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


def test_help_has_a_box_with_an_example_for_each_group_of_options(module):
    code, out, _ = run(module, "--help")
    assert code == 0
    boxes = re.split(" (environment|algorithm|run) options ", out)[1:]
    assert boxes[::2] == ["environment", "algorithm", "run"]
    for group, box in zip(
        (module.Environment, module.Algorithm, module.Run), boxes[1::2], strict=True
    ):
        assert "For example: --" in box
        listed = set(re.findall(r"^\W --([a-z][a-z-]+)", box, re.M))
        assert listed == {x.name.replace("_", "-") for x in dataclasses.fields(group)}


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
    "num_layers": 2,
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
    "anneal_ent": None,
    "total_timesteps": 256,
    "num_evals": 1,
    "num_seeds": 3,
    "eval_episodes": 5,
    "eval_greedy": None,
    "policy": "tanh_gaussian",
    "normalize_reward": None,
    "normalize_obs": None,
    "embedding_size": 3,
    "conv_size": 3,
    "head_size": 3,
    "bf16": None,
    "memory": None,
}
# Tested one by one: those of the run, and those of the environment.
OTHERS = {"env_id", "env_params", "seed", "run_dir", "init_from", "track", "distributed"}
OTHERS |= {"benchmark_id", "ruleset_id", "img_obs"}


@pytest.mark.parametrize("module", ["ppo_ff", "ppo_obs_norm", "ppo_rnn"], indirect=True)
def test_every_option_is_covered(module):
    fields = {field.name for field in dataclasses.fields(module.Config)}
    assert fields <= {*PROGRAM, *OTHERS}


@pytest.mark.parametrize("module", ["ppo_ff", "ppo_obs_norm", "ppo_rnn"], indirect=True)
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


def test_images_have_a_network_of_their_own():
    module = load_script("ppo_ff")
    shapes = {}
    for env_id in ("CartPole-v1", "Breakout-MinAtar"):
        init, *_ = module.make_train(tiny(module, env_id=env_id, hidden_size=32))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0), 1))
        params = jax.eval_shape(init, keys).params
        shapes[env_id] = [x.shape[2:] for x in jax.tree.leaves(params)]
    assert (4, 32) in shapes["CartPole-v1"]
    assert (9 * 4, 16) in shapes["Breakout-MinAtar"]  # a 3 x 3 convolution


def test_many_environments_make_shorter_rollouts():
    config = load_script("ppo_rnn").Config
    sizes = [config(num_envs=n) for n in (256, 1024, 1025, 8192)]
    assert [x.batch_size // x.num_envs for x in sizes] == [64, 64, 16, 16]


@pytest.mark.parametrize(
    ("total_timesteps", "num_evals", "updates"), [(1e5, 10, 20), (9e4, 10, 20), (5e5, 10, 120)]
)
def test_training_is_as_long_as_comes_closest(total_timesteps, num_evals, updates):
    """Batches of 4096: 24.4 updates are two per evaluation, 22.0, too, and 122.1 are twelve."""
    config = load_script("ppo_ff").Config(total_timesteps=total_timesteps, num_evals=num_evals)
    assert config.num_updates == updates == config.updates_per_eval * num_evals


def test_the_first_line_says_how_long_training_is(module, compile_once, tmp_path):
    config = tiny(module, total_timesteps=80, run_dir=str(tmp_path / "run"))
    code, out, _ = run(module, *flags(config))
    assert (
        code == 0
        and f": 0 to {config.num_updates * config.batch_size} steps" in out.splitlines()[0]
    )
    assert read_rows(tmp_path / "run")[-1]["env_steps"] == "64"


@pytest.mark.parametrize("module", ["ppo_ff"], indirect=True)
def test_the_first_line_of_a_continued_run_says_where_it_ends(module, base, tmp_path, monkeypatch):
    """One more evaluation, of three times as many updates as there were. The last line: no video
    of a file in environments/, which is a second source.
    """
    shutil.copytree(base.path, tmp_path / "run")
    monkeypatch.setattr(module, "SOURCES", [*module.SOURCES, __file__])
    more = ("--total-timesteps", 3 * base.config.total_timesteps, "--num-evals", 1)
    code, out, err = run(module, "--run-dir", tmp_path / "run", *more)
    assert code == 0, err
    steps = 4 * base.config.num_updates * base.config.batch_size
    assert f": {steps // 4} to {steps:,} steps per seed, " in out.splitlines()[0]
    assert read_rows(tmp_path / "run")[-1]["env_steps"] == str(steps)
    assert out.splitlines()[-1] == f"to watch: enjoy {tmp_path / 'run'}"
    assert (tmp_path / "run" / "test_cli.py").exists()


def test_seed_changes_the_run(module, base, tmp_path):
    words = flags(dataclasses.replace(base.config, seed=1))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err
    losses = {row["loss/value"] for row in read_rows(tmp_path / "run")}
    assert not losses & {row["loss/value"] for row in base.rows}


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


class Tracker:
    """Stands for Weights & Biases: keeps what is logged, and remembers it when it resumes."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self, monkeypatch):
        self.started, self.logged, self.summary, self.finished, self.step = [], [], {}, 0, 0
        monkeypatch.setitem(sys.modules, "wandb", self)

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, values, step):
        assert step >= self.step  # it would be dropped
        self.logged.append((step, values))
        self.step = step + 1

    def finish(self):
        self.finished += 1

    def assert_same(self, rows):
        """It has the mean over seeds of each update in the table."""
        updates = {int(row["env_steps"]): [] for row in rows}
        for row in rows:
            updates[int(row["env_steps"])].append(row)
        assert [step for step, _ in self.logged] == list(updates)
        for step, values in self.logged:
            for name in [name for name in updates[step][0] if "/" in name]:
                cells = [float(row[name]) for row in updates[step] if row[name]]
                assert (name in values) == bool(cells)
                if cells:
                    assert values[name] == pytest.approx(np.mean(cells))


def test_tracking_sends_what_the_files_hold(module, base, tmp_path, monkeypatch):
    tracker = Tracker(monkeypatch)
    words = flags(dataclasses.replace(base.config, track=True))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "a run #1")
    assert code == 0, err
    (start,) = tracker.started
    assert tracker.finished == 1 and start["config"]["gamma"] == base.config.gamma
    # The folder above is part of the id: two sweeps may both have a `seed0`.
    run_id = f"{tmp_path.name}-a-run--1"[-64:]
    assert (start["id"], start["name"], start["resume"]) == (run_id, "a run #1", "allow")
    tracker.assert_same(read_rows(tmp_path / "a run #1"))
    assert tracker.summary == json.loads((tmp_path / "a run #1" / "summary.json").read_text())


def test_tracking_misses_nothing_of_a_killed_run(module, base, tmp_path, monkeypatch):
    """Not even what the server had not received when the run was killed."""
    tracker = Tracker(monkeypatch)
    words = [*flags(dataclasses.replace(base.config, track=True)), "--run-dir", tmp_path / "run"]
    run_killed(module, words, "append_rows", 2)
    del tracker.logged[2:]
    tracker.step = tracker.logged[-1][0] + 1
    code, _, err = run(module, *words)
    assert code == 0, err
    tracker.assert_same(read_rows(tmp_path / "run"))


def test_tracking_without_a_login(module, base, tmp_path, monkeypatch):
    tracker = Tracker(monkeypatch)

    def init(**_):
        raise tracker.errors.Error("api_key not configured")

    tracker.init = init
    words = flags(dataclasses.replace(base.config, track=True))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 2 and "api_key" in err and "wandb login" in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_tracking_offline_needs_no_account(tmp_path):
    """As a user runs it: a process of its own, the script's path, another working directory."""
    module = load_script("ppo_ff")
    words = [*flags(tiny(module, track=True)), "--run_dir", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, str(ROOT / f"{module.SCRIPT}.py"), *words],
        cwd=tmp_path,
        env=for_a_process(WANDB_MODE="offline", WANDB_SILENT="true"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert set(content(tmp_path / "run")) == {*FILES, f"{module.SCRIPT}.py"}
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


# ------------------------------------- continuing
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("append_rows", 1),  # in the first call: there is no checkpoint yet
        ("write", 3),  # between the first rows and the first checkpoint
        ("append_rows", 2),
        ("write", 4),  # between the last rows and the last checkpoint
        ("write", 5),  # behind the last checkpoint: only the summary is missing
    ],
)
def test_a_killed_run_continues_to_the_same_bits(module, base, name, number, tmp_path):
    words = [*flags(base.config), "--run-dir", tmp_path / "run"]
    run_killed(module, words, name, number)
    assert not (tmp_path / "run" / "summary.json").exists()
    code, _, err = run(module, "--run-dir", tmp_path / "run")  # enough: config.json has the rest
    assert code == 0, err
    assert learned(tmp_path / "run") == learned(base.path)
    assert set(content(tmp_path / "run")) == set(content(base.path))
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
    assert set(content(tmp_path / "run")) == set(content(base.path))


def test_a_finished_run_stays_as_it_is(module, base):
    before = content(base.path)
    code, out, err = run(module, *flags(base.config), "--run-dir", base.path)
    assert code == 0 and err == "", err  # not even an empty bar
    steps = base.config.num_updates * base.config.batch_size
    advice = "raise --total-timesteps to continue it"
    assert out == f"{base.path} has finished {steps:,} steps; {advice}\n"
    assert content(base.path) == before


@pytest.mark.parametrize("module", ["ppo_ff", "ppo_obs_norm"], indirect=True)
def test_a_finished_run_can_be_extended(module, base, tmp_path):
    """The updates so far stay, whatever options change; the schedules follow the new length."""
    shutil.copytree(base.path, tmp_path / "run")
    config = base.config
    more = {"total_timesteps": 3 * config.total_timesteps, "num_evals": 3, "lr": 1e-3, "gamma": 0.5}
    words = [word for name, value in more.items() for word in (f"--{name}", value)]
    code, _, err = run(module, "--run-dir", tmp_path / "run", *words)
    assert code == 0, err
    rows = read_rows(tmp_path / "run")
    assert rows[: len(base.rows)] == base.rows and len(rows) == 3 * len(base.rows)
    first = rows[len(base.rows)]  # the optimizer has counted on
    assert float(first["optim/lr"]) == pytest.approx(1e-3 * (1 - 1 / 3), rel=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 3 * base.summary["env_steps"]
    options = json.loads((tmp_path / "run" / "config.json").read_text())
    assert options.items() >= more.items() and options["hidden_size"] == config.hidden_size


@pytest.mark.parametrize("module", ["ppo_ff", "ppo_obs_norm"], indirect=True)
def test_an_extended_run_that_dies_before_its_summary(module, base, tmp_path):
    """The summary of the shorter run must not pass for that of the extended one."""
    shutil.copytree(base.path, tmp_path / "run")
    config = base.config
    more = ["--total-timesteps", 2 * config.total_timesteps, "--num-evals", 2 * config.num_evals]
    run_killed(module, ["--run-dir", tmp_path / "run", *more], "write", 5)
    assert not (tmp_path / "run" / "summary.json").exists()
    code, _, err = run(module, "--run-dir", tmp_path / "run")
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 2 * base.summary["env_steps"]


@pytest.fixture(scope="module")
def half(base, module, tmp_path_factory):
    """A run that was killed after its first checkpoint."""
    path = tmp_path_factory.mktemp(module.SCRIPT) / "half"
    run_killed(module, [*flags(base.config), "--run-dir", path], "append_rows", 2)
    return path


@pytest.fixture
def stopped(half, tmp_path):
    return Path(shutil.copytree(half, tmp_path / "stopped"))


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 8), ("num_seeds", 1), ("num_envs", 8), ("num_steps", 8)]
)
def test_an_option_that_does_not_fit_the_checkpoint(module, stopped, field, value):
    """One line, and the folder stays as it was, also that of a finished run."""
    (stopped / "summary.json").write_text("{}")
    before = content(stopped)
    code, _, err = run(module, "--run-dir", stopped, f"--{field}", value, "--total-timesteps", 1e4)
    assert code == 2 and len(err.splitlines()) == 1 and "Traceback" not in err
    assert str(stopped) in err
    assert content(stopped) == before


def test_the_folder_of_another_script(module, stopped):
    path = stopped / "config.json"
    stored = json.loads(path.read_text())
    assert stored["script"] == module.SCRIPT
    # Its options may not fit here: they must not be read.
    path.write_text(json.dumps(stored | {"script": "ppo_other", "num_envs": None, "env_id": "?"}))
    before = content(stopped)
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and err == f"error: {stopped} does not hold a run of {module.SCRIPT}.py\n"
    assert content(stopped) == before


def test_a_checkpoint_of_another_precision(module, stopped):
    path = stopped / "checkpoint.msgpack"
    saved = flax.serialization.msgpack_restore(path.read_bytes())
    saved["best_return"] = saved["best_return"].astype(np.float64)
    path.write_bytes(flax.serialization.msgpack_serialize(saved))
    before = content(stopped)
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and str(path) in err and "JAX_ENABLE_X64" in err
    assert content(stopped) == before


def test_a_folder_in_use(module, stopped):
    """Two processes must not write the same files; a kill releases the lock."""
    program = "import fcntl, sys; table = open(sys.argv[1], 'r+')"
    program += "; fcntl.lockf(table, fcntl.LOCK_EX); print('locked', flush=True); input()"
    command = [sys.executable, "-c", program, str(stopped / "metrics.csv")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL) as other:
        assert other.stdout.readline() == b"locked\n"
        before = content(stopped)
        code, _, err = run(module, "--run-dir", stopped)
        assert (code, err) == (2, f"error: {stopped} is in use by another process\n")
        assert content(stopped) == before
        other.kill()
    assert run(module, "--run-dir", stopped)[0] == 0


def test_two_new_runs_in_one_folder(module, base, tmp_path, monkeypatch):
    """The second finds that the first has made the folder while it compiled."""
    path = tmp_path / "run"
    broadcast = module.broadcast_one_to_all
    monkeypatch.setattr(module, "broadcast_one_to_all", lambda x: (start_other(), broadcast(x))[1])

    def start_other():
        path.mkdir()
        (path / "metrics.csv").write_text("update,seed\n")

    code, _, err = run(module, *flags(base.config), "--run-dir", path)
    assert code == 2 and "exists" in err and len(err.strip().splitlines()) == 1
    assert (path / "metrics.csv").read_text() == "update,seed\n"


def test_a_damaged_checkpoint(module, stopped):
    whole = (stopped / "checkpoint.msgpack").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", b"not a checkpoint"):
        (stopped / "checkpoint.msgpack").write_bytes(damaged)
        code, _, err = run(module, "--run-dir", stopped)
        assert code == 2 and str(stopped / "checkpoint.msgpack") in err and "cannot load" in err
        assert len(err.splitlines()) == 1
        assert (stopped / "checkpoint.msgpack").read_bytes() == damaged


def test_the_checkpoint_of_another_state(module, stopped):
    """Of a version of the script whose state had another field."""
    path = stopped / "checkpoint.msgpack"
    saved = flax.serialization.msgpack_restore(path.read_bytes())
    saved["step"] = saved.pop("updates_done")
    path.write_bytes(flax.serialization.msgpack_serialize(saved))
    before = path.read_bytes()
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and str(path) in err and "cannot load" in err
    assert path.read_bytes() == before and len(err.splitlines()) == 1


@pytest.mark.parametrize("damage", [lambda text: text[:20], lambda _: "[1]", lambda _: "1"])
def test_a_damaged_config_json(module, stopped, damage):
    path = stopped / "config.json"
    path.write_text(damage(path.read_text()))
    before = content(stopped)
    code, _, err = run(module, "--run-dir", stopped)
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith("error: ")
    assert content(stopped) == before


def test_a_copy_is_a_script_of_its_own(tmp_path):
    """It has its own name in the folder, which its parent refuses to continue."""
    module = load_script("ppo_ff")
    (tmp_path / "my_ppo.py").write_text((ROOT / "ppo_ff.py").read_text())
    words = [*flags(tiny(module)), "--num-evals", "1"]
    command = [sys.executable, "-W", "ignore", "my_ppo.py", *words]
    environment = for_a_process()
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("runs/my_ppo__CartPole-v1__0__*")
    assert (path / "my_ppo.py").read_text() == (ROOT / "ppo_ff.py").read_text()
    assert json.loads((path / "summary.json").read_text())["script"] == "my_ppo"
    code, _, err = run(module, "--run-dir", path)
    assert code == 2 and err == f"error: {path} does not hold a run of ppo_ff.py\n"


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
        jax.tree.map(same, params, saved["best_params"])
    assert seen[0].updates_done.max() == 0 and np.isneginf(seen[0].best_return).all()


def test_init_from_needs_no_more_than_the_network(module, base, tmp_path):
    """The state of another environment, say, may have other parts."""
    path = tmp_path / "other" / "checkpoint.msgpack"
    path.parent.mkdir()
    saved = flax.serialization.msgpack_restore((base.path / path.name).read_bytes())
    path.write_bytes(flax.serialization.msgpack_serialize({"best_params": saved["best_params"]}))
    words = flags(dataclasses.replace(base.config, seed=5, init_from=str(path.parent)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 0, err


@pytest.mark.parametrize("size", [1, 5])  # parameters of size 1 must not be stretched
def test_init_from_another_network(module, base, tmp_path, size):
    words = flags(tiny(module, hidden_size=size, init_from=str(base.path)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 2 and str(base.path / "checkpoint.msgpack") in err and "does not fit" in err
    assert list(tmp_path.iterdir()) == []


def test_init_from_a_folder_without_a_run(module, base, tmp_path):
    words = flags(dataclasses.replace(base.config, init_from=str(tmp_path)))
    code, _, err = run(module, *words, "--run-dir", tmp_path / "run")
    assert code == 2 and str(tmp_path / "checkpoint.msgpack") in err and len(err.splitlines()) == 1


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


@pytest.mark.parametrize("changes", ['{"nonsense": 1}', "nonsense", "[1]", '{"LIMIT": "a"}'])
def test_wrong_environment_parameters(module, fails, changes):
    limit = "max_steps" if module.SCRIPT == "ppo_rnn" else "max_steps_in_episode"
    message = fails("--env-params", changes.replace("LIMIT", limit))
    assert "env_params" in message and limit in message
    fails("--env-params", json.dumps({limit: 1.5}))
    fails("--env-params", json.dumps({limit: [1]}))


ONE_OF_ITS_OWN = {
    "ppo_ff": "CartPole-v1",
    "ppo_drift": "CartPole-v1",
    "ppo_continuous": "brax/ant",
    "ppo_obs_norm": "brax/ant",
    "ppo_vtrace": "brax/ant",
    "ppo_rnn": "XLand-MiniGrid-R1-9x9",
    "ppo_meta": "MiniGrid-MemoryS8",
    "ippo": "HeuristicEnemySMAX/3m",
    "ippo_rnn": "HeuristicEnemySMAX/3m",
    "mappo": "HeuristicEnemySMAX/3m",
    "disco": "Catch-8x8",
    "disco_meta": "Catch-8x8",
}


@pytest.mark.parametrize("script", ONE_OF_ITS_OWN)
def test_a_list_of_the_environments(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(load_script(script), "--env-id", "list")
    assert not code and ONE_OF_ITS_OWN[script] in out.splitlines() and not err
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_do_not_divide(module, fails):
    message = fails(*flags(tiny(module)), "--num-minibatches", 3)
    assert re.search(r"num_minibatches must divide (4|16)\b", message)


def test_environments_that_do_not_divide_by_devices(module, fails, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    message = fails(*flags(tiny(module, gamma=0.125)))  # a program that no other test has made
    assert "num_envs must be a multiple of 3, the number of devices" in message


def test_sizes_of_a_rollout_stay_when_a_run_is_continued(module, base, tmp_path):
    """Also where their product, and so every row's env_steps, would be the same."""
    folder = shutil.copytree(base.path, tmp_path / "run")
    before = content(folder)
    config = base.config
    sizes = ["--num-envs", 2 * config.num_envs, "--num-steps", config.num_steps // 2]
    code, _, err = run(module, "--run-dir", folder, *sizes)
    assert code == 2 and "num_envs and num_steps must stay the same" in err
    assert content(folder) == before


@pytest.mark.parametrize("seed", [2**32, 2**32 + 1, -1])
def test_a_seed_that_would_be_that_of_another_run(module, fails, seed):
    assert str(seed) in fails("--seed", seed)


def test_more_metrics_than_memory(module, fails):
    assert "num_evals" in fails("--total-timesteps", 1e12)


def test_a_folder_that_cannot_be_made(module, base, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(module, *flags(base.config), "--run-dir", tmp_path / "file" / "run")
    assert code == 2 and str(tmp_path / "file") in err and len(err.splitlines()) == 1


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


@pytest.mark.parametrize("name", ["ppo_ff", "ppo_drift", "ppo_rnn", "ppo_meta"])
def test_an_environment_of_brax_is_suggested_with_its_script(name):
    module = load_script(name)
    with pytest.raises(module.ConfigError, match=r"did you mean brax/halfcheetah \(ppo_continuous"):
        module.make_env(module.Config(env_id="HalfCheetah-v4"))
