"""Replace jaxlib's library as pip does, and describe the toolchain again."""

import shutil
from pathlib import Path

import jaxlib
from jaxlib import xla_client  # noqa: F401  # maps the library

from xcache.errors import UncacheableError
from xcache.keys import toolchain

folder = Path(jaxlib.__file__).parent
library = max(folder.glob("*.so"), key=lambda path: path.stat().st_size)
before = toolchain.describe("cpu", folder, "1.0", None)
# As pip does: the old file goes, a new one takes its name; this process still has the old one mapped.
library.rename(str(library) + ".old")
shutil.copyfile(str(library) + ".old", library)
try:
    toolchain.describe("cpu", folder, "1.0", None)
except UncacheableError as error:
    print(error)
