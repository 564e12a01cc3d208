"""Ideas for speed, each measured alone: a script against itself with a few lines changed.

    python benchmarks/ideas.py                       # all of them
    python benchmarks/ideas.py --only GRU --rounds 5

An idea is a list of replacements in the text of a script. Both programs take turns in one process,
`--calls` timed calls of each after a warm-up; `--rounds` processes. Prints a row per idea: steps/s
of the script, steps/s with the idea, the ratio of the medians.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import ablations  # noqa: E402

CARTPOLE = {"num_envs": 64, "num_steps": 128, "num_minibatches": 8, "hidden_size": 64}
BREAKOUT = {**CARTPOLE, "env_id": "Breakout-MinAtar", "hidden_size": None}
EMPTY = {"num_envs": 256, "num_minibatches": 8, "embedding_size": None, "conv_size": 16}
GRU = {"num_envs": 256, "num_steps": 16, "num_minibatches": 4}
GRU |= {"hidden_size": 1024, "head_size": 256}
DOORKEY = {"env_id": "MiniGrid-DoorKey-5x5"}

CONCATENATED = "jnp.concatenate([tile, color], axis=-1)"
SCAN_GRU = "return jax.lax.scan(step, hidden, (inputs, reset))[1]"
INPUT_GATES = "inputs = nn.Dense(3 * hidden.size, dtype=self.dtype)(x)"
ROLLOUT = "jax.lax.scan(step_envs, state.runner, None, config.num_steps"
MINIBATCHES = "jax.lax.scan(update_minibatch, state, minibatches"
GATHER = [
    (
        "minibatches = jax.tree.map(lambda x: x[rows], samples)",
        "gather = lambda s, r: update_minibatch(s, jax.tree.map(lambda x: x[r], samples))",
    ),
    (MINIBATCHES, "jax.lax.scan(gather, state, rows"),
]
RESET_VALUE = ablations.PPO["value of the observation after the reset"]
PASS_AT_LIMITS = [  # as in ppo_rnn.py
    (
        "step_envs = lambda runner, _: jax.vmap(step, (None, 0))(state.params, runner)",
        """critic = jax.vmap(lambda obs: network.apply(state.params, obs)[1])  # [N]

        def step_envs(runner, _):
            runner, x = jax.vmap(step, (None, 0))(state.params, runner)
            once = lambda _, value: critic(jax.lax.optimization_barrier((x.next_obs, value))[0])
            value = jax.lax.fori_loop(0, jnp.int32((x.done & ~x.terminated).any()), once, x.value)
            return runner, (x._replace(next_obs=None), value)
