"""The discovered rule, the agent that it teaches, and meta-training, in NumPy.

Written from a description of the original code and not from the scripts, which it checks: the
agent's gradient is by hand, devices are a list, and the meta-gradient comes from finite
differences. `weights` are the arrays of an npz file of disco.py, and layers of an agent are
{"kernel", "bias"} by name. A batch has the fields of disco.Transition: arrays [T + 1, B, ...], of
which the last step only bootstraps.
"""

from typing import Any, NamedTuple

import numpy as np

BINS = np.arange(-300.0, 301.0)
EMBEDDINGS, LIFETIME_EMBEDDINGS = "lstm", "lstm/~/meta_lstm/~unroll"


# ------------------------------------------ pieces
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def softmax(x):
    return np.exp(log_softmax(x))


def kl_divergence(p, q):
    """Of logits [..., n]."""
    return (softmax(p) * (log_softmax(p) - log_softmax(q))).sum(-1)


def entropy(logits):
    return -(softmax(logits) * log_softmax(logits)).sum(-1)


def signed_log(x):
    return np.sign(x) * np.log(1 + np.abs(x))


def squash(x):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


def unsquash(x):
    u = (np.sqrt(1 + 4e-3 * (1e-3 + 1 + np.abs(x))) - 1) / 2e-3
    return np.sign(x) * (u**2 - 1)


def two_hot(x):
    """[...] -> [..., 601], with 1e-5 of the original in the denominator."""
    x = np.clip(x, -300, 300)
    low, high = np.floor(x), np.ceil(x)
    weight = (high - x) / (high - low + 1e-5)
    is_at = lambda bin: (BINS == bin[..., None]).astype(float)
    return weight[..., None] * is_at(low) + (1 - weight[..., None]) * is_at(high)


def take(x, action):
    """x [T, B, A, ...], action [T, B] -> [T, B, ...]"""
    return x[np.arange(len(x))[:, None], np.arange(x.shape[1]), action]


def pair(x):
    """[T + 1, B] -> this step and the next [T, B, 2]"""
    return np.stack([x[:-1], x[1:]], -1)


def tree(function, first, *rest):
    """Of nested dictionaries."""
    if isinstance(first, dict):
        return {name: tree(function, first[name], *(x[name] for x in rest)) for name in first}
    return function(first, *rest)


def mean_tree(trees):
    return tree(lambda *x: sum(x) / len(x), *trees)


class Held:
    """In place of stop_gradient: what it is given in the first pass, it returns in all others."""

    def __init__(self):
        self.values, self.position = [], None

    def rewind(self):
        self.position = 0

    def __call__(self, x):
        if self.position is None:
            self.values.append(x)
            return x
        self.position += 1
        return self.values[self.position - 1]


def moving(x):
    """Nothing is held."""
    return x


# ------------------------------------------- agent
def lstm(gates, cell):
    """gates [..., 4 H] in the order input, candidate, forget, output -> hidden, cell"""
    i, g, f, o = np.split(gates, 4, -1)
    cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(cell), cell


class Network:
    """The outputs of an agent for observations [..., F], and the gradient of its layers."""

    def __init__(self, layers, obs):
        self.layers = layers
        self.num_actions = layers["logits"]["bias"].size
        self.obs = np.asarray(obs, float)
        self.hidden = relu(self.dense("torso_0", self.obs))
        self.features = self.dense("torso_1", self.hidden)
        self.logits, self.y, cell = (
            self.dense(name, self.features) for name in ("logits", "y", "cell")
        )
        axes, size = cell.shape[:-1], cell.shape[-1]
        self.cell = np.broadcast_to(cell[..., None, :], (*axes, self.num_actions, size))
        actions = np.broadcast_to(np.eye(self.num_actions), (*axes, *2 * [self.num_actions]))
        self.gate_input = np.concatenate([actions, np.tanh(self.cell)], -1)
        self.gates = self.dense("gates", self.gate_input)
        self.state, self.new_cell = lstm(self.gates, self.cell)
        self.branches = {
            name: relu(self.dense(f"{name}_0", self.state)) for name in ("z", "aux_pi", "q")
        }
        self.z, self.aux_pi, self.q = (
            self.dense(f"{name}_1", x) for name, x in self.branches.items()
        )

    def dense(self, name, x):
        return x @ self.layers[name]["kernel"] + self.layers[name]["bias"]

    def gradient(self, outputs):
        """From the gradients of the outputs, by name: those of the layers."""
        grads = {}

        def back(name, x, grad):
            """Keeps the gradient of a layer and returns that of its input x."""
            rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            grads[name] = {"kernel": rows.T @ grad_rows, "bias": grad_rows.sum(0)}
            return grad @ self.layers[name]["kernel"].T

        state = 0
        for name, branch in self.branches.items():
            hidden = back(f"{name}_1", branch, outputs[name]) * (branch > 0)
            state = state + back(f"{name}_0", self.state, hidden)
        i, g, f, o = np.split(self.gates, 4, -1)
        i, g, f, o = sigmoid(i), np.tanh(g), sigmoid(f + 1), sigmoid(o)
        squashed = np.tanh(self.new_cell)
        new_cell = state * o * (1 - squashed**2)
        gates = [
            new_cell * g * i * (1 - i),
            new_cell * i * (1 - g**2),
            new_cell * self.cell * f * (1 - f),
            state * squashed * o * (1 - o),
        ]
        previous = back("gates", self.gate_input, np.concatenate(gates, -1))
        previous = previous[..., self.num_actions :]
        cell = new_cell * f + previous * (1 - np.tanh(self.cell) ** 2)
        features = back("cell", self.features, cell.sum(-2))
        features = features + back("logits", self.features, outputs["logits"])
        features = features + back("y", self.features, outputs["y"])
        back("torso_0", self.obs, back("torso_1", self.hidden, features) * (self.hidden > 0))
        return grads


