"""Models, and the techniques that change them."""

import logging

# transformers and PEFT import torchao where it is installed; it tells of kernels that fit another CUDA, and of itself
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
