"""Runs that are killed, diverge, or find the disk full."""

import json
import os
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
from conftest import ROOT, load_script, tiny
from test_cli import checkpoint, compile_once, flags, learned, read_rows, run  # noqa: F401

ON_CPU = {**os.environ, "JAX_PLATFORMS": "cpu"}


def start_process(script, words, env=ON_CPU):
    command = [sys.executable, "-W", "ignore", str(ROOT / f"{script}.py"), *map(str, words)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out.decode(), err.decode()


def rows_written(run_dir):
    path = run_dir / "metrics.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


# ------------------------------------------------------------------------------------------ killed
def kill_and_resume(module, config, folder):
    """SIGKILL at a random moment, then SIGINT at a random moment, against a run left in peace."""
    chance = random.Random(module.SCRIPT)
    twin, killed = folder / "twin", folder / "killed"
    code, _, err = run(module, *flags(config), "--run-dir", twin)
    assert code == 0, err

    words, stopped_at = [*flags(config), "--run-dir", killed], []
    for number in (signal.SIGKILL, signal.SIGINT):
        process = start_process(module.SCRIPT, words)
        goal = rows_written(killed) + chance.randrange(10, 60)
        while rows_written(killed) < goal and process.poll() is None:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.02)
        process.send_signal(number)
        code, out, err = finish(process)
        assert code == {signal.SIGKILL: -9, signal.SIGINT: 130}[number], err
        stopped_at.append(rows_written(killed))
        assert checkpoint(killed / "last.msgpack")  # whole
        words = ["--resume", killed]
    assert f"--resume {killed}" in out and 0 < stopped_at[0] < stopped_at[1] < config.num_updates

    code, _, err = run(module, *words)
    assert code == 0, err
    assert learned(killed) == learned(twin)


LONG = {"total_timesteps": 6400, "num_calls": 400, "num_evals": 2}  # 400 updates, one a call


def test_a_killed_run_resumes_to_the_same_bits(module, compile_once, tmp_path):  # noqa: F811
    kill_and_resume(module, tiny(module, **LONG), tmp_path)


def test_a_run_killed_behind_its_last_checkpoint_still_gets_its_summary(tmp_path):
    """During the ten-fold evaluation, or while the summary is written."""
    module = load_script("ppo_ff")  # `main` is the same in every script
    config, path = tiny(module, num_seeds=2, num_evals=4, lr=1e-2), tmp_path / "run"
    code, _, err = run(module, *flags(config), "--run-dir", path)
    assert code == 0, err
    before, summary = learned(path), json.loads((path / "summary.json").read_text())
    (path / "summary.json").unlink()
    (path / "learning_curve.png").unlink()
    code, _, err = run(module, "--resume", path, "--checkpoint-every", 2)
    assert code == 0, err
    assert learned(path) == before and (path / "learning_curve.png").exists()
    again = json.loads((path / "summary.json").read_text())
    clock = {"compile_seconds", "train_seconds", "steps_per_second"}
    assert {k: v for k, v in again.items() if k not in clock} == {
        k: v for k, v in summary.items() if k not in clock
    }


