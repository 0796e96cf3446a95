"""Print how many shardings there are that differ only in what becomes of an axis, and how many descriptions of them."""

import jax
from jax.sharding import PartitionSpec

from xcache.hook.structure import digest  # noqa: F401  # completes the table of types
from xcache.hook.structure.encoding import Encoding

specs = [PartitionSpec(None), PartitionSpec("x"), PartitionSpec(PartitionSpec.UNCONSTRAINED)]
try:
    specs += [PartitionSpec(None, unreduced={"x"}), PartitionSpec(None, reduced={"x"})]
    specs += [PartitionSpec(None, unreduced={"x"}, unreduced_kind=jax.sharding.UnreducedKind[kind])
              for kind in ("max", "min")]  # fmt: skip
except (TypeError, AttributeError):
    # Each of these came with a later jax.
    pass


def described(spec):
    encoding = Encoding()
    encoding.encode(spec)
    return encoding.digest()


print(len(specs), len({*map(described, specs)}))
