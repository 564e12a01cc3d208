"""Runs that are spread over processes; killed runs of the scripts that share the run part."""

import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, load_script, tiny, with_devices
from test_cli import checkpoint, flags, learned
from test_resume import (  # noqa: F401
    LONG,
    ON_CPU,
    finish,
    kill_and_resume,
    rows_written,
    start_process,
)


# ---------------------------------------------------------------------------------------- siblings
@pytest.mark.parametrize("script", ["ippo", "disco"])
def test_killed_siblings_resume_to_the_same_bits(script, tmp_path):
    module = load_script(script)
    sizes = {"ippo": {"env_id": "rings", "num_envs": 2, "num_steps": 8, "num_minibatches": 2}}
    sizes["disco"] = {"weights": "random", "num_steps": 8, "replay_batch": 4, "replay_size": 6}
    sizes["disco"] |= {"feature_size": 8, "model_size": 4, "branch_size": 4}
    common = {"hidden_size": 8, "eval_episodes": 3, "checkpoint_every": 1}
    kill_and_resume(module, module.Config(**LONG, **common, **sizes[script]), tmp_path)
    names = {"config.json", "metrics.csv", "summary.json", "last.msgpack", "best.msgpack"}
    names |= {"learning_curve.png"} | ({"evaluations.csv"} if script == "ippo" else set())
    assert {path.name for path in (tmp_path / "killed").iterdir()} == names
    if script == "ippo":
        evaluations = [tmp_path / name / "evaluations.csv" for name in ("twin", "killed")]
        assert evaluations[0].read_bytes() == evaluations[1].read_bytes()


# ------------------------------------------------------------------------------ several processes
def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


IMPATIENT = """
import functools, jax, runpy, sys
initialize = jax.distributed.initialize
jax.distributed.initialize = functools.partial(initialize, heartbeat_timeout_seconds=20)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # two processes give up on each other after 20 seconds, not after the usual 100


def start_two(script, words):
    place = ["--distributed", "--coordinator", f"localhost:{free_port()}", "--num-processes", 2]
    file = str(ROOT / f"{script}.py")
    command = [sys.executable, "-W", "ignore", "-c", IMPATIENT, file, *map(str, [*words, *place])]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ON_CPU}
    return [subprocess.Popen([*command, "--process-id", str(i)], **pipes) for i in (0, 1)]


def test_two_processes_learn_what_two_devices_learn(tmp_path):
    module = load_script("ppo_ff")
    words = flags(tiny(module, num_seeds=2))
    processes = start_two("ppo_ff", [*words, "--run-dir", tmp_path / "two"])
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    words += ["--run-dir", tmp_path / "one"]
    code, _, err = finish(start_process("ppo_ff", words, with_devices(2)))
    assert code == 0, err
    assert learned(tmp_path / "two") == learned(tmp_path / "one")
    # Only process 0 reports.
    said = [[line for line in out.splitlines() if "Gloo" not in line] for _, out, _ in results]
    assert len(said[0]) == 1 and said[0][0].startswith("evaluation return") and said[1] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_process_that_dies_ends_the_others(tmp_path):
    module = load_script("ppo_ff")
    words = flags(tiny(module, total_timesteps=10**7, num_calls=10**5))
    processes = start_two("ppo_ff", [*words, "--run-dir", tmp_path / "two"])
    deadline = time.time() + 120
    while rows_written(tmp_path / "two") < 3 and time.time() < deadline:
        time.sleep(0.1)
    processes[1].kill()
    code, _, err = finish(processes[0])
    assert code != 0 and err.strip()
    assert checkpoint(tmp_path / "two" / "last.msgpack")
