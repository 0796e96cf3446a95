"""Find the stored entry that a missed program is most like, and say in what they differ."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xcache.cli import component_diff, operation_diff, store_file
from xcache.cli.operation_diff import Difference
from xcache.cli.programs import is_here, located_bytecode
from xcache.cli.store_file import StoreReader
from xcache.errors import XcacheError
from xcache.wire.ledger import Row
from xcache.wire.protocol import DESCRIBED_COMPONENTS

if TYPE_CHECKING:
    from xcache.cli.program_parts import Value

# The beginning of a random key's type.
_KEY = "key<"
# Entries that are looked at for one program, those of them that are read, and programs that are read for one command.
_MOST_CANDIDATES, _MOST_COMPARED = 20, 4
_MOST_READ = 200
_LINE = re.compile(r":\d+(?= in |$)")

_WEAK = "A Python number is weakly typed, and so is what is made of such numbers alone. Pass the same kind in all runs."
_RAW_KEY = (
    "jax.random.key makes such keys, and jax.random.PRNGKey arrays of numbers. Make keys in one way in all runs, or"
    " convert them with jax.random.wrap_key_data and key_data."
)
# The beginning of the type of a key that jax.random.PRNGKey makes.
_NUMBERS_OF_KEY = "u32["
_UPGRADED = (
    "Another jax may lower the same function in another way, also in what is not shown here. This is usual after an"
    " upgrade; what is compiled now serves the next runs."
)
_NOT_COMPARED = "The programs cannot be compared here: {}"


class Comparison(NamedTuple):
    """A program compared with the entry that it is most like."""

    key: str
    components: dict[str, Any]
    differences: list[Difference]
    # Why programs could not be compared.
    problem: str = ""
    is_same_program: bool = False


class Neighbours:
    """Compares programs of a run with entries of the store."""

    def __init__(
        self, store: StoreReader, known: Mapping[str, Row], earlier: Iterable[Row], *, before: float, is_wide: bool
    ) -> None:
        """``known`` has rows of the ledger by key; ``earlier`` are those of earlier runs that may be compared.

        Entries that were stored after ``before`` are left out, and so are those that are known to be of other places in
        the code, unless ``is_wide``: operations of jax's own and lambdas of many places share a name.
        """
        self._store = store
        self._before = before
        self._is_wide = is_wide
        self._known = known
        # Keys, the latest first, by place and name, and by line; the places of a key.
        self._at_place: defaultdict[object, dict[str, None]] = defaultdict(dict)
        self._places: defaultdict[str, set[str]] = defaultdict(set)
        for row in reversed([*earlier]):
            place = _place(row)
            for at in (row.site, (place, row.module_name)):
                self._at_place[at][row.key] = None
            self._places[row.key].add(place)
        self._programs: dict[tuple[str, int], Any] = {}

    def compared(self, row: Row) -> Comparison | None:
        """Compare a row's program with the nearest entry; None if there is nothing to compare it with."""
        here = self._entry(row.key)
        if here is None:
            return self._by_shapes(row)
        candidates = self._candidates(row, here)
        if not candidates:
            return None
        same = [each for each in candidates if each["program"] == here["program"]]
        try:
            if same:
                there = min(same, key=lambda each: len(_changed(here, each)))
            else:
                there = self._most_like(row, here, candidates)
            found = self._differences(row, here, there)
            if not same and self._is_of_another(row, here, there):
                return None
        except Exception as error:  # noqa: BLE001 - MLIR raises what it likes
            return Comparison(row.nearest, {}, [], _NOT_COMPARED.format(_reason(error)))
        return found

    def _candidates(self, row: Row, here: store_file.Row) -> list[store_file.Row]:
        """Return entries to choose from: of the same program, else of the same place and name, else of the same line.

        A function that was renamed is called at the same line.
        """
        like = self._store.like(here, _MOST_CANDIDATES, self._before)
        if like and like[0]["program"] == here["program"]:
            return like
        place = _place(row)
        keys = [*self._at_place.get((place, row.module_name), ())] if row.site else []
        if self._is_wide or not keys:
            nearest = [row.nearest] if row.nearest else []
            of_name = [*nearest, *(each["key"] for each in like)]
            keys += [key for key in of_name if self._is_wide or self._may_be_of(row, key)]
        if not keys and row.site:
            keys = [*self._at_place.get(row.site, ())]
        found = {each["key"]: each for each in like}
        chosen = [key for key in dict.fromkeys(keys) if key != row.key][:_MOST_CANDIDATES]
        entries = ((key, found.get(key) or self._entry(key)) for key in chosen)
        # The entry that the daemon named was there before, whatever the clocks say.
        return [
            entry
            for key, entry in entries
            if entry and (key == row.nearest or (entry.get("created_at") or 0.0) < self._before)
        ]

    def _may_be_of(self, row: Row, key: str) -> bool:
        """Return whether an entry may be of the function that was called at this place."""
        places = self._places.get(key)
        return not row.site or not places or _place(row) in places

    def _is_of_another(self, row: Row, here: store_file.Row, there: store_file.Row) -> bool:
        """Return whether an entry is that of another function that was called at the same place."""
        from xcache.cli import program_diff

        other = self._known.get(there["key"])
        if self._is_wide or other is None or other.module_name == row.module_name:
            return False
        return not program_diff.is_renamed(self._program(here), self._program(there))

    def _most_like(self, row: Row, here: store_file.Row, candidates: Sequence[store_file.Row]) -> store_file.Row:
        """Return the nearest.

        Of several, it is the one that was called at the same place, because lambdas share a name; then the one that was
        stored for the same flags and devices, because it shows what matters.
        """
        candidates = sorted(candidates, key=lambda each: self._apart(row, each["key"]))[:_MOST_COMPARED]
        nearest = candidates[0]
        try:
            mine = self._program(here)
        except Exception:  # noqa: BLE001 - whoever compares the two says why not
            return nearest
        least: tuple[float, bool, int] = math.inf, False, 0
        keys = self._at_place.get(row.site, {})
        # `xcache rewarm` compiles a program once more without calling it.
        at_site = {each["program"] for each in candidates if each["key"] in keys}
        for each in candidates:
            if len(self._programs) >= _MOST_READ:
                break
            if not is_here(self._store.program(each["program"], each["writer_uid"])):
                continue
            distance = mine.distance(self._program(each)), each["program"] not in at_site, len(_changed(here, each))
            if distance < least:
                nearest, least = each, distance
        return nearest

    def _apart(self, row: Row, key: str) -> tuple[float, bool, int]:
        """Return how far the arguments of a program are from those of another, as far as the ledger knows them.

        Lines of a file that was not edited tell several functions of one name apart, and the order several calls.
        """
        from xcache.cli import program_diff, program_parts

        other = self._known.get(key)
        if other is None:
            return math.inf, True, 0
        both = [program_diff.from_shapes(each.shapes) for each in (row, other)]
        return program_parts.distance(*both), other.site != row.site, abs(other.position - row.position)

    def _differences(self, row: Row, here: store_file.Row, there: store_file.Row) -> Comparison:
        from xcache.cli import program_diff

        components = {
            name: component_diff.lines(
                name, *(self._store.description(entry[f"{name}_component"]) or "" for entry in (here, there))
            )
            for name in _changed(here, there)
        }
        if here["program"] == there["program"]:
            return Comparison(there["key"], components, component_diff.differences(components), is_same_program=True)
        of_components = component_diff.differences(components, same_program=False)
        upgrade = self._upgrade(here, there)
        # An upgrade may be all that has changed.
        known = [upgrade, *of_components] if upgrade and "toolchain" not in components else of_components
        try:
            mine, theirs = self._program(here), self._program(there)
        except Exception as error:  # noqa: BLE001 - MLIR raises what it likes
            return Comparison(there["key"], components, known, _NOT_COMPARED.format(_reason(error)))
        other = self._known.get(there["key"])
        # Like other arguments, random keys and those that are weakly typed change the operations, too.
        if found := [*_of_keys(row, other), *_weak(row, other)]:
            found += program_diff.of_arguments(mine.arguments, theirs.arguments, _key_numbers(row, other))
        found = found or program_diff.differences(mine, theirs)
        if upgrade:
            return Comparison(there["key"], components, [*known, *_apart_from_upgrade(found)])
        return Comparison(there["key"], components, found + of_components)

    def _upgrade(self, here: store_file.Row, there: store_file.Row) -> Difference | None:
        """Say so if the jax of another jaxlib lowered the stored program."""
        here_by, there_by = (self._store.lowered_by(each["program"]) for each in (here, there))
        if here_by == there_by:
            return None
        text = f"the stored program was lowered by the jax of jaxlib {there_by}, this one by that of {here_by}"
        return Difference(text, _UPGRADED)

    def _by_shapes(self, row: Row) -> Comparison | None:
        """Compare the arguments alone, of a program that is not stored."""
        other = self._known.get(row.nearest)
        if other is None or not row.nearest or not (self._is_wide or self._may_be_of(row, row.nearest)):
            return None
        from xcache.cli import program_diff

        mine, theirs = (program_diff.from_shapes(each.shapes) for each in (row, other))
        found = [*_of_keys(row, other), *_weak(row, other)]
        found += program_diff.of_arguments(mine, theirs, _key_numbers(row, other))
        return Comparison(row.nearest, {}, found, "" if found else "Only entries that are stored can be compared.")

    def _entry(self, key: str) -> store_file.Row | None:
        try:
            return self._store.entry(key)
        except XcacheError:
            return None

    def _program(self, entry: store_file.Row) -> Any:
        from xcache.cli import program_parts

        named = entry["program"], entry["writer_uid"]
        if named not in self._programs:
            content = located_bytecode(self._store, self._store.program(*named))
            self._programs[named] = program_parts.read(content)
        return self._programs[named]


