"""The front's side of workers on other machines: the address where they join.

Opens once the workers of this machine are up: a guest is compared with them, not they
with a guest.
"""

from __future__ import annotations

import asyncio
import logging

import zmq

from headwater.app.fleet_plan import plan_endpoint
from headwater.app.secret_file import read_secret
from headwater.app.settings import Settings, local_roles
from headwater.core.errors import ConfigError
from headwater.router.service import Router
from headwater.transfer.joining import JoinListener
from headwater.transfer.peer import FleetKeys

log = logging.getLogger("headwater")


async def let_join(settings: Settings, router: Router) -> None:
    """Until cancelled, if the settings name an address; else it returns at once.

    Raises ConfigError when it cannot listen there.
    """
    fleet = settings.fleet
    if fleet.control_listen is None or fleet.secret_file is None:
        return
    keys = FleetKeys.of(read_secret(fleet.secret_file))
    if local_roles(settings):
        await router.wait_ready()
    try:
        listener = JoinListener(
            plan_endpoint(fleet.control_listen, "fleet.control_listen"),
            keys,
            router.add_worker,
            silent_s=fleet.joined_silent_s,
        )
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on fleet.control_listen {fleet.control_listen}: {error.strerror}"
        ) from None
    log.info("workers may join at %s", listener.endpoint)
    try:
        await asyncio.Event().wait()
    finally:
        await listener.close()
