"""What learning.py measures as ablations: each changes one detail of a script.

A change is a string of options, or a list of replacements (old, new) in the script's text, each of
which must occur exactly once.
"""

ADVANTAGE = """\
            advantage -= pmean(advantage.mean())
            advantage /= jnp.sqrt(pmean((advantage**2).mean())) + 1e-8
"""
NEXT_VALUE = "_, next_value = network.apply(state.params, rollout.next_obs)"
RESET_VALUE = """\
_, last_value = network.apply(state.params, runners.obs)  # [N]
        next_value = jnp.concatenate([rollout.value[1:], last_value[None]])"""
BOOTSTRAP = "jnp.where(rollout.terminated, 0, next_value)"
KERNEL = "kernel_init=nn.initializers.orthogonal(scale)"
EPOCH = "            return jax.lax.scan(update_minibatch, carry, minibatches)\n"
TARGET_KL = """\
            updated, metrics = jax.lax.scan(update_minibatch, carry, minibatches)
            _, moved = ppo_loss(carry[0], network, *samples, 0, config)
            stop = pmean(moved["policy/approx_kl"]) > 0.02
            return optax.tree.where(stop, carry, updated), metrics
"""

PPO = {
    "time limits are terminations": [(BOOTSTRAP, BOOTSTRAP.replace("terminated", "done"))],
    "value of the observation after the reset": [(NEXT_VALUE, RESET_VALUE)],
    "no advantage normalization": [(ADVANTAGE, "")],
    "default initialization of flax": [(KERNEL, "kernel_init=nn.initializers.lecun_normal()")],
    "constant learning rate": "--no-anneal-lr",
    "value clipping": "--clip-value",
    "Adam epsilon 1e-8": [("eps=1e-5", "eps=1e-8")],
    "target KL 0.02": [(EPOCH, TARGET_KL)],  # as in docs/details.md
}
CNN = {"no layer normalization": [("nn.LayerNorm(use_bias=False, use_scale=False)(x)", "x")]}
ENTROPY = {"constant entropy bonus of 0.01": "--no-anneal-ent --ent-coef 0.01"}
NORMALIZATION = {
    "no reward scaling": "--no-normalize-reward",
    "no observation statistics": "--no-normalize-obs",
}
MEMORY = {
    "hidden state kept across episodes": [
        ("reset=runner.done,", "reset=runner.done & False,"),
        ("runner.hidden, runner.done)", "runner.hidden, runner.done & False)"),
    ],
    "no memory": "--no-memory",
}


def change_text(text: str, replacements: list[tuple[str, str]]) -> str:
    """Raises ValueError if a replacement's old text does not occur exactly once."""
    for old, new in replacements:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times in the script: {old}")
        text = text.replace(old, new)
    return text
