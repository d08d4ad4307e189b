"""Named by ``compile.custom_ops``: makes an operator known to the compiler."""

import remedy_modules  # noqa: F401  (defines the operator)
import torch

torch.library.register_fake("remedy::declared", torch.empty_like)
