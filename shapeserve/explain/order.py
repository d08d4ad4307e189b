"""Whether the modules of ``compile.custom_ops`` can be imported when a service imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from shapeserve.errors import ModelError

_CODE = """
import sys
from shapeserve.errors import ModelError
from shapeserve.models.imports import import_custom_ops
try:
    import_custom_ops(sys.argv[1:])
except ModelError as error:
    sys.exit(str(error))
"""


def check_order(modules: Sequence[str]) -> None:
    """Import them before the model, as a service does.

    In a process of its own: here the comparison without them loads the model first, so that a
    module that needs what the model defines would be found to work.

    Raises:
        ModelError: one cannot be imported.
    """
    paths = [path or os.getcwd() for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *modules],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ModelError(done.stderr.strip().splitlines()[-1])
