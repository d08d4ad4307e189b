"""``shapeserve tune``: each group of its options in a module, with what they do.

``inputs`` reads traffic, ``fitting`` says what is asked of the proposal, ``output`` writes and
prints it, ``apply`` rolls it out, ``watch`` does all that again and again. A further option goes
into the group it belongs to.
"""

from shapeserve.cli.tune.command import tune_command

__all__ = ["tune_command"]
