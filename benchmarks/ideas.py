"""Ideas for speed, each measured alone: a script beside itself with a few lines changed.

    python benchmarks/ideas.py                       # all of them
    python benchmarks/ideas.py --only GRU --rounds 5

Every idea is a list of replacements in the text of a script. Both programs take turns in one
process, `--calls` timed calls of each after one to warm up; `--rounds` processes. Prints a row for
each idea: steps/s of the script, steps/s with the idea, the ratio of the medians.
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

CARTPOLE = {"num_envs": 64, "num_steps": 128, "num_minibatches": 8, "hidden_size": 64}
BREAKOUT = {**CARTPOLE, "env_id": "Breakout-MinAtar", "hidden_size": None}
EMPTY = {"num_envs": 256, "num_minibatches": 8, "embedding_size": 32, "conv_size": 16}
GRU128 = {"num_envs": 1024, "hidden_size": 128}
DOORKEY = {"env_id": "MiniGrid-DoorKey-5x5"}

ONE_PRODUCT = """

def cell(previous, gates, inputs, bias):
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = (
        jnp.split(x, 3, axis=-1) for x in (inputs, gates)
    )
    update = nn.sigmoid(update_x + update_h)
    new = jnp.tanh(new_x + nn.sigmoid(reset_x + reset_h) * (new_h + bias))
    return (1 - update) * new + update * previous


def forward(kernel, bias, hidden, inputs, reset):
    def step(hidden, x):
        inputs, reset = x
        previous = jnp.where(reset[:, None], 0, hidden)
        gates = previous @ kernel
        hidden = cell(previous, gates, inputs, bias)
        return hidden, (hidden, previous, gates)

    _, (output, previous, gates) = jax.lax.scan(step, hidden, (inputs, reset))
    return output, (kernel, bias, previous, gates, inputs, reset)


def backward(saved, grad):
    kernel, bias, previous, gates, inputs, reset = saved

    def step(later, x):
        grad, previous, gates, inputs, reset = x
        _, pull = jax.vjp(cell, previous, gates, inputs, bias)
        d_previous, d_gates, d_inputs, d_bias = pull(grad + later)
        d_previous = (d_previous + d_gates @ kernel.T) * ~reset[:, None]
        return d_previous, (d_gates, d_inputs, d_bias)

    steps = (grad, previous, gates, inputs, reset)
    d_hidden, (d_gates, d_inputs, d_bias) = jax.lax.scan(
        step, jnp.zeros_like(grad[0]), steps, reverse=True
    )
    d_kernel = jnp.einsum("tbh,tbg->hg", previous, d_gates)  # one product for all steps
    return d_kernel, d_bias.sum(0), d_hidden, d_inputs, np.zeros(reset.shape, jax.dtypes.float0)


unroll = jax.custom_vjp(lambda *args: forward(*args)[0])
unroll.defvjp(forward, backward)


class GRU("""

SCAN_GRU = "return jax.lax.scan(step, hidden, (inputs, reset))[1]"
ROLLOUT = "jax.lax.scan(rollout_step, state, None, config.num_steps"
MINIBATCHES = "jax.lax.scan(update_minibatch, state._replace(key=key), minibatches"
GATHER = [
    (
        "minibatches = jax.tree.map(lambda x: x[rows], samples)",
        "gather = lambda s, r: update_minibatch(s, jax.tree.map(lambda x: x[r], samples))",
    ),
    (MINIBATCHES, "jax.lax.scan(gather, state._replace(key=key), rows"),
]
IDEAS = {  # name: script, configuration, replacements
    "convolution, not a dense layer on patches (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        [("dense(16, 2**0.5)(patches(x, 3))", 'nn.Conv(16, (3, 3), padding="VALID")(x)')],
    ),
    "convolutions, not dense layers on patches (Empty)": (
        "ppo_rnn",
        EMPTY,
        [
            (
                "dense(factor * config.conv_size, 2**0.5, dtype)(patches(x, 2))",
                'nn.Conv(factor * config.conv_size, (2, 2), padding="VALID")(x)',
            )
        ],
    ),
    "embedding as a look-up, not as a product": (
        "ppo_rnn",
        EMPTY,
        [
            (
                "return embed(jnp.concatenate([tile, color], axis=-1))",
                "size = self.config.embedding_size\n"
                "        tiles, colors = nn.Embed(NUM_TILES, size), nn.Embed(NUM_COLORS, size)\n"
                "        return tiles(grid[..., 0]) + colors(grid[..., 1])",
            )
        ],
    ),
    "one-hot straight into the first convolution": (
        "ppo_rnn",
        EMPTY,
        [("return embed(jnp.con", "return (jnp.con")],
    ),
    "GRU: input gates step by step, not in one product": (
        "ppo_rnn",
        EMPTY,
        [
            (
                "inputs = nn.Dense(3 * size, dtype=self.dtype)(x)",
                'inputs, weights = x, self.param("w", nn.initializers.lecun_normal(),'
                " (x.shape[-1], 3 * size))",
            ),
            ("jnp.split(inputs, 3, axis=-1)", "jnp.split(inputs @ weights, 3, axis=-1)"),
        ],
    ),
    "GRU: weight gradient in one product (GRU 64, 256 envs)": (
        "ppo_rnn",
        EMPTY,
        [
            ("\n\nclass GRU(", ONE_PRODUCT),
            (SCAN_GRU, "return unroll(kernel, bias, hidden, inputs, reset)"),
        ],
    ),
    "GRU: weight gradient in one product (GRU 128, 1024 envs)": (
        "ppo_rnn",
        GRU128,
        [
            ("\n\nclass GRU(", ONE_PRODUCT),
            (SCAN_GRU, "return unroll(kernel, bias, hidden, inputs, reset)"),
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
        [("= shuffle(shuffle_key, ", "= jax.random.permutation(shuffle_key, ")],
    ),
    "jax.random.permutation, not shuffle (Pendulum)": (
        "ppo_continuous",
        {"num_envs": 64, "num_steps": 128, "num_minibatches": 8},
        [("= shuffle(shuffle_key, ", "= jax.random.permutation(shuffle_key, ")],
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
    "float32 observations kept, not bools (Breakout)": (
        "ppo_ff",
        BREAKOUT,
        [("obs.astype(bool) if", "obs.astype(float) if")],
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
        [("first_obs, fresh = reset(key)", "first_obs, fresh = final_obs, timestep")],
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
    script, options, replacements = IDEAS[name]
    runs = []
    for changes in ([], replacements):
        module = load(script, changes)
        import jax

        config = module.Config(**{"total_timesteps": 10**9, **options})
        updates = max(1, steps // config.batch_size)
        init, train = module.make_train(config, updates)
        keys = jax.random.split(jax.random.key(0), jax.local_device_count())
        state = init(keys)
        runs.append([train.lower(state).compile(), state, updates * config.batch_size, []])
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
            print(f"| {name} | {result.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        spans = [
            f"{statistics.median(x):,.0f} ({min(x):,.0f} – {max(x):,.0f})" for x in (plain, changed)
        ]
        ratio = statistics.median(changed) / statistics.median(plain)
        print(f"| {name} | {spans[0]} | {spans[1]} | {ratio:.2f} × |", flush=True)


if __name__ == "__main__":
    main()
