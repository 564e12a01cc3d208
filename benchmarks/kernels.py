"""Counts the kernels that a GPU runs for one update of a script. Needs no GPU.

    pip install 'jax[cuda13]'
    python benchmarks/kernels.py > kernels.md
    python benchmarks/kernels.py --peers purejaxrl=DIR    # beside PureJaxRL; see peers.md

At the sizes at which people train small networks, a GPU waits for the next kernel most of the time,
so that their number decides. XLA's CUDA plugin compiles for a GPU that is only described to it
(H100 below). This script compiles a call of 100 updates that way and walks through the optimized
program: a fusion, a copy, a matrix product or a sort is one kernel, a loop as many as its body
times its trips. On an H100, a profile of commit 3f86b3f counted 428,737 kernels in such a call of
`ppo_ff.py` on CartPole, and 330,375 in PureJaxRL's; this script says 424,950 (without evaluation)
and 328,960.

What it cannot tell: how long a kernel takes, whether two run at the same time, what XLA's search
for the fastest matrix product would choose, and how often a loop without a fixed length repeats: an
evaluation is left out. A sort counts as one kernel; on a real GPU it is several.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections import Counter, namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

UPDATES = 100
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
"""
CARTPOLE = {"num_envs": 2048, "num_steps": 32, "num_minibatches": 8, "update_epochs": 4}
SAME_SIZES = {"num_envs": 2048, "num_steps": 32, "num_minibatches": 8}
PROGRAMS = {  # the row: script, configuration
    "CartPole-v1": ("ppo_ff", CARTPOLE),
    "CartPole-v1, DPO": ("ppo_drift", {**CARTPOLE, "drift": "dpo"}),
    "Breakout-MinAtar": ("ppo_ff", {**CARTPOLE, "env_id": "Breakout-MinAtar"}),
    "Pendulum-v1": ("ppo_continuous", SAME_SIZES),
    "Pendulum-v1, normalized": ("ppo_obs_norm", SAME_SIZES),
    "Pendulum-v1, V-trace": ("ppo_vtrace", SAME_SIZES),
    "Empty-6x6": ("ppo_rnn", {"num_envs": 8192, "update_epochs": 2}),  # one is no loop
    "MemoryS8, trials": ("ppo_meta", {"num_envs": 8192, "update_epochs": 2}),
    "rings": ("ippo", SAME_SIZES),
    "rings, memory": ("ippo_rnn", SAME_SIZES),
    "rings, memory and world": ("mappo", SAME_SIZES),
}
PEER = {"ENV_NAME": "CartPole-v1", "NUM_ENVS": 2048, "NUM_STEPS": 32, "NUM_MINIBATCHES": 8}
# What follows ` = type ` in a line of a program.
OPERATION = re.compile(r" = (?:\((?:[^()]|\([^()]*\))*\)|\S+) ([\w\-]+)\(")
FREE = {  # runs nothing
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
Loop = namedtuple("Loop", "trips kernels loops")  # kernels: of one trip, by kind, no inner loops


def our_program(script: str, options: dict, sharding):
    """The lowered `train_seed` of a script: 100 updates of one seed, then an evaluation."""
    module = importlib.import_module(script)
    jax.default_backend = lambda: "gpu"  # decides how far the GRU is unrolled
    config = module.Config(**options)
    steps = UPDATES * config.batch_size
    config = module.Config(**options, total_timesteps=steps, num_evals=1, eval_episodes=1)
    init, _, _, train_seed = module.make_train(config)
    of_one_seed = lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype, sharding=sharding)
    state = jax.tree.map(of_one_seed, jax.eval_shape(init, jax.random.split(jax.random.key(0), 1)))
    spec = PartitionSpec()
    one_device = jax.shard_map(
        train_seed, mesh=sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(one_device, donate_argnums=0).lower(state)


def peer_program(path: str, sharding):
    import peers

    options = {**PEER, "TOTAL_TIMESTEPS": UPDATES * PEER["NUM_ENVS"] * PEER["NUM_STEPS"]}
    make_train, config = peers.purejaxrl_trainer(path, {**options, "UPDATE_EPOCHS": 4})
    train = jax.jit(make_train(config), in_shardings=sharding, out_shardings=sharding)
    return train.lower(jax.ShapeDtypeStruct((2,), jnp.uint32))


def parse(text: str) -> dict:
    """Name of a computation -> its lines; "ENTRY" is the program."""
    computations, lines = {}, None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head:
            lines = computations[head[2]] = []
            if head[1]:
                computations["ENTRY"] = lines
        elif lines is not None and " = " in line:
            lines.append(line)
    return computations


def count(computations: dict, name: str, trips=1) -> Loop:
    """What a computation runs."""
    kernels, loops = Counter(), []
    for line in computations[name]:
        operation = OPERATION.search(line)[1]
        called = re.search(r"(?:body|calls|to_apply)=%?([\w.\-]+)", line)
        if operation == "while":
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            loop = count(computations, called[1], int(known[1]) if known else None)
            loop.kernels["condition of a loop"] += 1
            loops.append(loop)
        elif operation in ("call", "async-start"):
            inner = count(computations, called[1])
            kernels += inner.kernels
            loops += inner.loops
        elif operation == "fusion":
            last = OPERATION.search(computations[called[1]][-1])[1]
            kernels["write into an array" if last == "dynamic-update-slice" else "other"] += 1
        elif operation not in FREE and not operation.endswith("-done"):
            kernels["copy" if operation == "copy" else "other"] += 1
    return Loop(trips, kernels, loops)


def total(loop: Loop) -> Counter:
    """Kernels of one trip by kind, with those of inner loops of known length."""
    kernels = Counter(loop.kernels)
    for inner in loop.loops:
        for kind, number in total(inner).items():
            kernels[kind] += number * (inner.trips or 0)
    return kernels


def row(title: str, name: str, lowered) -> str:
    program = count(parse(lowered.compile().as_text()), "ENTRY")
    update = max((x for x in program.loops if x.trips == UPDATES), key=lambda x: total(x).total())
    all_, inner = total(update), sorted(update.loops, key=lambda x: -total(x).total())
    epochs = next(x for x in inner if x.loops)
    rollout = next(x for x in inner if not x.loops)
    cells = [all_.total(), all_["write into an array"], all_["copy"]]
    cells += [total(rollout).total(), total(epochs.loops[0]).total()]
    return f"| {title} | {name} | " + " | ".join(f"{x:,}" for x in cells) + " |"


def measure(title: str, peers: dict) -> str:
    """The row of a program. The flags are read when JAX first asks for devices."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1")
    mesh = Mesh(np.array(topology.devices[:1]), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec())
    if title in peers:
        return row("CartPole-v1", title, peer_program(peers[title], sharding))
    script, options = PROGRAMS[title]
    return row(title, f"`{script}.py`", our_program(script, options, sharding))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="*", default=[], metavar="purejaxrl=DIR")
    parser.add_argument("--only", default="", help="rows that match this regular expression")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one row, in a process of its own
    args = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in args.peers)
    if args.measure:
        return print(measure(args.measure, peers))
    print("| work | program | kernels per update | of them write into an array | copies |", end="")
    print(" in a step of the rollout | in a minibatch |\n|---|---|---|---|---|---|---|", flush=True)
    for title in filter(re.compile(args.only).search, [*PROGRAMS, *peers]):
        command = [sys.executable, "-W", "ignore", __file__, "--measure", title]
        output = subprocess.run(
            [*command, "--peers", *args.peers], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        print(output.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
