"""``python -m shapeserve.metrics`` prints docs/metrics.md."""

import sys

from shapeserve.metrics.docs import render_docs

sys.stdout.write(render_docs())
