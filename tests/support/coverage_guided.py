"""Fuzz one target guided by coverage; needs atheris, which nothing else here needs.

PYTHONPATH=.:daemon:tests python tests/support/coverage_guided.py TARGET [-runs=N] [FOLDER]
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["xcache"]):
    from support import fuzzing


def main() -> None:
    target = sys.argv.pop(1)
    with fuzzing.checking(target) as check:

        def run(data: bytes) -> None:
            try:
                check(data)
            except fuzzing.Defect as defect:
                fuzzing.keep(target, defect.data)
                raise

        atheris.Setup(sys.argv, run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
