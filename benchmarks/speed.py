"""Speed of the scripts, of their parts and of comparable systems.

    python benchmarks/speed.py                   # every script, its ceilings, where time goes
    python benchmarks/speed.py --scaling         # sizes, seeds, devices, steps, time limits
    python benchmarks/speed.py --vtrace          # the price of recomputing advantages
    python benchmarks/speed.py --peers purejaxrl=DIR xland=DIR rejax=DIR    # see peers.md
    python benchmarks/speed.py --json result.json

Every measurement has its own process. Steps/s is the median of the timed calls of the compiled
program after a warm-up call, with minimum and maximum. A call ends with the evaluation of a single
episode per device, which takes next to no time. Systems that are compared take turns, so that a
noisy machine disturbs all of them.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARENT_TIME = "the time when the process is started"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CARTPOLE = {"num_steps": 128, "update_epochs": 4, "hidden_size": 64}
PENDULUM = {**CARTPOLE, "num_envs": 64, "num_minibatches": 8, "hidden_size": 256}
SPREAD = {"env_id": "MPE_simple_spread_v3", "num_envs": 16, "num_steps": 128, "num_minibatches": 4}
LONG = {"actor_epochs": 4, "critic_epochs": 4}
RECURRENT = {**SPREAD, **LONG, "num_minibatches": 2, "hidden_size": 128}
GRU = {"num_envs": 256, "num_steps": 64, "num_minibatches": 8}
GRU |= {"embedding_size": 0, "conv_size": 16}
EPOCHS = {"num_envs": 64, "num_steps": 32, "update_epochs": 8, "num_minibatches": 8}
VTRACE = {**EPOCHS, "draw_fraction": 1.0}
RECOMPUTATION = {  # on Pendulum, with networks of width 64
    "ppo_continuous": ("ppo_continuous", {**EPOCHS, "hidden_size": 64}),
    "ppo_vtrace, GAE once": ("ppo_vtrace", {**VTRACE, "recompute_advantages": False}),
    "ppo_vtrace, V-trace": ("ppo_vtrace", VTRACE),
    "ppo_vtrace, half of the segments": ("ppo_vtrace", EPOCHS),
    "ppo_vtrace, LSTM": ("ppo_vtrace", {**EPOCHS, "cell": "lstm"}),
}
PLACES = str(ROOT / "runs" / "places.bz2")  # by make_rulesets.py
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
            "flat_obs": True,  # for the MLP
        },
    ),
    "Pendulum 64 envs": ("ppo_continuous", PENDULUM),
    "Pendulum, statistics": ("ppo_obs_norm", PENDULUM),
    "Empty-6x6 GRU 64": (
        "ppo_rnn",
        GRU,
    ),
    "Empty-6x6 GRU 64, trials": (
        "ppo_meta",
        {**GRU, "update_epochs": 1, "env_id": "MiniGrid-Empty-6x6"},
    ),
    "XLand R1-9x9, trials": (
        "ppo_meta",
        {**GRU, "update_epochs": 1, "env_id": "XLand-MiniGrid-R1-9x9", "benchmark_id": PLACES},
    ),
    "Empty-6x6 GRU 128": ("ppo_rnn", {"num_envs": 1024, "hidden_size": 128}),
    "rings": ("ippo", {"env_id": "rings"}),
    "simple_spread": ("ippo", SPREAD),
    "simple_spread, 4 epochs": ("ippo", {**SPREAD, **LONG}),
    "simple_spread, memory": ("ippo_rnn", RECURRENT),
    "simple_spread, central critic": ("mappo", RECURRENT),
    "Catch 8x8, random rule": ("disco", {"weights": "random"}),
}
PEERS = {  # name of the work: the peers that do the same
    "CartPole 4 envs": ["purejaxrl", "rejax", "stoix", "cleanrl"],
    "CartPole 64 envs": ["purejaxrl", "rejax", "stoix", "cleanrl"],
    "Breakout MLP 64 envs": ["purejaxrl", "stoix"],
    "Pendulum 64 envs": ["purejaxrl"],
    "Pendulum, statistics": ["purejaxrl"],
    "Empty-6x6 GRU 64": ["xland"],
    "XLand R1-9x9, trials": ["xland_meta"],
    "simple_spread": ["jaxmarl"],
    "simple_spread, 4 epochs": ["jaxmarl"],
    "simple_spread, memory": ["jaxmarl", "jaxmarl_same_networks"],
    "simple_spread, central critic": ["jaxmarl", "jaxmarl_same_networks"],
}


# -------------------------- inside of one process
def timed_calls(call, count):
    """Seconds of each of `count` calls, after a warm-up call."""
    call()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def load(script, options):
    """The script's module and its options, of which `flat_obs` turns images into vectors here."""
    module, options = importlib.import_module(script), dict(options)
    if options.pop("flat_obs", False):
        make_env = module.make_env

        def make_flat_env(config):
            reset, step, num_actions = make_env(config)

            def flat_reset(key):
                obs, env_state = reset(key)
                return obs.ravel(), env_state

            def flat_step(*args):
                obs, *outcome, next_obs = step(*args)
                return obs.ravel(), *outcome, next_obs.ravel()

            return flat_reset, flat_step, num_actions

        module.make_env = make_flat_env
    return module, options


