"""A slow and simple second implementation of the decoder: numpy in float64, one row, one token, one
head at a time.

It shares no attention, cache or policy code with jsparse. A rule is passed in that determines the
attended tokens of a decode step, and that keeps lists of each head's contents.
"""

import numpy as np


def softmax(logits):
    """exp(x) / sum(exp(x))."""
    weights = np.exp(np.asarray(logits) - np.max(logits))
    return weights / weights.sum()


def logsumexp(logits):
    """log(sum(exp(x))); -inf for no terms."""
    if len(logits) == 0:
        return -np.inf
    top = np.max(logits)
    return top + np.log(np.sum(np.exp(np.asarray(logits) - top)))


def logits_of(query, keys):
    """q·k/√H of one query head against a list of keys."""
    return [float(query @ key) / np.sqrt(len(query)) for key in keys]


def attend(query, keys, values, bias=None):
    """One query head over lists of keys and values."""
    logits = np.asarray(logits_of(query, keys)) + (0.0 if bias is None else np.asarray(bias))
    return softmax(logits) @ np.asarray(values)


class SlowModel:
    """The weights of a Llama (no biases, no q/k norm, default RoPE) in float64."""

    def __init__(self, params):
        self.config = params.config
        tree = params.weights["params"]
        self.w = {}
        stack = [("", tree)]
        while stack:
            path, node = stack.pop()
            for key, value in node.items():
                name = f"{path}{key}"
                if isinstance(value, dict):
                    stack.append((name + "/", value))
                else:
                    self.w[name] = np.asarray(value, np.float64)

    def norm(self, x, name):
        """RMSNorm."""
        return x / np.sqrt(np.mean(x * x) + self.config.rms_norm_eps) * self.w[name + "/scale"]

    def rotate(self, x, position):
        """RoPE of one head's vector, pair by pair."""
        half, out = len(x) // 2, np.empty_like(x)
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2 * i / len(x))
            out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def token(self, token, position, attend_layer):
        """Returns the logits after one token.

        `attend_layer(layer, q[N][H], k[K][H], v[K][H])` returns o[N][H].
        """
        c, w = self.config, self.w
        x = w["embed"][token]
        for layer in range(c.num_layers):
            at = f"layers_{layer}/"
            qkv = self.norm(x, at + "attention_norm") @ w[at + "attention/qkv/kernel"]
            heads = qkv.reshape(-1, c.head_dim)
            q = [self.rotate(head, position) for head in heads[: c.num_heads]]
            k = [
                self.rotate(head, position)
                for head in heads[c.num_heads : c.num_heads + c.num_kv_heads]
            ]
            v = list(heads[c.num_heads + c.num_kv_heads :])
            o = np.concatenate(attend_layer(layer, q, k, v))
            x = x + o @ w[at + "attention/o/kernel"]
            gate, up = np.split(self.norm(x, at + "mlp_norm") @ w[at + "mlp/gate_up/kernel"], 2)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp/down/kernel"]
        return self.norm(x, "final_norm") @ w["lm_head"]


class SlowRow:
    """One row: the contents of every head of every layer, as lists, and the text so far.

    Attributes:
        k, v: [layer][head] -> list of vectors.
        q: [layer] -> list of the queries [N][H] of every token that was computed densely or by a
            rule.
        tokens: the text.
    """

    def __init__(self, model: SlowModel, prompt):
        c = model.config
        self.model, self.tokens = model, []
        self.k = [[[] for _ in range(c.num_kv_heads)] for _ in range(c.num_layers)]
        self.v = [[[] for _ in range(c.num_kv_heads)] for _ in range(c.num_layers)]
        self.q = [[] for _ in range(c.num_layers)]
        self.group = c.num_heads // c.num_kv_heads
        for token in prompt:
            self.logits = self.push(token, self.dense)

    def hold(self, layer, k, v):
        """Appends one token's keys and values."""
        for head in range(len(k)):
            self.k[layer][head].append(k[head])
            self.v[layer][head].append(v[head])

    def mean_query(self, q, head):
        """The mean of the queries that share a KV head."""
        return np.mean(q[head * self.group : (head + 1) * self.group], axis=0)

    def dense(self, layer, q):
        """Every head over all its slots."""
        return [
            attend(q[n], self.k[layer][n // self.group], self.v[layer][n // self.group])
            for n in range(len(q))
        ]

    def over(self, layer, q, sets):
        """Each head over the slots in `sets[head]`."""
        out = []
        for n in range(len(q)):
            head = n // self.group
            keys, values = (
                [held[layer][head][slot] for slot in sets[head]] for held in (self.k, self.v)
            )
            out.append(attend(q[n], keys, values))
        return out

    def push(self, token, rule):
        """One token through the model; `rule(layer, q) -> o` is called after its keys and values
        were appended.
        """

        def attend_layer(layer, q, k, v):
            self.hold(layer, k, v)
            self.q[layer].append(q)
            return rule(layer, q)

        position = len(self.tokens)
        self.tokens.append(token)
        return self.model.token(token, position, attend_layer)
