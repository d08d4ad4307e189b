"""``python -m shapeserve.config`` prints docs/configuration.md."""

import sys

from shapeserve.config.docs import render_docs

sys.stdout.write(render_docs())
