"""Judges what scripts/soundness recorded, and writes the tables of docs/soundness.md."""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- written by scripts/soundness -->", "<!-- until here -->"


class Judgement(NamedTuple):
    """The findings from the records of one version of jax."""

    version: str
    seeds: int
    lowerings: int
    programs: int
    eligible: int
    # Digests that stand for two programs, each with two records as proof.
    contradictions: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    # Records of programs whose digest changed while they were lowered.
    unstable: list[dict[str, Any]]
    reasons: Counter[str]
    # Lowerings that are lost: of a known program, under a digest that was not known.
    lost: int
    # The eligible lowerings of the last seed whose program another seed gave, too; and those of them for whose digest
    # the other seed would have written an alias.
    repeated: int
    found: int
    # Where the structures of one program first differ.
    causes: Counter[str]
    # The same for repeated lowerings that were not found.
    missing: Counter[str]
    # Eligible lowerings during which jax's state was compared, and the names that changed.
    compared: int
    changed: Counter[str]


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield all records of a folder; a process that was killed may have left half a line."""
    for path in sorted((folder / "records").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def judge(folder: Path) -> Judgement:
    """Compare all records of one version of jax."""
    reasons: Counter[str] = Counter()
    made: dict[str, dict[str, Any]] = {}
    structures: dict[str, dict[str, None]] = defaultdict(dict)
    by_seed: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    contradictions, unstable = {}, []
    changed: Counter[str] = Counter()
    lowerings = lost = compared = 0
    programs: set[str] = set()
    version = ""
    for record in records(folder):
        lowerings += 1
        version = record["version"]
        reasons[record["reason"] or ""] += 1
        if "program" in record:
            programs.add(record["program"])
        if record["reason"]:
            continue
        if record["changed"] is not None:
            compared += 1
            changed.update(record["changed"])
        structure, program = record["structure"], record["program"]
        if not record["stable"]:
            unstable.append(record)
        before = made.setdefault(structure, record)
        if before["program"] != program:
            contradictions[structure] = before, record
        if structure not in structures[program]:
            lost += bool(structures[program])
            structures[program][structure] = None
        by_seed[record["seed"]][program, structure] += 1
    repeated, missed = _second_run(by_seed)
    causes: Counter[str] = Counter()
    for several in structures.values():
        first, *more = several
        for each in more:
            causes[difference(folder, first, each)] += 1
    missing: Counter[str] = Counter()
    for (known, structure), count in missed.items():
        missing[difference(folder, known, structure)] += count
    return Judgement(
        version, len(by_seed), lowerings, len(programs), reasons.pop("", 0), contradictions, unstable, reasons, lost,
        repeated, repeated - missed.total(), causes, missing, compared, changed,
    )  # fmt: skip


def _second_run(by_seed: dict[str, Counter[tuple[str, str]]]) -> tuple[int, Counter[tuple[str, str]]]:
    """Return the number of the last seed's lowerings with a known program, and those with a new structure."""
    missed: Counter[tuple[str, str]] = Counter()
    repeated = 0
    *others, last = sorted(by_seed) or [""]
    known = {structure: program for seed in others for program, structure in by_seed[seed]}
    by_program = {program: structure for structure, program in known.items()}
    for (program, structure), count in by_seed[last].items():
        if program in by_program:
            repeated += count
            if structure not in known:
                missed[by_program[program], structure] += count
    return repeated, missed


def difference(folder: Path, one: str, other: str) -> str:
    """Return where two encodings differ first: the last names before that, and what is written there."""
    these, those = (_encoding(folder, digest) for digest in (one, other))
    if these is None or those is None:
        return "unknown"
    return _first_difference(*these, *those)


def _encoding(folder: Path, digest: str) -> tuple[bytes, dict[bytes, bytes]] | None:
    path = folder / "structures" / digest[:2] / digest
    if not path.exists():
        return None
    held = json.loads(zlib.decompress(path.read_bytes()))
    tokens = {bytes.fromhex(token): bytes.fromhex(content) for token, content in held["tokens"].items()}
    return bytes.fromhex(held["encoding"]), tokens


def _first_difference(
    one: bytes, tokens: dict[bytes, bytes], other: bytes, other_tokens: dict[bytes, bytes], within: str = ""
) -> str:
    length = min(len(one), len(other))
    at = next((place for place in range(length) if one[place] != other[place]), length)
    names = re.findall(rb"s\d+:([A-Za-z_.][\w. ]*)", one[max(0, at - 2000) : at])
    where = " > ".join(filter(None, (within, *(name.decode()[-40:] for name in names[-2:]))))
    # A token is a digest: what differs is in what it stands for.
    for start in range(max(0, at - 31), at + 1):
        for size in (20, 32):
            token, other_token = one[start : start + size], other[start : start + size]
            if token != other_token and token in tokens and other_token in other_tokens:
                return _first_difference(tokens[token], tokens, other_tokens[other_token], other_tokens, where)
    said = [re.sub(rb"[^ -~]+", b"?", text[max(0, at - 2) : at + 10]).decode() for text in (one, other)]
    return f"{where}: {said[0]} / {said[1]}"


