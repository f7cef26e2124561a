"""What autocast computes in."""

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype that autocast now computes in on a device, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
