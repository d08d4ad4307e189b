"""Runs what image_steps built, as a container runtime would: namespaces of its own, no network.

Kubernetes' strict settings: a read-only root, tmpfs where something is written, no capabilities.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from image_steps import DEFAULT_PATH, Builder
from service_process import eventually


class Container:
    """A started command; ``stop`` ends everything in it.

    Args:
        image: what was built.
        command: to start, process 1 of the container.
        writable: directories that are volumes.
        environment: further variables.
        log: where its output goes.
    """

    def __init__(
        self,
        image: Builder,
        command: Sequence[str],
        *,
        writable: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._image = image
        self._environment = {"PATH": DEFAULT_PATH, **image.env, **environment}
        root = shlex.quote(str(image.root))
        script = [
            "ip link set lo up",
            f"mount --rbind {root} {root}",
            f"mount -o remount,bind,ro {root}",
            *(f"mount -t tmpfs -o mode=1777 tmpfs {root}{place}" for place in writable),
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
            f"mount -t proc proc {root}/proc",
            f'exec {shlex.join(self._enter())} "$@"',
        ]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"),
                    *("sh", "-euc", "\n".join(script), "sh", *command),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def _enter(self) -> list[str]:
        """Return what becomes the user of the image, without capabilities, in its root."""
        user, _, group = self._image.user.partition(":")
        return [
            *("chroot", str(self._image.root), "/usr/bin/setpriv"),
            *(f"--reuid={user}", f"--regid={group}", "--clear-groups"),
            *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
            *("sh", "-c", 'cd "$0" && exec "$@"', self._image.directory),
        ]

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a further command in it, as ``docker exec`` or a health check does."""
        return subprocess.run(
            [
                *("nsenter", f"--target={self._first()}", "--mount", "--net", "--pid"),
                *self._enter(),
                *command,
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def _first(self) -> int:
        """Return process 1 of the container, as this machine numbers it."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return int(eventually(lambda: children.read_text().split(), 10)[0])

    def terminate(self) -> int:
        """Send SIGTERM to process 1, as a runtime does; return its exit status."""
        os.kill(self._first(), signal.SIGTERM)
        return self.process.wait(60)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        with contextlib.suppress(AssertionError, OSError):  # it has ended
            os.kill(self._first(), signal.SIGKILL)
        self.process.kill()
        self.process.wait(60)
