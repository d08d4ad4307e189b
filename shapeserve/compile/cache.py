"""Where torch keeps what it compiled: it must be writable before the first compile."""

from __future__ import annotations

import logging
import os
import tempfile

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

log = logging.getLogger("shapeserve.compile")

_ENV = "TORCHINDUCTOR_CACHE_DIR"


def ensure_cache_dir() -> str:
    """Return torch's cache directory, replaced by a fresh temporary one if it is not writable.

    A read-only or missing home otherwise surfaces as a PermissionError in the middle of the first
    compile.
    """
    wanted = os.environ.get(_ENV) or default_cache_dir()
    try:
        os.makedirs(wanted, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        fresh = tempfile.mkdtemp(prefix="shapeserve-inductor-")
        log.warning(
            "compile cache %s is not writable (%s); using %s, which the next start will not find. "
            "Set %s to a writable directory.",
            wanted,
            error,
            fresh,
            _ENV,
        )
        os.environ[_ENV] = fresh
        return fresh
