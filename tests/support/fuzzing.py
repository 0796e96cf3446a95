"""The fuzz targets by name, and how to run them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from support import decoders, ends, parcels, seeds
from support.mutation import EnvelopeMutator, MessageMutator, Mutator, PrefixedMutator, StreamMutator

Check = Callable[[bytes], bool]


class Target(NamedTuple):
    """A function that takes bytes, its cases, and how many of them a test run has time for."""

    quick: int
    opened: Callable[[], AbstractContextManager[Check]]
    samples: Callable[[], list[bytes]]
    mutator: Callable[[int, list[bytes]], Mutator]


class Defect(Exception):  # noqa: N818 - what is found is not an error of this program
    """A case that broke something; ``data`` is the case."""

    def __init__(self, target: str, data: bytes) -> None:
        super().__init__(f"{target}: {data[:200]!r}{'...' if len(data) > 200 else ''}")
        self.data = data


class Counts(NamedTuple):
    """The cases that ran, those that the target accepted, and the seconds it took."""

    cases: int
    taken: int
    seconds: float


TARGETS = {
    "message": Target(
        30_000,
        lambda: nullcontext(decoders.message),
        seeds.bodies,
        lambda seed, samples: MessageMutator(seed, seeds.messages(), samples),
    ),
    "stream": Target(
        7_000,
        lambda: nullcontext(decoders.stream),
        seeds.streams,
        lambda seed, samples: StreamMutator(seed, seeds.messages(), samples),
    ),
    "envelope": Target(
        30_000,
        lambda: nullcontext(decoders.sealed_content),
        seeds.envelopes,
        lambda seed, samples: EnvelopeMutator(seed, samples, seeds.ENVELOPE_WORDS),
    ),
    "parcel": Target(
        7_000,
        lambda: nullcontext(parcels.check),
        parcels.samples,
        parcels.ParcelMutator,
    ),
    "options": Target(
        30_000,
        lambda: nullcontext(decoders.compile_options),
        seeds.wire_fields,
        lambda seed, samples: Mutator(seed, samples, seeds.wire_fields()),
    ),
    "results": Target(
        30_000,
        lambda: nullcontext(decoders.action_result),
        seeds.action_results,
        lambda seed, samples: Mutator(seed, samples, seeds.action_results()),
    ),
    "flags": Target(
        15_000,
        lambda: nullcontext(decoders.flag_texts),
        seeds.flags,
        lambda seed, samples: Mutator(seed, samples, seeds.FLAG_WORDS),
    ),
    "client": Target(
        1_500,
        ends.client_end,
        ends.answers,
        lambda seed, samples: PrefixedMutator(seed, ends.heard_by_clients(), samples, ends.FIRST_REQUEST),
    ),
    "daemon": Target(
        2_000,
        ends.daemon_end,
        ends.conversations,
        lambda seed, samples: PrefixedMutator(seed, seeds.requests(), samples),
    ),
}


@contextlib.contextmanager
def checking(target: str) -> Iterator[Check]:
    """Yield a check of single cases that turns whatever it raises into a Defect with the case."""
    with TARGETS[target].opened() as check:

        def checked(data: bytes) -> bool:
            try:
                return check(data)
            except Exception as error:
                raise Defect(target, data) from error

        yield checked


def fuzz(target: str, cases: int, seed: int) -> Counts:
    """Make and check this many cases; raise Defect for the first that breaks something."""
    start = time.monotonic()
    with checking(target) as check:
        taken = sum(map(check, made(target, cases, seed)))
    return Counts(cases, taken, time.monotonic() - start)


def made(target: str, cases: int, seed: int) -> Iterator[bytes]:
    """Yield the cases of a seed."""
    chosen = TARGETS[target]
    mutator = chosen.mutator(seed, [*chosen.samples(), *seeds.kept(target)])
    return (mutator.case() for _ in range(cases))


def replay(target: str) -> Counts:
    """Check the samples and the corpus unchanged."""
    start = time.monotonic()
    samples: Iterable[bytes] = [*TARGETS[target].samples(), *seeds.kept(target)]
    with checking(target) as check:
        results = [check(data) for data in samples]
    return Counts(len(results), sum(results), time.monotonic() - start)


def keep(target: str, data: bytes) -> Path:
    """Add a case to the corpus, which every later run tries."""
    path = seeds.CORPUS / target / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
