"""Send large puts, and wait until each is answered and the daemon has hung up."""

import os
from pathlib import Path

from support.conversation import Conversation, key_of
from support.places import Place

from xcache.config import config
from xcache.wire import protocol

place = Place(Path("/nowhere"))
place.socket = config.load().socket
talk = Conversation(place)
talk.greet()
payload = os.urandom(8_000_000)
puts = [talk.begin_put(key_of(str(n)), payload) for n in range(8)]
# The daemon has answered everything before it by then.
answers = talk.answers([talk.say(protocol.AskStatus())])
print("sent", flush=True)
answers |= talk.answers([put for put in puts if put not in answers])
assert {answers[put] for put in puts} == {protocol.Stored(True)}, answers
assert talk.was_hung_up_on()
print("answered")
