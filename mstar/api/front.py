"""The front process: HTTP server and conductor on one asyncio loop. Never imports torch.

Started by the supervisor with the listening socket as an inherited descriptor, so that a restarted front keeps its port. SIGTERM drains:
new requests get 503, running ones may finish for `shutdown_timeout_s`, then the ranks are told to stop. A second SIGTERM ends now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from pathlib import Path

import uvloop

from mstar import memory
from mstar.api.app import create_app
from mstar.api.server import serve_app
from mstar.api.text import TextProcessor
from mstar.conductor.conductor import Conductor
from mstar.conductor.metrics import Metrics
from mstar.conductor.registry_file import RegistryFile
from mstar.errors import ConfigError
from mstar.launch import FrontLaunch, Heartbeat, read_front_launch

BEAT_S = 0.2

log = logging.getLogger(__name__)


def main() -> int:
    """Run the front to its end."""
    launch = read_front_launch()
    logging.basicConfig(level=launch.config.log_level.upper(), format="%(asctime)s front %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends the front in order
    try:
        uvloop.run(_serve(launch))
    except ConfigError as error:
        log.error("%s", error)
        return 2
    return 0


async def _serve(launch: FrontLaunch) -> None:
    beating = asyncio.create_task(_beat())
    config = launch.config
    metrics = Metrics(config.base_name)
    registry_file = RegistryFile(Path(launch.registry_path), launch.run)
    conductor = Conductor(config, launch.front_endpoint, metrics, registry_file, secret=launch.secret)
    text = await asyncio.to_thread(
        TextProcessor.load, config.tokenizer or config.model, config.chat_template, vocab_size=conductor.vocab_size
    )
    conductor.use_tokens(text.token_id)
    await conductor.start()
    app = create_app(conductor, text, config, metrics)
    memory.settle()
    stop, now = asyncio.Event(), asyncio.Event()
    _on_sigterm(conductor, stop, now, config.shutdown_timeout_s)
    sock = socket.socket(fileno=launch.listen_fd)
    announcing = asyncio.create_task(_announce(conductor, launch, sock))
    serving = asyncio.create_task(
        serve_app(
            app,
            config.host,
            config.port,
            sock=sock,
            stop=stop,
            shutdown_timeout_s=2.0,
            slow_client_timeout_s=config.slow_client_timeout_s,
        )
    )
    ending = asyncio.create_task(now.wait())
    try:
        await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        for task in (announcing, serving, ending):
            task.cancel()
        await asyncio.gather(announcing, serving, ending, return_exceptions=True)
        await conductor.stop_ranks()
        beating.cancel()


async def _beat() -> None:
    heartbeat = Heartbeat()
    while True:
        heartbeat.beat()
        await asyncio.sleep(BEAT_S)


def _on_sigterm(conductor: Conductor, stop: asyncio.Event, now: asyncio.Event, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    async def drain() -> None:
        conductor.drain()
        log.info("stopping: new requests get 503, running ones may finish for %g s", timeout_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(conductor.finished(), timeout_s)
        stop.set()

    def on_signal() -> None:
        if draining:
            now.set()
        else:
            draining.append(asyncio.ensure_future(drain()))

    loop.add_signal_handler(signal.SIGTERM, on_signal)


async def _announce(conductor: Conductor, launch: FrontLaunch, sock: socket.socket) -> None:
    """Say what is going on while the ranks start, and when requests are served."""
    host, port = sock.getsockname()[:2]
    shown, every_s = time.monotonic(), 2.0
    while not conductor.ready.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(conductor.ready.wait(), 0.2)
        if time.monotonic() - shown > every_s and not conductor.ready.is_set():
            shown, every_s = time.monotonic(), min(2 * every_s, 60.0)
            log.info("%s", conductor.not_ready_reason())
    models, more = conductor.served_models(limit=8)
    some = ", ".join(model.id for model in models) + (" and more" if more else "")
    log.info("ready after %.1f s on http://%s:%d, serving %s", time.time() - launch.started_at, host, port, some)


if __name__ == "__main__":
    sys.exit(main())
