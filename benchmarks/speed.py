"""How fast the scripts train, beside what bounds them and beside their peers.

    python benchmarks/speed.py                   # every script, its ceilings, where time goes
    python benchmarks/speed.py --scaling         # num_envs, num_seeds, devices, total steps
    python benchmarks/speed.py --peers purejaxrl=DIR xland=DIR rejax=DIR    # see peers.md
    python benchmarks/speed.py --json result.json

Every measurement is a process of its own. Steps/s is the median of the timed calls of the compiled
program after one call to warm up, with the slowest and the fastest beside it. Systems that are
compared take turns, so that a noisy machine disturbs all of them.
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CARTPOLE = {"num_steps": 128, "update_epochs": 4, "hidden_size": 64}
PENDULUM = {**CARTPOLE, "num_envs": 64, "num_minibatches": 8, "hidden_size": 256}
WORK = {  # name: script and configuration
    "CartPole 4 envs": ("ppo_ff", {**CARTPOLE, "num_envs": 4, "num_minibatches": 4}),
    "CartPole 64 envs": ("ppo_ff", {**CARTPOLE, "num_envs": 64, "num_minibatches": 8}),
    "Breakout MLP 64 envs": (
        "ppo_ff",
        {
            **CARTPOLE,
            "num_envs": 64,
            "num_minibatches": 8,
            "env_id": "Breakout-MinAtar",
            "network": "mlp",
        },
    ),
    "Pendulum 64 envs": ("ppo_continuous", PENDULUM),
    "Pendulum, statistics": ("ppo_obs_norm", PENDULUM),
    "Empty-6x6 GRU 64": (
        "ppo_rnn",
        {"num_envs": 256, "num_minibatches": 8, "embedding_size": 16, "conv_size": 16},
    ),
    "Empty-6x6 GRU 128": ("ppo_rnn", {"num_envs": 1024, "hidden_size": 128}),
}
PEERS = {  # name of the work: the peers that do the same
    "CartPole 4 envs": ["purejaxrl", "rejax"],
    "CartPole 64 envs": ["purejaxrl", "rejax"],
    "Breakout MLP 64 envs": ["purejaxrl"],
    "Pendulum 64 envs": ["purejaxrl"],
    "Pendulum, statistics": ["purejaxrl"],
    "Empty-6x6 GRU 64": ["xland"],
}


# ---------------------------------------------------------------------- inside of one process
def timed_calls(call, count):
    """Seconds of each of `count` calls, after one to warm up."""
    call()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def ours(script, options, steps_per_call, calls):
    """One script, without evaluation and files: the compiled program alone."""
    import jax

    module = importlib.import_module(script)
    config = module.Config(**{"total_timesteps": 10**9, **options})
    updates = max(1, steps_per_call // config.batch_size)
    start = time.perf_counter()
    init, train = module.make_train(config, updates)
    state = init(jax.random.split(jax.random.key(0), jax.local_device_count()))
    train = train.lower(state).compile()
    compile_seconds = time.perf_counter() - start

    def call():
        nonlocal state
        state, metrics = train(state)
        jax.block_until_ready((state, metrics))

    steps = updates * config.batch_size * config.num_seeds
    return compile_seconds, steps, timed_calls(call, calls)


def environment(script, options, steps_per_call, calls):
    """The environment alone, with random actions."""
    import jax
    import jax.numpy as jnp

    module = importlib.import_module(script)
    config = module.resolve(module.Config(**options))
    reset, step, actions = module.make_env(config)
    num_envs, num_steps = config.num_envs, max(1, steps_per_call // config.num_envs)

    def run(key, carry):
        def one(carry, key):
            _, env_state = carry
            action_key, step_key = jax.random.split(key)
            if isinstance(actions, tuple):
                low, high = actions
                action = jax.random.uniform(
                    action_key, (num_envs, len(low)), minval=low, maxval=high
                )
            else:
                action = jax.random.randint(action_key, (num_envs,), 0, actions)
            obs, env_state, reward, *_ = step(
                jax.random.split(step_key, num_envs), env_state, action
            )
            return (obs, env_state), jnp.sum(reward)

        return jax.lax.scan(one, carry, jax.random.split(key, num_steps))

    start = time.perf_counter()
    carry = jax.jit(reset)(jax.random.split(jax.random.key(0), num_envs))
    compiled = jax.jit(run).lower(jax.random.key(1), carry).compile()
    compile_seconds = time.perf_counter() - start
    call = lambda: jax.block_until_ready(compiled(jax.random.key(1), carry))
    return compile_seconds, num_steps * num_envs, timed_calls(call, calls)


def matrix_product(dtype, size, calls):
    """FLOP of one size^3 product, and its seconds."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    return 0.0, 2 * size**3, timed_calls(lambda: product(x).block_until_ready(), calls)


