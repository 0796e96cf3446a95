"""The programs that are measured: each an ordinary one in plain JAX, or in a library, that knows of no cache.

Each returns what it computed, of which ``observe.py`` takes a digest: with any cache it must be the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from libraries import haiku_training, linen_training, nnx_training
from transformer import VOCABULARY, WIDTH, block, cross_entropy, initialize, jit, normalize, train_with

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

    decode = jit(forward, donate_argnums=1)
    prefill = jit(lambda parameters, caches, tokens: forward(parameters, caches, tokens, 0), donate_argnums=1)

    def caches(batch: int, length: int) -> Any:
        return [np.zeros((2, batch, length, WIDTH), np.float32) for _ in range(layers)]

    prompts = [np.arange(length, dtype=np.int32)[None] % VOCABULARY for length in (16, 32, 48, 64, 96, 128, 192, 256)]
    buckets = [(batch, length) for batch in (1, 2, 4, 8) for length in (64, 128, 256, 512, 768, 1024)]
    prefills = [(parameters, caches(1, 256), tokens) for tokens in prompts]
    decodes = [
        (parameters, caches(batch, length), np.full((batch, 1), 7, np.int32), np.int32(5)) for batch, length in buckets
    ]
    if hasattr(decode, "prepare"):
        prefill.prepare(*prefills)
        decode.prepare(*decodes)
    return [prefill(*call)[0] for call in prefills] + [decode(*call)[0] for call in decodes]


PROGRAMS: dict[str, Callable[[], Any]] = {
    "nothing": nothing,
    "many-small": many_small,
    "training": training,
    "training-24": partial(training, 24),
    "training-48": partial(training, 48),
    "scan-model": scan_model,
    "serving": serving,
    "library": nnx_training,
    "linen": linen_training,
    "haiku": haiku_training,
}
# The modules that a program imports besides jax, and the number of devices it wants.
IMPORTS = {"library": ("flax.nnx", "optax"), "linen": ("flax.linen", "optax"), "haiku": ("haiku", "optax")}
DEVICES = {"scan-model": 4}