# -------------------------------------------- rule
class Moments(NamedTuple):
    """Moving averages of x and x ** 2."""

    mean: Any
    square: Any
    decay_product: Any

    def add(self, xs, decay):
        """xs: one array per device."""
        means = np.mean([x.mean() for x in xs]), np.mean([(x**2).mean() for x in xs])
        new = (decay * old + (1 - decay) * x for old, x in zip(self[:2], means, strict=True))
        return Moments(*new, decay * self.decay_product)

    def center_and_scale(self):
        mean, square = (x / (1 - self.decay_product) for x in self[:2])
        return mean, np.sqrt(max(0.0, square - mean**2) + 1e-12) + 1e-6


def compute_values(online, target, batch, config):
    """Of the networks' outputs. Values are weighted by the online policy."""
    action, done = batch.action, batch.done
    policy = softmax(online.logits)
    q, target_q = (unsquash(softmax(x.q) @ BINS) for x in (online, target))
    value, target_value = ((policy * x).sum(-1) for x in (q, target_q))
    taken_q = take(target_q, action)
    ratio = np.exp(take(log_softmax(online.logits) - log_softmax(batch.logits), action))
    steps = len(action) - 1
    returns = np.zeros((steps, action.shape[1]))
    for t in reversed(range(steps)):
        following = target_value[t + 1]
        if t + 1 < steps:
            trace = config.trace_lambda * np.minimum(1, ratio[t + 1])
            following = following + trace * (returns[t + 1] - taken_q[t + 1])
        returns[t] = batch.reward[t] + config.gamma * (1.0 - done[t]) * following
    return {
        "value": value,
        "q": q,
        "target_q": target_q,
        "returns": returns,
        "td": returns - take(q, action)[:-1],
        "advantage": returns - target_value[:-1],
        "action_advantage": target_q - target_value[..., None],
    }


def dense(weights, name, x):
    w = weights[f"{name}/w"]
    return x @ w.reshape(w.shape[-2:]) + weights[f"{name}/b"]


def embed(weights, module, logits):
    """[..., Y] -> [...]"""
    x = relu(dense(weights, f"{module}/~/linear_0", softmax(logits)))
    return dense(weights, f"{module}/~/linear_1", x)[..., 0]


def mix_actions(weights, name, x):
    """[..., A, I] -> [..., A, O], of each action and of the mean over the actions."""
    mean = np.broadcast_to(x.mean(-2, keepdims=True), x.shape)
    return relu(dense(weights, name, np.concatenate([x, mean], -1)))


