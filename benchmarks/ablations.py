"""What learning.py measures as ablations: each changes one detail of a script.

A change is a string of options, or a list of replacements (old, new) in the script's text, each of
which must occur exactly once.
"""

ADVANTAGE = """\
        # Mean, variance and gradient span all devices.
        advantage -= pmean(advantage.mean())
        advantage /= jnp.sqrt(pmean((advantage**2).mean())) + 1e-8
"""
NEXT_VALUE = "next_value = jax.vmap(jax.vmap(critic))(rollout.next_obs)  # [T, N]"
RESET_VALUE = """\
last_value = jax.vmap(critic)(runner.obs)  # [N]
        next_value = jnp.concatenate([rollout.value[1:], last_value[None]])"""
STEPS = "steps = (rollout.reward, rollout.value, next_value, rollout.terminated, rollout.done)"
KERNEL = "kernel_init=nn.initializers.orthogonal(scale)"
ENT_COEF = "ent_coef = config.ent_coef * (1 - state.update / config.num_updates)"
OBS = "obs = jnp.clip((obs - moments.mean) / jnp.sqrt(moments.var + 1e-8), -10, 10)\n"

PPO = {
    "time limits are terminations": [(STEPS, STEPS.replace("terminated", "done"))],
    "value of the observation after the reset": [(NEXT_VALUE, RESET_VALUE)],
    "no advantage normalization": [(ADVANTAGE, "")],
    "default initialization of flax": [(KERNEL, "kernel_init=nn.initializers.lecun_normal()")],
    "constant learning rate": "--no-anneal-lr",
    "value clipping": "--clip-value",
    "Adam epsilon 1e-8": [("eps=1e-5", "eps=1e-8")],
    "target KL 0.02": "--target-kl 0.02",
}
CNN = {"no layer normalization": [("nn.LayerNorm(use_bias=False, use_scale=False)(x)", "x")]}
ENTROPY = {"constant entropy bonus of 0.01": [(ENT_COEF, "ent_coef = 0.01")]}
NORMALIZATION = {
    "no reward scaling": "--no-normalize-reward",
    "no observation statistics": [(OBS, "obs = 1.0 * obs\n")],
}
MEMORY = {
    "hidden state kept across episodes": [
        ("reset=runner.done,", "reset=runner.done & False,"),
        ("(runner.obs, runner.done))", "(runner.obs, runner.done & False))"),
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