def _kinds(causes: Counter[str]) -> Counter[str]:
    """Count causes by where they are, whatever is written there."""
    kinds: Counter[str] = Counter()
    for cause, count in causes.items():
        kinds[cause.split(": ")[0]] += count
    return kinds


def table(judgements: Iterable[Judgement]) -> str:
    """Return the tables for docs/soundness.md."""
    judgements = list(judgements)
    lines = [
        "| jax | hash seeds | lowerings | distinct programs | eligible | contradictions | unstable | lost skips"
        " | found at the second run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    reasons: Counter[str] = Counter()
    for each in judgements:
        reasons.update(each.reasons)
        lines.append(
            f"| {each.version} | {each.seeds} | {each.lowerings:,} | {each.programs:,}"
            f" | {each.eligible / each.lowerings:.1%}"
            f" | {len(each.contradictions)} | {len(each.unstable)} | {each.lost:,} ({each.lost / each.lowerings:.2%})"
            f" | {_share(each.found, each.repeated)} |"
        )
    total = sum(each.lowerings for each in judgements)
    lines.append(
        f"| all | | {total:,} | | {sum(each.eligible for each in judgements) / total:.1%}"
        f" | {sum(len(each.contradictions) for each in judgements)}"
        f" | {sum(len(each.unstable) for each in judgements)} | | |"
    )
    lines += ["", "| must be lowered because | lowerings |", "|---|---|"]
    short: Counter[str] = Counter()
    for reason, count in reasons.items():
        short[reason.partition(":")[0].replace("|", "/")] += count
    lines += [f"| {reason} | {count:,} |" for reason, count in short.most_common(20)]
    others = sum(count for _, count in short.most_common()[20:])
    if others:
        lines.append(f"| other reasons ({len(short) - 20}) | {others:,} |")
    changed = sum((each.changed for each in judgements), Counter[str]())
    compared = sum(each.compared for each in judgements)
    lines += ["", f"| changed by a lowering | of {compared:,} that were compared |", "|---|---|"]
    lines += [f"| `{name}` | {count:,} |" for name, count in changed.most_common()]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def show(folder: Path, judgement: Judgement) -> None:
    """Print what is wrong, and the causes of lost skips."""
    print(f"jax {judgement.version}: {judgement.lowerings:,} lowerings, {len(judgement.contradictions)} contradictions")
    for structure, pair in judgement.contradictions.items():
        print(f"CONTRADICTION of {structure}:")
        for record in pair:
            print(f"  {record}\n{_text(folder, record['program'])}")
    for record in judgement.unstable:
        print(f"UNSTABLE: {record}")
    for reason, count in judgement.reasons.most_common(40):
        print(f"  {count:7,} {reason}")
    print(f"  lost skips: {judgement.lost:,}")
    _show_causes(judgement.causes)
    print(f"  not found at the second run: {judgement.missing.total():,}")
    _show_causes(judgement.missing)


def _show_causes(causes: Counter[str]) -> None:
    examples = {cause.split(": ")[0]: cause for cause in causes}
    for kind, count in _kinds(causes).most_common(25):
        print(f"  {count:7,} {examples[kind]}")


def _text(folder: Path, program: str) -> str:
    """Return a program's text, if a jax that reads it is here."""
    path = folder / "programs" / program[:2] / program
    try:
        from jax._src.interpreters import mlir
        from jaxlib.mlir import ir

        with mlir.make_ir_context():
            return str(ir.Module.parse(zlib.decompress(path.read_bytes())))
    except Exception as error:  # noqa: BLE001 - of another version, or not written
        return f"{path} ({type(error).__name__})"


def write(page: Path, tables: str) -> None:
    """Replace the tables between the markers of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("records", type=Path)
    parser.add_argument("--page", type=Path, help="the page that gets the tables")
    options = parser.parse_args()
    folders = [path for path in options.records.iterdir() if (path / "records").is_dir()]
    folders.sort(key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])
    judgements = []
    for folder in folders:
        judgements.append(judge(folder))
        show(folder, judgements[-1])
    if options.page is not None:
        write(options.page, table(judgements))
    print(table(judgements))
    # Where hardly anything is eligible, the run shows nothing.
    if not judgements or any(
        each.contradictions or each.unstable or each.eligible < each.lowerings / 2 for each in judgements
    ):
        sys.exit("scripts/soundness: the digest is not sound, or hardly anything was eligible")


if __name__ == "__main__":
    main()
