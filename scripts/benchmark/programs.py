"""The programs that are measured: each an ordinary one in plain JAX, or in a library, that knows of no cache.

Each returns what it computed, of which ``observe.py`` takes a digest: with any cache it must be the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformer import VOCABULARY, WIDTH, block, cross_entropy, initialize, normalize, train_with

LENGTH, BATCH = 64, 2


def nothing() -> Any:
    """A program that has nothing to compile."""
    return 0


def many_small() -> Any:
    """An eager script, such as a notebook that looks at data: about 100 distinct small programs."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    table = jax.random.normal(key, (500, 8)) * jnp.arange(1.0, 9.0) + 3
    results = [table.mean(axis=0), table.std(axis=0), jnp.median(table, axis=0), table.min(axis=0), table.max(axis=0)]
    standard = (table - results[0]) / results[1]
    results += [jnp.corrcoef(standard.T), jnp.quantile(standard, 0.9, axis=0)]
    for column in range(2):
        values = standard[:, column]
        counts, edges = jnp.histogram(values, bins=10 + column)
        results += [counts, edges, jnp.cumsum(values[: 100 + column])]
    weights = jax.random.uniform(jax.random.key(1), (8,))
    target = standard @ weights + 0.1 * jax.random.normal(jax.random.key(2), (500,))
    solution = jnp.linalg.solve(standard.T @ standard + 0.01 * jnp.eye(8), standard.T @ target)
    errors = jnp.abs(standard @ solution - target)
    results += [solution, errors.mean(), jnp.argmax(errors)]

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    w = jnp.zeros(8)
    for size in (100, 250):
        for _ in range(3):
            w = w - 0.1 * jax.grad(loss)(w, standard[:size], target[:size])
        results.append(jax.jit(loss)(w, standard[:size], target[:size]))
    for window in (3, 7):
        kernel = jnp.ones(window) / window
        smooth = jnp.convolve(target, kernel, mode="valid")
        results += [smooth, jnp.clip(smooth, -1, 1).mean()]
    image = jnp.reshape(table[:, :5], (50, 50))
    results += [jnp.pad(image, 2), image.T @ image, jnp.fft.fft(image[0]).real, jnp.concatenate([w, solution])]
    return results


def some_tokens(count: int) -> Any:
    """Return the same batches in each run."""
    import numpy as np

    return np.random.default_rng(0).integers(0, VOCABULARY, (count, BATCH, LENGTH + 1)).astype(np.int32)


def training(layers: int = 12) -> Any:
    """An unrolled transformer: initialized, trained with Adam, evaluated."""
    import jax
    import jax.numpy as jnp

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["embed"][tokens[:, :-1]]
        for layer in parameters["layers"]:
            x, _ = block(x, layer)
        return cross_entropy(parameters, x, tokens)

    parameters = jax.jit(partial(initialize, layers))(jax.random.key(0))
    zeros = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))
    return train_with(loss, (parameters, zeros(parameters), zeros(parameters), jnp.zeros((), int)), some_tokens(2))