def features(weights, module, online, target, batch, values, moments, policies):
    """Of the steps, [T, B, 27], and of the actions, [T, B, A, 2]."""
    policy, target_policy = policies
    action = batch.action[:-1]
    behavior = softmax(batch.logits)
    center, scale = moments.center_and_scale()
    y, target_y = (embed(weights, f"{module}/mlp", x.y) for x in (online, target))
    z, target_z = (embed(weights, f"{module}/mlp_1", x.z) for x in (online, target))
    columns = [
        policy[:-1],
        behavior[:-1],
        target_policy[:-1],
        z[:-1],
        target_z[:-1],
        signed_log(values["target_q"])[:-1],
        signed_log(values["action_advantage"])[:-1],
        (values["action_advantage"][:-1] - center) / scale,
        np.eye(policy.shape[-1])[action],
    ]
    actions = mix_actions(weights, f"{module}/sequential/conv1_d", np.stack(columns, -1))
    actions = mix_actions(weights, f"{module}/sequential/conv1_d_1", actions)
    column = lambda x: x[..., None]
    of_z = lambda z: [
        column(take(z[:-1], action)),
        pair((policy * z).sum(-1)),
        pair(z.max(-1)),
    ]
    steps = [
        column(take(policy[:-1], action)),
        column(take(behavior[:-1], action)),
        column(signed_log(batch.reward[:-1])),
        column(1.0 - batch.done[:-1]),
        pair(signed_log(values["value"])),
        column(signed_log(values["advantage"])),
        column((values["advantage"] - center) / scale),
        column(take(target_policy[:-1], action)),
        pair(y),
        pair(target_y),
        *of_z(z),
        *of_z(target_z),
        actions.mean(2),
        take(actions, action),
    ]
    return np.concatenate(steps, -1), actions


def apply_rule(weights, online, target, batch, values, moments, policies, memory):
    """Returns targets, the mean embedding of the update, and what lies between."""
    inputs = (online, target, batch, values, moments, policies)
    steps, actions = features(weights, EMBEDDINGS, *inputs)
    num_steps, size = steps.shape[:2]
    width = len(weights["lstm/linear_1/w"])
    hidden, cell = np.zeros((2, size, width))
    outputs = []
    for t in reversed(range(num_steps)):
        keep = 1.0 - batch.done[t][:, None]
        x = np.concatenate([steps[t], keep * hidden], -1)
        hidden, cell = lstm(dense(weights, "lstm/lstm/linear", x), keep * cell)
        outputs.append(hidden)
    outputs = np.stack(outputs[::-1])
    modulated = outputs * dense(weights, "lstm/linear", memory)
    summary = dense(weights, "lstm/linear_1", modulated)
    tiled = np.broadcast_to(modulated[:, :, None], (*actions.shape[:3], width))
    x = np.concatenate([tiled, actions], -1)
    x = mix_actions(weights, "lstm/sequential_1/conv1_d", x)
    targets = {
        "logits": dense(weights, "lstm/linear_4", x)[..., 0],
        "y": dense(weights, "lstm/linear_2", modulated),
        "z": dense(weights, "lstm/linear_3", modulated),
    }
    lifetime_steps, lifetime_actions = features(weights, LIFETIME_EMBEDDINGS, *inputs)
    y = embed(weights, f"{LIFETIME_EMBEDDINGS}/mlp", targets["y"])[..., None]
    x = np.concatenate([lifetime_steps, summary, y], -1)
    x = dense(weights, f"{LIFETIME_EMBEDDINGS}/mlp_2/~/linear_0", x).mean((0, 1))
    between = {
        "main_input": steps,
        "main_act_cond_emb": actions,
        "lstm_out": outputs,
        "mult_out": modulated,
        "meta_input_emb": summary,
        "meta_input": lifetime_steps,
        "meta_act_cond_emb": lifetime_actions,
    }
    return targets, x, between


def remember(weights, embeddings, hidden, cell):
    """One step of the lifetime LSTM. embeddings: one per device."""
    x = np.concatenate([np.mean(embeddings, 0), hidden])
    return lstm(dense(weights, f"{LIFETIME_EMBEDDINGS}/lstm/linear", x), cell)


def losses_and_gradient(output, targets, returns, batch, config, hold=moving):
    """Losses of a batch by name, and the gradient of their sum for each output by name."""
    action, mask = batch.action[:-1], 1.0 - batch.reset[:-1]
    weight = mask / (mask.sum() + 1e-8)
    next_logits = hold(output.logits[1:])
    taken = {name: take(getattr(output, name)[:-1], action) for name in ("z", "aux_pi", "q")}
    goal = two_hot(squash(returns))
    continues = 1.0 - batch.done[:-1]
    steps = {
        "loss/policy": kl_divergence(targets["logits"], output.logits[:-1]),
        "loss/y": kl_divergence(targets["y"], output.y[:-1]),
        "loss/z": kl_divergence(targets["z"], taken["z"]),
        "loss/aux_policy": kl_divergence(next_logits, taken["aux_pi"]) * continues,
        "loss/value": -(goal * log_softmax(taken["q"])).sum(-1),
        "policy/entropy": entropy(output.logits[:-1]),
        "policy/entropy_y": entropy(output.y[:-1]),
        "policy/entropy_z": entropy(taken["z"]),
    }
    losses = {name: (x * weight).sum() for name, x in steps.items()}
    error = lambda logits, goal, scale: (weight * scale)[..., None] * (softmax(logits) - goal)
    policy, log_policy = softmax(output.logits[:-1]), log_softmax(output.logits[:-1])
    of_entropy = policy * (log_policy + entropy(output.logits[:-1])[..., None])
    grads = {
        "logits": error(output.logits[:-1], softmax(targets["logits"]), config.policy_coef)
        + config.ent_coef * weight[..., None] * of_entropy,
        "y": error(output.y[:-1], softmax(targets["y"]), config.y_coef),
        "z": error(taken["z"], softmax(targets["z"]), config.z_coef),
        "aux_pi": error(taken["aux_pi"], softmax(next_logits), config.aux_coef * continues),
        "q": error(taken["q"], goal, config.vf_coef),
    }
    for name, grad in grads.items():
        whole = np.zeros_like(getattr(output, name))
        if name in taken:
            for t, b in np.ndindex(action.shape):
                whole[t, b, action[t, b]] = grad[t, b]
        else:
            whole[:-1] = grad
        grads[name] = whole
    return losses, grads


