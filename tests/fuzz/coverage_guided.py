"""One target, guided by what code is reached, for who has atheris installed: nothing else here needs it.

PYTHONPATH=.:daemon:tests:tests/client:tests/daemon python tests/fuzz/coverage_guided.py TARGET [-runs=N] [FOLDER]
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["xcache"]):
    import fuzzing


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
