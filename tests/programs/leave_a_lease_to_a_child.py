"""Take a lease, fork below Python as some libraries do, and end; the child keeps the connection."""

import ctypes
import os
import time
from pathlib import Path

from support.conversation import Conversation
from support.leasing import take
from support.places import Place

talk = Conversation(Place(Path(os.environ["ROOT_OF_PLACE"])))
talk.greet()
take(talk)
if ctypes.CDLL(None).fork() == 0:
    print("ready", flush=True)
    time.sleep(60)
os._exit(0)
