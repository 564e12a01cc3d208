"""What the files of this folder share: running a script on their environments, and lazy resets."""

import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # the scripts of this clone
COMMAND = ["python", *sys.argv]  # printed on Ctrl-C; the script's `main` adds the run folder


def stop_on_interrupt():
    """Ctrl-C ends the process at once, even during an import or inside a compiled program."""
    signal.sigwait([signal.SIGINT])
    print("\ninterrupted; to continue:", shlex.join(COMMAND), file=sys.stderr, flush=True)
    os._exit(130)


if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent:  # a command
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # here and in all later threads
    threading.Thread(target=stop_on_interrupt, daemon=True).start()


def missing(library: str, package: str):
    print(f"error: {library} is missing: pip install {package}", file=sys.stderr)
    sys.exit(2)


def adapt(script, file: str, config_class, make_env):
    """Makes `script`, an imported module, train on the environments of `file`.

    Its runs are named by the file, and keep the sources of both.
    """
    for options in (*config_class.__bases__, config_class):  # Environment, ..., Config
        setattr(script, options.__name__, options)
    script.make_env, script.COMMAND = make_env, COMMAND
    script.SCRIPT = Path(file).stem
    script.SOURCES.append(file)


def lazy(reset, share: int = 32):
    """Returns restart(done, key, continued): reset(key) where an episode is done, else `continued`.

    For a single environment. It equals optax.tree.where(done, reset(key), continued), but its rule
    for vmap resets only environments that are done, 1/share of them at a time. That pays where a
    reset costs more than some steps: a whole world is generated, or physics are initialized.
    """

    @jax.custom_batching.custom_vmap
    def restart(done, key, continued):
        return jax.lax.cond(done, lambda: reset(key), lambda: continued)

    @restart.def_vmap
    def restart_all(size, batched, *args):
        whole = lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x)))
        expand = lambda x, is_batched: x if is_batched else whole(x)
        done, key, continued = jax.tree.map(expand, args, tuple(batched))

        def reset_some(carry):
            done, continued = carry
            # Indices of environments to reset. Spare ones are `size`, which is out of bounds.
            indices = jnp.nonzero(done, size=-(-size // share), fill_value=size)[0]
            fresh = jax.vmap(reset)(key.at[indices].get(mode="clip"))
            put = lambda x, new: x.at[indices].set(new, mode="drop")
            return put(done, False), jax.tree.map(put, continued, fresh)

        unfinished = lambda carry: carry[0].any()
        _, continued = jax.lax.while_loop(unfinished, reset_some, (done, continued))
        return continued, jax.tree.map(lambda _: True, continued)

    return restart