# ------------------------------------------------------------------------------------------- space
def test_a_full_disk_is_an_error_and_spares_the_checkpoint(tmp_path):
    module = load_script("ppo_ff")  # `save` and `main` are the same in every script
    path = tmp_path / "run"
    config = tiny(module, total_timesteps=1600, num_calls=100)
    words = [*flags(config), "--run-dir", path]
    limit, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_rows, calls = module.write_rows, []

    def fill(*args):
        calls.append(args)
        write_rows(*args)
        if len(calls) == 3:
            size = (path / "last.msgpack").stat().st_size // 2
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited))
            calls.append((path / "last.msgpack").read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_rows", fill)
        try:
            code, _, _ = run(module, *words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    assert isinstance(code, str) and code.startswith("error: ")  # which Python prints, with code 1
    assert (path / "last.msgpack").read_bytes() == calls[3]
    assert not list(path.glob("*.tmp"))
    code, _, err = run(module, "--resume", path)
    assert code == 0, err


# --------------------------------------------------------------------------------------------- NaN
def test_a_run_that_diverges_stops_and_keeps_the_last_finite_state(module, tmp_path):
    """The reward is NaN in the sixth update."""
    make_env, path = module.make_env, tmp_path / "run"
    config = tiny(module, total_timesteps=256, num_calls=8, num_seeds=2)
    poisoned, steps = 6, []

    def make_poisoned_env(config):
        env_reset, env_step, actions = make_env(config)

        def reset(keys):
            obs, env_state = env_reset(keys)
            return obs, (env_state, jnp.zeros(len(keys), jnp.int32))

        def step(keys, env_state, action):
            env_state, count = env_state
            obs, env_state, reward, *rest = env_step(keys, env_state, action)
            is_nan = count == (poisoned - 1) * config.num_steps
            reward = jnp.where(is_nan, jnp.nan, reward)
            return obs, (env_state, count + 1), reward, *rest

        return reset, step, actions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_env", make_poisoned_env)
        code, _, _ = run(module, *flags(config), "--run-dir", path)
    assert isinstance(code, str) and f"update {poisoned} " in code and "last.msgpack" in code
    last = checkpoint(path / "last.msgpack")
    values = [np.frombuffer(data, dtype) for dtype, _, data in last.values()]
    assert all(np.isfinite(x).all() for x in values if x.dtype == np.float32)
    (update,) = {int(np.frombuffer(last["['update']"][2], np.int32)[0])}
    steps = [int(row["update"]) for row in read_rows(path) if row["loss/total"]]
    assert update == 4 and max(steps) == poisoned - 1  # calls are of two updates
    assert not (path / "summary.json").exists()


def test_parameters_that_overflow_are_never_saved(tmp_path):
    """The one step of the first update makes them infinite: its own gradient is still finite."""
    module = load_script("ppo_ff")  # `main` is the same in every script
    sizes = {"num_minibatches": 1, "update_epochs": 1, "num_calls": 10**6}
    config, path = tiny(module, **sizes, lr=1e39), tmp_path / "run"
    code, _, _ = run(module, *flags(config), "--run-dir", path)
    assert isinstance(code, str) and "update 1 " in code
    assert checkpoint(path / "last.msgpack")["['update']"][2] == bytes(4)  # none is done
    assert read_rows(path)[0]["optim/grad_norm"]


# ---------------------------------------------------------------------------------- best of all
def test_best_is_what_was_evaluated_and_is_evaluated_again(module, compile_once, tmp_path):  # noqa: F811
    """best.msgpack holds the state at the evaluation with the highest return of each seed."""
    config = tiny(module, num_seeds=2, num_evals=4, lr=1e-2)
    states, save = {}, module.save

    def record(path, config, state):
        if path.name == "last.msgpack":
            states[int(state["update"].max())] = state
        save(path, config, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save", record)
        code, _, err = run(module, *flags(config), "--run-dir", tmp_path / "run")
    assert code == 0, err
    rows = [row for row in read_rows(tmp_path / "run") if row["eval/return"]]
    _, best = module.load(tmp_path / "run" / "best.msgpack", module.resolve(config))
    for seed in (0, 1):
        returns = {int(r["update"]): float(r["eval/return"]) for r in rows[seed::2]}
        update = max(returns, key=lambda update: returns[update])  # the first of equals
        assert best["update"][0, seed] == update
        np.testing.assert_allclose(best["eval_return"][:, seed], returns[update], rtol=1e-6)
        same = lambda x, y, seed=seed: np.testing.assert_array_equal(x[:, seed], y[:, seed])
        jax.tree.map(same, best["params"], states[update]["params"])

    # The absolute metric, computed anew.
    init, _ = module.make_train(config, 1)
    state = init(jax.random.split(jax.random.key(0), jax.local_device_count()))
    params = module.flax.serialization.from_state_dict(state.params, best["params"])
    evaluate = jax.jit(jax.vmap(module.make_evaluate(config)))
    returns = []
    for n in range(config.num_updates + 1, config.num_updates + 11):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), n), 2)
        returns.append(evaluate(jax.tree.map(lambda x: x[0], params), keys))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert np.shape(returns) == (10, 2, config.eval_episodes)
    assert summary["absolute_return_mean"] == pytest.approx(float(np.mean(returns)), rel=1e-5)


def test_checkpoint_every_is_the_calls_between_checkpoints(tmp_path):
    module = load_script("ppo_ff")
    config = tiny(module, num_calls=8, num_evals=1, checkpoint_every=3)
    saved, save = [], module.save

    def record(path, config, state):
        saved.append((path.stem, int(state["update"].max())))
        save(path, config, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save", record)
        code, _, err = run(module, *flags(config), "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert saved == [("last", 0), ("last", 3), ("last", 6), ("best", 8), ("last", 8)]
