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
MINATAR = {"env_id": "Breakout-MinAtar", "hidden_size": 128, "lr": 7e-3}
BREAKOUT = {**CARTPOLE, **MINATAR}
EMPTY = {"num_envs": 256, "num_minibatches": 8, "embedding_size": 0, "conv_size": 16}
GRU = {"num_envs": 256, "num_steps": 16, "num_minibatches": 4}
GRU |= {"hidden_size": 1024, "head_size": 256}
DOORKEY = {"env_id": "MiniGrid-DoorKey-5x5"}

CONCATENATED = "jnp.concatenate([tile, color], axis=-1)"
SCAN_GRU = "return jax.lax.scan(step, hidden, (x, reset), unroll=unroll)[1]"
INPUT_GATES = "x = nn.Dense(3 * size, dtype=self.dtype)(x)"
ROLLOUT = "jax.lax.scan(act_all, state.runners, None, config.num_steps"
MINIBATCHES = "jax.lax.scan(update_minibatch, carry, minibatches"
GATHER = [
    (
        "minibatches = jax.tree.map(lambda x: x[indices], samples)",
        "gather = lambda c, r: update_minibatch(c, jax.tree.map(lambda x: x[r], samples))",
    ),
    (MINIBATCHES, "jax.lax.scan(gather, carry, indices"),
]
RESET_VALUE = ablations.PPO["value of the observation after the reset"]
PASS_AT_LIMITS = [
    (
        "            return jax.vmap(act, (None, 0))(state.params, runners)",
        """\
            runners, x = jax.vmap(act, (None, 0))(state.params, runners)
            once = lambda _, value: critic(jax.lax.optimization_barrier((x, value))[0])
            value = jax.lax.fori_loop(0, jnp.int32((x.done & ~x.terminated).any()), once, x.value)
            return runners, (x._replace(next_obs=None), value)""",
    ),
    (
        "        def act_all(runners, _):",
        """\
        critic = lambda x: network.apply(state.params, x.next_obs)[1]

        def act_all(runners, _):""",
    ),
    ("runners, rollout = jax.lax.scan(", "runners, (rollout, end_value) = jax.lax.scan("),
    (
        ablations.NEXT_VALUE,
        """next_value = network.apply(state.params, runners.obs)[1][None]
        next_value = jnp.concatenate([rollout.value[1:], next_value])
        next_value = jnp.where(rollout.done, end_value, next_value)""",
    ),
]
PASS_AT_EVERY_STEP_RNN = [
    (
        "jax.lax.cond(truncated.any(), critic, skip, *final)",
        "critic(*final)",
    ),
]
ADAM_ON_EACH = [
    ("grads, unravel = ravel_pytree(grads)", "unravel = lambda tree: tree"),
    ("jnp.linalg.norm(grads)", "optax.tree.norm(grads)"),
    ("-lr * updates", "optax.tree.scale(-lr, updates)"),
    ("optimizer.init(ravel_pytree(params)[0])", "optimizer.init(params)"),
]
FOUR_ENVS = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
PERMUTATION = [
    (
        "indices = jnp.argsort(bits)",
        "indices = jax.vmap(lambda key: jax.random.permutation(key, num_samples))(bits[:, :2])",
    )
]
# The index in the low digits of a random number: one array is sorted, not a pair.
ONE_ARRAY = [
    (
        "indices = jnp.argsort(bits)",
        """\
multiples = (bits >> 1) // num_samples * num_samples
        rows = jnp.arange(num_samples, dtype=jnp.uint32)
        indices = (jnp.sort(multiples + rows) % num_samples)""",
    )
]
CHECKPOINT = [(SCAN_GRU, SCAN_GRU.replace("step,", "jax.checkpoint(step, prevent_cse=False),"))]
BANNER = "# ----------------------------------------- config\n"
RBG = [(BANNER, f'jax.config.update("jax_default_prng_impl", "rbg")\n\n\n{BANNER}')]
IDEAS = {  # name: script, configuration, replacements
    "convolution, not a dense layer on patches (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        [
            (
                "dense(16)(jnp.concatenate(patches, axis=-1).astype(jnp.float32))",
                'nn.Conv(16, (3, 3), padding="VALID")(x.astype(jnp.float32))',
            )
        ],
    ),
    "convolutions, not dense layers on patches (Empty)": (
        "ppo_rnn",
        EMPTY,
        [
            (
                "dense(width * config.conv_size, 2**0.5, dtype)(jnp.concatenate(patches, -1))",
                'nn.Conv(width * config.conv_size, (2, 2), padding="VALID")(x)',
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
    "a pass of the critic at every step (Empty)": ("ppo_rnn", EMPTY, PASS_AT_EVERY_STEP_RNN),
    "inputs of the embedding and the GRU padded to multiples of 8 (GRU 1024)": (
        "ppo_rnn",
        GRU,
        [
            (CONCATENATED, f"jnp.pad({CONCATENATED}, [(0, 0)] * (tile.ndim - 1) + [(0, 7)])"),
            (
                INPUT_GATES,
                "x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])\n"
                f"        {INPUT_GATES}",
            ),
        ],
    ),
    "no bias on the recurrent part of the GRU (GRU 1024)": (
        "ppo_rnn",
        GRU,
        [("(n_h + bias)", "n_h")],
    ),
    "gates recomputed in the backward pass (GRU 1024)": ("ppo_rnn", GRU, CHECKPOINT),
    "gates recomputed in the backward pass (the default)": ("ppo_rnn", {}, CHECKPOINT),
    "GRU: input gates step by step, not in one product": (
        "ppo_rnn",
        EMPTY,
        [
            (INPUT_GATES, "x = jnp.asarray(x, self.dtype)"),
            (
                "kernel = self.param(",
                'weights = self.param("w", nn.initializers.lecun_normal(),'
                " (x.shape[-1], 3 * size))\n"
                "        kernel = self.param(",
            ),
            ("jnp.split(x, 3, axis=-1)", "jnp.split(x @ weights, 3, axis=-1)"),
        ],
    ),
    "GRU: four steps unrolled": (
        "ppo_rnn",
        EMPTY,
        [(SCAN_GRU, SCAN_GRU.replace("unroll=unroll", "unroll=4"))],
    ),
    "jax.random.permutation, not argsort (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        PERMUTATION,
    ),
    "jax.random.permutation, not argsort (Pendulum)": (
        "ppo_continuous",
        {"num_envs": 64, "num_steps": 128, "num_minibatches": 8},
        PERMUTATION,
    ),
    "one array sorted, not argsort (CartPole)": ("ppo_ff", CARTPOLE, ONE_ARRAY),
    "one array sorted, not argsort (Pendulum)": (
        "ppo_continuous",
        {"num_envs": 64, "num_steps": 128, "num_minibatches": 8},
        ONE_ARRAY,
    ),
    "one array sorted, not argsort (simple_spread)": (
        "ippo",
        {"env_id": "MPE_simple_spread_v3"},
        ONE_ARRAY,
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
        MINATAR,
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
        MINATAR,
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
    "Adam on each array, not on one vector (CartPole, 4 environments)": (
        "ppo_ff",
        FOUR_ENVS,
        ADAM_ON_EACH,
    ),
    "Adam on each array, not on one vector (CartPole)": ("ppo_ff", CARTPOLE, ADAM_ON_EACH),
    "Adam on each array, not on one vector (Breakout)": ("ppo_ff", BREAKOUT, ADAM_ON_EACH),
    "GAE step by step, not unrolled (CartPole)": (
        "ppo_ff",
        CARTPOLE,
        [("reverse=True, unroll=8)", "reverse=True)")],
    ),
    "float32 observations, not bool (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        [("return obs.astype(bool)", "return obs.astype(jnp.float32)")],
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
    "rbg keys (CartPole)": ("ppo_ff", CARTPOLE, RBG),
    "rbg keys (DoorKey)": ("ppo_rnn", DOORKEY, RBG),
    "no reset in the step: what a pool could save at most (DoorKey)": (
        "ppo_rnn",
        DOORKEY,
        [
            (
                "optax.tree.where(done, reset(key), (next_obs, timestep))",
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
        state = init(jax.random.split(jax.random.PRNGKey(0), jax.local_device_count()))
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
            measured = json.loads(result.stdout.splitlines()[-1])  # environments print, too
            for rates, more in zip((plain, changed), measured, strict=True):
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
