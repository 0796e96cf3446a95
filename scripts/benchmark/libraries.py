"""Training programs as users of libraries write them: flax's nnx and linen, haiku, and optax with each."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformer import VOCABULARY


def nnx_training() -> Any:
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


def linen_training(layers: int = 6) -> Any:
    """A language model in flax's linen, unrolled, with dropout: initialized, trained with AdamW, evaluated."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen
    from flax.training.train_state import TrainState

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, *, train: bool) -> Any:
            mask = linen.make_causal_mask(x[..., 0])
            attended = linen.MultiHeadDotProductAttention(num_heads=4)(linen.LayerNorm()(x), mask=mask)
            x = x + linen.Dropout(0.1, deterministic=not train)(attended)
            wide = linen.gelu(linen.Dense(4 * x.shape[-1])(linen.LayerNorm()(x)))
            return x + linen.Dropout(0.1, deterministic=not train)(linen.Dense(x.shape[-1])(wide))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any, *, train: bool) -> Any:
            embed = linen.Embed(VOCABULARY, 64)
            x = embed(tokens) + linen.Embed(64, 64)(jnp.arange(tokens.shape[1]))
            for _ in range(layers):
                x = Block()(x, train=train)
            return embed.attend(linen.LayerNorm()(x))

    model, tokens = Model(), np.random.default_rng(0).integers(0, VOCABULARY, (4, 65)).astype(np.int32)
    variables = jax.jit(partial(model.init, train=False))(jax.random.key(0), tokens[:, :-1])
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=update)

    def loss_of(parameters: Any, tokens: Any, key: Any = None) -> Any:
        keys = None if key is None else {"dropout": key}
        scores = model.apply({"params": parameters}, tokens[:, :-1], train=key is not None, rngs=keys)
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    @jax.jit
    def train_step(state: Any, tokens: Any, key: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(state.params, tokens, jax.random.fold_in(key, state.step))
        return state.apply_gradients(grads=slopes), loss

    results, key = [], jax.random.key(1)
    for _ in range(3):
        state, loss = train_step(state, tokens, key)
        results.append(loss)
    results.append(jax.jit(loss_of)(state.params, tokens))
    return results


def haiku_training() -> Any:
    """A residual network in haiku, with batch norm and optax's momentum: initialized, trained, evaluated."""
    import haiku as hk
    import jax
    import numpy as np
    import optax

    def forward(images: Any, *, is_training: bool) -> Any:
        groups = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (32, 64, 128, 256)}
        return hk.nets.ResNet(num_classes=10, resnet_v2=True, bottleneck=False, **groups)(images, is_training)

    network, optimizer = hk.transform_with_state(forward), optax.sgd(1e-2, momentum=0.9, nesterov=True)
    random = np.random.default_rng(0)
    images, labels = random.random((4, 32, 32, 3), np.float32), random.integers(0, 10, 4).astype(np.int32)

    def loss_of(parameters: Any, state: Any) -> Any:
        scores, state = network.apply(parameters, state, None, images, is_training=True)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), state

    @jax.jit
    def train_step(parameters: Any, state: Any, moments: Any) -> Any:
        (loss, state), slopes = jax.value_and_grad(loss_of, has_aux=True)(parameters, state)
        updates, moments = optimizer.update(slopes, moments)
        return optax.apply_updates(parameters, updates), state, moments, loss

    begin = jax.jit(partial(network.init, is_training=True))
    parameters, state = begin(jax.random.key(0), images)
    moments, results = jax.jit(optimizer.init)(parameters), []
    for _ in range(3):
        parameters, state, moments, loss = train_step(parameters, state, moments)
        results.append(loss)
    scores, _ = jax.jit(partial(network.apply, is_training=False))(parameters, state, None, images)
    return [*results, scores]
