"""Kill runs at random moments, continue them, and compare with undisturbed runs.

    python benchmarks/storm.py ppo_ff.py ppo_rnn.py --kills 20
    python benchmarks/storm.py ppo_ff.py --kills 5 -- --num-seeds 3 --num-envs 32

A killed run (SIGKILL) is started again by the same command. The last checkpoint must have the same
bytes as that of the undisturbed run, and metrics.csv the same rows but for its last column,
time/sps. Then the run is continued once more, longer and with another learning rate: it must add
rows and keep those before. Arguments after -- are options of the scripts.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot

SMALL = "--num-envs 4 --num-steps 8 --num-evals {calls} --eval-episodes 2"
TRAIN = SMALL + " --num-seeds 2 --total-timesteps {steps}"  # two updates of 32 steps per call
PPO = TRAIN + " --hidden-size 8 --num-minibatches 2"
AGENT = " --hidden-sizes 8 8 --model-size 8 --branch-size 8 --weights random"
OPTIONS = {
    "ppo_ff": PPO,
    "ppo_drift": PPO + " --drift adaptive_kl",
    "ppo_continuous": PPO,
    "ppo_obs_norm": PPO,
    "ppo_rnn": PPO + " --env-id MiniGrid-Empty-5x5",
    "ppo_meta": PPO + " --env-id MiniGrid-Empty-5x5",
    "ppo_vtrace": PPO + " --draw-fraction 1",
    "ippo": PPO + " --env-id rings",
    "ippo_rnn": PPO + " --env-id rings",
    "mappo": PPO + " --env-id rings",
    "disco": TRAIN + AGENT + " --env-id Catch-5x5 --replay-size 8 --replay-batch 8",
    "disco_meta": SMALL + AGENT + " --num-meta-steps {calls} --valid-steps 4 --num-agents 2",
}
LONGER = "--lr 1e-4 --num-evals {calls} --total-timesteps {steps}"
OF_AGENTS = LONGER.replace("--lr", "--actor-lr")
CHANGED = dict.fromkeys(OPTIONS, LONGER) | dict.fromkeys(("ippo", "ippo_rnn", "mappo"), OF_AGENTS)
CHANGED["disco_meta"] = "--meta-lr 3e-4 --num-evals {calls} --num-meta-steps {calls}"


def start(script: Path, run_dir: Path, options: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-W", "ignore", str(script), "--run-dir", str(run_dir), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(output)


def inode(path: Path) -> int:
    """Another one after each checkpoint, 0 before the first."""
    return path.stat().st_ino if path.exists() else 0


def kill_at_random(process: subprocess.Popen, run_dir: Path, startup: float, call: float) -> bool:
    """Kill within the seconds of a startup, or some calls later. Returns whether it still ran."""
    checkpoint = run_dir / "checkpoint.msgpack"
    checkpoints = random.choice([0, 1, 2])
    delay = random.uniform(0, 3 * call if checkpoints else 1.2 * startup)
    for _ in range(checkpoints):
        before = inode(checkpoint)
        while process.poll() is None and inode(checkpoint) == before:
            time.sleep(0.0005)
    time.sleep(delay)
    was_running = process.poll() is None
    process.kill()
    process.communicate()
    return was_running


def read(run_dir: Path) -> tuple[bytes, list[str]]:
    """The checkpoint and the rows without time/sps."""
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    return (run_dir / "checkpoint.msgpack").read_bytes(), [row.rpartition(",")[0] for row in rows]


def storm(script: Path, folder: Path, kills: int, options: list[str]) -> dict:
    """Returns the number of kills and whether the files are the same. Exits if a run fails."""
    calls = 25 * (kills + 1)  # more than fit between the kills
    defaults = OPTIONS.get(script.stem, PPO).format(calls=calls, steps=64 * calls)
    options = [*defaults.split(), *options]
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    finish(start(script, undisturbed, options))  # fills the cache of compiled programs
    begin = time.perf_counter()
    (undisturbed / "summary.json").unlink()  # a run without it is compiled
    finish(start(script, undisturbed, options))  # trains no further
    startup = time.perf_counter() - begin
    seconds = plot.read_run(undisturbed, "eval/return").curve.seconds[-1]
    call = seconds / calls + 0.003  # for the files
    killed = 0
    for _ in range(kills):
        killed += kill_at_random(start(script, disturbed, options), disturbed, startup, call)
    finish(start(script, disturbed, options))
    checkpoint, rows = read(undisturbed)
    other_checkpoint, other_rows = read(disturbed)
    changed = CHANGED.get(script.stem, LONGER).format(calls=calls + 5, steps=64 * (calls + 5))
    finish(start(script, disturbed, [*options, *changed.split()]))
    _, more_rows = read(disturbed)
    return {
        "continued": len(more_rows) > len(rows) and more_rows[: len(rows)] == rows,
        "kills": killed,
        "checkpoint": checkpoint == other_checkpoint,
        "metrics": rows == other_rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="+", help="ppo_ff.py, for example")
    parser.add_argument("--kills", type=int, default=20, help="kills per script")
    parser.add_argument("--seed", type=int, help="random seed of the moments")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    random.seed(args.seed)
    failed = 0
    for name in args.scripts:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/cache")
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
            result = storm(ROOT / name, Path(folder), args.kills, words[end + 1 :])
        word = {True: "identical", False: "DIFFERS"}
        print(
            f"{name}: killed {result['kills']} times,"
            f" checkpoint {word[result['checkpoint']]}, metrics.csv {word[result['metrics']]},"
            f" {'continued' if result['continued'] else 'NOT CONTINUED'} with changed options,"
            f" {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        failed += not (result["checkpoint"] and result["metrics"] and result["continued"])
    return failed


if __name__ == "__main__":
    sys.exit(main())
