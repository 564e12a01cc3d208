"""Runs that are killed, as processes of their own, that diverge, or that find the disk full."""

import dataclasses
import json
import random
import resource
import shlex
import signal
import subprocess
import sys
import time

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, for_a_process, load_script, tiny
from test_cli import (
    compiling_once,
    content,
    flags,
    learned,
    read_checkpoint,
    read_rows,
    run,
    run_killed,
)

CALLS = {"ppo_ff": 150}  # updates, one a call; 150 is enough for three kills, 50 for one
SIBLINGS = {
    "ippo": {"num_envs": 2, "num_steps": 8, "num_minibatches": 2},
    "disco": {"weights": "random", "env_id": "Catch-5x5", "num_steps": 8, "num_envs": 2},
}


def config_of(script):
    """A run of many calls, each of which takes milliseconds."""
    module, calls = load_script(script), CALLS.get(script, 50)
    length = {"total_timesteps": 16 * calls, "num_evals": calls}
    if script in SCRIPTS:
        return tiny(module, **length)
    sizes = {"hidden_size": 8, "eval_episodes": 4, "replay_batch": 4, "replay_size": 6}
    sizes |= {
        "hidden_sizes": (8, 8),
        "model_size": 4,
        "branch_size": 4,
        **SIBLINGS[script],
        **length,
    }
    return module.Config(**{k: v for k, v in sizes.items() if k in vars(module.Config())})


def start_process(script, words, env=None, cwd=None):
    command = [sys.executable, "-W", "ignore", str(ROOT / f"{script}.py"), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job ignores it, and so would the process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, env=env or for_a_process(), cwd=cwd, **pipes)


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out.decode(), err.decode()


def rows_written(run_dir):
    path = run_dir / "metrics.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


# ----------------------------------------- killed
@pytest.fixture
def compile_once(script):
    with compiling_once(load_script(script)):
        yield


@pytest.mark.parametrize("script", ["ppo_ff", *SIBLINGS])  # the same below `main`: test_style.py
def test_a_killed_run_ends_in_the_same_bits(script, compile_once, tmp_path):
    """At random moments, against an undisturbed run; benchmarks/storm.py kills more often."""
    signals = [signal.SIGKILL]
    if script == "ppo_ff":  # the run part is the same in every script
        signals += [signal.SIGKILL, signal.SIGINT]
    chance, config = random.Random(script), config_of(script)
    module, twin, killed = load_script(script), tmp_path / "twin", tmp_path / "killed"
    code, _, err = run(module, *flags(config), "--run-dir", twin)
    assert code == 0, err
    words, stopped_at = [*flags(config), "--run-dir", killed], []
    for number in signals:
        process = start_process(script, words)
        goal = rows_written(killed) + chance.randrange(5, 25)
        while rows_written(killed) < goal and process.poll() is None:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.01)
        process.send_signal(number)
        code, out, err = finish(process)
        assert code == {signal.SIGKILL: -9, signal.SIGINT: 130}[number], err
        stopped_at.append(rows_written(killed))
        words = ["--run-dir", killed]
    if number == signal.SIGINT:
        assert_interrupted(err, script, words)
    assert sorted({0, *stopped_at, config.num_updates}) == [0, *stopped_at, config.num_updates]
    code, _, err = run(module, *words)
    assert code == 0, err
    assert learned(killed) == learned(twin)
    assert set(content(killed)) == set(content(twin))


# ------------------------------------ interrupted
def assert_interrupted(err, script, words):
    """The last line is the command that continues."""
    command = shlex.join(["python", str(ROOT / f"{script}.py"), *map(str, words)])
    assert err.strip().splitlines()[-1] == f"interrupted; to continue: {command}"
    assert "Traceback" not in err and "Fatal" not in err


def test_ctrl_c_at_any_moment(tmp_path):
    """Within the imports, while it compiles, and once the folder has got a name."""
    words = ["--total-timesteps", "1e9", "--run-dir", str(tmp_path / "run")]
    for seconds in (0.5, 2.0, 6.0):
        process = start_process("ppo_ff", words)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process, timeout=5)
        assert code == 130, err
        assert_interrupted(err, "ppo_ff", words)


