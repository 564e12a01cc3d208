"""Runs that are killed, as processes of their own, that diverge, or that find the disk full."""

import random
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, for_a_process, load_script, tiny
from test_cli import compiling_once, content, flags, learned, read_checkpoint, read_rows, run

CALLS = {"ppo_ff": 150}  # updates, one a call; 150 is enough for three kills, 50 for one
SIBLINGS = {
    "ippo": {"env_id": "rings", "num_envs": 2, "num_steps": 8, "num_minibatches": 2},
    "disco": {"weights": "random", "env_id": "Catch-5x5", "num_steps": 8, "num_envs": 2},
}


def config_of(script):
    """A run of many calls, each of which takes milliseconds."""
    module, calls = load_script(script), CALLS.get(script, 50)
    length = {"total_timesteps": 16 * calls, "num_evals": calls}
    if script in SCRIPTS:
        return tiny(module, **length)
    sizes = {"hidden_size": 8, "eval_episodes": 4, "replay_batch": 4, "replay_size": 6}
    sizes |= {"feature_size": 8, "model_size": 4, "branch_size": 4, **SIBLINGS[script], **length}
    return module.Config(**{k: v for k, v in sizes.items() if k in vars(module.Config())})


def start_process(script, words, env=None):
    command = [sys.executable, "-W", "ignore", str(ROOT / f"{script}.py"), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell's background job ignores it, and so would the process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, env=env or for_a_process(), **pipes)


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


@pytest.mark.parametrize("script", [*SCRIPTS, *SIBLINGS])
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
        assert code == {signal.SIGKILL: -9, signal.SIGINT: 1}[number], err
        stopped_at.append(rows_written(killed))
        words = ["--run-dir", killed]
    if number == signal.SIGINT:
        assert err.strip().splitlines()[-1] == "interrupted: continue with --run-dir FOLDER"
        assert "Traceback" not in err
    assert sorted({0, *stopped_at, config.num_updates}) == [0, *stopped_at, config.num_updates]
    code, _, err = run(module, *words)
    assert code == 0, err
    assert learned(killed) == learned(twin)
    assert set(content(killed)) == set(content(twin))


# ------------------------------------------ space
def test_a_full_disk_is_an_error_and_spares_the_checkpoint(tmp_path):
    module = load_script("ppo_ff")  # the run part is the same in every script
    path = tmp_path / "run"
    words = [*flags(tiny(module, total_timesteps=320, num_evals=20)), "--run-dir", path]
    limit, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_rows, calls = module.write_rows, []

    def fill(*args):
        write_rows(*args)
        calls.append(args)
        if len(calls) == 3:
            calls.append((path / "checkpoint.msgpack").read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(calls[-1]) // 2, unlimited))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_rows", fill)
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
@pytest.mark.parametrize(("poisoned", "kept"), [(6, 4), (1, None)])
def test_a_run_that_diverges_stops_and_keeps_the_last_checkpoint(poisoned, kept, tmp_path):
    """The reward is NaN in one update, in the middle of a run and before the first checkpoint."""
    module = load_script("ppo_ff")
    make_env, path = module.make_env, tmp_path / "run"
    config = tiny(module, num_evals=4, num_seeds=2)  # calls of two updates

    def make_poisoned_env(config):
        env_reset, env_step, actions = make_env(config)

        def reset(key):
            obs, env_state = env_reset(key)
            return obs, (env_state, jnp.int32(0))

        def step(key, env_state, action):
            env_state, count = env_state
            obs, env_state, reward, *rest = env_step(key, env_state, action)
            is_nan = count == (poisoned - 1) * config.num_steps
            return obs, (env_state, count + 1), jnp.where(is_nan, jnp.nan, reward), *rest

        return reset, step, actions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_env", make_poisoned_env)
        code, _, _ = run(module, *flags(config), "--run-dir", path)
    assert code == f"error: NaN or inf at update {poisoned}: reduce lr"
    assert not (path / "summary.json").exists()
    rows = [int(row["update"]) for row in read_rows(path) if row["loss/total"]]
    assert max(rows, default=0) == poisoned - 1
    if kept is None:
        assert not (path / "checkpoint.msgpack").exists()
        return
    arrays = read_checkpoint(path)
    assert arrays["['update']"].max() == kept
    for name, x in arrays.items():
        if "params" in name or "opt_state" in name:
            assert np.isfinite(x).all(), name


def test_the_nan_test_can_fail():
    """Without poison the same run ends well."""
    module = load_script("ppo_ff")
    init, train, *_ = module.make_train(tiny(module, num_evals=4))
    _, metrics = train(init(jax.random.split(jax.random.key(0), 1)))
    assert np.isfinite(metrics["optim/grad_norm"]).all()
