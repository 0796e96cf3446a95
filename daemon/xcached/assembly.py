"""Builds the parts of a daemon around its store, and wires them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from xcache.config.config import Config
from xcache.errors import ConfigError
from xcache.wire import protocol
from xcache.wire.ownership import is_signer
from xcached.caller import Caller
from xcached.host.metrics import Metrics
from xcached.host.reload import LiveSettings
from xcached.requests.administration import Administration
from xcached.requests.aliases import AliasRequests
from xcached.requests.announcements import Announcements
from xcached.requests.fetches import Fetches
from xcached.requests.fleet import Fleet
from xcached.requests.gets import Gets
from xcached.requests.greeting import Greeting
from xcached.requests.inspection import Inspection
from xcached.requests.leases import Leases
from xcached.requests.loads import Loads
from xcached.requests.lookup import Lookup
from xcached.requests.patience import Patience
from xcached.requests.pinning import Pinning
from xcached.requests.predictions import Predictions
from xcached.requests.presence import PresenceRequests
from xcached.requests.process_ends import ProcessEnds
from xcached.requests.programs import Programs
from xcached.requests.puts import Puts
from xcached.requests.remotes import RemoteRequests
from xcached.requests.removals import Removals
from xcached.requests.runs import RunRequests
from xcached.requests.service import Service
from xcached.requests.strikes import Strikes
from xcached.requests.transfers import TransferRequests
from xcached.requests.trust import ROOT, Trust
from xcached.requests.watchers import Watchers
from xcached.store.aliases import AliasRows
from xcached.store.evictor import Evictor
from xcached.store.histories import Histories
from xcached.store.intake import Intake
from xcached.store.ledger import Ledger
from xcached.store.limits import Limits
from xcached.store.quarantine import Quarantine
from xcached.store.store import Store
from xcached.store.writer import WriterThread
from xcached.toolchains.rows import ToolchainRows
from xcached.toolchains.toolchains import Toolchains

if TYPE_CHECKING:
    from xcached.tiers.signers import Signers
    from xcached.tiers.transfers import Transfers

logger = logging.getLogger("xcached")

# Seconds to wait, when the daemon stops, for a check of files on a slow file system.
_LAST_CHECK_SECONDS = 2.0


def limits_of(config: Config, *, shared: bool) -> Limits:
    """Return the limits that the settings give a store; a quota only where users share it."""
    quota = config.user_quota if shared else 0
    return Limits(
        config.max_size, quota, config.max_entries, config.max_age, config.min_free, max_ledger=config.max_ledger
    )


def assemble(
    store: Store,
    settings: LiveSettings,
    trust: Trust,
    stop: Callable[[str], None],
    restart: Callable[[str], None],
    connections: Callable[[], int],
    callers: Callable[[], Iterable[Caller]],
) -> Service:
    """Return a service that answers requests on the running loop.

    ``restart`` restarts the daemon, which then replaces a damaged store; ``connections`` returns how many are open, and
    ``callers`` whose they are.
    """
    loop = asyncio.get_running_loop()

    def damaged(error: Exception) -> None:
        store.database.note_damage()
        restart(f"the database is damaged: {error}")

    def damaged_behind(error: Exception) -> None:
        loop.call_soon_threadsafe(damaged, error)

    quarantine = Quarantine(
        store,
        settings.now.dir / "quarantine",
        may_judge=trust.may_change,
    )
    histories, ledger = Histories(store), Ledger(store)
    # The toolchains are built below; the writer thread, which asks for the stale ones, starts after them.
    evictor = Evictor(
        store, stale=lambda: toolchains.useless(), trim_other_data=(quarantine.trim, histories.trim, ledger.trim)
    )
    writer = WriterThread(store, damaged_behind, evictor)
    writer.call(quarantine.trim)
    intake = Intake(store.files, writer)
    strikes = Strikes(store, writer, quarantine)
    endings = ProcessEnds(loop)
    rows = ToolchainRows(store)
    toolchains = Toolchains(
        rows,
        writer,
        grace=lambda: settings.now.stale_grace,
        reads=trust.reads,
        accounts=() if trust.shared else (os.getuid(), ROOT),
    )
    alias_rows = AliasRows(store, trust.reads)
    sharing = None
    if settings.now.has_tiers:
        # Without tiers none of this is imported.
        from xcached.tiers.sharing import share

        sharing = share(
            store, settings, writer, intake, alias_rows, histories,
            may_share=trust.may_share, is_barred=lambda digest: strikes.bars(digest, os.getuid()),
        )  # fmt: skip
    trust.signers = sharing.signers if sharing else _signers_of_before(store, settings)
    lookup = Lookup(store, trust, quarantine, strikes, endings, toolchains, writer)
    patience = Patience(lambda: settings.now.remote_timeout)
    fleet = Fleet(sharing.tiers, trust.may_share, patience, loop.call_soon_threadsafe) if sharing else None
    leases = Leases(trust.reads, lookup.found, lookup.expected_seconds, loop.call_later, fleet)

    def remotes() -> list[dict[str, protocol.Scalar]]:
        return sharing.describe() if sharing else []

    def transfers() -> Transfers:
        # Only the command line needs this, and seldom.
        from xcached.tiers.transfers import Transfers

        return Transfers(
            store, settings, writer, intake, alias_rows, histories,
            is_barred=lambda digest: strikes.bars(digest, os.getuid()), to_stay_free=lambda: evictor.shortage.seen[1],
        )  # fmt: skip

    def trust_signers() -> None:
        from xcached.tiers.sharing import signers_of_before

        trust.signers = trust.signers or signers_of_before(settings)

    fetches = None
    if sharing is not None:
        fetches = Fetches(
            sharing.tiers, lookup.expected_seconds, lambda: settings.now.remote_timeout, patience,
            loop.call_soon_threadsafe, loop.call_later, shared=trust.shared,
        )  # fmt: skip
    watchers = Watchers(store, settings, leases, trust, callers, loop.call_later)
    runs = RunRequests(ledger, writer, trust, watchers, endings)
    loads = Loads(endings, strikes, quarantine, writer, lookup.note_use)
    transfer_requests = TransferRequests(store, settings, lookup, trust, transfers, trust_signers)
    clear_other_data = quarantine.clear, histories.clear, alias_rows.clear, ledger.clear
    handlers = (
        Gets(lookup, leases, fetches).handlers
        | Puts(store, settings, writer, intake, strikes, leases).handlers
        | loads.handlers
        | Predictions(histories, lookup, writer, trust.signer_uids, fetches).handlers
        | runs.handlers
        | Programs(store, lookup).handlers
        | AliasRequests(alias_rows, lookup, writer).handlers
        | Announcements(toolchains).handlers
        | Inspection(store, evictor.shortage, ledger, settings, writer, leases, trust, connections, remotes).handlers
        | Pinning(store, evictor.pins, settings, writer, trust).handlers
        | Removals(store, writer, trust, rows, strikes, clear_other_data).handlers
        | Administration(store, evictor, writer, trust, watchers, stop).handlers
        | RemoteRequests(sharing, writer, trust).handlers
        | transfer_requests.handlers
        | PresenceRequests(lookup, sharing).handlers
        | watchers.handlers
    )

    metrics = _metrics(store, settings.now, leases, connections)

    def take_limits(new: Config) -> None:
        limits = limits_of(new, shared=trust.shared)
        writer.call(lambda: evictor.set_limits(limits))

    def finish(seconds: float) -> bool:
        if sharing is not None:
            sharing.tiers.close()
        toolchains.close(_LAST_CHECK_SECONDS)
        if metrics is not None:
            metrics.close()
        # Each waits for those after it; a large import must not keep the others' puts from being written.
        transfers_are_done = transfer_requests.close(seconds)
        done = intake.close(seconds) and writer.stop(seconds) and transfers_are_done
        if done:
            store.close()
        return done

    settings.when_changed(take_limits)
    writer.start()
    if sharing is not None:
        sharing.tiers.start()
    welcome = Greeting(settings, sharing.problems if sharing else lambda _: [])
    observe = None if metrics is None else metrics.observe
    return Service(handlers, leases, runs, loads, watchers, fetches, welcome, damaged, finish, observe)


def _signers_of_before(store: Store, settings: LiveSettings) -> Signers | None:
    """Return whose signatures count, if entries are here that came from tiers."""
    if not any(is_signer(uid) for (uid,) in store.database.reading.execute("SELECT uid FROM users")):
        return None
    from xcached.tiers.sharing import signers_of_before

    return signers_of_before(settings)


def _metrics(store: Store, config: Config, leases: Leases, connections: Callable[[], int]) -> Metrics | None:
    """Return the server of metrics, if the settings want one and it can be had: nothing else depends on it."""
    if not config.metrics:
        return None

    def state() -> dict[str, float]:
        return {
            "max_size": store.limits.max_size,
            "connections": connections(),
            "compiles": len(leases),
            "waiting": leases.waiting,
        }

    try:
        return Metrics(config.metrics, store.database.path, state)
    except ConfigError as error:
        logger.error("%s", error)
        return None
