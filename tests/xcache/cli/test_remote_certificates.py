"""The commands name what is wrong with the certificate of a real Redis or web server."""

from __future__ import annotations

from support.command_line import Shell
from support.conversation import talking
from support.places import until
from support.sharing import CONTENT, KEY, host, put_and_upload

from xcache.cli.remote_asking import ADVICE
from xcache.wire import protocol

REFUSED = "the certificate of the server is not accepted: certificate has expired"


def test_a_store_whose_authority_is_named_is_used(rediss_engine):
    where = rediss_engine.at("certificates")
    with host(where.url, **where.environment) as place:
        here = Shell(place)
        assert ": written, read back and removed in " in here.say("remote", "check")
        put_and_upload(place)
        assert here.json("remote", "ls")["matched"] == 1
        assert ": 0 of 0 found (0 B), 1 uploaded " in here.say("status")


def test_a_store_that_is_not_accepted_is_said_in_one_sentence(rediss_engine, impostors):
    where = rediss_engine.at_port(impostors["expired"].port)
    with host(where.url, **where.environment) as place:
        here = Shell(place)
        found, advice = here.say("remote", "check", code=1).splitlines()[1:]
        assert found == f"wrong rediss://127.0.0.1:{impostors['expired'].port}/0: {REFUSED} (untrusted)"
        assert advice.strip() == ADVICE["untrusted"]
        with talking(place) as talk:
            # The local store takes it all the same.
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: f"failing: {REFUSED}" in here.say("status"))
        (one,) = here.json("status")["remotes"]
        assert (one["state"], one["problem"], one["waiting"]) == ("failing", REFUSED, 1)


def test_a_file_of_authorities_that_is_missing_is_said(rediss_engine, https_engine, tmp_path):
    for engine in (rediss_engine, https_engine):
        with host(engine.at("x").url, SSL_CERT_FILE=str(tmp_path / "missing.pem")) as place:
            said = Shell(place).say("remote", "check", code=1)
            assert f"SSL_CERT_FILE names {tmp_path}/missing.pem, which cannot be used: No such file" in said
