"""Builds all that a daemon needs to share entries with other machines."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from xcache.config.config import Config
from xcache.wire import protocol
from xcache.wire.names import Names
from xcached.host.reload import LiveSettings
from xcached.store.aliases import AliasRows
from xcached.store.histories import Histories
from xcached.store.intake import Intake
from xcached.store.store import Store
from xcached.store.uploads import Uploads, waiting
from xcached.store.writer import WriterThread
from xcached.tiers.bundle import InPlace
from xcached.tiers.identity import Identity
from xcached.tiers.keeping import Keeper
from xcached.tiers.managing import Manager
from xcached.tiers.outgoing import Outgoing, reader_of
from xcached.tiers.presence import Presence
from xcached.tiers.sending import Sender
from xcached.tiers.signers import Signers
from xcached.tiers.tiers import Tiers


class Sharing(NamedTuple):
    """The tiers, what is queued for them, and whose signatures count."""

    tiers: Tiers
    manager: Manager
    presence: Presence
    uploads: Uploads
    signers: Signers
    reading: sqlite3.Connection

    def describe(self) -> list[dict[str, protocol.Scalar]]:
        """Return the state of each tier, and how much waits to be uploaded there, for people."""
        return [each | {"waiting": waiting(self.reading, str(each["name"]))[0]} for each in self.tiers.describe()]

    def problems(self, config: Config) -> list[str]:
        """Return what keeps entries from being shared for lack of keys."""
        by_key = [remote for remote in config.tiers() if remote.trust != "tier"]
        read, written = (
            ", ".join(remote.public_url for remote in by_key if not getattr(remote, only))
            for only in ("writeonly", "readonly")
        )
        found = []
        if read and (why := self.signers.why_nobody()):
            found.append(f"nothing of {read} is used: {why}")
        if written and not config.has_signing_key:
            found.append(f"nothing is uploaded to {written}: no key signs here (`xcache key new NAME` makes one)")
        return found


def share(
    store: Store,
    settings: LiveSettings,
    writer: WriterThread,
    intake: Intake,
    aliases: AliasRows,
    histories: Histories,
    may_share: Callable[[int], bool],
    is_barred: Callable[[str], bool],
) -> Sharing:
    """Return what shares entries by the tiers of the settings; nothing has begun yet."""
    config = settings.now
    remotes = config.tiers()
    identity, names = Identity(settings), Names(config.namespace)
    outgoing = Outgoing(store.files, identity, names, config.namespace)
    keeper = Keeper(
        *(identity, names, config.namespace, writer, intake, aliases, histories, is_barred),
        is_in_place=store.files.is_elsewhere,
    )
    if config.bundles:
        store.files.elsewhere = InPlace(each.path for each in remotes if each.is_bundle).open
    uploads = Uploads(store, may_share, lambda: tiers.wake())
    sender = Sender(lambda: reader_of(store), uploads, writer, outgoing, keeper)
    tiers = Tiers(remotes, names, keeper, sender, lambda: settings.now.remote_timeout)
    kept_from = {each.public_url: each.no_upload_below for each in remotes if not each.readonly}
    histories.after_remember = uploads.note_history
    uploads.send_to(kept_from)
    writer.call(uploads.forget_others)
    manager, presence = Manager(tiers, names, config.namespace, identity), Presence(tiers, names, keeper)
    return Sharing(tiers, manager, presence, uploads, Signers(identity, remotes), store.database.reading)


def signers_of_before(settings: LiveSettings) -> Signers:
    """Return whose signatures count for entries that came from tiers which the settings no longer name."""
    return Signers(Identity(settings), ())
