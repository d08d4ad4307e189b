"""Load and offline benchmarks of shapeserve against hand-written services. See README.md."""
