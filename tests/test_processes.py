"""Runs that are spread over several processes."""

import json
import socket
import subprocess
import sys

import numpy as np
from conftest import ROOT, for_a_process, load_script, tiny, with_devices
from test_cli import flags, learned, read_checkpoint
from test_resume import finish, start_process

IMPATIENT = """
import functools, jax, runpy, sys
initialize = jax.distributed.initialize
jax.distributed.initialize = functools.partial(initialize, heartbeat_timeout_seconds=20)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # two processes give up on each other after 20 seconds, not after the usual 100


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start_two(script, words, run_dirs):
    """Two processes as SLURM would start them, each with a folder of its own: nothing is shared."""
    processes = []
    port = free_port()
    for index, run_dir in enumerate(run_dirs):
        slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
        slurm |= {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        env = for_a_process(**slurm, JAX_COORDINATOR_ADDRESS=f"localhost:{port}")
        command = [sys.executable, "-W", "ignore", "-c", IMPATIENT, str(ROOT / f"{script}.py")]
        command += [*map(str, words), "--distributed", "--run-dir", str(run_dir)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env}
        processes.append(subprocess.Popen(command, **pipes))
    return processes


def test_two_processes_learn_what_two_devices_learn_and_continue(tmp_path):
    """And continue, although only the first has the checkpoint."""
    module = load_script("ppo_ff")
    words = flags(tiny(module, num_seeds=2, num_evals=4))
    folders = [tmp_path / "first", tmp_path / "second"]
    results = [finish(process) for process in start_two("ppo_ff", words, folders)]
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    one = [*words, "--run-dir", tmp_path / "one"]
    code, _, err = finish(start_process("ppo_ff", one, with_devices(2)))
    assert code == 0, err
    assert learned(folders[0]) == learned(tmp_path / "one")
    # Only the first process reports and writes.
    said = [[line for line in out.splitlines() if "Gloo" not in line] for _, out, _ in results]
    assert len(said[0]) == 3 and said[0][0].startswith("return") and said[1] == []
    assert folders[0].exists() and not folders[1].exists()

    # Extended, the second process receives the checkpoint from the first.
    more = ["--total-timesteps", 256, "--num-evals", 8]
    results = [finish(p) for p in start_two("ppo_ff", [*words, *more], folders)]
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    arrays = read_checkpoint(folders[0])
    assert arrays["['updates_done']"].max() == 16
    for name, x in arrays.items():
        if "params" in name:
            np.testing.assert_array_equal(x[0], x[1], err_msg=name)
    assert json.loads((folders[0] / "summary.json").read_text())["env_steps"] == 256
