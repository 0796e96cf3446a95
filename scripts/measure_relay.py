"""A TCP relay that delivers late, as a long link does: ``measure_relay.py PORT TARGET SECONDS``, of a round trip."""

from __future__ import annotations

import asyncio
import sys

_BYTES = 256 * 1024


async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Copy from one to the other, each part after these seconds, however many are under way."""
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def deliver() -> None:
        while True:
            due, part = await parts.get()
            await asyncio.sleep(due - loop.time())
            if not part:
                break
            writer.write(part)
            await writer.drain()
        writer.close()

    delivering = loop.create_task(deliver())
    part = b"first"
    while part:
        part = await reader.read(_BYTES)
        parts.put_nowait((loop.time() + seconds, part))
    await delivering


async def main(port: int, target: int, round_trip: float) -> None:
    """Relay connections of loopback from one port to another."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Making a connection takes a round trip, too.
        await asyncio.sleep(round_trip)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", target)
            await asyncio.gather(late(reader, back, round_trip / 2), late(there, writer, round_trip / 2))
        except OSError:
            writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
