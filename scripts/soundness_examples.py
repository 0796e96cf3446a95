"""Small programs that train, sample or infer with libraries of users, and the programs of our tests."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def flax_linen() -> None:
    import optax
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool) -> Any:
            attended = linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
            x = x + linen.Dropout(0.1, deterministic=not train)(attended)
            return x + linen.Dense(8)(linen.gelu(linen.Dense(16)(linen.RMSNorm()(x))))

    class Convolutional(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(linen.Conv(4, (3, 3))(x[..., None])))
            return linen.Dense(8)(linen.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))

    class Recurrent(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool) -> Any:  # noqa: ARG002 - called as the others
            return linen.RNN(linen.LSTMCell(8))(linen.Embed(16, 8)((x[..., 0] > 0).astype(int)))

    batch = np.stack([X] * 4)
    for model in (Block(), linen.remat(Block, static_argnums=(2,))(), Convolutional(), Recurrent()):
        variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch, False)
        optimizer = optax.adamw(1e-3)

        @jax.jit
        def step(variables: Any, state: Any, key: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            def loss(parameters: Any) -> Any:
                wanted = {name: value for name, value in variables.items() if name != "params"}
                out, changed = model.apply(
                    {"params": parameters, **wanted}, batch, True, rngs={"dropout": key}, mutable=[*wanted]
                )
                return (out**2).mean(), changed

            (value, changed), slopes = jax.value_and_grad(loss, has_aux=True)(variables["params"])
            updates, state = optimizer.update(slopes, state, variables["params"])
            return value, {"params": optax.apply_updates(variables["params"], updates), **changed}, state

        state = optimizer.init(variables["params"])
        for number in range(2):
            _, variables, state = step(variables, state, jax.random.key(number))
        jax.jit(lambda variables, x, model=model: model.apply(variables, x, False))(variables, batch)


def flax_nnx() -> None:
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))

    model = Model(nnx.Rngs(0))
    try:
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    except TypeError:  # before flax 0.11
        optimizer = nnx.Optimizer(model, optax.adam(1e-3))

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, slopes = nnx.value_and_grad(lambda model: ((model(x) - x) ** 2).mean())(model)
        try:
            optimizer.update(model, slopes)
        except TypeError:
            optimizer.update(slopes)
        return value

    for _ in range(2):
        step(model, optimizer, X)
    model.eval()
    nnx.jit(lambda model, x: model(x))(model, X)
    graph, state = nnx.split(model)
    jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, X)


def optax() -> None:
    import optax

    parameters = {"w": jnp.asarray(X), "b": jnp.zeros(8)}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 50)
    made = [
        optax.sgd(1e-2), optax.sgd(1e-2, momentum=0.9, nesterov=True), optax.adam(schedule), optax.adamw(1e-3),
        optax.adamw(2e-3), optax.lion(1e-3), optax.rmsprop(1e-3), optax.adagrad(1e-2), optax.adafactor(1e-3),
        optax.lamb(1e-3), optax.yogi(1e-3), optax.radam(1e-3), optax.novograd(1e-3), optax.sm3(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), optax.MultiSteps(optax.adam(1e-3), 2),
        optax.contrib.prodigy(1.0), optax.contrib.schedule_free_adamw(1e-3), optax.noisy_sgd(1e-2),
    ]  # fmt: skip
    for optimizer in made:

        @jax.jit
        def step(parameters: Any, state: Any, optimizer: Any = optimizer) -> Any:
            slopes = jax.grad(lambda p: jnp.tanh(X @ p["w"] + p["b"]).sum())(parameters)
            updates, state = optimizer.update(slopes, state, parameters)
            return optax.apply_updates(parameters, updates), state

        step(parameters, optimizer.init(parameters))
    labels = np.arange(8) % 3
    jax.jit(jax.grad(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()))(X)
    for loss in (optax.l2_loss, optax.huber_loss, optax.cosine_similarity, optax.sigmoid_binary_cross_entropy):
        jax.jit(lambda x, loss=loss: loss(x, X))(X)


def haiku() -> None:
    import haiku

    def network(x: Any) -> Any:
        x = haiku.Sequential([haiku.Linear(16), jax.nn.relu, haiku.Linear(8)])(x)
        x = haiku.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        x = haiku.dropout(haiku.next_rng_key(), 0.1, x)
        return haiku.BatchNorm(True, True, 0.9)(x, is_training=True)

    def recurrent(x: Any) -> Any:
        core = haiku.LSTM(8)
        return haiku.dynamic_unroll(core, x, core.initial_state(None))[0]

    for function in (network, recurrent):
        made = haiku.transform_with_state(function)
        parameters, state = jax.jit(made.init)(jax.random.key(0), X)

        @jax.jit
        def step(parameters: Any, state: Any, key: Any, made: Any = made) -> Any:
            def loss(parameters: Any) -> Any:
                out, changed = made.apply(parameters, state, key, X)
                return (out**2).mean(), changed

            slopes, changed = jax.grad(loss, has_aux=True)(parameters)
            return jax.tree.map(lambda p, s: p - 0.1 * s, parameters, slopes), changed

        step(parameters, state, jax.random.key(1))


def equinox() -> None:
    import equinox
    import optax

    key = jax.random.key(0)
    models = (
        equinox.nn.MLP(8, 8, 16, 2, key=key),
        equinox.nn.MLP(8, 8, 16, 2, activation=jax.nn.gelu, key=key),
        equinox.nn.Sequential([equinox.nn.Linear(8, 8, key=key), equinox.nn.LayerNorm(8), equinox.nn.Lambda(jnp.tanh)]),
    )
    optimizer = optax.adam(1e-3)

    @equinox.filter_jit
    def step(model: Any, state: Any, x: Any) -> Any:
        slopes = equinox.filter_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        updates, state = optimizer.update(slopes, state)
        return equinox.apply_updates(model, updates), state

    for model in models:
        step(model, optimizer.init(equinox.filter(model, equinox.is_inexact_array)), X)
        equinox.filter_jit(lambda model, x: jax.vmap(model)(x))(model, X)
    equinox.filter_jit(lambda x: equinox.error_if(x, x.sum() > 1e6, "too much"))(X)


def numpyro() -> None:
    import numpyro
    from numpyro import distributions, infer

    x, y = X[:, 0], X[:, 1] * 2

    def model(x: Any, y: Any = None) -> None:
        slope = numpyro.sample("slope", distributions.Normal(0, 1))
        noise = numpyro.sample("noise", distributions.HalfCauchy(1))
        group = numpyro.sample("group", distributions.Gamma(2.0, 1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", distributions.StudentT(group, slope * x, noise), obs=y)

    sampler = infer.MCMC(infer.NUTS(model), num_warmup=5, num_samples=5, progress_bar=False)
    sampler.run(jax.random.key(0), x, y)
    infer.Predictive(model, sampler.get_samples())(jax.random.key(1), x)
    guide = infer.autoguide.AutoNormal(model)
    infer.SVI(model, guide, numpyro.optim.Adam(1e-2), infer.Trace_ELBO()).run(
        jax.random.key(2), 5, x, y, progress_bar=False
    )


def diffrax() -> None:
    import diffrax

    def field(t: Any, y: Any, arguments: Any) -> Any:
        return -arguments * y + jnp.sin(t)

    solvers = (diffrax.Euler(), diffrax.Heun(), diffrax.Tsit5(), diffrax.Dopri5(), diffrax.Kvaerno3())
    for solver in solvers:
        steps = diffrax.ConstantStepSize() if isinstance(solver, diffrax.Euler) else diffrax.PIDController(1e-4, 1e-4)

        @jax.jit
        def solve(y: Any, rate: Any, solver: Any = solver, steps: Any = steps) -> Any:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(field), solver, 0.0, 1.0, 0.1, y, rate,
                saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, 5)), stepsize_controller=steps,
            ).ys  # fmt: skip

        solve(X[0], 2.0)
        jax.jit(jax.grad(lambda rate, solve=solve: solve(X[0], rate).sum()))(2.0)


def programs() -> None:
    """Run the programs of our tests that one device is enough for, one after the other."""
    _programs(many=False)


def programs_of_many_devices() -> None:
    _programs(many=True)


def _programs(*, many: bool) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.programs import NEEDS, PROGRAMS

    for name, source in PROGRAMS.items():
        if (name in NEEDS) == many:
            # Each begins with nothing lowered; one of them changes the configuration.
            jax.clear_caches()
            names = {"jax": jax, "jnp": jnp, "np": np, "x": _GIVEN, "listed": _listed}
            _tried(name, lambda source=source, names=names: exec(source, names))  # noqa: S102 - our own
            jax.config.update("jax_enable_x64", False)


_GIVEN = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def _listed(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)


def _tried(name: str, function: Callable[[], Any]) -> None:
    """Run an example; say if this version of the library or of jax has it not."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - what was lowered until then is recorded
        traceback.print_exc()
        print(f"{name} ended with {type(error).__name__}: {error}"[:200])


if __name__ == "__main__":
    for each in sys.argv[1:]:
        _tried(each, globals()[each])
