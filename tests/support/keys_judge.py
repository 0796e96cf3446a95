"""The judge of the keys campaign: equal keys must come with equal code."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from support.campaigns import Campaign
from support.keys_askers import Askers

# XLA orders the arguments of an outlined loop by chance.
NOT_DETERMINISTIC = {"scan"}
# The reasons for which a program may have no key.
NO_KEY = {
    "TPU devices without the first": "a warm read crashes there",
    "jax_enable_compilation_cache is off": "a program that wants no cache",
    "profile-guided optimization": "what XLA makes of a profile changes from run to run",
    "libtpu's flags from files or variables": "libtpu has read them before, and they may have changed",
    "a file that cannot be read": "an option of XLA's was set to a file that is not there",
}
# Why keys differ that came with the same code, by the components that differ.
_UNUSED = "an option that made no difference to these programs on this platform"
WHY = {
    "flags": "a flag that was set when XLA had read its flags, or of another library",
    "flags and options": _UNUSED,
    "options": _UNUSED,
    "platform": "more devices, and as many threads",
    "options and platform": "another device, which is in the options",
    "program": "jax hands XLA another program, of which it makes the same",
    "options and program": "jax hands XLA another program with other options",
}


class Judge:
    """Compares keys with code, over all that was compiled."""

    def __init__(self, campaign: Campaign, askers: Askers) -> None:
        self._campaign = campaign
        self._askers = askers
        # For each key: the program, and who made what of it.
        self._by_key: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._programs: dict[str, str] = {}
        self._hlo: dict[str, str] = {}
        self._usual: dict[str, dict[str, Any]] = {}
        self._questions: dict[str, dict[str, Any]] = {}
        self._refused: list[str] = []
        self._no_key: dict[str, list[str]] = defaultdict(list)
        self._more_keys: dict[str, list[str]] = defaultdict(list)
        self._noisy = set(NOT_DETERMINISTIC)

    def take(self, name: str, question: dict[str, Any], answer: dict[str, Any]) -> None:
        """Note what came of one question."""
        if "answers" not in answer:
            if "options" in question or len(question.get("environ", {})) > 1:
                return self._take_apart(name, question)
            self._refuse(name, f"{name}: {answer.get('refused')}")
            return None
        for options, results in zip(question.get("options", [{}]), answer["answers"], strict=True):
            self._take_results(f"{name} {options}" if options else name, question | {"options": [options]}, results)
        return None

    def _take_results(self, name: str, question: dict[str, Any], results: dict[str, Any]) -> None:
        self._campaign.fault()
        self._questions[name] = question
        differing, same_code = set(), True
        for program, result in results.items():
            if "refused" in result:
                self._refuse(name, f"{name} {program}: {result['refused']}")
                continue
            if "key" not in result:
                self._note_no_key(f"{name}: {program}", result.get("no key", "xcache was not asked"))
            if "code" not in result:
                continue
            self._campaign.checked(1)
            if name == "as usual":
                self._usual[program] = result
            usual = self._usual.get(program, result)
            same_code = same_code and result["hlo"] == usual["hlo"]
            if "key" in result:
                self._by_key[result["key"]][result["code"]].append(name)
                self._programs[result["key"]] = program
                self._hlo[result["code"]] = result["hlo"]
                parts = usual.get("components", {})
                differing |= {part for part, digest in result["components"].items() if digest != parts.get(part)}
        if differing and same_code:
            self._more_keys[" and ".join(sorted(differing))].append(name)

    def _refuse(self, name: str, text: str) -> None:
        self._refused.append(text)
        if name == "as usual":
            self._campaign.problem("other problems", f"refused although nothing is changed: {text}")

    def _note_no_key(self, who: str, reason: str) -> None:
        """Count a program that has no key, which needs one of the reasons listed."""
        why = next((listed for listed in NO_KEY if listed in reason), None)
        if why is None or who.startswith("as usual"):
            self._campaign.problem("other problems", f"{who}: no key: {reason}")
        else:
            self._no_key[why].append(who)

    def _take_apart(self, name: str, question: dict[str, Any]) -> None:
        """Ask again for each half: something in it ends the process or makes jax refuse."""
        if len(question.get("options", [])) > 1:
            halves = [question | {"options": half} for half in _halves(question["options"])]
        elif len(question.get("environ", {})) > 1:
            halves = [question | {"environ": dict(half)} for half in _halves(list(question["environ"].items()))]
        else:
            self._refuse(name, f"{name} {question}")
            return
        for number, half in enumerate(halves):
            self.take(f"{name}/{number}", half, self._askers.ask(half))

    def conclude(self) -> None:
        """Say what was seen; equal keys with different code are what must not be."""
        for key, codes in self._by_key.items():
            if len(codes) > 1 and self._differs(key, codes):
                who = "; ".join(f"{', '.join(names[:3])}" for names in codes.values())
                self._campaign.problem("wrong loads", f"{self._programs[key]}: one key and several codes: {who}")
        note = self._campaign.note
        for parts, names in sorted(self._more_keys.items()):
            kinds = Counter(name.split()[0] for name in names)
            kinds_of = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
            note(f"other {parts}, same HLO: {len(names)} ({kinds_of}): {WHY.get(parts, 'see the report')}")
        for reason, who in sorted(self._no_key.items()):
            note(f"no key: {len(who)}: {reason} ({NO_KEY[reason]})")
        note(f"refused by jax or XLA, or ended the process: {len(self._refused)}")
        note(f"not deterministic in XLA itself, compared by HLO: {', '.join(sorted(self._noisy)) or 'none'}")

    def report(self) -> None:
        """Write down all that was seen until now, if somebody wants to read it."""
        if path := os.environ.get("KEYS_CAMPAIGN_REPORT"):
            several = {self._programs[key]: codes for key, codes in self._by_key.items() if len(codes) > 1}
            listed = {"more keys": self._more_keys, "refused": self._refused, "several codes": several}
            listed |= {
                "no key": self._no_key,
                "problems": self._campaign.problems,
                "questions": list(self._questions),
                "counts": self._campaign.counts,
            }
            Path(path).write_text(json.dumps(listed, indent=1))

    def _differs(self, key: str, codes: dict[str, list[str]]) -> bool:
        """Return whether the codes of a key differ by more than XLA's code does from one run to the next."""
        program = self._programs[key]
        asked = self._questions[min(names[0] for names in codes.values())]
        if program not in self._noisy and self._is_noisy(program, asked):
            self._noisy.add(program)
        if program in self._noisy:
            return len({self._hlo[code] for code in codes}) > 1
        return True

    def _is_noisy(self, program: str, question: dict[str, Any]) -> bool:
        """Return whether XLA makes several codes when the same is asked again and again."""
        seen = set()
        for _ in range(8):
            seen.add(self._askers.ask(question | {"programs": [program]})["answers"][0][program]["code"])
            if len(seen) > 1:
                return True
        return False


def _halves(some: list[Any]) -> list[list[Any]]:
    middle = len(some) // 2
    return [some[:middle], some[middle:]]
