"""The progress bar of an epoch, with the memory in use."""

import psutil
import torch
from tqdm import tqdm


class ProgressBar(tqdm):
    """A progress bar that ends with the memory in use. It reads the memory only when it is drawn.

    Args:
        device: The device of the run.
    """

    def __init__(self, *args, device: torch.device, **options):
        self._device = device
        super().__init__(*args, **options)

    @property
    def format_dict(self) -> dict:
        """Return the parts of the line that tqdm draws."""
        return super().format_dict | {"postfix": used_memory(self._device)}


def used_memory(device: torch.device) -> str:
    """Return the memory in use now, without waiting for the device; empty where it is unknown."""
    if device.type == "cuda":
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return f"{held / 1e9:.2f} GB in use, {reserved / 1e9:.2f} GB reserved"
    return f"{psutil.Process().memory_info().rss / 1e9:.2f} GB in use" if device.type == "cpu" else ""