def test_ctrl_c_names_the_folder(tmp_path):
    """That of a run without --run-dir, too."""
    process = start_process("ppo_ff", flags(config_of("ppo_ff")), cwd=tmp_path)
    while not list(tmp_path.glob("runs/*/checkpoint.msgpack")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, _, err = finish(process)
    (path,) = tmp_path.glob("runs/*")
    words = [*flags(config_of("ppo_ff")), "--run-dir", path.relative_to(tmp_path)]
    assert_interrupted(err, "ppo_ff", words)


# ------------------------------------------ space
def test_a_full_disk_is_an_error_and_spares_the_checkpoint(tmp_path):
    module = load_script("ppo_ff")  # the run part is the same in every script
    path = tmp_path / "run"
    words = [*flags(tiny(module, total_timesteps=320, num_evals=20)), "--run-dir", path]
    limit, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    make_rows, calls = module.append_rows, []

    def fill(*args):
        calls.append(args)
        if len(calls) == 3:
            calls.append((path / "checkpoint.msgpack").read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(calls[-1]) // 2, unlimited))
        return make_rows(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "append_rows", fill)
        try:
            code, _, err = run(module, *words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    assert code == 2 and "error: " in err and "Traceback" not in err
    assert (path / "checkpoint.msgpack").read_bytes() == calls[3]
    code, _, err = run(module, "--run-dir", path)
    assert code == 0, err
    code, _, err = run(module, *words[:-1], tmp_path / "twin")
    assert learned(path) == learned(tmp_path / "twin")


# -------------------------------------------- NaN
def poison(module, updates):
    """A make_env whose reward is NaN after so many updates."""
    make_env = module.make_env

    def make_poisoned_env(config):
        env_reset, env_step, actions = make_env(config)

        def reset(key):
            obs, env_state = env_reset(key)
            return obs, (env_state, jnp.int32(0))

        def step(key, env_state, action):
            env_state, count = env_state
            obs, env_state, reward, *rest = env_step(key, env_state, action)
            is_nan = count >= updates * config.num_steps
            return obs, (env_state, count + 1), jnp.where(is_nan, jnp.nan, reward), *rest

        return reset, step, actions

    return make_poisoned_env


@pytest.mark.parametrize(("poisoned", "kept"), [(5, 4), (0, None)])
def test_a_run_of_which_all_seeds_diverge_ends_and_keeps_the_last_checkpoint(
    poisoned, kept, tmp_path
):
    """In the middle of a run, and before the first checkpoint; it continues with other options."""
    module, path = load_script("ppo_ff"), tmp_path / "run"
    config = tiny(module, num_evals=4, num_seeds=2)  # calls of two updates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_env", poison(module, poisoned))
        code, _, err = run(module, *flags(config), "--run-dir", path)
    last = err.strip().splitlines()[-1]
    assert code == 2 and last.endswith(f"all seeds diverged: {path} needs a lower learning rate")
    assert not (path / "summary.json").exists() and "Traceback" not in err
    assert (path / "checkpoint.msgpack").exists() == (kept is not None)
    if kept is None:
        return
    arrays = read_checkpoint(path)
    assert arrays["['updates_done']"].max() == kept
    for name, x in arrays.items():
        if "params" in name or "opt_state" in name:
            assert np.isfinite(x).all(), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_env", poison(module, 1000))
        code, _, err = run(module, "--run-dir", path, "--lr", "1e-4")
    assert code == 0, err


def test_a_seed_that_diverges_does_not_end_the_others(tmp_path):
    """The parameters of the second agent are NaN in the checkpoint from which the run continues."""
    module, path = load_script("ppo_ff"), tmp_path / "run"
    config = tiny(module, num_evals=4, num_seeds=2)
    words = [*flags(config), "--run-dir", path]
    run_killed(module, words, "append_rows", 2)
    checkpoint = path / "checkpoint.msgpack"
    saved = flax.serialization.msgpack_restore(checkpoint.read_bytes())

    def spoil(x):
        x = np.array(x)
        x[:, 1] = np.nan
        return x

    saved["params"] = jax.tree.map(spoil, saved["params"])
    checkpoint.write_bytes(flax.serialization.msgpack_serialize(saved))
    code, _, err = run(module, "--run-dir", path)
    assert code == 0, err
    code, _, _ = run(module, *words[:-1], tmp_path / "twin")
    rows, expected = read_rows(path), read_rows(tmp_path / "twin")
    same = [name for name in rows[0] if name != "time/sps"]
    assert [[row[k] for k in same] for row in rows[::2]] == [
        [row[k] for k in same] for row in expected[::2]
    ]
    assert rows[-1]["optim/grad_norm"] in ("", "nan") and rows[-2]["optim/grad_norm"] != ""
    summary = json.loads((path / "summary.json").read_text())
    assert len(summary["eval_return_per_seed"]) == 2


def test_schedules_follow_the_updates_where_epochs_and_minibatches_change(tmp_path):
    """Half of 8 updates, then the others with a quarter of the gradient steps."""
    module = load_script("ppo_ff")
    config = tiny(module, total_timesteps=64, run_dir=str(tmp_path / "run"))
    module.main(config)
    changes = {"total_timesteps": 128, "num_evals": 4, "update_epochs": 1, "num_minibatches": 1}
    module.main(dataclasses.replace(config, **changes))
    rates = [float(row["optim/lr"]) for row in read_rows(tmp_path / "run")]
    expected = [1, 0.75, 0.5, 0.25, 0.5, 0.375, 0.25, 0.125]  # of 4 updates, then of 8
    np.testing.assert_allclose(rates, config.lr * np.array(expected), rtol=1e-6)
