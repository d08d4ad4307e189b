"""Stands in for the haproxy binary; Ray starts this, and it becomes haproxy.

Ray 2.60 opens haproxy's statistics page and its Prometheus exporter on all interfaces, without a
password and without a setting for it; leaves haproxy behind when its manager is killed; and lets it
die of a Ctrl-C in the terminal while requests are in flight. So, before haproxy starts: those two
ports are moved to the loopback interface, the process gets a session of its own, is tied to the
life of its parent, and writes down its pid.

Run as ``python -I -S haproxy_guard.py BINARY PIDS PORTS ARGUMENTS...``: standard library only.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def keep_local(config: str, ports: list[str]) -> str:
    """Return haproxy's config with the binds of ``ports`` on 127.0.0.1 only."""
    return re.sub(
        rf"^(\s*bind )\*?:({'|'.join(map(re.escape, ports))})$",
        r"\g<1>127.0.0.1:\g<2>",
        config,
        flags=re.MULTILINE,
    )


def main(binary: str, pids: str, ports: str, *arguments: str) -> None:
    """Prepare this process and replace it by haproxy."""
    path = arguments[arguments.index("-f") + 1]
    with open(path) as file:
        config = file.read()
    with open(path, "w") as file:
        file.write(keep_local(config, ports.split(",")))
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\n")
    with contextlib.suppress(OSError):  # already the leader of one
        os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
