"""Speed and returns on a GPU, in less than ten minutes.

    python benchmarks/gpu.py > gpu.md                 # the tables of docs/results.md#on-a-gpu
    python benchmarks/gpu.py --shrink 256             # the same at small sizes, to try it on a CPU

Three tables: complete runs from the command line, three at a time; steps/s of the scripts, most at
three sizes; what the choices made for CPUs cost there, and ideas for a large GRU (both defined in
ideas.py). Every program has its own process. Those of the last two tables compile five at a time,
which lengthens their compile seconds, but are timed one at a time. Whatever is not finished after
`--minutes` is stopped or skipped, and marked "no time left".
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CARTPOLE = {"num_steps": 32, "num_minibatches": 8}
BREAKOUT = {"env_id": "Breakout-MinAtar", "num_steps": 32, "num_minibatches": 8}
PENDULUM = {"num_steps": 32, "num_minibatches": 8}
GRU = {"hidden_size": 1024, "head_size": 256, "num_steps": 16}
FOUR_MINIBATCHES = {**GRU, "num_minibatches": 4}
SPEED = {  # name: script, configuration, numbers of environments, steps of a timed call
    "Empty-6x6, GRU 1024": ("ppo_rnn", GRU, (2**11, 2**12, 2**13), 2**20),
    "Empty-6x6, GRU 1024, bf16": ("ppo_rnn", {**GRU, "bf16": True}, (2**13,), 2**21),
    "Empty-6x6, GRU 1024, 4 minibatches": ("ppo_rnn", FOUR_MINIBATCHES, (2**13,), 2**21),
    "Empty-6x6, GRU 1024, 4 minibatches, bf16": (
        "ppo_rnn",
        {**FOUR_MINIBATCHES, "bf16": True},
        (2**13,),
        2**21,
    ),
    "MemoryS8, trials": ("ppo_meta", {}, (2**11, 2**12, 2**13), 2**22),
    "Catch-8x8, random rule": ("disco", {"weights": "random"}, (2**6, 2**8, 2**10), 2**20),
    "Catch-5x5, meta-training": ("disco_meta", {}, (2**5, 2**7, 2**9), 2**18),
    "CartPole-v1": ("ppo_ff", CARTPOLE, (2**13, 2**15, 2**17), 2**26),
    "CartPole-v1, DPO": ("ppo_drift", {**CARTPOLE, "drift": "dpo"}, (2**13, 2**15, 2**17), 2**26),
    "Breakout-MinAtar": ("ppo_ff", BREAKOUT, (2**12, 2**14, 2**16), 2**23),
    "Breakout-MinAtar, 1 epoch": ("ppo_ff", {**BREAKOUT, "update_epochs": 1}, (2**16,), 2**24),
    "Pendulum-v1": ("ppo_continuous", PENDULUM, (2**11, 2**13, 2**15), 2**24),
    "Pendulum-v1, normalized": ("ppo_obs_norm", PENDULUM, (2**11, 2**13, 2**15), 2**24),
    "Pendulum-v1, V-trace": ("ppo_vtrace", {"num_steps": 32}, (2**11, 2**13, 2**15), 2**24),
    "rings": ("ippo", {"env_id": "rings", "num_steps": 32}, (2**11, 2**13, 2**15), 2**24),
}
CHOICES = [  # environments, steps of a timed call, alternatives in ideas.py to the same program
    (
        2**13,
        2**21,
        "inputs of the embedding and the GRU padded to multiples of 8 (GRU 1024)",
        "gates recomputed in the backward pass (GRU 1024)",
    ),
    (
        2**13,
        2**21,
        "convolutions, not dense layers on patches (Empty)",
        "embedding as a lookup of 32 before the first convolution (Empty)",
    ),
    (
        2**14,
        2**23,
        "convolution, not a dense layer on patches (Breakout)",
        "float32 observations, not bool (Breakout)",
    ),
    (
        2**15,
        2**25,
        "argsort, not shuffle (CartPole)",
        "jax.random.permutation, not shuffle (CartPole)",
    ),
]
PROCESSES = 5  # that compile at a time
SLOW_TO_COMPILE = (
    "Empty|GRU|MemoryS8|Catch"  # started first, since the others in turn wait for them
)
RETURNS = [
    "ppo_ff.py --num-envs 1024 --num-steps 32 --total-timesteps 4e6",
    "ppo_ff.py --env-id Breakout-MinAtar --num-envs 1024 --num-steps 32 --total-timesteps 2e7",
    "ppo_continuous.py --num-envs 1024 --num-steps 32 --total-timesteps 1e7",
    "ppo_obs_norm.py --num-envs 1024 --num-steps 32 --total-timesteps 1e7",
    "ppo_rnn.py --num-envs 8192 --total-timesteps 1e7",
    "ippo.py --env-id rings --num-envs 256 --total-timesteps 2e6",
]


def measure_speed(name: str, shrink: int, lock: str, num_sizes: int):
    """Prints a line of JSON per size: environments, steps/s, compile seconds."""
    import speed

    script, options, sizes, call_steps = SPEED[name]
    for size in sizes[-num_sizes:]:
        sized = {**options, "num_envs": max(size // shrink, 16)}
        with turn(lock, fcntl.LOCK_SH):
            compile_seconds, steps, call = speed.compile_ours(script, sized, call_steps // shrink)
        with turn(lock, fcntl.LOCK_EX):
            result = [sized["num_envs"], rate(speed, steps, call), compile_seconds]
        print(json.dumps(result), flush=True)
        call = None  # frees the device's memory


def measure_choices(index: str, shrink: int, lock: str):
    """Prints a line of JSON per alternative: name, environments, steps/s without and with it."""
    import ideas
    import speed

    size, call_steps, *names = CHOICES[int(index)]
    script, options, _ = ideas.IDEAS[names[0]]
    num_steps = min(options.get("num_steps", 32), 32)
    sized = {**options, "num_envs": max(size // shrink, 16), "num_steps": num_steps}
    programs = []
    for changes in ([], *(ideas.IDEAS[name][2] for name in names)):
        ideas.load(script, changes)
        with turn(lock, fcntl.LOCK_SH):
            programs.append(speed.compile_ours(script, sized, call_steps // shrink))
    with turn(lock, fcntl.LOCK_EX):
        plain, *rates = [rate(speed, steps, call) for _, steps, call in programs]
    for name, changed in zip(names, rates, strict=True):
        print(json.dumps([name, sized["num_envs"], plain, changed]), flush=True)


@contextlib.contextmanager
def turn(lock: str, kind: int):
    """Several processes compile at a time (LOCK_SH); one is timed while none compiles (LOCK_EX)."""
    with open(lock) as file:
        fcntl.flock(file, kind)
        yield


def rate(speed, steps: int, call) -> float:
    """Steps/s: the median of three calls after a warm-up."""
    return steps / sorted(speed.timed_calls(call, 3))[1]


def in_a_process(
    kind: str, name: str, shrink: int, lock: str, num_sizes: int, deadline: float
) -> tuple:
    """The lines that the process printed, and why it ended early."""
    left = deadline - time.monotonic()
    if left < 10:
        return [], "no time left"
    command = [sys.executable, "-W", "ignore", __file__, "--measure", kind, name]
    command += ["--lock", lock, "--shrink", str(shrink), "--sizes", str(num_sizes)]
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.run(command, env=env, stdout=out, stderr=errors, timeout=left)
            failed = process.returncode
        except subprocess.TimeoutExpired:
            return read_lines(out), "no time left"
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["killed"])[-1]
        return read_lines(out), last if failed else ""


def read_lines(file) -> list:
    file.seek(0)
    return [json.loads(line) for line in file if line.startswith("[")]


def train(words: str, shrink: int, deadline: float) -> str:
    """A row of the table of returns."""
    left = deadline - time.monotonic()
    if left < 10:
        return f"| `{words}` | no time left | | | | |"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", *words.split(), "--run-dir", folder]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if shrink > 1:
            command += ["--num-envs", "16", "--total-timesteps", "1e5"]
        start = time.monotonic()
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                check=True,
                capture_output=True,
                timeout=min(left, 120),
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            last = (error.stderr or b"").decode().strip().splitlines()[-1:]
            return f"| `{words}` | {type(error).__name__} {last} | | | | |"
        total = time.monotonic() - start
        summary = json.loads(Path(folder, "summary.json").read_text())
    cells = f"{summary['eval_return_mean']:.4g} | {summary['steps_per_second']:,.0f} | "
    cells += f"{summary['compile_seconds']:.1f} | {summary['train_seconds']:.1f} | {total:.1f}"
    return f"| `{words}` | {cells} |"


def describe(kind: str, name: str) -> str:
    return name if kind == "speed" else " and ".join(CHOICES[int(name)][2:])


def describe_machine() -> str:
    code = "import jax, flax, optax, platform as p; print(jax.devices()[0].device_kind, end=', ')"
    code += "; print('Python', p.python_version(), end=', ')"
    code += "; print(*(f'{x.__name__} {x.__version__}' for x in (jax, flax, optax)), sep=', ')"
    machine = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout
    return f"{machine.strip()}. Commit {commit.strip()}."


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shrink", type=int, default=1, help="divide the environments by this")
    parser.add_argument("--sizes", type=int, default=3, help="the largest sizes of each script")
    parser.add_argument("--minutes", type=float, default=9.5, help="stop after these")
    parser.add_argument("--only", default="", help="rows that match this regular expression")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        kind, name = args.measure
        if kind == "speed":
            return measure_speed(name, args.shrink, args.lock, args.sizes)
        return measure_choices(name, args.shrink, args.lock)
    deadline = time.monotonic() + 60 * args.minutes
    print(describe_machine(), flush=True)
    print("\n| command | return | steps/s | compile s | training s | seconds in all |")
    print("|---|---|---|---|---|---|", flush=True)
    runs = [words for words in RETURNS if re.search(args.only, words)]
    with ThreadPoolExecutor(3) as pool:
        for row in pool.map(lambda words: train(words, args.shrink, deadline), runs):
            print(row, flush=True)
    jobs = [("speed", name) for name in SPEED]
    jobs += [("choices", str(index)) for index in range(len(CHOICES))]
    jobs = [job for job in jobs if re.search(args.only, describe(*job))]
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(PROCESSES) as pool:
        arguments = args.shrink, lock.name, args.sizes, deadline
        slowest_first = sorted(jobs, key=lambda job: not re.search(SLOW_TO_COMPILE, describe(*job)))
        futures = {job: pool.submit(in_a_process, *job, *arguments) for job in slowest_first}
        print("\n| work | environments | steps/s | compile s |\n|---|---|---|---|", flush=True)
        for kind, name in jobs:
            if kind == "speed":
                lines, problem = futures[kind, name].result()
                work = f"`{SPEED[name][0]}.py`, {name}"
                for num_envs, steps_per_second, seconds in lines:
                    cells = f"{num_envs} | {steps_per_second:,.0f} | {seconds:.1f}"
                    print(f"| {work} | {cells} |", flush=True)
                if problem:
                    print(f"| {work} | | {problem} | |", flush=True)
        print("\n| choice | environments | script | with the alternative | |")
        print("|---|---|---|---|---|", flush=True)
        for kind, name in jobs:
            if kind == "choices":
                lines, problem = futures[kind, name].result()
                for choice, num_envs, plain, changed in lines:
                    cells = f"{num_envs} | {plain:,.0f} | {changed:,.0f} | {changed / plain:.2f} ×"
                    print(f"| {choice} | {cells} |", flush=True)
                if problem:
                    print(f"| {describe(kind, name)} | | {problem} | | |", flush=True)


if __name__ == "__main__":
    main()
