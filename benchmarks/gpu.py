"""Speed and returns on a GPU, in less than ten minutes.

    python benchmarks/gpu.py > gpu.md                 # the tables of docs/results.md#on-a-gpu
    python benchmarks/gpu.py --shrink 256             # the same at small sizes, to try it on a CPU
    python benchmarks/gpu.py --tables peers --minutes 5 \
        --peers purejaxrl=DIR rejax=DIR xland=DIR     # beside others: see peers.md
    python benchmarks/gpu.py --tables brax            # trainings on Brax at its usual sizes

Four tables, or some with `--tables`: `runs`, complete trainings (`other s`: compilation and files;
`again`: the same command with the cache of compiled programs that the first one has filled);
`speed`, steps/s of every script; `choices`, what those made for CPUs cost on a GPU (the
alternatives are defined in ideas.py); `peers`, steps/s beside other projects, of the same work as
far as they offer it. Each entry of SPEED, CHOICES and PEERS is a process that compiles all its
programs and waits. Up to five of them, or training runs, work at a time, so compilation takes
longer than alone, and XLA chooses its kernels on a busy GPU. When all have compiled, they are timed
one by one. After 70 % of `--minutes` no compilation starts, after 85 % the remaining ones are
stopped, and at the end everything is: "no time left".
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
import plot

ENV = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

CARTPOLE = {"num_steps": 32, "num_minibatches": 8}
BREAKOUT = {"env_id": "Breakout-MinAtar", "hidden_size": 128, "lr": 7e-3}
BREAKOUT |= {"num_steps": 32, "num_minibatches": 8}
PENDULUM = {"num_steps": 32, "num_minibatches": 8}
GRU = {"hidden_size": 1024, "head_size": 256, "num_steps": 16}
FOUR_MINIBATCHES = {**GRU, "num_minibatches": 4}
FOUR_ENVS = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
# One-hot tiles and colors in place of its embeddings: see peers.md.
XLANDS_NETWORK = {"conv_size": 16, "embedding_size": 0, "num_steps": 16, "num_minibatches": 16}


def pure(envs: int, steps: int, minibatches: int) -> dict:
    """Options of PureJaxRL."""
    return {"NUM_ENVS": envs, "NUM_STEPS": steps, "NUM_MINIBATCHES": minibatches}


def rejax(envs: int, steps: int, minibatches: int) -> dict:
    """Options of rejax: CartPole-v1, and the network and epochs of PureJaxRL."""
    return {
        "env_id": "CartPole-v1",
        "agent_kwargs": {"activation": "tanh"},
        "num_envs": envs,
        "num_steps": steps,
        "num_minibatches": minibatches,
        "num_epochs": 4,
    }


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
    "rings, memory": ("ippo_rnn", {"num_steps": 32}, (2**11, 2**13, 2**15), 2**23),
    "rings, memory and world": ("mappo", {"num_steps": 32}, (2**11, 2**13, 2**15), 2**23),
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
        ("jax.random.permutation, not argsort (CartPole)",),
    ),
}
PEERS = {  # work: environment steps of a timed call, programs by system
    "CartPole-v1, 2048 x 32": (
        2**23,
        {
            "ours": ("ppo_ff", {**CARTPOLE, "num_envs": 2**11, "update_epochs": 4}),
            "purejaxrl": pure(2**11, 32, 8),
            "rejax": rejax(2**11, 32, 8),
        },
    ),
    "CartPole-v1, 2^17 x 32": (
        2**25,
        {
            "ours": ("ppo_ff", {**CARTPOLE, "num_envs": 2**17, "update_epochs": 4}),
            "purejaxrl": pure(2**17, 32, 8),
            "rejax": rejax(2**17, 32, 8),
        },
    ),
    "CartPole-v1, 1024 seeds x 4 x 128": (
        2**24,
        {
            "ours": ("ppo_ff", {**FOUR_ENVS, "num_seeds": 2**10}),
            "purejaxrl": {**pure(4, 128, 4), "SEEDS": 2**10},
            "rejax": {**rejax(4, 128, 4), "seeds": 2**10},
        },
    ),
    "CartPole-v1, 4096 seeds x 4 x 128": (
        2**25,
        {
            "ours": ("ppo_ff", {**FOUR_ENVS, "num_seeds": 2**12}),
            "purejaxrl": {**pure(4, 128, 4), "SEEDS": 2**12},
            "rejax": {**rejax(4, 128, 4), "seeds": 2**12},
        },
    ),
    "Breakout-MinAtar, MLP, 2048 x 32": (
        2**22,
        {
            "ours": (
                "ppo_ff",
                {
                    **CARTPOLE,
                    "env_id": "Breakout-MinAtar",
                    "flat_obs": True,
                    "num_envs": 2**11,
                    "update_epochs": 4,
                },
            ),
            "purejaxrl": {**pure(2**11, 32, 8), "ENV_NAME": "Breakout-MinAtar"},
        },
    ),
    "Breakout-MinAtar, CNN, 2048 x 32": (
        2**22,
        {"ours": ("ppo_ff", {**BREAKOUT, "num_envs": 2**11, "update_epochs": 4})},
    ),
    "Pendulum-v1, normalized, 2048 x 32": (
        2**22,
        {
            "ours": (  # PureJaxRL has networks of this width
                "ppo_obs_norm",
                {**PENDULUM, "num_envs": 2**11, "update_epochs": 4, "hidden_size": 256},
            ),
            "purejaxrl": {
                **pure(2**11, 32, 8),
                "ENV_NAME": "Pendulum-v1",
                "NORMALIZE_ENV": True,
            },
        },
    ),
    **{
        f"Empty-6x6, 8192 x 16, GRU {units}, {'bf16' if bf16 else 'float32'}": (
            2**20,
            {
                "ours": (
                    "ppo_rnn",
                    {
                        **XLANDS_NETWORK,
                        "num_envs": 2**13,
                        "hidden_size": units,
                        "head_size": heads,
                        "bf16": bf16,
                    },
                ),
                "xland": {
                    "env_id": "MiniGrid-Empty-6x6",
                    "num_envs": 2**13,
                    "num_steps": 16,
                    "num_minibatches": 16,
                    "rnn_hidden_dim": units,
                    "head_hidden_dim": heads,
                    "enable_bf16": bf16,
                },
            },
        )
        for units, heads in ((64, 64), (1024, 256))
        for bf16 in (False, True)
    },
}
RETURNS = [
    "ppo_ff.py --num-envs 1024 --num-steps 32 --total-timesteps 4e6",
    "ppo_ff.py --env-id Breakout-MinAtar --hidden-size 128 --lr 7e-3 --num-envs 1024"
    " --num-steps 32 --total-timesteps 2e7",
    "ppo_continuous.py --num-envs 1024 --num-steps 32 --total-timesteps 1e7",
    "ppo_obs_norm.py --num-envs 1024 --num-steps 32 --total-timesteps 1e7",
    "ppo_rnn.py --num-envs 8192 --total-timesteps 1e7",
    "ippo.py --env-id rings --num-envs 256 --total-timesteps 2e6",
    "ippo_rnn.py --num-envs 256 --total-timesteps 2e6",
    "mappo.py --num-envs 256 --total-timesteps 2e6",
    "ppo_drift.py --drift dpo --num-envs 1024 --num-steps 32 --total-timesteps 4e6",
    "ppo_vtrace.py --hide-velocity",
    "ppo_meta.py",
    "disco.py --rule actor_critic --lr 5e-4 --ent-coef 0.2 --vf-coef 0.5",
]


# Brax at the sizes of its own published settings (4096 environments, 32 minibatches, gamma 0.97).
BRAX = [
    f"ppo_obs_norm.py --env-id brax/{name} --num-envs {envs} --num-steps 20 --num-minibatches 32"
    " --update-epochs 4 --gamma 0.97 --lr 3e-4 --num-seeds 1 --total-timesteps 5e7"
    for name, envs in (("ant", 4096), ("halfcheetah", 2048))
]
AGAIN = ("ppo_ff.py", "ppo_rnn.py")  # their runs are repeated with a full cache
TABLES = ("runs", "peers", "speed", "choices")  # of ten minutes; "brax" needs as much alone


def peer_folders(args: argparse.Namespace) -> dict:
    return dict(peer.split("=", 1) for peer in args.peers)


def sizes(name: str, shrink: int, num_sizes: int) -> list:
    """Number of environments and a function that compiles, per size of an entry of SPEED."""
    import speed

    script, options, numbers, steps = SPEED[name]
    compile_size = lambda size: speed.compile_ours(
        script, {**options, "num_envs": size}, steps // shrink
    )
    numbers = [max(number // shrink, 16) for number in numbers[-num_sizes:]]
    return [(number, partial(compile_size, number)) for number in reversed(numbers)]


def alternatives(name: str, shrink: int) -> list:
    """Number of environments and a function that compiles, for a script, then its alternatives."""
    import ideas
    import speed

    size, steps, names = CHOICES[name]
    size = max(size // shrink, 16)
    script, options, _ = ideas.IDEAS[names[0]]
    options = {**options, "num_envs": size, "num_steps": 32}

    def compile_changed(changes):
        ideas.load(script, changes)
        return speed.compile_ours(script, options, steps // shrink)

    changes = [[], *(ideas.IDEAS[alternative][2] for alternative in names)]
    return [(size, partial(compile_changed, x)) for x in changes]


def of_a_system(name: str, shrink: int, folders: dict) -> list:
    """Number of environments and a function that compiles, for one program of PEERS."""
    import peers
    import speed

    work, system = name.split("/")
    steps, programs = PEERS[work]
    steps //= shrink
    options = programs[system]
    if system == "ours":
        script, options = options
        options = smaller(options, shrink)
        return [(options["num_envs"], partial(speed.compile_ours, script, options, steps))]
    options = smaller(options, shrink)
    compile_peer = {
        "purejaxrl": peers.purejaxrl_program,
        "rejax": peers.rejax_program,
        "xland": peers.xland_single_program,
    }[system]
    envs = options.get("num_envs", options.get("NUM_ENVS"))
    return [(envs, partial(compile_peer, folders[system], options, steps))]


def smaller(options: dict, shrink: int) -> dict:
    """Environments and seeds divided, but never fewer than 16 environments or 2 seeds."""
    least = {"num_envs": 16, "NUM_ENVS": 16, "num_seeds": 2, "seeds": 2, "SEEDS": 2}
    divided = lambda name, x: min(x, max(x // shrink, least[name])) if name in least else x
    return {name: divided(name, x) for name, x in options.items()}


def measure(kind: str, name: str, args: argparse.Namespace):
    """The process of an entry. Prints JSON per program: environments, steps/s, compile seconds.

    Where something went wrong, a message takes the place of steps/s.
    """
    import speed

    out, sys.stdout = sys.stdout, sys.stderr  # `out` for the lines below only
    programs = []
    if kind == "speed":
        entries = sizes(name, args.shrink, args.sizes)
    elif kind == "choices":
        entries = alternatives(name, args.shrink)
    else:
        entries = of_a_system(name, args.shrink, peer_folders(args))
    for num_envs, compile_program in entries:
        program = "no time left"
        if time.time() < args.until:
            try:
                program = compile_program()
            except Exception as error:
                program = describe_error(error)
        programs.append((num_envs, program))
    print("compiled", file=out, flush=True)
    sys.stdin.readline()
    for num_envs, program in programs:
        rate, compile_seconds = program, None
        if not isinstance(program, str):
            compile_seconds, steps, call = program
            try:
                rate = steps / sorted(speed.timed_calls(call, 3))[1]
            except Exception as error:
                rate = describe_error(error)
        print(json.dumps([num_envs, rate, compile_seconds]), file=out, flush=True)


def describe_error(error: Exception) -> str:
    lines = [*str(error).splitlines(), ""]
    return f"{type(error).__name__} {lines[0]}".replace("|", "/")


class Entry:
    """The process of an entry: compiles when made, and is timed by `results`."""

    def __init__(self, kind: str, name: str, args: argparse.Namespace, times: tuple):
        start_until, compile_until, self.deadline = times
        command = [sys.executable, "-W", "ignore", __file__, "--measure", kind, name]
        command += ["--shrink", str(args.shrink), "--sizes", str(args.sizes)]
        command += ["--peers", *args.peers]
        command += ["--until", str(start_until)]
        self.process, self.problem = None, "no time left"
        if time.time() < start_until:
            pipe, self.problem = subprocess.PIPE, "failed"
            self.process = subprocess.Popen(command, env=ENV, stdin=pipe, stdout=pipe, text=True)
            timer = self.stop_at(compile_until)
            for line in self.process.stdout:  # ends if the process does
                if line == "compiled\n":
                    break
            timer.cancel()

    def stop_at(self, moment: float) -> threading.Timer:
        timer = threading.Timer(max(moment - time.time(), 0), self.stop)
        timer.daemon = True
        timer.start()
        return timer

    def stop(self):
        self.problem = "no time left"
        self.process.kill()

    def results(self) -> list:
        """[environments, steps/s, compile seconds] of each program; see `measure`."""
        lines = []
        if self.process:
            timer = self.stop_at(self.deadline)
            output, _ = self.process.communicate("time\n")
            timer.cancel()
            lines = [json.loads(line) for line in output.splitlines()]
            if self.process.returncode == 0:
                return lines
        return [*lines, ["", self.problem, None]]


def train(words: str, shrink: int, times: tuple) -> str:
    """A row of the table of training runs."""
    if shrink > 1:
        words += " --num-envs 16 --total-timesteps 1e5"
    start_until, compile_until, _ = times
    if time.time() > start_until:
        return f"| `{words}` | no time left | | | | | |"
    totals = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**ENV, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        for run in ("first", "again")[: 1 + (words.split(" --")[0] in AGAIN)]:
            run_dir, start = Path(folder, run), time.time()
            command = [sys.executable, "-W", "ignore", *words.split(), "--run-dir", str(run_dir)]
            try:
                subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    check=True,
                    capture_output=True,
                    timeout=max(compile_until - start, 0),
                )
            except subprocess.CalledProcessError as error:
                print(error.stderr.decode(), file=sys.stderr)
                return f"| `{words}` | failed | | | | | |"
            except subprocess.TimeoutExpired:
                if not totals:
                    return f"| `{words}` | no time left | | | | | |"
                break
            totals.append(f"{time.time() - start:.1f}")
        summary = json.loads(Path(folder, "first", "summary.json").read_text())
        curve = plot.read_run(Path(folder, "first"), "eval/return").curve
    seconds = curve.seconds[-1]  # of training
    cells = f"{summary['eval_return_mean']:.4g} | {summary['env_steps'] / seconds:,.0f} | "
    cells += f"{summary['seconds'] - seconds:.1f} | {seconds:.1f} | "
    return f"| `{words}` | {cells}{' | '.join([*totals, ''][:2])} |"


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
    parser.add_argument("--tables", nargs="+", choices=(*TABLES, "brax"), default=TABLES)
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=DIR", help="see peers.md")
    parser.add_argument("--only", default="", help="rows that match this regular expression")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(*args.measure, args)
    start = time.time()
    times = tuple(start + fraction * 60 * args.minutes for fraction in (0.7, 0.85, 1.0))
    print(describe_machine(), flush=True)
    folders = peer_folders(args)
    found = lambda names: [name for name in names if re.search(args.only, name)]
    wanted = lambda table, names: found(names) if table in args.tables else []
    with ThreadPoolExecutor(5) as pool:
        entry = partial(pool.submit, Entry)
        programs = {
            work: {
                system: entry("peers", f"{work}/{system}", args, times)
                for system in PEERS[work][1]
                if system == "ours" or system in folders
            }
            for work in wanted("peers", PEERS)
        }
        speeds = {name: entry("speed", name, args, times) for name in wanted("speed", SPEED)}
        choices = {name: entry("choices", name, args, times) for name in wanted("choices", CHOICES)}
        words = [*wanted("runs", RETURNS), *wanted("brax", BRAX)]
        runs = [pool.submit(train, x, args.shrink, times) for x in words]
    if runs:
        print("\n| command | return | steps/s | other s | training s | seconds in all | again |")
        print("|---|---|---|---|---|---|---|", *(x.result() for x in runs), sep="\n", flush=True)
    if programs:
        print_beside_peers(programs)
    if speeds:
        print("\n| work | environments | steps/s | compile s |\n|---|---|---|---|", flush=True)
    for name, entry in speeds.items():
        for num_envs, rate, seconds in reversed(entry.result().results()):
            if seconds is not None:
                rate, seconds = f"{rate:,.0f}", f"{seconds:.1f}"
            work = f"`{SPEED[name][0]}.py`, {name}"
            print(f"| {work} | {num_envs} | {rate} | {seconds or ''} |", flush=True)
    if choices:
        print("\n| alternative to a choice | environments | steps/s without it | with it | |")
        print("|---|---|---|---|---|", flush=True)
    for name, entry in choices.items():
        (_, plain, _), *changed = results = entry.result().results()
        names = CHOICES[name][2]
        changed = (changed + [results[-1]] * len(names))[: len(names)]  # one for each
        for choice, (num_envs, rate, _) in zip(names, changed, strict=True):
            cells = f"{num_envs} | {plain} | {rate} |"
            if isinstance(plain, float) and isinstance(rate, float):
                cells = f"{num_envs} | {plain:,.0f} | {rate:,.0f} | {rate / plain:.2f} ×"
            print(f"| {choice} | {cells} |", flush=True)


def print_beside_peers(programs: dict):
    """Steps/s of every system and, in brackets, ours divided by theirs."""
    systems = ["ours", *dict.fromkeys(x for each in programs.values() for x in each if x != "ours")]
    print(f"\n| work | {' | '.join(systems)} |\n|---|{'---|' * len(systems)}", flush=True)
    for work, entries in programs.items():
        cells, our_rate = [], None
        for system in systems:
            if system not in entries:
                cells.append("")
                continue
            _, rate, _ = entries[system].result().results()[0]
            our_rate = rate if system == "ours" else our_rate
            both = isinstance(rate, float) and isinstance(our_rate, float) and system != "ours"
            ratio = f" ({our_rate / rate:.2f} ×)" if both else ""
            cells.append(f"{rate:,.0f}{ratio}" if isinstance(rate, float) else rate)
        print(f"| {work} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