def make_long_call(script, options, steps_per_call):
    """The script's module and a Config whose calls of `train` make so many steps.

    One of 1000 calls, so that the learning rate hardly decays. Evaluates a single episode.
    """
    module, options = load(script, options)
    options |= {"eval_episodes": 1, "num_evals": 1000}
    if script == "disco_meta":
        updates = max(1, steps_per_call // module.Config(**options).batch_size)
        return module, module.Config(**options, num_meta_steps=updates * options["num_evals"])
    batch_size = module.Config(**{**options, "total_timesteps": 1e12}).batch_size
    updates = max(1, steps_per_call // batch_size)
    total = updates * batch_size * options["num_evals"]
    return module, module.Config(**options, total_timesteps=total)


def compile_ours(script, options, steps_per_call):
    """A script's program, without files. Returns seconds to compile it, steps per call, call()."""
    import jax

    module, config = make_long_call(script, options, steps_per_call)
    start = time.perf_counter()
    init, train, *_ = module.make_train(config)
    state = init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
    train = train.lower(state).compile()
    compile_seconds = time.perf_counter() - start

    def call():
        nonlocal state
        state, metrics = train(state)
        jax.block_until_ready((state, metrics))

    return compile_seconds, config.updates_per_eval * config.batch_size * config.num_seeds, call


def ours(script, options, steps_per_call, calls):
    compile_seconds, steps, call = compile_ours(script, options, steps_per_call)
    return compile_seconds, steps, timed_calls(call, calls)


def clock_ours(script, words, calls=3, seconds_per_call=4.0):
    """The script with the options of a command line, for one seed."""
    import tyro

    module = importlib.import_module(script)
    options = vars(tyro.cli(module.Config, args=words)) | {"num_seeds": 1}
    del options["total_timesteps"]
    _, steps, (seconds,) = ours(script, options, 1, 1)
    return ours(script, options, int(steps * seconds_per_call / seconds), calls)


def terminal_limits(script, options, steps_per_call, calls):
    """The same with time limits as terminations."""
    module = importlib.import_module(script)
    make_env = module.make_env

    def make_terminal_env(config):
        reset, step, *rest = make_env(config)

        def terminal_step(*args):
            *transition, terminated, truncated, next_obs = step(*args)
            return *transition, terminated | truncated, truncated & False, next_obs

        return reset, terminal_step, *rest

    module.make_env = make_terminal_env
    return ours(script, options, steps_per_call, calls)


def start(script, options, parent_time):
    """Seconds from the start of the process to the end of its first update and evaluation."""
    import jax

    module, config = make_long_call(script, options, 1)
    init, train, *_ = module.make_train(config)
    state = init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
    jax.block_until_ready(train(state))
    return time.time() - parent_time, 1, [1.0]


def count_products(jaxpr):
    """FLOP of all matrix products, but for those of a while, whose length is not known."""
    import jax
    import numpy as np

    flop = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, right = (x.aval.shape for x in equation.invars)
            length = np.prod([left[i] for i in contracted])
            flop += 2 * length * np.prod(equation.outvars[0].aval.shape)
        if equation.primitive.name == "while":
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                flop += equation.params.get("length", 1) * count_products(inner)
    return float(flop)


def model_flop(script, options):
    """FLOP of all matrix products of an update, per environment step."""
    import jax
    from jax.interpreters.partial_eval import dce_jaxpr

    module, config = make_long_call(script, options, 1)
    *_, init_seed, train_seed = module.make_train(config)
    update = inspect.getclosurevars(train_seed).nonlocals["update"]
    first_update = lambda key: update(init_seed(key), None)[0].params
    axes = [("devices", jax.device_count())]
    jaxpr = jax.make_jaxpr(first_update, axis_env=axes)(jax.random.PRNGKey(0)).jaxpr
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # the critic's pass needs no actor
    return 0.0, count_products(used) / config.batch_size, [1.0]


def environment(script, options, steps_per_call, calls):
    """The environment alone, with random actions."""
    import jax

    module, options = load(script, options)
    config = module.Config(**options)
    reset, step, num_actions, *is_discrete = module.make_env(config)
    num_envs, num_steps = config.num_envs, max(1, steps_per_call // config.num_envs)
    is_continuous = script == "ppo_continuous" or is_discrete == [False]

    def one_step(env_state, key):
        action_key, step_key = jax.random.split(key)
        action = jax.random.randint(action_key, (), 0, num_actions)
        if is_continuous:
            action = jax.random.uniform(action_key, (num_actions,), minval=-1.0)
        _, env_state, reward, *_ = step(step_key, env_state, action)
        return env_state, reward

    def run(key, env_state):
        keys = jax.random.split(key, (num_steps, num_envs))
        return jax.lax.scan(jax.vmap(one_step), env_state, keys)

    start = time.perf_counter()
    _, env_state = jax.jit(jax.vmap(reset))(jax.random.split(jax.random.PRNGKey(0), num_envs))
    compiled = jax.jit(run).lower(jax.random.PRNGKey(1), env_state).compile()
    compile_seconds = time.perf_counter() - start
    call = lambda: jax.block_until_ready(compiled(jax.random.PRNGKey(1), env_state))
    return compile_seconds, num_steps * num_envs, timed_calls(call, calls)


def matrix_product(dtype, size, calls):
    """FLOP of one size^3 product, and its seconds."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    return 0.0, 2 * size**3, timed_calls(lambda: product(x).block_until_ready(), calls)


def shuffling(script, options, steps_per_call, calls):
    """A random permutation for each epoch of the call, and its gather, as in the scripts."""
    import jax
    import jax.numpy as jnp

    module, options = load(script, options)
    config = module.Config(**options)
    is_recurrent = script in ("ppo_rnn", "ppo_meta")  # samples are sequences
    size = config.num_envs if is_recurrent else config.batch_size
    width = config.batch_size // size
    rollout = jnp.zeros((size, 10 * width))  # about what a sample holds
    epochs = max(1, steps_per_call // config.batch_size) * config.update_epochs

    def run(key):
        def epoch(key, _):
            key, shuffle_key = jax.random.split(key)
            rows = jnp.argsort(jax.random.bits(shuffle_key, (size,), jnp.uint32))
            return key, rollout[rows].sum(axis=0)

        return jax.lax.scan(epoch, key, None, epochs)

    run = jax.jit(run)
    call = lambda: jax.block_until_ready(run(jax.random.PRNGKey(0)))
    return 0.0, epochs * config.batch_size // config.update_epochs, timed_calls(call, calls)


def measure(kind, *args):
    """Runs in its own process. Prints a line of JSON."""
    if kind in globals():
        compile_seconds, amount, seconds = globals()[kind](*args)
    else:
        compile_seconds, amount, seconds = getattr(importlib.import_module("peers"), kind)(*args)
    rates = sorted(amount / s for s in seconds)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB
    print(json.dumps({"rates": rates, "compile": compile_seconds, "memory": memory}))


# ------------------------------- from the outside
def in_a_process(*args, devices=1, cache=None):
    """Returns {"rates": [amount per second of each call], "compile": s, "memory": MiB}."""
    env = dict(os.environ)
    if devices > 1:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if cache:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    args = [time.time() if arg == PARENT_TIME else arg for arg in args]
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
    header("Ceilings of the machine")
    table = {}
    for dtype in ("float32", "bfloat16"):
        table[dtype] = merge([in_a_process("matrix_product", dtype, 2048, args.calls)])
        gflops = {key: table[dtype][key] / 1e9 for key in ("median", "min", "max")}
        row(f"2048³ product, {dtype}, GFLOP/s", {**table[dtype], **gflops})
    header("Scripts")
    for name, (script, options) in WORK.items():
        table[name] = result = {}
        steps = args.steps // 20 if script == "disco" else args.steps
        result["training"] = merge([in_a_process("ours", script, options, steps, args.calls)])
        seconds = 1 / result["training"]["median"]  # of a step
        with tempfile.TemporaryDirectory() as cache:
            arguments = ("start", script, options, PARENT_TIME)
            cold, warm = (in_a_process(*arguments, cache=cache)["compile"] for _ in range(2))
        result["start"] = {"cold": cold, "warm": warm}
        note = f"first update after {cold:.1f} s, {warm:.1f} s with a warm cache"
        if script.startswith("ppo_"):
            arguments = (script, options, steps, args.calls)
            result["environment"] = merge([in_a_process("environment", *arguments)])
            result["shuffle"] = merge([in_a_process("shuffling", *arguments)])
            twice = {**options, "update_epochs": 2 * options.get("update_epochs", 1)}
            result["twice"] = merge([in_a_process("ours", script, twice, steps, args.calls)])
            result["flop"] = in_a_process("model_flop", script, options)["rates"][0]
            # Twice the epochs cost one more update; the rest is rollout and advantage.
            update = 1 / result["twice"]["median"] - seconds
            shuffle = min(1 / result["shuffle"]["median"], update)
            note += f"; update {(update - shuffle) / seconds:.0%}, shuffle {shuffle / seconds:.0%},"
            note += f" rollout and advantage {1 - update / seconds:.0%}, of which environment"
            note += f" {1 / result['environment']['median'] / seconds:.0%}"
            share = result["flop"] / seconds / table["float32"]["median"]
            note += f"; {result['flop'] / 1e6:.3g} MFLOP a step, {share:.0%} of the product's peak"
        row(f"{script}: {name}", result["training"], note)
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
        steps = args.steps // min(seeds, 32)
        one(f"ppo_ff, --num-seeds {seeds}", "ppo_ff", {"num_seeds": seeds}, steps)
    for devices in (1, 2, 4):
        one(f"ppo_ff, emulated devices: {devices}", "ppo_ff", {"num_envs": 64}, devices=devices)
    for factor in (1, 10):
        one(f"ppo_ff, steps × {factor}", "ppo_ff", {"num_envs": 64}, factor * args.steps)
    for name in ("CartPole 64 envs", "Pendulum 64 envs", "Empty-6x6 GRU 64"):
        script, options = WORK[name]
        results = {"ours": [], "terminal_limits": []}
        for _ in range(args.rounds):
            for kind, measured in results.items():
                measured.append(in_a_process(kind, script, options, args.steps, args.calls))
        correct, terminal = (merge(measured) for measured in results.values())
        table[f"{name}, limits as terminations"] = terminal
        row(f"{name}, correct time limits", correct)
        cost = f"correct ones cost {terminal['median'] / correct['median'] - 1:.1%}"
        row(f"{name}, time limits as terminations", terminal, cost)
    return table


def vtrace_table(args):
    header("V-trace for every minibatch, taking turns")
    results = {name: [] for name in RECOMPUTATION}
    for _ in range(args.rounds):
        for name, (script, options) in RECOMPUTATION.items():
            results[name].append(in_a_process("ours", script, options, args.steps, args.calls))
    table = {name: merge(measured) for name, measured in results.items()}
    for name in table:
        row(name, table[name])
    return table


def peers_table(args, paths):
    header("Peers, taking turns")
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
    parser.add_argument("--vtrace", action="store_true", help="measure what V-trace costs")
    parser.add_argument("--thorough", action="store_true", help="every power of two")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=DIR", help="see peers.md")
    parser.add_argument(
        "--only", default="", help="works whose name contains this, with | a choice"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(*args.measure)
    for name in [name for name in WORK if not re.search(args.only, name)]:
        del WORK[name]
    if args.peers:
        tables = peers_table(args, {n: Path(d) for n, d in (p.split("=") for p in args.peers)})
    elif args.vtrace:
        tables = vtrace_table(args)
    else:
        tables = scaling_table(args) if args.scaling else scripts_table(args)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=2))


if __name__ == "__main__":
    main()