def _place(row: Row) -> str:
    """Return the file and function that called a program; its line moves with every edit of the file."""
    return _LINE.sub("", row.site)


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _changed(here: store_file.Row, there: store_file.Row) -> list[str]:
    """Return the components in which two entries differ."""
    return [name for name in DESCRIBED_COMPONENTS if here[f"{name}_component"] != there[f"{name}_component"]]


def _apart_from_upgrade(found: Sequence[Difference]) -> Iterator[Difference]:
    """Yield differences of programs, without those of no consequence and the advice that an upgrade makes doubtful."""
    from xcache.cli import program_diff

    for each in found:
        if each.advice != program_diff.NOT_OURS:
            yield each._replace(advice="") if each.advice == operation_diff.CODE else each


def _key_numbers(row: Row, other: Row | None) -> set[int]:
    """Return the numbers of arguments that are random keys in one program and not, or of another kind, in the other."""
    kinds = {number: {_key_kind(each) for each in both} for number, *both in _both(row, other)}
    return {number for number, found in kinds.items() if len(found) > 1}


def _key_kind(value: Value) -> str:
    """Return ``key<fry`` for a random key and nothing for other arrays; in StableHLO, keys are arrays, too."""
    return value.type.partition(">")[0] if value.type.startswith(_KEY) else ""