def scan_model(layers: int = 12) -> Any:
    """The same with ``lax.scan`` over its layers, in bf16, sharded over 4 devices: 2 for data, 2 for the model."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    def place(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        rows = {"project", "narrow"}
        split = ("model", None) if name in rows else (None, "model") if name in {"attend", "widen"} else ()
        return NamedSharding(mesh, PartitionSpec(*(None,) * (leaf.ndim - len(split)), *split))

    def begin(key: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initialize(layers, key, stacked=True))

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["embed"][tokens[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, layer: (block(x, layer)[0], None)), x, parameters["layers"])
        return cross_entropy(parameters, x, tokens)

    shardings = jax.tree_util.tree_map_with_path(place, jax.eval_shape(begin, jax.random.key(0)))
    parameters = jax.jit(begin, out_shardings=shardings)(jax.random.key(0))
    zeros = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), tree))
    tokens = [jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data"))) for batch in some_tokens(2)]
    return train_with(loss, (parameters, zeros(parameters), zeros(parameters), jnp.zeros((), int)), tokens)


def serving() -> Any:
    """An inference server before it listens: decode at 24 bucket shapes, prefill at 8."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    layers = 2
    parameters = jax.jit(partial(initialize, layers))(jax.random.key(0))

    def forward(parameters: Any, caches: Any, tokens: Any, position: Any) -> Any:
        x = parameters["embed"][tokens]
        new = []
        for layer, cache in zip(parameters["layers"], caches, strict=True):
            x, cache = block(x, layer, cache, position)
            new.append(cache)
        scores = normalize(x[:, -1], parameters["norm"]) @ parameters["embed"].T
        return jnp.argmax(scores, axis=-1), new

    decode = jax.jit(forward, donate_argnums=1)
    prefill = jax.jit(lambda parameters, caches, tokens: forward(parameters, caches, tokens, 0), donate_argnums=1)

    def caches(batch: int, length: int) -> Any:
        return [np.zeros((2, batch, length, WIDTH), np.float32) for _ in range(layers)]

    results = []
    for length in (16, 32, 48, 64, 96, 128, 192, 256):
        tokens = np.arange(length, dtype=np.int32)[None] % VOCABULARY
        results.append(prefill(parameters, caches(1, 256), tokens)[0])
    for batch in (1, 2, 4, 8):
        for length in (64, 128, 256, 512, 768, 1024):
            tokens = np.full((batch, 1), 7, np.int32)
            results.append(decode(parameters, caches(batch, length), tokens, np.int32(5))[0])
    return results


def library() -> Any:
    """Flax's own introduction, in short: a convolutional network on images, with optax and metrics."""
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
            self.norm1 = nnx.BatchNorm(32, rngs=rngs)
            self.dropout1 = nnx.Dropout(rate=0.025)
            self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
            self.norm2 = nnx.BatchNorm(64, rngs=rngs)
            self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
            self.dropout2 = nnx.Dropout(rate=0.025)
            self.linear2 = nnx.Linear(256, 10, rngs=rngs)

        def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> Any:
            x = self.pool(nnx.relu(self.norm1(self.dropout1(self.conv1(x), rngs=rngs))))
            x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
            x = nnx.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1)), rngs=rngs))
            return self.linear2(x)

    def loss_of(model: Any, rngs: Any, images: Any, labels: Any) -> Any:
        scores = model(images, rngs)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), scores

    @nnx.jit
    def train_step(model: Any, optimizer: Any, metrics: Any, rngs: Any, images: Any, labels: Any) -> None:
        (loss, scores), gradient = nnx.value_and_grad(loss_of, has_aux=True)(model, rngs, images, labels)
        metrics.update(loss=loss, logits=scores, labels=labels)
        optimizer.update(model, gradient)

    @nnx.jit
    def evaluate(model: Any, metrics: Any, images: Any, labels: Any) -> None:
        loss, scores = loss_of(model, None, images, labels)
        metrics.update(loss=loss, logits=scores, labels=labels)

    model = Network(nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 10, 100)
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    random, rngs, results = np.random.default_rng(0), nnx.Rngs(1), []
    for _ in range(3):
        images, labels = random.random((16, 28, 28, 1), np.float32), random.integers(0, 10, 16).astype(np.int32)
        model.train()
        train_step(model, optimizer, metrics, rngs, images, labels)
        results += [jnp.asarray(value) for value in metrics.compute().values()]
        metrics.reset()
        model.eval()
        evaluate(model, metrics, images, labels)
        results += [jnp.asarray(value) for value in metrics.compute().values()]
        metrics.reset()
    return results


PROGRAMS: dict[str, Callable[[], Any]] = {
    "nothing": nothing,
    "many-small": many_small,
    "training": training,
    "training-24": partial(training, 24),
    "training-48": partial(training, 48),
    "scan-model": scan_model,
    "serving": serving,
    "library": library,
}
# The modules that a program imports besides jax, and the number of devices it wants.
IMPORTS = {"library": ("flax.nnx", "optax")}
DEVICES = {"scan-model": 4}