# ------------------------------------------ update
class Adam(NamedTuple):
    count: int
    mu: Any
    nu: Any

    def step(self, grads, params, lr, max_update, hold=moving):
        """Returns the parameters and the state after it. The denominator is held."""
        count = self.count + 1
        mu = tree(lambda old, g: 0.9 * old + 0.1 * g, self.mu, grads)
        nu = tree(lambda old, g: 0.999 * old + 0.001 * g**2, self.nu, grads)
        scale = hold(tree(lambda x: np.sqrt(x / (1 - 0.999**count)) + 1e-8, nu))
        move = lambda m, s: np.clip(m / (1 - 0.9**count) / s, -max_update, max_update)
        params = tree(lambda x, m, s: x - lr * move(m, s), params, mu, scale)
        return params, Adam(count, mu, nu)


class Agent(NamedTuple):
    layers: Any
    target_layers: Any
    adam: Adam
    moments: Moments
    hidden: Any
    cell: Any


def update(weights, agent: Agent, batches, config, hold=moving):
    """One update from one batch per device. Returns agent, and a record of each device.

    The gradient in a record is the mean over the devices.
    """
    networks = [Network(agent.layers, batch.obs) for batch in batches]
    targets = [Network(agent.target_layers, batch.obs) for batch in batches]
    places = list(zip(networks, targets, batches, strict=True))
    values = hold([compute_values(*place, config) for place in places])
    moments = hold(agent.moments.add([x["advantage"] for x in values], config.ema_decay))
    records, embeddings, grads = [], [], []
    for (online, target, batch), value in zip(places, values, strict=True):
        policies = hold((softmax(online.logits), softmax(target.logits)))
        inputs = (online, target, batch, value, moments, policies)
        goals, embedding, _ = apply_rule(weights, *inputs, agent.hidden)
        losses, grad = losses_and_gradient(online, goals, value["returns"], batch, config, hold)
        grads.append(online.gradient(grad))
        embeddings.append(embedding)
        record = {"targets": goals, "values": value, "losses": losses}
        records.append(record | {"target_logits": target.logits, "logits": online.logits})
    hidden, cell = remember(weights, embeddings, agent.hidden, agent.cell)
    decay = config.target_decay
    average = lambda old, new: decay * old + (1 - decay) * new
    target_layers = tree(average, agent.target_layers, agent.layers)  # before the step
    grads = mean_tree(grads)
    sizes = (config.lr, config.max_update)
    layers, adam = agent.adam.step(grads, agent.layers, *sizes, hold)
    records = [record | {"grads": grads} for record in records]
    return Agent(layers, target_layers, adam, moments, hidden, cell), records


