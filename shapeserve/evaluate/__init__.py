"""What compiling is worth: measurements of a model, and what they add up to.

``session`` measures, ``account`` adds up, ``report`` draws.
"""
