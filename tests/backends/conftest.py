"""Small tensors on few cores: more threads only get in each other's way (a minute instead of two seconds)."""

import torch

torch.set_num_threads(1)
