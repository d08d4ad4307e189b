"""What compiling is worth: measurements of a model, and what they add up to.

``amortize`` is arithmetic alone; ``session`` measures; ``report`` draws.
"""
