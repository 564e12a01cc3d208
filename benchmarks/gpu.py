"""Speed and returns on a GPU, in less than ten minutes.

    python benchmarks/gpu.py > gpu.md                 # the tables of docs/results.md#on-a-gpu
    python benchmarks/gpu.py --shrink 256             # the same at small sizes, to try it on a CPU

Three tables: complete runs from the command line; steps/s of every script; what the choices made
for CPUs cost there (defined in ideas.py). A row of the last two tables is a process that compiles
its programs, the largest first, and waits. Five command lines or rows are at work at a time, which
lengthens their seconds. Then the rows are timed, one at a time. After 70 % of `--minutes` a row
compiles no further program, and after all of them everything is stopped: "no time left".
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CARTPOLE = {"num_steps": 32, "num_minibatches": 8}
BREAKOUT = {"env_id": "Breakout-MinAtar", "num_steps": 32, "num_minibatches": 8}
PENDULUM = {"num_steps": 32, "num_minibatches": 8}
GRU = {"hidden_size": 1024, "head_size": 256, "num_steps": 16}
FOUR_MINIBATCHES = {**GRU, "num_minibatches": 4}
SPEED = {  # name: script, configuration, numbers of environments, steps of a timed call
    # Those that compile longest come first.
    "Catch-5x5, meta-training": ("disco_meta", {}, (2**5, 2**7, 2**9), 2**16),
    "Empty-6x6, GRU 1024": ("ppo_rnn", GRU, (2**11, 2**12, 2**13), 2**21),
    "Empty-6x6, GRU 1024, bf16": ("ppo_rnn", {**GRU, "bf16": True}, (2**13,), 2**21),
    "Empty-6x6, GRU 1024, 4 minibatches": ("ppo_rnn", FOUR_MINIBATCHES, (2**13,), 2**21),
    "Empty-6x6, GRU 1024, 4 minibatches, bf16": (
        "ppo_rnn",
        {**FOUR_MINIBATCHES, "bf16": True},
        (2**13,),
        2**21,
    ),
    "MemoryS8, trials": ("ppo_meta", {}, (2**11, 2**12, 2**13), 2**21),
    "Catch-8x8, random rule": ("disco", {"weights": "random"}, (2**6, 2**8, 2**10), 2**19),
    "CartPole-v1": ("ppo_ff", CARTPOLE, (2**13, 2**15, 2**17), 2**25),
    "CartPole-v1, DPO": ("ppo_drift", {**CARTPOLE, "drift": "dpo"}, (2**13, 2**15, 2**17), 2**25),
    "Breakout-MinAtar": ("ppo_ff", BREAKOUT, (2**12, 2**14, 2**16), 2**23),
    "Breakout-MinAtar, 1 epoch": ("ppo_ff", {**BREAKOUT, "update_epochs": 1}, (2**16,), 2**23),
    "Pendulum-v1": ("ppo_continuous", PENDULUM, (2**11, 2**13, 2**15), 2**23),
    "Pendulum-v1, normalized": ("ppo_obs_norm", PENDULUM, (2**11, 2**13, 2**15), 2**23),
    "Pendulum-v1, V-trace": ("ppo_vtrace", {"num_steps": 32}, (2**11, 2**13, 2**15), 2**23),
    "rings": ("ippo", {"env_id": "rings", "num_steps": 32}, (2**11, 2**13, 2**15), 2**23),
}
CHOICES = {  # name: environments, steps of a timed call, alternatives in ideas.py to one program
    "Empty-6x6": (
        2**13,
        2**20,
        (
            "convolutions, not dense layers on patches (Empty)",
            "embedding as a lookup of 32 before the first convolution (Empty)",
        ),
    ),
    "Breakout-MinAtar": (
        2**14,
        2**22,
        (
            "convolution, not a dense layer on patches (Breakout)",
            "float32 observations, not bool (Breakout)",
        ),
    ),
    "CartPole-v1": (
        2**15,
        2**25,
        (
            "argsort, not shuffle (CartPole)",
            "jax.random.permutation, not shuffle (CartPole)",
        ),
    ),
}
RETURNS = [
    "ppo_ff.py --num-envs 1024 --num-steps 32 --total-timesteps 4e6",
    "ppo_ff.py --env-id Breakout-MinAtar --num-envs 1024 --num-steps 32 --total-timesteps 2e7",
    "ppo_continuous.py --num-envs 1024 --num-steps 32 --total-timesteps 1e7",
    "ppo_obs_norm.py --num-envs 1024 --num-steps 32 --total-timesteps 1e7",
    "ppo_rnn.py --num-envs 8192 --total-timesteps 1e7",
    "ippo.py --env-id rings --num-envs 256 --total-timesteps 2e6",
]


def sizes(name: str, shrink: int, num_sizes: int) -> list:
    """Number of environments and a function that compiles, per size of a row of SPEED."""
    import speed

    script, options, sizes, steps = SPEED[name]
    sizes = [max(size // shrink, 16) for size in sizes[: -num_sizes - 1 : -1]]  # largest first
    compile_size = lambda size: speed.compile_ours(
        script, {**options, "num_envs": size}, steps // shrink
    )
    return [(size, partial(compile_size, size)) for size in sizes]


def alternatives(name: str, shrink: int) -> list:
    """The same for a script and each of its alternatives in a row of CHOICES."""
    import ideas
    import speed

    size, steps, names = CHOICES[name]
    size = max(size // shrink, 16)
    script, options, _ = ideas.IDEAS[names[0]]
    options = {**options, "num_envs": size, "num_steps": 32}

    def compile_changed(changes):
        ideas.load(script, changes)
        return speed.compile_ours(script, options, steps // shrink)

    changes = [[], *(ideas.IDEAS[name][2] for name in names)]
    return [(size, partial(compile_changed, x)) for x in changes]


def measure(kind: str, name: str, shrink: int, num_sizes: int, until: float):
    """The process of a row. Prints JSON per program: environments, steps/s, compile seconds."""
    import speed

    programs = sizes(name, shrink, num_sizes) if kind == "speed" else alternatives(name, shrink)
    compiled = []
    for num_envs, compile_program in programs:
        if time.time() < until:
            compiled.append((num_envs, *compile_program()))
    print("compiled", flush=True)
    sys.stdin.readline()
    for num_envs, compile_seconds, steps, call in compiled:
        seconds = sorted(speed.timed_calls(call, 3))[1]
        print(json.dumps([num_envs, steps / seconds, compile_seconds]), flush=True)
    if len(compiled) < len(programs):
        sys.exit("no time left")


class Row:
    """The process of a row: compiles when made, and is timed by `rates`."""

    def __init__(self, kind: str, name: str, args: argparse.Namespace, deadline: float):
        until = deadline - 0.3 * 60 * args.minutes
        command = [sys.executable, "-W", "ignore", __file__, "--measure", kind, name]
        command += ["--shrink", str(args.shrink), "--sizes", str(args.sizes), "--until", str(until)]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        pipe = subprocess.PIPE
        self.process = None
        if time.time() > until:
            return
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )
        stop = threading.Timer(deadline - time.time(), self.process.kill)
        stop.daemon = True
        stop.start()
        self.process.stdout.readline()  # "compiled", or nothing if it failed

    def rates(self) -> tuple[list, str]:
        """A list per program, [environments, steps/s, compile seconds], and what went wrong."""
        if self.process is None:
            return [], "no time left"
        output, _ = self.process.communicate("time\n")
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        self.errors.seek(0)
        errors = self.errors.read().strip().splitlines() or ["no time left"]
        return lines, errors[-1] if self.process.returncode else ""


def train(words: str, shrink: int, deadline: float) -> str:
    """A row of the table of returns."""
    left = deadline - time.time()
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
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(*args.measure, args.shrink, args.sizes, args.until)
    deadline = time.time() + 60 * args.minutes
    print(describe_machine(), flush=True)
    wanted = lambda text: re.search(args.only, text)
    with ThreadPoolExecutor(5) as pool:
        rows = {("speed", name): None for name in SPEED if wanted(name)}
        rows |= {("choices", name): None for name in CHOICES if wanted(name)}
        rows = {row: pool.submit(Row, *row, args, deadline) for row in rows}
        runs = [
            pool.submit(train, words, args.shrink, deadline) for words in RETURNS if wanted(words)
        ]
        print("\n| command | return | steps/s | compile s | training s | seconds in all |")
        print("|---|---|---|---|---|---|", flush=True)
        for run in runs:
            print(run.result(), flush=True)
    print("\n| work | environments | steps/s | compile s |\n|---|---|---|---|", flush=True)
    for kind, name in rows:
        if kind == "speed":
            lines, problem = rows[kind, name].result().rates()
            work = f"`{SPEED[name][0]}.py`, {name}"
            for num_envs, steps_per_second, seconds in reversed(lines):
                cells = f"{num_envs} | {steps_per_second:,.0f} | {seconds:.1f}"
                print(f"| {work} | {cells} |", flush=True)
            if problem:
                print(f"| {work} | | {problem} | |", flush=True)
    print("\n| choice | environments | script | with the alternative | |")
    print("|---|---|---|---|---|", flush=True)
    for kind, name in rows:
        if kind == "choices":
            lines, problem = rows[kind, name].result().rates()
            for choice, (num_envs, rate, _) in zip(CHOICES[name][2], lines[1:], strict=False):
                cells = f"{num_envs} | {lines[0][1]:,.0f} | {rate:,.0f}"
                print(f"| {choice} | {cells} | {rate / lines[0][1]:.2f} × |", flush=True)
            if problem:
                print(f"| {name} | | {problem} | | |", flush=True)


if __name__ == "__main__":
    main()
