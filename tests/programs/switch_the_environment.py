"""Put another environment into the place of this program's, and describe the toolchain again."""

import sys
import time
from pathlib import Path

import jaxlib
from jaxlib import xla_client  # noqa: F401  # maps the library

from xcache.errors import UncacheableError
from xcache.keys import toolchain

# The other environment is older than this process.
toolchain.process_began = lambda: time.time() + 60
folder = Path(jaxlib.__file__).parent
toolchain.describe("cpu", folder, "1.0", None)
root = folder.parent.parent
if sys.argv[1] == "link":
    (root / "next").symlink_to("other")
    (root / "next").rename(root / "site")
else:
    (root / "site").rename(root / "before")
    (root / "other").rename(root / "site")
try:
    toolchain.describe("cpu", folder, "1.0", None)
except UncacheableError as error:
    print(error)