""",
    ),
    ("runner, rollout = jax.lax.scan(", "runner, (rollout, end_value) = jax.lax.scan("),
    ("critic = lambda obs: network.apply(state.params, obs)[1]", ""),
    (
        ablations.NEXT_VALUE,
        """next_value = jnp.concatenate([rollout.value[1:], critic(runner.obs)[None]])
        next_value = jnp.where(rollout.done, end_value, next_value)""",
    ),
]
PERMUTATION = [("= shuffle(key, ", "= jax.random.permutation(key, ")]
ARGSORT = [("= shuffle(key, num_samples)", "= jnp.argsort(jax.random.bits(key, (num_samples,)))")]
TIME_FIRST = [  # the loss reads [T, B, ...], so that the scan of the GRU needs no transposes
    (
        "minibatches = jax.tree.map(lambda x: x[rows], samples)  # [num_minibatches, B, ...]",
        "minibatches = jax.tree.map(lambda x: x[rows].swapaxes(1, 2), samples)",
    ),
    ("batch.hidden[:, 0], batch.reset)", "batch.hidden[0], batch.reset)"),
    (
        "jax.vmap(apply_fn, (None, 0, 0, 0))(params, *inputs)",
        "jax.vmap(apply_fn, (None, 1, 0, 1), 1)(params, *inputs)",
    ),
]
CHECKPOINT = [(SCAN_GRU, SCAN_GRU.replace("step,", "jax.checkpoint(step, prevent_cse=False),"))]
NO_HIDDEN = [  # the loss needs the first one only
    ("x._replace(next_obs=None)", "x._replace(next_obs=None, hidden=None)"),
    ("(hidden=rollout.hidden[:1])", "(hidden=state.runner.hidden[None])"),
]
IDEAS = {  # name: script, configuration, replacements
    "convolution, not a dense layer on patches (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        [
            (
                "dense(16, 2**0.5)(jnp.concatenate(patches, axis=-1))",
                'nn.Conv(16, (3, 3), padding="VALID")(obs.astype(jnp.float32))',
            )
        ],
    ),
    "convolutions, not dense layers on patches (Empty)": (
        "ppo_rnn",
        EMPTY,
        [
            (
                "dense(k * config.conv_size, 2**0.5, dtype)(jnp.concatenate(patches, -1))",
                'nn.Conv(k * config.conv_size, (2, 2), padding="VALID")(x)',
            ),
        ],
    ),
    "a linear embedding of 32 before the first convolution (Empty)": (
        "ppo_rnn",
        EMPTY,
        [(CONCATENATED, f"nn.Dense(32, use_bias=False)({CONCATENATED})")],
    ),
    "embedding as a lookup of 32 before the first convolution (Empty)": (
        "ppo_rnn",
        EMPTY,
        [
            (
                f"x = {CONCATENATED}",
                "constants = xminigrid.core.constants\n"
                "            tiles = nn.Embed(constants.NUM_TILES, 32)\n"
                "            colors = nn.Embed(constants.NUM_COLORS, 32)\n"
                "            x = tiles(obs.grid[..., 0]) + colors(obs.grid[..., 1])",
            )
        ],
    ),
    "a pass of the critic at every step, not only at time limits (Empty)": (
        "ppo_rnn",
        EMPTY,
        [
            (
                "jax.lax.fori_loop(0, jnp.int32((x.done & ~x.terminated).any()), once, x.value)",
                "critic(final)",
            )
        ],
    ),
    "inputs of the embedding and the GRU padded to multiples of 8 (GRU 1024)": (
        "ppo_rnn",
        GRU,
        [
            (CONCATENATED, f"jnp.pad({CONCATENATED}, [(0, 0)] * 3 + [(0, 7)])"),
            (
                INPUT_GATES,
                INPUT_GATES.replace("(x)", "(jnp.pad(x, [(0, 0), (0, -x.shape[1] % 8)]))"),
            ),
        ],
    ),
    "no bias on the recurrent part of the GRU (GRU 1024)": (
        "ppo_rnn",
        GRU,
        [("(new_h + bias)", "new_h")],
    ),
    "gates recomputed in the backward pass (GRU 1024)": ("ppo_rnn", GRU, CHECKPOINT),
    "gates recomputed in the backward pass (the default)": ("ppo_rnn", {}, CHECKPOINT),
    "hidden states not stored in the rollout (GRU 1024)": ("ppo_rnn", GRU, NO_HIDDEN),
    "hidden states not stored in the rollout (the default)": ("ppo_rnn", {}, NO_HIDDEN),
    "sequences with the time first in the loss (GRU 1024)": ("ppo_rnn", GRU, TIME_FIRST),
    "sequences with the time first in the loss (the default)": ("ppo_rnn", {}, TIME_FIRST),
    "GRU: input gates step by step, not in one product": (
        "ppo_rnn",
        EMPTY,
        [
            ("inputs = nn.Dense(3 * hidden.size, dtype=self.dtype)(", "inputs = ("),
            (
                "kernel = self.param(",
                'weights = self.param("w", nn.initializers.lecun_normal(),'
                " (x.shape[-1], 3 * hidden.size))\n"
                "        kernel = self.param(",
            ),
            ("jnp.split(inputs, 3)", "jnp.split(inputs @ weights, 3)"),
        ],
    ),
    "GRU: four steps unrolled": (
        "ppo_rnn",
        EMPTY,
        [(SCAN_GRU, SCAN_GRU.replace("reset))", "reset), unroll=4)"))],
    ),
    "jax.random.permutation, not shuffle (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        PERMUTATION,
    ),
    "argsort, not shuffle (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        ARGSORT,
    ),
    "jax.random.permutation, not shuffle (Pendulum)": (
        "ppo_continuous",
        {"num_envs": 64, "num_steps": 128, "num_minibatches": 8},
        PERMUTATION,
    ),
    "no pass of the critic over the true next observations (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        RESET_VALUE,
    ),
    "no pass of the critic over the true next observations (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        RESET_VALUE,
    ),
    "no pass of the critic over the true next observations (Breakout, the defaults)": (
        "ppo_ff",
        {"env_id": "Breakout-MinAtar"},
        RESET_VALUE,
    ),
    "no pass of the critic over the true next observations (Pendulum)": (
        "ppo_continuous",
        {"num_envs": 64, "num_steps": 128, "num_minibatches": 8},
        RESET_VALUE,
    ),
    "a pass of the critic only at time limits (CartPole)": ("ppo_ff", CARTPOLE, PASS_AT_LIMITS),
    "a pass of the critic only at time limits (Breakout, the defaults)": (
        "ppo_ff",
        {"env_id": "Breakout-MinAtar"},
        PASS_AT_LIMITS,
    ),
    "a pass of the critic only at time limits (Pendulum)": (
        "ppo_continuous",
        {"num_envs": 64, "num_steps": 128, "num_minibatches": 8},
        PASS_AT_LIMITS,
    ),
    "samples gathered minibatch by minibatch (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        GATHER,
    ),
    "samples gathered minibatch by minibatch (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        GATHER,
    ),
    "float32 observations, not bool (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        [("dtype = bool if", "dtype = float if")],
    ),
    "four steps of the rollout unrolled (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        [(ROLLOUT, ROLLOUT + ", unroll=4")],
    ),
    "two minibatches unrolled (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        [(MINIBATCHES, MINIBATCHES + ", unroll=2")],
    ),
    "rbg keys (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        [
            (
                'SCRIPT = "ppo_ff"',
                'SCRIPT = "ppo_ff"\njax.config.update("jax_default_prng_impl", "rbg")',
            )
        ],
    ),
    "rbg keys (DoorKey)": (
        "ppo_rnn",
        DOORKEY,
        [
            (
                'SCRIPT = "ppo_rnn"',
                'SCRIPT = "ppo_rnn"\njax.config.update("jax_default_prng_impl", "rbg")',
            )
        ],
    ),
    "no reset in the step: what a pool could save at most (DoorKey)": (
        "ppo_rnn",
        DOORKEY,
        [
            (
                "optax.tree.where(timestep.last(), reset(key), (next_obs, timestep))",
                "next_obs, timestep",
            )
        ],
    ),
}


def load(script, replacements):
    """The script as a module, with the replacements in its text."""
    source = (ROOT / f"{script}.py").read_text()
    for old, new in replacements:
        assert source.count(old) == 1, (script, old)
        source = source.replace(old, new)
    module = types.ModuleType(script)
    sys.modules[script] = module
    exec(compile(source, script, "exec"), vars(module))
    return module


def measure(name, steps, calls):
    """Prints steps/s of every timed call, of the script and of its variant."""
    from speed import make_long_call

    script, options, replacements = IDEAS[name]
    runs = []
    for changes in ([], replacements):
        module = load(script, changes)
        import jax

        _, config = make_long_call(script, options, steps)
        init, train, *_ = module.make_train(config)
        state = init(jax.random.split(jax.random.key(0), jax.local_device_count()))
        call_steps = config.updates_per_eval * config.batch_size
        runs.append([train.lower(state).compile(), state, call_steps, []])
    for _ in range(calls + 1):
        for run in runs:
            start = time.perf_counter()
            run[1], metrics = run[0](run[1])
            jax.block_until_ready((run[1], metrics))
            run[3].append(run[2] / (time.perf_counter() - start))
    print(json.dumps([rates[1:] for *_, rates in runs]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps per call")
    parser.add_argument("--calls", type=int, default=7, help="timed calls in each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes")
    parser.add_argument(
        "--only", default="", help="ideas whose name contains this, with | a choice"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args.steps, args.calls)
    print("| idea | script | with the idea | |\n|---|---|---|---|", flush=True)
    for name in [name for name in IDEAS if re.search(args.only, name)]:
        command = [sys.executable, "-W", "ignore", __file__, "--measure", name]
        command += ["--steps", str(args.steps), "--calls", str(args.calls)]
        plain, changed = [], []
        for _ in range(args.rounds):
            result = subprocess.run(command, env=os.environ, capture_output=True, text=True)
            if result.returncode:
                break
            for rates, more in zip((plain, changed), json.loads(result.stdout), strict=True):
                rates += more
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["killed"])[-1]
            print(f"| {name} | {last} |", flush=True)
            continue
        spans = [
            f"{statistics.median(x):,.0f} ({min(x):,.0f} – {max(x):,.0f})" for x in (plain, changed)
        ]
        ratio = statistics.median(changed) / statistics.median(plain)
        print(f"| {name} | {spans[0]} | {spans[1]} | {ratio:.2f} × |", flush=True)


if __name__ == "__main__":
    main()