# ----------------------------------- meta-training
class Critic(NamedTuple):
    layers: Any
    adam: Adam
    moments: Moments

    def hidden(self, obs):
        layer = self.layers["torso_0"]
        return relu(obs @ layer["kernel"] + layer["bias"])

    def squashed_value(self, obs):
        x = self.hidden(obs)
        for name in ("torso_1", "value"):
            x = x @ self.layers[name]["kernel"] + self.layers[name]["bias"]
        return x[..., 0]

    def gradient(self, obs, grad):
        """Of the layers, from that of the squashed value [...]."""
        obs, grad = obs.reshape(-1, obs.shape[-1]), grad.reshape(-1, 1)
        torso_0 = self.hidden(obs)
        torso_1 = torso_0 @ self.layers["torso_1"]["kernel"] + self.layers["torso_1"]["bias"]
        grads = {}
        for name, x in (("value", torso_1), ("torso_1", torso_0), ("torso_0", obs)):
            grads[name] = {"kernel": x.T @ grad, "bias": grad.sum(0)}
            grad = grad @ self.layers[name]["kernel"].T
            if name == "torso_1":
                grad = grad * (torso_0 > 0)
        return grads

    def advantage(self, logits, batch, config):
        """By V-trace, with ratios clipped at 1."""
        value = unsquash(self.squashed_value(np.asarray(batch.obs, float)))
        log_ratio = log_softmax(logits) - log_softmax(batch.logits)
        rho = np.minimum(1, np.exp(take(log_ratio, batch.action)[:-1]))
        discount = config.critic_gamma * (1.0 - batch.done[:-1])
        target = value.copy()
        for t in reversed(range(len(rho))):
            delta = rho[t] * (batch.reward[t] + discount[t] * value[t + 1] - value[t])
            correction = rho[t] * (target[t + 1] - value[t + 1])
            target[t] = value[t] + delta + discount[t] * config.critic_lambda * correction
        following = config.critic_lambda * target[1:] + (1 - config.critic_lambda) * value[1:]
        return rho * (batch.reward[:-1] + discount * following - value[:-1])

    def update(self, logits, batches, config):
        """One step from one batch and the policy's logits per device."""
        places = list(zip(logits, batches, strict=True))
        advantages = [self.advantage(*place, config) for place in places]
        moments = self.moments.add(advantages, config.critic_ema_decay)
        _, scale = moments.center_and_scale()
        grads = []
        for batch, advantage in zip(batches, advantages, strict=True):
            obs = np.asarray(batch.obs[:-1], float)
            grads.append(self.gradient(obs, -advantage / scale / advantage.size))
        sizes = (config.critic_lr, config.critic_max_update)
        return Critic(*self.adam.step(mean_tree(grads), self.layers, *sizes), moments)


def meta_loss(weights, agent: Agent, critic: Critic, batches, valid, config, hold=moving):
    """Loss after one update per element of `batches`, each a list of the devices' batches.

    Returns loss, agent, critic, policy loss, entropy, penalty (the regularizer).
    """
    penalty = 0
    for batch in batches:
        agent, records = update(weights, agent, batch, config, hold)
        critic = hold(critic.update([x["logits"] for x in records], batch, config))
        for record in records:
            goals, old = record["targets"], hold(record["target_logits"][:-1])
            offset = sum(x.mean() ** 2 for x in goals.values())
            loss = 1e-3 * offset + 1e-2 * kl_divergence(old, goals["logits"]).mean()
            penalty += loss / len(records) / len(batches)
    outputs = [Network(agent.layers, x.obs) for x in valid]
    places = list(zip(outputs, valid, strict=True))
    advantages = hold([critic.advantage(x.logits, batch, config) for x, batch in places])
    center, scale = critic.moments.add(advantages, config.critic_ema_decay).center_and_scale()
    policy_losses, entropies, bonuses = [], [], []
    for (output, batch), advantage in zip(places, advantages, strict=True):
        log_prob = take(log_softmax(output.logits), batch.action)[:-1]
        policy_losses.append(-(log_prob * (advantage - center) / scale).mean())
        entropies.append(entropy(output.logits[:-1]).mean())
        z = take(output.z, batch.action)[:-1]
        bonuses.append(entropy(output.y).mean() + entropy(z).mean())
    policy_loss, entropy_mean = np.mean(policy_losses), np.mean(entropies)
    loss = policy_loss - 1e-2 * entropy_mean - 1e-3 * np.mean(bonuses) + penalty
    return loss, agent, critic, policy_loss, entropy_mean, penalty


# ------------------------------------------- Catch
class Catch:
    """A ball falls by one row per step, a paddle in the last row catches it. One environment."""

    def __init__(self, rows, columns, rng):
        self.rows, self.columns, self.rng = rows, columns, rng
        self.reset()

    def reset(self):
        self.y, self.x, self.paddle = 0, self.rng.integers(self.columns), self.columns // 2

    def obs(self):
        image = np.zeros((self.rows, self.columns), bool)
        image[self.y, self.x] = image[-1, self.paddle] = True
        return image.ravel()

    def step(self, action):
        """Actions: left, stay, right. Returns reward, done."""
        self.paddle = min(max(self.paddle + action - 1, 0), self.columns - 1)
        self.y += 1
        done = self.y == self.rows - 1
        reward = (1.0 if self.x == self.paddle else -1.0) if done else 0.0
        return reward, done