def _of_keys(row: Row, other: Row | None) -> Iterator[Difference]:
    changed = _key_numbers(row, other)
    for number, one, another in _both(row, other):
        if number not in changed:
            continue
        kinds = f"{one.type} here, {another.type} in the stored program"
        if all(map(_key_kind, (one, another))):
            yield Difference(f"argument {number} is a random key of another kind: {kinds}")
        else:
            advice = _RAW_KEY if any(each.type.startswith(_NUMBERS_OF_KEY) for each in (one, another)) else ""
            yield Difference(f"argument {number} is a random key in one program only: {kinds}", advice)


def _weak(row: Row, other: Row | None) -> Iterator[Difference]:
    """Yield the arguments that are weakly typed in one of two programs only; StableHLO does not say so."""
    for number, one, another in _both(row, other):
        if one.facts != another.facts:
            where = "here, but not in the stored program" if one.facts else "in the stored program, but not here"
            yield Difference(f"argument {number} is weakly typed {where}", _WEAK)


def _both(row: Row, other: Row | None) -> Iterator[tuple[int, Value, Value]]:
    """Yield the arguments of two programs as the ledger has them, if they have as many."""
    from xcache.cli import program_diff

    mine, theirs = (program_diff.from_shapes(each.shapes) if each else [] for each in (row, other))
    if len(mine) == len(theirs):
        yield from zip(range(len(mine)), mine, theirs, strict=True)
