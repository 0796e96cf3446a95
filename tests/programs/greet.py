"""Greet the daemon; a test appends what is said after that, and fills the list ``said``."""

import json  # noqa: F401  # like the others that are not used here, for what comes after
import os
import sys
from pathlib import Path

from support.conversation import Conversation, get_message, key_of  # noqa: F401
from support.places import Place, digest  # noqa: F401

from xcache.wire import commands, protocol  # noqa: F401

KEY = key_of("a")


def speaker():
    place = Place(Path(sys.argv[1]))
    place.socket = Path(os.environ["XCACHE_SOCKET"])
    talk = Conversation(place)
    talk.greet()
    return talk


talk = speaker()


def text(answer):
    return type(answer).__name__ + (f": {answer.kind}" if isinstance(answer, protocol.Refused) else "")


said = []