def shuffling(script, options, steps_per_call, calls):
    """A permutation for each epoch of the call, and the gather of its samples."""
    import jax
    import jax.numpy as jnp

    module = importlib.import_module(script)
    config = module.resolve(module.Config(**options))
    size = config.num_envs if script == "ppo_rnn" else config.batch_size
    width = config.batch_size // size
    rollout = jnp.zeros((size, 10 * width))  # about what a sample holds
    epochs = max(1, steps_per_call // config.batch_size) * config.update_epochs

    def run(key):
        def epoch(key, _):
            key, shuffle_key = jax.random.split(key)
            return key, rollout[module.shuffle(shuffle_key, size)].sum(axis=0)

        return jax.lax.scan(epoch, key, None, epochs)

    run = jax.jit(run)
    call = lambda: jax.block_until_ready(run(jax.random.key(0)))
    return 0.0, epochs * config.batch_size // config.update_epochs, timed_calls(call, calls)


def measure(kind, *args):
    """Runs in a process of its own. Prints one line of JSON."""
    if kind in globals():
        compile_seconds, amount, seconds = globals()[kind](*args)
    else:
        compile_seconds, amount, seconds = getattr(importlib.import_module("peers"), kind)(*args)
    rates = sorted(amount / s for s in seconds)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB
    print(json.dumps({"rates": rates, "compile": compile_seconds, "memory": memory}))


# -------------------------------------------------------------------------- from the outside
def in_a_process(*args, devices=1, cache=None):
    """Returns {"rates": [amount per second of each call], "compile": s, "memory": MiB}."""
    env = dict(os.environ)
    if devices > 1:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if cache:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", __file__, "--measure", json.dumps(args)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return {"rates": [float("nan")], "compile": float("nan"), "memory": 0.0, "error": last}
    return json.loads(result.stdout.splitlines()[-1])


def merge(results):
    rates = sorted(rate for result in results for rate in result["rates"])
    compile_seconds = sorted(result["compile"] for result in results)
    return {
        "median": rates[len(rates) // 2],
        "min": rates[0],
        "max": rates[-1],
        "compile": compile_seconds[len(results) // 2],
        "memory": max(result["memory"] for result in results),
        "error": next((result["error"] for result in results if "error" in result), ""),
    }


def row(name, result, note=""):
    span = f"{result['min']:,.0f} – {result['max']:,.0f}"
    print(
        f"| {name} | {result['median']:,.0f} | {span} | {result['compile']:.1f} |"
        f" {result['memory']:,.0f} | {note or result['error']} |",
        flush=True,
    )


def header(title):
    print(f"\n### {title}\n\n| work | steps/s | min – max | compile s | MiB | |")
    print("|---|---|---|---|---|---|", flush=True)


def scripts_table(args):
    header("Scripts and their ceilings")
    table = {}
    for name, (script, options) in WORK.items():
        whole = merge([in_a_process("ours", script, options, args.steps, args.calls)])
        env = merge([in_a_process("environment", script, options, args.steps, args.calls)])
        mixing = merge([in_a_process("shuffling", script, options, args.steps, args.calls)])
        more = {**options, "update_epochs": 2 * options.get("update_epochs", 1)}
        double = merge([in_a_process("ours", script, more, args.steps, args.calls)])
        table[name] = {"training": whole, "environment": env, "shuffle": mixing, "double": double}
        # Twice the epochs cost one more update; what is left is the rollout with the advantages.
        update = 1 / double["median"] - 1 / whole["median"]
        shuffle = min(1 / mixing["median"], update)
        share = lambda seconds, total=1 / whole["median"]: f"{seconds / total:.0%}"
        note = f"update {share(update - shuffle)}, shuffle {share(shuffle)}, "
        note += f"rollout and advantages {share(1 / whole['median'] - update)}, "
        note += f"of which environment {share(1 / env['median'])}"
        row(f"{script}: {name}", whole, note)
    for dtype in ("float32", "bfloat16"):
        peak = merge([in_a_process("matrix_product", dtype, 2048, args.calls)])
        table[f"2048^3 product, {dtype}"] = peak
        gflops = {
            key: value / 1e9 for key, value in peak.items() if key in ("median", "min", "max")
        }
        row(f"2048³ product, {dtype}, GFLOP/s", {**peak, **gflops})
    return table


def scaling_table(args):
    header("Scaling of ppo_ff on CartPole-v1 and of ppo_rnn on Empty-6x6")
    table = {}

    def one(name, script, options, steps=args.steps, **process):
        table[name] = merge([in_a_process("ours", script, options, steps, args.calls, **process)])
        row(name, table[name])

    for exponent in range(6, 18, 1 if args.thorough else 2):
        one(f"ppo_ff, 2^{exponent} envs", "ppo_ff", {"num_envs": 2**exponent, "num_steps": 32})
    for exponent in range(6, 14, 1 if args.thorough else 2):
        one(f"ppo_rnn, 2^{exponent} envs", "ppo_rnn", {"num_envs": 2**exponent})
    for seeds in (1, 4, 16, 64, 256):
        one(f"ppo_ff, {seeds} seeds", "ppo_ff", {"num_seeds": seeds}, args.steps // min(seeds, 32))
    for devices in (1, 2, 4):
        one(f"ppo_ff, {devices} emulated devices", "ppo_ff", {"num_envs": 64}, devices=devices)
    for factor in (1, 10):
        one(f"ppo_ff, steps × {factor}", "ppo_ff", {"num_envs": 64}, factor * args.steps)
    return table


def peers_table(args, paths):
    header("Side by side, taking turns")
    table = {}
    for name, (script, options) in WORK.items():
        peers = [peer for peer in PEERS.get(name, []) if peer in paths]
        if not peers:
            continue
        results = {script: [], **{peer: [] for peer in peers}}
        for _ in range(args.rounds):
            arguments = (script, options, args.steps, args.calls)
            results[script].append(in_a_process("ours", *arguments))
            for peer in peers:
                results[peer].append(in_a_process(peer, str(paths[peer]), *arguments))
        table[name] = {system: merge(result) for system, result in results.items()}
        row(f"{name}: {script}", table[name][script])
        for peer in peers:
            ratio = table[name][script]["median"] / table[name][peer]["median"]
            error = table[name][peer]["error"]
            row(f"{name}: {peer}", table[name][peer], error or f"{script} is {ratio:.2f} ×")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200_000, help="environment steps per call")
    parser.add_argument("--calls", type=int, default=5, help="timed calls of each process")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--scaling", action="store_true", help="measure how speed scales")
    parser.add_argument("--thorough", action="store_true", help="every power of two")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=DIR", help="see peers.md")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(*args.measure)
    if args.peers:
        tables = peers_table(args, {n: Path(d) for n, d in (p.split("=") for p in args.peers)})
    else:
        tables = scaling_table(args) if args.scaling else scripts_table(args)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=2))


if __name__ == "__main__":
    main()
