"""Measures what batches and variants cost, in the engine that serves them.

``choice`` picks the batches, ``session`` measures.
"""
